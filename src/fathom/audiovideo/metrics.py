"""Scores of clips: whether sounds come when something is seen, and how close a clip is to a reference.

Visible events (impacts and flashes; in scenes that are not plain, peaks of motion) are paired one to one with onsets of
sound, so that the sum of distances is least; pairs farther apart than `REACH` do not count.

    offset_ms        mean |heard − seen| of the pairs
    signed_ms        median of heard − seen: above 0, the sound comes late
    within_frame     visible events whose sound is within 1/fps / visible events
    together         pairs within 1/fps / (visible events + sounds − pairs): stray sounds lower it
    missed, extra    visible events without a sound, and sounds without a visible event
    av_align         matches / (A + V − matches) of peaks of motion and of sound (`av_align.py`)
    loudness         LUFS (ITU-R BS.1770)

Metrics that need weights, such as CLAP, Synchformer or DNSMOS, are any object with the members of `Metric`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Float, UInt8
from scipy.optimize import linear_sum_assignment

from fathom.audiovideo import av_align as align
from fathom.audiovideo.clips import Clip, loudness
from fathom.audiovideo.onsets import picture_events, plain_scene, sound_onsets

REACH = 0.5  # seconds: what is farther apart does not belong together


class Metric(Protocol):
    """A number about one clip, such as one from a model with weights.

    name: key of the results. unit: "" for a score without one. better: which direction is. meaning: one sentence.
    A call returns None where the clip has no such number.
    """

    name: str
    unit: str
    better: Literal["lower", "higher", ""]
    meaning: str

    def __call__(self, clip: Clip) -> float | None: ...


@dataclasses.dataclass(frozen=True)
class Column:
    """The description of one of the numbers of `score`."""

    name: str
    unit: str
    better: Literal["lower", "higher", ""]
    meaning: str


COLUMNS = (
    Column("offset_ms", "ms", "lower", "mean distance of a sound from the event that it belongs to"),
    Column("signed_ms", "ms", "", "median of heard minus seen: above 0, the sound comes late"),
    Column("within_frame", "", "higher", "share of events that are seen and heard within the time of one picture"),
    Column(
        "together", "", "higher", "share of all events and sounds that fall together within the time of one picture"
    ),
    Column("missed", "", "lower", "events that are seen and not heard"),
    Column("extra", "", "lower", "onsets that are heard without an event"),
    Column("av_align", "", "higher", "peaks of motion and of sound that fall together, over all (AV-Align)"),
    Column("loudness", "LUFS", "", "integrated loudness"),
)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Events that are seen and heard. Attributes: pairs (seen, heard); missed and extra: those left, in seconds."""

    pairs: tuple[tuple[float, float], ...]
    missed: tuple[float, ...]
    extra: tuple[float, ...]


def paired(seen: Sequence[float] | np.ndarray, heard: Sequence[float] | np.ndarray, reach: float = REACH) -> Pairs:
    """The assignment of least Σ min(|heard − seen|, reach); pairs at `reach` or beyond are taken apart."""
    seen, heard = np.asarray(seen, np.float64), np.asarray(heard, np.float64)
    distance = np.minimum(np.abs(seen[:, None] - heard[None, :]), reach)
    rows, columns = linear_sum_assignment(distance)
    kept = [(i, j) for i, j in zip(rows, columns) if distance[i, j] < reach]
    left = np.delete(seen, [i for i, _ in kept]), np.delete(heard, [j for _, j in kept])
    pairs = tuple((float(seen[i]), float(heard[j])) for i, j in kept)
    return Pairs(pairs, tuple(left[0].tolist()), tuple(left[1].tolist()))


def score(clip: Clip, more: Iterable[Metric] = ()) -> dict[str, Any]:
    """The numbers above by name, with `seen` and `heard` (seconds), `scene` ("plain" or "any", which says how events
    were found) and those of `more`. A number that a clip does not have is None."""
    plain = plain_scene(clip.frames)
    peaks = align.motion_peaks(clip.frames, clip.frame_rate)
    seen = picture_events(clip.frames, clip.frame_rate) if plain else peaks
    heard = sound_onsets(clip.audio, clip.sample_rate)
    matched = paired(seen, heard)
    delays = np.array([there - here for here, there in matched.pairs])
    within = np.abs(delays) <= 1 / clip.frame_rate
    union = len(seen) + len(heard) - int(within.sum())
    result: dict[str, Any] = {
        "scene": "plain" if plain else "any",
        "seen": [round(float(time), 4) for time in seen],
        "heard": [round(float(time), 4) for time in heard],
        "offset_ms": float(np.abs(delays).mean() * 1000) if len(delays) else None,
        "signed_ms": float(np.median(delays) * 1000) if len(delays) else None,
        "within_frame": float(within.sum() / len(seen)) if len(seen) else None,
        "together": float(within.sum() / union) if union else None,
        "missed": len(matched.missed),
        "extra": len(matched.extra),
        "av_align": align.av_align(peaks, align.onset_peaks(clip.audio, clip.sample_rate), clip.frame_rate),
        "loudness": loudness(clip),
    }
    return result | {metric.name: metric(clip) for metric in more}


