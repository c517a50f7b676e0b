"""Clips made by rule, with events in picture and sound known to the microsecond.

    bounce   a thing falls from rest and bounces: its height in the first picture determines when it will be heard
    flash    a thing lights up at unpredictable times: only an exchange between picture and sound can align them

Material, colour and size of a thing are seen and heard:

    material   shape; partials and decay of the sound; how much of its speed a bounce keeps
    colour     pitch
    size       pitch: the large ones sound a fifth lower
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt8

from fathom.audiovideo.clips import Clip, samples_of


class Material(NamedTuple):
    """The sound and bounce of a material.

    partials: frequencies / the lowest frequency.   decay: of the amplitude, per second.
    keeps: speed after a bounce / speed before it.
    """

    noun: str
    partials: tuple[float, ...]
    decay: float
    keeps: float


MATERIALS = {
    "metal": Material("ball", (1.0, 2.76, 5.40), 9.0, 0.74),
    "wooden": Material("block", (1.0, 2.57), 40.0, 0.55),
    "glass": Material("ring", (1.0, 2.32, 4.25), 18.0, 0.65),
}
COLOURS = {  # name: (RGB, lowest frequency in Hz of a large thing)
    "red": ((215, 40, 40), 330.0),
    "orange": ((215, 110, 20), 415.0),
    "green": ((30, 150, 60), 523.0),
    "blue": ((40, 80, 210), 659.0),
    "purple": ((130, 40, 160), 831.0),
}
SIZES = {"small": (0.085, 1.5), "large": (0.13, 1.0)}  # name: (radius over the picture's height, frequency over lowest)
GRAVITY = 2.4  # picture heights per s²
FLOOR = 0.88  # where things land, in picture heights from above
LIT = 3  # pictures that a flash lasts
STILL = 0.34  # a thing whose next flight would be shorter, in seconds, stays where it lies
APART = 0.15  # seconds between any two events, so that each is heard by itself
MARGIN = 0.12  # seconds at either end without events
ACTIONS = ("bounce", "flash")


class Thing(NamedTuple):
    """A thing in a clip. x and top in picture heights; events in seconds, strengths in 0 … 1."""

    action: str
    material: str
    colour: str
    size: str
    x: float
    bottom: float
    events: tuple[float, ...]
    strengths: tuple[float, ...]

    @property
    def caption(self) -> str:
        does = "bounces" if self.action == "bounce" else "flashes"
        return f"a {self.size} {self.colour} {self.material} {MATERIALS[self.material].noun} {does}"


@dataclasses.dataclass(frozen=True)
class Generator:
    """Clip number n is a function of the options and n: `Generator(seed=1).clip(7)`.

    Options:
        seed: of all clips.
        actions: drawn for each thing, of "bounce" and "flash".
        things: number of things in a clip: 1, 2, or 0 for either.
        materials, colours, thing_sizes: drawn for each thing, of `MATERIALS`, `COLOURS` and `SIZES`.
        fixed: whether a thing's first place and the brightness of wall and floor are the same in every clip; when
            something happens still differs. For things that flash.
        flashes: the most flashes of a thing.
        frames: pictures of a clip.
        frame_rate: pictures per second.
        size: height and width.
        sample_rate: samples per second.
        silent: share of clips without sound. Their captions say so.
        shifted: share of clips whose sound comes 0.15 to 0.4 s too early or too late. Their captions say so.
    """

    seed: int = 0
    actions: tuple[str, ...] = ACTIONS
    things: int = 1
    materials: tuple[str, ...] = tuple(MATERIALS)
    colours: tuple[str, ...] = tuple(COLOURS)
    thing_sizes: tuple[str, ...] = tuple(SIZES)
    fixed: bool = False
    flashes: int = 3
    frames: int = 49
    frame_rate: float = 24.0
    size: tuple[int, int] = (64, 64)
    sample_rate: int = 8000
    silent: float = 0.0
    shifted: float = 0.0

    def __post_init__(self) -> None:
        known_words = {"actions": ACTIONS, "materials": MATERIALS, "colours": COLOURS, "thing_sizes": SIZES}
        for option, known in known_words.items():
            drawn = getattr(self, option)
            for name in drawn:
                if name not in known:
                    raise ValueError(f"{option}={drawn!r}: {name!r} is none of {', '.join(known)}")
            if not drawn:
                raise ValueError(f"{option}=(): name at least one of {', '.join(known)}")
        if self.things not in (0, 1, 2):
            raise ValueError(f"things={self.things}: use 1, 2, or 0 for one or two")
        if self.things != 1 and len(set(self.colours)) < 2:
            raise ValueError(f"colours={self.colours!r}: two things need two colours; name another, or use things=1")
        if self.fixed and set(self.actions) != {"flash"}:
            raise ValueError(
                f"fixed=True: what falls is heard when its height says, so that actions={self.actions!r} need heights "
                "that differ; use actions=('flash',)"
            )
        if not 1 <= self.flashes <= 3:
            raise ValueError(f"flashes={self.flashes}: use 1 to 3")
        if self.frames / self.frame_rate < 1:
            need = math.ceil(self.frame_rate)
            raise ValueError(f"frames={self.frames}: a clip lasts at least 1 s, {need} pictures at this rate")
        if min(self.size) < 32 or self.size[1] < self.size[0]:
            raise ValueError(f"size={self.size!r}: (height, width) of at least 32, width not below height")
        if min(self.silent, self.shifted) < 0 or self.silent + self.shifted > 1:
            raise ValueError(f"silent={self.silent}, shifted={self.shifted}: shares of all clips, at most 1 together")

    def clip(self, number: int) -> Clip:
        """Clip `number`."""
        draw = np.random.default_rng([self.seed, number])
        things = self._things(draw)
        caption = " and ".join(thing.caption for thing in things)
        offset: float | None = 0.0
        kind = draw.random()
        if kind < self.silent:
            caption, offset = f"{caption}, without sound", None
        elif kind < self.silent + self.shifted:
            offset = float(draw.choice([-1, 1]) * draw.uniform(0.15, 0.4))
            caption = f"{caption}, out of sync"
        samples = samples_of(self.frames, self.frame_rate, self.sample_rate)
        audio = np.zeros(samples, np.float32) if offset is None else sound(things, samples, self.sample_rate, offset)
        return Clip(
            frames=self._pictures(things, self._drawn(draw, 0.68, 0.82), self._drawn(draw, 0.4, 0.5)),
            frame_rate=self.frame_rate,
            audio=audio,
            sample_rate=self.sample_rate,
            caption=caption,
            events=tuple(sorted(time for thing in things for time in thing.events)),
            offset=offset,
        )

    def clips(self, count: int, first: int = 0) -> Iterator[Clip]:
        """Clips first … first + count − 1."""
        return (self.clip(number) for number in range(first, first + count))

    def _drawn(self, draw: np.random.Generator, low: float, high: float) -> float:
        """A number between these, or always their middle."""
        found = draw.uniform(low, high)
        return (low + high) / 2 if self.fixed else float(found)

    def _things(self, draw: np.random.Generator) -> list[Thing]:
        """Things whose events are all at least `APART`; the two never look alike."""
        width, duration = self.size[1] / self.size[0], self.frames / self.frame_rate
        count = self.things or int(draw.integers(1, 3))
        while True:
            sides = [(0.3, 0.7)] if count == 1 else [(0.2, 0.3), (0.7, 0.8)]
            places = [self._drawn(draw, *side) for side in sides]
            things = [self._thing(draw, x * width) for x in places]
            times = sorted(time for thing in things for time in thing.events)
            near = np.diff(times)
            inside = times[0] > MARGIN and times[-1] < duration - MARGIN - LIT / self.frame_rate
            if inside and (near >= APART).all() and len({thing.colour for thing in things}) == count:
                return things

    def _thing(self, draw: np.random.Generator, x: float) -> Thing:
        duration = self.frames / self.frame_rate
        action, material = str(draw.choice(self.actions)), str(draw.choice(list(self.materials)))
        colour, size = str(draw.choice(list(self.colours))), str(draw.choice(list(self.thing_sizes)))
        if action == "flash":
            latest = duration - MARGIN - LIT / self.frame_rate
            count = int(draw.integers(1, self.flashes + 1))
            while True:
                times = np.sort(draw.uniform(MARGIN, latest, count))
                if (np.diff(times) >= (LIT + 2) / self.frame_rate + 0.05).all():
                    break
            bottom = self._drawn(draw, 0.4, FLOOR)
            return Thing(action, material, colour, size, x, bottom, tuple(times.tolist()), (1.0,) * count)
        drop = float(draw.uniform(0.12, FLOOR - 2 * SIZES[size][0] - 0.02))
        events, strengths = impacts(drop, MATERIALS[material].keeps, duration)
        return Thing(action, material, colour, size, x, FLOOR, events, strengths)

    def _pictures(self, things: list[Thing], wall: float, floor: float) -> UInt8[np.ndarray, "F H W 3"]:
        height, width = self.size
        y = (np.arange(height) + 0.5) / height  # in picture heights, at the centres of pixels
        x = (np.arange(width) + 0.5) / height
        ground = np.arange(height) >= math.ceil(
            FLOOR * height
        )  # from the next whole row on: things cover the wall alone
        pictures = np.empty((self.frames, height, width, 3), np.float32)
        pictures[:] = (255 * (wall + (floor - wall) * ground))[:, None, None]
        for thing in things:
            radius, _ = SIZES[thing.size]
            light = (
                lit(thing.events, self.frames, self.frame_rate) if thing.action == "flash" else np.zeros(self.frames)
            )
            bottom = thing.bottom - heights(thing, np.arange(self.frames) / self.frame_rate)
            # only the columns that the thing can cover
            near = slice(*np.searchsorted(x, [thing.x - 2 * radius, thing.x + 2 * radius]))
            across = (x[near] - thing.x)[None, None, :]
            along = y[None, :, None] - (bottom - radius)[:, None, None]
            cover = _cover(thing.material, across, along, radius, 1 / height)[..., None]
            colour = np.array(COLOURS[thing.colour][0], np.float32)
            shade = light.astype(np.float32)[:, None, None, None]
            pictures[:, :, near] += cover * (colour + shade * (255 - colour) - pictures[:, :, near])
        return np.rint(pictures).astype(np.uint8)


def impacts(drop: float, keeps: float, duration: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(Times, speeds / the speed of a fall from 0.7) of the impacts of a thing that falls `drop` picture heights.

    t_0 = √(2 drop / g);  v_k = keeps^k · √(2 g drop);  t_{k+1} = t_k + 2 v_{k+1} / g
    """
    times, speeds = [math.sqrt(2 * drop / GRAVITY)], [math.sqrt(2 * GRAVITY * drop)]
    while (flight := 2 * keeps * speeds[-1] / GRAVITY) >= STILL and times[-1] + flight < duration:
        times.append(times[-1] + flight)
        speeds.append(keeps * speeds[-1])
    return tuple(times), tuple(speed / math.sqrt(2 * GRAVITY * 0.7) for speed in speeds)


