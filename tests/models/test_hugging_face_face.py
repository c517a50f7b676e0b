"""The tools people use on a causal LM work on ours: pipeline, streaming, sampling, beams, peft, Trainer, lm_eval."""

from __future__ import annotations

import threading

import pytest
import torch
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from fathom import FathomConfig, FathomForCausalLM
from tiny import SIZES, VOCABULARY, assert_close, tiny_model, tokens

METHODS = {
    "vanilla": {},
    "loop": {"depth": {"name": "loop", "passes": 2}},
    "pondering": {"depth": {"name": "pondering", "steps": 1}},
}
every_method = pytest.mark.parametrize("fields", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def tokenizer():
    """One word a token."""
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def test_auto_classes_know_the_model(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is FathomConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is FathomForCausalLM


@every_method
def test_pipeline(fields, tokenizer, tmp_path):
    model = tiny_model("llama", **fields)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    writer = pipeline("text-generation", model=str(tmp_path), device="cpu")
    prompts = ["w5 w6 w7", "w9 w10 w11 w12 w13"]
    texts = writer(prompts, max_new_tokens=4, min_new_tokens=4, do_sample=False, batch_size=2, return_full_text=False)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        written = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
        assert text[0]["generated_text"].split() == written.split()


@every_method
def test_streaming_yields_the_generated_text_piece_by_piece(fields, tokenizer):
    model = tiny_model("gpt_neox", **fields)
    ids = tokenizer("w5 w6 w7", return_tensors="pt").input_ids
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=model.generate, args=(ids,), kwargs={**options, "streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces).split() == tokenizer.decode(model.generate(ids, **options)[0, 3:]).split()


@every_method
def test_sampling_repeats_with_its_seed_and_follows_the_logits(fields):
    model = tiny_model("llama", **fields)
    ids = tokens(1, 5)
    options = {"do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8, "top_k": 20, "temperature": 0.8}
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model.generate(ids, **options))
    assert draws[0].equal(draws[1]) and not draws[0].equal(draws[2])
    torch.manual_seed(0)
    first = model.generate(ids.repeat(4000, 1), do_sample=True, max_new_tokens=1, top_k=0)[:, -1]
    with torch.no_grad():
        p = model(ids).logits[0, -1].softmax(-1)
    frequency = torch.bincount(first, minlength=VOCABULARY) / 4000
    assert (frequency - p).abs().max() <= 5 * (p * (1 - p) / 4000).sqrt().max()


@every_method
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_lora_step_changes_adapters_only(fields, family):
    model = tiny_model(family, **fields)
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    ids = tokens(2, 9)
    adapted.train()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted = adapted.unload()
    for name, parameter in adapted.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_get_decoder_is_the_module_of_the_layers():
    model = tiny_model("llama")
    stock = LlamaForCausalLM(LlamaConfig(**SIZES))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    for decoder in (model.get_decoder(), stock.get_decoder(), adapted.get_decoder()):
        assert len(decoder.layers) == 2 and decoder.embed_tokens is not None and decoder.norm is not None
    assert model.get_decoder() is model.model


def test_an_adapter_on_the_head_trains_through_the_plain_path():
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["lm_head"])).train()
    ids = tokens(2, 9)
    out = adapted(input_ids=ids, labels=ids)
    out.loss.backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all(grad is not None for grad in trained.values())
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize(
    ("fields", "adapted"),
    [
        ({"depth": {"name": "pondering", "steps": 2}}, ["lm_head"]),
        ({"depth": {"name": "pondering", "steps": 2}}, ["embed_tokens"]),
        ({"depth": {"name": "pondering", "steps": 2, "top_k": 5}}, ["lm_head", "embed_tokens"]),
        ({"depth": {"name": "pondering", "steps": 2, "feedback": "hidden_linear"}}, "all-linear"),
        ({"residual": {"name": "mhc"}}, "all-linear"),
        ({"residual": {"name": "mhc"}}, ["projection"]),
    ],
    ids=["head", "table", "both", "feedback", "all", "topology"],
)
def test_merging_an_adapter_keeps_the_logits(fields, adapted):
    """So whatever a method reads beside the layers' outputs has the adapter in it before the merge too."""
    lora = LoraConfig(r=2, target_modules=adapted, init_lora_weights=False)
    model, ids = get_peft_model(tiny_model("llama", **fields), lora).eval(), tokens(2, 7)
    with torch.no_grad():
        with model.disable_adapter():
            plain = model(ids).logits
        separate = model(ids).logits
        merged = model.merge_and_unload()(ids).logits
    assert (separate - plain).abs().max() > 1e-3
    assert_close(merged, separate, 1e-4)


@every_method
def test_trainer_takes_the_step_that_plain_sgd_takes(fields, tmp_path):
    model, reference = tiny_model("llama", **fields), tiny_model("llama", **fields)
    ids = tokens(4, 9)
    labels = ids.clone()
    labels[1, :5] = -100
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()}).with_format("torch")
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[], use_cpu=True,
        gradient_checkpointing=True, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data).train()
    reference.train()
    reference(input_ids=ids, labels=labels).loss.backward()
    trained = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert_close(trained[name].detach(), (parameter - 0.1 * parameter.grad).detach(), 1e-6)
        if parameter.grad.abs().max() > 1e-3:
            assert not torch.equal(trained[name], parameter)


