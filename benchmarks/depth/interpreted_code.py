"""What PyTorch's compiler generates for an H200, run in Triton's interpreter on a CPU, against the plain functions.

    TRITON_INTERPRET=1 python benchmarks/depth/interpreted_code.py

Tests on a CPU run other generated code, and do not see its faults for GPUs: with PyTorch 2.11 a search in a part of
a larger tensor begins at the whole's first number (pytorch issue 182343). Says of every function whether the results
are equal, and ends with 1 if one is not; the last, which is that fault, does not count. Needs the package `triton` (no
GPU). Reaches into torch's internals, as `kernel_bytes.py` does: written for torch 2.11 and 2.13.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import kernel_bytes

from fathom.models.steps.stack import by_token, lay_by_token, replace_flat
from fathom.models.steps.tokens import ahead, going_on
from fathom.ops.cross_entropy import gradients_of_chunk
from fathom.ops.token_blocks import ranges_of_some
from fathom.ops.vocabulary_mixture import mixture_of_chunk

KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)", re.S | re.M)
BLOCKS = {"XBLOCK": 16, "YBLOCK": 2, "R0_BLOCK": 64}  # any: what a kernel computes must not depend on them


def searched_part(ends: Tensor, order: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The fault named above: to see whether this script sees it, and whether this PyTorch still has it."""
    both = ends.index_select(1, order)
    return both, torch.searchsorted(both[1], keys)


def two_steps(key: Tensor, value: Tensor, some: tuple[Tensor, Tensor], index: Tensor, live: Tensor) -> Any:
    """The first step's keys and values, those of a second for some tokens in their places, and what made way."""
    first = lay_by_token(key, value, None)[2]
    return replace_flat(*some, (*first, index, live))[2], by_token(key), by_token(value)


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], bool, float]]:
    """Name, function, arguments, whether compiled for any sizes, and how far results may be apart, over the largest."""
    draw = torch.Generator().manual_seed(0)
    rows, length, entries = 5, 90, 200
    on, real = (torch.rand(rows, length, generator=draw) < share for share in (0.4, 0.9))
    index, live = torch.randperm(rows * length, generator=draw)[:entries], torch.arange(entries) < 190
    yield "going_on, all tokens", going_on, (on, None, real, rows, length), True, 0
    yield "going_on", going_on, (torch.rand(1, entries, generator=draw) < 0.5, index, live, rows, length), True, 0
    for share in (0.0, 0.5, 1.0):
        yield f"ahead, {share} go on", ahead, (torch.rand(entries, generator=draw) < share, index, 130), True, 0
    bounds = torch.randint(0, 4, (2, 4, rows * length), generator=draw).cumsum(2).int()
    bounds[1] += bounds[0]
    by_row = torch.tensor([40, 1, 0, 90, 50])
    for segments in (1, 4):
        given = (bounds[:, :segments], index.sort().values, by_row, 4, True)
        yield f"ranges_of_some, segments: {segments}", ranges_of_some, given, True, 0
    key, value = (torch.randn(rows, length, 2, 16, generator=draw).transpose(1, 2) for _ in range(2))
    some = tuple(torch.randn(1, entries, 2, 16, generator=draw).transpose(1, 2) for _ in range(2))
    yield "lay_by_token, replace_flat", two_steps, (key, value, some, index, live), True, 0
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        hidden, weight = (torch.randn(n, 16, generator=draw).to(dtype) for n in (40, 3001))
        targets = torch.randint(0, 3001, (40,), generator=draw)
        targets[3] = -100
        yield f"gradients_of_chunk, {dtype}", gradients_of_chunk, (hidden, weight, targets, True), False, limit
        given = (hidden, weight, weight, None, 1.0, True)
        yield f"mixture_of_chunk, {dtype}", mixture_of_chunk, given, False, limit
    ends, keys = torch.arange(40).view(2, 20), torch.arange(0, 40, 3)
    yield "searched_part", searched_part, (ends, torch.arange(20), keys), False, 0


