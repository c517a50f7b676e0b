"""Every task's scores again, row by row from the files, with nothing of the task but its tokenizer."""

from __future__ import annotations

import json
import math
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import sacrebleu
import torch
import torch.nn.functional as F
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoProcessor

from fathom import FathomForCausalLM
from fathom.audiovideo import FlowMatchPairScheduler, MovaPipeline, joint_forward
from fathom.audiovideo.clips import Clip
from fathom.audiovideo.codecs import load_codec
from fathom.audiovideo.metrics import score as score_clip
from fathom.data import PreparedData
from fathom.train import Recipe
from fathom.vision.scenes import scene


def of_targets(recipe: Recipe, rows: list[dict[str, str]], tokenizer: Any, model: Any) -> dict[str, float]:
    nats = size = 0.0
    found = []
    for index, row in enumerate(rows):
        source = torch.tensor([tokenizer(row["source"])["input_ids"]])
        target = [*tokenizer(row["target"])["input_ids"], tokenizer.eos_token_id]
        given = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
        logits = model(input_ids=source, decoder_input_ids=given).logits[0]
        nats += float(F.cross_entropy(logits, torch.tensor(target), reduction="sum"))
        size += len(row["target"].encode())
        if index < recipe.task.answers:
            said = tokenizer.decode(model.generate(source, max_new_tokens=8, num_beams=1)[0], skip_special_tokens=True)
            found.append(RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(row["target"], said))
    rouge = {name: sum(one[name].fmeasure for one in found) / len(found) for name in found[0]}
    return {"target_bits_per_byte": nats / math.log(2) / size, **rouge}


def of_queries(recipe: Recipe, rows: list[dict[str, str]], tokenizer: Any, model: Any) -> dict[str, float]:
    """Greedy answers one by one, and their rows beside the right ones from SQLite itself."""
    folder = Path(recipe.task.databases)
    schema = "harbour | boat : name , size | crew : name , size | port : name , size"
    nats = size = 0.0
    right = []
    for index, row in enumerate(rows):
        source = [*tokenizer(f"{row['question']} | {schema}")["input_ids"], tokenizer.eos_token_id]
        query = row["query"].lower()
        target = [*tokenizer(f"harbour | {query}")["input_ids"], tokenizer.eos_token_id]
        given = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=given).logits[0]
        nats += float(F.cross_entropy(logits, torch.tensor(target), reduction="sum"))
        size += len(f"harbour | {query}".encode())
        if index < recipe.task.answers:
            out = model.generate(torch.tensor([source]), max_new_tokens=24, num_beams=1, do_sample=False)[0]
            said = tokenizer.decode(out, skip_special_tokens=True).split("|", 1)[-1].strip()
            connection = sqlite3.connect(f"file:{folder / 'harbour.sqlite'}?mode=ro", uri=True)
            try:
                found = sorted(connection.execute(said).fetchall())
            except sqlite3.Error:
                found = None
            expected = sorted(connection.execute(query).fetchall())
            same_but_number = said.split(">")[0].split() == query.split(">")[0].split() and ">" in said
            right.append((same_but_number, found == expected, found is not None))
    exact, execution, runs = (sum(column) / len(right) for column in zip(*right, strict=True))
    return {
        "exact_match": exact, "execution": execution, "interaction_exact": exact, "interaction_execution": execution,
        "runs": runs, "answer_bits_per_byte": nats / math.log(2) / size,
    }  # fmt: skip


def of_tables(recipe: Recipe, rows: list[dict[str, Any]], tokenizer: Any, model: Any) -> dict[str, float]:
    """The loss, BLEU and ROUGE-4 of table_to_text; tests/tables holds its other scores against their equations."""
    nats = size = 0.0
    said, right = [], []
    for index, row in enumerate(rows):
        source = torch.tensor([tokenizer(" ".join(f"{key} is {value} ;" for key, value in row["table"]))["input_ids"]])
        target = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        given = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
        logits = model(input_ids=source, decoder_input_ids=given).logits[0]
        nats += float(F.cross_entropy(logits, torch.tensor(target), reduction="sum"))
        size += len(row["text"].encode())
        if index < recipe.task.answers:
            said.append(tokenizer.decode(model.generate(source, max_new_tokens=40)[0], skip_special_tokens=True))
            right.append(row["text"])
    scorer = RougeScorer(["rouge4"], use_stemmer=True)
    rouge = [scorer.score(a, b)["rouge4"].fmeasure for a, b in zip(right, said, strict=True)]
    bleu = sacrebleu.corpus_bleu(said, [right]).score
    return {"target_bits_per_byte": nats / math.log(2) / size, "bleu": bleu, "rouge4": sum(rouge) / len(rouge)}


