"""Trained with few vision tokens, or given few without training: accuracy by kind and size of what is asked about.

DINOv2-small (frozen) and SmolLM2-135M become a LLaVA model of 336-pixel pictures, 24 × 24 = 576 vision tokens. It
learns the task `vqa` in LLaVA's two stages: the projector alone, then it and the language model. A picture is asked
several questions at once: each sees the picture and itself alone, so the loss is that of as many rows of one question.
Three of eight training pictures have a word to read, which is spelled. On a GPU a step is one CUDA graph.

    python benchmarks/vision/few_tokens.py draw WORK                              # pictures and their questions, on CPU
    python benchmarks/vision/few_tokens.py tower WORK --tower DINOV2              # features of the frozen tower, once
    python benchmarks/vision/few_tokens.py work WORK --tower … --language … --output OUT     # start as many as wanted

Workers share the jobs below, in their order, and stop before `--deadline`. A file of results is written after each job.

    parts   trained from the two parts with a method, all on the same number of pictures
    adapted trained on from the model with all tokens of the same seed, for a quarter of that
    free    the first model with all tokens, given a method that it was not trained with
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.data import DataConfig, load_tokenizer
from fathom.recorded import recorded
from fathom.report.provenance import provenance
from fathom.tasks.vqa import IMAGES, MEAN, STD, VQA, several, with_image
from fathom.vision import METHODS, compress_vision, from_dict
from fathom.vision.base import LanguageCompressor
from fathom.vision.scenes import KINDS, Scene, questions, scene
from fathom.writing import write_json

PATCH, LAYER, CHANNELS = 14, -4, 384
ASKED, ROOM = 8, 96  # questions of a picture, and tokens that they fill at most
CHUNK = 200  # pictures that one process draws at a time
BATCH = 16  # pictures of a step
LR, PROJECTOR_LR, ALIGN_LR = 5e-4, 2e-3, 2e-3
ALIGNED = 0.08  # share of the pictures whose questions train the projector alone
ADAPTED = 0.25  # pictures that an adapted model sees, of those that the first saw
EPOCHS = 3  # at most
COUNTS = (144, 36, 64, 25)  # of 576 vision tokens, in the order of use
ANSWERED = 640  # room for the answers' tokens of a step
READ = 3  # of 8 training pictures have a word to read
FAR = 10_000_000  # number of the first scene that is drawn for its word


def jobs() -> list[dict[str, Any]]:
    """What is trained or asked, the most telling first."""

    def one(stage: str, name: str, tokens: int | None = None, seed: int = 0, **options: Any) -> dict[str, Any]:
        method = {"name": name, **({} if tokens is None else {"tokens": tokens}), **options}
        return {"job": f"{stage}-{name}-{tokens or 'all'}-{seed}", "stage": stage, "method": method, "seed": seed}

    scaled = {"rescale": "amplitude"}  # a model that is adapted was not trained with the larger features

    def pair(stage: str, tokens: int, seed: int) -> list[dict[str, Any]]:
        fourier = one(stage, "fourier_vlm", tokens, seed, **(scaled if stage == "adapted" else {}))
        return [fourier, one(stage, "average_pooling", tokens, seed)]

    return [
        one("parts", "all_tokens"),
        *pair("parts", 36, 0),
        *(job for count in COUNTS[:2] for job in pair("adapted", count, 0)),
        one("adapted", "all_tokens"),
        one("parts", "all_tokens", None, 1),
        *(job for count in COUNTS[:2] for job in pair("adapted", count, 1)),
        one("free", "everything"),
        one("parts", "all_tokens", None, 2),
        *(job for count in COUNTS[:2] for job in pair("adapted", count, 2)),
        *(one("adapted", "all_tokens", None, seed) for seed in (1, 2)),
        *(one("adapted", name, count) for count in COUNTS[:2] for name in ("dct_coefficients", "bicubic")),
        *(job for seed in range(3) for count in COUNTS[2:] for job in pair("adapted", count, seed)),
        *pair("parts", 144, 0),
        *pair("parts", 36, 1),
        *pair("parts", 36, 2),
        *pair("parts", 144, 1),
        *pair("parts", 144, 2),
        one("parts", "mqt", 36, queries=256, heads=6, elastic=False),
        *(one("parts", name, 36) for name in ("dct_coefficients", "bicubic")),
        *(one("adapted", name, count, seed)
          for seed in (1, 2) for count in (144, 36) for name in ("dct_coefficients", "bicubic")),
        *(job for count in (64, 25) for job in pair("parts", count, 0)),
    ]  # fmt: skip


# Pictures and questions


def scene_of(number: int, held_out: bool) -> Scene:
    """The scene of a picture: of eight training pictures one of each kind, and two more to be read."""
    if held_out:
        return scene(0, number, True)
    block, at = divmod(number, len(KINDS) + READ - 1)
    read = FAR + (READ - 1) * block + at - len(KINDS)
    return scene(0, len(KINDS) * (block if at < len(KINDS) else read) + min(at, KINDS.index("read")), False)


def spelled(question: str, answer: str) -> tuple[str, str]:
    """A word is answered letter by letter, as one made of chance letters has no tokens of its own."""
    return question, " ".join(answer) if question == "what is the word?" else answer


def draw_chunk(chunk: tuple[str, bool, int, int, int]) -> list[list[tuple[str, str]]]:
    """Draw the scenes of one chunk into the file of pixels. Returns their questions."""
    path, held_out, side, start, stop = chunk
    pixels = np.memmap(path, np.uint8, "r+", shape=(stop, side, side, 3))
    asked = []
    for number in range(start, stop):
        drawn = scene_of(number, held_out)
        pixels[number] = np.asarray(drawn.draw(side))
        found = [(drawn.question, drawn.answer)] if held_out else questions(drawn, ASKED)
        asked.append([spelled(*pair) for pair in found])
    return asked


def draw(work: Path, side: int, pool: int, questions: int, processes: int, seconds: float) -> None:
    """Scenes to learn from, as many of `pool` as fit into the time, and held-out ones."""
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / "side.json", side)
    begin = time.time()
    with multiprocessing.Pool(processes) as workers:
        for name, count in (("held_out", questions), ("train", pool)):
            path = work / f"{name}.u8"
            with open(path, "wb") as file:
                file.truncate(count * side * side * 3)
            chunks = [
                (str(path), name == "held_out", side, at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)
            ]
            asked: list[list[tuple[str, str]]] = []
            for some in workers.imap(draw_chunk, chunks):
                asked += some
                if name == "train" and time.time() - begin > seconds:
                    break
            write_json(work / f"{name}.json", asked)
            print(name, len(asked), f"{time.time() - begin:.0f} s", flush=True)
        workers.terminate()


def side_of(work: Path) -> int:
    return json.loads((work / "side.json").read_text())


def grid_of(work: Path) -> tuple[int, int]:
    return (side_of(work) // PATCH, side_of(work) // PATCH)


def pixels_of(work: Path, name: str) -> Any:
    path, side = work / f"{name}.u8", side_of(work)
    return np.memmap(path, np.uint8, "r", shape=(path.stat().st_size // (side * side * 3), side, side, 3))


def normalised(pixels: Any, device: str) -> Tensor:
    values = torch.from_numpy(np.array(pixels)).to(device).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(one, device=device)[:, None, None] for one in (MEAN, STD))
    return (values - mean) / std


def features_of(work: Path, name: str) -> Any:
    path, (rows, columns) = work / f"{name}.bf16", grid_of(work)
    count = path.stat().st_size // (2 * rows * columns * CHANNELS)
    return np.memmap(path, np.uint16, "r", shape=(count, rows * columns, CHANNELS))


def loaded(features: Any, numbers: Any, device: str, dtype: torch.dtype) -> Tensor:
    """Features of these pictures [B, n, C]."""
    return moved(features[numbers].view(np.int16), device).view(torch.bfloat16).to(dtype)


@torch.no_grad()
def run_tower(work: Path, folder: str, device: str) -> None:
    """The frozen tower's features of every picture, as bf16; a file whose name has no end is not complete."""
    from transformers import AutoModel

    tower = AutoModel.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    for name in ("held_out", "train"):
        count, pixels = len(json.loads((work / f"{name}.json").read_text())), pixels_of(work, name)
        begin = time.time()
        with open(work / f"{name}.partial", "wb") as file:
            for at in range(0, count, 256):
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    states = tower(normalised(pixels[at : min(at + 256, count)], device), output_hidden_states=True)
                found = states.hidden_states[LAYER][:, 1:].to(torch.bfloat16).cpu()
                file.write(found.view(torch.int16).numpy().tobytes())
        (work / f"{name}.partial").rename(work / f"{name}.bf16")
        print(name, count, f"{time.time() - begin:.0f} s", flush=True)


