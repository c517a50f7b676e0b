"""What relations, adapters and PICARD cost a T5: training steps, greedy decoding, beams; ratios in one process.

    python benchmarks/tables/speed.py OUT.json            one GPU: T5-base's shape, B 16, source 512, target 64, bf16
    python benchmarks/tables/speed.py OUT.json --tiny     CPU

Weights are random. Each time is the median of repeats that take turns between the models. Layers are compiled one by
one, but for the first of encoder and decoder, which holds the position bias. PICARD reads a right query of 60 tokens
that the logits are bent to, so that every check has a query to read.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import inject_adapter_in_model
from transformers import LogitsProcessor

from fathom.data.tokenizer import train_bpe
from fathom.models.encoder_configs import FathomT5Config
from fathom.models.seq2seq_t5 import FathomT5ForConditionalGeneration
from fathom.tables.database import Database
from fathom.tables.picard import Picard
from fathom.tables.source import answer_text
from fathom.tables.text.adapter import KnowledgeAdapterConfig

BASE = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}
TINY = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
QUERY = (
    "select t1.name, count(*) from singer as t1 join song as t2 on t1.singer_id = t2.singer_id where t2.sales > 300000 "
    "group by t1.name having count(*) > 1 order by count(*) desc limit 3"
)


class Bent(LogitsProcessor):
    """Logits that lead to an answer: its next token is far the likeliest, and tokens of no text are ruled out."""

    def __init__(self, answer: list[int], known: int):
        self.answer, self.known = answer, known

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.known :] = -torch.inf
        scores[:, self.answer[min(input_ids.shape[1] - 1, len(self.answer) - 1)]] += 1000
        return scores


def measured(forms: dict[str, Callable[[], Any]], repeats: int, cuda: bool, warm: int = 2) -> dict[str, Any]:
    """Milliseconds of each form, in turns."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(repeats + warm):
        for name, form in forms.items():
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            form()
            if cuda:
                torch.cuda.synchronize()
            if number >= warm:
                times[name].append(1000 * (time.perf_counter() - began))
    return {
        name: {"median_ms": statistics.median(taken), "range_ms": [min(taken), max(taken)]}
        for name, taken in times.items()
    }


