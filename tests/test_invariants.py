"""What every depth method, mixer and residual topology must satisfy, whatever it computes.

The suite reads the registries: a new method is covered by being registered, with its `variants` (option sets that run
here) and its `identity` (options under which it is the ordinary decoder). Nothing here names a method.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import fathom
from fathom import FathomConfig, FathomForCausalLM
from fathom.depth.base import Counts, DepthMethod
from fathom.models.registry import REGISTRIES, SECTIONS
from fathom.train.trainer import compile_layers
from tiny import VOCABULARY, assert_close, tiny_model, tokens

FAMILIES = ("llama", "gpt_neox")  # grouped-query attention, gated MLP; parallel residual, partial rotary, biases


@dataclasses.dataclass(frozen=True)
class Case:
    """One method with one option set on one family. Methods of other sections than depth run under vanilla depth."""

    registry: str
    name: str
    options: tuple[tuple[str, typing.Any], ...]
    family: str

    @property
    def section(self) -> dict[str, typing.Any]:
        return {"name": self.name, **dict(self.options)}

    @property
    def is_first(self) -> bool:
        return dict(self.options) == self.method.variants[0]

    @property
    def method(self) -> typing.Any:
        return REGISTRIES[self.registry][self.name]

    def model(self, **fields: typing.Any) -> FathomForCausalLM:
        return tiny_model(self.family, **{self.registry: self.section, **fields})

    def traced_model(self) -> FathomForCausalLM:
        """With as little to trace as shows every kind of pass: a compiler unrolls layers and sweeps, all of one code.
        What connects layers keeps two of them, and so does vanilla depth."""
        section = {key: min(3, value) if key == "sweeps" and value else value for key, value in self.section.items()}
        alone = self.registry == "depth" and self.name != SECTIONS["depth"].plain[0]
        return self.model(**{self.registry: section}, **({"num_hidden_layers": 1} if alone else {}))


def cases() -> list[typing.Any]:
    """Every variant of every method on every family; what other sections default to is depth's vanilla case."""
    out = []
    for registry, methods in REGISTRIES.items():
        for name, method in methods.items():
            if registry != "depth" and name == SECTIONS[registry].plain[0]:
                continue
            for options in method.variants:
                for family in FAMILIES:
                    written = "-".join(f"{k}={v}" for k, v in options.items())
                    case = Case(registry, name, tuple(options.items()), family)
                    out.append(pytest.param(case, id="-".join(filter(None, (registry, name, written, family)))))
    return out


every_case = pytest.mark.parametrize("case", cases())
every_method = pytest.mark.parametrize(
    ("registry", "name"), [(registry, name) for registry, methods in REGISTRIES.items() for name in methods]
)
every_family = pytest.mark.parametrize("family", FAMILIES)

_models: dict[Case, FathomForCausalLM] = {}


@pytest.fixture
def model(case: Case) -> FathomForCausalLM:
    """The case's model, made once; tests that change it take `case.model()` instead."""
    if case not in _models:
        _models[case] = case.model()
    return _models[case]


def method_parameters(model: FathomForCausalLM) -> dict[str, torch.nn.Parameter]:
    """The parameters that the model's methods own, but for the ordinary feed-forward network's."""
    owners = [
        section.owns
        for name, section in SECTIONS.items()
        if (name, getattr(model.config, name)["name"]) != ("feed_forward", "dense")
    ]
    return {name: p for name, p in model.named_parameters() if any(owner.match(name) for owner in owners)}


