"""What heads recover (invariants 10 and 11), the writers' table, and the verbs."""

from __future__ import annotations

import json
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import yaml
from latent_models import TOKENS, encoder, ids, model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.evaluate.text import text_loss
from fathom.latents.configuration import FathomLatentConfig
from fathom.latents.cost import decoder_flops, denoiser_flops, encoder_flops
from fathom.latents.heads import HEADS, new_head
from fathom.latents.model import FathomForLatentDiffusion
from fathom.latents.recovery import RecoveryConfig, noised, scored, study, terms
from fathom.latents.writers import WRITERS, WritersConfig, at_entropy, entropy, nats_of_texts, table
from fathom.train.stages import load_stages
from tiny import tiny_model
from tiny_checkpoint import run_cli, save_masked

WORDS = ["the", "sea", "was", "calm", "and", "old", "men", "sat", "by", "it", "in", "silence"]
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def of_embeddings(vocabulary: int, length: int, sizes: dict, **codar) -> FathomForLatentDiffusion:
    """Vectors that say nothing of their neighbours: random embeddings."""
    torch.manual_seed(0)
    section = {"name": "masked", "mask_token_id": 3}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "init": "hf"}
    frozen = FathomForMaskedDiffusion(FathomConfig(vocab_size=vocabulary, diffusion=section, **small))
    config = FathomLatentConfig(
        encoder=frozen.config, denoiser=sizes, decoder=sizes, length=length, codar={"source": "embeddings", **codar},
        trained=["latent_diffusion", "contextual_decoder"],
        **{**TOKENS, "vocab_size": vocabulary, "mask_token_id": 3, "special_token_ids": [0, 1, 2, 3]},
    )  # fmt: skip
    return FathomForLatentDiffusion.from_encoder(frozen, config).eval()


def agreement_language(rows: int, half: int, words: int, first: int, seed: int = 0) -> torch.Tensor:
    """A language of long-range agreement: `half` words at random, then for each of them, in order, the one word that
    agrees with it. Words are the tokens first … first + words − 1."""
    generator = torch.Generator().manual_seed(seed)
    partner = torch.randperm(words, generator=torch.Generator().manual_seed(words))
    said = torch.randint(words, (rows, half), generator=generator)
    return torch.cat([said, partner[said]], dim=1) + first


def test_the_order_of_heads_on_a_language_of_long_range_agreement():
    """Pointwise > factorised > contextual in nats at equal noise, all near 0 on clean vectors. One by one the likeliest
    token by its marginal is best, so the order shows in the likelihood of the whole, not in the share of tokens."""
    tested = of_embeddings(16, 4, {**SIZES, "hidden_size": 32})
    train, held = agreement_language(2000, 2, 12, 4), agreement_language(200, 2, 12, 4, seed=1)
    assert train[:, :2].unique().tolist() == list(range(4, 16)) and len(torch.unique(train[:, [0, 2]], dim=0)) == 12
    tested.space.fit([(train, None)])
    config = RecoveryConfig(heads=("mlp", "factorised", "contextual"), steps=140, rows=48, lr=6e-3, levels=(0.0, 0.12),
                            t_max=0.15, examples=200)  # fmt: skip
    found = study(tested, train, held, config, say=lambda line: None)
    clean, noisy = ({row["head"]: row for row in found["rows"] if row["t"] == t} for t in (0.0, 0.12))
    assert all(row["nll"] < 0.08 and row["accuracy"] > 0.98 for row in clean.values())
    nll = {name: row["nll"] for name, row in noisy.items()}
    assert nll["mlp"] - nll["factorised"] > 0.08 and nll["factorised"] - nll["contextual"] > 0.08
    alpha = 1 / math.sqrt(1 + 81 * math.tan(math.pi * 0.06) ** 2)
    assert noisy["mlp"]["sigma"] == pytest.approx(math.sqrt(1 - alpha**2), rel=1e-5)
    assert terms(found)[-1] == {"t": 0.12, "context": nll["mlp"] - nll["factorised"],
                                "total_correlation": nll["factorised"] - nll["contextual"]}  # fmt: skip


