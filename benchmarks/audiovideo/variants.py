"""Every variant of MOVA in a recipe, trained and judged, with the training step as a CUDA graph.

    python benchmarks/audiovideo/variants.py RECIPE WORK --output OUT   # start as many as wanted: they share the jobs

The towers of such a recipe are so small that a step of `fathom compare` waits for Python nearly all of the time. Here
latents and the states of captions lie on the GPU, noise is drawn there, and a step is one launch; model, loss,
optimiser, schedule and judging are the same. Jobs: every method that the recipe has with three seeds, then guidance on
the first, then the others; or what `--only` names. A file is written after each; none is begun that would not end
before `--deadline`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from guidance import judge, line, orders
from torch import Tensor, nn

from fathom.audiovideo.codecs import load_codec
from fathom.audiovideo.joint import MovaModel, text_states
from fathom.recorded import recorded
from fathom.report.provenance import provenance
from fathom.tasks.audiovideo import pipeline_of
from fathom.train import load_recipe
from fathom.writing import write_json

SCALES = [1.0, 2.0, 3.0, 4.0, 5.0]
MAIN = ("both", "off", "v2a")  # whose first clips are kept
ENDS = 25.0  # seconds in which what was begun is judged


class Known(nn.Module):
    """The frozen text encoder's states by a caption's number, which stands where its ids would."""

    def __init__(self, states: Tensor):
        super().__init__()
        self.states = states

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        return (self.states[input_ids[:, 0]],)


class Latents:
    """All training clips on the device, and states and masks of their captions; the last caption is the empty one."""

    def __init__(self, rows: Any, encoder: nn.Module, device: str):
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in rows.arrays.items()}
        ids = torch.cat([arrays["input_ids"], rows.null["null_ids"][None]])
        mask = torch.cat([arrays["attention_mask"], rows.null["null_mask"][None]])
        self.mask = mask.to(device)
        parts = zip(ids.split(1024), mask.split(1024))
        self.states = torch.cat([text_states(encoder, i.to(device), m.to(device)) for i, m in parts])
        self.clips = {name: arrays[name].float().to(device) for name in ("video", "audio", "first")}

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        """These clips with new noise: what MovaModel.forward reads."""
        found = {name: clips[numbers] for name, clips in self.clips.items()}
        null = torch.full_like(numbers, len(self.mask) - 1)
        return {
            **found, "input_ids": numbers[:, None], "attention_mask": self.mask[numbers], "null_ids": null[:, None],
            "null_mask": self.mask[null], "video_noise": torch.randn_like(found["video"]),
            "audio_noise": torch.randn_like(found["audio"]), "uniform": torch.rand(len(numbers), 4, device=null.device),
        }  # fmt: skip


def train(model: MovaModel, latents: Latents, training: Any, seed: int, graphs: bool, say: Callable) -> dict[str, Any]:
    """The recipe's training: AdamW, warm-up and cosine, clipped gradients."""
    device, clips = model.device, training.sequences
    steps = training.examples // clips
    encoder, model.text_encoder = model.text_encoder, Known(latents.states)
    model.train()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    matrices = [w for name, w in weights.items() if w.ndim > 1 and "table" not in name]
    others = [w for name, w in weights.items() if w.ndim <= 1 or "table" in name]
    rate: Any = torch.zeros((), device=device) if graphs else 0.0
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=rate, betas=training.betas, fused=graphs, capturable=graphs,
    )  # fmt: skip
    numbers = torch.zeros(clips, dtype=torch.long, device=device)
    total = torch.zeros((), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(**latents.batch(numbers)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), training.grad_clip)
        optimizer.step()
        total.add_(loss.detach())

    run: dict[int, Callable[[], None]] = {}
    for turn in range(len(model.experts)):  # each expert's step launches kernels of its own
        model.on_step(turn, max(steps, 2))
        run[model.training_expert(turn)] = recorded(step, optimizer) if graphs else step
    torch.manual_seed(seed)
    total.zero_()
    draw = torch.Generator().manual_seed(seed)
    many = math.ceil(steps * clips / len(latents.mask[:-1]))
    order = torch.cat([torch.randperm(len(latents.mask) - 1, generator=draw) for _ in range(many)]).to(device)
    log, begin, warm = [], time.perf_counter(), max(1, round(training.warmup_ratio * steps))
    for number in range(steps):
        done = (number - warm) / max(1, steps - warm)
        share = (number + 1) / warm if number < warm else 0.5 * (1 + math.cos(math.pi * done))
        floor = training.min_lr_ratio if number >= warm else 0.0
        value = training.lr * (floor + (1 - floor) * share)
        if graphs:
            rate.fill_(value)
        for group in optimizer.param_groups:
            group["lr"] = rate if graphs else value
        numbers.copy_(order[number * clips : (number + 1) * clips])
        model.on_step(number, steps)
        run[model.training_expert(number)]()
        if (number + 1) % 250 == 0 or number == steps - 1:
            log.append([number + 1, round(float(total) / (250 if (number + 1) % 250 == 0 else steps % 250), 4)])
            total.zero_()
            say(f"step {number + 1} of {steps}: {log[-1][1]}, {time.perf_counter() - begin:.0f} s")
    model.text_encoder = encoder
    model.eval()
    return {"steps": steps, "train_seconds": round(time.perf_counter() - begin, 1), "log": log}