def summary(rows: Sequence[Mapping[str, Any]], names: Iterable[str], draws: int = 2000) -> dict[str, Any]:
    """The mean over clips that have a number, the count of these clips, and a 95 % interval by resampling clips."""
    result: dict[str, Any] = {}
    for name in names:
        values = np.array([row[name] for row in rows if row.get(name) is not None], np.float64)
        if not len(values):
            result[name] = {"mean": None, "clips": 0, "interval": None}
            continue
        again = np.random.default_rng(0).choice(values, (draws, len(values))).mean(axis=1)
        interval = [float(bound) for bound in np.percentile(again, [2.5, 97.5])] if len(values) > 1 else None
        result[name] = {"mean": float(values.mean()), "clips": len(values), "interval": interval}
    return result


# Two clips


def psnr(frames: UInt8[np.ndarray, "*n"], reference: UInt8[np.ndarray, "*n"]) -> float:
    """10 log₁₀(255² / mean squared difference), in dB; infinite for equal pictures."""
    if frames.shape != reference.shape:
        raise ValueError(f"pictures of shapes {frames.shape} and {reference.shape}: give equal ones")
    error = float(np.square(frames.astype(np.float64) - reference).mean())
    return 10 * math.log10(255**2 / error) if error else math.inf


def spectral_distance(audio: Float[np.ndarray, " n"], reference: Float[np.ndarray, " n"], sample_rate: int) -> float:
    """Mean |difference| of log spectra in dB, over windows of 8, 32 and 128 ms that overlap by three quarters.

    Bins more than 60 dB under the loudest of the reference are raised to there, so that silence against silence is 0.
    """
    if audio.shape != reference.shape:
        raise ValueError(f"sounds of {audio.shape} and {reference.shape} samples: give equal lengths")
    distances = []
    for seconds in (0.008, 0.032, 0.128):
        window = max(16, round(seconds * sample_rate))
        both = [_spectrum(sound, window) for sound in (audio, reference)]
        floor = max(1e-8, float(both[1].max()) * 1e-3)
        logs = [20 * np.log10(np.maximum(spectrum, floor)) for spectrum in both]
        distances.append(np.abs(logs[0] - logs[1]).mean())
    return float(np.mean(distances))


def _spectrum(audio: np.ndarray, window: int) -> np.ndarray:
    padded = np.pad(np.asarray(audio, np.float64), window // 2)
    padded = np.pad(padded, (0, max(0, window - len(padded))))
    cut = np.lib.stride_tricks.sliding_window_view(padded, window)[:: window // 4]
    return np.abs(np.fft.rfft(cut * np.hanning(window), axis=1))


# Speech of several people


def cpcer(reference: Mapping[str, str], hypothesis: Mapping[str, str]) -> float:
    """Concatenated minimum-permutation character error rate.

    min over assignments of speakers of Σ edits(reference, hypothesis) / characters of the reference. A text is
    everything that a speaker says, joined; a speaker whom the other side lacks is compared with silence. Raises
    ValueError for a reference without characters.
    """
    characters = sum(len(text) for text in reference.values())
    if not characters:
        raise ValueError("reference: has no characters; an error rate needs some")
    said, heard = list(reference.values()), list(hypothesis.values())
    count = max(len(said), len(heard))
    said += [""] * (count - len(said))
    heard += [""] * (count - len(heard))
    edits = np.array([[edit_distance(a, b) for b in heard] for a in said])
    return int(edits[linear_sum_assignment(edits)].sum()) / characters


def edit_distance(first: str, second: str) -> int:
    """Fewest insertions, deletions and substitutions of characters that make one text of the other."""
    row = np.arange(len(second) + 1)
    letters = np.array(list(second), dtype=object)
    for n, letter in enumerate(first, start=1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (letters != letter))
        # insertions run along the row: the least of changed[k] + (j − k) over k ≤ j
        steps = np.arange(len(row))
        row = np.minimum.accumulate(np.concatenate([[n], changed]) - steps) + steps
    return int(row[-1])


# What coding does


def coding_loss(codec: Any, clips: Iterable[Clip]) -> dict[str, Any]:
    """The loss of a codec (`codecs.ClipCodec`) over clips: mean and worst PSNR, spectral distance, the shift of onsets
    and events (mean and 95th percentile), and the number of clips with a lost or an extra one.
    """
    psnrs: list[float] = []
    distances: list[float] = []
    moved: dict[str, list[float]] = {"onsets": [], "events": []}
    changed = {"onsets": 0, "events": 0}
    for clip in clips:
        coded = codec.through(clip)
        psnrs.append(psnr(coded.frames, clip.frames))
        distances.append(spectral_distance(coded.audio, clip.audio, clip.sample_rate))
        found = [
            {"onsets": sound_onsets(one.audio, one.sample_rate), "events": picture_events(one.frames, one.frame_rate)}
            for one in (clip, coded)
        ]
        for name in moved:
            matched = paired(found[0][name], found[1][name])
            moved[name] += [abs(before - after) for before, after in matched.pairs]
            changed[name] += bool(matched.missed or matched.extra)
    rate = clip.frame_rate

    def spread(values: list[float], unit: float) -> list[float] | None:
        return [float(np.mean(values) * unit), float(np.percentile(values, 95) * unit)] if values else None

    return {
        "clips": len(psnrs),
        "psnr_db": float(np.mean(psnrs)),
        "psnr_db_worst": float(np.min(psnrs)),
        "events_moved_frames": spread(moved["events"], rate),
        "clips_with_other_events": changed["events"],
        "spectral_distance_db": float(np.mean(distances)),
        "onsets_moved_ms": spread(moved["onsets"], 1000),
        "clips_with_other_onsets": changed["onsets"],
    }
