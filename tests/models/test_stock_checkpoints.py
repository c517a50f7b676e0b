"""Checkpoints of the four families: read from a folder, equal to the stock class, written back for the stock class."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from stock import CONFIGS, GPT2, GROUPED, SIZES, random_stock, stock_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from fathom import FathomConfig, FathomForCausalLM
from tiny import assert_close, tiny_model, tokens

every_config = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture
def folder(name, tmp_path):
    stock_model(name).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


@every_config
def test_logits_equal_the_stock_class(name, folder):
    stock, ours = stock_model(name), FathomForCausalLM.from_pretrained(folder)
    ids = tokens(3, 20)
    with torch.no_grad():
        assert (ours(ids).logits - stock(ids).logits).abs().max() <= 1e-5
        mask = torch.ones_like(ids)
        mask[0, :7] = mask[1, :2] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = stock(ids, attention_mask=mask, position_ids=positions).logits
        difference = (ours(ids, attention_mask=mask).logits - expected).abs()
        assert difference[mask.bool()].max() <= 1e-5


@every_config
def test_greedy_generation_equals_the_stock_class(name, folder):
    stock, ours = stock_model(name), FathomForCausalLM.from_pretrained(folder)
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert ours.generate(ids, **options).tolist() == stock.generate(ids, **options).tolist()


@every_config
def test_a_loaded_model_saves_back_as_the_stock_checkpoint(name, folder, tmp_path):
    stock = stock_model(name)
    FathomForCausalLM.from_pretrained(folder).save_stock_pretrained(tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(stock)
    ids = tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(back(ids).logits, stock(ids).logits)
    assert back.state_dict().keys() == stock.state_dict().keys()
    written, wanted = back.config.to_dict(), stock.config.to_dict()
    for field in wanted.keys() - {"transformers_version", "architectures", "_name_or_path", "dtype", "n_inner"}:
        if field == "rope_parameters":  # may say what the family's default means
            written[field] = {key: written[field][key] for key in wanted[field]}
        assert written[field] == wanted[field], field


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2"])
def test_sharded_checkpoints(name, tmp_path):
    stock = stock_model(name)
    stock.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = tokens(2, 9)
    with torch.no_grad():
        assert_close(FathomForCausalLM.from_pretrained(tmp_path)(ids).logits, stock(ids).logits)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt2"])
def test_a_model_from_scratch_saves_as_stock_with_its_embedding_scale_folded(family, tmp_path):
    model = tiny_model(family)
    assert model.config.embed_scale == pytest.approx(32**0.5)
    model.save_stock_pretrained(tmp_path)
    ids = tokens(2, 12)
    with torch.no_grad():
        logits = model(ids).logits
        assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)
        assert_close(FathomForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)


def test_a_scaled_tied_table_cannot_be_folded(tmp_path):
    with pytest.raises(ValueError, match=r"embed_scale=5\.65685 cannot be folded into a tied input table"):
        tiny_model("llama", tie_word_embeddings=True).save_stock_pretrained(tmp_path)
    tiny_model("llama", tie_word_embeddings=True, embed_scale=1.0).save_stock_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"depth": {"name": "loop", "passes": 2}},
        {"depth": {"name": "pondering"}},
        {"norm": "layernorm"},
        {"parallel_residual": True},
        {"attention_output_bias": True},
        {"qk_norm": True},
        {"partial_rotary_factor": 0.5},
        {"residual_dropout": 0.1},
        {"embedding_dropout": 0.1},
        {"backbone": "gpt_neox", "num_key_value_heads": 2},
        {"backbone": "gpt2", "head_dim": 16},
    ],
    ids=str,
)
def test_what_no_stock_model_computes_is_not_saved_as_one(fields, tmp_path):
    family = fields.pop("backbone", "llama")
    with pytest.raises(ValueError, match=f"{next(iter(fields))}=|only a vanilla model"):
        tiny_model(family, **fields).save_stock_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- a config that ties what the files keep apart


@pytest.fixture(params=[name for name in CONFIGS if "-tied" in name or name == "gpt2"])
def two_matrices(request, tmp_path):
    """The folder of a stock model whose config ties the head that its file has beside the table; and the logits."""
    stock = stock_model(request.param)
    head = stock.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    stock.save_pretrained(tmp_path / "stock")
    with torch.no_grad():
        return tmp_path / "stock", stock(tokens(2, 9)).logits


def test_a_head_that_differs_from_a_tied_table_is_kept(two_matrices, tmp_path):
    folder, expected = two_matrices
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected)
        model = FathomForCausalLM.from_pretrained(folder)
        assert_close(model(ids).logits, expected)
        assert model.config.tie_word_embeddings is False
        model.save_pretrained(tmp_path / "ours")
        model.save_stock_pretrained(tmp_path / "back")
        for loader in (FathomForCausalLM, AutoModelForCausalLM):
            for place in ("ours", "back"):
                assert_close(loader.from_pretrained(tmp_path / place)(ids).logits, expected)
        model.tie_weights()  # as resizing the vocabulary does
        assert_close(model(ids).logits, expected)


def test_a_fathom_checkpoint_keeps_its_head_too(two_matrices, tmp_path):
    folder, expected = two_matrices
    ids = tokens(2, 9)
    model = FathomForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True  # as a config of older versions says
    model.save_pretrained(tmp_path / "ours")
    again = FathomForCausalLM.from_pretrained(tmp_path / "ours", tie_word_embeddings=True)
    assert again.config.tie_word_embeddings is False
    model.save_stock_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert_close(again(ids).logits, expected)
        assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "back")(ids).logits, expected)


def test_a_file_with_the_tied_matrix_twice_stays_tied(tmp_path):
    stock = stock_model("qwen3-tied-biases")
    stock.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, tmp_path / "pytorch_model.bin")
    model = FathomForCausalLM.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight


def test_offloaded_weights_are_not_saved_as_stock(tmp_path):
    model = tiny_model()
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="weights of the model are offloaded; load it without offloading"):
        model.save_stock_pretrained(tmp_path)


def test_methods_go_onto_a_stock_checkpoint(tmp_path):
    stock_model("llama").save_pretrained(tmp_path)
    model = FathomForCausalLM.from_pretrained(tmp_path, depth={"name": "loop", "passes": 2}, attention_dropout=0.25)
    assert model.config.passes == 2 and model.config.embed_scale == 1.0
    assert model.model.layers[0].self_attn.attention_dropout == 0.25
    assert model.generate(tokens(1, 4), max_new_tokens=3, min_new_tokens=3).shape == (1, 7)


# ---------------------------------------------------------------- placement


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "float16"], ids=str)
def test_dtype_is_honoured(dtype, tmp_path):
    stock_model("llama").save_pretrained(tmp_path)
    model = FathomForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {p.dtype for p in model.parameters()} == {wanted} and model.config.dtype == wanted


def test_a_checkpoint_loads_in_its_own_dtype_by_default(tmp_path):
    stock_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert FathomForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert FathomForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_device_map_and_attention_are_honoured(tmp_path):
    stock = stock_model("llama")
    stock.save_pretrained(tmp_path)
    placed = FathomForCausalLM.from_pretrained(tmp_path, device_map="cpu", attn_implementation="eager")
    assert placed.config._attn_implementation == "eager"
    assert {p.device.type for p in placed.parameters()} == {"cpu"}
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        FathomForCausalLM.from_pretrained(tmp_path, device_map="no-such-device")
    split = FathomForCausalLM.from_pretrained(
        tmp_path,
        device_map={
            "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
            "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
        },
        offload_folder=tmp_path / "offload",
    )  # fmt: skip
    assert next(split.model.layers[1].parameters()).device.type == "meta"
    ids = tokens(1, 5)
    with torch.no_grad():
        assert_close(split(ids).logits, stock(ids).logits)


def test_fathom_checkpoints_honour_placement_too(tmp_path):
    model = tiny_model("llama", depth={"name": "loop", "passes": 2})
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    again = FathomForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    changed = FathomForCausalLM.from_pretrained(tmp_path, depth={"name": "loop", "passes": 3})
    assert changed.config.passes == 3


def test_fields_given_with_a_fathom_checkpoint_are_checked_like_any_config(tmp_path):
    tiny_model("llama", depth={"name": "pondering", "steps": 2}).save_pretrained(tmp_path)
    for depth in ({"name": "loop"}, "loop"):
        for auto in (FathomForCausalLM, AutoModelForCausalLM):
            changed = auto.from_pretrained(tmp_path, depth=depth)
            assert changed.config.depth == FathomConfig(depth={"name": "loop"}).depth
    for depth, message in (
        ({"name": "loop", "pases": 2}, "'loop' has no option 'pases' .did you mean 'passes'"),
        ({"nam": "loop"}, 'depth needs a "name"'),
        ({"name": "adaponderlm", "steps": 3}, "with depth='adaponderlm': .*steps"),
    ):
        with pytest.raises(ValueError, match=message):
            FathomForCausalLM.from_pretrained(tmp_path, depth=depth)


# ---------------------------------------------------------------- refusals

HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: Qwen3Config(**GROUPED, head_dim=16, **SLIDING), "use_sliding_window=True"),
        (lambda: Qwen3Config(**GROUPED, layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (lambda: LlamaConfig(**GROUPED, pretraining_tp=2), "pretraining_tp=2"),
        (lambda: LlamaConfig(**GROUPED, rope_parameters=HALF_ROTARY), "partial_rotary_factor=0.5"),
        (lambda: GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (lambda: GPT2Config(**GPT2, scale_attn_weights=False), "scale_attn_weights=False"),
        (lambda: GPT2Config(**GPT2, reorder_and_upcast_attn=True), "reorder_and_upcast_attn=True"),
        (lambda: GPT2Config(**GPT2, add_cross_attention=True), "add_cross_attention=True"),
        (lambda: MistralConfig(**GROUPED), "'mistral' is not supported; supported families: llama, qwen3,"),
        (lambda: BertConfig(vocab_size=97, hidden_size=32, num_attention_heads=4), "'bert' is not supported"),
        (lambda: GPTNeoXConfig(**SIZES, quantization_config={"quant_method": "gptq"}), "quantization_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_the_decoder_lacks_is_refused_by_name(config, message, tmp_path):
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    stock_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises((ValueError, OSError), match=r"model\.safetensors.*(incomplete|truncated|corrupt)"):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_a_truncated_fathom_file_is_named(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises((ValueError, OSError), match=r"model\.safetensors.*(incomplete|truncated|corrupt)"):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_missing_weights_are_refused(tmp_path):
    """A tensor that is absent must not be filled with random numbers in silence."""
    stock_model("llama").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        FathomForCausalLM.from_pretrained(tmp_path)


FEEDBACK = {"name": "pondering", "steps": 1, "feedback": "hidden_linear"}


def without(folder, name):
    state = load_file(folder / "model.safetensors")
    del state[name]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "depth.feedback_proj.weight"])
@pytest.mark.parametrize("loader", [FathomForCausalLM, AutoModelForCausalLM])
def test_missing_weights_of_a_fathom_checkpoint_are_refused(tmp_path, loader, name):
    model = tiny_model("llama", depth=FEEDBACK)
    model.save_pretrained(tmp_path)
    loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == set() and torch.equal(loaded(tokens(1, 5)).logits, model(tokens(1, 5)).logits)
    without(tmp_path, name)
    with pytest.raises(ValueError, match=f"weights are missing from the checkpoint: {re.escape(name)}$"):
        loader.from_pretrained(tmp_path)


def test_only_the_parameters_of_a_method_that_is_new_may_be_missing(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    config = FathomConfig.from_pretrained(tmp_path)
    config.depth = tiny_model("llama", depth=FEEDBACK).config.depth
    model = FathomForCausalLM.from_pretrained(tmp_path, config=config)
    assert model.depth.feedback_proj.weight.isfinite().all() and model.depth.feedback_proj.weight.std() > 0
    without(tmp_path, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=r"checkpoint: model\.layers\.1\.mlp\.up_proj\.weight$"):
        FathomForCausalLM.from_pretrained(tmp_path, config=config)


@pytest.mark.parametrize(
    ("stored", "given", "message"),
    [
        ({"name": "ponderlm3", "thoughts": 1}, {"name": "ponderlm3", "thoughts": 2}, r"thoughts=2 \(stored: 1\)"),
        ({"name": "pause", "pauses": 1}, {"name": "pause", "pauses": 2}, r"pauses=2 \(stored: 1\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("loader", [AutoModelForCausalLM, FathomForCausalLM])
def test_an_option_that_changes_shapes_is_named(stored, given, message, loader, tmp_path):
    """Not the checkpoint's own config.json, which is right."""
    tiny_model(depth=stored).save_pretrained(tmp_path)
    config = FathomConfig(**{**FathomConfig.get_config_dict(tmp_path)[0], "depth": given})
    for arguments in ({"config": config}, {"depth": given}):
        with pytest.raises(ValueError, match=rf"with depth option {message} .*; give what is stored, or leave it out"):
            loader.from_pretrained(tmp_path, **arguments)
    fields = {"vocab_size": 98, "depth": "vanilla"}
    with pytest.raises(
        ValueError, match=rf"with vocab_size=98 .stored: 97., depth='vanilla' .stored: '{stored['name']}'"
    ):
        loader.from_pretrained(tmp_path, config=FathomConfig(**{**config.to_dict(), **fields}))


def test_a_long_list_of_missing_weights_is_cut(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.layers\.2\..* and 1 more$"):
        config = FathomConfig.from_pretrained(tmp_path)
        config.num_hidden_layers = 3
        FathomForCausalLM.from_pretrained(tmp_path, config=config)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        FathomForCausalLM.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("scaling", ["linear", "dynamic"])
def test_half_precision_stock_models_agree(scaling, tmp_path):
    stock = random_stock(
        LlamaConfig(**GROUPED, rope_parameters={"rope_type": scaling, "factor": 2.0, "rope_theta": 1e4})
    ).to(torch.bfloat16)
    stock.save_pretrained(tmp_path)
    ids = tokens(2, 16)
    with torch.no_grad():
        expected = stock(ids).logits
        exact = stock.float()(ids).logits
        ours = FathomForCausalLM.from_pretrained(tmp_path)(ids).logits
    assert ours.dtype == torch.bfloat16
    error = (expected.float() - exact).abs().max()
    assert (ours.float() - exact).abs().max() <= 2 * error
