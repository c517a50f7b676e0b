"""What a compiled training step moves through memory, kernel by kernel, for an H200 that need not be there.

    python benchmarks/depth/kernel_bytes.py OUT.json --shape 1024x24-gqa --contestants vanilla depth_attention

PyTorch traces the step on a CPU, without data; its compiler then generates the Triton kernels for the GPU, which are
read and not run. A kernel's bytes are the tensors that it reads and writes, once each. Matrix products and attention,
which are kernels of libraries, are left out. Needs the package `triton` (no GPU). Models have `--layers` layers of the
shape: differences between contestants, not absolute times, are what this is for. Reaches into torch's internals:
written for torch 2.13.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import types
from math import prod
from pathlib import Path
from typing import Any

import torch
from depth_methods import CONTESTANTS, SHAPES
from speed import environment, make_fathom

from fathom.writing import write_json

BATCH, LENGTH, VOCAB = 8, 2048, 50304
WIDTH = {"*bf16": 2, "*fp32": 4, "*fp16": 2, "*i64": 8, "*i32": 4, "*i1": 1, "*u8": 1, "*i8": 1}


def pretend_an_h200() -> None:
    """Answer what torch and triton ask of the device before they generate code."""
    import torch._inductor.config
    import torch._inductor.scheduler as scheduler
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget

    multiprocessors = {"multi_processor_count": 132, "major": 9, "warp_size": 32}
    threads = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048}
    hints = DeviceProperties(type="cuda", index=0, cc=90, max_threads_per_block=1024, **multiprocessors, **threads)
    facts = types.SimpleNamespace(
        name="NVIDIA H200", minor=0, total_memory=150 * 10**9, gcnArchName="", L2_cache_size=60 * 2**20,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, **multiprocessors, **threads,
    )  # fmt: skip
    DeviceProperties.create = classmethod(lambda cls, device: hints)  # type: ignore[method-assign]
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.get_device_capability, cuda.get_device_properties = lambda *a: (9, 0), lambda *a: facts
    cuda.get_rng_state, cuda.set_rng_state = lambda *a: torch.zeros(16, dtype=torch.uint8), lambda *a: None
    cuda._exchange_device = cuda._maybe_exchange_device = lambda *a: 0
    cuda.synchronize = cuda.set_device = cuda._lazy_init = lambda *a: None
    interface: Any = CudaInterface
    interface.is_available, interface.current_device = staticmethod(lambda: True), staticmethod(lambda: 0)
    interface.get_compute_capability = staticmethod(lambda *a: 90)
    interface.Worker = types.SimpleNamespace(
        get_device_properties=lambda *a: facts, current_device=lambda: 0, set_device=lambda *a: None
    )
    scheduler.has_triton = lambda *a: True  # type: ignore[attr-defined]
    torch.utils._triton.triton_hash_with_backend = lambda: "none"
    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda *a: 0,
            get_active_torch_device=lambda: torch.device("cuda:0"),
            utils=types.SimpleNamespace(get_device_properties=lambda *a: {"max_shared_mem": 232448, "warpSize": 32}),
        )
    )
    torch._inductor.config.compile_threads, torch._inductor.config.fx_graph_cache = 1, False


def traced(sections: dict[str, Any], sizes: dict[str, int], layers: int) -> list[tuple[str, Any, list[Any]]]:
    """The graphs of the forward and the backward pass, with their inputs."""
    import torch._functorch.config as config
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    config.enable_autograd_cache, config.force_non_lazy_backward_lowering = False, True
    graphs: list[tuple[str, Any, list[Any]]] = []

    def keep(name: str) -> Any:
        return lambda graph, inputs: graphs.append((name, graph, inputs)) or graph.forward

    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16):
        model = make_fathom({**sizes, "num_hidden_layers": layers}, VOCAB, LENGTH, **sections).train()
        model.model.embed_tokens.weight.requires_grad_(False)  # its gradient cannot be lowered without a GPU
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        torch.compile(model, backend=backend)(input_ids=tokens, labels=tokens, use_cache=False)
    return graphs


class Generated(Exception):
    """The code is there; it is not to be run."""


def generate(graph: Any, inputs: list[Any], backward: bool, mode: Any = None) -> str:
    """The code of a graph that was traced on a CPU, for the GPU. `mode`: the fake tensors' of a tracing that still goes
    on."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    codes: list[str] = []

    def stop(lowering: Any) -> Any:
        code = lowering.codegen()[0]
        codes.append(getattr(code, "value", code))
        raise Generated

    GraphLowering._compile_to_module = GraphLowering.compile_to_module = stop  # type: ignore[method-assign]
    gpu = torch.device("cuda:0")
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": gpu}
        node.args = tuple(gpu if isinstance(x, torch.device) else x for x in node.args)
    context: Any = contextlib.nullcontext()
    if mode is None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        context = tracing(TracingContext(mode))
    with mode:
        there = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=gpu) if isinstance(x, torch.Tensor) else x
            for x in inputs
        ]
    try:
        with context, torch.no_grad():
            compile_fx.compile_fx_inner(graph, there, is_backward=backward)
    except Exception:
        if not codes:
            raise
    return codes[0]


