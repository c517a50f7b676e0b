"""Loop and pondering against oracles of a few lines on transformers' own models, and what is special to each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from tiny import VOCABULARY, assert_close, tiny_model, tokens

FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2")


def stock_twin(family, folder, **fields):
    """A stock model (base, final norm, head) and the same weights as ours; the embedding scale is 1."""
    tiny_model(family, embed_scale=1.0, **fields).save_stock_pretrained(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()
    return stock, stock.base_model, stock.get_output_embeddings().weight


def ours_with(folder, depth, **fields):
    return FathomForCausalLM.from_pretrained(folder, depth=depth, **fields)


def forward(base, embeddings):
    """F(E): positions, layers, final norm."""
    return base(inputs_embeds=embeddings, use_cache=False).last_hidden_state


def pondered(base, head, ids, steps, scale=1.0, top_k=None, premultiply_steps=False, accumulate=True, temperature=1.0):
    """The paper's equations, nothing shared with the library. Returns the logits and the mixtures."""
    table = scale * base.get_input_embeddings().weight
    start = embeddings = table[ids] * (steps if premultiply_steps and steps else 1)
    thoughts = []
    for _ in range(steps):
        logits = forward(base, embeddings) @ head.T / temperature
        if top_k is not None:
            least = logits.sort(dim=-1).values[..., -top_k, None]
            logits = logits.masked_fill(logits < least, float("-inf"))
        thoughts.append(logits.softmax(-1) @ table)
        embeddings = (embeddings if accumulate else start) + thoughts[-1]
    return forward(base, embeddings) @ head.T, thoughts


def shifted_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