class Rows:
    """The questions of every picture as ids: side by side, each with a number, and what its answer is."""

    def __init__(self, asked: list[list[tuple[str, str]]], tokenizer: Any, room: int):
        known: dict[str, list[int]] = {}

        def ids_of(text: str) -> list[int]:
            if text not in known:
                known[text] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return known[text]

        shape = (len(asked), room)
        self.ids, self.owner = np.zeros(shape, np.int64), np.full(shape, ASKED, np.int64)
        self.answer = np.zeros(shape, bool)
        self.cut = 0
        for row, pairs in enumerate(asked):
            at = 0
            for number, (question, answer) in enumerate(pairs):
                before, after = ids_of(f"\n{question}\n"), [*ids_of(answer), tokenizer.eos_token_id]
                end = at + len(before) + len(after)
                if end > room:
                    self.cut += 1
                    continue
                self.ids[row, at:end] = before + after
                self.owner[row, at:end] = number
                self.answer[row, at + len(before) : end] = True
                at = end


# The model


def build(method: dict[str, Any], side: int, tower: str, language: str, tokenizer: Any) -> Any:
    """LLaVA of the two parts, in fp32."""
    fields = {"tower": tower, "language": language, "vision_feature_layer": LAYER, "vision_compress": method}
    data = DataConfig(tokenizer=language, block_size=ROOM)
    task = VQA(side=side, trains="language")
    return task.new_model(task.model_config(fields, data, tokenizer), fields, data)