def over(found: dict[str, Any], one: str, other: str) -> float:
    return found[one]["median_ms"] / found[other]["median_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--parts", default="eager,greedy,compiled,picard", help="in this order")
    parser.add_argument("--until", type=float, default=float("inf"), help="unix time that no part should pass")
    args = parser.parse_args()
    began = time.perf_counter()
    cuda = torch.cuda.is_available() and not args.tiny
    device, shape = ("cuda", BASE) if cuda else ("cpu", TINY)
    batch, source, target, new = (16, 512, 64, 64) if cuda else (2, 32, 8, 8)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    models: dict[str, Any] = {}
    for name, relations, backend in (
        ("plain", "none", "eager"), ("plain_sdpa", "none", "sdpa"), ("rasat", "rasat", "eager"),
    ):  # fmt: skip
        config = FathomT5Config(
            **shape, vocab_size=32_128, relations={"name": relations}, dropout_rate=0.0, decoder_start_token_id=0
        )
        with torch.device(device):
            models[name] = FathomT5ForConditionalGeneration._from_config(config, attn_implementation=backend)
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-5, fused=cuda) for name, m in models.items()}
    words = torch.randint(2, 30_000, (batch, source), generator=generator).to(device)
    inputs: dict[str, Any] = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    labels = torch.randint(2, 30_000, (batch, target), generator=generator).to(device)
    ids = torch.randint(0, 46, (batch, source, source), generator=generator).to(torch.uint8).to(device)
    found: dict[str, Any] = {
        "about": {
            "device": torch.cuda.get_device_name() if cuda else platform.machine(), "torch": torch.__version__,
            "shape": shape, "batch": batch, "source": source, "target": target, "repeats": args.repeats,
        }
    }  # fmt: skip

    def given(name: str, rows: int = batch) -> dict[str, Any]:
        own = {key: value[:rows] for key, value in inputs.items()}
        return own | ({"relation_ids": ids[:rows]} if name == "rasat" else {})

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            with torch.autocast(device, torch.bfloat16):
                loss = models[name](**given(name), labels=labels, use_cache=False).loss
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()

        return run

    def write(model: Any, name: str, rows: int, **options: Any) -> Callable[[], Any]:
        @torch.no_grad()
        def run() -> Any:
            with torch.autocast(device, torch.bfloat16):
                return model.generate(
                    **given(name, rows), max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
                )

        return run

    def keep(name: str, rows: dict[str, Any], **ratios: float) -> None:
        found[name] = {"rows": rows, **ratios, "at_second": round(time.perf_counter() - began, 1)}
        args.output.write_text(json.dumps(found, indent=2), encoding="utf-8")
        print(name, json.dumps(found[name]), flush=True)

    def late(needs: float) -> bool:
        """Whether a part of so many seconds would pass the time."""
        return time.time() + needs > args.until

    def step_compiled() -> None:
        compiled, names = time.perf_counter(), ("plain", "rasat")
        blocks = {name: [*models[name].encoder.block[1:], *models[name].decoder.block[1:]] for name in names}
        for some in blocks.values():
            for block in some:
                block.compile()
        for name in names:
            step(name)()
        compiled = time.perf_counter() - compiled
        rows = measured({name: step(name) for name in names}, args.repeats, cuda)
        keep("step_compiled", rows, over_plain=over(rows, "rasat", "plain"), compiling_s=round(compiled, 1))
        for some in blocks.values():
            for block in some:
                block._compiled_call_impl = None  # generate() below is eager again

    def step_eager() -> None:
        rows = measured({name: step(name) for name in models}, args.repeats, cuda)
        keep("step_eager", rows, over_plain=over(rows, "rasat", "plain"), over_sdpa=over(rows, "rasat", "plain_sdpa"))

    def greedy() -> None:
        adapted = inject_adapter_in_model(KnowledgeAdapterConfig(), copy.deepcopy(models["plain"]))
        adapted.requires_grad_(True)  # as plain's: autocast keeps no copies of frozen weights between steps
        some = {"plain": models["plain"], "rasat": models["rasat"], "adapter": adapted}
        forms = {name: write(model, name, batch, num_beams=1) for name, model in some.items()}
        rows = measured(forms, 3, cuda, warm=1)
        keep("greedy", rows, **{f"{name}_over_plain": over(rows, name, "plain") for name in ("rasat", "adapter")})

    text = answer_text(QUERY, "concert")
    tokenizer = train_bpe([text] * 4 + [QUERY, "what are the names of singers with a song that sold well ?"] * 3, 330)
    answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "concert.sqlite"
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE singer (singer_id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INTEGER)")
        connection.execute(
            "CREATE TABLE song (song_id INTEGER PRIMARY KEY, title TEXT, singer_id INTEGER, sales INTEGER)"
        )
        connection.close()
        with Database(path) as database:
            schema = database.schema
    checks: dict[str, int] = {}

    def beams(picard: bool, rows: int, width: int) -> Callable[[], Any]:
        @torch.no_grad()
        def run() -> None:
            processors: list[Any] = [Bent(answer, len(tokenizer))]
            if picard:
                processors.append(Picard().processor(tokenizer, {schema.name: schema}, [schema.name] * rows))
            with torch.autocast(device, torch.bfloat16):
                models["rasat"].generate(
                    **given("rasat", rows), max_new_tokens=len(answer), num_beams=width, do_sample=False,
                    eos_token_id=tokenizer.eos_token_id, logits_processor=processors,
                )  # fmt: skip
            if picard:
                checks[f"{rows} x {width}"] = processors[1].checked

        return run

    def picard() -> None:
        for rows_, width in ((1, 4), (batch, 1)):
            if late(12):
                return
            forms = {"free": beams(False, rows_, width), "picard": beams(True, rows_, width)}
            rows = measured(forms, 2, cuda, warm=1)
            keep(f"picard_{rows_}x{width}", rows, over_free=over(rows, "picard", "free"), tokens=len(answer),
                 checks=checks[f"{rows_} x {width}"])  # fmt: skip

    parts = {"eager": (step_eager, 10), "greedy": (greedy, 15), "compiled": (step_compiled, 40), "picard": (picard, 12)}
    for name in args.parts.split(","):
        part, needs = parts[name]
        if not late(needs):
            part()


if __name__ == "__main__":
    main()