def loss_and_gradients(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """In whatever mode the model is in. The seed makes methods that draw at random repeat their draw."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def new_tokens_of(model: FathomForCausalLM, ids: torch.Tensor, **options: typing.Any) -> torch.Tensor:
    """Generated ids without the prompt, a fixed number of them."""
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
    return model.generate(ids, **options)[:, ids.shape[1] :]


# ---------------------------------------------------------------- parameters


@pytest.fixture(scope="module")
def stock_folders(tmp_path_factory) -> dict[str, typing.Any]:
    """A stock checkpoint of every family."""
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        tiny_model(family, init="hf").save_stock_pretrained(folder)
    return folders


@every_case
def test_parameters_that_a_stock_checkpoint_lacks_get_their_initial_values(case, stock_folders):
    """They are made on the meta device: what `initialize_parameters` leaves out is what memory held, here NaN."""
    if case.registry == "feed_forward":  # nothing of the network would be the checkpoint's
        with pytest.raises(ValueError, match=r"weights would be random; `fathom grow` makes a mixture"):
            FathomForCausalLM.from_pretrained(stock_folders[case.family], **{case.registry: case.section})
        return
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    try:
        loaded = FathomForCausalLM.from_pretrained(stock_folders[case.family], **{case.registry: case.section})
    finally:
        torch.use_deterministic_algorithms(deterministic)
    first, second = (method_parameters(FathomForCausalLM(loaded.config)) for _ in range(2))
    added = method_parameters(loaded)
    counts = case.method.counts(loaded.config, case.method.Options(**dict(case.options)))
    assert sum(p.numel() for p in added.values()) == counts.parameters
    adapted = case.registry == "depth" and case.method.adapt is not DepthMethod.adapt
    for name, parameter in added.items():
        assert parameter.isfinite().all(), name
        if not torch.equal(first[name], second[name]):  # drawn from N(initializer_range): the rule of stock checkpoints
            n, std = parameter.numel(), loaded.config.initializer_range
            assert abs(parameter.std() / std - 1) < 5 / (2 * n) ** 0.5 and parameter.mean().abs() < 5 * std / n**0.5, (
                name
            )
        elif not adapted:
            assert torch.equal(parameter, first[name]), name


@every_family
@pytest.mark.parametrize("place", ["method", "module"])
def test_a_parameter_without_an_initial_value_is_refused(family, place, monkeypatch):
    class Careless(REGISTRIES["depth"]["vanilla"]):
        def __init__(self, config, options):
            super().__init__(config, options)
            owner = self if place == "method" else torch.nn.Module()
            owner.gain = torch.nn.Parameter(torch.ones(3))
            self.inner = owner if place == "module" else None

    monkeypatch.setitem(REGISTRIES["depth"], "vanilla", Careless)
    with pytest.raises(TypeError, match=r"has parameters of its own \(gain\) and no initialize_parameters\(\) that"):
        tiny_model(family)


# ---------------------------------------------------------------- the function


@every_method
@every_family
def test_identity_options_give_vanilla_logits(registry, name, family):
    identity = REGISTRIES[registry][name].identity
    if identity is None:
        pytest.skip(f"{registry} method {name} has no identity options")
    vanilla = tiny_model(family)
    model = tiny_model(family, seed=1, **{registry: {"name": name, **identity}})
    state = {**model.state_dict(), **vanilla.state_dict()}
    assert set(state) - set(vanilla.state_dict()) <= set(method_parameters(model))
    model.load_state_dict(state)
    ids = tokens(2, 11)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, vanilla(ids).logits, rtol=0, atol=0)


@every_case
def test_tokens_cannot_change_earlier_outputs(case, model):
    length = 9
    ids = tokens(1, length).repeat(length, 1)
    other = tokens(length, length, seed=2)
    changed = torch.where(torch.ones(length, length).triu(1).bool(), other, ids)  # row t: tokens after t are others
    with torch.no_grad():
        expected, actual = model(ids).logits, model(changed).logits
    for t in range(length):
        assert_close(actual[t, : t + 1], expected[t, : t + 1], 1e-6)
        if t + 1 < length:  # the comparison is not vacuous: the changed token's own output moves
            assert (actual[t, t + 1] - expected[t, t + 1]).abs().max() > 1e-3


@every_case
def test_forward_runs_as_many_slots_as_the_config_says(case, model):
    slots = [0] * len(model.model.layers)  # that went through each layer
    per_token = model.config.passes * model.depth.slots
    ran = []  # of methods whose tokens stop on their own: the steps of every token of a forward
    model.depth.register_forward_hook(lambda module, arguments, output: ran.append(output.trace.get("passes")))

    def count(layer):
        def hook(module, arguments, output):
            slots[layer] += output.shape[1]

        return hook

    hooks = [layer.mlp.register_forward_hook(count(i)) for i, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        cache = model(tokens(2, 5), use_cache=True).past_key_values
        prefill = slots[0]
        options = case.method.Options(**dict(case.options))
        one_by_one = 5 * per_token
        if ran[0] is not None:  # rows wait for the one that has most tokens to run
            one_by_one = sum((ran[0] > step).sum(1).max().item() for step in range(model.depth.slots))
        if case.registry == "depth" and case.method.counts(model.config, options).parallel is not None:
            assert prefill >= one_by_one  # tokens run together may cost more
        else:
            assert prefill == one_by_one
        assert slots == [prefill] * len(slots)
        model(tokens(2, 1), past_key_values=cache)
        decoded = per_token if ran[1] is None else ran[1].max().item()
        assert slots == [prefill + decoded] * len(slots)
    assert len(cache.layers) == model.config.passes * model.config.num_hidden_layers
    assert cache.get_seq_length() == 6
    for hook in hooks:
        hook.remove()


@every_case
def test_parameters_are_vanillas_and_the_documented_ones(case, model):
    added = method_parameters(model)
    shapes = {
        name: p.shape
        for name, p in tiny_model(case.family).named_parameters()
        if not SECTIONS[case.registry].owns.match(name)
    }
    for name in [name for name in shapes if name.endswith("o_proj.weight")]:  # as wide as the heads that attention sees
        shapes[name] = torch.Size((shapes[name][0], model.config.heads_seen * model.config.head_dim))
    assert {n: p.shape for n, p in model.named_parameters() if n not in added} == shapes
    options = case.method.Options(**dict(case.options))
    assert sum(p.numel() for p in added.values()) == case.method.counts(model.config, options).parameters


# ---------------------------------------------------------------- decoding


@every_case
@torch.no_grad()
def test_cached_decode_equals_the_full_forward(case, model):
    ids = tokens(2, 11)
    expected = model(ids, use_cache=False).logits
    for split in ((1,) * 11, (10, 1), (4, 7), (1, 6, 4)):
        cache, pieces = DynamicCache(), []
        for chunk in ids.split(split, dim=1):
            pieces.append(model(chunk, past_key_values=cache, use_cache=True).logits)
        assert cache.get_seq_length() == 11
        assert_close(torch.cat(pieces, dim=1), expected)


@every_case
@torch.no_grad()
def test_a_mask_of_ones_says_that_a_row_is_one_document(case, model):
    """Whatever its position ids do; alone, beside a padded row, and read token by token on a cache."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 20, 21, 22, 24]])
    cache = DynamicCache()
    one_by_one = [
        model(ids[:, n : n + 1], position_ids=positions[:, n : n + 1], past_key_values=cache).logits for n in range(9)
    ]
    expected = torch.cat(one_by_one, dim=1)
    assert_close(model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits, expected)
    mask[1, :4] = 0
    padded = model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    assert_close(padded[:1], expected[:1])
    apart = model(ids, position_ids=positions, use_cache=False).logits  # no mask: documents
    assert (apart - expected)[:, 5:].abs().amax((1, 2)).gt(1e-3).all()


def left_padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tokens(len(lengths), max(lengths))
    mask = torch.tensor([[0] * (max(lengths) - n) + [1] * n for n in lengths])
    return ids.masked_fill(mask == 0, 0), mask


LENGTHS = (3, 8, 1, 5)


@every_case
def test_left_padded_rows_equal_the_rows_alone(case, model):
    ids, mask = left_padded(LENGTHS)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        for row, n in enumerate(LENGTHS):
            assert_close(padded[row, -n:], model(ids[row : row + 1, -n:]).logits[0])


@every_case
def test_left_padded_generation_equals_the_rows_alone(case, model):
    ids, mask = left_padded(LENGTHS)
    together = new_tokens_of(model, ids, attention_mask=mask)
    for row, n in enumerate(LENGTHS):
        assert together[row].tolist() == new_tokens_of(model, ids[row : row + 1, -n:])[0].tolist()


@every_case
def test_greedy_generation_equals_the_argmax_of_full_forwards(case, model):
    ids = tokens(2, 4)
    grown = ids
    for _ in range(6):
        with torch.no_grad():
            scores = model(grown, use_cache=False).logits[:, -1]
        scores[:, model.config.eos_token_id] = float("-inf")  # min_new_tokens forbids it
        grown = torch.cat((grown, scores.argmax(-1, keepdim=True)), dim=1)
    assert new_tokens_of(model, ids).tolist() == grown[:, 4:].tolist()


@every_case
def test_beams_on_the_cache_equal_beams_without(case, model):
    ids, mask = left_padded((5, 3))
    options = {"num_beams": 3, "num_return_sequences": 2, "attention_mask": mask}
    cached = new_tokens_of(model, ids, **options)
    assert cached.shape == (4, 6)
    assert cached.tolist() == new_tokens_of(model, ids, use_cache=False, **options).tolist()
    assert cached[0].tolist() != cached[1].tolist()


@every_case
def test_cache_rows_reorder_repeat_and_select(case, model):
    ids, new = tokens(3, 7), tokens(1, 2, seed=3)
    row_changes = {
        (2, 0, 0): lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        (0, 0, 1, 1, 2, 2): lambda cache: cache.batch_repeat_interleave(2),
        (2, 1): lambda cache: cache.batch_select_indices(torch.tensor([2, 1])),
    }
    for rows, change in row_changes.items():
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            change(cache)
            continuation = new.repeat(len(rows), 1)
            actual = model(continuation, past_key_values=cache).logits
            expected = model(torch.cat((ids[list(rows)], continuation), dim=1)).logits[:, -2:]
        assert_close(actual, expected)


@every_case
def test_a_cropped_cache_continues_exactly(case, model):
    ids, new = tokens(2, 9), tokens(2, 3, seed=3)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        assert cache.is_croppable
        cache.crop(-4)
        actual = model(new, past_key_values=cache).logits
        expected = model(torch.cat((ids[:, :5], new), dim=1)).logits[:, -3:]
    assert_close(actual, expected)


@every_case
def test_assisted_decoding_equals_greedy(case, model):
    ids = tokens(1, 6).repeat(1, 2)  # which a look-up finds
    expected = new_tokens_of(model, ids).tolist()
    assert new_tokens_of(model, ids, assistant_model=tiny_model(case.family, seed=7)).tolist() == expected
    assert new_tokens_of(model, ids, prompt_lookup_num_tokens=3).tolist() == expected


# ---------------------------------------------------------------- saving

FRESH_PROCESS = """
import sys, torch
from jaxtyping import install_import_hook
hook = install_import_hook(["fathom.ops", "fathom.models.vocabulary"], "beartype.beartype")  # shapes checked too
import fathom
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
ids = torch.load(sys.argv[1] + "/ids.pt")
models = [AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{i}").eval() for i in range(int(sys.argv[2]))]
with torch.no_grad():
    torch.save([m(ids).logits for m in models], sys.argv[1] + "/logits.pt")
"""


def test_saved_models_give_equal_logits_in_a_fresh_process(tmp_path):
    every = [parameter.values[0] for parameter in cases()]
    ids = tokens(2, 9)
    torch.save(ids, tmp_path / "ids.pt")
    expected = []
    for i, case in enumerate(every):
        model = case.model()
        model.save_pretrained(tmp_path / str(i))
        with torch.no_grad():
            expected.append(model(ids).logits)
    command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path), str(len(every))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, actual, logits in zip(every, torch.load(tmp_path / "logits.pt"), expected, strict=True):
        assert torch.equal(actual, logits), case