@every_method
def test_trainer_evaluates(fields, tmp_path):
    model = tiny_model("llama", **fields)
    ids = tokens(4, 9)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()}).with_format("torch")
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, arguments, eval_dataset=data)
    with torch.no_grad():
        out = model(ids, labels=ids)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(out.loss.item(), rel=1e-5)
    assert_close(torch.tensor(trainer.predict(data).predictions), out.logits)


@every_method
def test_lm_eval_scores_what_the_logits_say(fields, tokenizer):
    model = tiny_model("llama", **fields)
    scorer = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    requests = [("w5 w6 w7", " w8 w9"), ("w10", " w11"), ("w12 w13 w14 w15", " w16 w17 w18")]
    results = scorer.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in requests])
    for (context, continuation), (score, greedy) in zip(requests, results, strict=True):
        prompt, ending = (tokenizer(text).input_ids for text in (context, continuation))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ending])).logits[0, len(prompt) - 1 : -1]
        picked = logits.log_softmax(-1)[range(len(ending)), ending].sum().item()
        assert score == pytest.approx(picked, rel=1e-4)
        assert greedy == (logits.argmax(-1).tolist() == ending)


def test_tokens_can_be_added():
    model = tiny_model("llama", depth={"name": "pondering", "steps": 1})
    ids = tokens(1, 6)
    with torch.no_grad():
        model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
        assert model.config.vocab_size == VOCABULARY + 7
        assert model(ids).logits.shape[-1] == VOCABULARY + 7
    assert model.generate(ids, max_new_tokens=3, min_new_tokens=3).shape == (1, 9)


@pytest.mark.parametrize("name", ["pondering", "adaponderlm"])
def test_a_vocabulary_below_top_k_is_refused_and_the_model_stays_whole(name):
    model, ids = tiny_model(depth={"name": name, "steps": 1, "top_k": 5}), tokens(1, 6) % 5
    with torch.no_grad():
        before = model(ids).logits
        for size in ({"new_num_tokens": 4}, {"new_num_tokens": 3, "pad_to_multiple_of": 2}):
            with pytest.raises(
                ValueError, match=rf"new_num_tokens=\d with depth='{name}': top_k=5 exceeds vocab_size=4"
            ):
                model.resize_token_embeddings(**size)
        assert model.config.vocab_size == VOCABULARY and torch.equal(model(ids).logits, before)
        model.resize_token_embeddings(3, pad_to_multiple_of=8)  # is 8
        assert model(ids).logits.shape[-1] == model.config.vocab_size == 8


def test_two_caches_are_refused():
    model, ids = tiny_model(), tokens(1, 4)
    one = model(ids, use_cache=True)
    cache = one["cache"] if "cache" in one else one["past_key_values"]
    with pytest.raises(ValueError, match="pass exactly one of cache and past_key_values"):
        model(ids, cache=cache, past_key_values=DynamicCache())
    assert cache.get_seq_length() == 4
    model(ids, cache=cache, past_key_values=cache)
    assert cache.get_seq_length() == 8


@every_method
def test_assistant_early_exit_is_refused_and_the_model_stays_whole(fields):
    model, ids = tiny_model("llama", **fields), tokens(1, 4)
    before = model.generate(ids, max_new_tokens=3)
    for how in ({"assistant_early_exit": 1}, {"generation_config": GenerationConfig(assistant_early_exit=1)}):
        with pytest.raises(ValueError, match="assistant_early_exit=1 is not implemented: all layers run in every pass"):
            model.generate(ids, max_new_tokens=3, **how)
        assert model.config.num_hidden_layers == 2 and torch.equal(model.generate(ids, max_new_tokens=3), before)


def test_an_unsupported_kind_of_config_names_the_argument():
    for fields, message in {
        "backbone": ({"backbone": "mamba"}, "backbone='mamba' is not supported; families: llama"),
        "heads": ({"num_attention_heads": 8, "num_key_value_heads": 3}, "num_key_value_heads=3: must divide"),
        "size": ({"hidden_size": 0}, "hidden_size=0: must be at least 1"),
        "norm": ({"norm": "batchnorm"}, "norm='batchnorm'"),
        "dropout": ({"residual_dropout": 1.5}, r"residual_dropout=1.5: must be in \[0, 1\)"),
        "init": ({"init": "zeros"}, "init='zeros'"),
        "scale": ({"embed_scale": -1.0}, "embed_scale=-1.0: must be positive"),
        "both": ({"embed_scale": 3.0, "depth": {"name": "pondering", "scale_embeds": True}}, "drop one of the two"),
        "heads that do not divide": ({"hidden_size": 30, "num_attention_heads": 4}, "num_attention_heads=4"),
        "text for a number": ({"hidden_size": "64"}, "hidden_size='64': must be of type int"),
        "text for a switch": ({"qk_norm": "false"}, "qk_norm='false': must be of type bool"),
        "nothing": ({"num_hidden_layers": None}, "num_hidden_layers=None: must be of type int"),
        "activation": ({"hidden_act": "sillu"}, "hidden_act='sillu': .* it has .*silu"),
        "rope type": ({"rope_parameters": {"rope_type": "yarm"}}, "rope_type must be one of default, .*yarn"),
        "rope base": ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta must be positive"),
        "odd rotary": ({"hidden_size": 36, "num_attention_heads": 4}, "head_dim=9"),
    }.values():
        with pytest.raises(ValueError, match=message):
            FathomConfig(**fields)
