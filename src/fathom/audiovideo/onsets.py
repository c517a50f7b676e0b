"""Detection of the times at which something is heard, and at which something is seen to happen.

Sound: times at which the energy afterwards is far above the energy before, where it rises the most.

Picture, of things before a plain wall: a thing that falls changes its direction at a kink of its path, found between
frames as the crossing of the two curves on either side; a flash is a rise of brightness, placed within its frame by the
share of the exposure that was lit. Where the scene is not plain, the peaks of motion stand in (`av_align`), as exact as
a frame is long.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

AFTER, BEFORE = 0.008, 0.016  # seconds of sound that are compared
RISE = 6.0  # dB from before to after that make an onset
FLOOR = 45.0  # dB under the loudest moment: what is quieter is silence
APART = 0.06  # seconds between onsets
BACK, AHEAD = 0.005, 0.025  # seconds about a maximum of the ratio in which the steepest rise is sought
SILENT = 1e-3  # a peak below this is no sound
FOREGROUND = 18.0  # levels of 255 by which a thing differs from the wall
BRIGHTER = 15.0  # levels by which a flash brightens the pixels of its thing
MOVES = 2.5  # pixels of path under which a thing is still
KINK = 0.7  # pixels per frame by which speed jumps at an impact, at least


def sound_onsets(audio: Float[np.ndarray, " n"], sample_rate: int) -> Float[np.ndarray, " k"]:
    """Seconds of the onsets: maxima of 10 log₁₀(E_after / E_before) above `RISE`, of the differentiated signal, each
    moved to where E_after − E_before is largest near it: a codec lets a sound be heard faintly before it starts.
    """
    audio = np.asarray(audio, np.float64)
    if len(audio) < 2 or np.abs(audio).max() < SILENT:
        return np.empty(0)
    before, after = round(BEFORE * sample_rate), max(1, round(AFTER * sample_rate))
    sharp = np.diff(audio, prepend=0.0) ** 2
    total = np.concatenate([[0.0], np.cumsum(np.pad(sharp, (before, after)))])
    at = np.arange(len(audio)) + before
    later, earlier = (total[at + after] - total[at]) / after, (total[at] - total[at - before]) / before
    quiet = later.max() * 10 ** (-FLOOR / 10)
    rise = 10 * np.log10((np.maximum(later, 0) + quiet) / (np.maximum(earlier, 0) + quiet))
    ahead, back = round(AHEAD * sample_rate), round(BACK * sample_rate)
    starts = np.maximum(0, _peaks(rise, RISE, round(APART * sample_rate)) - back)
    steepest = [start + int((later - earlier)[start : start + back + ahead].argmax()) for start in starts]
    return np.array(steepest, dtype=np.float64) / sample_rate


def _peaks(values: np.ndarray, least: float, apart: int) -> np.ndarray:
    """Places of the largest values, from the largest down, none nearer to another than `apart`."""
    found: list[int] = []
    left = np.where(values >= least, values, -np.inf)
    while np.isfinite(left).any():
        place = int(left.argmax())
        found.append(place)
        left[max(0, place - apart) : place + apart + 1] = -np.inf
    return np.sort(np.array(found, dtype=np.int64))


def plain_scene(frames: UInt8[np.ndarray, "F H W 3"]) -> bool:
    """Whether things stand before a plain wall: every row of it is uniform, and less than half of it is covered."""
    return bool((_difference(luma(frames)) > FOREGROUND).mean() < 0.5)


def picture_events(frames: UInt8[np.ndarray, "F H W 3"], frame_rate: float) -> Float[np.ndarray, " k"]:
    """Seconds of impacts and flashes of all things in a plain scene."""
    light = luma(frames)
    difference = _difference(light)
    columns = (difference > FOREGROUND).any(axis=(0, 1))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], columns, [False]]).astype(np.int8)))
    times: list[float] = []
    for left, right in zip(edges[::2], edges[1::2]):
        if right - left < 3:
            continue  # noise of a codec
        strip = slice(left, right)
        times += _flashes(light[:, :, strip], difference[:, :, strip], frame_rate)
        times += _impacts(difference[:, :, strip], frame_rate)
    return np.sort(np.array(times))


def _difference(light: np.ndarray) -> np.ndarray:
    """How much darker or lighter each pixel is than the wall: the median of its row over pictures and columns.

    In levels of luma, as video files hold colours at half the resolution, which would blur the path of a thing.
    """
    wall = np.median(light[:: max(1, len(light) // 12)], axis=(0, 2), keepdims=True)
    return np.abs(light - wall)


def luma(frames: UInt8[np.ndarray, "F H W 3"]) -> Float[np.ndarray, "F H W"]:
    """Brightness of each pixel, 0 … 255 (BT.601's weights)."""
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    return np.stack([frame.astype(np.float32) @ weights for frame in frames])  # one by one: films are long


def _flashes(light: np.ndarray, difference: np.ndarray, frame_rate: float) -> list[float]:
    region = (difference > FOREGROUND).any(axis=0)
    light = light[:, region].mean(axis=1)
    dark = float(np.median(light))
    brightest = float(light.max() - dark)
    if brightest < BRIGHTER:
        return []
    share = np.clip((light - dark) / brightest, 0, 1)
    share = np.where(share < 0.05, 0, share)  # noise of a codec
    rises = 1 + np.flatnonzero((share[1:] >= 0.5) & (share[:-1] < 0.5))
    # the first frame of a flash is lit for a part of its exposure, the next one wholly
    return [float((i + 0.5 - share[i - 1] - min(1.0, share[i] / max(share[i : i + 2]))) / frame_rate) for i in rises]


def _impacts(difference: np.ndarray, frame_rate: float) -> list[float]:
    solid = np.minimum(difference, np.percentile(difference[difference > FOREGROUND], 60)).astype(np.float64)
    solid[difference <= FOREGROUND] = 0
    mass = solid.sum(axis=(1, 2))
    seen = mass > 0.3 * np.median(mass)
    if seen.sum() < 6:
        return []
    rows = np.arange(difference.shape[1])
    frame = np.flatnonzero(seen)
    path = np.interp(np.arange(len(mass)), frame, (solid.sum(axis=2)[frame] @ rows) / mass[frame])  # downwards
    if np.ptp(path) < MOVES:
        return []
    speed = np.diff(path)
    falling = np.diff(speed)[(np.abs(speed[1:]) > 0.5) & (np.diff(speed) > 0)]
    gravity = float(np.median(falling)) if len(falling) else 0.0
    # from frame k to k + 1 the speed is mixed; before it is down, afterwards up or nothing
    jump = np.zeros(len(speed))
    jump[1:-1] = speed[:-2] - speed[2:] + 2 * gravity
    jump[1:-1][speed[:-2] < KINK / 2] = 0
    kinks = _peaks(jump, KINK + gravity, 2)
    # an impact is the lowest place far and near; a fall that falters, as a codec may show it, is none
    kinks = kinks[[path[k : k + 2].max() >= path[max(0, k - 3) : k + 5].max() - 0.25 for k in kinks]]
    times = []
    for n, k in enumerate(kinks):
        first = kinks[n - 1] + 1 if n else 0
        last = kinks[n + 1] if n + 1 < len(kinks) else len(path) - 1
        before, after = np.arange(max(first, k - 4), k + 1), np.arange(k + 1, min(last, k + 5) + 1)
        if len(before) > 1 and len(after) > 1:
            times.append(_crossing(path, before, after, gravity, k) / frame_rate)
    return times


def _crossing(path: np.ndarray, before: np.ndarray, after: np.ndarray, gravity: float, k: int) -> float:
    """Where two flights of the same gravity meet, or a flight and a rest, in frames."""
    rests = np.ptp(path[after]) < 0.5
    slope, start = np.polyfit(before - k, path[before] - 0.5 * gravity * (before - k) ** 2, 1)
    if rests:
        roots = np.roots([0.5 * gravity, slope, start - path[after].mean()])
        real = roots[np.isreal(roots)].real
        at = float(real[np.abs(real - 0.5).argmin()]) if len(real) else 0.5
    else:
        slope_after, start_after = np.polyfit(after - k, path[after] - 0.5 * gravity * (after - k) ** 2, 1)
        at = float((start_after - start) / (slope - slope_after)) if slope != slope_after else 0.5
    return k + float(np.clip(at, -0.25, 1.25))