# ---------------------------------------------------------------- training


@every_case
def test_gradients_equal_finite_differences_in_float64(case):
    model = case.model().double().train()
    ids = tokens(2, 6)
    loss, gradients = loss_and_gradients(model, ids)
    assert loss.dtype == torch.float64
    generator = torch.Generator().manual_seed(0)
    step, own, together = 2e-6, method_parameters(model), {}
    for name in gradients:  # a direction through all of a layer's ordinary weights finds a fault in any of them
        layer = None if name in own else re.match(r"model\.layers\.\d+", name)
        together.setdefault(layer[0] if layer else name, []).append(name)
    for place, names in together.items():
        parameters, directions, slope, values = [], [], 0.0, []
        for name in names:
            assert gradients[name] is not None, f"{name} is not used"
            parameters.append(model.get_parameter(name))
            directions.append(torch.randn(parameters[-1].shape, generator=generator, dtype=torch.float64))
            slope += (gradients[name] * directions[-1]).sum().item()
        for sign in (1, -1):
            with torch.no_grad():
                torch._foreach_add_(parameters, directions, alpha=sign * step)
                torch.manual_seed(5)
                values.append(model(input_ids=ids, labels=ids).loss.item())
                torch._foreach_sub_(parameters, directions, alpha=sign * step)
        expected = (values[0] - values[1]) / (2 * step)
        assert abs(slope - expected) <= 5e-7 * max(abs(expected), 1e-2), (place, slope, expected)


