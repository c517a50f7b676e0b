"""Generated scenes with a question each: coloured shapes on a background, or a written word. Drawn by Pillow.

A scene is a function of (seed, number, held out or not). Six kinds of questions take turns, and sizes with them: any
`PERIOD` scenes in a row have every kind in every size. Of held-out scenes every other period is *new*: the thing that
is asked about has a colour and shape, or a word, that no training scene combines, and font and background are others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from random import Random
from typing import Any, ClassVar

KINDS = ("what", "where", "how_many", "which_colour", "is_there", "read")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "moon")
COLOURS = {
    "red": (214, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (240, 220, 40),
    "orange": (250, 140, 20), "purple": (140, 50, 180), "white": (250, 250, 250), "black": (15, 15, 15),
}  # fmt: skip
PLACES = (
    "top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right",
)  # fmt: skip
NUMBERS = ("zero", "one", "two", "three", "four")
OBJECT_SIZES = {"small": 1 / 16, "medium": 1 / 8, "large": 1 / 4}  # over the side of the picture
WORD_SIZES = {"tiny": 1 / 28, "small": 1 / 16, "medium": 1 / 10, "large": 1 / 6}  # height of the font, over the side
CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono")
NEW_FONT = "DejaVuSerif"
BACKGROUNDS = ("plain", "gradient", "clouds")
NEW_BACKGROUND = "stripes"
INKS = ((250, 250, 250), (15, 15, 15))  # of words
TURNS = 12  # of the kinds, after which every one had each of its 3 or 4 sizes equally often
PERIOD = len(KINDS) * TURNS
SHARP = 2  # a picture is drawn so many times larger and then reduced


def is_new(shape: str, colour: str) -> bool:
    """Whether training leaves the pair out: one shape of every colour."""
    return (SHAPES.index(shape) + 3 * tuple(COLOURS).index(colour)) % len(SHAPES) == 0


def is_new_word(word: str) -> bool:
    """Whether training leaves the word out: one of six."""
    return (CONSONANTS.index(word[0]) + VOWELS.index(word[1]) + CONSONANTS.index(word[2])) % 6 == 0


@dataclasses.dataclass(frozen=True)
class Thing:
    """A shape in one of nine places; or a picture by its name, without a colour."""

    shape: str
    colour: str
    place: int


@dataclasses.dataclass(frozen=True)
class Scene:
    """A picture, described, with a question about it.

    kind: one of `KINDS`.
    size: of what is asked about, one of `OBJECT_SIZES`, or of `WORD_SIZES` to read.
    new: whether training has nothing like it, see above.
    """

    question: str
    answer: str
    kind: str
    size: str
    new: bool
    things: tuple[Thing, ...]
    word: str
    background: str
    font: str
    drawn: int  # seed of what the picture leaves to chance

    outline: ClassVar[float] = 0.0  # of a word, over the height of its font

    def draw(self, side: int) -> Any:
        """The picture: a square of that many pixels a side."""
        from PIL import ImageDraw, ImageFont

        rng = Random(self.drawn)
        large = SHARP * side
        image = self.ground(large, rng)
        pen = ImageDraw.Draw(image)
        for thing in self.things:
            radius = OBJECT_SIZES[self.size if self.kind != "read" else "medium"] * large / 2
            row, column = divmod(thing.place, 3)
            room = large / 6 - radius
            x, y = ((2 * at + 1) * large / 6 + rng.uniform(-0.8, 0.8) * room for at in (column, row))
            self.put(thing, image, x, y, radius)
        if self.word:
            font = ImageFont.truetype(_fonts() / f"{self.font}.ttf", max(2, round(WORD_SIZES[self.size] * large)))
            left, top, right, bottom = pen.textbbox((0, 0), self.word, font=font)
            x, y = rng.uniform(0, large - (right - left)) - left, rng.uniform(0, large - (bottom - top)) - top
            fill, other = rng.choice((INKS, INKS[::-1]))
            edge = round(self.outline * font.size)
            pen.text((x, y), self.word, font=font, fill=fill, stroke_width=edge, stroke_fill=other)
        return image.reduce(SHARP)

    def ground(self, side: int, rng: Random) -> Any:
        """What everything is drawn on."""
        return _background(self.background, side, rng)

    def put(self, thing: Thing, image: Any, x: float, y: float, radius: float) -> None:
        """Draw a thing within a circle."""
        from PIL import ImageDraw

        draw_shape(ImageDraw.Draw(image), thing.shape, x, y, radius, COLOURS[thing.colour])

    def others(self, rng: Random) -> dict[str, list[tuple[str, str]]]:
        """By kind, questions about this training scene with their answers; none is about what training leaves out."""
        shapes = [thing.shape for thing in self.things]
        pairs = {(thing.colour, thing.shape) for thing in self.things}
        found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
        for thing in self.things:
            found["what"].append(question_about("what", thing))
            found["is_there"].append((f"is there a {thing.colour} {thing.shape}?", "yes"))
            near = [(colour, thing.shape) for colour in COLOURS] + [(thing.colour, shape) for shape in SHAPES]
            colour, shape = rng.choice([pair for pair in near if pair not in pairs and not is_new(pair[1], pair[0])])
            found["is_there"].append((f"is there a {colour} {shape}?", "no"))
            if shapes.count(thing.shape) == 1:
                found["where"].append(question_about("where", thing))
                found["which_colour"].append(question_about("which_colour", thing))
        for shape in (rng.choice(SHAPES), *rng.sample(shapes, min(1, len(shapes)))):
            found["how_many"].append((f"how many {plural(shape)} are there?", NUMBERS[shapes.count(shape)]))
        if self.word:
            found["read"].append(("what is the word?", self.word))
        return found


MOST = 5  # things in a picture, before those that are to be counted


def asked_of(number: int, held_out: bool) -> tuple[str, str, bool]:
    """Kind and size of what the scene of that number asks about, and whether it is new."""
    kind, turn = KINDS[number % len(KINDS)], number // len(KINDS)
    sizes = tuple(WORD_SIZES if kind == "read" else OBJECT_SIZES)
    return kind, sizes[turn % len(sizes)], held_out and turn // TURNS % 2 == 0


def scene(seed: int, number: int, held_out: bool, most: int = MOST) -> Scene:
    """The scene of that number, with at most so many things before those that are to be counted."""
    rng = Random(f"{seed}-{number}-{held_out}")  # seeded by text, which Random hashes the same on every machine
    kind, size, new = asked_of(number, held_out)
    looks = {
        "background": NEW_BACKGROUND if new else rng.choice(BACKGROUNDS),
        "font": NEW_FONT if new else rng.choice(FONTS),
    }
    places = rng.sample(range(9), 9)
    word = ""
    if kind == "read":
        word = word_of(rng, new)
        things = tuple(Thing(*pair_of(rng, False), place) for place in places[: rng.randint(0, 2)])[:most]
        question, answer = "what is the word?", word
    else:
        asked = Thing(*pair_of(rng, new), places[0])
        others = [Thing(*pair_of(rng, False, without=asked), place) for place in places[1 : rng.randint(2, MOST)]][
            : most - 1
        ]  # of other shapes
        things = (asked, *others)
        question, answer = question_about(kind, asked)
        if kind == "how_many":
            question, count = f"how many {plural(asked.shape)} are there?", rng.randint(0, 4)
            answer = NUMBERS[count]
            more = [Thing(asked.shape, colour_of(rng, asked.shape), place) for place in places[5 : 4 + count]]
            things = (*((asked,) if count else ()), *others, *more)
        elif kind == "is_there":
            there = rng.random() < 0.5
            question = f"is there a {asked.colour} {asked.shape}?"
            answer = "yes" if there else "no"
            if not there:
                things = (near_to(rng, asked), *others)
    return Scene(question, answer, kind, size, new, things, word, **looks, drawn=rng.getrandbits(32))


def questions(drawn: Scene, count: int) -> list[tuple[str, str]]:
    """Up to `count` questions about a training scene with their answers: its own, then others of all kinds in turn."""
    rng = Random(drawn.drawn)
    found = drawn.others(rng)
    asked = {drawn.question: drawn.answer}
    for kind in KINDS:
        rng.shuffle(found[kind])
        found[kind] = [pair for pair in dict(found[kind]).items() if pair[0] not in asked]
    for turn in range(max(map(len, found.values()))):
        asked.update(some[turn] for some in found.values() if len(some) > turn)
    return list(asked.items())[:count]


def near_to(rng: Random, asked: Thing) -> Thing:
    """The shape in another colour, or the colour on another shape, as training may have it."""
    if rng.random() < 0.5:
        seen = [c for c in COLOURS if not is_new(asked.shape, c) and c != asked.colour]
        return Thing(asked.shape, rng.choice(seen), asked.place)
    shapes = [s for s in SHAPES if not is_new(s, asked.colour) and s != asked.shape]
    return Thing(rng.choice(shapes), asked.colour, asked.place)


def question_about(kind: str, thing: Thing) -> tuple[str, str]:
    """Question and answer about one thing: what stands there, of which colour it is, or (all other kinds) where."""
    if kind == "what":
        return f"what is at the {PLACES[thing.place]}?", thing.shape
    if kind == "which_colour":
        return f"which colour is the {thing.shape}?", thing.colour
    return f"where is the {thing.shape}?", PLACES[thing.place]


def plural(shape: str) -> str:
    """The plural of a shape's name."""
    return shape + ("es" if shape == "cross" else "s")


