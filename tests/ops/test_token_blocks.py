"""Block masks by token number: equal to the rule written out, skipping what no query of a block sees."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from fathom.ops.token_blocks import BLOCK, NOWHERE, ranges_of_some, readers_of, sees, token_block_mask
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


@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(
            True, marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
        ),
    ],
)
def test_ranges_and_blocks_of_some_tokens(compiled):
    """For rows of which some, one or none of the tokens run, with entries behind them: compiled, one graph for all
    numbers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    function = torch.compile(ranges_of_some, dynamic=True) if compiled else ranges_of_some
    generator = torch.Generator().manual_seed(0)
    for rows, length, counts, behind in (
        (5, 90, [37, 1, 64, 0, 90], 26), (4, 50, [0, 50, 0, 3], 11), (2, 80, [0, 0], 7), (2, 20, [20, 20], 0)
    ):  # fmt: skip
        bounds = torch.randint(0, 4, (2, 3, rows * length), generator=generator).cumsum(2).int()
        bounds[1] += bounds[0]
        chosen = [torch.randperm(length, generator=generator)[:n].sort().values + row * length
                  for row, n in enumerate(counts)]  # fmt: skip
        total, index = sum(counts), torch.cat([*chosen, torch.randint(0, rows * length, (behind,))])
        start, stop, blocks = function(bounds, index, torch.tensor(counts), 4, True)
        readers = readers_of(start, stop, 900)
        assert torch.equal(start[:, :total], bounds[0][:, index[:total]]) and (start[:, total:] == NOWHERE).all()
        assert torch.equal(stop[:, :total], bounds[1][:, index[:total]])
        assert (stop.diff(dim=1) >= 0).all() and (total == 0 or (stop[:, total:] == stop[:, total - 1 :][:, :1]).all())
        for number, ends in enumerate((stop, stop, start, start)):
            key = torch.arange(0, 900, 32) + 31 * (number % 2)
            first = [[int((row <= k).sum()) for k in key] for row in ends]
            assert readers[number].tolist() == first
        found, row = [], torch.cat([torch.full((n,), r) for r, n in enumerate([*counts, behind])])
        for first, count in blocks.T.tolist():
            assert 0 <= count <= 16 and (count == 0 or len(row[first : first + count].unique()) == 1)
            found += range(first, first + count)
        assert sorted(found) == list(range(total + behind))
        work = [int((stop[:, f + n - 1] - start[:, f]).clamp(min=0).sum()) if n else -1 for f, n in blocks.T.tolist()]
        assert work == sorted(work, reverse=True)
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