@torch.no_grad()
def scale_projector(model: Any, features: Tensor, seed: int) -> None:
    """Draw the projector so that it reads standardised features and writes vectors of the embeddings' size; else the
    methods would start at different scales."""
    generator = torch.Generator().manual_seed(seed)
    projector = model.model.multi_modal_projector
    first, second = projector.linear_1, projector.linear_2
    given: list[Tensor] = []
    hook = first.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    projector(features)
    hook.remove()
    mean, std = given[0].flatten(0, 1).mean(0), given[0].flatten(0, 1).std(0)
    for layer in (first, second):
        drawn = torch.randn(layer.weight.shape, generator=generator) / math.sqrt(layer.in_features)
        layer.weight.copy_(drawn.to(layer.weight))
        layer.bias.zero_()
    first.weight.div_(std)
    first.bias.copy_(-first.weight @ mean)
    second.weight.mul_(model.get_input_embeddings().weight.std() / projector(features).std())


def cast(model: Any, device: str, dtype: torch.dtype) -> None:
    """Move the model. Rotary frequencies stay fp32, as in a model that is loaded in bf16."""
    rotary = model.model.language_model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    model.to(device, dtype)
    rotary.inv_freq = frequencies.to(device)


def states_of(model: Any, features: Tensor, ids: Tensor, owner: Tensor) -> Tensor:
    """Last hidden states of the questions' tokens [B, L, d], as in the task `vqa`."""
    pictures = model.model.multi_modal_projector(features)
    text = model.get_input_embeddings()(ids)
    output = model.model.language_model(
        inputs_embeds=torch.cat((pictures.to(text.dtype), text), 1),
        **several(F.pad(owner, (1, 0), value=IMAGES), pictures.shape[1], text.dtype),
        use_cache=False,
    )
    return output.last_hidden_state[:, pictures.shape[1] :]


def scores_of(model: Any, states: Tensor, ids: Tensor, answer: Any) -> tuple[Tensor, Tensor]:
    """Logits of the answers' tokens and those tokens, in a row each. `answer` is on the CPU: a GPU need not wait."""
    row, column = (moved(one, states.device) for one in np.nonzero(answer[:, 1:]))
    return model.lm_head(states[row, column]).float(), ids[row, column + 1]


