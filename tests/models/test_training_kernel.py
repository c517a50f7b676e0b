"""Under torch.compile a plain training step keeps the causal attention kernel: no [T, T] mask is built."""

import pytest
import torch

from tiny import tiny_model


@pytest.mark.parametrize("position_ids", [None, "packed"])
def test_compiled_training_is_causal_without_a_mask(position_ids):
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = tiny_model().train()
    tokens = torch.randint(0, model.config.vocab_size, (2, 16))
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if position_ids == "packed":  # two documents of 8: only the caller's own ids may cost a mask
        inputs["position_ids"] = torch.arange(8).repeat(2, 2)
    torch.compile(model, backend=record, fullgraph=True)(**inputs)
    attention = [node for g in graphs for node in g.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(attention) == model.config.num_hidden_layers
    for node in attention:
        assert (node.kwargs["attn_mask"] is None) == (position_ids is None)
        assert node.kwargs["is_causal"] == (position_ids is None)


@pytest.mark.parametrize("mixer", [{}, {"k_norm_position": "post_rope"}])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mixers_see_half_precision_keys_under_autocast(monkeypatch, family, mixer):
    """fp32 keys and queries would double what a cross-layer mixer reads and keeps for its backward pass."""
    if mixer and family == "llama":
        pytest.skip("no QK-norm")
    seen = set()
    model = tiny_model(family, mixer={"name": "depth_attention", **mixer}).train()
    forward = model.model.mixer.forward

    def record(query, key, value, sources, layer):
        states = [tensor for state in sources for tensor in state]
        seen.update(tensor.dtype for tensor in (query, key, value, *states))
        return forward(query, key, value, sources, layer)

    monkeypatch.setattr(model.model.mixer, "forward", record)
    tokens = torch.randint(0, model.config.vocab_size, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens, labels=tokens, use_cache=False)
    assert seen == {torch.bfloat16}
