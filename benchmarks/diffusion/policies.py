"""In which order to reveal: policies of a trained masked model at equal forward passes, beside its autoregressive twin.

    forced      nats of held-out text in each policy's own order (forced.py)
    addition    sums filled in anywhere within a row, right answers
    bits        bits per byte, exact for the twin and a bound ± error

python benchmarks/diffusion/policies.py --masked runs/diffusion/masked-seed0/model \\
    --ar runs/diffusion/autoregressive-seed0/model --corpus corpus -o policies
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "recipes")]
from forced import ORDERS, compared, forced, load, rows_of, summary
from make_diffusion_text import documents, equation, equations

from fathom.diffusion import POLICIES
from fathom.evaluate.text import evaluate_text
from fathom.writing import write_json

WAYS: dict[str, Any] = {
    **ORDERS,
    "threshold": POLICIES["threshold"](),
}


def by_forcing(model: Any, truth: torch.Tensor, prompt: int, block: int, steps: list[int], late: Any) -> list[dict]:
    """Nats per token, and against low_confidence on the same rows."""
    found = []
    size = truth.shape[1] - prompt
    for number in steps:
        base = None
        for name, policy in WAYS.items():
            if late():
                return found
            got = forced(model, truth, prompt, 256, block_length=block, steps=number, policy=policy)
            base = base or got["nats"]
            row = {"policy": name, "steps": number, "nfe": got["nfe"], "nats_per_token": summary(got["nats"], size)}
            row |= {"over_low_confidence": compared(got["nats"], base, size), "right": summary(got["right"])}
            found.append(row)
    return found


def sums(tokenizer: Any, rows: int, asked: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of solved sums and then `asked` unsolved ones, with a mask for every digit; and the digits."""
    draw = random.Random(seed)
    given, answers = [], []
    for _ in range(rows):
        ids = tokenizer(equations(draw, 6))["input_ids"]
        right = []
        for _ in range(asked):
            question, answer = equation(draw)
            digits = tokenizer(answer)["input_ids"]
            ids += [*tokenizer(question)["input_ids"], *[-1] * len(digits), *tokenizer(" ;")["input_ids"]]
            right += digits
        given.append(ids)
        answers.append(right)
    return torch.tensor(given), torch.tensor(answers)


@torch.no_grad()
def by_sums(model: Any, ar: Any, tokenizer: Any, rows: int, late: Any) -> list[dict]:
    """Right answers of sums that a row asks for together, one row after the other and by block."""
    asked = 8
    given, answers = sums(tokenizer, rows, asked, 1)
    given, answers = given.to(model.device), answers.to(model.device)
    hidden = given == -1
    masked = given.masked_fill(hidden, model.config.diffusion["mask_token_id"])
    found = []
    filled = given.clone()  # the twin's: greedy, with its own answers before
    for column in range(given.shape[1]):
        if hidden[:, column].any():
            filled[:, column] = ar(input_ids=filled[:, :column], use_cache=False).logits[:, -1].argmax(-1)
    right = (filled[hidden].view_as(answers) == answers).view(rows, asked, -1).all(-1).double().mean(1)
    found.append({"policy": "autoregressive", "steps": asked * 4, "nfe": asked * 4, "right": summary(right.tolist())})
    for steps in (32, 16, 8, 4, 1):
        base = None
        for name, policy in WAYS.items():
            if late():
                return found
            out = model.generate(
                masked, max_new_tokens=0, infill=True, steps=steps, policy=policy, return_dict_in_generate=True
            )
            right = (out.sequences[hidden].view_as(answers) == answers).view(rows, asked, -1).all(-1).double().mean(1)
            right = right.tolist()
            base = base or right
            row = {"policy": name, "steps": steps, "nfe": sum(out.nfe.values()), "right": summary(right)}
            place = torch.arange(4, device=model.device).repeat(asked)
            shown = out.revealed[hidden].view_as(answers).double()
            row["mean_step_of_digit"] = [float(shown[:, place == digit].mean()) for digit in range(4)]
            found.append(row | {"over_low_confidence": compared(right, base)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masked", type=Path, required=True)
    parser.add_argument("--ar", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--parts", default="bits,forced,addition")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="unix seconds after which no part begins")
    parser.add_argument("-o", "--output", type=Path, default=Path("policies"))
    given = parser.parse_args()
    late = lambda: time.time() > given.deadline  # noqa: E731
    model, ar = load(given.masked), load(given.ar)
    tokenizer: Any = AutoTokenizer.from_pretrained(given.masked)
    prose = list(islice(documents(sorted((given.corpus / "validation").glob("*.xz"))), 80))
    given.output.mkdir(parents=True, exist_ok=True)
    truth = rows_of(prose, tokenizer, given.prompt + given.tokens, given.rows, model.device)
    block = given.tokens // 2
    for part in given.parts.split(","):
        if part == "bits":
            texts = [text[:400_000] for text in prose[:2]] + prose[4:]
            texts = texts if given.rows >= 64 else [text[:2000] for text in texts[:3]]
            found: Any = {}
            for name, one in (("autoregressive", ar), ("masked", model)):
                score = evaluate_text(one, tokenizer, texts, window=512, batch_size=64)
                found[name] = {"bits_per_byte": score.bits_per_byte, "tokens": score.tokens, "bytes": score.bytes}
                if one is model:
                    found[name] |= {"error": score.bits_per_byte_error, "draws": score.draws}  # type: ignore[attr-defined]
            write_json(given.output / "bits.json", found)
        if part == "forced":
            steps = [given.tokens // share for share in (2, 1, 4, 8, 16)]
            found = []
            for number in steps:
                found += by_forcing(model, truth, given.prompt, block, [number], late)
                write_json(given.output / "forced.json", found)
            with torch.no_grad():
                log_probs = ar(input_ids=truth, use_cache=False).logits[:, given.prompt - 1 : -1].log_softmax(-1)
                nats = -log_probs.gather(2, truth[:, given.prompt :, None])[..., 0].double().sum(1)
            found.append({"policy": "autoregressive", "nats_per_token": summary(nats.tolist(), given.tokens)})
            write_json(given.output / "forced.json", found)
        if part == "addition":
            write_json(given.output / "addition.json", by_sums(model, ar, tokenizer, given.rows, late))


if __name__ == "__main__":
    main()
