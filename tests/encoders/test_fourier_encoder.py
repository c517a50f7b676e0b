"""The methods that shorten, on BART: the sheet's invariants, and a float64 re-implementation of its section 3.3."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from scipy import fft
from seq2seq_models import batch, stock_bart
from transformers import AutoModelForSeq2SeqLM, BartForConditionalGeneration

import fathom
from fathom import FathomBartConfig, FathomBartForConditionalGeneration
from tiny import assert_close

SHORTENING = ["fourier", "mean_pool", "strided", "truncation"]


def model(**encoder):
    folder, _ = stock_bart()
    return FathomBartForConditionalGeneration.from_pretrained(folder, encoder=encoder, dtype=torch.float64).eval()


def test_full_is_the_stock_model_and_saves_as_it(tmp_path):
    _, stock = stock_bart()
    ours = FathomBartForConditionalGeneration.from_pretrained(stock_bart()[0]).eval()
    given = batch(17, 9)
    assert torch.equal(ours(**given).logits, stock(**given).logits)
    ours.save_stock_pretrained(tmp_path)
    again = BartForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert type(again.config).model_type == "bart" and torch.equal(again(**given).logits, stock(**given).logits)
    with pytest.raises(ValueError, match="encoder='fourier'"):
        model(name="fourier").save_stock_pretrained(tmp_path)


def by_sheet(ids, ratio, places, resample, upsample, global_residual):
    """Section 3.3 for one source without padding, in float64, with the stock model's parameters."""
    encoder = stock_bart()[1].double().model.encoder
    x = encoder.embed_tokens(ids) + encoder.embed_positions(ids)
    x = encoder.layernorm_embedding(x)[0]
    residuals = []
    for index, layer in enumerate(encoder.layers):
        if index in places:
            residuals.append(x)
            x = resample(x, math.ceil(Fraction(ratio) * len(x)))
        heads = layer.self_attn.num_heads
        q, k, v = (
            getattr(layer.self_attn, f"{name}_proj")(x).view(len(x), heads, -1).transpose(0, 1) for name in "qkv"
        )
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        x = layer.self_attn_layer_norm(x + layer.self_attn.out_proj(scores.transpose(0, 1).reshape(len(x), -1)))
        x = x + layer.fc2(F.gelu(layer.fc1(x)))
        if index == len(encoder.layers) - 1 and global_residual:
            residuals.append(x)
            n = len(residuals[0])
            x = residuals[0] + sum(upsample(r, n) for r in residuals[1:])
        x = layer.final_layer_norm(x)
    stock_bart()[1].float()
    return x


def spectral(x, kept):
    spectrum = fft.dct(x.detach().numpy(), norm="ortho", axis=0)[:kept]
    return torch.from_numpy(fft.idct(spectrum, norm="ortho", axis=0))