def jobs(recipe: Any, most: int, only: list[str] | None = None) -> list[dict[str, Any]]:
    """What is trained and judged, the most telling first; `most`: seeds of the methods that the recipe has once.
    `only`: these methods in this order, and no guidance."""
    if only is not None:
        known = [m.name for m in recipe.methods]
        missing = [name for name in only if name not in known]
        if missing:
            raise ValueError(f"--only {missing[0]}: the recipe has {', '.join(known)}")
        return [{"job": f"train-{name}-{seed}", "method": name, "seed": seed} for seed in range(most) for name in only]
    main = [m for m in recipe.methods if len(m.seeds or recipe.seeds) > 1]
    rest = [m for m in recipe.methods if m not in main]
    whole = recipe.methods[0].name

    def trained(some: list[Any], seed: int) -> list[dict[str, Any]]:
        return [{"job": f"train-{m.name}-{seed}", "method": m.name, "seed": seed} for m in some]

    def scan(seed: int) -> list[dict[str, Any]]:
        return [{"job": f"scan-{whole}-{seed}", "method": whole, "seed": seed}]

    return [
        *trained(main, 0), *trained(main, 1), *scan(0), *trained(main, 2), *trained(rest, 0), *scan(1), *scan(2),
        *(job for seed in range(1, most) for job in trained(rest, seed)),
    ]  # fmt: skip


