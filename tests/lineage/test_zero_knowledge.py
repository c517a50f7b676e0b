"""Tier 2 against numpy, an auditor's own digests, and forgeries."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest

from fathom.lineage import zero_knowledge
from fathom.lineage.commitment import CommitmentError

needs_ezkl = pytest.mark.skipif(
    not (find_spec("ezkl") and find_spec("onnx")), reason="ezkl and onnx are not installed: pip install 'fathom-lm[zk]'"
)


def test_sketch_depends_on_model_and_seed_only(weights):
    model = weights("llama").checkpoint()
    first, again = (zero_knowledge.sketch(model, 1, 4, 8) for _ in range(2))
    assert [m.shape for m in first.values()] == [(4, 8), (8, 8), (8, 8)]
    for name, matrix in first.items():
        assert np.array_equal(matrix, again[name])
        assert np.isclose((matrix**2).mean(), 1 / 8)
        assert not np.allclose(matrix, zero_knowledge.sketch(model, 2, 4, 8)[name])


def test_sketch_of_heads_equals_the_loop(weights):
    """Q̃ᵀK̃ sees the sum over query heads of W_qᵀW_k with the key head of each: the row space that M_a has."""
    import torch

    from fathom.lineage import canonical

    model = weights("llama").checkpoint()
    q, k = canonical.query_key(model, 3)
    generator = torch.Generator().manual_seed(5)
    tokens = zero_knowledge.select_tokens(model, None, zero_knowledge.DEFAULT)[0]
    torch.randn(4, len(tokens), generator=generator, dtype=torch.float64)
    s = torch.randn(q.shape[-1], 8, generator=generator, dtype=torch.float64)
    t = torch.randn(8, len(q), generator=generator, dtype=torch.float64)
    want = torch.zeros(8, 8, dtype=torch.float64)
    for row in range(len(k)):
        want += torch.outer(t[:, row], k[row].double() @ s)
    got = torch.from_numpy(zero_knowledge.sketch(model, 5, 4, 8)["k"])
    assert torch.allclose(got / got.norm(), want / want.norm(), atol=1e-6)


def test_without_ezkl_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ezkl", None)
    with pytest.raises(ImportError, match=r"fathom-lm\[zk\]"):
        zero_knowledge.digest(np.zeros((2, 2)))


@needs_ezkl
def test_proof_end_to_end(weights, tmp_path):
    model = weights("llama").checkpoint()
    matrices = zero_knowledge.sketch(model, 1, 4, 8)
    zero_knowledge.setup(tmp_path / "verifier", 4, 8)
    proof = zero_knowledge.prove(tmp_path / "verifier", matrices)
    found = zero_knowledge.verify(tmp_path / "verifier", proof)
    x, q, k = matrices.values()
    assert np.allclose(found.row_sums, x @ q.T @ k @ x.T @ np.ones(4), atol=8 * 2**-10)
    # The auditor's link: digests recomputed from the weights, and those of another model's sketch.
    assert found.digests == {name: zero_knowledge.digest(matrix) for name, matrix in matrices.items()}
    stranger = zero_knowledge.sketch(weights("llama", 1).checkpoint(), 1, 4, 8)
    assert all(zero_knowledge.digest(stranger[name]) != found.digests[name] for name in matrices)
    for position in (0, 3):  # another digest, another row sum
        forged = copy.deepcopy(proof)
        forged["instances"][0][position] = forged["instances"][0][4]
        with pytest.raises(CommitmentError, match="does not hold"):
            zero_knowledge.verify(tmp_path / "verifier", forged)
