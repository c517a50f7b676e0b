"""DenseFormer against its equations, its initial values and its costs."""

import pytest
import torch

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import mixing_per_token
from fathom.residuals.denseformer import DenseFormer
from reference import fresh_models, head, sublayer_functions
from tiny import SIZES, assert_close, tiny_model, tokens


def averages_of(dilation: int, period: int, layers: int) -> dict[int, list[int]]:
    """Which X_j every Y_n reads, as the paper's Figure 2 draws them."""
    return {n: [j for j in range(n + 1) if (n - j) % dilation == 0] for n in range(1, layers + 1) if n % period == 0}


@pytest.mark.parametrize("dilation,period", [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_logits_equal_the_equations(family, dilation, period):
    options = {"name": "denseformer", "dilation": dilation, "period": period}
    model = tiny_model(family, num_hidden_layers=5, residual=options).double()
    ids = tokens(2, 7)
    with torch.no_grad():
        embedding, functions = sublayer_functions(model, ids)
        halves = len(functions) // 5
        outputs, current = [embedding], embedding
        for n in range(1, 6):
            for f in functions[(n - 1) * halves : n * halves]:
                current = current + f(current)
            outputs.append(current)  # X_n, before its own average
            if n in averages_of(dilation, period, 5):
                weights = model.model.residual.averages[str(n)].weight
                sources = averages_of(dilation, period, 5)[n]
                assert len(weights) == len(sources)
                current = torch.zeros_like(current)
                for weight, j in zip(weights.tolist(), sources):
                    current += weight * outputs[j]
        assert_close(model(ids).logits, head(model, current), 1e-12)


def test_a_new_model_is_vanilla_bit_by_bit(tmp_path):
    ids = tokens(2, 9)
    for model in fresh_models(tmp_path, residual={"name": "denseformer"}):
        added = {name for name in model.state_dict() if name.startswith("model.residual.")}
        vanilla = FathomForCausalLM(FathomConfig(**{**SIZES, "init": "hf"})).eval()
        vanilla.load_state_dict({name: t for name, t in model.state_dict().items() if name not in added})
        with torch.no_grad():
            assert torch.equal(model.eval()(ids).logits, vanilla(ids).logits)
        assert [w.tolist() for w in model.model.residual.parameters()] == [[0, 1], [0, 0, 1]]


@pytest.mark.parametrize("layers", [1, 2, 48])
def test_parameters_are_half_of_layers_times_layers_plus_3(layers):
    config = FathomConfig(num_hidden_layers=layers)
    assert DenseFormer.counts(config, DenseFormer.Options()).parameters == layers * (layers + 3) // 2


def test_cost_at_3b_is_the_papers():
    """Depth-Attention's table: 5.01e6 FLOPs and 4.97 MiB per token."""
    config = FathomConfig(hidden_size=2048, num_hidden_layers=48, residual={"name": "denseformer"})
    cost = mixing_per_token(config)
    assert cost.flops == 2 * 2048 * sum(n + 1 for n in range(1, 49)) == 5_013_504
    assert cost.bytes / 2**20 == pytest.approx(4.97, abs=0.005)


def test_only_states_that_a_later_average_reads_are_kept():
    model = tiny_model(num_hidden_layers=6, residual={"name": "denseformer", "dilation": 2, "period": 3})
    assert model.model.residual.kept == [[0], [0, 1], [0, 1, 2], [0, 2], [0, 2, 4], [0, 2, 4], []]


@pytest.mark.parametrize("option", ["dilation", "period"])
def test_options_below_one_are_refused(option):
    with pytest.raises(ValueError, match=f"denseformer option {option}=0"):
        FathomConfig(residual={"name": "denseformer", option: 0})
