"""The task `masked_diffusion` on rows of prompt and answer: what may be hidden, and a run from rows to a sample."""

from __future__ import annotations

import json

import torch
from cases import recipe

from fathom.evaluate import load_checkpoint
from fathom.tasks.masked_diffusion import MaskedDiffusion
from fathom.train import load_recipe, train_run


def write(folder):
    rows = [{"prompt": f"{a} and {b}?", "answer": str(a + b)} for a in range(6) for b in range(6)]
    for name, some in (("train", rows[:24]), ("held", rows[24:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    task = {"name": "masked_diffusion", "prompt_field": "prompt", "answer_field": "answer", "draws": 2}
    data = {"train": str(folder / "train.jsonl"), "validation": str(folder / "held.jsonl")}
    whole = recipe("masked_diffusion", folder, name="rows", task=task)
    whole["data"] = {**data, "tokenizer": {"bpe": 270}, "block_size": 64}
    (folder / "recipe.json").write_text(json.dumps(whole))
    return load_recipe(folder / "recipe.json")


def test_prompts_stay_and_the_ends_that_pad_an_answer_are_learned(tmp_path):
    made = write(tmp_path)
    task = made.task
    assert isinstance(task, MaskedDiffusion)
    data = task.prepare(made.data, tmp_path / "cache")
    examples = [dict(data.train[i]) for i in range(6)]
    seen, ends, eos = torch.zeros(64, dtype=torch.bool), [], data.tokenizer.eos_token_id
    for draw in range(40):
        for i, example in enumerate(examples):
            example["draw"] = torch.tensor([0, 6 * draw + i])
        batch = task.collate([dict(example) for example in examples])
        hidden = batch["input_ids"] == -1
        for row, example in zip(hidden, examples):
            answer = torch.as_tensor(example["labels"]) != -100
            first, last = int(answer.int().argmax()), int(answer.nonzero().max())
            assert first > 0 and not row[:first].any()  # the prompt
            ends.append(row[last + 1 :].any().item())
            assert all(token == eos for token in torch.as_tensor(example["input_ids"])[last + 1 :])
        seen |= hidden.any(0)
        assert batch["loss_weights"].bool().equal(hidden)
    assert any(ends) and seen[-1]


def test_a_model_is_trained_on_rows_and_answers_a_prompt(tmp_path):
    made = write(tmp_path)
    data = made.task.prepare(made.data, tmp_path / "cache")
    result = train_run(made, made.methods[0], seed=0, folder=tmp_path / "run", data=data)
    assert 0 < result.scores["bits_per_byte_bound"] < 50
    model, tokenizer = load_checkpoint(str(result.model), "cpu")
    ids = tokenizer("1 and 2?", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=8, block_length=4)
    assert out.shape == (1, ids.shape[1] + 8) and not (out == tokenizer.mask_token_id).any()
