"""`FathomForSequenceClassification`: the sheet's section 3.2 in float64, padding, pooling, towers, files."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from scipy import fft
from transformers import AutoModelForSequenceClassification

from fathom import FathomConfig, FathomEncoderConfig, FathomForSequenceClassification
from tiny import SIZES, assert_close, perturb, tokens


def model(family="gpt2", seed=0, **fields):
    torch.manual_seed(seed)
    config = FathomEncoderConfig(backbone=family, **{**SIZES, "num_labels": 3, **fields})
    made = FathomForSequenceClassification(config)
    perturb(made, seed)
    return made.eval()


def spectral(x, kept):
    spectrum = fft.dct(x.detach().numpy(), norm="ortho", axis=0)[:kept]
    return torch.from_numpy(fft.idct(spectrum, norm="ortho", axis=0))


def by_sheet(ours, ids, places, ratio, residual, cls, count_cls):
    """One text through pre-norm blocks of GPT-2's form, written down from section 3.2."""
    decoder, config = ours.model, ours.config
    ids = torch.cat((torch.tensor([config.vocab_size - 1]), ids)) if cls else ids
    x = config.embed_scale * decoder.embed_tokens.weight[ids] + decoder.embed_positions.weight[: len(ids)]
    for index, block in enumerate(decoder.layers):
        read = block.input_layernorm(x)
        if index in places:
            first = int(cls)
            kept = math.ceil(Fraction(ratio) * (len(x) - (0 if count_cls else first)))
            kept = min(kept, len(x) - first)

            def shorter(y, first=first, kept=kept):
                return torch.cat((y[:first], spectral(y[first:], kept)))

            read, x = shorter(read), shorter(x)
            if residual == "filtered_norm":
                x = read
        attention = block.self_attn
        heads = config.num_attention_heads
        q, k, v = (getattr(attention, f"{n}_proj")(read).view(len(read), heads, -1).transpose(0, 1) for n in "qkv")
        mixed = (q @ k.mT / math.sqrt(config.head_dim)).softmax(-1) @ v
        x = x + attention.o_proj(mixed.transpose(0, 1).reshape(len(read), -1))
        inner = F.gelu(block.mlp.up_proj(block.post_attention_layernorm(x)), approximate="tanh")
        x = x + block.mlp.down_proj(inner)
    x = decoder.norm(x)
    u = x[0] if cls else x.mean(0)
    return ours.score(torch.relu(ours.dense(u)))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize(
    ("places", "options"),
    [
        ((), None), ((0,), {}), ((0, 1), {"ratio": 0.3, "residual": "filtered"}),
        ((1,), {"ratio": 0.9, "count_cls": True}),
    ],
    ids=["full", "default", "two", "count_cls"],
)  # fmt: skip
def test_it_is_the_sheets(pooling, places, options):
    encoder = {"name": "full"} if options is None else {"name": "fourier", "filter_layers": list(places), **options}
    ours = model(pooling=pooling, encoder=encoder).double()
    ids = tokens(1, 13)
    options = options or {}
    wanted = by_sheet(
        ours, ids[0], places, str(options.get("ratio", 0.5)), options.get("residual", "filtered_norm"),
        pooling == "cls", options.get("count_cls", False),
    )  # fmt: skip
    assert_close(ours(ids).logits[0], wanted.detach(), 1e-10)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("encoder", ["full", "fourier", "mean_pool", "strided", "truncation"])
def test_a_row_in_a_padded_batch_is_the_row_alone(family, encoder):
    ours = model(family, pooling="mean" if family == "llama" else "cls", encoder=encoder)
    ids, lengths = tokens(3, 14), (14, 9, 2)
    mask = torch.arange(14) < torch.tensor(lengths)[:, None]
    out = ours(ids, mask).logits
    for row, length in enumerate(lengths):
        assert_close(out[row], ours(ids[row : row + 1, :length]).logits[0])


@pytest.mark.parametrize("encoder", ["fourier", "mean_pool", "strided", "truncation"])
def test_ratio_one_is_full(encoder):
    full = model("llama")
    ours = model("llama", encoder={"name": encoder, "ratio": 1.0, "residual": "filtered"})
    assert_close(ours(tokens(2, 9)).logits, full(tokens(2, 9)).logits)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in full.parameters())


def test_every_token_sees_all():
    ours = model("llama")
    ids = tokens(1, 9)
    other = ids.clone()
    other[0, -1] += 1
    assert (ours(ids).logits - ours(other).logits).abs().max() > 1e-4


def test_two_towers_share_weights_and_the_head_reads_both():
    ours = model(towers=2, encoder="fourier")
    ids = torch.stack((tokens(2, 9), tokens(2, 9, seed=2)), dim=1)
    mask = torch.ones_like(ids)
    mask[0, 1, 5:] = 0
    u, v = (ours.encode(ids[:, i], mask[:, i]) for i in (0, 1))
    wanted = ours.score(torch.relu(ours.dense(torch.cat((u, v, u * v, u - v), -1))))
    out = ours(ids, mask, labels=torch.tensor([0, 2]))
    assert_close(out.logits, wanted)
    assert_close(out.loss, F.cross_entropy(wanted, torch.tensor([0, 2])))
    with pytest.raises(ValueError, match=r"input_ids of shape \[2, 9\] with towers=2: give \[batch, 2, tokens\]"):
        ours(ids[:, 0])


def test_saved_and_loaded_by_the_auto_class(tmp_path):
    ours = model("llama", pooling="mean", encoder={"name": "fourier", "filter_layers": [0, 1]})
    ours.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert type(again) is FathomForSequenceClassification and again.config.encoder == ours.config.encoder
    assert again.config.num_labels == 3
    assert torch.equal(again(tokens(2, 9)).logits, ours(tokens(2, 9)).logits)
    other = FathomForSequenceClassification.from_pretrained(tmp_path, encoder="full", pooling="cls").eval()
    assert (other.config.encoder["name"], other.config.pooling) == ("full", "cls")


def test_recomputed_layers_have_the_same_gradients():
    found = []
    for checkpointing in (False, True):
        ours = model("llama", encoder="fourier").train()
        if checkpointing:
            ours.gradient_checkpointing_enable()
        ours(tokens(2, 9), labels=torch.tensor([0, 2])).loss.backward()
        found.append({name: p.grad for name, p in ours.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"is_causal": True, "encoder": "fourier"}, "is_causal=True: an encoder's tokens see all others"),
        ({"pooling": "max"}, "pooling='max'"),
        ({"towers": 3}, "towers=3"),
        ({"depth": "loop"}, "depth='loop': an encoder runs its layers once"),
        ({"backbone": "gpt_neox"}, "parallel_residual=True"),
        ({"encoder": {"name": "fourier", "filter_layers": [2]}}, r"filter_layers=\[2\]: the last layer is 1"),
        ({"encoder": "fovea"}, "encoder='fovea' runs on longt5, and this is decoder"),
    ],
)
def test_what_cannot_be_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        FathomEncoderConfig(**{**SIZES, **fields})


def test_a_filter_in_a_causal_stack_is_refused():
    with pytest.raises(ValueError, match=r"encoder=.*a causal decoder has none.*FathomEncoderConfig"):
        FathomConfig(encoder={"name": "fourier"})


def test_a_text_longer_than_learned_positions_is_refused():
    with pytest.raises(ValueError, match=r"input_ids of 64 tokens and a CLS token: .*max_position_embeddings=64"):
        model()(tokens(1, 64))