def heights(thing: Thing, times: Float[np.ndarray, " F"]) -> Float[np.ndarray, " F"]:
    """Heights of a thing above its lowest place at these times, in picture heights."""
    if thing.action != "bounce":
        return np.zeros(len(times))
    events = np.array(thing.events)
    speeds = np.array(thing.strengths) * math.sqrt(2 * GRAVITY * 0.7)
    after = np.searchsorted(events, times, side="right")  # impacts so far
    keeps = MATERIALS[thing.material].keeps
    since = times - np.concatenate([[-events[0]], events])[after]  # a fall from rest is the second half of a flight
    speed = np.concatenate([speeds[:1], keeps * speeds])[after]
    return np.maximum(0.0, since * (speed - 0.5 * GRAVITY * since) * (2 * speed / GRAVITY >= STILL))


def lit(events: tuple[float, ...], frames: int, frame_rate: float) -> Float[np.ndarray, " F"]:
    """Time with the light on / exposure of each picture, which lasts from half a picture before its time to half a
    picture after. The light is on for LIT pictures from an event on.
    """
    start = (np.arange(frames)[:, None] - 0.5) / frame_rate
    on, off = np.array(events)[None, :], np.array(events)[None, :] + LIT / frame_rate
    overlap = np.minimum(start + 1 / frame_rate, off) - np.maximum(start, on)
    return np.clip(overlap * frame_rate, 0, 1).sum(axis=1)