@torch.no_grad()
def ask(model: Any, features: Any, rows: Rows, count: int, device: str, dtype: torch.dtype) -> dict[str, list]:
    """For each held-out question whether greedy decoding gives its answer, and the answer's loss in nats."""
    model.eval()
    found: dict[str, list] = {"right": [], "nats": []}
    for start in range(0, count, 64):
        numbers = slice(start, min(start + 64, count))
        (ids, owner), answer = tensors(rows, numbers, device), rows.answer[numbers]
        states = states_of(model, loaded(features, numbers, device, dtype), ids, owner)
        logits, targets = scores_of(model, states, ids, answer)
        add(found, logits, targets, answer)
    return found


def add(found: dict[str, list], logits: Tensor, targets: Tensor, answer: Any) -> None:
    """Note for each row of a batch whether all of its answer is likeliest, and its loss."""
    row, one = moved(np.nonzero(answer[:, 1:])[0], logits.device), torch.zeros(len(answer), device=logits.device)
    wrong = one.index_add(0, row, (logits.argmax(-1) != targets).float())
    found["right"] += (wrong == 0).int().tolist()
    found["nats"] += one.index_add(0, row, F.cross_entropy(logits, targets, reduction="none")).tolist()


def tensors(rows: Rows, numbers: Any, device: str) -> list[Tensor]:
    return [moved(one[numbers], device) for one in (rows.ids, rows.owner)]


def moved(values: Any, device: Any) -> Tensor:
    """The array on the device, without waiting for what runs there."""
    tensor = torch.from_numpy(np.array(values))
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


def train(
    model: Any, rows: Rows, features: Any, order: Any, rates: tuple[float, float], device: str, dtype: torch.dtype,
    log: list, until: float, watch: Any = None, graphs: bool = False, at_once: int = BATCH,
) -> int:  # fmt: skip
    """One stage: AdamW on fp32 copies of what trains, cosine to zero. Learning rates: of the projector, of the rest.
    `at_once`: pictures of a step that are in memory together.

    Returns how many pictures were seen: all, unless `until` cut the schedule short, which then fell to zero by time.
    """
    if len(order) < BATCH:
        return 0
    model.train()
    weights = {name: one for name, one in model.named_parameters() if one.requires_grad}
    copies = [one.detach().float().clone() for one in weights.values()]
    groups: list[dict[str, Any]] = []
    for mine, peak in ((True, rates[0]), (False, rates[1])):
        some = [copy for name, copy in zip(weights, copies) if ("projector" in name) == mine]
        rate: Any = torch.zeros((), device=device) if graphs else 0.0
        groups += [{"params": some, "peak": peak, "lr": rate}] if some else []
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda", capturable=graphs
    )
    batch = [one.clone() for one in given(rows, features, order[:BATCH], device, dtype)]
    total = torch.zeros((), device=device)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        pictures, ids, owner, row, column, weight = batch
        model.zero_grad(set_to_none=True)
        for start in range(0, BATCH, at_once):
            some = slice(start, start + at_once)
            states = states_of(model, pictures[some], ids[some], owner[some])
            mine, at = (row >= start) & (row < start + at_once), (row - start).clamp(0, at_once - 1)
            logits = model.lm_head(states.flatten(0, 1).index_select(0, at * states.shape[1] + column)).float()
            losses = F.cross_entropy(logits, ids[row, column + 1], reduction="none")
            loss = (losses * weight * mine).sum() / weight.sum()
            loss.backward()
            total.add_(loss.detach())
        for one, copy in zip(weights.values(), copies):
            copy.grad = None if one.grad is None else one.grad.float()
            one.grad = None
        torch.nn.utils.clip_grad_norm_(copies, 1.0)
        optimizer.step()
        torch._foreach_copy_([one.data for one in weights.values()], copies)

    run = recorded(update, optimizer) if graphs else update
    torch._foreach_copy_([one.data for one in weights.values()], copies)
    total.zero_()
    steps, begin, seen, parts = len(order) // BATCH, time.time(), 0, 0
    for step in range(steps):
        spent = max(step / steps, (time.time() - begin) / max(until - begin, 1.0))
        if spent >= 1:
            break
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / max(1.0, 0.03 * steps))
            value = group["peak"] * warm * 0.5 * (1 + math.cos(math.pi * spent))
            group["lr"] = group["lr"].fill_(value) if graphs else value
        numbers = np.sort(order[step * BATCH : (step + 1) * BATCH])
        for held, new in zip(batch, given(rows, features, numbers, device, dtype)):
            held.copy_(new)
        run()
        seen, parts = seen + BATCH, parts + 1
        if step % 50 == 49 or step == steps - 1:
            value = float(total) / parts
            log.append([seen, round(value, 4), round(time.time() - begin, 1)])
            print(f"{seen} {value:.3f} {time.time() - begin:.0f} s", flush=True)
            parts = 0
            total.zero_()
        if watch is not None:
            watch(step + 1, steps)
            model.train()
    return seen


