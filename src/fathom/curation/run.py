"""Curation of a raw folder into a corpus, in three stages on datatrove's executor. A killed run can be resumed.

    sift     a task a shard: read, steps 1 to 5 and 7, then digest and signature of what is left
    match    one process: which documents are copies of earlier ones
    gather   a task a shard: leave the copies out, ask the models, write the corpus

A file appears whole under its name, and a task is marked as done after its files: a task that was killed is done again,
to the same bytes. Results depend on the input and the config, never on how many processes worked.

    DIR/corpus/part_k.jsonl    {"text", "meta"}           DIR/lines/part_k.jsonl   every line that cleaning took out
    DIR/dropped/part_k.jsonl   every dropped document     DIR/account.json, DIR/report.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.filters.base_filter import BaseFilter, get_filter_result
from datatrove.utils.logging import logger
from filelock import FileLock, Timeout

from fathom.curation import steps
from fathom.curation.account import Account, excerpt, line_count
from fathom.curation.config import MODELS, Curation
from fathom.curation.deduplicate import digest, matches, signature
from fathom.curation.page import write_page
from fathom.curation.read import Piece, Unreadable, documents, files, shards
from fathom.curation.words import identities
from fathom.version import __version__
from fathom.writing import whole, write_json

RUN = "run.json"
FOLDERS = ("corpus", "dropped", "lines")


def curate(raw: str | Path, folder: str | Path, config: Curation, workers: int | None = None) -> dict[str, Any]:
    """Curate `raw` into `folder`, or resume a run that was stopped there. A finished run is returned as it is.

    Args:
        workers: processes; None: one a usable core.

    Returns:
        The account: counters, examples, seconds.

    Raises:
        ValueError: a source without text, a config that does not fit, or, with `malformed: stop`, what cannot be read.
        FileExistsError: the folder holds another run, or something else, or another process works there.
        ChildProcessError: a worker was killed.
    """
    raw, folder = Path(raw), Path(folder)
    steps.check(config)
    if folder.resolve().is_relative_to(raw.resolve()):
        raise ValueError(f"{folder}: lies in {raw}, and would be read as text of it; name a folder elsewhere")
    _filters(config)  # what it names wrongly shows before the folder is claimed; and forked processes have them
    _claim(folder, raw, config)
    try:
        with FileLock(folder / ".lock", timeout=0):
            return _curated(raw, folder, config, workers)
    except Timeout:
        raise FileExistsError(f"{folder}: another process curates into it; wait for it, or name a new folder") from None


def _curated(raw: Path, folder: Path, config: Curation, workers: int | None) -> dict[str, Any]:
    plan = shards(raw, config.shard_bytes)
    done = folder / "account.json"
    if done.is_file():  # made, and perhaps killed before it was tidied up
        shutil.rmtree(folder / "work", ignore_errors=True)
        return json.loads(done.read_text(encoding="utf-8"))
    began = time.monotonic()
    workers = min(workers or _usable_cores(), len(plan))
    work = folder / "work"
    for name in FOLDERS:
        (folder / name).mkdir(exist_ok=True)
    _execute(
        [functools.partial(_sift, raw=raw, plan=plan, folder=folder, config=config)], len(plan), workers, work / "sift"
    )
    if not (work / "matched").is_file():
        _match(work, len(plan), config)
    asking = any(getattr(config, name) for name in MODELS)  # on one device: one process
    _execute(
        [functools.partial(_gather, folder=folder, config=config)], len(plan), 1 if asking else workers, work / "gather"
    )
    account = _account(work, len(plan))
    unchecked = next((f.questions for name, f in _filters(config) if name == "decontamination"), None)  # type: ignore[attr-defined]
    made = {
        **account.to_dict(),
        "config": dataclasses.asdict(config),
        "fathom": __version__,
        "seconds": round(time.monotonic() - began, 3),
        "workers": workers,
        "benchmarks": {n: {"rows": unchecked.rows[n], "too_short": unchecked.unchecked[n]} for n in unchecked.rows}
        if unchecked else {},
    }  # fmt: skip
    write_page(made, str(raw), folder / "report.html")
    write_json(done, made)
    shutil.rmtree(work, ignore_errors=True)
    return json.loads(done.read_text(encoding="utf-8"))


def _claim(folder: Path, raw: Path, config: Curation) -> None:
    """Record in a new folder what is made there. Raises FileExistsError if it holds anything else than a run without a
    finished task."""
    base = raw if raw.is_dir() else raw.parent
    named = [Path(name) for name in (*(config.benchmarks or {}).values(), config.known_words) if name]
    read = [(str(file.relative_to(base)), file.stat()) for file in files(raw)]
    read += [(str(file), file.stat()) for file in named]
    listed = [[name, said.st_size, said.st_mtime_ns] for name, said in read]
    ours = {
        "fathom": __version__,
        "raw": str(raw.resolve()),
        "files": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
    }
    note = folder / RUN
    if note.is_file():
        theirs = json.loads(note.read_text(encoding="utf-8"))
        changed = [key for key in ours if theirs.get(key) != ours[key]]
        if changed == ["config"]:
            options = [key for key in ours["config"] if ours["config"][key] != theirs["config"].get(key)]
            changed = [f"config ({', '.join(options)})"]
        begun = any((folder / "work" / "sift" / "completions").glob("*")) or (folder / "account.json").exists()
        if changed and begun:
            raise FileExistsError(f"{folder}: holds another run, with other {', '.join(changed)}; name a new folder")
        if changed:
            for name in (*FOLDERS, "work"):
                shutil.rmtree(folder / name, ignore_errors=True)
            write_json(note, ours)
    elif folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: is not empty and no run of curation; name a new folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(note, ours)


class _Executor(LocalPipelineExecutor):
    """datatrove's executor, except that it notices a killed worker and logs only to its files."""

    def run(self) -> None:
        left = self.get_incomplete_ranks()
        if self.workers == 1 or len(left) < 2:
            for rank in left:
                self._run_for_rank(rank)
            return
        # a fork has the benchmarks and dictionaries at once
        method = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        with ProcessPoolExecutor(min(self.workers, len(left)), method) as pool:
            try:
                for done in [pool.submit(self._run_for_rank, rank) for rank in left]:
                    done.result()
            except BrokenProcessPool:
                raise ChildProcessError(
                    "a worker was killed, perhaps for want of memory; rerun with fewer --workers to resume"
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)

    def _run_for_rank(self, *arguments: Any, **options: Any) -> Any:
        with contextlib.redirect_stderr(io.StringIO()):
            return super()._run_for_rank(*arguments, **options)


