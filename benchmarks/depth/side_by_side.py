"""Benchmarks and a comparison together on the GPUs of one machine: compilation and training fill the time between
timings, and whatever is timed has its GPU to itself.

    python benchmarks/depth/side_by_side.py PLAN.yaml --state DIR [--seconds 560]

PLAN lists commands ({state} stands for DIR) and, if wanted, one comparison:

    benches:
      - {name: speed, gpu: 0, command: "speed.py --shape 768x12-mha --only training --out {state}/speed.json"}
      - {name: rest, gpu: 0, command: "depth_methods.py --out {state}/rest.json", after: [speed]}
      - {name: notes, command: "memory.py {state}/memory.json", plain: true}
    comparison: {recipe: recipes/depth_attention_small.yaml, workers: 3}

A benchmark runs inside this script (`--bench`), which asks for quiet around the functions in `TIMED`: every other
process on that GPU is stopped (SIGSTOP) for so long. `plain` commands time nothing and run as they are. The comparison
is `fathom compare` with `workers` runs a GPU, so the speeds in *its* results are shared ones and mean nothing. The same
command again skips what is finished and resumes the comparison; after `--seconds` everything is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

TIMED = ("take_turns", "copy_bandwidth", "awm", "ics")  # what the benchmark scripts call to measure


# ------------------------------------------------------------------ inside a benchmark


def bench(state: Path, script: str, arguments: list[str]) -> None:
    """Run a script's main() with its timed functions waiting for a quiet GPU."""
    module = importlib.import_module(Path(script).stem)
    for name in TIMED:
        if hasattr(module, name):
            setattr(module, name, quietly(getattr(module, name), state))
    sys.argv = [script, *arguments]
    module.main()


def quietly(function: Callable[..., Any], state: Path) -> Callable[..., Any]:
    ask, granted = state / f"quiet/{os.getpid()}.ask", state / f"quiet/{os.getpid()}.granted"

    def waiting(*args: Any, **kwargs: Any) -> Any:
        ask.touch()
        while not granted.exists():
            time.sleep(0.05)
        time.sleep(1)  # kernels that were under way
        try:
            return function(*args, **kwargs)
        finally:
            ask.unlink(missing_ok=True)
            granted.unlink(missing_ok=True)

    return waiting


# ------------------------------------------------------------------ inside the comparison