def of_clips(recipe: Recipe, data: PreparedData, model: Any) -> dict[str, float]:
    """Velocities clip by clip, from the equations; and clips that the pipeline makes one at a time."""
    errors, golden = [], (math.sqrt(5) - 1) / 2
    made = {"offset_ms": [], "within_frame": [], "together": []}
    parts = dict(model.named_children())
    pipeline = MovaPipeline(scheduler=FlowMatchPairScheduler(), tokenizer=data.tokenizer, **parts)
    pipeline.settings, pipeline.codec = model.config, load_codec(data.codec)
    for number, row in enumerate(data.validation):
        generator = torch.Generator().manual_seed(((number + 1) * 0xBF58476D1CE4E5B9) % 2**63)
        torch.rand(4, generator=generator)
        noise = [torch.randn(row[name].shape, generator=generator) for name in ("video", "audio")]
        sigma = [5 * u / (1 + 4 * u) for u in ((0.5 + number * golden) % 1, (0.5 + number * golden**2) % 1)]
        x = [(1 - s) * row[name] + s * e for name, s, e in zip(("video", "audio"), sigma, noise, strict=True)]
        mask = torch.zeros(4, *x[0].shape[1:])
        mask[:, 0] = 1
        states = model.text_encoder(row["input_ids"][None], row["attention_mask"][None])[0]
        given = torch.cat([x[0], mask, row["first"]])[None], x[1][None], states * row["attention_mask"][None, :, None]
        tower = model.video_dit if sigma[0] >= 0.9 else model.video_dit_2
        tau = (torch.tensor([1000 * s]) for s in sigma)
        found = joint_forward(tower, model.audio_dit, model.dual_tower_bridge, *given, *tau)
        right = (e - row[name] for name, e in zip(("video", "audio"), noise, strict=True))
        errors.append([float(((a[0] - b) ** 2).mean()) for a, b in zip(found, right, strict=True)])
        if number < recipe.task.made:
            seed = torch.Generator().manual_seed(number)
            options = {"steps": recipe.task.steps, "text_scale": 1.0, "bridge_scale": 1.0}
            caption = data.validation.captions[number]
            out = pipeline(caption, image=row["first"][None], generator=[seed], **options)
            said = score_clip(Clip(out.frames[0], out.frame_rate, out.audio[0], out.sample_rate))
            for name, values in made.items():
                values += [] if said[name] is None else [said[name]]
    video, audio = (sum(values) / len(values) for values in zip(*errors, strict=True))
    means = {
        name: sum(values) / len(values) if values else (500.0 if name == "offset_ms" else 0.0)
        for name, values in made.items()
    }
    return {"velocity_error": video + audio, "video_error": video, "audio_error": audio, **means}


def of_vectors(task: str, data: PreparedData, model: Any) -> dict[str, float]:
    """The latent tasks row by row, with α and σ of the tangent schedule written out; noise by the row's tokens."""
    alpha = lambda t: 1 / math.sqrt(1 + 81 * math.tan(math.pi * t / 2) ** 2)  # noqa: E731
    total, count, losses, right = 0.0, 0, {"true": [], "shuffled": [], "noise": []}, {"": 0, "_corrupted": 0}
    every = [block["input_ids"].long() for block in data.validation]
    vectors = [model.space.encode(ids[None]) for ids in every]
    noised = []

    def drawn(ids, seed=0):
        return torch.Generator().manual_seed(zlib.crc32(ids.numpy().tobytes(), seed))

    def loss(ids, z):
        given = torch.cat([torch.tensor([model.config.start_token_id]), ids[:-1]])[None]
        logits = model.decoder(input_ids=given, memory=model.decoder.read(z)).logits[0]
        return F.cross_entropy(logits[1:], ids[1:], reduction="none").double()

    for ids, x0 in zip(every, vectors, strict=True):
        generator = drawn(ids)
        if task == "latent_diffusion":
            for t in (0.25, 0.75):
                noise = torch.randn(x0.shape[1:], generator=generator)
                x = alpha(t) * x0 + math.sqrt(1 - alpha(t) ** 2) * noise
                error = (model.denoiser_mean(x, torch.tensor([t])) - x0)[0, 1:].square().mean(-1)
                total, count = total + float(error.sum()), count + len(error)
            continue
        t = 0.001 + 0.149 * float(torch.rand((), generator=generator))
        torch.rand(len(ids), generator=generator)  # the times by token
        noise = torch.randn(x0.shape[1:], generator=generator)
        noised.append(alpha(t) * x0 + math.sqrt(1 - alpha(t) ** 2) * noise)
        total += float(loss(ids, noised[-1]).sum())
    if task == "latent_diffusion":
        return {"denoising_error": total / count}
    text = "".join(data.tokenizer.decode(ids[1:], skip_special_tokens=True) for ids in every)
    for row in range(3):
        ids, length = every[row], len(every[row])
        losses["true"].append(loss(ids, noised[row]))
        losses["shuffled"].append(loss(ids, noised[(row - 1) % 3]))
        losses["noise"].append(loss(ids, torch.randn(1, length, 16, generator=drawn(ids, 1))))
        for name, z in (("", vectors[row]), ("_corrupted", noised[row])):
            said = [model.config.start_token_id]
            for _ in range(length):
                memory = model.decoder.read(z)
                said.append(int(model.decoder(input_ids=torch.tensor([said]), memory=memory).logits[0, -1].argmax()))
            right[name] += sum(a == b for a, b in zip(said[1:], ids.tolist(), strict=True))
    mean = {name: float(torch.cat(found).mean()) for name, found in losses.items()}
    return {
        "decoder_bits_per_byte": total / math.log(2) / len(text.encode()),
        "memory_gap": mean["shuffled"] - mean["true"], "noise_gap": mean["noise"] - mean["true"],
        **{f"reconstruction{name}": found / 3 / len(every[0]) for name, found in right.items()},
    }  # fmt: skip