def _execute(pipeline: list[Callable], tasks: int, workers: int, folder: Path) -> None:
    logger.disable("datatrove")
    try:
        _Executor(pipeline, tasks, workers, str(folder)).run()
    finally:
        logger.enable("datatrove")


_BUILT: dict[str, tuple[str, list[tuple[str, BaseFilter]]]] = {}  # of this process: kind -> config and filters


def _filters(config: Curation) -> list[tuple[str, BaseFilter]]:
    """The filters by rules, built once."""
    if _BUILT.get("rules", ("",))[0] != repr(config):
        _BUILT["rules"] = repr(config), steps.filters(config)
    return _BUILT["rules"][1]


def _models(config: Curation) -> list[tuple[str, BaseFilter]]:
    """The filters by models, loaded once."""
    if not any(getattr(config, name) for name in MODELS):
        return []
    if _BUILT.get("models", ("",))[0] != repr(config):
        from fathom.curation import models  # with torch

        _BUILT["models"] = repr(config), models.filters(config)
    return _BUILT["models"][1]


def _part(folder: Path, rank: int) -> Path:
    return folder / f"part_{rank}.jsonl"


def _sift(
    _: Any, rank: int, world_size: int, *, raw: Path, plan: list[list[Piece]], folder: Path, config: Curation
) -> None:
    account, keys, signatures = Account(), [], []
    work = folder / "work" / "sift"
    with contextlib.ExitStack() as stack:

        def opened(path: Path) -> io.TextIOWrapper:
            path.parent.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(
                stack.enter_context(whole(path)).open("w", encoding="utf-8", errors="backslashreplace")
            )

        kept, dropped, lines = (opened(_part(f, rank)) for f in (work / "kept", work / "dropped", folder / "lines"))
        for document in _read(raw, plan[rank], config, account, dropped):
            if not _passes(document, _filters(config), account, dropped):
                continue
            for number, rule, line in document.metadata.pop("removed", []):
                account.lines_taken[rule] += 1
                account.example(f"line: {rule}", line, f"{document.id}, line {number}")
                lines.write(_line({"id": document.id, "line": number, "rule": rule, "text": line}))
            kept.write(_line({"text": document.text, "id": document.id, "meta": document.metadata}))
            keys.append(digest(document.text))
            if config.near_duplicates:
                signatures.append(signature(identities(document.text), config))
    _save_keys(
        work, rank, np.frombuffer(b"".join(keys), dtype="V16"), signatures if config.near_duplicates else None, config
    )
    write_json(work / f"account_{rank}.json", account.to_dict())