def pair_of(rng: Random, new: bool, without: Thing | None = None) -> tuple[str, str]:
    """A shape and a colour that training leaves out or has; of another shape than `without`."""
    while True:
        shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
        if is_new(shape, colour) == new and (without is None or shape != without.shape):
            return shape, colour


def colour_of(rng: Random, shape: str) -> str:
    """A colour that training shows the shape in."""
    return rng.choice([colour for colour in COLOURS if not is_new(shape, colour)])


def word_of(rng: Random, new: bool) -> str:
    """A word of three letters that training leaves out (`new`) or has."""
    while True:
        word = rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(CONSONANTS)
        if is_new_word(word) == new:
            return word


@functools.cache
def _fonts() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def _grey(rng: Random) -> tuple[int, int, int]:
    """A colour near grey, from which every colour of a shape stands out."""
    level = rng.randint(95, 165)
    return tuple(level + rng.randint(-12, 12) for _ in range(3))  # type: ignore[return-value]


def _background(name: str, side: int, rng: Random) -> Any:
    from PIL import Image, ImageDraw

    if name == "plain":
        return Image.new("RGB", (side, side), _grey(rng))
    if name == "stripes":
        image = Image.new("RGB", (side, side), _grey(rng))
        pen, width, fill = ImageDraw.Draw(image), side / rng.randint(8, 16), _grey(rng)
        for start in range(0, math.ceil(side / width), 2):
            pen.rectangle((start * width, 0, (start + 1) * width, side), fill=fill)
        return image
    cells = 2 if name == "gradient" else rng.randint(4, 8)
    small = Image.new("RGB", (cells, cells))
    small.putdata([_grey(rng) for _ in range(cells * cells)])
    return small.resize((side, side), Image.Resampling.BICUBIC)


