"""Pause tokens against an oracle on the layers themselves: pauses interleaved by hand, positions repeated by hand."""

from __future__ import annotations

import pytest
import torch

from fathom import FathomConfig, FathomForCausalLM
from tiny import assert_close, tiny_model, tokens

FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2")


def paused_logits(model, ids, rows):
    """Slot by slot into a plain list, then one masked pass through the model's own layers."""
    decoder, scale = model.model, model.config.embed_scale
    slots, positions = [], []
    for t in range(ids.shape[1]):
        slots += [scale * decoder.embed_tokens.weight[ids[:, t]]]
        slots += [(scale * row).expand_as(slots[-1]) for row in rows]
        positions += [t] * (len(rows) + 1)
    x, positions = torch.stack(slots, dim=1), torch.tensor([positions])
    mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)[None, None]
    rotary = decoder.rotary_emb(x, positions) if decoder.rotary_emb else None
    if rotary is None:
        x = x + decoder.embed_positions(positions)
    for layer in decoder.layers:
        x = layer(x, decoder.residual, position_embeddings=rotary, attention_mask=mask)[0]
    return model.lm_head(decoder.norm(x)[:, len(rows) :: len(rows) + 1])


@pytest.mark.parametrize("options", [{"pauses": 1}, {"pauses": 3}, {"pauses": 3, "shared": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_pause_equals_the_equations(family, options):
    model = tiny_model(family, depth={"name": "pause", **options})
    rows = list(model.depth.embedding) * (options["pauses"] if options.get("shared") else 1)
    ids = tokens(2, 7)
    assert_close(model(ids).logits, paused_logits(model, ids, rows))


@torch.no_grad()
def test_a_pause_is_scaled_like_a_vocabulary_row():
    """With every pause row equal to a token's row, pausing is reading that token at a repeated position."""
    model = tiny_model("gpt2", embed_scale=3.0, depth={"name": "pause", "pauses": 1})
    model.depth.embedding.copy_(model.model.embed_tokens.weight[7:8])
    ids = tokens(1, 5)
    doubled = torch.stack((ids, torch.full_like(ids, 7)), dim=2).flatten(1)
    vanilla = tiny_model("gpt2", embed_scale=3.0)
    vanilla.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("depth.")})
    positions = torch.arange(5).repeat_interleave(2)[None]
    mask = torch.full((10, 10), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = vanilla(doubled, position_ids=positions, attention_mask=mask).logits[:, 1::2]
    assert_close(model(ids).logits, expected)


@torch.no_grad()
def test_pause_rows_follow_the_rule_of_the_input_table():
    for rule, std in (("scaled", (2 / (5 * 256)) ** 0.5), ("hf", 0.02)):
        config = FathomConfig(hidden_size=256, num_hidden_layers=1, init=rule, depth={"name": "pause", "pauses": 8})
        measured = FathomForCausalLM(config).depth.embedding.std().item()
        assert abs(measured / std - 1) < 0.08


def test_negative_pauses_are_refused():
    with pytest.raises(ValueError, match="pause option pauses=-1: must be an integer of at least 0"):
        FathomConfig(depth={"name": "pause", "pauses": -1})