def kernels(code: str) -> list[dict[str, Any]]:
    """Every launch of a fused kernel: its name, and the bytes of the tensors it reads and writes."""
    body = code[code.index("def call(") :]
    definitions = {}
    for name, text in re.findall(
        r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", code, re.S | re.M
    ):
        arguments = re.search(r"def \w+\(([^)]*)\)", text)[1].split(", ")  # type: ignore[index]
        signature = dict(re.findall(r"'(\w+)': '(\*?\w+)'", re.search(r"'signature': \{([^}]*)\}", text)[1]))  # type: ignore[index]
        definitions[name] = [argument.strip() for argument in arguments], signature

    def count(shape: str) -> int:
        return prod(int(size) for size in shape.split(",") if size.strip())

    numbers, rows = {}, []
    for line in map(str.strip, body.splitlines()):
        if found := re.match(r"assert_size_stride\((\w+), \(([^)]*)\)", line):
            numbers.setdefault(found[1], count(found[2]))
        elif found := re.match(r"(\w+) = empty_strided_cuda\(\(([^)]*)\)", line):
            numbers[found[1]] = count(found[2])
        elif found := re.match(r"(triton_\w+)\.run\((.*), stream=", line):
            arguments, signature = definitions[found[1]]
            moved = 0
            for argument, value in zip(arguments, re.split(r", (?![^(]*\))", found[2]), strict=False):
                tensor = re.match(r"(?:reinterpret_tensor\()?(\w+)", value)
                moved += WIDTH.get(signature.get(argument, ""), 0) * numbers.get(tensor[1] if tensor else "", 0)
            rows.append({"kernel": found[1], "bytes": moved})
        elif (found := re.match(r"(\w+) = (?:reinterpret_tensor\()?(\w+)\b", line)) and found[2] in numbers:
            numbers.setdefault(found[1], numbers[found[2]])
    return rows


def measure(name: str, shape: str, layers: int) -> list[dict[str, Any]]:
    graphs, rows = traced(CONTESTANTS[name], SHAPES[shape], layers), []
    pretend_an_h200()
    for kind, graph, inputs in graphs:
        found = kernels(generate(graph, inputs, kind == "backward"))
        total = sum(row["bytes"] for row in found)
        rows.append(
            {"contestant": name, "shape": shape, "layers": layers, "pass": kind, "bytes": total, "kernels": found}
        )
        print(f"{shape} {name:24} {kind:8} {total / 1e6:9.1f} MB in {len(found)} kernels", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1024x24-gqa")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=["vanilla", "depth_attention"])
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    results: dict[str, Any] = {"environment": environment("cpu"), "tokens": BATCH * LENGTH, "rows": []}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # what is pretended lasts a process
        for name in args.contestants:
            results["rows"] += pool.apply(measure, (name, args.shape, args.layers))
            write_json(args.output, results)


if __name__ == "__main__":
    main()