def given(rows: Rows, features: Any, numbers: Any, device: str, dtype: torch.dtype) -> list[Tensor]:
    """What a step reads of these pictures: features, ids and their questions, and where answers stand, with weight 0
    from the last one on."""
    row, column = np.nonzero(rows.answer[numbers][:, 1:])
    where = np.zeros((2, ANSWERED), np.int64)
    where[:, : len(row)] = row, column
    weight = (np.arange(ANSWERED) < len(row)).astype(np.float32)
    return [
        loaded(features, numbers, device, dtype), *tensors(rows, numbers, device), moved(where[0], device),
        moved(where[1], device), moved(weight, device),
    ]  # fmt: skip


# Jobs


class Worker:
    def __init__(self, arguments: argparse.Namespace):
        self.work, self.out = Path(arguments.work), Path(arguments.output)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.work / "taken").mkdir(exist_ok=True)
        self.tower, self.language, self.deadline = arguments.tower, arguments.language, arguments.deadline
        self.base_seconds, self.free_count = arguments.base_seconds, arguments.free
        self.bases, self.at_once = arguments.bases, arguments.at_once
        self.side, self.grid = side_of(self.work), grid_of(self.work)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.graphs = self.device == "cuda" and not arguments.eager
        if self.device == "cuda" and arguments.memory is not None:  # so that others on this GPU keep theirs
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.memory * 2**30 / whole))
        self.dtype = torch.bfloat16 if self.device == "cuda" or arguments.bf16 else torch.float32
        self.tokenizer = with_image(load_tokenizer(self.language))
        self.features = {name: features_of(self.work, name) for name in ("train", "held_out")}
        asked = {name: json.loads((self.work / f"{name}.json").read_text()) for name in self.features}
        self.rows = Rows(asked["train"], self.tokenizer, ROOM)
        self.held_out = Rows(asked["held_out"], self.tokenizer, 16)
        self.count = len(asked["held_out"])
        setting = {
            **provenance(), "command": "python benchmarks/vision/few_tokens.py", "pictures": len(asked["train"]),
            "side": self.side, "graphs": self.graphs, "bases": self.bases, "at_once": self.at_once,
        }  # fmt: skip
        write_json(self.out / "setting.json", setting)
        self.pace: dict[str, float] = {}  # seconds of a picture, by what it was
        print("pictures", len(asked["train"]), "questions cut", self.rows.cut, "held out", self.count, flush=True)

    def take(self, job: dict[str, Any]) -> bool:
        try:
            (self.work / "taken" / job["job"]).mkdir()
        except FileExistsError:
            return False
        return True

    def left(self) -> float:
        return self.deadline - time.time()

    def agreed(self) -> int | None:
        """Pictures of every training from the parts, which the first found to fit."""
        path = self.work / "pictures.json"
        return json.loads(path.read_text()) if path.exists() else None

    def base(self, job: dict[str, Any]) -> Path:
        """The model with all tokens that a job begins from."""
        return self.work / f"base-{job['seed'] % self.bases}.pt"

    def extra(self, job: dict[str, Any]) -> bool:
        """Whether it is a model with all tokens beyond those that adapted models begin from."""
        return job["stage"] == "parts" and job["method"]["name"] == "all_tokens" and job["seed"] >= self.bases

    def run(self) -> None:
        waiting = [job for job in jobs() if not self.extra(job)]
        while waiting and self.left() > 30:
            for job in list(waiting):
                if (self.work / "taken" / job["job"]).exists():
                    waiting.remove(job)
                    continue
                if job["stage"] != "parts" and not self.base(job).exists():
                    continue
                first = job["job"] == "parts-all_tokens-all-0"
                if not first and self.agreed() is None:
                    continue
                if not first and self.expected(job) > self.left() - 15:
                    waiting.remove(job)
                    continue
                if self.take(job):
                    waiting.remove(job)
                    self.do(job)
                    break
            else:
                time.sleep(1)
        print("done", flush=True)

    def expected(self, job: dict[str, Any]) -> float:
        """Seconds of a job, by the pace of those before; of the first, by the agreed one's."""
        pictures = self.agreed() or 0
        if job["stage"] == "free":
            return 40.0
        share = ADAPTED if job["stage"] == "adapted" else 1.0
        whole = job["method"]["name"] == "all_tokens"
        pace = self.pace.get("all" if whole else "few") or json.loads((self.work / "pace.json").read_text()) * (
            1.0 if whole else 0.5
        )
        return 15 + share * pictures * pace

    def do(self, job: dict[str, Any]) -> None:
        print("begin", job["job"], f"{self.left():.0f} s left", flush=True)
        begin = time.time()
        made = self.free(job) if job["stage"] == "free" else self.learn(job)
        write_json(
            self.out / f"{job['job']}.json", {**job, "seconds": round(time.time() - begin, 1), **made, **self.memory()}
        )
        print("end", job["job"], f"{time.time() - begin:.0f} s", flush=True)
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float]:
        """The most that this job reserved on the GPU."""
        return {"peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)} if self.device == "cuda" else {}

    def learn(self, job: dict[str, Any]) -> dict[str, Any]:
        first, whole = job["job"] == "parts-all_tokens-all-0", job["method"]["name"] == "all_tokens"
        seed, adapted = job["seed"], job["stage"] == "adapted"
        torch.manual_seed(seed)
        model = build(job["method"], self.side, self.tower, self.language, self.tokenizer)
        if adapted:
            said = model.load_state_dict(torch.load(self.base(job)), strict=False)
            model.tie_weights()
            assert not said.unexpected_keys, said
        else:
            scale_projector(model, loaded(self.features["train"], slice(0, 64), "cpu", torch.float32), seed)
        model.model.vision_tower = torch.nn.Identity()  # its features are there already
        cast(model, self.device, self.dtype)
        random = np.random.default_rng(100 * adapted + seed)
        order = np.concatenate([random.permutation(len(self.rows.ids)) for _ in range(EPOCHS)])
        log: list[Any] = []
        curve: list[Any] = []
        few = min(288, self.count)

        def measure(step: int, steps: int) -> None:
            if step % max(1, steps // 8) == 0:
                found = ask(model, self.features["held_out"], self.held_out, few, self.device, self.dtype)
                curve.append([step * BATCH, *(round(float(np.mean(found[name])), 4) for name in ("right", "nats"))])
                print("held out", curve[-1], flush=True)

        pictures = self.agreed()
        if first:
            pictures = self.choose(model, order)
        assert pictures is not None
        if adapted:
            pictures = int(ADAPTED * pictures) // BATCH * BATCH
        begin, seen = time.time(), 0
        until = min(begin + (1.6 * self.base_seconds if first else 1e9), self.deadline - 15)
        if not adapted:
            aligned = int(ALIGNED * pictures) // BATCH * BATCH
            model.model.language_model.requires_grad_(False)
            model.lm_head.requires_grad_(False)
            rates = (ALIGN_LR, 0.0)
            seen += train(model, self.rows, self.features["train"], order[:aligned], rates, self.device, self.dtype,
                          log, until, graphs=self.graphs, at_once=self.at_once)  # fmt: skip
            model.model.language_model.requires_grad_(True)
            model.lm_head.requires_grad_(True)
            order = order[aligned:]
        rest = pictures - seen
        rates = (PROJECTOR_LR / 4, LR / 2) if adapted else (PROJECTOR_LR, LR)
        seen += train(model, self.rows, self.features["train"], order[:rest], rates, self.device, self.dtype, log,
                      until, measure, self.graphs, self.at_once)  # fmt: skip
        seconds = time.time() - begin
        self.pace["all" if whole else "few"] = seconds / max(seen, 1)
        if whole and not adapted:
            state = {name: value.cpu() for name, value in model.state_dict().items()}
            torch.save(state, self.base(job).with_suffix(".partial"))
            self.base(job).with_suffix(".partial").rename(self.base(job))
        if first:
            write_json(self.work / "pace.json", seconds / max(seen, 1))
        found = ask(model, self.features["held_out"], self.held_out, self.count, self.device, self.dtype)
        print(job["job"], "accuracy", float(np.mean(found["right"])), flush=True)
        return {"pictures": seen, "planned": pictures, "train_seconds": round(seconds, 1), "log": log, "curve": curve,
                **packed(found)}  # fmt: skip

    def choose(self, model: Any, order: Any) -> int:
        """How many pictures the first training can see in its time, from a few steps at learning rate zero."""
        for steps in (8, 50):
            log: list[Any] = []
            train(model, self.rows, self.features["train"], order[: steps * BATCH], (0.0, 0.0), self.device, self.dtype,
                  log, time.time() + 1e6, graphs=self.graphs, at_once=self.at_once)  # fmt: skip
        pace = max(log[-1][2], 0.1) / (steps * BATCH)
        fits = min(len(order), int(self.base_seconds / pace / 1.15))  # the others come in beside it
        pictures = max(4 * BATCH, fits // (8 * BATCH) * (8 * BATCH))
        write_json(self.work / "pace.json", pace)
        write_json(self.work / "pictures.json", pictures)
        print("pace", pace, "pictures", pictures, flush=True)
        return pictures

    @torch.no_grad()
    def free(self, job: dict[str, Any]) -> dict[str, Any]:
        """Every method on the model with all tokens, through the stock forward on pixels."""
        count = min(self.free_count, self.count)
        model = build({"name": "all_tokens"}, self.side, self.tower, self.language, self.tokenizer)
        model.load_state_dict(torch.load(self.base(job)), strict=False)
        model.tie_weights()
        cast(model.eval(), self.device, self.dtype)
        pixels = pixels_of(self.work, "held_out")
        found: dict[str, Any] = {"questions": count, "asked": {}}
        options: list[dict[str, Any]] = [{"name": "all_tokens"}]
        for tokens in COUNTS:
            options += [{"name": "fourier_vlm", "tokens": tokens, "rescale": "amplitude"}]
            options += [{"name": name, "tokens": tokens} for name in METHODS if name not in ("all_tokens", "mqt")]
        options.sort(key=lambda method: isinstance(from_dict(method), LanguageCompressor))  # the slow ones last
        for method in options:
            if self.left() < 25:
                found["stopped"] = True
                break
            name = "-".join(str(value) for value in method.values())
            try:
                found["asked"][name] = packed(self.ask_pixels(model, from_dict(method), pixels, count))
                print(name, found["asked"][name]["accuracy"], flush=True)
            except Exception as error:  # one method less must not cost the others
                found["asked"][name] = {"refused": f"{type(error).__name__}: {error}"[:300]}
                print(name, found["asked"][name], flush=True)
            write_json(self.out / f"{job['job']}.partial.json", found)
        (self.out / f"{job['job']}.partial.json").unlink(missing_ok=True)
        return found

    @torch.no_grad()
    def ask_pixels(self, model: Any, method: Any, pixels: Any, count: int) -> dict[str, list]:
        found: dict[str, list] = {"right": [], "nats": []}
        kept = method.count(self.grid)
        image = self.tokenizer.convert_tokens_to_ids("<image>")
        text = model.model.language_model
        text.config._attn_implementation = "eager" if isinstance(method, LanguageCompressor) else "sdpa"
        if isinstance(method, LanguageCompressor):
            return self.ask_last(model, method, pixels, count // 2, image)
        for start in range(0, count, 48):
            numbers = slice(start, min(start + 48, count))
            (ids, _), answer = tensors(self.held_out, numbers, self.device), self.held_out.answer[numbers]
            long = torch.cat((torch.full((len(ids), kept), image, device=self.device), ids), 1)
            with compress_vision(model, None, method):
                output = model(
                    input_ids=long,
                    pixel_values=normalised(pixels[numbers], self.device).to(self.dtype),
                    logits_to_keep=ids.shape[1],
                    use_cache=False,
                )
            row, column = (moved(one, self.device) for one in np.nonzero(answer[:, 1:]))
            logits, targets = output.logits[row, column].float(), ids[row, column + 1]
            add(found, logits, targets, answer)
        return found

    def ask_last(self, model: Any, method: Any, pixels: Any, count: int, image: int) -> dict[str, list]:
        """Greedy generation after prompts, of one length at a time: the method reads a prompt's last token. No loss."""
        ids = tensors(self.held_out, slice(0, count), self.device)[0]
        answer = torch.from_numpy(self.held_out.answer[:count]).to(self.device)
        starts, most = answer.int().argmax(1), int(answer.sum(1).max())
        right = [0] * count
        for length in sorted(set(starts.tolist())):
            for mine in (starts == length).nonzero()[:, 0].split(64):
                before = torch.full((len(mine), math.prod(self.grid)), image, device=self.device)
                prompt = torch.cat((before, ids[mine, :length]), 1)
                with compress_vision(model, None, method):
                    said = model.generate(
                        input_ids=prompt,
                        attention_mask=torch.ones_like(prompt),
                        pixel_values=normalised(pixels[mine.cpu().numpy()], self.device).to(self.dtype),
                        do_sample=False,
                        max_new_tokens=most,
                        pad_token_id=0,
                        eos_token_id=self.tokenizer.eos_token_id,
                    )[:, prompt.shape[1] :]
                for at, tokens in zip(mine.tolist(), said.tolist()):
                    wanted = ids[at][answer[at]].tolist()
                    right[at] = int(tokens[: len(wanted)] == wanted)
        return {"right": right, "nats": []}


def packed(found: dict[str, list]) -> dict[str, Any]:
    """Right and wrong as one string; losses as means by kind."""
    losses = [found["nats"][at :: len(KINDS)] for at in range(len(KINDS))]
    nats = {kind: round(float(np.mean(some)), 4) for kind, some in zip(KINDS, losses) if some}
    return {
        "accuracy": round(float(np.mean(found["right"])), 4),
        "right": "".join(map(str, found["right"])),
        "nats": nats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "tower", "work"))
    parser.add_argument("work")
    parser.add_argument("--tower", default="facebook/dinov2-small")
    parser.add_argument("--language", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--output", default="runs/few_tokens")
    parser.add_argument("--side", type=int, default=336, help="of a picture, in pixels")
    parser.add_argument("--pool", type=int, default=60_000, help="pictures to learn from")
    parser.add_argument("--questions", type=int, default=2880, help="held-out ones")
    parser.add_argument("--free", type=int, default=1440, help="held-out ones asked without training")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="for drawing")
    parser.add_argument("--base-seconds", type=float, default=400, help="for the first training")
    parser.add_argument("--deadline", type=float, default=1e11, help="Unix time")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--bf16", action="store_true", help="on a CPU, as on a GPU")
    parser.add_argument("--bases", type=int, default=3, help="models with all tokens: with 1 all seeds adapt the same")
    parser.add_argument("--at-once", type=int, default=BATCH, help="pictures of a step in memory together")
    parser.add_argument("--memory", type=float, help="GiB of the GPU that a worker may take at most")
    given = parser.parse_args()
    if BATCH % given.at_once:
        parser.error(f"--at-once {given.at_once}: must divide the {BATCH} pictures of a step")
    if given.what == "draw":
        draw(Path(given.work), given.side, given.pool, given.questions, given.processes, given.seconds)
    elif given.what == "tower":
        run_tower(Path(given.work), given.tower, "cuda" if torch.cuda.is_available() else "cpu")
    else:
        torch.manual_seed(0)
        Worker(given).run()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