def of_questions(model: Any, folder: Path) -> dict[str, float]:
    """Every picture and question through the saved processor and generate()."""
    processor, right = AutoProcessor.from_pretrained(folder), {}
    for number in range(72):
        asked = scene(0, number, True)
        inputs = processor(
            images=asked.draw(16), text=f"<image>\n{asked.question}\n", return_tensors="pt", add_special_tokens=False
        )
        assert (inputs["input_ids"] == processor.image_token_id).sum() == 4
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        fits = processor.tokenizer.decode(out, skip_special_tokens=True) == asked.answer
        size = f"{'words' if asked.kind == 'read' else 'objects'}_{asked.size}"
        for name in ("accuracy", asked.kind, size, *(("new_scenes",) if asked.new else ())):
            right.setdefault(name, []).append(fits)
    return {name: sum(found) / len(found) for name, found in right.items()}


def independent_scores(
    task: str, recipe: Recipe, data: PreparedData, model: FathomForCausalLM, folder: Path
) -> dict[str, float]:
    """The scores of a trained model, or those of them that are computed again here."""
    tokenizer = data.tokenizer
    if task == "causal_lm":
        nats = sum(
            F.cross_entropy(
                model(block["input_ids"][None].long()).logits[0, :-1], block["input_ids"][1:].long(), reduction="sum"
            )
            for block in data.validation
        )
        text = "".join(tokenizer.decode(block["input_ids"][1:], skip_special_tokens=True) for block in data.validation)
        return {"bits_per_byte": float(nats) / math.log(2) / len(text.encode())}
    if task == "masked_diffusion":  # the bound, draw by draw, as its docstring says
        mask, nats = tokenizer.mask_token_id, 0.0
        for block in data.validation:
            ids = block["input_ids"].long()
            generator = torch.Generator().manual_seed(zlib.crc32(ids.numpy().tobytes(), 0))
            start, size = float(torch.rand((), dtype=torch.float64, generator=generator)), len(ids) - 1
            for draw in range(3):
                count = 1 + math.floor(size * ((start + draw / 3) % 1))
                keys = torch.rand(len(ids), generator=generator)
                hidden = 1 + keys[1:].argsort()[:count]
                noised = ids.clone()
                noised[hidden] = mask
                logits = model(noised[None]).logits[0]
                logits[:, mask] = -torch.inf
                nats += float(F.cross_entropy(logits[hidden], ids[hidden], reduction="sum")) * size / count / 3
        text = "".join(tokenizer.decode(block["input_ids"][1:], skip_special_tokens=True) for block in data.validation)
        return {"bits_per_byte_bound": nats / math.log(2) / len(text.encode())}
    if task == "audiovideo":
        return of_clips(recipe, data, model)
    if task in ("latent_diffusion", "contextual_decoder"):
        return of_vectors(task, data, model)
    if task == "vqa":
        return of_questions(model, folder)
    if Path(recipe.data.validation).suffix == ".jsonl":
        rows = [json.loads(line) for line in Path(recipe.data.validation).read_text().splitlines()]
    if task == "classification":
        said = [int(model(torch.tensor([tokenizer(row["text"])["input_ids"]])).logits.argmax()) for row in rows]
        return {"accuracy": sum(a == row["label"] for a, row in zip(said, rows, strict=True)) / len(rows)}
    if task == "text_to_sql":
        return of_queries(recipe, rows, tokenizer, model)
    if task == "table_to_text":
        return of_tables(recipe, rows, tokenizer, model)
    if task == "seq2seq":
        return of_targets(recipe, rows, tokenizer, model)
    assert task == "sft", f"the scores of task {task!r} are not computed a second time here: add them"
    nats = size = right = 0.0
    for index, row in enumerate(rows):
        prompt = tokenizer(f"### Instruction:\n{row['prompt']}\n\n### Response:\n")["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([prompt + answer])).logits[0]
        nats += float(F.cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(answer), reduction="sum"))
        size += len(row["answer"].encode())
        if index < recipe.task.questions:
            right += all(logits[len(prompt) - 1 + i].argmax() == token for i, token in enumerate(answer))
    return {"answer_bits_per_byte": nats / math.log(2) / size, "exact_match": right / recipe.task.questions}
