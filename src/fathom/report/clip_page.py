"""A page of clips that opens offline: each with its sound, the times of visible and audible events, and its scores."""

from __future__ import annotations

import base64
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fathom.audiovideo.clips import Clip, write_clip
from fathom.audiovideo.metrics import COLUMNS, Column
from fathom.version import __version__
from fathom.writing import whole

LARGEST = 32 * 2**20  # bytes of a file that is embedded as it is; others are coded again
PLAYED = (".mp4", ".m4v", ".webm")  # by browsers
WIDTH, HEIGHT = 600, 64  # of a timeline
STEPS = 300  # of its envelope


@dataclasses.dataclass(frozen=True)
class Scored:
    """A clip on the page. Attributes: name, clip, its numbers (`fathom.audiovideo.metrics.score`), and its file, where
    it has one that can be embedded as it is."""

    name: str
    clip: Clip
    numbers: Mapping[str, Any]
    file: Path | None = None


def write_clip_page(
    title: str, scored: Sequence[Scored], summary: Mapping[str, Any], path: Path, more: Sequence[Column] = ()
) -> None:
    """Write one self-contained page.

    summary: of `fathom.audiovideo.metrics.summary`.   more: meaning of numbers other than the usual ones.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fathom.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    columns = [*COLUMNS, *more]
    page = environment.get_template("clips.html").render(
        title=title,
        columns=columns,
        clips=[_shown(one, columns) for one in scored],
        means=[_mean(column, summary[column.name]) for column in columns],
        width=WIDTH,
        height=HEIGHT,
        version=__version__,
    )
    with whole(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _shown(one: Scored, columns: Sequence[Column]) -> dict[str, Any]:
    clip = one.clip
    return {
        "name": one.name,
        "caption": clip.caption,
        "facts": f"{len(clip.frames)} pictures of {clip.frames.shape[2]} × {clip.frames.shape[1]} at "
        f"{clip.frame_rate:g} per second, sound at {clip.sample_rate:,} Hz",
        "motion": one.numbers["scene"] != "plain",
        "address": _address(one),
        "duration": clip.duration,
        "envelope": _envelope(clip),
        "seen": [(time, time / clip.duration * WIDTH) for time in one.numbers["seen"]],
        "heard": [(time, time / clip.duration * WIDTH) for time in one.numbers["heard"]],
        "cells": [with_unit(one.numbers[column.name], column.unit) for column in columns],
    }


def _address(one: Scored) -> str:
    """The clip as a data URL; one that a browser may not play is encoded again, with sides cut to even numbers."""
    file = one.file
    if file is not None and file.suffix.lower() in PLAYED and file.stat().st_size <= LARGEST:
        kind, content = "webm" if file.suffix.lower() == ".webm" else "mp4", file.read_bytes()
    else:
        height, width = (side // 2 * 2 for side in one.clip.frames.shape[1:3])
        with tempfile.TemporaryDirectory() as folder:
            write_clip(dataclasses.replace(one.clip, frames=one.clip.frames[:, :height, :width]), Path(folder) / "clip")
            kind, content = "mp4", (Path(folder) / "clip").read_bytes()
    return f"data:video/{kind};base64,{base64.b64encode(content).decode()}"


def _envelope(clip: Clip) -> str:
    """The sound's loudest sample in each step, as SVG path data about the middle of the timeline."""
    loudest = [np.abs(part).max(initial=0.0) for part in np.array_split(clip.audio, STEPS)]
    most = max(max(loudest), 1e-6)
    tall = [HEIGHT / 2 * 0.8 * float(value) / most for value in loudest]
    places = [(n + 0.5) * WIDTH / STEPS for n in range(STEPS)]
    upper = [f"{x:.1f} {HEIGHT / 2 - y:.1f}" for x, y in zip(places, tall)]
    lower = [f"{x:.1f} {HEIGHT / 2 + y:.1f}" for x, y in zip(reversed(places), reversed(tall))]
    return f"M{' L'.join(upper + lower)}z"


def with_unit(value: float | int | None, unit: str) -> str:
    """A number for a reader, with its unit."""
    if value is None:
        return "none"
    text = str(value) if isinstance(value, int) else f"{value:z.1f}" if unit else f"{value:z.2f}"  # z: no −0.0
    return f"{text} {unit}".strip().replace("-", "−")


def _mean(column: Column, found: Mapping[str, Any]) -> tuple[str, str]:
    mean, interval = found["mean"], found["interval"]
    spread = f"{with_unit(interval[0], '')} to {with_unit(interval[1], '')}" if interval else ""
    return with_unit(None if mean is None else float(mean), column.unit), spread
