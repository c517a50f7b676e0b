"""What the bridge costs: steps, memory and guidance of a preset on one GPU. Under a minute on an H200:

python benchmarks/audiovideo/speed.py -o speed.json

step       forward and backward of the joint model, compiled, in bf16, against both towers apart plus the bridge's
           FLOPs at the rate that the towers reach: `ratio`, medians of runs that take turns
recorded   the same with every step as a CUDA graph, which no Python launches
memory     what a forward keeps for its backward pass, in clips of so many pictures, `growth` from one length to twice
guidance   steps of sampling with three branches in one batch over the same in turn
compiled   graphs that torch.compile made, and how many more at other noise levels and of the other expert
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fathom.audiovideo.configuration import MovaConfig
from fathom.audiovideo.cost import forward_flops
from fathom.audiovideo.guidance import branches, guided
from fathom.audiovideo.joint import MovaModel, joint_forward
from fathom.decoding.graphs import warm_and_record
from fathom.writing import write_json


def inputs(config: MovaConfig, clips: int, device: str, sigma: float = 0.5) -> tuple[Any, ...]:
    """Noisy latents with their condition, states of captions and noise levels: what `joint_forward` reads."""
    channels, frames, rows, columns = config.video_shape
    given = 2 * channels + config.video_strides[0]
    video = torch.randn(clips, given, frames, rows, columns, device=device)
    audio = torch.randn(clips, *config.audio_shape, device=device)
    text = torch.randn(clips, config.text_length, config.text_dim, device=device)
    level = torch.full((clips,), 1000 * sigma, device=device)
    return video, audio, text, level, level.clone()


def made(config: MovaConfig, device: str) -> MovaModel:
    with torch.device(device):  # weights drawn on a CPU take a quarter of the minute
        return MovaModel(config).to(device)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_turn(work: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Milliseconds of each, measured in turn: median, least and most."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 3):
        for name, call in work.items():
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            if number >= 3:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: {"median": statistics.median(t), "least": min(t), "most": max(t)} for name, t in times.items()}


def trained(call: Callable[[], Any], device: str) -> Callable[[], None]:
    """One forward and backward."""

    def run() -> None:
        with torch.autocast(device, torch.bfloat16, device == "cuda"):
            out = call()
        sum(part.float().square().mean() for part in (out if isinstance(out, tuple) else (out,))).backward()

    return run


def replayed(run: Callable[[], None], weights: list[torch.Tensor]) -> Callable[[], None]:
    """`run` as a CUDA graph; it has run before, so that all is compiled. Gradients begin from none."""

    def step() -> None:
        for weight in weights:
            weight.grad = None
        run()

    return warm_and_record(step)


def steps(model: MovaModel, clips: int, rounds: int, device: str, recorded: bool = False) -> dict[str, Any]:
    """The joint step against its parts."""
    config = model.config
    video, audio, text, of_video, of_audio = inputs(config, clips, device)
    tower = model.experts[0]
    off = functools.partial(joint_forward, tower, model.audio_dit, None, video, audio, text, of_video, of_audio)
    work = {
        "joint": trained(lambda: model.velocities(0, video, audio, text, of_video, of_audio, None), device),
        "video": trained(lambda: tower(video, of_video, text), device),
        "audio": trained(lambda: model.audio_dit(audio, of_audio, text), device),
        "off": trained(functools.partial(off, compiled_layer=model.compiled_layer), device),
    }
    if recorded:
        work = {name: replayed(run, list(model.parameters())) for name, run in work.items()}
    found = in_turn(work, rounds, device)
    towers, whole = forward_flops(config, bridge=False), forward_flops(config)
    apart = found["video"]["median"] + found["audio"]["median"]
    allowed = apart * whole / towers
    return {
        "clips": clips, "milliseconds": found, "flops_of_bridge_over_towers": whole / towers - 1,
        "teraflops_of_towers": 3 * clips * towers / apart / 1e9, "allowed_ms": allowed,
        "ratio": found["joint"]["median"] / allowed,
    }  # fmt: skip


def memory(config: MovaConfig, clips: int, device: str) -> dict[str, Any]:
    """Bytes that a forward keeps, of clips of n and of 2 n − 1 pictures."""
    kept: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}
    half = torch.bfloat16
    for frames in (config.frames, 2 * config.frames - 1):
        longer = MovaConfig.from_dict({**config.to_dict(), "frames": frames})
        model = made(longer, device).to(half)  # autocast would keep copies of the weights, too
        latents, levels = inputs(longer, clips, device)[:3], inputs(longer, clips, device)[3:]
        given = (*(x.to(half) for x in latents), *levels)
        for _ in range(2):  # what stays from a first run is not the activations'
            before = torch.cuda.memory_allocated()
            out = model.velocities(0, *given, None)
            kept[frames] = torch.cuda.memory_allocated() - before
            del out
        tokens[frames] = list(longer.tokens)
        del model
    first, second = kept.values()
    return {"clips": clips, "bytes": kept, "tokens": tokens, "growth": second / first}


@torch.no_grad()
def guidance(model: MovaModel, clips: int, rounds: int, device: str) -> dict[str, Any]:
    """A step of sampling with three branches, at once and one after the other."""
    given = inputs(model.config, clips, device)

    def evaluate(asked: Any) -> list[Any]:
        many = len(asked)
        on = [branch.bridge for branch in asked]
        scale = None if all(on) else torch.tensor(on, dtype=torch.float32, device=device).repeat_interleave(clips)
        video, audio = joint_forward(
            model.experts[0], model.audio_dit, model.bridge if any(on) else None,
            *(x.repeat(many, *[1] * (x.ndim - 1)) for x in given), scale, compiled_layer=model.compiled_layer,
        )  # fmt: skip
        return list(zip(video.chunk(many), audio.chunk(many), strict=True))

    def step(batched: bool) -> None:
        with torch.autocast(device, torch.bfloat16, device == "cuda"):
            guided(evaluate, 5.0, 3.5, batched)

    found = in_turn({"batched": lambda: step(True), "in_turn": lambda: step(False)}, rounds, device)
    ratio = found["batched"]["median"] / found["in_turn"]["median"]
    return {"clips": clips, "branches": len(branches(5.0, 3.5)), "milliseconds": found, "ratio": ratio}


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--clips", type=int, default=32, help="of a training step")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=50, help="after which nothing more is begun")
    parser.add_argument("-o", "--output", type=Path, default=Path("speed.json"))
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    end = time.perf_counter() + given.seconds
    config = MovaConfig(preset=given.preset)
    found: dict[str, Any] = {
        "preset": given.preset, "tokens": list(config.tokens), "torch": torch.__version__, "precision": "bf16",
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
    }  # fmt: skip

    def keep(name: str, value: Any) -> None:
        found[name] = value
        print(name, value, flush=True)
        write_json(given.output, found)

    if device == "cuda":
        keep("memory", memory(config, 8, device))
    model = made(config, device)
    keep("guidance", {f"{clips} clips": guidance(model, clips, given.rounds, device) for clips in (1, 8)})
    model.compile_blocks()
    model.train()
    keep("step", steps(model, given.clips, given.rounds, device))
    before = graphs()
    for expert, sigma in ((0, 0.95), (1, 0.3), (1, 0.7)):
        again = functools.partial(model.velocities, expert, *inputs(config, given.clips, device, sigma), None)
        trained(again, device)()
    keep("compiled", {"graphs": before, "more_at_other_levels_and_expert": graphs() - before})
    if device == "cuda" and time.perf_counter() < end:
        keep("recorded", steps(model, given.clips, given.rounds, device, recorded=True))
    if time.perf_counter() < end:
        keep("guidance_compiled", guidance(model, 8, given.rounds, device))


if __name__ == "__main__":
    main()