def test_a_decoder_that_has_learned_a_text_recovers_it_from_clean_vectors():
    """Invariant 10: free-running, all of it."""
    tested = of_embeddings(40, 8, SIZES)
    text = torch.randint(4, 40, (6, 8), generator=torch.Generator().manual_seed(0))
    tested.space.fit([(text, None)])
    tested.train().train_stage("contextual_decoder")
    optimizer = torch.optim.AdamW([p for p in tested.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        tested(text, labels=text).loss.backward()
        optimizer.step()
    tested.eval()
    assert torch.equal(tested.decode(tested.encode(text)), text)


def test_the_nearest_head_knows_the_noise():
    tested = of_embeddings(20, 8, SIZES)
    text = torch.randint(4, 20, (3, 8), generator=torch.Generator().manual_seed(0))
    tested.space.fit([(text, None)])
    z, noise = noised(tested, text, torch.tensor([0.0, 0.05, 0.1]), torch.Generator().manual_seed(0))
    log_probs = new_head("nearest", tested).logits(z, text, noise).log_softmax(-1)
    vectors = tested.space.encode(torch.arange(20)[:, None])[:, 0]
    for row in (1, 2):
        alpha, sigma = float(noise[0][row]), float(noise[1][row])
        normal = torch.distributions.Normal(alpha * vectors, sigma)
        expected = torch.stack([normal.log_prob(vector).sum(-1).log_softmax(0) for vector in z[row]])
        torch.testing.assert_close(log_probs[row], expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(log_probs[0].argmax(-1), text[0])
    with pytest.raises(ValueError, match="head 'nearest': states of an encoder have no vector a token"):
        new_head("nearest", model())
    with pytest.raises(ValueError, match="heads='nearst': must be some of nearest"):
        RecoveryConfig(heads=("nearst",))


def test_heads_see_what_they_may_see():
    tested, text = model(), ids(1)
    z = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    noise = (torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    for name in HEADS[1:]:
        torch.manual_seed(0)
        logits = new_head(name, tested).eval().logits(z, text, noise)
        assert logits.shape == (1, 12, 97)
        (gradient,) = torch.autograd.grad(logits[0, 5].logsumexp(0) + 0 * z.sum(), z)
        seen = (gradient[0].abs().amax(-1) > 0).nonzero().flatten().tolist()
        wide = name in ("factorised", "contextual")
        assert seen == (list(range(12)) if wide else [] if name == "language" else [5])


def test_heads_draw_tokens_at_their_temperature():
    """At 0 the likeliest token, else in proportion to p^(1/τ)."""
    torch.manual_seed(0)
    head, rows = new_head("linear", model()).eval(), 20_000
    z, clean = 8 * torch.randn(1, 1, 32), (torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    logits = head.logits(z, None, clean)[0, 0].detach()
    assert head.write(z, clean).item() == head.write(z, clean, 0.0).item() == logits.argmax().item()
    drawn = head.write(z.expand(rows, 1, 32), clean, 0.7).flatten().bincount(minlength=97) / rows
    expected = (logits / 0.7).softmax(0)
    assert float((drawn - expected).abs().max()) < 4 * math.sqrt(0.25 / rows) and expected.max() > 2 / 97


def test_the_table_of_writers():
    tested, text = model(), ids(8)
    tokenizer = type("Words", (), {"decode": lambda self, row, **_: " ".join(map(str, row))})()
    config = WritersConfig(samples=3, temperatures=(0.0, 1.0), steps=3, head_steps=2, rows=4)
    heard = []

    def judge(texts):
        heard.append(texts)
        return 2.0 * len(texts), len(texts)

    kept: list[tuple[int, list[str]]] = []
    lines = table(tested, tokenizer, text, text, config, judge, say=lambda line: None,
                  keep=lambda rows, texts: kept.append((len(rows), texts)))  # fmt: skip
    assert [count for count, _ in kept] == list(range(1, len(lines) + 1)) and [texts for _, texts in kept] == heard
    writers = [(line["writer"], line["temperature"]) for line in lines]
    assert writers == [("data", None), *((name, t) for name in WRITERS for t in (0.0, 1.0))]
    assert all(line["perplexity"] == pytest.approx(math.exp(2.0)) for line in lines) and len(heard) == len(lines)
    first = lines[0]
    assert first["overlap"] == 1.0 and first["text"] == " ".join(map(str, text[0].tolist()))
    assert {(line["nfe"], line["decoder_steps"]) for line in lines if line["writer"] == "codar"} == {(3, 12)}
    assert entropy([1, 1, 2, 3]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    points = [{"writer": "a", "entropy": e, "perplexity": p} for e, p in ((1.0, 10.0), (3.0, 1000.0))]
    assert at_entropy(points, "a", 2.0) == pytest.approx(100.0) and at_entropy(points, "a", 4.0) is None


def test_the_judge_reads_texts_together_as_one_by_one():
    """Short ones padded behind, long ones by windows; an empty one has nothing to be scored."""

    def tokens_of(_, text):
        return torch.tensor([1, *(3 + int(word) for word in text.split())])

    judge = tiny_model()
    texts = ["1 2 3 4 5", "7", "", "9 8 7 6 5 4 3 2 1 9 8 7", "2 4"]
    with mock.patch("fathom.evaluate.text.with_prefix", tokens_of):
        found = nats_of_texts(judge, None, texts, window=8)
    assert found[2] == (0.0, 0)
    for text, (nats, count) in zip(texts, found, strict=True):
        row = tokens_of(None, text)
        if count:
            expected = text_loss(judge, row, window=min(8, count), stride=min(4, count))
            assert count == expected[1] == len(row) - 1 and nats == pytest.approx(expected[0], rel=1e-5)


def test_heads_are_asked_for_the_denoisers_estimates():
    tested, text = model(), ids(4)
    head = new_head("linear", tested).eval()
    z, noise = noised(tested, text, torch.full((4,), 0.4), torch.Generator().manual_seed(1))
    z = tested.denoise(z, torch.full((4,), 0.4), tested.denoise(z, torch.full((4,), 0.4)))
    expected = F.cross_entropy(head.logits(z, text, noise).flatten(0, 1), text.flatten())
    assert scored(tested, head, text, 0.4, 0, estimated=True)["nll"] == pytest.approx(expected.item(), rel=1e-5)


def test_stages_run_from_one_file_and_the_verbs_serve_their_model(tmp_path, monkeypatch, capsys):
    """Two stages on a masked model, the study and its plot, the table, `fathom generate`; the same command again reads
    what is finished."""
    text = " ".join(WORDS * 60)
    frozen = save_masked(tmp_path / "frozen", text, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "held.txt").write_text(" ".join(reversed(WORDS * 20)))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    training = {"tokens": 192, "sequences": 4, "lr": 1e-2}
    raw = {
        "name": "tiny",
        "data": {"train": str(tmp_path / "train.txt"), "validation": str(tmp_path / "held.txt"), "tokenizer": frozen,
                 "block_size": 16, "num_proc": 1},
        "stages": {
            "denoiser": {"task": "latent_diffusion", "training": training,
                         "model": {"encoder": frozen, "denoiser": sizes, "decoder": sizes, "codar": {"ema": 0.9}}},
            "decoder": {"task": {"name": "contextual_decoder", "corrupt": "denoiser"}, "training": training,
                        "model": {"checkpoint": "stage:denoiser"}},
        },
        "recovery": {"heads": ["linear", "contextual"], "steps": 2, "rows": 4, "levels": [0.0, 0.2], "examples": 4},
        "writers": {"writers": ["codar", "noise"], "samples": 2, "temperatures": [0.0, 1.0], "steps": 3},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    arguments = ("latents", "run", path, "-o", tmp_path / "runs", "--device", "cpu")
    code, out, err = run_cli(monkeypatch, capsys, *arguments)
    assert code == 0, err
    folder = tmp_path / "runs" / "tiny" / "seed-0"
    written = json.loads((folder / "writers.json").read_text())
    assert set(written["controls"]) >= {"nll_noise", "nll_shuffled", "memory_gap", "reconstruction", "exact_corrupted"}
    assert [row["writer"] for row in written["rows"]] == ["data", "codar", "codar", "noise", "noise"]
    recovered = json.loads((folder / "recovery.json").read_text())
    assert len(recovered["rows"]) == 4 and (folder / "recovery.png").stat().st_size > 5000
    assert "the latents are ignored" in out and out.count("> ") >= 2  # so short a training teaches nothing
    assert run_cli(monkeypatch, capsys, *arguments)[0] == 0
    checkpoint = folder / "decoder" / "model"
    trained = FathomForLatentDiffusion.from_pretrained(checkpoint)
    before = FathomForLatentDiffusion.from_pretrained(folder / "denoiser" / "model")
    assert trained.config.trained == ["contextual_decoder", "latent_diffusion"]
    for (name, a), b in zip(trained.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(a, b) != name.startswith("decoder.") or name.endswith("norm.weight"), name
    for prompt in ("the sea", ""):
        code, out, _ = run_cli(monkeypatch, capsys, "generate", checkpoint, "--prompt", prompt, "--steps", 3)
        assert code == 0 and out.startswith(prompt)
    for option, said in (
        (("--policy", "margin"), "--policy: .* is a latent diffusion model"),
        (("--stream",), "--stream"),
    ):
        code, _, err = run_cli(monkeypatch, capsys, "generate", checkpoint, "--prompt", "the", *option)
        assert code == 2 and said.split(":")[0] in err
    code, _, err = run_cli(monkeypatch, capsys, "generate", folder / "denoiser" / "model", "--prompt", "the")
    assert code == 2 and "stage 'contextual_decoder' has not been trained yet" in err

    def with_decoder(**more):
        return {**raw["stages"], "decoder": {**raw["stages"]["decoder"], **more}}

    for section, changes, said in (
        ("writers", {"writers": ["codr"]}, "writers='codr'"),
        ("recovery", {"step": 2}, "recovery.step"),
        ("data", {**raw["data"], "validation": None}, "asks for held-out text; set data.validation of stage 'decoder'"),
        ("stages", {"denoiser": raw["stages"]["denoiser"]}, "the last stage is a 'latent_diffusion'"),
        ("stages", with_decoder(retrain=1), "stages.decoder.retrain: only `fathom compare` reads it"),
        ("stages", with_decoder(seeds=[1]), "stages.decoder.seeds: `seeds` of the file says which"),
        (
            "stages",
            with_decoder(training={**training, "lr": [1, 2], "sweep_fraction": 1}),
            "stages.decoder: lr=[1.0, 2.0]: nothing is swept",
        ),
    ):  # before anything is trained
        path.write_text(yaml.safe_dump({**raw, "name": "wrong", section: changes}, sort_keys=False))
        code, _, err = run_cli(monkeypatch, capsys, *arguments)
        assert code == 2 and said in err and not (tmp_path / "runs" / "wrong").exists()
    alone = {key: section for key, section in raw.items() if key != "writers"}
    for more, options in (({"judge": "stage:denoiser"}, ()), ({}, ("--judge", "FOLDER"))):
        path.write_text(yaml.safe_dump({**alone, **more, "name": "wrong"}, sort_keys=False))
        code, _, err = run_cli(monkeypatch, capsys, *arguments, *options)
        assert code == 2 and "no section writers, whose texts it would judge" in err
    raw["stages"]["decoder"]["model"]["checkpoint"] = "stage:denoisr"
    raw = {key: raw[key] for key in ("name", "data", "stages")}
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    with pytest.raises(ValueError, match=r"stages.decoder.model.checkpoint='stage:denoisr'.*\(did you mean 'denoiser'"):
        load_stages(path)


def test_flops_are_those_that_torch_counts():
    for options in ({}, {"time": "adaln", "self_conditioning": "concat", "diagonal": True, "layer": 1}):
        tested, text = model(**options), ids(1)
        x = torch.randn(1, 12, 32)
        counted = {}
        with torch.no_grad():
            for name, call in {
                "encoder": lambda: tested.space.features(text),  # noqa: B023
                "denoiser": lambda: tested.denoise(x, torch.tensor([0.5]), x),  # noqa: B023
                "decoder": lambda: tested.decoder_logits(text, None, x),  # noqa: B023
            }.items():
                with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                    call()
                counted[name] = counter.get_total_flops()
        assert counted["encoder"] == pytest.approx(12 * encoder_flops(tested.config, 12))
        assert counted["denoiser"] == pytest.approx(12 * denoiser_flops(tested.config, 12))
        # torch counts a causal kernel as a full one
        causal = tested.decoder.config
        more = 4 * causal.num_hidden_layers * causal.num_attention_heads * causal.head_dim * (12 - 13 / 2)
        assert counted["decoder"] == pytest.approx(12 * (decoder_flops(tested.config, 12) + more))


def test_embeddings_that_learn_are_kept_apart_by_the_loss_of_rounding():
    frozen = encoder()
    config = FathomLatentConfig(
        encoder=frozen.config, denoiser=SIZES, decoder=SIZES, length=12, **TOKENS,
        codar={"source": "learned", "normalisation": "l2", "latent_dim": 8, "ema": 0.0},
    )  # fmt: skip
    tested = FathomForLatentDiffusion.from_encoder(frozen, config).train()
    tested.train_stage("latent_diffusion")
    text, t = ids(2), torch.tensor([0.1, 0.4])
    noise = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    loss = tested(text, stage="latent_diffusion", labels=text, t=t, noise=noise).loss
    loss.backward()
    assert tested.space.table.weight.grad.abs().sum() > 0
    with torch.no_grad():
        rows = F.normalize(tested.space.table.weight, dim=-1) * math.sqrt(8)
        x0 = rows[text]
        torch.testing.assert_close(tested.space.encode(text), x0)
        x = tested.process.corrupt(x0, t, noise)
        said = tested.denoiser(x, t)
        expected = F.cross_entropy((said @ rows.T).flatten(0, 1), text.flatten()) + (said - x0).square().mean()
    torch.testing.assert_close(loss.detach(), expected)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_stock_decoder_reads_the_vectors(kind, tmp_path):
    """T5's and BART's decoders: logits are those of the stock class given W z for encoder states, greedy decoding with
    transformers' cache is the full forward, and the model is saved and loaded."""
    sizes = {
        "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
        "bart": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    }[kind]  # fmt: skip
    frozen = encoder()
    fields = {"model_type": kind, "vocab_size": 97, "pad_token_id": 0, "decoder_start_token_id": 1, **sizes}
    config = FathomLatentConfig(
        encoder=frozen.config, denoiser=SIZES, decoder=fields, length=12, codar={"memory_positions": "learned"},
        trained=["latent_diffusion", "contextual_decoder"], **TOKENS,
    )  # fmt: skip
    tested = FathomForLatentDiffusion.from_encoder(frozen, config).eval()
    text = ids(2)
    tested.space.fit([(text, None)])
    with torch.no_grad():
        z = tested.space.encode(text)
        inputs = F.pad(text[:, :-1], (1, 0), value=1)
        states = tested.decoder.project(z) + tested.decoder.places.weight
        given = {"encoder_outputs": (states,), "decoder_input_ids": inputs}
        torch.testing.assert_close(tested.decoder_logits(text, None), tested.decoder.model(**given).logits)
        said = tested.decode(tested.encode(text))
        expected = torch.full((2, 1), 1)
        for _ in range(12):
            step = tested.decoder.model(encoder_outputs=(states,), decoder_input_ids=expected, use_cache=False)
            expected = torch.cat([expected, step.logits[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(said, expected[:, 1:])
    assert not [name for name, _ in tested.decoder.model.get_encoder().named_parameters() if ".0." in name]
    tested.save_pretrained(tmp_path)
    loaded = FathomForLatentDiffusion.from_pretrained(tmp_path).eval()
    assert torch.equal(
        loaded.generate(rows=2, steps=2, temperature=0.0), tested.generate(rows=2, steps=2, temperature=0.0)
    )
    tested(text, labels=text).loss.backward()
    assert tested.decoder.project.weight.grad.any() and decoder_flops(config, 12) > 0
    for options, message in (({}, "memory_positions='rotary'"), ({"diagonal": True}, "diagonal=True")):
        config.codar = {**config.codar, "memory_positions": "rotary", **options}
        with pytest.raises(ValueError, match=f"codar option {message}: a stock decoder has no place for it"):
            FathomForLatentDiffusion(config)


def test_a_stock_encoder_gives_the_vectors():
    """BERT, its last states and an earlier layer's; padding is not seen."""
    small = BertConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    torch.manual_seed(0)
    frozen = BertModel(small).eval()
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 8:] = False
    for layer in (None, 1):
        config = FathomLatentConfig(encoder=small, denoiser=SIZES, decoder=SIZES, length=12,
                                    codar={"layer": layer, "specials": "kept"}, **TOKENS)  # fmt: skip
        tested = FathomForLatentDiffusion.from_encoder(frozen, config).eval()
        with torch.no_grad():
            expected = frozen(ids(2), mask.long(), output_hidden_states=True).hidden_states[2 if layer is None else 1]
            found = tested.space.features(ids(2), mask)
        torch.testing.assert_close(found[mask], expected[mask])
        tested.space.fit([(ids(2), mask)])
        x = tested.encode(ids(2), mask).values
        torch.testing.assert_close(x[mask].mean(0), torch.zeros(16), rtol=0, atol=1e-4)
        assert not x[1, 8:].any()