OPTIONS = [
    {"steps": 1},
    {"steps": 3},
    {"steps": 2, "top_k": 5},
    {"steps": 2, "premultiply_steps": True},
    {"steps": 3, "accumulate": False},
    {"steps": 2, "temperature": 0.5},
    {"steps": 2, "scale_embeds": True},
    {"steps": 2, "scale_embeds": False, "softmax_dtype": "model"},
    {"steps": 2, "scale_embeds": True, "premultiply_steps": True, "top_k": 3, "accumulate": False, "temperature": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_pondering_equals_the_equations(family, options, tmp_path):
    _, base, head = stock_twin(family, tmp_path)
    model = ours_with(tmp_path, {"name": "pondering", **options})
    ids = tokens(2, 10)
    plain = {key: value for key, value in options.items() if key not in ("scale_embeds", "softmax_dtype")}
    expected, _ = pondered(base, head, ids, scale=32**0.5 if options.get("scale_embeds") else 1.0, **plain)
    with torch.no_grad():
        assert_close(model(ids).logits, expected.detach())


@pytest.mark.parametrize(
    "options", [{"steps": 2}, {"steps": 2, "top_k": 5}, {"steps": 2, "accumulate": False}], ids=str
)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_go_through_every_pass(options, tied, tmp_path):
    """Detaching any pass, the table or the head would change them."""
    options = {"steps": 2, **options}
    stock, base, head = stock_twin("llama", tmp_path, tie_word_embeddings=tied)
    model = ours_with(tmp_path, {"name": "pondering", **options}).train()
    ids = tokens(2, 10)
    expected = shifted_loss(pondered(base, head, ids, **options)[0], ids)
    expected.backward()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert_close(loss.detach(), expected.detach())
    wanted = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, wanted[name].grad)


@pytest.mark.parametrize("feedback", ["hidden", "hidden_linear"])
@pytest.mark.parametrize("accumulate", [True, False])
def test_hidden_state_feedback(feedback, accumulate, tmp_path):
    _, base, head = stock_twin("llama", tmp_path)
    model = ours_with(tmp_path, {"name": "pondering", "steps": 2, "feedback": feedback, "accumulate": accumulate})
    ids = tokens(2, 10)
    start = embeddings = base.get_input_embeddings()(ids)
    for _ in range(2):
        hidden = forward(base, embeddings)
        thought = hidden if feedback == "hidden" else hidden @ model.depth.feedback_proj.weight.T
        embeddings = (embeddings if accumulate else start) + thought
    with torch.no_grad():
        assert_close(model(ids).logits, (forward(base, embeddings) @ head.T).detach())


@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_loop_equals_the_equations(family, passes, tmp_path):
    """Positions once, no norm between passes, one final norm."""
    _, base, head = stock_twin(family, tmp_path)
    model = ours_with(tmp_path, {"name": "loop", "passes": passes})
    ids = tokens(2, 10)
    with torch.no_grad():
        actual = model(ids).logits
        norm_name = {"gpt_neox": "final_layer_norm", "gpt2": "ln_f"}.get(family, "norm")
        norm = getattr(base, norm_name)
        setattr(base, norm_name, torch.nn.Identity())
        learned = base.wpe(torch.arange(10)) if family == "gpt2" else 0  # the stock class adds them at every call
        hidden = base.get_input_embeddings()(ids) + learned
        for _ in range(passes):
            hidden = forward(base, hidden - learned)
        assert_close(actual, norm(hidden) @ head.T)


# ---------------------------------------------------------------- pondering, one by one


def test_accumulating_is_the_same_for_one_step(tmp_path):
    stock_twin("llama", tmp_path)
    ids = tokens(2, 10)
    with torch.no_grad():
        logits = [
            ours_with(tmp_path, {"name": "pondering", "steps": steps, "accumulate": accumulate})(ids).logits
            for steps in (1, 2)
            for accumulate in (True, False)
        ]
    assert torch.equal(logits[0], logits[1])
    assert (logits[2] - logits[3]).abs().max() > 1e-3


def test_premultiplying_needs_steps(tmp_path):
    """s = 0 is the ordinary decoder, not a decoder on 0·E."""
    stock, _, _ = stock_twin("llama", tmp_path)
    ids = tokens(1, 6)
    with torch.no_grad():
        model = ours_with(tmp_path, {"name": "pondering", "steps": 0, "premultiply_steps": True})
        assert_close(model(ids).logits, stock(ids).logits)


def test_without_steps_no_parameter_is_left_untrained():
    """One without a gradient stops DDP."""
    depth, ids = {"name": "pondering", "steps": 0, "feedback": "hidden_linear"}, tokens(2, 5)
    model = tiny_model(depth=depth).train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert (
        not list(model.depth.parameters())
        and type(model.depth).counts(model.config, model.depth.options).parameters == 0
    )


def test_absent_tokens_receive_gradient_from_the_full_mixture():
    ids = tokens(2, 6)
    absent = torch.ones(VOCABULARY, dtype=torch.bool)
    absent[ids.unique()] = False
    for options, expected in ({"steps": 1}, True), ({"steps": 0}, False), ({"steps": 1, "feedback": "hidden"}, False):
        model = tiny_model("llama", depth={"name": "pondering", **options}).train()
        model(ids, labels=ids).loss.backward()
        touched = model.model.embed_tokens.weight.grad[absent].abs().sum(-1) > 0
        assert touched.all() if expected else not touched.any()


def test_embeddings_given_directly_are_scaled_like_looked_up_ones():
    model = tiny_model("llama", depth={"name": "pondering", "steps": 2, "scale_embeds": True})
    ids = tokens(2, 6)
    with torch.no_grad():
        assert_close(model(inputs_embeds=model.model.embed_tokens(ids)).logits, model(ids).logits, 1e-6)


def test_the_number_of_steps_can_change_at_load_time(tmp_path):
    model = tiny_model("llama", depth={"name": "pondering", "steps": 2, "random_steps": True, "top_k": 7})
    model.save_pretrained(tmp_path)
    ids = tokens(2, 8)
    seen = []
    for steps in (0, 1, 2, 4):
        section = {**model.config.depth, "steps": steps}
        changed = FathomForCausalLM.from_pretrained(tmp_path, depth=section)
        assert changed.config.passes == steps + 1
        with torch.no_grad():
            full = changed(ids).logits
            cache = changed(ids[:, :5], use_cache=True).past_key_values
            assert len(cache.layers) == 2 * (steps + 1)
            assert_close(changed(ids[:, 5:], past_key_values=cache).logits, full[:, 5:])
        seen.append(full)
    with torch.no_grad():
        assert torch.equal(seen[2], model(ids).logits)
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(seen) for b in seen[:i])


