"""Many commands on the GPUs of one machine within a given time, what is worth most a minute first.

    python benchmarks/campaign.py benchmarks/plans/missing.yaml STATE --data DATA --minutes 25 [--only NAME…] [--dry]

A plan is a list of commands. Words of them that begin with recipes/ or benchmarks/ are files of this repository, which
is {here}; {data} is the folder DATA, {python} this interpreter, {deadline} when the time is over (seconds since 1970):

    - name: growth
      command: fathom grow recipes/growth_ways.yaml --jobs 3
      folder: growth        # of STATE, where it runs; what shares prepared rows shares a folder
      minutes: 18           # about what it takes on one H200
      value: 3              # how much its page lacks it, in whatever unit the plan keeps to
      gigabytes: 45         # of GPU memory at most; without it the command runs on CPU cores
      after: [growth-rows]  # commands that must have ended well
      resumes: true         # begun even where the time left is too short: the same command goes on from there
      alone: true           # nothing else runs on its GPU: for whatever is timed

A command that others wait for has the worth of the best of them. Campaigns share a GPU as far as their gigabytes fit
(three at most: a fourth made all of them slower), so their clock times mean nothing; what is `alone` waits for an empty
GPU, which is kept free for it. The same call again leaves out what is done, tries again what failed and goes on with
what was stopped. Whatever a command prints is in STATE/NAME.log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
OURS = ("recipes/", "benchmarks/", "tests/")
SHARED = 3  # campaigns a GPU


@dataclass(frozen=True)
class Item:
    name: str
    command: str
    minutes: float
    folder: str = "."
    value: float = 1.0
    gigabytes: float = 0.0
    after: tuple[str, ...] = ()
    resumes: bool = False
    alone: bool = False


@dataclass
class Gpu:
    """What runs on one GPU, and how much memory it has."""

    number: int
    gigabytes: float
    running: list[Item] = field(default_factory=list)

    def takes(self, item: Item) -> bool:
        if item.alone or any(other.alone for other in self.running):
            return not self.running
        used = sum(other.gigabytes for other in self.running)
        return len(self.running) < SHARED and used + item.gigabytes <= self.gigabytes


def read_plan(path: Path) -> dict[str, Item]:
    """The plan's commands by name; ValueError where a name is given twice, missing, or waited for in a circle."""
    rows = yaml.safe_load(path.read_text())
    items = {row["name"]: Item(**{**row, "after": tuple(row.get("after", ()))}) for row in rows}
    if len(items) < len(rows):
        raise ValueError(f"{path}: two commands have one name; give each its own")
    for item in items.values():
        if missing := [name for name in item.after if name not in items]:
            raise ValueError(f"{path}: {item.name} waits for {missing[0]}, which the plan does not have")
        if item.name in chain(item, items):
            raise ValueError(f"{path}: {item.name} waits for itself; break the circle of `after`")
    return items


def chain(item: Item, items: dict[str, Item]) -> set[str]:
    """The names of all that must be done before an item."""
    found: set[str] = set()
    ahead = list(item.after)
    while ahead:
        if (name := ahead.pop()) not in found:
            found.add(name)
            ahead += items[name].after
    return found


def worth(items: dict[str, Item], done: set[str]) -> dict[str, float]:
    """Value a minute of each item: its own with what it still waits for, or of the best that waits for it."""
    rates = dict.fromkeys(items, 0.0)
    for item in items.values():
        needed = {item.name} | (chain(item, items) - done)
        rate = item.value / sum(items[name].minutes for name in needed)
        for name in needed:
            rates[name] = max(rates[name], rate)
    return rates