class Worker:
    def __init__(self, given: argparse.Namespace):
        self.work, self.out, self.deadline, self.count = given.work, given.output, given.deadline, given.clips
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.graphs = self.device == "cuda" and not given.eager
        self.recipe = load_recipe(given.recipe)
        for folder in (self.work / "taken", self.work / "models", self.out):
            folder.mkdir(parents=True, exist_ok=True)
        self.begin = time.time()
        self.data = self.recipe.task.prepare(self.recipe.data, self.work / "data")
        self.say(f"data {time.time() - self.begin:.0f} s")
        self.codec, self.rows = load_codec(self.data.codec), self.data.validation  # type: ignore[attr-defined]
        self.pool = ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn"))
        self.waiting = jobs(self.recipe, given.seeds, given.only)
        self.pending: list[tuple[dict[str, Any], list[Callable[[], dict[str, Any]]]]] = []
        self.took = {"train": 30.0, "scan": 60.0}  # seconds, until one has been timed
        self.latents: Latents | None = None

    def say(self, *words: Any) -> None:
        print(f"{time.time() - self.begin:6.1f}", *words, flush=True)

    def take(self) -> dict[str, Any] | None:
        """The next job that nobody has, and whose model exists, and that fits into the time."""
        for job in self.waiting:
            kind = job["job"].split("-")[0]
            mark = self.work / "taken" / job["job"]
            model = self.work / "models" / f"{job['method']}-{job['seed']}.pt"
            if mark.exists() or (kind == "scan" and not model.exists()):
                continue
            if time.time() + 1.15 * self.took[kind] + ENDS > self.deadline:
                continue
            try:
                mark.mkdir()
            except FileExistsError:
                continue
            return job
        return None

    def run(self) -> None:
        write_json(self.out / "setting.json", {
            **provenance(), "command": "python benchmarks/audiovideo/variants.py", "graphs": self.graphs,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
        })  # fmt: skip
        while (job := self.take()) is not None:
            begin, kind = time.time(), job["job"].split("-")[0]
            self.say("begin", job["job"], f"{self.deadline - begin:.0f} s left")
            made = self.train(job) if kind == "train" else self.scan(job)
            self.collect()  # what was judged while this job ran
            self.pending.append(made)
            self.took[kind] = max(time.time() - begin, 0.8 * self.took[kind])
            self.say("end", job["job"], f"{time.time() - begin:.0f} s")
        self.collect()
        self.pool.shutdown()
        self.say("done")

    def collect(self) -> None:
        for entry, judging in self.pending:
            entry["judged"] = [wait() for wait in judging]
            write_json(self.out / f"{entry['job']}.json", entry)
            for said in entry["judged"]:
                self.say(entry["job"], line(said))
        self.pending = []

    def model(self, job: dict[str, Any]) -> MovaModel:
        method = next(m for m in self.recipe.methods if m.name == job["method"])
        fields = {**self.recipe.model, **method.fields}
        torch.manual_seed(job["seed"])
        return MovaModel(self.recipe.task.model_config(fields, self.recipe.data, self.data.tokenizer)).to(self.device)

    def train(self, job: dict[str, Any]) -> Any:
        model = self.model(job)
        if self.latents is None:
            self.latents = Latents(self.data.train, model.text_encoder, self.device)
        made = train(model, self.latents, self.recipe.training, job["seed"], self.graphs, self.say)
        errors = self.recipe.task.errors(model, self.data)
        entry = {**job, "options": model.config.mova, **made, "video_error": errors[0], "audio_error": errors[1]}
        kept = self.work / "models" / f"{job['method']}-{job['seed']}.pt"
        torch.save(model.state_dict(), kept.with_suffix(".part"))
        kept.with_suffix(".part").rename(kept)
        pipeline = self.pipeline(model)
        if job["seed"] == 0 and job["method"] in MAIN:
            self.keep_clips(job["method"], pipeline)
        return entry, [self.judge(pipeline, order, 1.0, 1.0) for order in orders(pipeline)]

    def scan(self, job: dict[str, Any]) -> Any:
        model = self.model(job)
        model.load_state_dict(torch.load(self.work / "models" / f"{job['method']}-{job['seed']}.pt"))
        pipeline = self.pipeline(model.eval())
        scales = [pair for pair in itertools.product((1.0, 5.0), SCALES) if pair != (1.0, 1.0)]
        return dict(job), [self.judge(pipeline, "joint", *pair) for pair in scales]

    def keep_clips(self, name: str, pipeline: Any, count: int = 6) -> None:
        """The first clips, for eyes and ears."""
        made = self.recipe.task.sample(pipeline, self.rows, range(min(count, len(self.rows))))
        np.savez_compressed(
            self.out / f"clips-{name}.npz", captions=[clip.caption for clip in made],
            frames=np.stack([clip.frames for clip in made]),
            audio=np.stack([clip.audio for clip in made]).astype(np.float16),
        )  # fmt: skip

    def pipeline(self, model: MovaModel) -> Any:
        made = pipeline_of(model, self.data)
        made.codec = self.codec
        return made

    def judge(self, pipeline: Any, order: str, text: float, bridge: float) -> Callable[[], dict[str, Any]]:
        task, rows = self.recipe.task, self.rows
        return judge(self.pool, task, pipeline, rows, self.count, order, text, bridge, at_once=self.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/variants"))
    parser.add_argument("--clips", type=int, default=200, help="that each model makes")
    parser.add_argument("--seeds", type=int, default=3, help="of the methods that the recipe has with one")
    parser.add_argument("--only", nargs="+", help="methods of the recipe, in the order of their use")
    parser.add_argument("--workers", type=int, default=3, help="processes that judge clips")
    parser.add_argument("--deadline", type=float, default=1e11, help="Unix time")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32
    Worker(given).run()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
