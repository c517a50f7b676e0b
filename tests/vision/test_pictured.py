"""Scenes of a folder's pictures on photographs: answers are true, and training never sees what is new."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image

from fathom.vision.pictured import FEWEST, Album, left_out, opened
from fathom.vision.scenes import NUMBERS, PERIOD, PLACES, is_new, is_new_word, questions

COLOURS = [(13 * n % 256, 97 * n % 256, 255 - 20 * n) for n in range(FEWEST + 1)]


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    folder = tmp_path_factory.mktemp("album")
    for part, colour in (("photographs", (120, 0, 0)), ("new_photographs", (0, 120, 0))):
        (folder / part).mkdir()
        Image.new("RGB", (40, 30), colour).save(folder / part / "ground.png")
    (folder / "pictures").mkdir()
    for name, colour in zip(["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "red_fish"], COLOURS):
        Image.new("RGBA", (8, 4), (*colour, 255)).save(folder / "pictures" / f"{name}.png")
    return Album.read(folder)


def true(drawn, question, answer):
    """Whether the answer follows from the things, read by another way than the one that made it."""
    words, asked = question.removesuffix("?"), drawn.things
    if question == "what is the word?":
        return answer == drawn.word
    if words.startswith("what is at the "):
        return [thing.shape for thing in asked if PLACES[thing.place] == words[15:]] == [answer]
    if words.startswith("where is the "):
        return [PLACES[thing.place] for thing in asked if thing.shape == words[13:]] == [answer]
    if words.startswith("which colour is the "):
        return [thing.colour for thing in asked if thing.shape == words[20:]] == [answer] != [""]
    if words.startswith("how many times is there a "):
        return sum(thing.shape == words[26:] for thing in asked) == NUMBERS.index(answer)
    if words.startswith("how many "):
        shape = words.removeprefix("how many ").removesuffix(" are there")
        return sum(shape in (f"{t.shape}s", f"{t.shape}es") for t in asked) == NUMBERS.index(answer)
    assert words.startswith("is there a ")
    return any(f"{thing.colour} {thing.shape}".strip() == words[11:] for thing in asked) == (answer == "yes")


def test_answers_are_true_and_training_never_sees_what_is_new(album):
    train = [album.scene(0, number, False) for number in range(400)]
    held_out = [album.scene(0, number, True) for number in range(2 * PERIOD)]
    said = set()
    for drawn in train + held_out:
        assert true(drawn, drawn.question, drawn.answer), drawn
        assert len({thing.place for thing in drawn.things}) == len(drawn.things)
        said.add((drawn.kind, drawn.answer))
    assert {NUMBERS[n] for n in range(5)} <= {answer for kind, answer in said if kind == "how_many"}
    for drawn in train:
        pairs = questions(drawn, 8)
        assert pairs[0] == (drawn.question, drawn.answer) and all(true(drawn, *pair) for pair in pairs)

    def new(thing):
        return (
            is_new(thing.shape, thing.colour) if thing.colour else left_out(album.names.index(thing.shape), thing.place)
        )

    for drawn in train + held_out[PERIOD:]:
        assert not any(map(new, drawn.things)) and drawn.background == "photographs/ground.png"
        assert not (drawn.word and is_new_word(drawn.word))
    for drawn in held_out[:PERIOD]:
        assert drawn.new and drawn.background == "new_photographs/ground.png"
        if drawn.kind in ("what", "where", "which_colour"):
            assert any(map(new, drawn.things))
        assert bool(drawn.things and drawn.things[0].colour) or drawn.kind != "which_colour"


def test_pixels_are_the_pictures_in_their_places_on_the_photograph(album):
    drawn = next(
        one for one in (album.scene(0, number, False) for number in range(300))
        if one.kind == "where" and one.size == "large" and not any(thing.colour for thing in one.things)
    )  # fmt: skip
    pixels = np.asarray(drawn.draw(96))
    assert pixels.shape == (96, 96, 3) and np.array_equal(pixels, np.asarray(drawn.draw(96)))
    ground = (pixels == (120, 0, 0)).all(-1)
    for thing in drawn.things:
        row, column = divmod(thing.place, 3)
        cell = slice(32 * row, 32 * row + 32), slice(32 * column, 32 * column + 32)
        seen = (abs(pixels[cell].astype(int) - COLOURS[album.names.index(thing.shape)]) <= 2).all(-1)
        assert 200 <= seen.sum() <= 24 * 12  # a quarter of the side wide, half as high
        ground[cell] = True
    assert ground.all()


def test_a_large_photograph_is_kept_reduced(tmp_path):
    Image.linear_gradient("L").resize((3000, 1500)).save(tmp_path / "large.png")
    kept = opened(tmp_path / "large.png", "RGB")
    assert kept.size == (1024, 512) and kept.getpixel((5, 0))[0] < 4 and kept.getpixel((5, 511))[0] > 251


def test_a_word_has_an_edge_of_the_other_ink(album):
    drawn = dataclasses.replace(album.scene(0, 5, False), things=(), size="large")
    pixels = np.asarray(drawn.draw(96)).reshape(-1, 3)
    assert all((abs(pixels.astype(int) - ink).max(-1) < 20).any() for ink in (250, 15))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "pictures" / "ant.png").unlink(), r"8 pictures; use at least 9"),
        (lambda folder: (folder / "pictures" / "ant.png").rename(folder / "pictures" / "moon.png"), "drawn shape is"),
        (lambda folder: (folder / "pictures" / "ant.png").rename(folder / "pictures" / "bee.webp"), "another picture"),
        (lambda folder: (folder / "pictures" / "ant.png").rename(folder / "pictures" / "BEE_.png"), "called 'bee' too"),
        (lambda folder: (folder / "pictures" / "ant.png").rename(folder / "pictures" / "Red_star.png"), "drawn shape"),
        (lambda folder: (folder / "pictures" / "ant.png").rename(folder / "pictures" / "__.png"), "its name says"),
        (lambda folder: (folder / "new_photographs" / "ground.png").unlink(), "new_photographs: no images; recipes/"),
        (lambda folder: (folder / "pictures" / "ant.png").write_bytes(b"\x89PNG cut"), r"ant\.png: not a readable"),
        (
            lambda folder: Image.new("I;16", (9, 9), 40000).save(folder / "pictures" / "ant.png"),
            r"ant\.png: .* pixels are I;16; save it with 8 bits",
        ),
    ],
)
def test_what_is_no_folder_of_pictures_is_refused(album, change, message, tmp_path):
    for part in ("pictures", "photographs", "new_photographs"):
        (tmp_path / part).mkdir()
        for path in (album.folder / part).iterdir():
            (tmp_path / part / path.name).write_bytes(path.read_bytes())
    before = Album.read(tmp_path).digest()
    assert before == album.digest()
    change(tmp_path)
    with pytest.raises((OSError, ValueError), match=message):
        Album.read(tmp_path).digest()
