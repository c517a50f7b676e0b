r"""Tier 2: a zero-knowledge proof about a sketch of a model, with EZKL. Needs `pip install 'fathom-lm[zk]'`.

A whole weight matrix is out of reach of today's proof systems, so the statement is about a sketch: the factors of
HuRef's M_a (arXiv 2312.04828; see `huref`) in the last live layer, each projected by public Gaussian matrices drawn
from a seed,

    X̃ = P·X·S [k, s],   Q̃ = T·W_q·S [s, s],   K̃ = T·W_k·S [s, s]          entries scaled to mean square 1/s
    r = X̃·Q̃ᵀ·K̃·X̃ᵀ·1 [k]                                                  row sums of the sketched term

    Proves: whoever made the proof knows X̃, Q̃, K̃ with the published Poseidon digests, and r is what the formula gives
    for them, in fixed point with 10 fractional bits. Nothing else about the three is shown.
    Does not prove: that the digests belong to the weights under a tier-0 root. That link is audited, not proved: with
    the model or a tier-1 opening in hand an auditor recomputes the sketch and compares `digest` (the projections are
    public, so this is exact). Nor that anyone trained or serves the model. The digests are not salted: they hide a
    sketch only as far as nobody can guess it.

Who makes the keys could forge proofs, so the verifier makes them (`setup`) and keeps the reference string; a proof
convinces that verifier and nobody else. Everything runs offline. EZKL: https://github.com/zkonduit/ezkl
"""

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fathom.lineage import canonical
from fathom.lineage.commitment import CommitmentError
from fathom.lineage.huref import DEFAULT, last_layers, select_tokens
from fathom.lineage.reader import Checkpoint

_BITS = 10  # fractional bits of the fixed-point numbers
_NAMES = ("x", "q", "k")


@dataclass(frozen=True)
class Proven:
    """What a verified proof says: Poseidon digests of X̃, Q̃, K̃ (hexadecimal field elements) and r [k]."""

    digests: dict[str, str]
    row_sums: np.ndarray


def _packages() -> tuple[Any, Any]:
    try:
        import ezkl
        import onnx
    except ImportError as error:
        raise ImportError("zero-knowledge proofs need ezkl and onnx; pip install 'fathom-lm[zk]'") from error
    return ezkl, onnx


def sketch(model: Checkpoint, seed: int, rows: int = 8, width: int = 16) -> dict[str, np.ndarray]:
    """X̃ [rows, width], Q̃ and K̃ [width, width] of a model, float64.

    seed: of the public projections; use the nonce of the tier-0 statement, so that the model is fixed before it.
    """
    index, _, _ = select_tokens(model, None, DEFAULT)
    x = canonical.embedding(model, None)[torch.tensor(index, device=model.device)]
    q, k = canonical.query_key(model, last_layers(model)[-1])
    generator = torch.Generator().manual_seed(seed)

    def project(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> np.ndarray:
        small = left @ matrix.double().cpu() @ right
        return (small / (small.square().mean().sqrt() * math.sqrt(width))).numpy()

    def gaussian(n: int, m: int) -> torch.Tensor:
        return torch.randn(n, m, generator=generator, dtype=torch.float64)

    p, s, t = gaussian(rows, len(x)), gaussian(x.shape[1], width), gaussian(width, len(q))
    return {"x": project(x, p, s), "q": project(q, t, s), "k": project(k, t, s)}


def digest(matrix: np.ndarray) -> str:
    """The Poseidon hash of a matrix in fixed point, as it appears in a proof."""
    ezkl, _ = _packages()
    return ezkl.poseidon_hash([ezkl.float_to_felt(float(value), _BITS) for value in matrix.ravel()])[0]


def setup(folder: str | Path, rows: int = 8, width: int = 16) -> None:
    """The verifier's part: circuit, settings, reference string and keys for sketches of this size, in a new folder.

    The prover needs the folder; the verifier keeps a copy and trusts only that. Needs about 0.5 GB of disk and 1.1 GB
    of memory for 8 rows and width 16 (2^15 circuit rows), four times that for width 32.
    """
    ezkl, onnx = _packages()
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: exists and is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_graph(onnx, rows, width), folder / "circuit.onnx")
    arguments = ezkl.PyRunArgs()
    arguments.input_visibility, arguments.output_visibility = "hashed", "public"
    arguments.input_scale = arguments.param_scale = _BITS
    place = {name: str(folder / name) for name in ("circuit.onnx", "settings.json", "circuit", "srs", "vk", "pk")}
    ezkl.gen_settings(place["circuit.onnx"], place["settings.json"], py_run_args=arguments)
    used = json.loads((folder / "settings.json").read_text())["num_rows"]
    # 2^14 range-check rows and the blinding rows must fit beside nothing smaller than 2^15
    arguments.logrows = max(15, math.ceil(math.log2(used + 64)))
    ezkl.gen_settings(place["circuit.onnx"], place["settings.json"], py_run_args=arguments)
    ezkl.compile_circuit(place["circuit.onnx"], place["circuit"], place["settings.json"])
    ezkl.gen_srs(place["srs"], arguments.logrows)
    ezkl.setup(place["circuit"], place["vk"], place["pk"], place["srs"])


