"""Attention Residuals against their equations, initial values, source counts and costs."""

import math

import pytest
import torch

from fathom import FathomConfig
from fathom.cost import mixing_per_token
from fathom.residuals.attnres import AttentionResiduals
from reference import fresh_models, head, rms_norm, sublayer_functions
from tiny import assert_close, tiny_model, tokens


def aggregate(reader, sources, eps):
    """One token at a time: softmax over sources of ⟨w, RMSNorm_γ(s)⟩ (+ bias on the last), on the raw sources."""
    out = torch.zeros_like(sources[0])
    for b in range(out.shape[0]):
        for t in range(out.shape[1]):
            scores = [float(reader.query @ rms_norm(s[b, t], reader.gain, eps)) for s in sources]
            if hasattr(reader, "recency"):
                scores[-1] += float(reader.recency)
            total = sum(math.exp(score) for score in scores)
            for score, s in zip(scores, sources):
                out[b, t] += math.exp(score) / total * s[b, t]
    return out


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, None])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_logits_equal_the_equations(family, block_size, reset):
    options = {"name": "attnres", "block_size": block_size, "reset": reset}
    model = tiny_model(family, num_hidden_layers=5, residual=options).double()
    ids, eps = tokens(2, 4), model.config.norm_eps
    seen = []
    with torch.no_grad():
        embedding, functions = sublayer_functions(model, ids)
        size = math.ceil(len(functions) / 8) if block_size is None else block_size
        readers = iter(model.model.residual.readers)
        outputs: list = []  # of all sublayers
        for number in range(len(functions) + 1):
            done = number // size  # completed blocks
            if reset:  # the embedding, sums of completed blocks, sum of the block under way
                sources = [embedding] + [sum(outputs[i * size : (i + 1) * size]) for i in range(done)]
                if number % size:
                    sources.append(sum(outputs[done * size :]))
            else:  # snapshots of the stream, and the stream
                sources = [embedding + sum(outputs[: i * size]) for i in range(done + 1)]
                sources.append(embedding + sum(outputs))
            seen.append(len(sources))
            x = embedding if number == 0 else aggregate(next(readers), sources, eps)
            if number < len(functions):
                outputs.append(functions[number](x))
        assert next(readers, None) is None
        assert_close(model(ids).logits, head(model, x), 1e-11)
    resolved = AttentionResiduals.Options(block_size=block_size, reset=reset)
    assert resolved.sources(len(functions)) == seen[:-1]
    assert resolved.final_sources(len(functions)) == seen[-1]


@pytest.mark.parametrize("reset,sources", [(True, 520), (False, 528)])
def test_source_counts_at_48_layers(reset, sources):
    assert sum(AttentionResiduals.Options(block_size=12, reset=reset).sources(96)) == sources
    assert AttentionResiduals.Options(reset=reset).size(96) == 12  # the default's 8 blocks


def test_cost_at_3b_is_the_papers():
    """Depth-Attention's table: 4.26e6 FLOPs per token. Its 4.44 MiB reads every source twice, a fused kernel once."""
    config = FathomConfig(hidden_size=2048, num_hidden_layers=48, residual={"name": "attnres"})
    cost = mixing_per_token(config)
    assert cost.flops == 4 * 2048 * 520 == 4_259_840
    assert cost.bytes == 2 * 2048 * (519 + 9 + 96)  # without the first sublayer's, with the last aggregator's
    assert pytest.approx(4.44, abs=0.005) == 2 * 2048 * (2 * 520 + 96) / 2**20


@pytest.mark.parametrize("reset", [True, False])
def test_initial_values(tmp_path, reset):
    for model in fresh_models(tmp_path, residual={"name": "attnres", "reset": reset}):
        readers = model.model.residual.readers
        assert len(readers) == 4  # of 4 sublayers the first has none; the last is the final norm's
        for reader in readers:
            assert not reader.query.any() and (reader.gain == 1).all()
            assert reset or reader.recency == 3.0
    count = 4 * (2 * 32 + (not reset))
    assert sum(p.numel() for p in model.model.residual.parameters()) == count


def test_a_new_model_reads_plain_means():
    torch.manual_seed(0)
    reader = tiny_model(residual={"name": "attnres"}).model.residual.readers[0]
    reader.initialize_parameters()
    sources = tuple(torch.randn(3, 2, 4, 32))
    assert_close(reader(sources), sum(sources) / 3, 1e-6)


def test_scores_far_apart_stay_finite():
    reader = tiny_model(residual={"name": "attnres", "reset": False}).model.residual.readers[0]
    with torch.no_grad():
        reader.query.fill_(1e4)
    sources = (torch.ones(1, 1, 32), -torch.ones(1, 1, 32))
    assert_close(reader(sources), sources[0])


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="attnres option block_size=0"):
        FathomConfig(residual={"name": "attnres", "block_size": 0})
    with pytest.raises(ValueError, match="attnres option recency_bias=inf"):
        FathomConfig(residual={"name": "attnres", "recency_bias": math.inf})