@every_case
def test_activation_checkpointing_changes_nothing(case):
    model = case.model().train()
    ids = tokens(2, 7)
    calls = []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    loss, gradients = loss_and_gradients(model, ids)
    eager_calls = len(calls)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, checkpointed = loss_and_gradients(model, ids)
    hook.remove()
    assert len(calls) == 3 * eager_calls  # once, then once forward and once recomputed
    torch.testing.assert_close(again, loss, rtol=0, atol=0)
    for name, gradient in gradients.items():
        if gradient.any():
            assert_close(checkpointed[name], gradient, 1e-6)
        else:  # the router of a step that no token of this random model reaches
            assert not checkpointed[name].any()


@every_case
def test_loss_in_training_mode_equals_the_loss_of_logits(case, model):
    ids = tokens(2, 8)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3, -100)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        torch.testing.assert_close(model(ids, labels=labels).loss, expected)
    trained = copy.deepcopy(model).train()
    outputs = []
    trained.depth.register_forward_hook(lambda module, arguments, output: outputs.append(output))
    said = trained(ids, labels=labels, output_auxiliary=True)
    if outputs[0].objective is not None:
        pytest.skip("trains on an objective of its own, which its own tests hold against the equation")
    torch.testing.assert_close(said.loss.detach() - sum(loss.item() for loss in said.losses.values()), expected)


