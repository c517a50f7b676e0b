"""Generated scenes: answers are true of what is drawn, and training never sees what is held out as new."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fathom.vision.scenes import (
    COLOURS,
    FONTS,
    KINDS,
    NEW_BACKGROUND,
    NEW_FONT,
    NUMBERS,
    OBJECT_SIZES,
    PERIOD,
    PLACES,
    WORD_SIZES,
    Thing,
    is_new,
    is_new_word,
    questions,
    scene,
)


def kind_of(question):
    starts = ("what is at", "where", "how many", "which colour", "is there", "what is the word")
    (found,) = [kind for kind, start in zip(KINDS, starts) if question.startswith(start)]
    return found


TRAIN = [scene(0, number, False) for number in range(1500)]
HELD_OUT = [scene(0, number, True) for number in range(2 * PERIOD)]


MORE = [
    dataclasses.replace(one, question=question, answer=answer, kind=kind_of(question))
    for one in TRAIN[:300]
    for question, answer in questions(one, 8)[1:]
]


@pytest.mark.parametrize("scenes", [TRAIN, HELD_OUT, MORE], ids=["train", "held out", "more of the same picture"])
def test_answers_are_true_of_the_things(scenes):
    said = {kind: set() for kind in KINDS}
    for one in scenes:
        words = one.question.removesuffix("?").split()
        said[one.kind].add(one.answer)
        if one.kind == "read":
            assert one.answer == one.word
            continue
        by_place = {thing.place: thing for thing in one.things}
        assert scenes is MORE or not one.word
        assert len(by_place) == len(one.things)
        if one.kind == "what":
            assert by_place[PLACES.index(one.question.removeprefix("what is at the ")[:-1])].shape == one.answer
        elif one.kind == "how_many":
            shape = words[2].removesuffix("es") if words[2] == "crosses" else words[2].removesuffix("s")
            assert sum(thing.shape == shape for thing in one.things) == NUMBERS.index(one.answer)
        elif one.kind == "is_there":
            colour, shape = words[3:]
            there = any((thing.colour, thing.shape) == (colour, shape) for thing in one.things)
            assert one.answer == ("yes" if there else "no")
        else:
            (asked,) = [thing for thing in one.things if thing.shape == words[-1]]  # there is one of the shape
            assert one.answer == (PLACES[asked.place] if one.kind == "where" else asked.colour)
    assert (
        said["is_there"] == {"yes", "no"}
        and said["how_many"] >= set(NUMBERS[: 4 if scenes is MORE else 5])
        and len(said["where"]) > 7
    )


def test_a_picture_is_asked_its_own_question_first_and_no_question_twice():
    for one in TRAIN[:300]:
        asked = questions(one, 8)
        assert asked[0] == (one.question, one.answer) and len({question for question, _ in asked}) == len(asked) >= 2
        for question, _ in asked:
            words = question.removesuffix("?").split()
            assert words[:2] != ["is", "there"] or not is_new(words[-1], words[-2])
    assert {kind_of(question) for one in TRAIN[:30] for question, _ in questions(one, 8)[1:]} == set(KINDS) - {"read"}


def test_new_scenes_are_held_out_and_every_kind_has_every_size():
    for one in TRAIN + [one for one in HELD_OUT if not one.new]:
        assert not any(is_new(thing.shape, thing.colour) for thing in one.things)
        assert one.background != NEW_BACKGROUND and one.font in FONTS and not (one.word and is_new_word(one.word))
    new = [one for one in HELD_OUT if one.new]
    assert len(new) == PERIOD and not any(one.new for one in TRAIN)
    for one in new:
        assert one.background == NEW_BACKGROUND and one.font == NEW_FONT
        assert is_new_word(one.word) if one.kind == "read" else True
        if one.kind in ("what", "where", "which_colour"):
            assert any(is_new(thing.shape, thing.colour) for thing in one.things)
    for half in (new, HELD_OUT[PERIOD:]):
        found = {(one.kind, one.size) for one in half}
        assert found == {(k, s) for k in KINDS for s in (WORD_SIZES if k == "read" else OBJECT_SIZES)}
    assert sum(is_new(*pair) for pair in {(t.shape, t.colour) for one in HELD_OUT for t in one.things}) <= 8


def test_pictures_are_drawn_where_and_as_large_as_said():
    one = next(s for s in TRAIN if s.kind == "which_colour" and s.size == "large")
    pixels = np.array(one.draw(96)).astype(int)
    assert pixels.shape == (96, 96, 3) and np.array_equal(pixels, np.array(one.draw(96)))
    for thing in one.things:
        assert isinstance(thing, Thing)
        row, column = divmod(thing.place, 3)
        cell = pixels[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
        close = (abs(cell - COLOURS[thing.colour]).max(-1) <= 3).sum()
        assert 0.1 * 24**2 < close < 24**2  # of the square of a quarter of the side


def test_a_scene_of_few_things_asks_what_the_whole_one_asks():
    for number, whole in enumerate(TRAIN[:200]):
        few = scene(0, number, False, most=1)
        same = ("question", "kind", "size", "word", "background", "drawn")
        assert all(getattr(few, name) == getattr(whole, name) for name in same)
        assert few.things == whole.things[:1] or whole.kind in ("how_many", "read")
        counted = 4 if whole.kind == "how_many" else 0
        assert len(few.things) <= 1 + counted
        if whole.kind != "is_there":
            assert few.answer == whole.answer