def draw_shape(pen: Any, shape: str, x: float, y: float, r: float, fill: tuple[int, int, int]) -> None:
    """Within the circle of radius r around (x, y)."""

    def corners(count: int, turn: float, radii: tuple[float, ...] = (1.0,)) -> list[tuple[float, float]]:
        angles = [turn + 2 * math.pi * i / count for i in range(count)]
        lengths = [r * radii[i % len(radii)] for i in range(count)]
        return [(x + length * math.cos(a), y + length * math.sin(a)) for a, length in zip(angles, lengths)]

    box = (x - r, y - r, x + r, y + r)
    up = -math.pi / 2
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "ring":
        pen.ellipse(box, outline=fill, width=max(1, round(0.4 * r)))
    elif shape == "square":
        pen.polygon(corners(4, math.pi / 4), fill=fill)
    elif shape == "diamond":
        pen.polygon([(x, y - r), (x + 0.55 * r, y), (x, y + r), (x - 0.55 * r, y)], fill=fill)
    elif shape == "triangle":
        pen.polygon(corners(3, up), fill=fill)
    elif shape == "star":
        pen.polygon(corners(10, up, (1.0, 0.42)), fill=fill)
    elif shape == "cross":
        arm = 0.3 * r
        pen.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)
        pen.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
    else:  # a moon: the left of a circle, without an ellipse that has the same ends
        left = [math.pi / 3 + i * math.pi / 30 for i in range(41)]  # from the lower end over the left to the upper
        outer = [(x + r * math.cos(a), y + r * math.sin(a)) for a in left]
        inner = [
            (
                x + r / 2 - 0.7 * r * math.sin(math.pi * i / 40),
                y - r * math.sin(math.pi / 3) * math.cos(math.pi * i / 40),
            )
            for i in range(41)
        ]
        pen.polygon([*outer, *inner], fill=fill)
