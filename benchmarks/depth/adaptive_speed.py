"""Wall-clock time of tokens that stop on their own against the same method with all its steps.

    python benchmarks/depth/adaptive_speed.py --out docs/results/adaptive_speed.json       (GPU, bf16)
    python benchmarks/depth/adaptive_speed.py --tiny --out /tmp/adaptive.json  (CPU: a dry run of the script)

Every row has the measured mean S of executed slots of at most K + 1, the time relative to the fixed-K model, and that
over S/(K+1): 1 where every slot saved is time saved; the aim is at most 1.10. Beside it for prefill and training: the
matrix products that ran over the fixed model's (attention, and the head that every token has once, included).
`slots_run` is what the adaptive model computed, entries that fill up shapes among them, over the slots that were to
run. Routers and gates have random weights and a threshold found by bisection for each S, so the real decisions are
made and timed. Fixed-K and adaptive models share weights and take turns, block by block; medians with their spread.

Prefill and training are compiled, by default as CUDA graphs of groups of layers, on both sides, in sizes foreseen from
earlier calls. Every call takes other rows, so that forecasts can be wrong (`repeated_calls`); routers see what tokens
have of their own only, so that those that go on lie in all rows. `--compile model` compiles the whole model, `--compile
layers` one layer for all, in a fraction of the time, and `--compile no` nothing. Training: adaptive_latent_cot,
forward, backward and AdamW; "mixture" and "step" are its `correctness_from` (the heads of "step" come on top).
AdaPonderLM trains densely by definition. Decoding: generate() at batch 1 and 32, where rows wait for the slowest; the
prompt is read in it.

The file is written after every row; a row that fails is noted in it, and after `--minutes` no other is begun. On an
H200 `--only prefill` takes 4 minutes, `--only training` about 10 and 68 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

sys.path.insert(0, str(Path(__file__).parent))
from speed import environment, free, make_fathom, seconds_of, shape, take_turns, write_profile

from fathom.cost import forward_flops_per_token, training_flops_per_token
from fathom.depth.adaponderlm import Gate
from fathom.train.trainer import compile_layers
from fathom.writing import write_json

SHAPES = {"1024x24-gqa": shape(1024, 2752, 24, 16, 4), "768x12-mha": shape(768, 2064, 12, 12, 12)}
TINY = {"32x2": shape(32, 64, 2, 4, 2)}
STEPS = 3
COT = {"name": "adaptive_latent_cot", "steps": STEPS, "correctness_from": "mixture", "threshold": 0.5}
ADA = {"name": "adaponderlm", "steps": STEPS, "threshold": 0.5}
BOTH = (COT, ADA)
WARM = 24  # calls before timing: a forecast remembers 16
CALLS = 16  # in a row, timed together, each batch once; the device begins the first idle, as in training it never is


class Watched:
    """A model that notes the steps its tokens run."""

    def __init__(self, sizes: dict[str, int], vocab: int, length: int, depth: dict[str, Any], device: str, dtype: Any):
        torch.manual_seed(0)
        self.model = make_fathom(sizes, vocab, length, depth=depth)
        for name, parameter in self.model.depth.named_parameters():
            if name.endswith("weight") and parameter.ndim == 1:  # routers and gates start at 0
                torch.nn.init.normal_(parameter, std=2.0 / parameter.numel() ** 0.5)
            elif name.endswith("bias") and parameter.numel() == 1:
                torch.nn.init.constant_(parameter, 0.5)
        self.model.to(device, dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.passes: list[torch.Tensor] = []
        self.computed = self.before = 0
        self.model.depth.register_forward_hook(self.note)

    @torch.compiler.disable
    def note(self, module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self.passes.append(output.trace["passes"].detach())
        self.computed = arguments[0].computed

    def mean(self) -> float:
        """Mean steps of the tokens since the last call."""
        every = torch.cat([passes.flatten() for passes in self.passes])
        self.passes.clear()
        return every.double().mean().item()

    def slots_run(self) -> float:
        """Slots computed in the last forward over those that ran."""
        return self.computed / self.passes[-1].sum().item()

    def flops(self, length: int, training: bool) -> float:
        """FLOPs of a token, by the steps of the last forward."""
        config, passes = self.model.config, self.passes[-1]
        ran = [(passes > step).double().mean().item() for step in range(STEPS + 1)]
        if training:
            return training_flops_per_token(config, length, ran=ran)
        head = 2 * config.hidden_size * config.vocab_size  # logits_to_keep=1
        return forward_flops_per_token(config, length, ran=ran).matmul - head

    def set_threshold(self, value: float) -> None:
        object.__setattr__(self.model.depth.options, "threshold", value)

    def compile(self, what: str, device: str) -> None:
        torch._dynamo.config.recompile_limit = 64
        backend = "inductor" if device == "cuda" else "eager"
        if what in ("layers", "graphs"):
            compile_layers(self.model, backend, graphs=what == "graphs" and device == "cuda")
        elif what == "model":
            self.model.compile(backend=backend)

    @torch.no_grad()
    def spread(self, batches: list[torch.Tensor]) -> None:
        """Have the tokens that go on lie in all rows and everywhere in them, as in trained models. Random routers take
        whole rows, whose states have more in common than a token's has of its own; so what rows, and what blocks of
        positions have in common in the states of any step is taken out of what a router sees."""
        routers = self.model.depth.routers if hasattr(self.model.depth, "routers") else self.model.depth.gates
        parts = [router.up_proj if isinstance(router, Gate) else router for router in routers]
        common: dict[torch.nn.Module, list[torch.Tensor]] = {part: [] for part in parts}

        def note(part: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
            state = given[0].view(*batches[0].shape, -1).float()
            common[part] += [state.mean(1), state.unflatten(1, (16, -1)).mean((0, 2))]

        hooks = [part.register_forward_pre_hook(note) for part in parts]
        self.set_threshold(0.0)
        for tokens in batches:
            self.model(tokens, use_cache=False, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        for part in parts:
            basis = torch.linalg.svd(torch.cat(common[part]), full_matrices=False).Vh
            basis = basis[: part.weight.shape[-1] // 2]  # all but in tiny models
            part.weight -= ((part.weight.float() @ basis.T) @ basis).to(part.weight.dtype)
        self.passes.clear()

    def shares(self) -> list[float]:
        """For every row of the last batch, the share of its tokens that run a second step."""
        return (self.passes[-1] > 1).double().mean(1).tolist()

    def repeated(self) -> int:
        """Calls made again, as more tokens went on than had been foreseen, since the last question."""
        found = 0 if self.model.foresight is None else self.model.foresight.repeated
        new, self.before = found - self.before, found
        return new

    def calibrate(self, tokens: torch.Tensor, mean: float) -> float:
        """The threshold at which these tokens run `mean` steps."""
        low, high = 0.0, 1.0
        with torch.no_grad():
            for _ in range(12):
                self.set_threshold((low + high) / 2)
                self.passes.clear()
                self.model(tokens, use_cache=False, logits_to_keep=1)
                low, high = ((low + high) / 2, high) if self.mean() > mean else (low, (low + high) / 2)
        return self.model.depth.options.threshold


def without_router(depth: dict[str, Any]) -> dict[str, Any]:
    return {"name": depth["name"], "steps": depth["steps"], "halting": "fixed"}


class Rows:
    """The file of results, written after every row."""

    def __init__(self, path: Path, minutes: float, facts: dict[str, Any]):
        self.path, self.start, self.end = path, time.monotonic(), time.monotonic() + 60 * minutes
        self.results: dict[str, Any] = {**facts, "rows": [], "failures": []}

    def save(self) -> None:
        write_json(self.path, self.results)

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} s  {line}", flush=True)

    def time_left(self) -> bool:
        return time.monotonic() < self.end

    def add(self, kind: str, depth: dict, mean: float, figures: dict, fixed: dict, **facts: Any) -> None:
        ratio = figures["median_s"] / fixed["median_s"]
        row = {
            "kind": kind, "method": depth["name"], "mean_steps": mean, "most_steps": STEPS + 1, **facts, **figures,
            **{f"fixed_{name}": fixed[name] for name in ("median_s", "min_s", "max_s", "turns_s")},
            "time_vs_fixed": ratio, "over_ideal": ratio / (mean / (STEPS + 1)),
        }  # fmt: skip
        self.results["rows"].append(row)
        self.save()
        extra = " ".join(f"{k}={v}" for k, v in facts.items() if k != "shares_by_row")
        steps = f"S={mean:.2f}/{STEPS + 1} {ratio:.3f} x fixed, {row['over_ideal']:.3f} x ideal"
        self.say(f"{kind:9} {depth['name']:20} {steps} {extra}")

    @contextlib.contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """Notes a failure and goes on."""
        try:
            yield
        except Exception as error:
            self.results["failures"].append({"what": what, "error": traceback.format_exc()[-4000:]})
            self.save()
            self.say(f"{what} failed: {type(error).__name__}: {str(error)[:300]}")


def batches_of(vocab: int, batch: int, length: int, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows of random tokens once each, and batches of some of them: how many tokens go on differs from call to call."""
    pool = torch.randint(0, vocab, (batch + 16, length), device=device)
    every = [*pool.split(batch)[: len(pool) // batch], pool[-batch:]]
    return every, [pool[torch.randperm(len(pool))[:batch].to(device)] for _ in range(16)]


def prefill(rows: Rows, depth, sizes, vocab, device, dtype, means, batch, length, blocks, compiled, profile) -> None:
    every, batches = batches_of(vocab, batch, length, device)
    fixed = Watched(sizes, vocab, length, without_router(depth), device, dtype)
    adaptive = Watched(sizes, vocab, length, depth, device, dtype)
    adaptive.spread(every)
    thresholds = {mean: adaptive.calibrate(batches[0], mean) for mean in means}
    models = {"fixed": fixed, "adaptive": adaptive}
    for watched in models.values():
        watched.compile(compiled, device)

    given = {name: itertools.cycle(batches) for name in models}

    @torch.no_grad()
    def run(name: str) -> None:
        models[name].model(next(given[name]), use_cache=True, logits_to_keep=1)

    for mean, threshold in thresholds.items():
        if not rows.time_left():
            break
        with rows.surviving(f"prefill {depth['name']} {mean}"):
            adaptive.set_threshold(threshold)
            for _ in range(WARM):  # graphs are compiled in the first, recorded in those after, until sizes are foreseen
                for name in models:
                    run(name)
            rows.say(f"prefill {depth['name']} {mean}: warm")
            adaptive.passes.clear(), adaptive.repeated()
            figures = take_turns({n: lambda n=n: seconds_of(lambda: run(n), device, CALLS) for n in models}, blocks)
            facts = {"batch": batch, "length": length, "compile": compiled, "slots_run": adaptive.slots_run()}
            facts |= {"repeated_calls": adaptive.repeated(), "shares_by_row": adaptive.shares()}
            facts["flops_vs_fixed"] = adaptive.flops(length, False) / fixed.flops(length, False)
            rows.add("prefill", depth, adaptive.mean(), figures["adaptive"], figures["fixed"], **facts)
            for name in models if profile else ():
                write_profile(lambda n=name: run(n), device, f"{profile}-{depth['name']}-{name}-{mean}.txt")
        fixed.passes.clear()


def training(rows: Rows, depth, sizes, vocab, device, means, batch, length, blocks, compiled, profile) -> None:
    every, batches = batches_of(vocab, batch, length, device)
    models, steps = {}, {}
    for name, options in {"fixed": without_router(depth), "adaptive": depth}.items():
        watched = models[name] = Watched(sizes, vocab, length, options, device, torch.float32)
        watched.model.train()
        optimizer = torch.optim.AdamW(watched.model.parameters(), lr=0.0, fused=True)  # thresholds stay calibrated
        precision = torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

        given = itertools.cycle(batches)

        def step(model=watched.model, optimizer=optimizer, precision=precision, given=given) -> None:
            tokens = next(given)
            with precision:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        steps[name] = step
    with torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext():
        models["adaptive"].spread(every)
        thresholds = {mean: models["adaptive"].calibrate(batches[0], mean) for mean in means}
    for watched in models.values():
        watched.compile(compiled, device)
    for mean, threshold in thresholds.items():
        if not rows.time_left():
            break
        with rows.surviving(f"training {mean}"):
            models["adaptive"].set_threshold(threshold)
            for _ in range(WARM):
                for step in steps.values():
                    step()
            rows.say(f"training {depth['correctness_from']} {mean}: warm")
            models["adaptive"].passes.clear(), models["adaptive"].repeated()
            figures = take_turns({n: lambda s=s: seconds_of(s, device, CALLS) for n, s in steps.items()}, blocks)
            facts = {
                "batch": batch, "length": length, "compile": compiled, "correctness_from": depth["correctness_from"],
                "slots_run": models["adaptive"].slots_run(),
                "repeated_calls": models["adaptive"].repeated(),
                "shares_by_row": models["adaptive"].shares(),
                "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            }  # fmt: skip
            work = {name: watched.flops(length, True) for name, watched in models.items()}
            facts["flops_vs_fixed"] = work["adaptive"] / work["fixed"]
            found = models["adaptive"].mean()
            rows.add("training", depth, found, figures["adaptive"], figures["fixed"], **facts)
            for name in models if profile else ():
                write_profile(steps[name], device, f"{profile}-training-{depth['correctness_from']}-{name}-{mean}.txt")
        models["fixed"].passes.clear()


def decoding(rows: Rows, depth, sizes, vocab, device, dtype, means, batch, prompt, new, blocks) -> None:
    fixed = Watched(sizes, vocab, prompt + new, without_router(depth), device, dtype)
    adaptive = Watched(sizes, vocab, prompt + new, depth, device, dtype)
    tokens = torch.randint(0, vocab, (batch, prompt), device=device)
    mask = torch.ones_like(tokens)

    def generate(watched: Watched) -> torch.Tensor:
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return watched.model.generate(tokens, attention_mask=mask, **options)

    runs: dict[str, Callable[[], Any]] = {"fixed": lambda: generate(fixed), "lockstep": lambda: generate(adaptive)}
    for mean in means:
        if not rows.time_left():
            break
        with rows.surviving(f"decode {depth['name']} batch {batch} {mean}"):
            adaptive.calibrate(tokens, mean)
            adaptive.passes.clear()
            generate(adaptive)
            steps = torch.cat(adaptive.passes[1:], dim=1).double()
            facts = {"batch": batch, "prompt": prompt, "new": new, "mean_of_slowest_row": steps.amax(0).mean().item()}
            figures = take_turns({n: lambda r=r: seconds_of(r, device, 1) for n, r in runs.items()}, blocks)
            for name in runs:
                if name != "fixed":
                    found = steps.mean().item()
                    rows.add("decode", depth, found, figures[name], figures["fixed"], schedule=name, **facts)
        adaptive.passes.clear(), fixed.passes.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file for the figures")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--only", choices=("prefill", "training", "decode"), help="run one part")
    names = [depth["name"] for depth in BOTH]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--shape", choices=SHAPES, default="1024x24-gqa")
    parser.add_argument("--batch", type=int, default=16, help="of prefill and training")
    parser.add_argument("--length", type=int, default=1024, help="of prefill and training")
    parser.add_argument("--means", type=float, nargs="+", default=[1.5, 2.5, 3.5], help="S of prefill")
    parser.add_argument("--compile", choices=("graphs", "model", "layers", "no"), default="graphs")
    parser.add_argument(
        "--launch", choices=("python", "cpp"), default="python", help="what compiled code launches from"
    )
    parser.add_argument("--profile", help="write what prefill and training spend their time on to PROFILE-*.txt")
    parser.add_argument("--gigabytes", type=float, default=75, help="never hold more")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no row is begun")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1e9 * args.gigabytes / total))
    torch.set_float32_matmul_precision("high")
    sizes = TINY["32x2"] if args.tiny else SHAPES[args.shape]
    vocab, batch, length = (97, 2, 96) if args.tiny else (50304, args.batch, args.length)
    means, blocks = ((2.5,), 2) if args.tiny else (tuple(args.means), 5)
    prompt, new, many = (16, 8, 3) if args.tiny else (512, 48, 32)
    some, middle = means[:2], means[len(means) // 2 :][:1]
    compiled = args.compile
    torch._inductor.config.cpp_wrapper = args.launch == "cpp"
    rows = Rows(
        Path(args.out), args.minutes, {"environment": environment(device), "shape": args.shape, "launch": args.launch}
    )
    step, shared = {**COT, "correctness_from": "step"}, (sizes, vocab, device, dtype)
    parts: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = [
        *(("prefill", prefill, (d, *shared, means, batch, length, blocks, compiled, args.profile)) for d in BOTH),
        *(("decode", decoding, (d, sizes, vocab, device, dtype, some, 1, prompt, new, 3)) for d in BOTH),
        ("training", training, (COT, sizes, vocab, device, some, batch, length, blocks, compiled, args.profile)),
        *(("decode", decoding, (d, sizes, vocab, device, dtype, middle, many, prompt, new, 3)) for d in BOTH),
        ("training", training, (step, sizes, vocab, device, middle, batch, length, blocks, compiled, args.profile)),
    ]
    for kind, part, arguments in parts:
        if args.only in (None, kind) and arguments[0]["name"] in args.methods and rows.time_left():
            with rows.surviving(f"{kind} {arguments[0]['name']}"):
                part(rows, *arguments)
            free(device)
    rows.results["seconds"] = time.monotonic() - rows.start
    rows.save()


if __name__ == "__main__":
    main()
