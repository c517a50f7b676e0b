"""`fathom judge`: what a judge says of texts, and how they are compared at equal entropy."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathom import FathomConfig, FathomForCausalLM, FathomForMaskedDiffusion
from fathom.data import train_bpe
from fathom.evaluate import load_checkpoint
from fathom.evaluate.samples import (
    Matched,
    SamplesConfig,
    Texts,
    Way,
    around,
    compare_samples,
    equal_quality,
    judged,
    read,
    side_of,
    written,
)
from tiny import SIZES, perturb
from tiny_checkpoint import TEXT, run_cli

MODELS = ("masked", "twin", "judge")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A masked model, its twin and a judge with another tokenizer."""
    place = tmp_path_factory.mktemp("samples")
    (place / "text.txt").write_text(TEXT * 6, encoding="utf-8")
    for name, size in zip(MODELS, (299, 299, 350), strict=True):
        tokenizer = train_bpe([TEXT], size)
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        section = {"name": "masked", "mask_token_id": tokenizer.mask_token_id} if name == "masked" else {"name": "none"}
        sizes = {**SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        torch.manual_seed(0)
        kind = FathomForMaskedDiffusion if name == "masked" else FathomForCausalLM
        model = kind(FathomConfig(**sizes, diffusion=section))
        perturb(model)
        model.save_pretrained(place / "run" / name / "model")
        tokenizer.save_pretrained(place / "run" / name / "model")
    return place


def test_the_judge_reads_continuations_after_their_prompts(folder):
    reader, own = load_checkpoint(str(folder / "run" / "judge" / "model"), "cpu")
    tokenizer = load_checkpoint(str(folder / "run" / "twin" / "model"), "cpu")[1]
    rows = torch.tensor([tokenizer(TEXT[at:])["input_ids"][:14] for at in (0, 9, 30)])
    texts = judged(Texts(None, rows[:, 5:], np.zeros(3)), rows[:, :5], tokenizer, (reader, own), batch=2)
    for row, nats, count in zip(rows, texts.nats, texts.tokens, strict=True):
        before, after = own(tokenizer.decode(row[:5]))["input_ids"], own(tokenizer.decode(row[5:]))["input_ids"]
        ids = torch.tensor([[own.eos_token_id, *before, *after]])
        with torch.no_grad():
            log_probs = reader(input_ids=ids).logits[0].double().log_softmax(-1)
        expected = [-log_probs[place - 1, ids[0, place]].item() for place in range(1 + len(before), ids.shape[1])]
        assert count == len(after) and nats == pytest.approx(sum(expected), rel=1e-5)


def spaced():
    """A tokenizer like Llama 2's: words begin with a space, which the first one of a text has not."""
    tokens = ["<s>", "</s>", "▁the", "▁sea", "s", *"▁ab"]
    made = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def test_a_continuation_keeps_its_space_and_its_characters(folder):
    assert read([2], [3, 4], spaced()) == ("the", " seas")
    assert read([2, 3], [4], spaced()) == ("the sea", "s")
    tokenizer = load_checkpoint(str(folder / "run" / "twin" / "model"), "cpu")[1]
    for text in ("naïve Ünder", "«日本» — a"):
        ids = tokenizer(text)["input_ids"]
        for at in range(len(ids)):
            before, after = read(ids[:at], ids[at:], tokenizer)
            assert before + after == text and text.startswith(before)


def test_writers_are_compared_at_the_entropy_of_the_data():
    """Against a loop over resampled prompts, and a writer whose perplexity is known at every entropy."""

    def texts(temperature, shift):
        tokens = RNG.integers(3, 9, 40)
        spread = RNG.normal(0, 0.1, 40)
        return Texts(temperature, None, shift + spread, nats=tokens * (shift + spread + 1), tokens=tokens)

    def side(wanted):  # temperatures within 0.15 of the wanted one are not told apart
        return lambda one: 0 if abs(one.temperature - wanted) < 0.15 else int(np.sign(one.temperature - wanted))

    found, at = around(lambda i: texts(i / 10, i / 10), 12, side(0.77), 8)
    assert [one.temperature for one in found] == [0.6, 1.0] and at == 8
    for start in (0, 11):
        found, _ = around(lambda i: texts(i / 10, i / 10), 12, side(0.77), start)
        assert [one.temperature for one in found] == [0.6, 1.0]
    assert [one.temperature for one in around(lambda i: texts(i, i), 4, side(7.0), 1)[0]] == [3]  # not reached
    assert [one.temperature for one in around(lambda i: texts(i, i), 4, side(-7.0), 2)[0]] == [0]
    made = texts(None, 0.5)
    assert [side_of(made)(texts(None, 0.5 + more)) for more in (-0.3, 0.0, 0.3)] == [-1, 0, 1]
    data, draws = texts(None, 0.77), RNG.integers(0, 40, (7, 40))
    matched = Matched.between(found, data, draws)
    for value, chosen in [(matched.value, range(40)), *zip(matched.drawn, draws, strict=True)]:
        chosen = list(chosen)
        (a, low), (b, high) = (
            (np.mean(one.entropies[chosen]), sum(one.nats[i] for i in chosen) / sum(one.tokens[i] for i in chosen))
            for one in found
        )
        wanted = np.mean([data.entropies[i] for i in chosen])
        assert value == pytest.approx(low + min(2, max(-1, (wanted - a) / (b - a))) * (high - low))
    assert matched.value == pytest.approx(1.77, abs=0.05)  # log perplexity is entropy + 1 here
    said = matched.said()
    assert said["low"] < said["value"] < said["high"] and said["value"] == pytest.approx(math.exp(matched.value))


def test_speed_counts_at_equal_quality():
    def row(way, speed, over, model="m", policy="p"):
        over = None if over is None else {"value": over}
        return {
            "model": model,
            "policy": policy,
            "way": way,
            "tokens_per_second": speed,
            "over_reference": over,
            "kept": 1,
        }

    rows = [
        row("1", 10, 1.0),
        row("2", 20, 1.019),
        row("4", 40, 1.021),
        row("8", 80, None),
        row("ar", 5, 1.0, "t", None),
    ]
    assert [(best["model"], best["way"], best["times"]) for best in equal_quality(rows)] == [
        ("m", "2", 2.0),
        ("t", "ar", 1.0),
    ]


def test_texts_have_one_length_and_follow_from_the_seed(folder):
    config = SamplesConfig(samples=3, prompt_tokens=4, new_tokens=8, batch_size=2, steps=(4,), block_caches=("dual",))
    for name in ("masked", "twin"):
        model, tokenizer = load_checkpoint(str(folder / "run" / name / "model"), "cpu")
        prompts = torch.tensor([tokenizer(TEXT[at:])["input_ids"][:4] for at in (0, 9, 30)])
        ways = config.ways(model)
        assert ways == (
            [Way()] if name == "twin" else [Way("low_confidence", *pair, 8) for pair in (("none", 8), ("dual", 4))]
        )
        once, again = (written(model, tokenizer, prompts, ways[-1], config, 1.3) for _ in range(2))
        assert (
            once.ids.shape == (3, 8) and torch.equal(once.ids, again.ids) and once.nfe == (8 if name == "twin" else 4)
        )
        assert not (once.ids == tokenizer.eos_token_id).any() and len(set(map(tuple, once.ids.tolist()))) == 3


def test_an_autoregressive_model_samples_from_its_own_distribution(folder):
    """Whatever its checkpoint's generation config asks for; and EOS is left out that only the tokenizer knows."""
    model, tokenizer = load_checkpoint(str(folder / "run" / "twin" / "model"), "cpu")
    prompts = torch.tensor([tokenizer(TEXT)["input_ids"][:4]])
    config = SamplesConfig(samples=2, prompt_tokens=4, new_tokens=30)
    plain = written(model, tokenizer, prompts, Way(), config, 1.0).ids
    asked = {"repetition_penalty": 1e6, "num_beams": 2, "min_p": 0.9, "eos_token_id": None}
    model.generation_config.update(**asked)
    model.config.eos_token_id = None
    assert torch.equal(written(model, tokenizer, prompts, Way(), config, 1.0).ids, plain)
    assert all(getattr(model.generation_config, name) == value for name, value in asked.items())


def test_the_verb(folder, monkeypatch, capsys):
    runs = folder / "run"
    asked = ("judge", runs / "masked", runs / "twin" / "model", "--judge", runs / "judge" / "model", "--device", "cpu")
    small = ("--samples", 6, "--prompt-tokens", 4, "--max-new-tokens", 8, "--temperatures", "0.05,0.3,1,4")
    text = ("--text", folder / "text.txt")
    code, _, err = run_cli(monkeypatch, capsys, *asked, *text)
    assert code == 2 and "did you mean" in err  # the folder above a model
    asked = ("judge", runs / "masked" / "model", *asked[2:])
    code, out, err = run_cli(monkeypatch, capsys, *asked, *text, *small, "--steps", 2, "-o", folder / "out")
    assert code == 0, err
    found = json.loads((folder / "out" / "judged.json").read_text())
    assert [(row["model"], row["nfe"]) for row in found["rows"]] == [("masked", 8), ("masked", 2), ("twin", 8)]
    assert "held-out text: perplexity" in out and "Tokens a second at equal quality" in out
    code, out, err = run_cli(
        monkeypatch,
        capsys,
        *asked,
        *text,
        *small[:6],
        "--temperatures",
        "0.01,0.02",
        "--steps",
        8,
        "-o",
        folder / "cold",
    )
    assert code == 0 and "is not clearly beyond the data's" in out and "give wider --temperatures" in out, out + err
    assert (folder / "out" / "judged.png").exists() and (folder / "out" / "judged_dark.png").exists()
    for more, message in ((("--temperatures", "1,0.5"), "rising"), (("--temperatures", "a"), "separated by commas")):
        code, _, err = run_cli(monkeypatch, capsys, *asked, *text, *small, *more)
        assert code == 2 and message in err and err.count("\n") == 1, err
    code, _, err = run_cli(monkeypatch, capsys, "judge", runs / "twin", runs / "twin" / "model", *asked[3:], *text)
    assert code == 2 and "the same checkpoint twice" in err, err
    code, _, err = run_cli(monkeypatch, capsys, *asked[:3], "--judge", f"{runs}/x/../twin/model", *text)
    assert code == 2 and "is one of the models that write" in err and err.count("\n") == 1, err


def test_what_cannot_be_compared_is_refused(folder):
    masked, twin, judge = (load_checkpoint(str(folder / "run" / one / "model"), "cpu") for one in MODELS)
    sizes = {"samples": 3, "prompt_tokens": 4, "new_tokens": 8}
    bare = copy.deepcopy(judge[1])
    bare.bos_token = bare.eos_token = None
    broken = {}
    for name, (model, tokenizer) in (("m", masked), ("t", twin), ("j", judge)):
        broken[name] = copy.deepcopy(model), tokenizer
        broken[name][0].model.norm.weight.data.fill_(math.nan)
    short = copy.deepcopy(judge[0]), judge[1]
    short[0].config.max_position_embeddings = 8
    others = copy.deepcopy(twin[1])  # which reads the first document alike
    others.add_tokens(["keel: 40"])
    for writers, reader, options, message in (
        ({"m": masked, "j": judge}, twin, {}, "j: reads text by another tokenizer than m"),
        ({"t": twin}, masked, {}, "no exact loss"),
        ({"t": twin}, (judge[0], bare), {}, "no BOS and no EOS"),
        ({"t": twin}, (judge[0], spaced()), {}, "a space before every text"),
        ({"t": twin}, short, {}, r"judge: a text has \d+ of its tokens, more than its 8 positions"),
        ({"t": twin}, broken["j"], {}, "judge: its losses are not finite"),
        ({"m": broken["m"]}, judge, {}, "m: its logits of the held-out text are not numbers"),
        ({"m": masked, "t": broken["t"]}, judge, {}, "t: its logits of the held-out text are not numbers"),
        ({"m": masked, "o": (twin[0], others)}, judge, {}, "o: reads text by another tokenizer than m"),
        ({"t": twin}, judge, {"temperatures": (0.5, math.inf)}, "finite and rising"),
        ({"m": masked}, judge, {"samples": 5000}, "not 5000"),
        ({"m": masked}, judge, {"new_tokens": 100_000}, "positions"),
        ({"m": masked}, judge, {"block_length": 3}, "multiple of block_length=3"),
        ({"m": masked}, judge, {"policies": ("margn",)}, "did you mean 'margin'"),
        (
            {"m": masked},
            judge,
            {"policies": ("entropy", "fourier_sampler"), "block_caches": ("dkv_cache",)},
            "use anoth",
        ),
    ):
        said: list[str] = []
        with pytest.raises(ValueError, match=message):
            compare_samples(
                writers, reader, ["The sea. ", TEXT * 2], SamplesConfig(**{**sizes, **options}), said.append
            )
        assert not said, "refused before anything is written"