def _cover(material: str, across: np.ndarray, along: np.ndarray, radius: float, pixel: float) -> np.ndarray:
    """Share of each pixel that the shape covers, by its distance from the edge."""
    if material == "wooden":
        outside = np.maximum(np.abs(across), np.abs(along)) - radius
    else:
        distance = np.sqrt(across**2 + along**2)
        outside = distance - radius
        if material == "glass":
            outside = np.maximum(outside, 0.45 * radius - distance)
    return np.clip(0.5 - outside / pixel, 0, 1).astype(np.float32)


def sound(things: list[Thing], samples: int, sample_rate: int, offset: float = 0.0) -> Float32[np.ndarray, " n"]:
    """Σ over events and partials of √strength · a · e^{−d τ} sin(2π f τ), τ ≥ 0 the time since the event and `offset`.

    A click of 2 ms at 0.4 of the sample rate marks the attack.
    """
    time = np.arange(samples) / sample_rate
    audio = np.zeros(samples)
    for thing in things:
        material, lowest = MATERIALS[thing.material], COLOURS[thing.colour][1] * SIZES[thing.size][1]
        modes = [(lowest * p, 0.4 / (n + 1), material.decay * (1 + n)) for n, p in enumerate(material.partials)]
        modes = [mode for mode in modes if mode[0] < 0.45 * sample_rate] + [(0.4 * sample_rate, 0.4, 500.0)]
        for event, strength in zip(thing.events, thing.strengths):
            first = max(0, math.ceil((event + offset) * sample_rate))
            since = time[first:] - (event + offset)
            for frequency, amplitude, decay in modes:
                tone = np.exp(-decay * since) * np.sin(2 * math.pi * frequency * since)
                audio[first:] += math.sqrt(strength) * amplitude * tone
    return np.clip(audio, -1, 1).astype(np.float32)