def _graph(onnx: Any, rows: int, width: int) -> Any:
    """r = X̃(Q̃ᵀ(K̃(X̃ᵀ1))) as an ONNX graph without weights: all three matrices are inputs."""
    node, helper, kind = onnx.helper.make_node, onnx.helper, onnx.TensorProto

    def value(name: str, *shape: int) -> Any:
        return helper.make_tensor_value_info(name, kind.FLOAT, [1, *shape])

    nodes = [
        node("Transpose", ["x"], ["x_t"], perm=[0, 2, 1]),
        node("ReduceSum", ["x_t", "last"], ["sum"], keepdims=1),
        node("MatMul", ["k", "sum"], ["k_sum"]),
        node("Transpose", ["q"], ["q_t"], perm=[0, 2, 1]),
        node("MatMul", ["q_t", "k_sum"], ["qk_sum"]),
        node("MatMul", ["x", "qk_sum"], ["r"]),
    ]
    inputs = [value("x", rows, width), value("q", width, width), value("k", width, width)]
    last = helper.make_tensor("last", kind.INT64, [1], [2])
    graph = helper.make_graph(nodes, "row_sums", inputs, [value("r", rows, 1)], [last])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def prove(folder: str | Path, matrices: dict[str, np.ndarray]) -> dict[str, Any]:
    """The prover's part: a proof for one sketch, JSON-ready. folder: what `setup` wrote."""
    ezkl, _ = _packages()
    folder = Path(folder)
    with tempfile.TemporaryDirectory(prefix="fathom-proof-") as name:
        work = Path(name)
        (work / "input").write_text(json.dumps({"input_data": [matrices[n].ravel().tolist() for n in _NAMES]}))
        ezkl.gen_witness(str(work / "input"), str(folder / "circuit"), str(work / "witness"))
        files = [work / "witness", folder / "circuit", folder / "pk", work / "proof", folder / "srs"]
        ezkl.prove(*map(str, files))
        return json.loads((work / "proof").read_text())


def verify(folder: str | Path, proof: dict[str, Any]) -> Proven:
    """The verifier's part: what the proof establishes. folder: the verifier's own copy of what `setup` wrote.

    Raises CommitmentError when the proof does not hold.
    """
    ezkl, _ = _packages()
    folder = Path(folder)
    with tempfile.TemporaryDirectory(prefix="fathom-proof-") as name:
        (Path(name) / "proof").write_text(json.dumps(proof))
        files = [Path(name) / "proof", folder / "settings.json", folder / "vk", folder / "srs"]
        try:
            holds = ezkl.verify(*map(str, files))
        except RuntimeError as error:
            raise CommitmentError(f"proof: it does not hold for this circuit ({str(error).splitlines()[0]})") from error
    if not holds:
        raise CommitmentError("proof: it does not hold for this circuit")
    # Only the instances are covered by the proof; the readable copies beside them are not.
    public = proof["instances"][0]
    values = [ezkl.felt_to_float(value, _BITS) for value in public[len(_NAMES) :]]
    return Proven(dict(zip(_NAMES, public)), np.array(values))
