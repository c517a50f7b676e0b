"""Folders as Depth-Attention's authors write them, made here: their fields, Qwen3's names, k_norm after RoPE."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from fathom import FathomForCausalLM
from fathom.evaluate import load_checkpoint
from reference import ReferenceDecoder, depth_attention
from tiny import SIZES, assert_close, tiny_model, tokens
from tiny_checkpoint import tiny_tokenizer

MIXER = {"name": "depth_attention", "k_norm_position": "post_rope", "stride": 3}
# the fields of the published 3B config beside Llama's own, and those of the public training configs
PUBLISHED = {
    "use_depth_attention": True, "depth_attention_stride": 3, "depth_attention_recent_window": 0, "use_qk_norm": True,
    "scale_embeds": False,
}  # fmt: skip
TRAINING = {
    **PUBLISHED, "recurrent_model": True, "cross_layer_pattern": "depth_softmax", "cross_layer_mode": "depth_softmax",
    "depth_softmax_stride": 3, "depth_recent_window": 0,
}  # fmt: skip


def write(folder, fields, family="qwen3", **sizes):
    """Random weights under the authors' names. Returns the model that they must become."""
    mixer = MIXER if family == "qwen3" else {"name": "depth_attention", "stride": 3}
    model = tiny_model(family, num_hidden_layers=5, norm_eps=1e-5, init="hf", mixer=mixer, **sizes)
    c = model.config
    config = {
        **SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 5,
        "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "pretraining_tp": 1, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.46.1", **fields,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    return model


def load_silently(folder, **changes):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return FathomForCausalLM.from_pretrained(folder, **changes).eval()


def test_a_folder_with_the_training_fields_becomes_the_model(tmp_path):
    expected, ids = write(tmp_path, TRAINING), tokens(1, 5)
    model = load_silently(tmp_path)
    assert (model.config.backbone, model.config.norm_eps, model.config.embed_scale) == ("qwen3", 1e-5, 1.0)
    assert {**model.config.mixer, **MIXER} == model.config.mixer
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
        reference = ReferenceDecoder(model, depth_attention(model)).logits(ids[0].tolist())
        assert_close(model(ids).logits[0].double(), reference)
        early = load_silently(tmp_path, mixer={**MIXER, "k_norm_position": "pre_rope"})
        assert (early(ids).logits - model(ids).logits).abs().max() > 1e-3  # the position is no matter of taste


def test_a_mixer_given_overrides_what_the_config_says_and_leaves_the_rest(tmp_path):
    """The warning of an absent stride says: pass mixer. It must not cost the keys' norm its place."""
    fields = {name: value for name, value in TRAINING.items() if "stride" not in name}
    expected, ids = write(tmp_path, {**fields, "depth_recent_window": 0}), tokens(1, 5)
    with pytest.warns(UserWarning, match="depth_attention_stride is absent.*Pass mixer to decide"):
        FathomForCausalLM.from_pretrained(tmp_path)
    model = load_silently(tmp_path, mixer={"name": "depth_attention", "stride": 3})
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    write(tmp_path, TRAINING)
    assert load_silently(tmp_path, mixer="depth_attention").config.mixer == model.config.mixer
    with pytest.raises(ValueError, match="mixer='none': this checkpoint normalises keys after the rotation"):
        FathomForCausalLM.from_pretrained(tmp_path, mixer="none")
    unmixed = {"name": "depth_attention", "source_schedule": "explicit", "sources": (), "recent_window": 0}
    assert load_silently(tmp_path, mixer=unmixed).config.mixer["k_norm_position"] == "post_rope"


def test_it_saves_as_a_fathom_checkpoint_and_generates(tmp_path):
    write(tmp_path, TRAINING)
    model = load_silently(tmp_path)
    model.save_pretrained(tmp_path / "ours")
    again, ids = load_silently(tmp_path / "ours"), tokens(2, 4)
    assert again.config.mixer == model.config.mixer
    assert torch.equal(again.generate(ids, max_new_tokens=5), model.generate(ids, max_new_tokens=5))


def test_the_verbs_load_it_as_what_it_is(tmp_path):
    expected, ids = write(tmp_path, {**TRAINING, "vocab_size": 300}, vocab_size=300), tokens(1, 6)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = load_checkpoint(str(tmp_path), "cpu")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_the_published_fields_load_with_a_warning_that_names_the_missing_one(tmp_path):
    expected, ids = write(tmp_path, PUBLISHED), tokens(2, 6)
    with pytest.warns(UserWarning, match="recurrent_model is absent.*taken as true"):
        model = FathomForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_an_absent_stride_warns_and_means_half_the_layers(tmp_path):
    write(tmp_path, {"use_depth_attention": True, "recurrent_model": True})
    with pytest.warns(UserWarning, match="depth_attention_stride is absent.*half the layers, 2"):
        model = FathomForCausalLM.from_pretrained(tmp_path)
    assert model.model.mixer.sources == [(), (0,), (0,), (0, 2), (0, 2)]


def test_a_model_that_was_not_recurrent_does_not_mix(tmp_path):
    write(tmp_path, {**TRAINING, "recurrent_model": False})
    assert not any(load_silently(tmp_path).model.mixer.sources)


def test_a_config_that_says_no_does_not_mix(tmp_path):
    write(tmp_path, {**PUBLISHED, "use_depth_attention": False})
    assert not any(load_silently(tmp_path).model.mixer.sources)
    write(tmp_path, {**TRAINING, "use_depth_attention": False})
    with pytest.raises(ValueError, match=r"use_depth_attention=False: recurrent_model=True says the opposite"):
        FathomForCausalLM.from_pretrained(tmp_path)


def test_without_qk_norm_the_backbone_is_llama(tmp_path):
    expected, ids = write(tmp_path, {**TRAINING, "use_qk_norm": False}, family="llama"), tokens(1, 6)
    model = load_silently(tmp_path)
    assert model.config.backbone == "llama"
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_absent_norm_weights_are_named(tmp_path):
    write(tmp_path, TRAINING, family="llama")
    with pytest.raises(ValueError, match=r"missing from the checkpoint.*layers\.0\.self_attn\.k_norm\.weight"):
        load_silently(tmp_path)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"baseline_mode": "mhc"}, "baseline_mode='mhc'"),
        ({"cross_layer_mode": "cross_attn"}, "cross_layer_mode='cross_attn'"),
        ({"depth_softmax_stride": 4}, "depth_softmax_stride.*disagree|disagree.*depth_softmax_stride"),
        ({"scale_embeds": True}, "scale_embeds=True.*pass embed_scale"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, fields, message):
    write(tmp_path, {**TRAINING, **fields})
    with pytest.raises(ValueError, match=message):
        load_silently(tmp_path)