def means(x, kept):
    n = len(x)
    return torch.stack([x[i * n // kept : -(-(i + 1) * n // kept)].mean(0) for i in range(kept)])


def every(x, kept):
    return x[[i * len(x) // kept for i in range(kept)]]


def nearest(x, n):
    return x[[t * len(x) // n for t in range(n)]]


def linear(x, n):
    return F.interpolate(x.T[None], size=n, mode="linear", align_corners=False)[0].T


@pytest.mark.parametrize(
    ("name", "resample"), [("fourier", spectral), ("mean_pool", means), ("strided", every)], ids=SHORTENING[:3]
)
@pytest.mark.parametrize(
    ("options", "upsample"),
    [({"ratio": 0.3}, nearest), ({"filter_layers": [1, 3], "upsample": "linear"}, linear),
     ({"global_residual": False, "filter_layers": [0]}, nearest)],
    ids=["default", "two", "short"],
)  # fmt: skip
def test_the_encoder_is_the_sheets(name, resample, options, upsample):
    given = batch(17)
    ours = model(name=name, **options)
    out = ours(**given).encoder_last_hidden_state[0]
    places = options.get("filter_layers", [2])
    whole = options.get("global_residual", True)
    wanted = by_sheet(given["input_ids"], str(options.get("ratio", 0.5)), places, resample, upsample, whole)
    assert_close(out, wanted.detach(), 1e-10)
    assert len(out) == (17 if whole else 9)


def test_truncation_is_the_stock_model_on_the_first_tokens():
    given = batch(17)
    _, stock = stock_bart()
    cut = {**given, "input_ids": given["input_ids"][:, :9], "attention_mask": None}
    ours = model(name="truncation").float()
    assert_close(ours(**given).logits, stock(**cut).logits)


@pytest.mark.parametrize("name", SHORTENING)
def test_ratio_one_changes_nothing(name):
    given = batch(17, 11)
    ours = model(name=name, ratio=1.0, global_residual=False)
    assert_close(ours(**given).logits[0], model(name="full")(**given).logits[0], 1e-10)


@pytest.mark.parametrize("global_residual", [True, False])
@pytest.mark.parametrize("name", SHORTENING)
def test_a_row_in_a_padded_batch_is_the_row_alone(name, global_residual):
    ours = model(name=name, global_residual=global_residual, filter_layers=[1, 2])
    together = batch(17, 11, 5)
    out = ours(**together).logits
    for row, length in enumerate((17, 11, 5)):
        alone = {name: together[name][row : row + 1] for name in ("input_ids", "labels")}
        alone["input_ids"] = alone["input_ids"][:, :length]
        assert_close(out[row], ours(**alone).logits[0], 1e-10)


def test_with_leak_it_depends_on_the_batch():
    ours = model(name="fourier", padding="leak")
    together = batch(17, 11)
    alone = {"input_ids": together["input_ids"][1:, :11], "labels": together["labels"][1:]}
    assert (ours(**together).logits[1] - ours(**alone).logits[0]).abs().max() > 1e-3


@pytest.mark.parametrize("global_residual", [True, False])
def test_padding_on_the_left_is_padding(global_residual):
    ours = model(name="fourier", global_residual=global_residual)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    x = torch.randn(2, 12, 24, dtype=torch.float64)
    run = [lambda x, mask, cut=None, finish=None: finish(x if cut is None else cut.down(x)) if finish else (
        x if cut is None else cut.down(x))] * 4  # fmt: skip
    method = ours.model.encoder.method
    left, alone = method(x, mask, run)[1], method(x[1:, 5:], None, run)[0]
    seen = method.memory_mask(mask, 4)[1]
    assert_close(left[seen], alone, 1e-12)


def test_amplitude_keeps_a_constant_and_adds_no_parameter():
    ours = model(name="fourier", rescale="amplitude")
    x = torch.full((2, 13, 4), 3.0, dtype=torch.float64)
    method = ours.model.encoder.method
    assert_close(method.cut(None, 13, "cpu", 0).down(x), x[:, :7], 1e-12)
    cut = method.cut(torch.arange(13) < torch.tensor([[13], [6]]), 13, "cpu", 0)
    assert_close(cut.down(x)[cut.mask], torch.full((10, 4), 3.0, dtype=torch.float64), 1e-12)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in stock_bart()[1].parameters())


def test_exact_counts():
    for ratio, length, kept in ((0.3, 10, 3), (0.2, 5, 1), (0.7, 90, 63), (0.5, 17, 9), (0.1, 3, 1)):
        method = model(name="fourier", ratio=ratio).model.encoder.method
        assert method.cut(None, length, "cpu", 0).most == kept
    assert method.cut(None, 11, "cpu", 1).most == 1  # ⌈0.1 · 10⌉
    counting = model(name="fourier", ratio=0.1, count_cls=True).model.encoder.method
    assert counting.cut(None, 11, "cpu", 1).most == 2  # ⌈0.1 · 11⌉
    most = model(name="fourier", ratio=1.0, count_cls=True).model.encoder.method
    assert most.cut(None, 11, "cpu", 1).most == 10


@pytest.mark.parametrize("global_residual", [True, False])
def test_generation_with_a_cache_is_generation_without(global_residual):
    ours = model(name="fourier", global_residual=global_residual)
    given = batch(17, 9)
    given.pop("labels")
    said = [ours.generate(**given, max_new_tokens=6, num_beams=2, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*said)


def test_saved_and_loaded_by_the_auto_class(tmp_path):
    assert fathom.FathomBartConfig is FathomBartConfig
    ours = model(name="fourier", ratio=0.3, filter_layers=[1, 2])
    ours.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert type(again) is FathomBartForConditionalGeneration and again.config.encoder == ours.config.encoder
    given = batch(17, 9)
    assert torch.equal(again(**given).logits, ours(**given).logits)
    half = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, encoder={"name": "fourier", "ratio": 0.5})
    assert (half.config.encoder["ratio"], half.config.encoder["filter_layers"]) == (0.5, (1, 2))


def test_gradients_reach_every_encoder_parameter_also_when_layers_are_recomputed():
    found = []
    for checkpointing in (False, True):
        ours = model(name="fourier", filter_layers=[1, 2]).train()
        if checkpointing:
            ours.gradient_checkpointing_enable()
        ours(**batch(17, 9)).loss.backward()
        found.append([parameter.grad for parameter in ours.model.encoder.parameters()])
    assert all(grad is not None and grad.abs().sum() > 0 for grad in found[0][1:] if grad is not None)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("encoder", "said"),
    [
        ({"name": "fourier", "ratio": 0.0}, r"ratio=0.0: must be above 0 and at most 1"),
        ({"name": "fourier", "ratio": 1.5}, r"ratio=1.5: must be above 0"),
        ({"name": "fourier", "filter_layers": [4]}, r"filter_layers=\[4\]: the last layer is 3"),
        ({"name": "fourier", "filter_layers": [2, 1]}, r"filter_layers=\[2, 1\]: must be layers in rising order"),
        ({"name": "fourier", "upsample": "cubic"}, r"upsample='cubic'"),
        ({"name": "fovea"}, r"encoder='fovea' runs on longt5, and this is bart"),
        ({"name": "furier"}, r"did you mean 'fourier'"),
    ],
)
def test_what_cannot_be_is_refused(encoder, said):
    with pytest.raises(ValueError, match=said):
        FathomBartConfig(encoder_layers=4, encoder=encoder)


def test_a_source_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="input_ids of 49 tokens: BART has max_position_embeddings=48"):
        model(name="fourier")(**batch(49))


def test_a_damaged_checkpoint_is_refused(tmp_path):
    ours = model(name="full")
    state = {name: value for name, value in ours.state_dict().items() if "layers.1.fc1.bias" not in name}
    ours.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"tensor 'model.*fc1.bias'.*is missing"):
        FathomBartForConditionalGeneration.from_pretrained(tmp_path)
