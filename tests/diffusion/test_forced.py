"""benchmarks/diffusion/forced.py, which the results stand on: −log p of given tokens in a policy's order, by a loop."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.diffusion import POLICIES, Dual, SparseDLLM
from tiny import SIZES, perturb

MASK, PROMPT, NEW = 96, 5, 6
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "diffusion" / "forced.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("forced", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["forced"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    section = {"name": "masked", "mask_token_id": MASK}
    made = FathomForMaskedDiffusion(FathomConfig(**{**SIZES, "vocab_size": 97}, diffusion=section)).double()
    perturb(made)
    return made.eval()


def log_probs(model, row):
    with torch.no_grad():
        logits = model(input_ids=row[None]).logits[0]
    logits[:, MASK] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize(("policy", "steps"), [("left_to_right", 6), ("low_confidence", 6), ("low_confidence", 3)])
def test_nats_are_those_of_a_loop(script, model, policy, steps):
    truth = torch.randint(3, MASK, (2, PROMPT + NEW), generator=torch.Generator().manual_seed(1))
    found = script.forced(model, truth, PROMPT, block_length=NEW, steps=steps, policy=POLICIES[policy]())
    for number, row in enumerate(truth):
        canvas, nats, right = row.clone(), 0.0, 0
        canvas[PROMPT:] = MASK
        for _ in range(steps):
            logp = log_probs(model, canvas)
            hidden = (canvas == MASK).nonzero()[:, 0].tolist()
            if policy == "low_confidence":
                hidden.sort(key=lambda j: -float(logp[j].max()))
            for j in hidden[: NEW // steps]:
                nats -= float(logp[j, row[j]])
                right += int(logp[j].argmax() == row[j])
                canvas[j] = row[j]
        assert found["nats"][number] == pytest.approx(nats, rel=1e-6)
        assert found["right"][number] == pytest.approx(right / NEW)
    assert found["nfe"] == steps


def test_caches_and_differences(script, model):
    truth = torch.randint(3, MASK, (3, PROMPT + NEW), generator=torch.Generator().manual_seed(2))
    given = {"block_length": 3, "policy": POLICIES["low_confidence"]()}
    plain = script.forced(model, truth, PROMPT, **given)["nats"]
    assert script.forced(model, truth, PROMPT, block_cache=Dual(refresh=1), **given)["nats"] == pytest.approx(plain)
    kept = script.forced(model, truth, PROMPT, block_cache=SparseDLLM(keep_ratio=0.2), **given)
    gap = script.compared(kept["nats"], plain, NEW)
    assert gap["mean"] == pytest.approx((sum(kept["nats"]) - sum(plain)) / 3 / NEW) and gap["error"] > 0
