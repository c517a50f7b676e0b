"""What guidance by text and by the bridge does to clips of held-out captions: offsets, misses, and the sound itself.

    python benchmarks/audiovideo/guidance.py RECIPE MODEL… [--clips 200] [--text 1 5] [--bridge 1 2 3 4 5] [-o FILE]

Every model and pair of scales makes the same clips from the same noise. `spectrum` is the distance of the mean spectrum
of a clip's sound from that of the held-out clip, which guidance should not make worse. `chance` is `together` between
the pictures of a clip and the sound of the next. A model with directions v2a also makes them as a cascade: the video
first, then its sound. `of_clips` are the numbers of each clip, for differences between models.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fathom.audiovideo import MovaPipeline
from fathom.audiovideo.clips import Clip
from fathom.audiovideo.metrics import paired, score, spectral_distance, summary
from fathom.tasks.audiovideo import BATCH
from fathom.train import load_recipe

NAMES = ("together", "offset_ms", "within_frame", "missed", "extra", "av_align", "spectrum")


def judged(pair: tuple[Clip, np.ndarray]) -> dict[str, Any]:
    clip, right = pair
    length = min(len(clip.audio), len(right))
    return {
        **score(clip),
        "spectrum": spectral_distance(clip.audio[:length], right[:length], clip.sample_rate),
    }


def together(row: dict[str, Any], frame_rate: float) -> float | None:
    """As `metrics.score` has it, of what was seen and heard."""
    pairs = paired(row["seen"], row["heard"]).pairs
    near = sum(abs(heard - seen) <= 1 / frame_rate for seen, heard in pairs)
    union = len(row["seen"]) + len(row["heard"]) - near
    return near / union if union else None


def orders(pipeline: Any) -> list[str]:
    return ["joint", "cascade"] if pipeline.settings.method.directions == "v2a" else ["joint"]


def judge(
    pool: ProcessPoolExecutor, task: Any, pipeline: Any, rows: Any, count: int, order: str, text: float, bridge: float,
    at_once: int = 4 * BATCH,
) -> Callable[[], dict[str, Any]]:  # fmt: skip
    """Make the clips of the first held-out rows and have the pool judge them. Returns what waits for the figures."""
    clips: list[Clip] = []
    count = min(count, len(rows))
    for start in range(0, count, at_once):
        some = range(start, min(start + at_once, count))
        options = {"text_scale": text, "bridge_scale": bridge, "order": order}
        clips += task.sample(pipeline, rows, some, **options)
    sounds = pipeline.codec.decode_audio(torch.stack([rows[i]["audio"] for i in range(count)])).float().numpy()
    judging = pool.map(judged, list(zip(clips, sounds)), chunksize=8)

    def wait() -> dict[str, Any]:
        said = list(judging)
        next_sound = [{**row, "heard": other["heard"]} for row, other in zip(said, said[1:] + said[:1])]
        chance = [{"chance": together(row, task.frame_rate)} for row in next_sound]
        return {
            "order": order, "text": text, "bridge": bridge, **summary(said, NAMES), **summary(chance, ["chance"]),
            "of_clips": {name: [row[name] for row in said] for name in ("together", "offset_ms")},
        }  # fmt: skip

    return wait


def line(entry: dict[str, Any]) -> str:
    means = ", ".join(f"{name} {entry[name]['mean']}" for name in (*NAMES, "chance"))
    return f"{entry['order']} s_T={entry['text']:g} s_B={entry['bridge']:g}: {means}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--text", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--bridge", type=float, nargs="+", default=[1.0, 2.0, 3.0, 4.0, 5.0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--data", type=Path, default=Path("runs/.data"))
    parser.add_argument("-o", "--output", type=Path, default=Path("guidance.json"))
    given = parser.parse_args()

    recipe = load_recipe(given.recipe)
    rows: Any = recipe.task.prepare(recipe.data, given.data).validation
    found = []
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:  # a fork would share CUDA's
        for folder in given.models:
            pipeline = MovaPipeline.from_pretrained(folder).to("cuda" if torch.cuda.is_available() else "cpu")
            for order, text, bridge in itertools.product(orders(pipeline), given.text, given.bridge):
                said = judge(pool, recipe.task, pipeline, rows, given.clips, order, text, bridge)
                found.append({"model": str(folder), **said()})
                print(f"{folder} {line(found[-1])}", flush=True)
                given.output.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
