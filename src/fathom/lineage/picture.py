"""From a 512-vector to a picture that a person recognises: a creature whose features are smooth functions of the
vector.

Feature i is Φ(wᵢ·v/‖v‖·√512), uniform in (0, 1) for a random vector, with fixed orthonormal directions wᵢ: two
near vectors get
nearly the same creature, two unrelated ones differ in colour, outline, eyes, ears, mouth and coat. Not the dogs of
HuRef's
StyleGAN2; for those, give `stylegan2` your own generator weights.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from scipy.special import ndtr

Picture = np.ndarray
"""[height, width, 3], uint8."""
Renderer = Callable[[np.ndarray], Picture]
"""A picture generator: 512-vector → picture. Must be deterministic and smooth."""

_FEATURES = 40


def _directions() -> np.ndarray:
    """Orthonormal [40, 512], the same on every machine: a cosine basis in an order fixed by a small generator."""
    order, state = list(range(1, 512)), 2312_04828
    for i in range(len(order) - 1, 0, -1):  # Fisher-Yates with a linear congruential generator: no library's stream
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        j = (state >> 33) % (i + 1)
        order[i], order[j] = order[j], order[i]
    # mix each frequency with alternating signs, so that a feature is no plain Fourier component of neighbouring bins
    n = np.arange(512)
    return np.sqrt(2 / 512) * np.cos(np.pi * (n + 0.5) * np.array(order[:_FEATURES])[:, None] / 512)


def features(vector: np.ndarray) -> np.ndarray:
    """[40] numbers in (0, 1); Lipschitz in the direction of the vector."""
    v = np.asarray(vector, dtype=np.float64)
    if v.shape != (512,) or not np.isfinite(v).all() or not v.any():
        raise ValueError(f"vector: shape {v.shape}; expected 512 finite numbers, not all zero")
    return ndtr(_directions() @ (v / np.linalg.norm(v)) * math.sqrt(512))


def creature(vector: np.ndarray, size: int = 256) -> Picture:
    """The embedded default renderer: a deterministic picture [size, size, 3], continuous in the vector."""
    take = iter(features(vector))
    y, x = np.mgrid[0:size, 0:size] * (2.4 / (size - 1)) - 1.2
    image = _background(x, y, take)
    head_x, head_y = 0.62 + 0.22 * next(take), 0.6 + 0.26 * next(take)
    coat, second = _colour(next(take), 0.45 + 0.5 * next(take), 0.45 + 0.45 * next(take)), _colour(next(take), 0.8, 0.8)

    # ears (or horns) behind the head: two mirrored ellipses
    spread, lift, long, wide, tilt = (next(take) for _ in range(5))
    for side in (-1, 1):
        cx, cy = side * (0.25 + 0.4 * spread) * head_x / 0.7, -head_y * (0.55 + 0.45 * lift)
        angle = side * (tilt - 0.35) * 2.2
        u = (x - cx) * math.cos(angle) + (y - cy) * math.sin(angle)
        v = -(x - cx) * math.sin(angle) + (y - cy) * math.cos(angle)
        a, b = 0.1 + 0.16 * wide, 0.16 + 0.4 * long
        image = _paint(image, 0.75 * coat, 1 - np.hypot(u / a, v / b), a)
        image = _paint(image, second, 0.6 - np.hypot(u / a, v / b), a)

    # head: an ellipse with three harmonics in its outline, a coat pattern of smooth stripes and spots inside
    theta = np.arctan2(y / head_y, np.abs(x) / head_x)
    bumps = sum(0.09 * (2 * next(take) - 1) * np.cos(k * theta) for k in (2, 3, 5))
    outline = 1 + bumps - np.hypot(x / head_x, y / head_y)
    fx, fy, phase, contrast = 2 + 7 * next(take), 2 + 7 * next(take), 6 * next(take), next(take)
    pattern = np.cos(fx * np.abs(x) + phase) * np.cos(fy * y - phase) * (0.15 + 0.85 * contrast)
    weight = np.clip(0.5 + pattern, 0, 1)[..., None]
    image = _paint(image, coat * (1 - 0.55 * weight) + second * 0.55 * weight, outline, 0.5)

    # muzzle, mouth, nose
    mw, mh, my = 0.18 + 0.22 * next(take), 0.14 + 0.16 * next(take), 0.22 + 0.2 * next(take)
    image = _paint(image, 0.35 * coat + 0.65, 1 - np.hypot(x / mw, (y - my) / mh), mh)
    bend, mouth_w = 0.5 * (2 * next(take) - 1), (0.5 + 0.4 * next(take)) * mw
    curve = my + 0.35 * mh + bend * (mouth_w**2 - x**2) / max(mouth_w, 0.1)
    inside = np.minimum(0.018 - np.abs(y - curve), mouth_w - np.abs(x))
    image = _paint(image, np.array([0.25, 0.08, 0.1]), inside, 1)
    nose_w, nose_hue = 0.05 + 0.07 * next(take), next(take)
    nose = 1 - np.hypot(x / nose_w, (y - my + 0.45 * mh) / (0.7 * nose_w))
    image = _paint(image, _colour(nose_hue, 0.6, 0.35), nose, nose_w)

    # eyes
    apart, height, big, pupil = 0.2 + 0.2 * next(take), -0.02 - 0.25 * next(take), 0.09 + 0.1 * next(take), next(take)
    squint, iris_hue, look = 0.55 + 0.45 * next(take), next(take), 0.3 * (2 * next(take) - 1)
    for side in (-1, 1):
        cx, cy = side * apart, height
        image = _paint(image, np.ones(3), 1 - np.hypot((x - cx) / big, (y - cy) / (big * squint)), big)
        iris = 0.68 - np.hypot((x - cx - look * big) / big, (y - cy) / big)
        lid = 1 - np.hypot((x - cx) / big, (y - cy) / (big * squint))
        image = _paint(image, _colour(iris_hue, 0.9, 0.75), np.minimum(iris, lid), big)
        dark = 0.22 + 0.3 * pupil - np.hypot((x - cx - look * big) / big, (y - cy) / big)
        image = _paint(image, np.full(3, 0.05), np.minimum(dark, lid), big)
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def _background(x: np.ndarray, y: np.ndarray, take: Iterator[float]) -> np.ndarray:
    """A gradient between two hues across a turning direction."""
    one, two, angle = _colour(next(take), 0.55, 0.95), _colour(next(take), 0.6, 0.75), next(take) * math.pi
    along = np.clip(0.5 + 0.35 * (x * math.cos(angle) + y * math.sin(angle)), 0, 1)[..., None]
    return one * (1 - along) + two * along


def _colour(hue: float, saturation: float, value: float) -> np.ndarray:
    """HSV to RGB by three shifted cosines: smooth everywhere. Hue covers 5/6 of the circle, so 0 and 1 stay apart."""
    wheel = 0.5 + 0.5 * np.cos(2 * np.pi * (hue * 5 / 6 + np.array([0, -1 / 3, 1 / 3])))
    return value * (1 - saturation + saturation * wheel)


def _paint(image: np.ndarray, colour: np.ndarray, inside: np.ndarray, scale: float) -> np.ndarray:
    """Blend a colour where `inside` > 0, with an edge about two pixels wide (`scale`: units of `inside` to picture
    units)."""
    edge = 2.4 / image.shape[0] * 1.5
    alpha = np.clip(0.5 + inside * scale / edge, 0, 1)[..., None]
    return image * (1 - alpha) + colour * alpha


def distance(a: Picture, b: Picture) -> float:
    """The visible difference of two pictures: root mean square difference, 0 … 1, after a blur to 32 × 32."""
    if a.shape != b.shape:
        raise ValueError(f"a, b: shapes {a.shape} and {b.shape}; pictures of one size are compared")
    block = a.shape[0] // 32
    small = [p.astype(np.float64).reshape(32, block, 32, block, 3).mean((1, 3)) / 255 for p in (a, b)]
    return float(np.sqrt(np.mean((small[0] - small[1]) ** 2)))


def save_picture(picture: Picture, path: str | Path) -> None:
    """Write a PNG."""
    from PIL import Image

    Image.fromarray(picture).save(path)