class Kernel:
    """A generated kernel, interpreted; called as the generated code calls it."""

    def __init__(self, name: str, source: str):
        source = re.sub(r"@triton_heuristics\.\w+\(.*?\n\)\n(?=@triton\.jit)", "", source, flags=re.S)
        source = source.replace("triton_helpers.set_driver_to_gpu()", "").replace("libdevice.exp(", "tl.exp(")
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:  # Triton reads it again
            file.write(source)
        spec: Any = importlib.util.spec_from_file_location(name, file.name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        os.unlink(file.name)
        self.function = getattr(module, name)
        parameters = source[source.index(f"def {name}(") :].split("(", 1)[1].split("):", 1)[0].split(",")
        constants = [p.split(" : ")[0].strip() for p in parameters if " : " in p]
        self.blocks = {constant: BLOCKS[constant] for constant in constants}
        self.names = [p.strip() for p in parameters if " : " not in p]

    def run(self, *given: Any, stream: Any) -> None:
        named = dict(zip(self.names, given, strict=True))
        grid = [-(-named.get(f"{axis}numel", 1) // self.blocks.get(f"{axis.upper()}BLOCK", 1)) for axis in "xy"]
        self.function[(*grid, 1)](*given, **self.blocks)


def interpreted(code: str) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What calls the kernels, on tensors of the CPU."""
    body = code[code.index("    def call(self, args):") : code.index("runner = Runner")]
    for old, new in (
        ("empty_strided_cuda", "empty"), ("with torch.cuda._DeviceGuard(0):", "if True:"),
        ("torch.cuda.set_device(0)", "pass"),
    ):  # fmt: skip
        body = body.replace(old, new)
    names: dict[str, Any] = {
        "torch": torch, "aten": torch.ops.aten, "extern_kernels": torch, "get_raw_stream": lambda device: None,
        "assert_size_stride": lambda *given: None, "assert_alignment": lambda *given: None,
        "copy_if_misaligned": lambda x: x,
        "empty": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        "reinterpret_tensor": lambda x, size, stride, offset=0: x.as_strided(size, stride, offset),
        **{name: Kernel(name, source) for name, source in KERNEL.findall(code)},
    }  # fmt: skip
    exec("class Called:\n" + body, names)  # the code that this script has just had generated
    return names["Called"]().call


def on_h200(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """A compiler for `aot_autograd`: generates for an H200, and gives what runs that here."""
    real = dict(vars(torch.cuda))
    kernel_bytes.pretend_an_h200()
    try:
        code = kernel_bytes.generate(graph, inputs, False, torch._guards.detect_fake_mode(inputs))
    finally:
        vars(torch.cuda).update(real)
    call = interpreted(code)

    def run(given: list[Any]) -> Any:
        return call(list(given))

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def far(one: Any, other: Any) -> float:
    """The largest difference, over the largest number."""
    if isinstance(one, tuple):
        return max((far(a, b) for a, b in zip(one, other, strict=True) if b is not None), default=0.0)
    one, other = one.detach().double(), other.detach().double()
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item() if other.numel() else 0.0


def main() -> None:
    import torch._inductor.runtime.triton_helpers as helpers
    import torch._subclasses.fake_tensor as fake_tensor
    import triton.language as tl
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1: there is no other way to run these kernels on a CPU")
    warnings.filterwarnings("ignore", module="triton")  # −inf − −inf, before it is masked
    fake_tensor.init_gpu_context = lambda *given: None  # type: ignore[assignment]
    helpers.libdevice = types.SimpleNamespace(exp=lambda x: tl.exp(x))  # no device, no library of its
    backend = aot_autograd(fw_compiler=on_h200, inference_compiler=on_h200, decompositions=select_decomp_table())
    different = 0
    for name, function, given, dynamic, limit in cases():
        with torch.no_grad():
            wanted = function(*given)
            found = torch.compile(function, backend=backend, dynamic=dynamic)(*given)
        difference = far(found, wanted)
        different += difference > limit and function is not searched_part
        print(f"{name:40} {'equal' if difference <= limit else 'DIFFERENT'}  {difference:.1e}", flush=True)
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
