"""Adapters of peft beside a checkpoint or naming one: the model is the one that transformers' own loader gives."""

from __future__ import annotations

import json

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from stock import CONFIGS, GROUPED, random_stock
from transformers import AutoModelForCausalLM, LlamaConfig

from fathom import FathomForCausalLM
from fathom.evaluate import load_checkpoint
from fathom.models.checkpoints import adapter as adapter_checkpoints
from tiny import assert_close, tiny_model, tokens
from tiny_checkpoint import save_fathom

TIED = LlamaConfig(**{**GROUPED, "tie_word_embeddings": True})
ADAPTED = {
    "llama": (CONFIGS["llama"](), {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]}),
    "qwen3": (CONFIGS["qwen3"](), {"target_modules": "all-linear", "use_dora": True}),
    "gpt_neox": (CONFIGS["gpt_neox"](), {"target_modules": ["query_key_value", "dense"]}),
    "gpt2": (CONFIGS["gpt2"](), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "tied-head": (TIED, {"target_modules": ["lm_head", "q_proj"]}),
    "tied-table": (TIED, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "saved-head": (CONFIGS["llama"](), {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
}


def adapt(model, folder, kind=LoraConfig, **options):
    """Write a random adapter of the model into the folder. Returns the model with it."""
    torch.manual_seed(3)
    options = {"r": 2, "init_lora_weights": False, **options} if kind is LoraConfig else options
    adapted = get_peft_model(model, kind(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted.eval()


def edit(file, change):
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A stock Llama folder, and its adapter's of the query projections."""
    folder = tmp_path_factory.mktemp("base")
    random_stock(CONFIGS["llama"]()).save_pretrained(folder / "stock")
    adapt(AutoModelForCausalLM.from_pretrained(folder / "stock"), folder / "adapter", target_modules=["q_proj"])
    return folder


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_an_adapter_on_a_stock_checkpoint_is_in_the_weights(name, tmp_path):
    config, options = ADAPTED[name]
    ids = tokens(2, 9)
    random_stock(config).save_pretrained(tmp_path / "stock")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    with torch.no_grad():
        before = plain(ids).logits
        expected = adapt(plain, tmp_path / "adapter", **options)(ids).logits
        for file in (tmp_path / "adapter").iterdir():  # beside the weights, too
            (tmp_path / "stock" / file.name).write_bytes(file.read_bytes())
        assert (expected - before).abs().max() > 1e-2
        stock, report = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", output_loading_info=True)
        if not report["missing_keys"]:  # DoRA's magnitudes are, and in 5.17 saved modules: they stay random there
            assert_close(stock(ids).logits, expected)
        for place in ("adapter", "stock"):
            model = FathomForCausalLM.from_pretrained(tmp_path / place)
            assert_close(model(ids).logits, expected)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_table_in_an_adapters_file_is_for_a_tied_head_too(target, tmp_path):
    """peft saves the table of an adapted head or table, which may have been trained or resized since."""
    random_stock(TIED).save_pretrained(tmp_path / "stock")
    adapt(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), tmp_path / "adapter", target_modules=[target])
    change = torch.Generator().manual_seed(5)

    def move(state):
        tables = [
            name for name in state if name.endswith(("base_layer.weight", "embed_tokens.weight", "lm_head.weight"))
        ]
        assert tables
        moved = state[tables[0]] + 0.3 * torch.randn(state[tables[0]].shape, generator=change)
        state.update({name: moved.clone() for name in tables})

    edit(tmp_path / "adapter" / "adapter_model.safetensors", move)
    ids = tokens(2, 9)
    with torch.no_grad():
        reference = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), tmp_path / "adapter"
        )
        found = FathomForCausalLM.from_pretrained(tmp_path / "adapter")
        assert_close(found(ids).logits, reference.eval()(input_ids=ids).logits)


def test_a_method_goes_onto_an_adapted_checkpoint(base):
    ids = tokens(1, 6)
    adapted = AutoModelForCausalLM.from_pretrained(base / "adapter")
    model = FathomForCausalLM.from_pretrained(base / "adapter", depth={"name": "pause", "pauses": 0})
    assert model.config.depth["name"] == "pause"
    with torch.no_grad():
        assert_close(model(ids).logits, adapted(ids).logits)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_another_kind_of_adapter_is_merged_too(base, tmp_path):
    adapt(
        AutoModelForCausalLM.from_pretrained(base / "stock"), tmp_path, IA3Config,
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False,
    )  # fmt: skip
    ids = tokens(1, 6)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        assert_close(FathomForCausalLM.from_pretrained(tmp_path)(ids).logits, expected)


@pytest.mark.parametrize("loader", [FathomForCausalLM, AutoModelForCausalLM])
def test_an_adapter_on_a_fathom_checkpoint_is_attached(loader, tmp_path):
    ids = tokens(1, 6)
    tiny_model(depth={"name": "pondering", "steps": 1}).save_pretrained(tmp_path)
    plain = FathomForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        before = plain(ids).logits
        expected = adapt(plain, tmp_path / "adapter", target_modules=["v_proj", "lm_head"])(ids).logits
        assert (expected - before).abs().max() > 1e-2
        for file in (tmp_path / "adapter").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        for place in (tmp_path, tmp_path / "adapter"):
            model = loader.from_pretrained(place)
            assert torch.equal(model(ids).logits, expected)
            assert model.model.layers[0].self_attn.v_proj.lora_A is not None
    with pytest.raises(ValueError, match=r"not attached to weights that device_map={'': 'disk'} offloads; merge it"):
        loader.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    with pytest.raises(ValueError, match="the model has adapters beside its weights; merge them first"):
        FathomForCausalLM.from_pretrained(tmp_path / "adapter", depth="vanilla").save_stock_pretrained(tmp_path / "out")


# ---------------------------------------------------------------- nothing random, nothing dropped


@pytest.mark.parametrize("kind", ["stock", "fathom"])
@pytest.mark.parametrize(
    "verb", [FathomForCausalLM.from_pretrained, lambda folder: load_checkpoint(str(folder), "cpu")]
)
def test_weights_that_are_missing_under_an_adapter_are_refused(kind, verb, tmp_path):
    """transformers reports the adapter's names alone, and its loader leaves the weights random."""
    save_fathom(tmp_path)
    model = FathomForCausalLM.from_pretrained(tmp_path)
    if kind == "stock":
        model.save_stock_pretrained(tmp_path)
    adapt(model, tmp_path, target_modules=["q_proj"])
    verb(tmp_path)
    edit(tmp_path / "adapter_model.safetensors", lambda state: state.pop(next(name for name in state if ".1." in name)))
    with pytest.raises(ValueError, match=r"weights are missing from the checkpoint: .*lora_A"):
        verb(tmp_path)
    edit(tmp_path / "model.safetensors", lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"weights are missing from the checkpoint: model\.layers\.1\.mlp\.up_proj"):
        verb(tmp_path)


@pytest.mark.parametrize("kind", ["stock", "fathom"])
def test_weights_without_a_place_are_refused(kind, tmp_path):
    model = tiny_model()
    model.save_stock_pretrained(tmp_path) if kind == "stock" else model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    edit(file, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    edit(file, lambda state: state.update({"v_head.summary.weight": torch.ones(1, 32)}))
    loaded = FathomForCausalLM.from_pretrained(tmp_path)  # nothing reads these
    one = FathomForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1)  # asked for
    assert torch.equal(one.model.layers[0].mlp.up_proj.weight, loaded.model.layers[0].mlp.up_proj.weight)
    edit(file, lambda state: state.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    with pytest.raises(
        ValueError, match=r"no place for, .* another model: model\.layers\.0\.self_attn\.q_norm\.weight$"
    ):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_a_method_that_is_taken_off_leaves_its_parameters(tmp_path):
    tiny_model(depth={"name": "pause"}).save_pretrained(tmp_path)
    assert FathomForCausalLM.from_pretrained(tmp_path, depth="vanilla").config.depth["name"] == "vanilla"


def test_what_is_no_change_of_weights_is_refused(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base / "stock")
    adapt(model, tmp_path / "prompts", PromptTuningConfig, num_virtual_tokens=2)
    with pytest.raises(ValueError, match="peft_type='PROMPT_TUNING' changes no weights"):
        FathomForCausalLM.from_pretrained(tmp_path / "prompts")


def test_an_adapter_that_names_no_weights_says_so(base, tmp_path):
    config = json.loads((base / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"no base_model_name_or_path; load the base model and call its load_adapter"):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_an_adapter_without_peft_is_not_left_out_in_silence(base, monkeypatch):
    monkeypatch.setattr(adapter_checkpoints, "is_peft_available", lambda: False)
    with pytest.raises(ValueError, match="needs peft; install it, or move the adapter"):
        FathomForCausalLM.from_pretrained(base / "adapter")


def test_an_adapter_of_a_method_on_a_stock_checkpoint_names_no_base(tmp_path):
    """The stock checkpoint lacks the method, and "None", which transformers writes, is no folder."""
    tiny_model(init="hf").save_stock_pretrained(tmp_path / "stock")
    model = FathomForCausalLM.from_pretrained(tmp_path / "stock", depth={"name": "pondering", "steps": 1})
    assert model.name_or_path == model.config.name_or_path == ""
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="no base_model_name_or_path; load the base model and call its load_adapter"):
        FathomForCausalLM.from_pretrained(tmp_path / "adapter")