def _read(raw: Path, pieces: list[Piece], config: Curation, account: Account, dropped: Any) -> Iterator[Document]:
    """The documents of a shard; what cannot be read is counted, and dropped or refused."""
    for piece in pieces:
        for document in documents(raw, piece, config):
            if isinstance(document, Unreadable):
                if config.malformed == "stop":
                    raise ValueError(f"{document.why}; mend it, or set malformed to drop")
                account.read("")
                account.drop("reading", "malformed", "", document.id, document.why)
                dropped.write(_dropped(document.id, "reading", "malformed", document.why, ""))
            else:
                account.read(document.text)
                if document.text.strip():
                    yield document
                else:
                    account.drop("reading", "no text", document.text, document.id)
                    dropped.write(_dropped(document.id, "reading", "no text", "", ""))


def _passes(document: Document, filters: list[tuple[str, BaseFilter]], account: Account, dropped: Any) -> bool:
    original = document.text
    for step, one in filters:
        result, reason = get_filter_result(one.filter(document))
        if step == "language":
            account.languages[document.metadata["language"]] += 1
        if not result:
            detail, reason = document.metadata.get("detail", ""), reason or step
            account.drop(step, reason, original, document.id, detail)
            dropped.write(_dropped(document.id, step, reason, detail, original))
            return False
    return True


def _match(work: Path, tasks: int, config: Curation) -> None:
    """Write for every shard which of its documents are copies, of what, and how alike they are."""
    for rank in range(tasks):
        before = work / "sift" / f"keys_{rank}.npz"  # of a run that an earlier version began
        if before.is_file() and not (work / "sift" / f"digests_{rank}.npy").is_file():
            with np.load(before) as keys:
                _save_keys(work / "sift", rank, keys["digests"], keys.get("signatures"), config)
    loaded = [np.load(work / "sift" / f"digests_{rank}.npy") for rank in range(tasks)]
    starts = np.cumsum([0, *map(len, loaded)])
    band = functools.partial(_band, work / "sift", tasks) if config.near_duplicates else None
    found = matches(np.concatenate(loaded), band, config)
    names = _names(work, {match.original for match in found}, starts)
    copies: list[dict[str, Any]] = [{} for _ in range(tasks)]
    for match in found:
        rank = int(np.searchsorted(starts, match.number, side="right")) - 1
        reason = "equal text" if match.similarity is None else "near duplicate"
        alike = "" if match.similarity is None else f", {match.similarity:.2f} alike"
        copies[rank][str(match.number - starts[rank])] = [reason, f"of {names[match.original]}{alike}"]
    for rank, some in enumerate(copies):
        write_json(work / f"copies_{rank}.json", some)
    (work / "matched").touch()