def passes_of(model, ids):
    calls = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    model(ids)
    hook.remove()
    return len(calls)


def test_random_steps_are_uniform_in_training_and_off_in_evaluation():
    model = tiny_model("llama", depth={"name": "pondering", "steps": 3, "random_steps": True})
    ids = tokens(1, 3)
    torch.manual_seed(0)
    drawn = [passes_of(model.train(), ids) for _ in range(120)]
    assert {2, 3, 4} == set(drawn)
    assert all(25 <= drawn.count(n) <= 55 for n in (2, 3, 4))
    torch.manual_seed(0)
    assert [passes_of(model, ids) for _ in range(20)] == drawn[:20]
    assert {passes_of(model.eval(), ids) for _ in range(5)} == {4}


def test_random_steps_of_rank_0_count_for_all_ranks(monkeypatch):
    def broadcast(tensor, src):
        assert src == 0
        tensor.fill_(3)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    model = tiny_model("llama", depth={"name": "pondering", "steps": 3, "random_steps": True})
    assert {model.depth.draw_steps(torch.device("cpu")) for _ in range(20)} == {3}


def test_premultiply_uses_the_steps_of_the_call(monkeypatch, tmp_path):
    _, base, head = stock_twin("llama", tmp_path)
    section = {"name": "pondering", "steps": 3, "premultiply_steps": True, "random_steps": True}
    model = ours_with(tmp_path, section).train()
    monkeypatch.setattr(model.depth, "draw_steps", lambda device: 2)
    ids = tokens(1, 6)
    expected, _ = pondered(base, head, ids, 2, premultiply_steps=True)
    assert_close(model(ids).logits.detach(), expected.detach())


def test_scale_embeds_sets_one_field_of_the_decoder():
    for scale_embeds, expected in (True, 32**0.5), (False, 1.0):
        section = {"name": "pondering", "scale_embeds": scale_embeds}
        config = FathomConfig(hidden_size=32, depth=section)
        assert config.embed_scale == pytest.approx(expected)
    assert FathomConfig(hidden_size=32, depth="pondering", embed_scale=3.0).embed_scale == 3.0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "pondering", "steps": -1}, "pondering option steps=-1: must be an integer of at least 0"),
        ({"name": "pondering", "top_k": 0}, "pondering option top_k=0"),
        ({"name": "pondering", "top_k": VOCABULARY + 1}, f"top_k={VOCABULARY + 1} exceeds vocab_size={VOCABULARY}"),
        ({"name": "pondering", "temperature": 0.0}, "pondering option temperature=0.0: must be positive"),
        ({"name": "loop", "passes": 0}, "loop option passes=0: must be an integer of at least 1"),
        ({"name": "loop", "steps": 2}, "loop' has no option 'steps'"),
        ({"passes": 2}, 'depth needs a "name"'),
        ({"name": None}, 'depth needs a "name", got'),
        (5, 'depth needs a "name", got 5'),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(section, message):
    with pytest.raises(ValueError, match=message):
        FathomConfig(vocab_size=VOCABULARY, depth=section)


@pytest.mark.parametrize(
    "depth", [{"name": "vanilla"}, {"name": "loop", "passes": 2}, {"name": "pondering", "steps": 2}]
)
def test_learned_positions_count_attended_tokens(depth):
    """Rotary models cannot tell: a row that starts at position 3 has the same logits. GPT-2 can."""
    model = tiny_model("gpt2", depth=depth)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        alone = model(ids[:1, 3:]).logits
        assert_close(model(ids, attention_mask=mask).logits[:1, 3:], alone)
        cache, pieces = None, []
        for seen, chunk in ((5, ids[:, :5]), (8, ids[:, 5:8]), (9, ids[:, 8:])):
            out = model(chunk, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
        assert_close(torch.cat(pieces, dim=1)[:1, 3:], alone)
        assert (model(ids[:1, 3:], position_ids=torch.arange(3, 9)[None]).logits - alone).abs().max() > 1e-3
