"""mHC against its equations, its initial values and its costs."""

import math

import pytest
import torch

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import mixing_per_token
from fathom.residuals.mhc import ManifoldHyperConnections, sinkhorn
from reference import fresh_models, head, rms_norm, sublayer_functions
from tiny import SIZES, assert_close, tiny_model, tokens


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def maps(connection, streams, n, iterations, eps):
    """h_pre, h_post, H of one token, from its streams [n][d], by the equations, number by number."""
    logits = connection.bias.tolist()
    if connection.dynamic:
        z = (connection.projection.weight @ rms_norm(torch.cat(streams), connection.gain, eps)).tolist()
        alpha = connection.scale.tolist()
        logits = [alpha[min(i // n, 2)] * z[i] + logits[i] for i in range(n * (n + 2))]
    pre, post = [sigmoid(x) for x in logits[:n]], [2 * sigmoid(x) for x in logits[n : 2 * n]]
    h = [[math.exp(logits[2 * n + i * n + j]) for j in range(n)] for i in range(n)]
    for _ in range(iterations):
        columns = [sum(h[i][j] for i in range(n)) for j in range(n)]
        h = [[h[i][j] / columns[j] for j in range(n)] for i in range(n)]
        h = [[value / sum(row) for value in row] for row in h]
    return pre, post, h


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("n,iterations", [(2, 1), (3, 5), (4, 20)])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_logits_equal_the_equations(family, n, iterations, dynamic):
    options = {"name": "mhc", "streams": n, "iterations": iterations, "dynamic": dynamic}
    model = tiny_model(family, residual=options).double()
    residual = model.model.residual
    if dynamic:  # z must matter
        torch.nn.init.constant_(residual.connections[0].scale, 0.7)
    ids, (batch, length) = tokens(2, 3), (2, 3)
    places = [(b, t) for b in range(batch) for t in range(length)]
    with torch.no_grad():
        embedding, functions = sublayer_functions(model, ids)
        streams = [embedding.clone() for _ in range(n)]
        for connection, f in zip(residual.connections, functions, strict=True):
            of = {p: maps(connection, [s[p] for s in streams], n, iterations, model.config.norm_eps) for p in places}
            x = torch.zeros_like(embedding)
            for p in places:
                x[p] = sum(of[p][0][i] * streams[i][p] for i in range(n))
            y, mixed = f(x), [torch.zeros_like(embedding) for _ in range(n)]
            for p in places:
                _, post, h = of[p]
                for i in range(n):
                    mixed[i][p] = sum(h[i][j] * streams[j][p] for j in range(n)) + post[i] * y[p]
            streams = mixed
        shares = [math.exp(x) for x in residual.reduce_logits.tolist()]
        mean = sum(share / sum(shares) * stream for share, stream in zip(shares, streams))
        assert_close(model(ids).logits, head(model, mean), 1e-11)


def test_initial_values(tmp_path):
    for model in fresh_models(tmp_path, residual={"name": "mhc"}):
        residual = model.model.residual
        assert not residual.reduce_logits.any() and len(residual.connections) == 4
        for connection in residual.connections:
            assert (connection.gain == 1).all() and connection.scale.tolist() == pytest.approx([0.01] * 3)
            assert 0 < connection.projection.weight.std() < 0.1
            with torch.no_grad():
                connection.scale.zero_()
                pre, post, mixing = connection((torch.randn(1, 1, 32),) * 4)
            assert pre.flatten().tolist() == pytest.approx([0.25] * 4)
            assert post.flatten().tolist() == [1.0] * 4
            expected = torch.full((4, 4), 0.01 / 3) + torch.eye(4) * (0.99 - 0.01 / 3)
            assert_close(mixing[0, 0], expected)


def test_without_dynamic_weights_a_new_model_is_vanilla(tmp_path):
    ids = tokens(2, 9)
    model, *_ = fresh_models(tmp_path, residual={"name": "mhc", "dynamic": False})
    vanilla = FathomForCausalLM(FathomConfig(**{**SIZES, "init": "hf"})).eval()
    state = {name: t for name, t in model.state_dict().items() if not name.startswith("model.residual.")}
    vanilla.load_state_dict(state)
    with torch.no_grad():
        assert_close(model.eval()(ids).logits, vanilla(ids).logits)


def test_sinkhorn_gives_doubly_stochastic_matrices():
    logits = torch.randn(50, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = sinkhorn(logits, 200)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-1), torch.ones(50, 4, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(-2), torch.ones(50, 4, dtype=torch.float64), atol=1e-6, rtol=0)
    rows = sinkhorn(logits, 1).sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))  # rows come last, so they are exact after any iteration


def test_sinkhorn_takes_large_logits():
    assert sinkhorn(torch.eye(4) * 1e3 + 1e4, 20).isfinite().all()


@pytest.mark.parametrize("dynamic", [True, False])
def test_parameters(dynamic):
    config, n, d, layers = FathomConfig(hidden_size=64, num_hidden_layers=3), 4, 64, 3
    linear = n * d * (n * n + 2 * n) + n * d + 3 if dynamic else 0
    counts = ManifoldHyperConnections.counts(config, ManifoldHyperConnections.Options(dynamic=dynamic))
    assert counts.parameters == 2 * layers * (linear + n * n + 2 * n) + n


def test_cost_at_3b_is_the_papers():
    """Depth-Attention's table: 4.72e7 FLOPs per token."""
    config = FathomConfig(hidden_size=2048, num_hidden_layers=48, residual={"name": "mhc"})
    assert mixing_per_token(config).flops == 96 * 2048 * (2 * 4 * 24 + 2 * (4 + 16 + 4)) == 47_185_920


def test_options_out_of_range_are_refused():
    for option, value in (("streams", 1), ("iterations", 0)):
        with pytest.raises(ValueError, match=f"mhc option {option}={value}"):
            FathomConfig(residual={"name": "mhc", option: value})
