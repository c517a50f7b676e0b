"""Block masks by token number: equal to the rule written out, skipping what no query of a block sees."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from fathom.ops.token_blocks import BLOCK, sees, token_block_mask
from tiny import assert_close


def slots(lengths: list[int], limit: int, dead: int = 0) -> torch.Tensor:
    """One row of token numbers, a sorted run for each length, the last run ending in slots nobody may see."""
    generator = torch.Generator().manual_seed(sum(lengths))
    runs = [torch.randperm(limit, generator=generator)[:n].sort().values for n in lengths]
    numbers = torch.cat(runs)
    if dead:
        numbers[-dead:] = 2**30
    return numbers.to(torch.int32)[None]


CASES = {
    "square": (slots([300], 300), slots([300], 300)),
    "steps": (slots([150], 300), slots([300, 220, 150], 300)),
    "dead": (slots([200], 300), slots([300, 200], 300, dead=31)),
    "one block": (slots([5], 9), slots([9, 7, 5], 9)),
    "rows": (torch.cat((slots([256], 400), slots([256], 300))), torch.cat((slots([384], 400), slots([384], 390)))),
    "laid flat": (
        torch.cat((slots([90], 200), 256 + slots([70], 256), 512 + slots([96], 200)), dim=1),
        torch.cat((torch.arange(768).to(torch.int32)[None], 256 + slots([70], 256, dead=6)), dim=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_blocks_hold_the_rule(case, documents):
    query, key = CASES[case]
    first = (query // 100 * 100).to(torch.int32) if documents else None
    if case == "laid flat" and documents:
        first = query // 256 * 256
    mask = token_block_mask(query, key, first)
    expected = sees(query, key, first)
    assert expected.any() and not expected.all()
    rule = create_mask(mask.mask_mod, len(query), 1, query.shape[1], key.shape[1], device="cpu")[:, 0]
    assert torch.equal(rule, expected)

    dense = mask.to_dense()[:, 0].bool()  # blocks that are computed at all
    full = torch.zeros_like(dense)
    for row in range(full.shape[0]):
        for block in range(full.shape[1]):
            count = mask.full_kv_num_blocks[row, 0, block]
            full[row, block, mask.full_kv_indices[row, 0, block, :count]] = True
    for row in range(full.shape[0]):
        for i in range(full.shape[1]):
            for j in range(full.shape[2]):
                part = expected[row, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                assert dense[row, i, j] == part.any() or not part.any()  # nothing that is seen is skipped
                if full[row, i, j]:
                    assert part.all() and part.shape[1] == BLOCK
    by_rows = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    whole = BlockMask.from_kv_blocks(*by_rows, BLOCK_SIZE=BLOCK, seq_lengths=mask.seq_lengths)
    assert torch.equal(mask.q_num_blocks, whole.q_num_blocks) and torch.equal(mask.q_indices, whole.q_indices)
    assert torch.equal(mask.full_q_num_blocks, whole.full_q_num_blocks)
    assert torch.equal(mask.full_q_indices, whole.full_q_indices)
    lists = (*by_rows, mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lists)  # kernels go by it
    with torch.no_grad():
        assert token_block_mask(query, key, first).q_indices is None  # of no use without a backward pass
    if case == "square" and not documents:
        assert dense[0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        assert full[0].tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("case", ["steps", "dead", "rows"])
def test_flex_attention_equals_a_dense_mask(case):
    query_tokens, key_tokens = CASES[case]
    rows = len(query_tokens)
    query = torch.randn(rows, 4, query_tokens.shape[1], 16)
    key, value = torch.randn(2, rows, 2, key_tokens.shape[1], 16)
    actual = flex_attention(query, key, value, block_mask=token_block_mask(query_tokens, key_tokens), enable_gqa=True)
    visible = sees(query_tokens, key_tokens)[:, None]
    groups = (key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *groups, attn_mask=visible)
    some = visible.any(-1).expand(-1, 4, -1)  # a query before every key sees none
    assert_close(actual[some], expected[some])
