"""Rows packed tightly: nothing is lost, and little is padding."""

from __future__ import annotations

import numpy as np
import pytest

from fathom.data.packing import IGNORED, Example, best_fit, pack_examples


@pytest.mark.parametrize(("size", "mean"), [(128, 3.9), (512, 5.5), (2048, 5.5)])
def test_tight_rows_waste_little(size, mean):
    draws = np.random.default_rng(0)
    lengths = np.clip(draws.lognormal(mean, 0.5, 9000).astype(int), 2, size)
    examples = [
        Example(np.full(n, i % 1000 + 1, np.int32), np.full(n, i % 1000 + 1, np.int32)) for i, n in enumerate(lengths)
    ]
    blocks = list(pack_examples(examples, size, 0, together=True, tight=True))
    ids, labels, positions = (np.concatenate([b[k] for b in blocks]) for k in ("input_ids", "labels", "position_ids"))
    assert 1 - lengths.sum() / ids.size <= 0.03
    assert (labels != IGNORED).sum() == lengths.sum() and (ids[labels != IGNORED] > 0).all()
    assert np.array_equal(
        np.bincount(ids[ids > 0]), np.bincount([i % 1000 + 1 for i in range(9000)], lengths).astype(int)
    )
    starts = (positions == 0).sum()
    assert starts == 9000 + (ids[:, -1] == 0).sum()  # a document a row, and one a block's padding


def test_best_fit_is_that_of_the_definition():
    lengths = np.random.default_rng(1).integers(1, 20, 60).tolist()
    blocks: list[list[int]] = []
    for index in sorted(range(60), key=lambda i: -lengths[i]):  # every block looked at
        room = [(20 - sum(lengths[i] for i in block), at) for at, block in enumerate(blocks)]
        room = [(left, at) for left, at in room if left >= lengths[index]]
        if room:
            blocks[min(room)[1]].append(index)
        else:
            blocks.append([index])
    assert best_fit(lengths, 20) == blocks
