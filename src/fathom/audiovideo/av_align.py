"""AV-Align: do peaks of motion and onsets of sound fall together?

    score = matches / (A + V − matches), 0 without peaks

V peaks are strict local maxima of at least 0.1 of the mean length of optical flow between picture i − 1 and i (entry 0
repeats the first pair) at time i/fps; A peaks the onsets of the sound at 44.1 kHz. Each sound peak takes the first free
peak of motion nearer than 1/fps.

Flow is Farnebäck's polynomial expansion (2003) with OpenCV's parameters; onsets are librosa's default detector. Both
are implemented here, as neither package is needed for anything else.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
from jaxtyping import Float, UInt8
from scipy.ndimage import correlate1d, uniform_filter1d
from scipy.signal import resample_poly

from fathom.audiovideo.onsets import luma

RATE, HOP, WINDOW, BANDS = 44_100, 512, 2048, 128  # of the onset detector
LEAST_MOTION = 0.1  # mean pixels of flow that make a peak
SCALE, LEVELS, SIDE, ITERATIONS, RADIUS, SIGMA = 0.5, 3, 15, 3, 5, 1.2  # of the flow
SMALLEST = 32  # sides of the coarsest level
BORDER = np.array([0.14, 0.14, 0.4472, 0.4472, 0.4472], np.float32)  # trust in the outermost pixels


def av_align(motion: Float[np.ndarray, " k"], sound: Float[np.ndarray, " n"], frame_rate: float) -> float:
    """The score of two lists of times."""
    if not len(motion) and not len(sound):
        return 0.0
    free, matches = list(motion), 0
    for time in sound:
        near = next((peak for peak in free if abs(time - peak) < 1 / frame_rate), None)
        if near is not None:
            free.remove(near)
            matches += 1
    return matches / (len(sound) + len(motion) - matches)


def motion_peaks(frames: UInt8[np.ndarray, "F H W 3"], frame_rate: float) -> Float[np.ndarray, " k"]:
    """Seconds of the peaks of motion."""
    amount = motion(frames)
    inner = amount[1:-1]
    peaks = (inner > amount[:-2]) & (inner > amount[2:]) & (inner >= LEAST_MOTION)
    return (1 + np.flatnonzero(peaks)) / frame_rate


def motion(frames: UInt8[np.ndarray, "F H W 3"]) -> Float[np.ndarray, " F"]:
    """Mean length of the flow between each picture and the one before, in pixels; entry 0 repeats entry 1."""
    if len(frames) < 2:
        return np.zeros(len(frames))
    expanded = (_expansions(picture) for picture in np.rint(luma(frames)))  # one by one: films are long
    lengths = [np.hypot(*_between(before, after)).mean() for before, after in itertools.pairwise(expanded)]
    return np.array([lengths[0], *lengths])


def flow(before: Float[np.ndarray, "H W"], after: Float[np.ndarray, "H W"]) -> Float[np.ndarray, "2 H W"]:
    """(right, down) displacement of every pixel between two grey pictures."""
    return _between(_expansions(before), _expansions(after))


def _expansions(picture: np.ndarray) -> list[np.ndarray]:
    """The picture's parabolas, from the coarsest level to the finest."""
    height, width = picture.shape
    levels = 0
    while levels < LEVELS and min(height, width) * SCALE ** (levels + 1) >= SMALLEST:
        levels += 1
    shares = [SCALE**level for level in range(levels, -1, -1)]
    sizes = [(round(height * share), round(width * share)) for share in shares]
    return [_expansion(_resized(_smoothed(picture, share), size)) for share, size in zip(shares, sizes)]


