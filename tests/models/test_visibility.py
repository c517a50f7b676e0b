"""Who sees whom: every visibility against a dense mask, and against transformers' own bidirectional class."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token
from fathom.ops.visibility import BIDIRECTIONAL, CAUSAL, Blocks, Prefix
from tiny import SIZES, assert_close, tiny_model, tokens

KINDS = [CAUSAL, BIDIRECTIONAL, Blocks(1), Blocks(3), Blocks(40), Prefix(0), Prefix(4), Prefix(40)]
by_kind = pytest.mark.parametrize("visibility", KINDS, ids=str)


def written_out(visibility, length: int) -> torch.Tensor:
    """[query, key], pair by pair, from the definitions."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for q, k in itertools.product(range(length), repeat=2):
        match visibility:
            case Blocks(size=size):
                seen[q, k] = k // size <= q // size
            case Prefix(length=first):
                seen[q, k] = k <= q or k < first
            case _:
                seen[q, k] = visibility is BIDIRECTIONAL or k <= q
    return seen


def reads(model: FathomForCausalLM, ids: torch.Tensor, **given) -> torch.Tensor:
    """[row, query, key]: whether the output of `query` moves with the embedding of `key`, by gradients."""
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    hidden = model(inputs_embeds=embeddings, use_cache=False, **given).logits.square().sum(-1)
    moves = []
    for query in range(ids.shape[1]):
        (gradient,) = torch.autograd.grad(hidden[:, query].sum(), embeddings, retain_graph=True)
        moves.append(gradient.abs().amax(-1) > 0)
    return torch.stack(moves, dim=1)


@by_kind
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_who_moves_whose_output(visibility, attention):
    model, length = tiny_model(num_hidden_layers=1).double(), 10
    model.set_attn_implementation(attention)
    seen = reads(model, tokens(2, length), visibility=visibility)
    assert torch.equal(seen, written_out(visibility, length).expand(2, -1, -1))


@pytest.mark.parametrize("visibility", [Blocks(3), Prefix(4)], ids=str)  # of the others the masks are transformers'
def test_flex_attention_sees_the_same(visibility):
    model, ids = tiny_model().eval(), tokens(2, 10)
    with torch.no_grad():
        expected = model(ids, visibility=visibility).logits
        model.set_attn_implementation("flex_attention")
        assert_close(model(ids, visibility=visibility).logits, expected)


@by_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_the_row_alone(visibility, side):
    model, ids = tiny_model(), tokens(2, 10)
    alone, mask = ids[1:, :7].clone(), torch.ones(2, 10, dtype=torch.long)
    part = slice(3, None) if side == "left" else slice(None, 7)
    ids[1, part], mask[1] = alone[0], 0
    mask[1, part] = 1
    with torch.no_grad():
        out = model(ids, attention_mask=mask, visibility=visibility, use_cache=False).logits
        assert_close(out[1:, part], model(alone, visibility=visibility, use_cache=False).logits)
        assert_close(out[:1], model(ids[:1], visibility=visibility, use_cache=False).logits)


@by_kind
def test_packed_documents_are_documents_alone(visibility):
    model, ids = tiny_model(), tokens(1, 10)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, visibility=visibility, use_cache=False).logits
        for part in (slice(0, 4), slice(4, 10)):
            alone = model(ids[:, part], visibility=visibility, use_cache=False).logits
            assert_close(packed[:, part], alone)


@pytest.mark.parametrize("visibility", [CAUSAL, Blocks(3), Prefix(4)], ids=str)
def test_a_cache_of_whole_blocks_and_prefixes_is_exact(visibility):
    model, ids = tiny_model(), tokens(2, 11)
    cache, pieces = DynamicCache(), []
    with torch.no_grad():
        expected = model(ids, visibility=visibility, use_cache=False).logits
        for chunk in ids.split([6, 3, 2], dim=1):
            pieces.append(model(chunk, past_key_values=cache, visibility=visibility).logits)
    assert_close(torch.cat(pieces, dim=1), expected)


def test_a_bidirectional_config_is_transformers_own(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": 2}, is_causal=False)
    stock = LlamaForCausalLM(config).eval()
    stock.save_pretrained(tmp_path / "stock")
    ours = FathomForCausalLM.from_pretrained(tmp_path / "stock").eval()
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    assert not ours.config.is_causal
    with torch.no_grad():
        given = {"attention_mask": mask, "use_cache": False}
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = stock(ids, position_ids=positions, **given).logits
        assert_close(ours(ids, **given).logits[mask.bool()], expected[mask.bool()])
    ours.save_stock_pretrained(tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert back.config.is_causal is False
    assert_close(back(ids).logits, stock(ids).logits)


@pytest.mark.parametrize("depth", ["loop", "pondering"])
def test_passes_run_bidirectionally(depth):
    model = tiny_model(depth=depth, is_causal=False, num_hidden_layers=1).double()
    assert reads(model, tokens(1, 6)).all()


@pytest.mark.parametrize("depth", ["pause", "ponderlm2", "ponderlm3", "adaptive_latent_cot", "adaponderlm"])
def test_causal_slots_and_steps_are_refused(depth):
    with pytest.raises(ValueError, match=f"is_causal=False.*depth={depth!r}"):
        FathomConfig(depth=depth, is_causal=False)
    with pytest.raises(ValueError, match=f"visibility=.*depth={depth!r}"):
        tiny_model(depth=depth)(tokens(1, 4), visibility=BIDIRECTIONAL)


def test_what_is_not_written_left_to_right_is_not_generated():
    with pytest.raises(ValueError, match="is_causal=False"):
        tiny_model(is_causal=False).generate(tokens(1, 4), max_new_tokens=2)


def test_flash_attention_has_no_blocks():
    model = tiny_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2 .*Blocks\(size=3\).*sdpa"):
        model(tokens(1, 4), visibility=Blocks(3))


@by_kind
@pytest.mark.parametrize("length", [1, 7, 12])
def test_mean_keys(visibility, length):
    assert visibility.mean_keys(length) == pytest.approx(written_out(visibility, length).sum().item() / length)


def test_cost_counts_what_is_seen():
    causal, full = (FathomConfig(**SIZES, is_causal=is_causal) for is_causal in (True, False))
    assert forward_flops_per_token(full, 9) == forward_flops_per_token(causal, 9, causal=False)