class Campaign:
    """Starts what is ready, the most valuable first, until all is done or the time is over."""

    def __init__(self, items: dict[str, Item], state: Path, data: Path, gpus: list[Gpu], cores: int, minutes: float):
        self.items, self.state, self.gpus, self.cores, self.data = items, state, gpus, cores, data
        self.start, self.end = time.monotonic(), time.monotonic() + 60 * minutes
        self.deadline = time.time() + 60 * minutes
        self.done = {name for name in items if (state / f"{name}.done").exists()}
        self.running: dict[str, tuple[subprocess.Popen[bytes], float, Gpu | None]] = {}
        self.told: dict[str, str] = {}  # what ended, and how

    def say(self, *words: object) -> None:
        print(f"{(time.monotonic() - self.start) / 60:6.1f} min", *words, flush=True)

    def ready(self) -> list[Item]:
        """What may start now, best first."""
        rates, left = worth(self.items, self.done), (self.end - time.monotonic()) / 60
        waiting = [
            item
            for item in self.items.values()
            if item.name not in self.done | self.running.keys() | self.told.keys()
            and self.done.issuperset(item.after)
            and (item.resumes or item.minutes <= left)
        ]
        return sorted(waiting, key=lambda item: -rates[item.name])

    def place(self) -> None:
        kept: set[int] = set()  # GPUs that are emptied for something better
        for item in self.ready():
            if not (self.gpus and (item.gigabytes or item.alone)):
                if sum(gpu is None for _, _, gpu in self.running.values()) < self.cores:
                    self.launch(item, None)
                continue
            open_ = [gpu for gpu in self.gpus if gpu.number not in kept]
            if free := [gpu for gpu in open_ if gpu.takes(item)]:
                self.launch(item, min(free, key=lambda gpu: len(gpu.running)))
            elif item.alone and open_:
                kept.add(min(open_, key=lambda gpu: sum(other.minutes for other in gpu.running)).number)

    def launch(self, item: Item, gpu: Gpu | None) -> None:
        said = item.command.format(here=ROOT, data=self.data, python=sys.executable, deadline=self.deadline)
        words = [str(ROOT / word) if word.startswith(OURS) else word for word in shlex.split(said)]
        environment = dict(os.environ, PYTHONUNBUFFERED="1", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu.number)
            gpu.running.append(item)
        where = self.state / item.folder
        where.mkdir(parents=True, exist_ok=True)
        with (self.state / f"{item.name}.log").open("ab") as log:
            process = subprocess.Popen(
                words, cwd=where, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.running[item.name] = process, time.monotonic(), gpu
        self.say("start", item.name, "" if gpu is None else f"on GPU {gpu.number}")

    def collect(self) -> None:
        for name, (process, since, gpu) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[name]
            if gpu is not None:
                gpu.running.remove(self.items[name])
            minutes = (time.monotonic() - since) / 60
            self.told[name] = f"{minutes:.1f} of {self.items[name].minutes:g} min"
            if process.returncode == 0:
                self.done.add(name)
                (self.state / f"{name}.done").write_text(json.dumps({"minutes": round(minutes, 2)}))
            else:
                self.told[name] += f", failed with {process.returncode}: see {self.state / name}.log"
            self.say("end", name, self.told[name])

    def run(self) -> bool:
        """Whether everything in the plan is done."""
        while time.monotonic() < self.end:
            self.collect()
            self.place()
            if not self.running:
                break
            time.sleep(0.1)
        self.stop()
        for name in self.items:
            if name not in self.done:
                self.say("not done", name, self.told.get(name, ""))
        return self.done.issuperset(self.items)

    def stop(self) -> None:
        """Ask what runs to end, and end it after 20 seconds."""
        for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
            for process, _, _ in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            until = time.monotonic() + seconds
            while self.running and time.monotonic() < until:
                self.collect()
                time.sleep(0.05)


def gpus_here() -> list[Gpu]:
    """The machine's GPUs with the memory that is free on each, as nvidia-smi says; none without it."""
    ask = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [Gpu(number, float(line) / 1024) for number, line in enumerate(lines)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("state", type=Path, help="folder for results, logs and what is done")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of what the plan's head asks for")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="when to stop everything")
    parser.add_argument("--only", nargs="+", help="names from the plan; what they wait for runs too")
    parser.add_argument("--dry", action="store_true", help="print the order and start nothing")
    args = parser.parse_args()
    items = read_plan(args.plan)
    if args.only:
        if unknown := set(args.only) - items.keys():
            parser.error(f"--only {unknown.pop()}: {args.plan} has {', '.join(items)}")
        wanted = set(args.only).union(*(chain(items[name], items) for name in args.only))
        items = {name: item for name, item in items.items() if name in wanted}
    args.state.mkdir(parents=True, exist_ok=True)
    gpus = gpus_here()
    campaign = Campaign(items, args.state.resolve(), args.data.resolve(), gpus, os.cpu_count() or 1, args.minutes)
    if args.dry:
        rates = worth(items, campaign.done)
        for item in sorted(items.values(), key=lambda item: -rates[item.name]):
            how = "done" if item.name in campaign.done else f"{item.minutes:g} min, {item.gigabytes:g} GB"
            print(f"{rates[item.name]:6.2f} a minute  {item.name}: {how}{', alone' if item.alone else ''}")
        left = [item for item in items.values() if item.name not in campaign.done]
        print(f"{len(left)} commands to run, {sum(item.minutes for item in left) / 60:.1f} hours one after another; "
              "'a minute' is the value per minute of the plan")  # fmt: skip
        return 0
    if not gpus and any(item.gigabytes for item in items.values()):
        campaign.say("no GPU here: everything runs on CPU cores")
    return 0 if campaign.run() else 1


if __name__ == "__main__":
    raise SystemExit(main())
