"""Generated scenes of a folder's pictures, with shapes and words among them, on photographs, and a question each.

    FOLDER/pictures/        cat.png and others, transparent around the thing; a file's name is what the thing is called
    FOLDER/photographs/     grounds to learn from
    FOLDER/new_photographs/ grounds of held-out scenes that are new

Kinds, sizes and turns are those of `scenes`. Three of four things are pictures, and the others shapes, whose colours
are asked about. In a scene that is *new* the picture asked about stands in the one of nine places where it never
stands in training; shapes and words are new as in `scenes`. Files of more than `LARGEST` pixels a side are reduced to
that, so that many of them stay in memory. `recipes/make_pictures.py` makes such a folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from fathom.vision.scenes import (
    COLOURS,
    FONTS,
    INKS,
    MOST,
    NEW_FONT,
    NUMBERS,
    PLACES,
    SHAPES,
    Scene,
    Thing,
    asked_of,
    colour_of,
    draw_shape,
    near_to,
    pair_of,
    plural,
    question_about,
    word_of,
)

FEWEST = 9  # pictures: each has one place that training leaves out, and every place then has one
LARGEST = 1024
RIM = 0.15  # of a shape, over its radius
SHAPED = 0.25  # share of things that are shapes
PICTURES, PHOTOGRAPHS, NEW_PHOTOGRAPHS = "pictures", "photographs", "new_photographs"
FILES = (".jpeg", ".jpg", ".png", ".webp")


@dataclasses.dataclass(frozen=True)
class Album:
    """The files of a folder's pictures and photographs, in order."""

    folder: Path
    pictures: tuple[str, ...]
    photographs: tuple[str, ...]
    new_photographs: tuple[str, ...]

    @classmethod
    def read(cls, folder: str | Path) -> Album:
        """The album in a folder.

        Raises:
            FileNotFoundError: a part that is missing or has no image.
            ValueError: too few pictures, or one with the name of a drawn shape or of another picture.
        """
        parts = {}
        for part in (PICTURES, PHOTOGRAPHS, NEW_PHOTOGRAPHS):
            place = Path(folder) / part
            parts[part] = tuple(sorted(path.name for path in place.glob("*") if path.suffix.lower() in FILES))
            if not parts[part]:
                raise FileNotFoundError(f"{place}: no images; recipes/make_pictures.py makes a folder of pictures")
        album = cls(Path(folder), **parts)
        if len(album.names) < FEWEST:
            raise ValueError(f"{folder}/{PICTURES}: {len(album.names)} pictures; use at least {FEWEST}")
        called = [name.casefold() for name in album.names]
        drawn = {*SHAPES, *(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)}
        for file, name in zip(album.pictures, called):
            if not name or name in drawn or called.count(name) > 1:
                other = "a drawn shape" if name in drawn else "another picture"
                said = f"{other} is called {name!r} too" if name else "its name says nothing"
                raise ValueError(f"{folder}/{PICTURES}/{file}: {said}; rename it")
        return album

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """What the pictures are called."""
        return tuple(" ".join(Path(file).stem.replace("_", " ").split()) for file in self.pictures)

    def digest(self) -> str:
        """Hex digest of names and pixels. Raises ValueError for a file that cannot be read."""
        made = hashlib.sha256()
        for part, mode in ((PICTURES, "RGBA"), (PHOTOGRAPHS, "RGB"), (NEW_PHOTOGRAPHS, "RGB")):
            for file in getattr(self, part):
                made.update(f"{part}/{file}".encode() + opened(self.folder / part / file, mode).tobytes())
        return made.hexdigest()[:16]

    def thing(
        self, rng: Random, place: int, new: bool = False, without: Thing | None = None, shaped: float = SHAPED
    ) -> Thing:
        """A picture or a shape in that place which training leaves out or has, but not what `without` is."""
        if rng.random() < shaped:
            return Thing(*pair_of(rng, new, without), place)
        names = [name for at, name in enumerate(self.names) if left_out(at, place) == new]
        return Thing(rng.choice([name for name in names if without is None or name != without.shape]), "", place)

    def scene(self, seed: int, number: int, held_out: bool, most: int = MOST) -> PicturedScene:
        """The scene of that number, with at most so many things before those that are to be counted."""
        rng = Random(f"pictured-{seed}-{number}-{held_out}")
        kind, size, new = asked_of(number, held_out)
        part = NEW_PHOTOGRAPHS if new else PHOTOGRAPHS
        background, font = f"{part}/{rng.choice(getattr(self, part))}", NEW_FONT if new else rng.choice(FONTS)
        places, word = rng.sample(range(len(PLACES)), len(PLACES)), ""
        if kind == "read":
            word = word_of(rng, new)
            things = tuple(self.thing(rng, place) for place in places[: rng.randint(0, 2)])[:most]
            question, answer = "what is the word?", word
        else:
            asked = self.thing(rng, places[0], new, shaped=1.0 if kind == "which_colour" else SHAPED)
            others = [self.thing(rng, place, without=asked) for place in places[1 : rng.randint(2, MOST)]][: most - 1]
            things = (asked, *others)
            question, answer = question_about(kind, asked)
            if kind == "how_many":
                question, count = how_many(asked), rng.randint(0, 4)
                answer, free = NUMBERS[count], places[5:]
                if asked.colour:
                    more = [Thing(asked.shape, colour_of(rng, asked.shape), place) for place in free]
                else:
                    at = self.names.index(asked.shape)
                    more = [dataclasses.replace(asked, place=place) for place in free if not left_out(at, place)]
                things = (*((asked,) if count else ()), *others, *more[: max(0, count - 1)])
            elif kind == "is_there":
                there = rng.random() < 0.5
                question, answer = is_there(asked), "yes" if there else "no"
                if not there:
                    near = near_to(rng, asked) if asked.colour else self.thing(rng, asked.place, False, asked, 0.0)
                    things = (near, *others)
        drawn = rng.getrandbits(32)
        return PicturedScene(question, answer, kind, size, new, things, word, background, font, drawn, album=self)