def comparison(state: Path, recipe: Path, workers: int) -> None:
    """`fathom compare` with several runs a GPU; every process of it leaves its GPU's number in the state folder."""
    import fathom.report.compare as compare

    started, jobs = compare._start_worker, workers * max(1, torch.cuda.device_count())

    def start(free: Any, jobs: int) -> None:
        started(free, jobs)
        (state / f"worker-{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    compare._start_worker = start
    for _ in range(3):  # a run that failed (memory shared with a benchmark, say) is tried again
        results = compare.compare(recipe, state / "runs", jobs, lambda line: print(line, flush=True))
        if not results.failures:
            return
    raise SystemExit(f"failed: {results.failures}")


# ------------------------------------------------------------------ the conductor


class Conductor:
    """Starts commands as their predecessors end and gives timed parts their quiet."""

    def __init__(self, plan: dict[str, Any], state: Path):
        self.state, self.start = state, time.time()
        self.waiting: list[dict[str, Any]] = list(plan.get("benches", ()))
        if "comparison" in plan:
            self.waiting.append({"name": "comparison", **plan["comparison"]})
        self.running: dict[str, tuple[subprocess.Popen, str | None]] = {}
        self.quiet: dict[str, tuple[int, list[int]]] = {}  # by GPU: who has it, who was stopped

    def say(self, *words: Any) -> None:
        print(f"{time.time() - self.start:6.1f}", *words, flush=True)

    def done(self, name: str) -> bool:
        return (self.state / f"{name}.done").exists()

    def launch(self, item: dict[str, Any]) -> None:
        name, gpu, here = item["name"], item.get("gpu"), str(Path(__file__).resolve())
        own = [sys.executable, here, "--state", str(self.state)]
        if "recipe" in item:
            command = [*own, "--comparison", item["recipe"], "--workers", str(item.get("workers", 1))]
        else:
            words = shlex.split(item["command"].format(state=self.state))
            script = str(Path(here).with_name(words[0]))
            timed = [] if item.get("plain") else [*own[1:], "--bench"]
            command = [sys.executable, *timed, script, *words[1:]]
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        log = (self.state / f"{name}.log").open("a")
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.running[name] = process, None if gpu is None else str(gpu)
        self.say("start", name)

    def step(self) -> bool:
        """One look at everything; False when nothing is left to do."""
        for name, (process, _) in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                self.say("end", name, process.returncode)
                if process.returncode == 0:
                    (self.state / f"{name}.done").touch()
                else:
                    self.say((self.state / f"{name}.log").read_text()[-1500:])
        for item in list(self.waiting):
            if self.done(item["name"]):
                self.waiting.remove(item)
            elif all(self.done(name) for name in item.get("after", ())):
                self.waiting.remove(item)
                self.launch(item)
        self.end_quiet()
        self.grant_quiet()
        return bool(self.running)

    def grant_quiet(self) -> None:
        for ask in sorted((self.state / "quiet").glob("*.ask"), key=lambda path: path.stat().st_mtime):
            owner = int(ask.stem)
            gpu = next((g for p, g in self.running.values() if owner in family(p.pid)), None)
            if gpu is not None and gpu not in self.quiet:
                self.quiet[gpu] = owner, []
                self.stop_others(gpu)
                ask.with_suffix(".granted").touch()
        for gpu in self.quiet:
            self.stop_others(gpu)  # those that started since

    def stop_others(self, gpu: str) -> None:
        owner, stopped = self.quiet[gpu]
        others = [pid for pid, where in self.workers() if where == gpu]
        for process, where in self.running.values():
            if where == gpu and owner not in (members := family(process.pid)):
                others += members
        fresh = [pid for pid in others if pid not in stopped]
        signal_all(fresh, signal.SIGSTOP)
        stopped += fresh

    def end_quiet(self) -> None:
        for gpu, (owner, others) in list(self.quiet.items()):
            if not (self.state / f"quiet/{owner}.granted").exists() or not Path(f"/proc/{owner}").exists():
                signal_all(others, signal.SIGCONT)
                del self.quiet[gpu]

    def workers(self) -> Iterator[tuple[int, str]]:
        for note in self.state.glob("worker-*"):
            yield int(note.name.removeprefix("worker-")), note.read_text()

    def stop(self) -> None:
        for name, (process, _) in self.running.items():
            self.say("stopped", name)
            signal_all(family(process.pid), signal.SIGKILL)
        signal_all([pid for pid, _ in self.workers()], signal.SIGKILL)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", type=Path)
    parser.add_argument("--state", type=Path, required=True, help="folder for results, logs and what is done")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--bench", nargs=argparse.REMAINDER, help="(used by the script itself)")
    parser.add_argument("--comparison", type=Path, help="(used by the script itself)")
    parser.add_argument("--workers", type=int, default=1, help="(used by the script itself)")
    args = parser.parse_args()
    if args.bench:
        bench(args.state, args.bench[0], args.bench[1:])
    elif args.comparison:
        comparison(args.state, args.comparison, args.workers)
    else:
        conduct(args.plan, args.state, args.seconds)


def conduct(plan: Path, state: Path, seconds: float) -> None:
    """Everything in the plan, for so many seconds at most."""
    (state / "quiet").mkdir(parents=True, exist_ok=True)
    for left in (*(state / "quiet").iterdir(), *state.glob("worker-*")):
        left.unlink()
    conductor = Conductor(yaml.safe_load(plan.read_text()), state)
    while conductor.step() and time.time() - conductor.start < seconds:
        time.sleep(0.1)
    conductor.stop()


if __name__ == "__main__":
    main()