def _between(before: list[np.ndarray], after: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((2, *before[0].shape[1:]), np.float32)
    for first, second in zip(before, after):
        if found.shape[1:] != first.shape[1:]:
            found = _resized(found, first.shape[1:]) / np.float32(SCALE)
        for _ in range(ITERATIONS):
            found = _updated(found, first, second)
    return found


def _smoothed(picture: np.ndarray, share: float) -> np.ndarray:
    sigma = (1 / share - 1) / 2
    taps = max(3, round(sigma * 5) | 1)
    if sigma:
        kernel = np.exp(-((np.arange(taps) - taps // 2) ** 2) / (2 * sigma**2))
        kernel /= kernel.sum()
    else:
        kernel = np.array([0.25, 0.5, 0.25])
    kernel = kernel.astype(np.float32)
    rows = correlate1d(picture.astype(np.float32), kernel, axis=0, mode="mirror")
    return correlate1d(rows, kernel, axis=1, mode="mirror")


def _resized(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear, with pixels' centres in place, over the last two axes."""
    for axis, to in ((-2, size[0]), (-1, size[1])):
        there = x.shape[axis]
        if there == to:
            continue
        at = np.clip((np.arange(to) + 0.5) * there / to - 0.5, 0, there - 1)
        low = np.minimum(at.astype(int), there - 2)
        part = (at - low).astype(np.float32)
        part = part[:, None] if axis == -2 else part
        x = np.take(x, low, axis) * (1 - part) + np.take(x, low + 1, axis) * part
    return x


@lru_cache
def _kernels() -> tuple[np.ndarray, np.ndarray]:
    """Gaussian taps, and the inverse of the normal equations for 1, x, y, x², y², xy."""
    taps = np.arange(-RADIUS, RADIUS + 1)
    weights = np.exp(-(taps**2) / (2 * SIGMA**2))
    weights /= weights.sum()
    y, x = np.meshgrid(taps, taps, indexing="ij")
    basis = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y]).reshape(6, -1)
    return weights, np.linalg.inv((basis * np.outer(weights, weights).ravel()) @ basis.T)


def _expansion(picture: np.ndarray) -> np.ndarray:
    """[5, H, W]: coefficients of x, y, x², y², xy of the parabola about every pixel."""
    weights, inverse = _kernels()
    taps = np.arange(-RADIUS, RADIUS + 1)
    down = [correlate1d(picture, (weights * taps**n).astype(np.float32), axis=0, mode="nearest") for n in range(3)]

    def moment(n: int, m: int) -> np.ndarray:
        return correlate1d(down[m], (weights * taps**n).astype(np.float32), axis=1, mode="nearest")

    moments = np.stack([moment(*powers) for powers in ((0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1))])
    return np.tensordot(inverse[1:].astype(np.float32), moments, axes=1)


def _updated(found: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """One step: the displacement that best carries the first parabolas to the second, over a window."""
    height, width = found.shape[1:]
    y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    at_x, at_y = x + found[0], y + found[1]
    left, top = np.floor(at_x).astype(int), np.floor(at_y).astype(int)
    inside = (left >= 0) & (left < width - 1) & (top >= 0) & (top < height - 1)
    left, top = np.clip(left, 0, width - 2), np.clip(top, 0, height - 2)
    part_x, part_y = (at_x - left).astype(np.float32), (at_y - top).astype(np.float32)
    upper = second[:, top, left] * (1 - part_x) + second[:, top, left + 1] * part_x
    lower = second[:, top + 1, left] * (1 - part_x) + second[:, top + 1, left + 1] * part_x
    there = upper * (1 - part_y) + lower * part_y
    linear = np.where(inside, first[:2] - there[:2], first[:2]) / 2
    xx, yy = np.where(inside, (first[2:4] + there[2:4]) / 2, first[2:4])
    xy = np.where(inside, (first[4] + there[4]) / 4, first[4] / 2)
    right = linear[0] + xx * found[0] + xy * found[1]
    below = linear[1] + xy * found[0] + yy * found[1]
    trust = np.outer(_trust(height), _trust(width))
    right, below, xx, yy, xy = (part * trust for part in (right, below, xx, yy, xy))
    sums = np.stack(
        [xx * xx + xy * xy, (xx + yy) * xy, yy * yy + xy * xy, xx * right + xy * below, xy * right + yy * below]
    )
    sums = uniform_filter1d(uniform_filter1d(sums, SIDE, axis=1, mode="nearest"), SIDE, axis=2, mode="nearest")
    a, b, c, u, v = sums
    scale = 1 / (a * c - b * b + 1e-3)
    return np.stack([(c * u - b * v) * scale, (a * v - b * u) * scale]).astype(np.float32)


def _trust(length: int) -> np.ndarray:
    trust = np.ones(length, np.float32)
    edge = min(len(BORDER), length)
    trust[:edge] *= BORDER[:edge]
    trust[length - edge :] *= BORDER[:edge][::-1]
    return trust


# Onsets as librosa finds them


def onset_peaks(audio: Float[np.ndarray, " n"], sample_rate: int) -> Float[np.ndarray, " k"]:
    """Seconds of the onsets."""
    common = math.gcd(RATE, sample_rate)
    audio = resample_poly(np.asarray(audio, np.float64), RATE // common, sample_rate // common)
    strength = onset_strength(audio)
    strength = strength - strength.min()
    if not strength.any():
        return np.empty(0)
    return _picked(strength / strength.max()) * HOP / RATE


def onset_strength(audio: Float[np.ndarray, " n"]) -> Float[np.ndarray, " frames"]:
    """Mean over mel bands of the rise of the power, in dB, from one window to the next."""
    padded = np.pad(audio, WINDOW // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(windows * hann, axis=1)) ** 2
    decibels = 10 * np.log10(np.maximum(power @ _mel_bands().T, 1e-10))
    decibels = np.maximum(decibels, decibels.max() - 80)
    rise = np.maximum(0, np.diff(decibels, axis=0)).mean(axis=1)
    shift = 1 + WINDOW // (2 * HOP)  # so that a rise stands at the middle of its window
    return np.pad(rise, (shift, 0))[: len(power)]


@lru_cache
def _mel_bands() -> np.ndarray:
    """[bands, bins] triangles of equal area, on Slaney's scale: linear up to 1 kHz, then logarithmic."""
    step = math.log(6.4) / 27

    def hertz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp(step * (mel - 15)))

    top = 15 + math.log(RATE / 2 / 1000) / step
    edges = hertz(np.linspace(0, top, BANDS + 2))
    bins = np.fft.rfftfreq(WINDOW, 1 / RATE)
    widths = np.diff(edges)
    up = (bins - edges[:-2, None]) / widths[:-1, None]
    down = (edges[2:, None] - bins) / widths[1:, None]
    return np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2]))[:, None]


def _picked(strength: np.ndarray) -> np.ndarray:
    """Onset frames: each is the largest of the 30 ms before it, exceeds the mean of 100 ms on either side by 0.07, and
    comes more than 30 ms after the last."""
    short, long = int(0.03 * RATE // HOP), int(0.10 * RATE // HOP)
    picked: list[int] = []
    for n, value in enumerate(strength):
        largest = strength[max(0, n - short) : n + 1].max()
        mean = strength[max(0, n - long) : n + long + 1].mean()
        if value == largest and value >= mean + 0.07 and (not picked or n - picked[-1] > short):
            picked.append(n)
    return np.array(picked, dtype=np.int64)