def compiled_equals_eager(model: FathomForCausalLM, backend: str) -> None:
    """A training step, or the logits of a model in eval mode. Whole graphs only, but where the number of tokens that
    go on is known only when a step has run."""
    ids = tokens(2, 7)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=not getattr(model.depth, "adaptive", False))
    if model.training:
        loss, gradients = loss_and_gradients(model, ids)
        again, compiled_gradients = loss_and_gradients(compiled, ids)
        torch.testing.assert_close(again, loss)
        for name, gradient in gradients.items():
            assert_close(compiled_gradients["_orig_mod." + name], gradient)
    else:
        with torch.no_grad():
            assert_close(compiled(ids).logits, model(ids).logits)


@pytest.mark.parametrize("case", [p for p in cases() if p.values[0].family == FAMILIES[0]])
def test_a_compiled_training_step_equals_eager(case):
    """Dynamo traces it whole; each variant on one family, as a trace costs seconds."""
    compiled_equals_eager(case.traced_model().train(), "eager")


@pytest.mark.parametrize("case", [p for p in cases() if p.values[0].is_first and p.values[0].family == FAMILIES[1]])
def test_compiled_scoring_equals_eager(case):
    compiled_equals_eager(case.traced_model(), "aot_eager")


@pytest.mark.parametrize("case", [p for p in cases() if p.values[0].family == FAMILIES[0]])
def test_a_training_step_whose_layers_are_compiled_equals_eager(case):
    """As `training.compile: layers` does it; tests/models/test_flat_steps.py has those that `graphs` compiles apart."""
    model, ids = case.traced_model().train(), tokens(2, 7)
    loss, gradients = loss_and_gradients(model, ids)
    torch._dynamo.reset()
    compile_layers(model, "eager")
    again, compiled_gradients = loss_and_gradients(model, ids)
    torch._dynamo.reset()
    torch.testing.assert_close(again, loss)
    for name, gradient in gradients.items():
        assert_close(compiled_gradients[name], gradient)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler (g++)")
