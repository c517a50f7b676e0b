"""Numbers about clips against closed forms, brute force, and what OpenCV and librosa gave for the same input."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from scipy.ndimage import shift

from fathom.audiovideo import av_align as align
from fathom.audiovideo.clips import Clip
from fathom.audiovideo.generator import Generator
from fathom.audiovideo.metrics import (
    COLUMNS,
    cpcer,
    edit_distance,
    paired,
    psnr,
    score,
    spectral_distance,
    summary,
)


def texture(t):
    y, x = np.mgrid[:72, :96].astype(float)
    x, y = x - 1.7 * t, y - 0.6 * t
    return np.rint(127 + 60 * np.sin(x / 3.1) * np.cos(y / 4.3) + 50 * np.sin((x + 2 * y) / 7.7))


def test_flow_is_what_opencv_gives():
    """cv2.calcOpticalFlowFarneback(…, 0.5, 3, 15, 3, 5, 1.2, 0) of OpenCV 5.0.0 at five pixels, and its mean length."""
    flow = align.flow(texture(0).astype(np.float32), texture(1).astype(np.float32))
    right = [1.675994873, 1.695047736, 1.734026670, 1.697289705, 1.706455469]
    down = [0.621250152, 0.610038518, 0.612160205, 0.604916989, 0.587246000]
    at = (slice(None), [3, 20, 36, 60, 70], [5, 40, 90, 13, 50])
    assert np.abs(flow[at] - [right, down]).max() < 1e-4
    assert np.hypot(*flow).mean() == pytest.approx(1.8014921, abs=1e-5)


def struck(times_and_pitches):
    n = np.arange(2 * 44100) / 44100
    tones = [
        np.where(n >= t, np.exp(-12 * (n - t)) * np.sin(2 * np.pi * pitch * (n - t)), 0)
        for t, pitch in times_and_pitches
    ]
    return (0.3 * sum(tones)).astype(np.float32)


def test_onsets_are_what_librosa_gives():
    """librosa 0.11.0: onset_strength at six frames, and onset_detect(units="time"), of four struck tones."""
    sound = struck(((0.21, 440), (0.64, 900), (1.02, 300), (1.55, 1300)))
    strength = align.onset_strength(sound.astype(np.float64))
    expected = [19.008459, 5.715332, 0.064304, 6.955392, 0.074612, 3.126156]
    assert np.abs(strength[[19, 20, 21, 57, 58, 90]] - expected).max() < 1e-4
    assert strength.mean() == pytest.approx(0.600886, abs=1e-5)
    assert align.onset_peaks(sound, 44100) == pytest.approx([0.220589569, 0.650158730, 1.033287982, 1.555736961])
    assert len(align.onset_peaks(np.zeros(9000), 8000)) == 0


def test_av_align_counts_each_peak_once():
    assert align.av_align([0.5, 1.0], [0.51, 0.53, 1.5], 24) == 1 / 4
    assert align.av_align([0.5], [0.5], 24) == 1 and align.av_align([], [], 24) == align.av_align([], [1.0], 24) == 0
    moving = np.stack([shift(texture(0), (0, 5 * (i == 6)), mode="wrap") for i in range(12)]).astype(np.uint8)
    frames = np.repeat(moving[..., None], 3, axis=-1)
    assert align.motion(frames)[0] == align.motion(frames)[1]
    still = align.motion(frames[:5])
    assert still.max() < 2e-3 and len(align.motion_peaks(frames[:5], 24)) == 0


def test_pairs_are_the_best_of_all_pairings():
    draw = np.random.default_rng(0)
    for _ in range(30):
        seen, heard = draw.uniform(0, 2, draw.integers(0, 5)), draw.uniform(0, 2, draw.integers(0, 5))
        few, many = sorted((seen, heard), key=len)
        best = min(
            (
                sum(min(abs(a - many[j]), 0.5) for a, j in zip(few, chosen))
                for chosen in itertools.permutations(range(len(many)), len(few))
            ),
            default=0.0,
        )
        found = paired(seen, heard)
        unpaired = min(len(found.missed), len(found.extra))  # in the best pairing these two are apart by reach
        assert sum(abs(a - b) for a, b in found.pairs) + 0.5 * unpaired == pytest.approx(best)
        assert len(found.pairs) + len(found.missed) == len(seen) and len(found.pairs) + len(found.extra) == len(heard)


@pytest.mark.parametrize("things", [1, 2])
def test_score_of_true_pairs_and_of_wrong_ones(things):
    clip = Generator(seed=4, things=things).clip(things)
    true = score(clip)
    assert true["offset_ms"] < 10 and true["within_frame"] == 1 and true["missed"] == true["extra"] == 0
    late = score(dataclasses.replace(clip, audio=np.pad(clip.audio, (480, 0))[: len(clip.audio)]))
    assert true["together"] == 1
    assert late["signed_ms"] == pytest.approx(60, abs=8) and late["within_frame"] == 0
    silent = score(dataclasses.replace(clip, audio=np.zeros_like(clip.audio)))
    assert silent["missed"] == len(clip.events) and silent["offset_ms"] is None and silent["within_frame"] == 0
    assert silent["av_align"] == 0 and silent["loudness"] is None
    frozen = score(dataclasses.replace(clip, frames=np.repeat(clip.frames[:1], 49, axis=0)))
    assert frozen["extra"] == len(clip.events) and frozen["within_frame"] is None and frozen["together"] == 0
    assert set(true) == {column.name for column in COLUMNS} | {"scene", "seen", "heard"}


def test_a_scene_that_is_not_plain_is_scored_by_its_peaks_of_motion():
    """A camera that jolts twice, heard each time."""
    places = np.cumsum([3 * (i in (10, 30)) for i in range(49)])
    frames = np.stack([np.roll(texture(0), (0, place), (0, 1)) for place in places])
    frames = np.repeat(frames[..., None], 3, axis=-1).astype(np.uint8)
    sound = struck(((10 / 24, 500), (30 / 24, 800)))
    found = score(Clip(frames, 24.0, sound, 44100))
    assert found["scene"] == "any" and found["heard"] == pytest.approx([10 / 24, 30 / 24], abs=3e-3)
    assert found["seen"] == pytest.approx([10 / 24, 30 / 24], abs=1e-4) and found["av_align"] == 1
    assert found["within_frame"] == 1 and found["extra"] == found["missed"] == 0


def test_stray_sounds_lower_what_falls_together():
    clip = Generator(seed=4, actions=("flash",)).clip(0)
    everywhere = np.arange(0.05, 2.0, 0.0625)
    stray = sum(
        np.where(t >= e, np.exp(-60 * (t - e)) * np.sin(9000 * (t - e)), 0)
        for t in [np.arange(16333) / 8000]
        for e in everywhere
    )
    found = score(dataclasses.replace(clip, audio=(0.4 * stray).astype(np.float32)))
    assert found["within_frame"] == 1 and found["offset_ms"] < 40  # a sound is near any event
    assert found["together"] == len(clip.events) / len(found["heard"]) < 0.2


class Brightness:
    name, unit, better, meaning = "brightness", "", "higher", "mean level"

    def __call__(self, clip):
        return float(clip.frames.mean())


def test_a_metric_of_ones_own_stands_beside_the_others():
    clip = Generator().clip(0)
    assert score(clip, [Brightness()])["brightness"] == clip.frames.mean()


def test_summary_has_means_of_what_there_is_and_intervals():
    rows = [{"a": float(value), "b": None} for value in range(101)]
    found = summary([*rows, {"a": None}], ["a", "b"])
    assert found["a"]["mean"] == 50 and found["a"]["clips"] == 101
    half = 1.96 * np.std(range(101)) / math.sqrt(101)
    assert found["a"]["interval"] == pytest.approx([50 - half, 50 + half], abs=0.5)
    assert found["b"] == {"mean": None, "clips": 0, "interval": None}
    assert summary(rows[:1], ["a"])["a"]["interval"] is None


def test_psnr_and_spectral_distance_in_closed_form():
    frames = np.full((2, 4, 4, 3), 100, np.uint8)
    assert (
        psnr(frames + np.uint8(5), frames) == pytest.approx(20 * math.log10(255 / 5))
        and psnr(frames, frames) == math.inf
    )
    noise = np.random.default_rng(0).standard_normal(4000)
    assert spectral_distance(noise, noise, 8000) == 0
    assert spectral_distance(2 * noise, noise, 8000) == pytest.approx(20 * math.log10(2), rel=1e-2)
    assert spectral_distance(np.zeros(4000), np.zeros(4000), 8000) == 0
    with pytest.raises(ValueError, match="equal lengths"):
        spectral_distance(noise[:10], noise, 8000)
    with pytest.raises(ValueError, match="equal ones"):
        psnr(frames[:1], frames)


def test_edit_distance_and_cpcer_are_those_of_the_definition():
    @functools.cache
    def plain(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(plain(a[1:], b) + 1, plain(a, b[1:]) + 1, plain(a[1:], b[1:]) + (a[0] != b[0]))

    draw = np.random.default_rng(0)
    for _ in range(40):
        a, b = ("".join(draw.choice(list("abc"), draw.integers(0, 8))) for _ in range(2))
        assert edit_distance(a, b) == plain(a, b)
    said = {"Ada": "good morning", "Ben": "hello", "Eve": "who is there"}
    heard = {"1": "who is their", "2": "god morning", "3": "hallo", "4": "hm"}
    assert cpcer(said, heard) == (2 + 1 + 1 + 2) / 29
    assert cpcer(said, {}) == 1 and cpcer({"a": "ab"}, {"x": "ab"}) == 0
    with pytest.raises(ValueError, match="no characters"):
        cpcer({"a": ""}, {"x": "b"})
