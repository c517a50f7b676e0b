"""The tasks of encoders: families, denoising, targets, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cases import recipe
from transformers import AutoConfig, T5Config

from fathom.tasks import lookup
from fathom.train import load_recipe
from fathom.train.recipe import model_config
from fathom.train.trainer import train_run
from fathom_cli import main

LED = {"attention_window": [8] * 2, "d_model": 16, "encoder_layers": 2, "decoder_layers": 1}
LED |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
NYSTROM = {"family": "nystromformer", "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
OTHERS = {
    "led": ("seq2seq", LED),
    "longt5": ("seq2seq", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "local_radius": 7}),
    "t5": ("seq2seq", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}),
    "fnet": ("classification", {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}),
    "nystromformer": ("classification", {**NYSTROM, "num_hidden_layers": 1, "num_landmarks": 4}),
}  # fmt: skip


def load(name: str, folder: Path, /, **sections):
    written = {**recipe(name, folder), **sections}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(written))
    return load_recipe(folder / "recipe.yaml")


@pytest.mark.parametrize("heads", [{}, {"num_attention_heads": None}], ids=["kept", "null"])
def test_a_method_does_without_a_field_that_its_family_has_not(heads, tmp_path):
    model = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    method = {"name": "other", "family": "fnet", **heads}
    loaded = load("classification", tmp_path, model=model, methods=[method])
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    if heads:
        config = model_config(loaded, loaded.methods[0], data.tokenizer)
        assert config.hidden_size == 16 and not hasattr(config, "num_attention_heads")
    else:
        with pytest.raises(ValueError, match=r"'fnet' has no such field; .* num_attention_heads: null"):
            model_config(loaded, loaded.methods[0], data.tokenizer)


@pytest.mark.parametrize("family", OTHERS)
def test_transformers_own_models_are_contestants(family, tmp_path):
    task, fields = OTHERS[family]
    loaded = load(task, tmp_path, model={"family": family, **fields}, methods=[{"name": "other", "family": family}])
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    config = model_config(loaded, loaded.methods[0], data.tokenizer)
    model = loaded.task.model_class.from_config(config)
    batch = loaded.task.collate([data.train[i] for i in range(2)])
    loss = loaded.task.forward(model, **batch).loss
    loss.backward()
    assert loss.isfinite() and any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    sizes = loaded.task.sizes(config, 24, torch.float32)
    assert sizes.parameters == sum(p.numel() for p in model.parameters()) > sizes.non_embedding > 0
    assert sizes.flops_per_token > 0


def test_nystromformers_landmarks_do_not_read_padding_as_keys(tmp_path):
    """By hand, with one landmark a row and without the convolution: its keys are the real tokens alone."""
    model = {**NYSTROM, "num_hidden_layers": 1, "num_landmarks": 1}
    loaded = load("classification", tmp_path, model=model, methods=[{"name": "nystrom", "family": "nystromformer"}])
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    made = loaded.task.model_class.from_config(model_config(loaded, loaded.methods[0], data.tokenizer)).eval()
    batch = loaded.task.collate([data.train[0]])
    count, attention, seen = int(batch["attention_mask"].sum()), made.nystromformer.encoder.layer[0].attention.self, []
    torch.nn.init.zeros_(attention.conv.weight)
    attention.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output[0])))
    loaded.task.forward(made, **batch)
    (x, out) = seen[0]
    q, k, v = (layer(x).view(-1, 2, 8).transpose(0, 1) for layer in (attention.query, attention.key, attention.value))
    keys, values = k[:, :count], v[:, :count]
    expected = (q.mean(1, keepdim=True) @ keys.mT / 8**0.5).softmax(
        -1
    ) @ values  # one landmark: its other kernels are 1
    assert 0 < count < 24
    torch.testing.assert_close(out[0], expected.transpose(0, 1).flatten(1).expand(24, -1))


def test_the_loss_is_the_mean_over_targets_and_smoothed_in_training_alone(tmp_path):
    loaded = load("seq2seq", tmp_path)
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    model = loaded.task.model_class.from_config(model_config(loaded, loaded.methods[0], data.tokenizer))
    batch = loaded.task.collate([data.train[i] for i in range(4)])
    plain = loaded.task.forward(model.eval(), **batch)
    assert loaded.task.targets(batch) == (batch["labels"] != -100).sum()
    torch.testing.assert_close(plain.loss, model(**batch).loss)
    smooth = dataclasses.replace(loaded.task, label_smoothing=0.1)
    torch.testing.assert_close(smooth.forward(model.eval(), **batch).loss, plain.loss)
    assert smooth.forward(model.train(), **batch).loss > 0 and not torch.equal(
        smooth.forward(model.train(), **batch).loss, plain.loss
    )


def test_noise_is_barts():
    task = lookup("seq2seq")(random_share=0.0)
    sentences = [list(range(start, start + 50)) for start in (0, 100, 200)]
    ordinary = np.arange(300)
    kept, masks = [], []
    for number in range(60):
        found = task.noise(sentences, np.random.default_rng(number), 999, ordinary)
        real = [token for token in found if token != 999]
        assert len(set(real)) == len(real)
        groups = [token // 100 for token in real]
        assert sum(a != b for a, b in pairwise(groups)) <= 2  # sentences stay together
        kept.append(len(real) / 150)
        masks.append(found.count(999))
    # 45 of 150 tokens are drawn in spans of 3.5 on average; spans that overlap hide fewer
    assert 0.7 <= np.mean(kept) < 0.8 and 9 < np.mean(masks) < 16
    still = dataclasses.replace(task, permute_sentences=False, mask_share=0.0)
    assert still.noise(sentences, np.random.default_rng(0), 999, ordinary) == [t for s in sentences for t in s]
    drawn = dataclasses.replace(task, random_share=1.0)
    assert 999 not in drawn.noise(sentences, np.random.default_rng(0), 999, ordinary)


def test_spans_are_t5s():
    """Source and target make the text again, by a reader that knows sentinels alone."""
    task, sentinels = lookup("seq2seq")(denoise=True, spans=True, mask_share=0.15, poisson=3.0), list(range(1000, 1100))
    firsts = set()
    for number in range(40):
        text = list(range(200))
        source, target = task.span_noise(text, np.random.default_rng(number), sentinels)
        assert [token for token in source if token >= 1000] == sentinels[:10] == [t for t in target if t >= 1000]
        spans: dict[int, list[int]] = {}
        for token in target:
            if token >= 1000:
                spans[token] = []
            else:
                spans[max(spans)].append(token)
        assert [t for token in source for t in spans.get(token, [token])] == text
        assert sum(map(len, spans.values())) == 30 and min(map(len, spans.values())) >= 1
        firsts.add(source.index(1000))
    assert len(firsts) > 5  # they are drawn
    for size in range(1, 6):
        source, target = task.span_noise(list(range(size)), np.random.default_rng(0), sentinels)
        assert len(source) + len(target) - 2 * bool(target) == size
    _, target = task.span_noise([7] * 5000, np.random.default_rng(0), sentinels)
    assert [token for token in target if token != 7] == sentinels  # there are no more of them
    with pytest.raises(ValueError, match=r"task\.spans=true: it is noise of texts"):
        lookup("seq2seq")(spans=True)


def test_a_base_of_t5s_form_is_trained_and_is_a_stock_checkpoint(tmp_path):
    for name in ("train", "held-out"):
        (tmp_path / f"{name}.txt").write_text("The sea was calm. Old men sat by it in silence. " * 30)
    loaded = load("seq2seq", tmp_path, task={
        "name": "seq2seq", "denoise": True, "spans": True, "target_tokens": 24, "mask_share": 0.2, "answers": 2,
    }, model={"family": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
        methods=[{"name": "t5", "family": "t5"}], data={
        "train": str(tmp_path / "train.txt"), "validation": str(tmp_path / "held-out.txt"), "tokenizer": {"bpe": 280},
        "block_size": 24,
    })  # fmt: skip
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    assert loaded.task.sizes(model_config(loaded, loaded.methods[0], None), 24, torch.float32).flops_per_token > 0
    run = train_run(loaded, loaded.methods[0], seed=0, folder=tmp_path / "run", data=data)
    stock = AutoConfig.from_pretrained(run.model)
    assert type(stock) is T5Config and stock.vocab_size == len(data.tokenizer) == 280 + 2 + 100
    assert stock.decoder_start_token_id == data.tokenizer.pad_token_id
    assert run.scores["target_bits_per_byte"] > 0


def test_denoising_rows_hold_the_text(tmp_path):
    text = "The sea was calm. Old men sat by it in silence. " * 30
    (tmp_path / "train.txt").write_text(text)
    task = {"name": "seq2seq", "denoise": True, "target_tokens": 24}
    loaded = load("seq2seq", tmp_path, task=task, data={
        "train": str(tmp_path / "train.txt"), "validation": None, "tokenizer": {"bpe": 280}, "block_size": 24,
        "max_tokens": 240,
    })  # fmt: skip
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    assert len(data.train) == 10
    targets = [data.tokenizer.decode(row["labels"][row["labels"] >= 0], skip_special_tokens=True) for row in data.train]
    assert text.startswith(re.sub(r"\s+", " ", "".join(targets)).strip())
    again = loaded.task.prepare(loaded.data, tmp_path / ".other")
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(data.train, again.train, strict=True))


@pytest.mark.parametrize(
    ("task", "sections", "said"),
    [
        ("seq2seq", {"data": {"train": "embedded"}}, "data.train='embedded' is running text"),
        ("seq2seq", {"model": {"d_modle": 3}}, r"unknown key model.d_modle \(did you mean 'd_model'"),
        ("seq2seq", {"task": {"name": "seq2seq", "source_field": "text"}}, "no text in field 'text'.*set task.so"),
        ("seq2seq", {"task": {"name": "seq2seq", "mask_share": 2.0}}, "mask_share=2.0"),
        ("classification", {"task": {"name": "classification", "label_field": "kind"}}, "kind=None: needs a whole"),
        ("classification", {"model": {"family": "bart"}}, "model.family='bart': task 'classification' has"),
        ("classification", {"model": NYSTROM | {"num_landmarks": 7}}, "num_landmarks=7: must divide data.block_s"),
        ("classification", {"model": NYSTROM | {"num_landmarks": 24}}, "as many landmarks as tokens, attention is pl"),
        ("classification", {"model": NYSTROM | {"segment_means_seq_len": 64}}, "rows have data.block_size=24"),
        ("causal_lm", {"methods": [{"name": "x", "family": "led"}]}, "unknown key methods.x.family"),
        ("sft", {"methods": ["fourier"]}, "unknown key methods.fourier.encoder"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(task, sections, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        loaded = load(task, tmp_path, **sections)
        model_config(loaded, loaded.methods[0])
        loaded.task.prepare(loaded.data, tmp_path / ".data")


def test_fathom_cost_prices_a_recipe_of_encoders(tmp_path, monkeypatch, capsys):
    methods = ["full", {"name": "truncation"}]
    load("seq2seq", tmp_path, methods=methods)
    monkeypatch.setattr("sys.argv", ["fathom", "cost", str(tmp_path / "recipe.yaml"), "--json"])
    with pytest.raises(SystemExit):
        main()
    full, truncated = json.loads(capsys.readouterr().out)["models"]
    assert full["parameters"] == truncated["parameters"] > full["non_embedding_parameters"]
    assert truncated["kv_bytes_per_token"] * 2 == full["kv_bytes_per_token"] == 2 * 32 * 4
    assert truncated["matmul"] < full["matmul"] == full["training_flops_per_token"] / 3