def test_inductor_code_equals_eager():
    """The last depth method by name stands for all: the graphs are tested above, inductor is torch's."""
    name = max(name for name in REGISTRIES["depth"] if name != SECTIONS["depth"].plain[0])
    options = tuple(REGISTRIES["depth"][name].variants[0].items())
    compiled_equals_eager(Case("depth", name, options, FAMILIES[0]).model(num_hidden_layers=1), "inductor")


@every_case
def test_bfloat16_runs_in_bfloat16(case):
    model = case.model().to(torch.bfloat16)
    out = model(tokens(2, 7), use_cache=True, output_hidden_states=True)
    assert out.logits.dtype == torch.bfloat16 and out.logits.isfinite().all()
    assert {h.dtype for h in out.hidden_states} == {torch.bfloat16}
    assert {layer.keys.dtype for layer in out.past_key_values.layers} == {torch.bfloat16}


# ---------------------------------------------------------------- configuration


@every_method
def test_config_survives_json(registry, name, tmp_path):
    for options in REGISTRIES[registry][name].variants:
        config = FathomConfig(**{registry: {"name": name, **options}})
        config.save_pretrained(tmp_path)
        again = FathomConfig.from_pretrained(tmp_path)
        for section in REGISTRIES:
            assert getattr(again, section) == getattr(config, section)
        assert again.embed_scale == config.embed_scale


@every_method
def test_options_out_of_range_are_refused_by_name(registry, name):
    method = REGISTRIES[registry][name]
    kinds = typing.get_type_hints(method.Options)
    wrong = {int: (-(10**9), 1.5, "3", True), float: (float("nan"), "x"), str: ("nonsense",), bool: ("false", 2)}
    for field in dataclasses.fields(method.Options):
        plain = [kind for kind in typing.get_args(kinds[field.name]) or (kinds[field.name],) if kind in wrong]
        for value in wrong[plain[0]] if plain else ("nonsense", 3):
            with pytest.raises(ValueError) as error:
                FathomConfig(**{registry: {"name": name, field.name: value}})
            for part in (name, field.name, repr(value)):
                assert part in str(error.value)


@every_method
def test_unknown_options_are_refused_with_the_nearest_name(registry, name):
    for field in dataclasses.fields(REGISTRIES[registry][name].Options):
        with pytest.raises(ValueError, match=rf"{name}.*no option '{field.name}x'.*did you mean '{field.name}'"):
            FathomConfig(**{registry: {"name": name, field.name + "x": 1}})
    with pytest.raises(ValueError, match=f"{registry} method '{name}x' does not exist.*available: .*{name}"):
        FathomConfig(**{registry: {"name": name + "x"}})


@pytest.mark.parametrize("depth", [name for name in REGISTRIES["depth"] if name != "vanilla"])
@pytest.mark.parametrize("residual", [name for name in REGISTRIES["residual"] if name != "standard"])
def test_other_topologies_run_with_vanilla_depth_only(depth, residual):
    with pytest.raises(ValueError, match=f"{depth}.*{residual}"):
        FathomConfig(depth={"name": depth}, residual={"name": residual})


def reads_of_depth(source: str) -> set[str]:
    """What a file reads of a depth method: the attributes of whatever is called `depth` or `….depth`."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {n.attr for n in nodes if "depth" in (getattr(n.value, "attr", ""), getattr(n.value, "id", ""))}


def test_the_base_class_declares_all_that_is_read_of_a_depth_method():
    """Whoever reads what some methods have alone would fail with the others, in a combination that no test runs."""
    config, counts = FathomConfig(), Counts()
    others = {*dir(config.depth), *dir(counts), "base"}  # called `depth`, too: a section, its costs, the folder
    declared = {*dir(DepthMethod(config, None)), "name"}  # `register` gives that
    for path in Path(fathom.__file__).parent.rglob("*.py"):
        assert reads_of_depth(path.read_text(encoding="utf-8")) <= declared | others, path


@every_method
def test_methods_describe_themselves(registry, name):
    method = REGISTRIES[registry][name]
    assert (method.registry, method.name) == (registry, name)
    assert method.summary.endswith(".") and "\n" not in method.summary
    counts = method.counts(FathomConfig(vocab_size=VOCABULARY), method.Options())
    assert counts.passes == (method.Options().passes if registry == "depth" else 1)