def _band(folder: Path, tasks: int, number: int) -> np.ndarray:
    """A band of the signatures of all shards, [documents, permutations of a band]."""
    return np.concatenate([np.load(folder / f"bands_{rank}.npy", mmap_mode="r")[number] for rank in range(tasks)])


def _save_keys(work: Path, rank: int, digests: np.ndarray, signatures: Any, config: Curation) -> None:
    """Keep a shard's digests, and its signatures [documents, permutations] band by band; the digests come last."""
    if signatures is not None:
        rows = np.array(signatures, dtype=np.uint32)
        rows = rows.reshape(len(digests), config.bands, config.permutations // config.bands)
        _save(work / f"bands_{rank}.npy", np.ascontiguousarray(rows.transpose(1, 0, 2)))
    _save(work / f"digests_{rank}.npy", digests)


def _save(path: Path, array: np.ndarray) -> None:
    with whole(path) as partial, partial.open("wb") as file:
        np.save(file, array)


def _names(work: Path, numbers: set[int], starts: np.ndarray) -> dict[int, str]:
    """Ids of documents by their numbers."""
    names = {}
    for rank in sorted({int(np.searchsorted(starts, number, side="right")) - 1 for number in numbers}):
        with _part(work / "sift" / "kept", rank).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=int(starts[rank])):
                if number in numbers:
                    names[number] = json.loads(line)["id"]
    return names


def _gather(_: Any, rank: int, world_size: int, *, folder: Path, config: Curation) -> None:
    work, account = folder / "work", Account()
    copies = json.loads((work / f"copies_{rank}.json").read_text(encoding="utf-8"))
    asked = _models(config)
    with contextlib.ExitStack() as stack:
        corpus, dropped = (
            stack.enter_context(
                stack.enter_context(whole(_part(folder / name, rank))).open(
                    "w", encoding="utf-8", errors="backslashreplace"
                )
            )
            for name in ("corpus", "dropped")
        )
        with _part(work / "sift" / "dropped", rank).open(encoding="utf-8") as earlier:
            shutil.copyfileobj(earlier, dropped)
        with _part(work / "sift" / "kept", rank).open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                row = json.loads(line)
                if str(number) in copies:
                    reason, detail = copies[str(number)]
                    account.drop("duplicates", reason, row["text"], row["id"], detail)
                    dropped.write(_dropped(row["id"], "duplicates", reason, detail, row["text"]))
                    continue
                document = Document(row["text"], row["id"], metadata=row["meta"])
                if _passes(document, asked, account, dropped):
                    account.keep(document.text)
                    corpus.write(_line({"text": document.text, "meta": {"id": document.id, **document.metadata}}))
    write_json(work / f"account_{rank}.json", account.to_dict())


def _account(work: Path, tasks: int) -> Account:
    """The sum of both stages of every task. Raises RuntimeError if it does not add up."""
    total = Account()
    for stage in (work / "sift", work):
        for rank in range(tasks):
            total += Account.from_dict(json.loads((stage / f"account_{rank}.json").read_text(encoding="utf-8")))
    total.check()
    places = {step: place for place, step in enumerate(steps.ORDER)}
    total.dropped = dict(sorted(total.dropped.items(), key=lambda item: places.get(item[0], len(places))))
    return total


def _dropped(name: str, step: str, reason: str, detail: str, text: str) -> str:
    return _line(
        {
            "id": name,
            "step": step,
            "reason": reason,
            "detail": detail,
            "lines": line_count(text),
            "excerpt": excerpt(text),
        }
    )


def _line(row: dict[str, Any]) -> str:
    """A row of JSONL; halves of pairs in its other fields are written as `\\ud800`, which JSON reads."""
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"  # what filters of datatrove leave in metadata


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else multiprocessing.cpu_count()
