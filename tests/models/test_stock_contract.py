"""What other tools hook on a stock Llama is here too: modules, arguments, attention registry, outputs, caches."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from stock import stock_model
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fathom import FathomForCausalLM
from tiny import assert_close, tiny_model, tokens

LOOP = {"depth": {"name": "loop", "passes": 2}}


@pytest.fixture
def pair(tmp_path):
    """A stock Llama and ours with its weights."""
    stock_model("llama").save_pretrained(tmp_path)
    return LlamaForCausalLM.from_pretrained(tmp_path), FathomForCausalLM.from_pretrained(tmp_path)


def arguments_of_attention(model, ids):
    seen = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append((m, args, kwargs)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids, use_cache=True)
    for hook in hooks:
        hook.remove()
    return seen


def test_attention_modules_see_what_the_stock_ones_see(pair):
    stock, ours = pair
    ids = tokens(2, 9)
    for (theirs, _, expected), (mine, positional, got) in zip(
        arguments_of_attention(stock, ids), arguments_of_attention(ours, ids), strict=True
    ):
        assert positional == ()
        assert mine.layer_idx == theirs.layer_idx
        assert {"hidden_states", "position_embeddings", "attention_mask"} <= got.keys()
        assert expected.keys() <= got.keys()  # the cache is among them, under this version's name
        torch.testing.assert_close(got["hidden_states"], expected["hidden_states"], rtol=0, atol=1e-6)
        for a, b in zip(got["position_embeddings"], expected["position_embeddings"], strict=True):
            assert torch.equal(a.expand_as(b), b)
        cache = [value for value in got.values() if isinstance(value, DynamicCache)]
        assert len(cache) == 1
        for name in ("num_key_value_groups", "head_dim", "scaling", "is_causal", "config", "attention_dropout"):
            if name != "config":
                assert getattr(mine, name) == getattr(theirs, name)
        assert mine.config is ours.config


def test_modules_have_the_stock_names_and_shapes(pair):
    stock, ours = pair
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in stock.named_parameters()}
    names = {name for name, _ in ours.named_modules()}
    assert {name for name, _ in stock.named_modules()} <= names
    x, positions = torch.zeros(1, 5, 32), torch.arange(5)[None]
    for a, b in zip(ours.model.rotary_emb(x, positions), stock.model.rotary_emb(x, positions), strict=True):
        assert torch.equal(a, b)
    assert ours.get_input_embeddings() is ours.model.embed_tokens
    assert ours.get_output_embeddings() is ours.lm_head
    assert "logits_to_keep" in inspect.signature(ours.forward).parameters


def test_a_hook_on_attention_output_acts(pair):
    """What steering, pruning and press tools do: change what a module returns."""
    ids = tokens(2, 9)
    results = []
    for model in pair:
        hook = model.model.layers[0].self_attn.register_forward_hook(lambda m, i, out: (out[0] * 0.5, *out[1:]))
        with torch.no_grad():
            results.append(model(ids).logits)
        hook.remove()
    assert_close(results[1], results[0])


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "qwen3"])
def test_a_registered_attention_function_replaces_attention(family):
    calls = []

    def halved(module, query, key, value, attention_mask, **kwargs):
        calls.append((module.layer_idx, kwargs["scaling"], kwargs["dropout"]))
        out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return out * 0.5, weights

    AttentionInterface.register("fathom_test_halved", halved)
    model = tiny_model(family, **LOOP)
    ids = tokens(2, 9)
    with torch.no_grad():
        plain = model(ids).logits
        model.set_attn_implementation("fathom_test_halved")
        changed = model(ids).logits
    assert calls == [(0, 8**-0.5, 0.0), (1, 8**-0.5, 0.0)] * 2 if family != "qwen3" else len(calls) == 4
    assert (changed - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("llama", "sdpa"), ("gpt_neox", "sdpa"), ("gpt2", "sdpa"), ("llama", "flex_attention")],  # flex compiles: slow
)
def test_attention_backends_equal_eager(family, implementation):
    model = tiny_model(family, **LOOP)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation(implementation)
        assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])


def test_a_stock_lora_adapter_loads_with_equal_logits(pair, tmp_path):
    stock, ours = pair
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    trained = get_peft_model(stock, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=1.0)
    ids = tokens(2, 9)
    for _ in range(3):  # B starts at zero: one step would leave A untouched
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    trained.save_pretrained(tmp_path / "adapter")
    trained.eval()
    with torch.no_grad():
        plain = ours(ids).logits
        adapted = PeftModel.from_pretrained(ours, tmp_path / "adapter")
        expected = trained(ids).logits
        assert (expected - plain).abs().max() > 1e-2
        assert_close(adapted(ids).logits, expected)
        assert_close(adapted.merge_and_unload()(ids).logits, expected)


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gpt2"])
def test_outputs_equal_the_stock_class(name, tmp_path):
    stock_model(name).save_pretrained(tmp_path)
    models = [
        kind.from_pretrained(tmp_path, attn_implementation="eager")
        for kind in (AutoModelForCausalLM, FathomForCausalLM)
    ]
    ids = tokens(2, 9)
    with torch.no_grad():
        stock, ours = (model(ids, output_hidden_states=True, output_attentions=True) for model in models)
        for field in ("hidden_states", "attentions"):
            theirs, mine = getattr(stock, field), getattr(ours, field)
            assert len(theirs) == len(mine)
            for a, b in zip(mine, theirs, strict=True):
                assert_close(a, b)
        assert [*ours.keys()] == [key for key in stock if key != "cross_attentions"]
        for keep in (1, 3, torch.tensor([0, 4])):
            assert_close(models[1](ids, logits_to_keep=keep).logits, models[0](ids, logits_to_keep=keep).logits)
        plain = models[1](ids, return_dict=False)
        assert isinstance(plain, tuple) and torch.equal(plain[0], ours.logits)
        embedded = models[1](inputs_embeds=models[1].get_input_embeddings()(ids)).logits
        assert_close(embedded, ours.logits, 1e-6)


def test_labels_give_the_stock_loss_and_gradients(pair):
    ids = tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    for extra in ({}, {"num_items_in_batch": torch.tensor(31)}):
        losses = []
        for model in pair:
            model.train().zero_grad()
            out = model(input_ids=ids, labels=labels, **extra)
            out.loss.backward()
            losses.append(out.loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
        expected = dict(pair[0].named_parameters())
        for name, parameter in pair[1].named_parameters():
            assert_close(parameter.grad, expected[name].grad)


def test_multi_pass_models_report_every_layer_run():
    model = tiny_model("llama", **LOOP)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(tokens(2, 9), output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 2 * 2 + 1 and len(out.attentions) == 2 * 2
    assert_close(model.lm_head(out.hidden_states[-1]), out.logits, 1e-6)


def test_exactly_one_input(pair):
    for arguments in ({}, {"input_ids": tokens(1, 2), "inputs_embeds": torch.zeros(1, 2, 32)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            pair[1](**arguments)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_empty_input_is_refused(shape):
    with pytest.raises(ValueError, match=rf"the input is empty \({shape[0]} rows of {shape[1]} tokens\)"):
        tiny_model()(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({}, False),
        ({"depth": {"name": "pondering", "steps": 2}}, False),
        ({"mixer": {"name": "depth_attention"}}, True),
        ({"residual": {"name": "mhc"}}, True),
    ],
    ids=str,
)
def test_reentrant_checkpointing_gives_the_gradients_or_is_refused(fields, refused):
    model, ids = tiny_model(**fields).train(), tokens(2, 7)
    arguments = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    if refused:
        with pytest.raises(ValueError, match="use_reentrant=True loses gradients with mixer="):
            model.gradient_checkpointing_enable(**arguments)
        return
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable(**arguments)
    model.enable_input_require_grads()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")  # the name that every supported version has
@pytest.mark.parametrize("name", ["vanilla", "loop", "pause", "ponderlm2", "ponderlm3", "adaponderlm"])
def test_gradient_checkpointing_and_a_cache_exclude_each_other(name):
    """As in transformers: the layers would write it twice. A past that they would not read is no past."""
    model, ids = tiny_model(depth={"name": name}), tokens(2, 9)
    filled = model(ids[:, :4], use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    torch.manual_seed(0)
    expected = model(ids, labels=ids).loss
    for given in ({}, {"past_key_values": DynamicCache()}):
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="gradient checkpointing in training: use_cache=False instead"):
            out = model(ids, labels=ids, use_cache=True, **given)
        assert out.past_key_values is None and torch.equal(out.loss, expected)
        out.loss.backward()
    with pytest.raises(ValueError, match=r"holds 4 tokens, which layers under gradient checkpointing do not read"):
        model(ids[:, 4:], past_key_values=filled)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = model(ids, use_cache=True).past_key_values
    assert cache is None or (cache.get_seq_length() == 9 and all(layer.keys.numel() for layer in cache.layers))
    model.eval()(ids[:, 4:], past_key_values=filled)
    assert filled.get_seq_length() == 9


def test_a_cache_with_another_number_of_layers_is_refused_by_name():
    model = tiny_model("llama", **LOOP)
    ids = tokens(1, 5)
    vanilla_cache = tiny_model("llama")(ids, use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=r"has 2 layers.*depth='loop'.*2 passes × 2 layers = 4.*empty DynamicCache\(\)"
    ):
        model(ids, past_key_values=vanilla_cache)
    with pytest.raises(ValueError, match=r"has 2 layers.*= 4"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(ValueError, match=r"has 4 layers.*depth='vanilla'.*1 passes × 2 layers = 2"):
        tiny_model("llama")(ids, past_key_values=model(ids, use_cache=True).past_key_values)


def test_an_empty_dynamic_cache_is_filled():
    model = tiny_model("llama", **LOOP)
    ids = tokens(1, 5)
    cache = DynamicCache()
    with torch.no_grad():
        out = model(ids, past_key_values=cache)
        assert out.past_key_values is cache and len(cache.layers) == 4
        expected = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=5, do_sample=False).equal(expected)


def test_use_cache_off_returns_none_and_training_makes_none():
    model = tiny_model("llama", **LOOP)
    assert model(tokens(1, 5), use_cache=False).past_key_values is None
    assert model.train()(tokens(1, 5)).past_key_values is None


@pytest.mark.parametrize("fields", [{}, LOOP, {"depth": {"name": "pondering", "steps": 2}}], ids=str)
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 4}], ids=str)
def test_other_caches_generate_the_same(fields, options):
    model = tiny_model("llama", **fields)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    common = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert model.generate(ids, **common, **options).equal(model.generate(ids, **common))


def test_a_conversation_continues_on_its_cache():
    """generate() given the cache of an earlier call reads only the new tokens."""
    model = tiny_model("gpt_neox", **LOOP)
    config = GenerationConfig(max_new_tokens=5, min_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    first = model.generate(tokens(1, 6), config)
    longer = torch.cat((first.sequences, tokens(1, 3, seed=8)), dim=1)
    again = model.generate(longer, config, past_key_values=first.past_key_values)
    assert again.sequences.equal(model.generate(longer, config).sequences)