@dataclasses.dataclass(frozen=True)
class PicturedScene(Scene):
    """A scene whose background is a file of `album`, and whose things without a colour are its pictures."""

    album: Album

    outline: ClassVar[float] = 0.1  # white letters on a white wall

    def ground(self, side: int, rng: Random) -> Any:
        """A square cut out of the photograph, at least half as wide as its shorter side."""
        from PIL import Image

        photograph = opened(self.album.folder / self.background, "RGB")
        cut = rng.uniform(0.5, 1.0) * min(photograph.size)
        left, top = (rng.uniform(0.0, whole - cut) for whole in photograph.size)
        return photograph.resize((side, side), Image.Resampling.BICUBIC, (left, top, left + cut, top + cut))

    def put(self, thing: Thing, image: Any, x: float, y: float, radius: float) -> None:
        from PIL import Image, ImageDraw, ImageOps

        if thing.colour:  # with a rim of ink, as a black moon is not seen at night
            rim = INKS[sum(COLOURS[thing.colour]) > sum(INKS[0]) // 2]
            draw_shape(ImageDraw.Draw(image), thing.shape, x, y, radius, rim)
            super().put(thing, image, x, y, (1 - RIM) * radius)
            return
        album, side = self.album, max(1, round(2 * radius))
        picture = opened(album.folder / PICTURES / album.pictures[album.names.index(thing.shape)], "RGBA")
        picture = ImageOps.contain(picture, (side, side), Image.Resampling.LANCZOS)
        image.paste(picture, (round(x - picture.width / 2), round(y - picture.height / 2)), picture)

    def others(self, rng: Random) -> dict[str, list[tuple[str, str]]]:
        shapes = tuple(thing for thing in self.things if thing.colour)
        found = Scene.others(dataclasses.replace(self, things=shapes), rng)
        names = [thing.shape for thing in self.things if not thing.colour]
        absent = [name for name in self.album.names if name not in names]
        for thing in self.things:
            if not thing.colour:
                found["what"].append(question_about("what", thing))
                found["is_there"].append((is_there(thing), "yes"))
                found["is_there"].append((is_there(dataclasses.replace(thing, shape=rng.choice(absent))), "no"))
                found["how_many"].append((how_many(thing), NUMBERS[names.count(thing.shape)]))
                if names.count(thing.shape) == 1:
                    found["where"].append(question_about("where", thing))
        return found


def left_out(picture: int, place: int) -> bool:
    """Whether training leaves the picture of that number out of that place: one of nine."""
    return (picture + 2 * place) % len(PLACES) == 0


def how_many(thing: Thing) -> str:
    """The question how often a shape or a picture is there."""
    return f"how many {plural(thing.shape)} are there?" if thing.colour else f"how many times is there a {thing.shape}?"


def is_there(thing: Thing) -> str:
    """The question whether a shape of that colour, or a picture, is there."""
    return f"is there a {thing.colour} {thing.shape}?" if thing.colour else f"is there a {thing.shape}?"


def opened(path: Path, mode: str) -> Any:
    """The image of a file as it is now. Raises ValueError that names it."""
    try:
        now = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: not a readable image ({error})") from error
    return decoded(path, mode, now.st_mtime_ns, now.st_size)


@functools.lru_cache(256)
def decoded(path: Path, mode: str, changed: int, size: int) -> Any:
    """`opened`, kept until the file changes."""
    from PIL import Image

    try:
        image: Any = Image.open(path)
        if image.mode[0] in "IF":  # Pillow would cut all values above 255 off
            raise ValueError(f"its pixels are {image.mode}; save it with 8 bits a channel")
        image = image.convert(mode)
        image.thumbnail((LARGEST, LARGEST))
        return image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: not a readable image, or cut short ({error})") from error
