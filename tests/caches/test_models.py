"""What is known of a model: its fingerprint, its parts' attention, and what is refused on entry."""

from __future__ import annotations

import pytest
import torch
from cache_cases import SIZES, build, get_model
from transformers import (
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from fathom.caches import TOVA, FourierAttention, compress, search_channels
from fathom.caches.record import fingerprint
from fathom.caches.versions import CACHE_NAME


def test_every_weight_that_keys_depend_on_is_in_the_fingerprint():
    """Each layer's attention, norms and feed-forward, and the embeddings; not the head."""
    model = build("llama")
    made = fingerprint(model)
    assert made == fingerprint(get_model("llama")) == fingerprint(build("llama").to(torch.bfloat16))
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.normal_()
        assert (fingerprint(model) == made) == (name == "lm_head.weight"), name
        with torch.no_grad():
            parameter.copy_(before)
    model.resize_token_embeddings(120)
    assert fingerprint(model) == made


def test_channels_of_another_model_with_equal_queries_are_refused(ids, tmp_path):
    model = build("llama")
    search_channels(model, [ids[:1]], frequencies=4, n_local=8).save(tmp_path / "sets.json")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" not in name:
                parameter.normal_()
    method = FourierAttention(channels=tmp_path / "sets.json")
    with pytest.raises(ValueError, match=r"not on this model.*run search_channels on it"), compress(model, method):
        pass


def test_a_file_made_in_another_half_precision_says_so(ids, tmp_path):
    """Numbers that went through fp16 round to another bf16 now and then."""
    model = build("llama").half()
    search_channels(build("llama"), [ids[:1]], frequencies=4, n_local=8).save(tmp_path / "sets.json")
    method = FourierAttention(channels=tmp_path / "sets.json")
    with pytest.raises(ValueError, match="loaded in fp16 may have a fingerprint of its own"), compress(model, method):
        pass


@pytest.mark.parametrize("text,vision", [("eager", "sdpa"), ("sdpa", "eager"), ("eager", "eager")])
def test_each_part_of_a_multimodal_model_gets_its_attention_back(text, vision):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=32),
        text_config=LlamaConfig(**sizes, vocab_size=97, pad_token_id=0),
        image_token_index=96,
    )
    config._attn_implementation = {"text_config": text, "vision_config": vision}
    model = LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation({"text_config": text, "vision_config": vision})
    before = model.config._attn_implementation
    with compress(model, TOVA(budget=8)):
        cache = model(torch.randint(1, 90, (1, 20)), use_cache=True)[CACHE_NAME]
        assert cache.layers[0].states[0].stored == 8
    found = model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation
    assert found == (text, vision) and model.config._attn_implementation == before
    assert model.model.language_model.config._attn_implementation == text


def test_scores_that_states_do_not_compute_are_refused_on_entry():
    gemma = Gemma2ForCausalLM(Gemma2Config(num_key_value_heads=2, head_dim=8, **SIZES))
    with pytest.raises(ValueError, match=r"softcap is not supported.*use the full cache"), compress(gemma, TOVA()):
        pass
    sizes = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match="sinks"), compress(GptOssForCausalLM(GptOssConfig(**sizes)), TOVA()):
        pass
    plain = Gemma2ForCausalLM(Gemma2Config(num_key_value_heads=2, head_dim=8, attn_logit_softcapping=None, **SIZES))
    with compress(plain.eval(), TOVA(budget=8, positions="original")):
        plain(torch.randint(1, 97, (1, 20)))


def test_a_cache_that_generate_made_is_not_blamed_on_the_caller(ids, llama):
    with compress(llama, TOVA(budget=16)), pytest.raises(ValueError, match="set cache_implementation=None"):
        llama.generate(ids, cache_implementation="static", max_new_tokens=2)
