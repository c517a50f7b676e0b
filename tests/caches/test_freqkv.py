"""FreqKV: the operator against scipy, gradients through the compressions, fine-tuning with Trainer and LoRA."""

from __future__ import annotations

import copy

import pytest
import scipy.fft
import torch
from cache_cases import get_model, relative

from fathom.caches import FreqKV, build_cache, compress
from fathom.caches.versions import CACHE_NAME
from fathom.ops.dct import dct, idct, resample, resampler

METHOD = FreqKV(budget=16, n_sink=2)


@pytest.mark.parametrize("n", [1, 2, 7, 16, 33])
def test_dct_is_scipys(n):
    x = torch.randn(3, n, dtype=torch.float64)
    torch.testing.assert_close(dct(x), torch.tensor(scipy.fft.dct(x.numpy(), norm="ortho")))
    torch.testing.assert_close(idct(x), torch.tensor(scipy.fft.idct(x.numpy(), norm="ortho")))


@pytest.mark.parametrize("n,length", [(14, 7), (13, 4), (9, 9)])
def test_resampler(n, length):
    matrix = resampler(n, length, "low", torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix.sum(1), torch.ones(length, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, length / n * torch.eye(length, dtype=torch.float64))
    if n == length:
        torch.testing.assert_close(matrix, torch.eye(n, dtype=torch.float64))
    x = torch.randn(2, n, 3)
    torch.testing.assert_close(resample(x, length), resample(x, length, transform="fft"), rtol=1e-5, atol=1e-5)
    wide = torch.randn(1, n, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: resample(t, length), wide)
    assert torch.autograd.gradcheck(lambda t: resample(t, length, transform="fft"), wide)


def test_equal_keys_and_values_pass_through():
    for band in ("low", "mean"):
        torch.testing.assert_close(resample(torch.full((1, 12, 2), 2.5), 5, band), torch.full((1, 5, 2), 2.5))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_gradients_reach_the_first_tokens_and_survive_checkpointing(family):
    model = copy.deepcopy(get_model(family)).train()
    ids = torch.randint(1, 97, (2, 60), generator=torch.Generator().manual_seed(0))
    gradients = []
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding must survive the second forward of checkpointing too
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        with compress(model, METHOD):
            logits = model(inputs_embeds=embeddings, attention_mask=mask).logits
            logits[:, -1].square().sum().backward()
        assert embeddings.grad[1, 0].abs().max() > 0 and embeddings.grad[:, 5].abs().amax(-1).min() > 0
        assert embeddings.grad[0, :3].abs().max() == 0
        weights = [p.grad for n, p in model.named_parameters() if p.grad is not None]
        gradients.append([embeddings.grad, *weights])
    assert all(relative(a, b) < 1e-4 for a, b in zip(*gradients) if b.abs().max() > 0)


@torch.no_grad()
def test_training_reads_as_decoding_token_by_token_does():
    model = copy.deepcopy(get_model("llama"))
    ids = torch.randint(1, 97, (1, 50), generator=torch.Generator().manual_seed(0))
    with compress(model, METHOD):
        trained = model.train()(ids).logits
        cache, decoded = build_cache(model, METHOD), []
        for token in ids.split(1, dim=1):
            decoded.append(model.eval()(token, **{CACHE_NAME: cache}).logits)
    assert cache.compressed_layers()[0].states[0].stored < 17
    assert relative(trained, torch.cat(decoded, dim=1)) < 1e-5


def test_trainer_with_lora(tmp_path):
    peft = pytest.importorskip("peft")
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(1, 97, (8, 40), generator=torch.Generator().manual_seed(0)).tolist()
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, modules_to_save=["embed_tokens", "norm"])
    model = peft.get_peft_model(copy.deepcopy(get_model("llama")), config)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=2e-2, report_to=[],
        logging_steps=1, save_strategy="no", use_cpu=True, seed=0,
    )  # fmt: skip
    with compress(model, METHOD):
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        generated = model.generate(input_ids=torch.tensor(rows[:1]), max_new_tokens=4, do_sample=False)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.05
    assert generated.shape == (1, 44)
