"""`FathomForMaskedDiffusion`, its objective and its bound; samplers on stock models; what is refused."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from diffusion_reference import PlainModel
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import fathom
from fathom import FathomConfig, FathomForCausalLM, FathomForMaskedDiffusion, compress
from fathom.caches import StreamingLLM
from fathom.diffusion import BLOCK_CACHES, DiffusionGenerationConfig, Dual, Fourier, SparseDLLM, generate
from fathom.diffusion.likelihood import bound
from fathom.tasks.masked_diffusion import MaskedDiffusion, cart, with_mask
from tiny import FAMILY_SIZES, SIZES, assert_close, perturb, tiny_model

MASK = 96
MASKED = {"name": "masked", "mask_token_id": MASK}
GROUPED = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SHAPE = {"max_new_tokens": 12, "block_length": 6, "steps": 8, "temperature": 1.0}


def model(family: str = "llama", shift: bool = False, **fields) -> FathomForMaskedDiffusion:
    torch.manual_seed(0)
    section = {**MASKED, "shift": shift}
    made = FathomForMaskedDiffusion(
        FathomConfig(backbone=family, **{**SIZES, **FAMILY_SIZES[family], **fields}, diffusion=section)
    )
    perturb(made)
    return made.eval()


def ids(rows: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, MASK, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2"])
@pytest.mark.parametrize("shift", [False, True], ids=["", "shift"])
def test_logits_are_those_of_a_block_written_out(family, shift):
    tested, inputs = model(family, shift), ids(1)
    plain = PlainModel(tested)
    states = plain.run(inputs[0].tolist(), range(9), [{}, {}])
    expected = torch.stack([plain.weights["lm_head.weight"] @ states[max(c - shift, 0)] for c in range(9)])
    with torch.no_grad():
        assert_close(tested(inputs).logits[0].double(), expected)
        assert_close(tested(inputs, logits_to_keep=3).logits[0].double(), expected[-3:])
        changed = inputs.clone()
        changed[0, -1] = 5 if inputs[0, -1] != 5 else 6
        assert (tested(changed).logits[0, 0] - tested(inputs).logits[0, 0]).abs().max() > 1e-4  # sees the last token


@pytest.mark.parametrize("section", [
    {"depth": {"name": "loop", "passes": 2}}, {"depth": {"name": "pondering", "steps": 1}},
    {"mixer": {"name": "depth_attention"}}, {"mixer": {"name": "resformer"}},
    {"residual": {"name": "denseformer"}}, {"residual": {"name": "attnres"}}, {"residual": {"name": "mhc"}},
    {"positions": {"name": "learned"}},
], ids=lambda s: next(iter(s.values()))["name"])  # fmt: skip
def test_methods_run_bidirectionally_and_under_every_cache(section):
    """Refreshed in every step a block cache is no cache; layers are counted over the passes of the stack."""
    tested = model(**section).double()
    given = {**SHAPE, "return_dict_in_generate": True}
    plain = tested.generate(ids(), **given)
    for cache in (Dual(refresh=1), SparseDLLM(keep_ratio=1.0, delay_steps=3)):
        out = tested.generate(ids(), block_cache=cache, **given)
        assert torch.equal(out.sequences, plain.sequences)
    kept = tested.generate(ids(), block_cache=Dual(), **given)
    heads = tested.config.num_key_value_heads * tested.config.head_dim
    assert kept.cache_bytes == 2 * tested.config.passes * 2 * heads * 8 * 21 * 2
    for name in BLOCK_CACHES:
        if name == "dllm_cache" and ("mixer" in section or "residual" in section):
            with pytest.raises(ValueError, match="it takes layers apart as they are"):
                tested.generate(ids(), block_cache=name, **SHAPE)
            continue
        assert not (tested.generate(ids(), block_cache=name, **SHAPE) == MASK).any()


@pytest.mark.parametrize("depth", ["pause", "ponderlm2", "ponderlm3", "adaptive_latent_cot", "adaponderlm"])
def test_methods_of_causal_slots_are_refused(depth):
    with pytest.raises(ValueError, match=f"diffusion='masked'.*depth='{depth}' gives a token slots or steps of causal"):
        FathomConfig(**SIZES, depth=depth, diffusion=MASKED)


@pytest.mark.parametrize("shift", [False, True], ids=["", "shift"])
def test_the_loss_is_the_weighted_cross_entropy_of_the_labels(shift):
    """In training, where no logits are made, and in eval; with gradients; an excluded token has no probability."""
    tested = model(shift=shift).double()
    inputs, labels = ids(), ids(seed=2)
    labels[:, ::3] = -100
    weights = torch.rand(labels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for excluded in (None, MASK):
        logits = tested(inputs).logits
        if excluded is not None:
            logits = logits.masked_fill(torch.arange(97) == excluded, -torch.inf)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        each = each * (labels != -100)
        counted = (labels != -100)[:, int(shift) :]
        expected = (each * weights)[:, int(shift) :].sum() / counted.sum()
        grads = torch.autograd.grad(expected, tested.lm_head.weight)[0]
        for training in (True, False):
            tested.train(training)
            loss = tested(inputs, labels=labels, loss_weights=weights, excluded_token=excluded).loss
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(torch.autograd.grad(loss, tested.lm_head.weight)[0], grads)
        tested.eval()
    plain = tested(inputs, labels=labels, loss_weights=weights, num_items_in_batch=7).loss * 7
    each = F.cross_entropy(tested(inputs).logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    torch.testing.assert_close(plain, (each * weights * (labels != -100))[:, int(shift) :].sum())


def test_saved_and_loaded_by_the_auto_class_alone(tmp_path):
    tested = model("qwen2", shift=True)
    tested.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is FathomForMaskedDiffusion and loaded.config.diffusion == {**MASKED, "shift": True}
    assert not loaded.config.is_causal
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids()).logits, tested(ids()).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match="diffusion='masked': FathomForCausalLM is not its class; use FathomForMa"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="diffusion='none': FathomForMaskedDiffusion is not its class; use Fa"):
        FathomForMaskedDiffusion(FathomConfig(**SIZES))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox", "gpt2"])
def test_the_stock_class_gives_equal_logits(family, tmp_path):
    tested = model(family, init="hf", embed_scale=1.0)
    tested.save_stock_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.config.model_type == family and not stock.config.is_causal and stock.config.mask_token_id == MASK
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad():
        assert_close(stock(ids()).logits, tested(ids()).logits)
        if family != "gpt2":  # whose class counts padding among the positions
            assert_close(stock(ids(), attention_mask=mask).logits[1, 4:], tested(ids(), mask).logits[1, 4:])
        back = FathomForMaskedDiffusion.from_pretrained(tmp_path)
        assert back.config.diffusion == tested.config.diffusion
        assert_close(back(ids()).logits, tested(ids()).logits)


@pytest.mark.parametrize("kind", [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM),
                                  (Qwen3Config, Qwen3ForCausalLM)], ids=["llama", "qwen2", "qwen3"])  # fmt: skip
def test_stock_models_are_sampled_as_ours(kind, tmp_path):
    torch.manual_seed(0)
    more = {"head_dim": 8} if kind[0] is Qwen3Config else {}
    stock = kind[1](kind[0](**GROUPED, **more, is_causal=False, mask_token_id=MASK)).double()
    perturb(stock)
    stock.eval().save_pretrained(tmp_path)
    ours = FathomForMaskedDiffusion.from_pretrained(tmp_path, dtype=torch.float64).eval()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    for cache in (None, *BLOCK_CACHES):
        for policy in ("fourier_sampler",) if cache != "dkv_cache" else ("entropy",):
            config = DiffusionGenerationConfig(
                **SHAPE, block_cache=cache, policy=policy, return_dict_in_generate=True, eos_token_id=2
            )
            found = generate(stock, ids(), mask, config)
            expected = ours.generate(ids(), mask, config)
            assert torch.equal(found.sequences, expected.sequences) and found.nfe == expected.nfe
            # the stock class keeps norms and rotations in fp32
            torch.testing.assert_close(found.confidence, expected.confidence, rtol=1e-3, atol=1e-5)
    stock.config.is_causal = True
    with pytest.raises(ValueError, match=r"config\.is_causal=True, so tokens do not see later ones"):
        generate(stock, ids())


def test_packed_documents_do_not_see_each_other():
    tested, inputs = model(), ids(1, 10)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        logits = tested(inputs, position_ids=positions).logits
        assert_close(logits[:, :4], tested(inputs[:, :4]).logits)
        assert_close(logits[:, 4:], tested(inputs[:, 4:]).logits)


def test_rows_end_at_eos_and_eos_is_suppressed():
    tested = model().double()
    for how in ("logit", "confidence"):
        out = tested.generate(ids(), suppress_eos=how, eos_token_id=[5, 7], return_dict_in_generate=True, **SHAPE)
        assert how == "confidence" or not torch.isin(out.sequences[:, 9:], torch.tensor([5, 7])).any()
    free = tested.generate(ids(), return_dict_in_generate=True, **SHAPE)
    end = int(free.sequences[0, 12])
    out = tested.generate(ids(), stop_at_eos=True, eos_token_id=end, pad_token_id=0, **SHAPE)
    for row, expected in zip(out[:, 9:].tolist(), free.sequences[:, 9:].tolist(), strict=True):
        stop = expected.index(end) + 1 if end in expected else 12
        assert row == expected[:stop] + [0] * (12 - stop)
    held = tested.generate(ids(1), suppress_eos="confidence", eos_token_id=end, return_dict_in_generate=True, **SHAPE)
    for block in (slice(9, 15), slice(15, 21)):
        steps = held.revealed[0, block][held.sequences[0, block] == end]
        assert all(step % 4 == 3 or (held.revealed[0, block] <= step).all() for step in steps)


# ---------------------------------------------------------------- the objective and the bound


class Uniform(torch.nn.Module):
    """Stands for a model that knows nothing."""

    def __new__(cls):
        made = model()
        torch.nn.init.zeros_(made.lm_head.weight)
        return made


def test_the_bound_of_a_uniform_model_is_exact():
    """V − 1 tokens have probability: the mask token has none. One token is exact with one draw."""
    tested = Uniform()
    answer = torch.ones(2, 9, dtype=torch.bool)
    answer[0, :4], answer[1, :8] = False, False
    for samples in (1, 3):
        nats, error = bound(tested, ids(), answer, samples, mask_token_id=MASK)
        torch.testing.assert_close(nats, torch.tensor([5.0, 1.0]) * math.log(96), rtol=1e-6, atol=0)
        assert error[1] == 0 and (samples == 1 or error[0] < 1e-5)
    with pytest.raises(ValueError, match="samples=0: must be at least 1"):
        bound(tested, ids(), answer, 0, mask_token_id=MASK)


def test_the_bound_is_the_any_order_value(monkeypatch):
    """For three tokens, the mean over all orders of the chain rule, each conditional by its own forward pass."""
    tested, inputs = model().double(), ids(1, 5)
    answer = torch.tensor([[False, True, True, False, True]])
    places, total = [1, 2, 4], 0.0
    for order in itertools.permutations(places):
        left = set(places)
        for place in order:
            hidden = inputs.clone()
            hidden[0, sorted(left)] = MASK
            logits = tested(hidden).logits[0, place]
            logits[MASK] = -torch.inf
            total -= float(logits.log_softmax(-1)[inputs[0, place]].detach()) / 6
            left.remove(place)
    values = [bound(tested, inputs, answer, 6, mask_token_id=MASK, seed=seed) for seed in range(60)]
    nats = torch.stack([value for value, _ in values])
    spread = nats.std() / 60**0.5
    assert abs(float(nats.mean()) - total) < 4 * float(spread) + 1e-9
    assert float(spread) < 0.05 * total
    # the error of independent draws is no less than that of spread ones
    assert float(torch.stack([error for _, error in values]).mean()) > 0.8 * float(nats.std())
    again, _ = bound(tested, torch.cat([ids(1, 5, 9), inputs]), answer.repeat(2, 1), 6, mask_token_id=MASK)
    torch.testing.assert_close(again[1], bound(tested, inputs, answer, 6, mask_token_id=MASK)[0][0])


def draws(task: MaskedDiffusion, count: int, length: int = 8):
    examples = [{"input_ids": ids(1, length)[0], "draw": torch.tensor([7, number])} for number in range(count)]
    return task.collate(examples)


def test_noise_follows_from_the_row_and_weights_from_the_noise():
    task = MaskedDiffusion(random_length=0.0)
    batch, alone = draws(task, 64), draws(task, 64)
    parts = [task.collate([{"input_ids": ids(1, 8)[0], "draw": torch.tensor([7, n])}]) for n in range(64)]
    for name in batch:
        assert torch.equal(batch[name], alone[name])
        assert torch.equal(batch[name], torch.cat([part[name] for part in parts]))
    assert (batch["input_ids"][:, 0] != -1).all() and (batch["labels"][:, 0] == -100).all()
    hidden = batch["input_ids"] == -1
    assert torch.equal(hidden, batch["loss_weights"] > 0)
    many = draws(MaskedDiffusion(random_length=0.0), 4000)
    assert float(many["loss_weights"][:, 1:].mean()) == pytest.approx(1, abs=0.1)  # E[1/p · hidden] = 1
    mdlm = draws(MaskedDiffusion(random_length=0.0, noise="mdlm"), 4000)
    assert float(mdlm["loss_weights"][:, 1:].mean()) == pytest.approx(1 - 1e-3, abs=0.1)
    shares = (many["input_ids"][:, 1:] == -1).double().mean(1)
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.01)  # antithetic: nearly exact
    lengths = [draws(MaskedDiffusion(random_length=1.0), 1)["input_ids"].shape[1]]
    assert 2 <= lengths[0] <= 8


def test_cart_weights_by_hand():
    hidden = torch.tensor([[True, False, True, True]])
    geometric = [0.3, 0.3 * 0.7, 0.3 * 0.49]
    expected = [0.5 * geometric[0], 0.0, 0.5 * geometric[0], 0.5 * geometric[1]]
    torch.testing.assert_close(cart(hidden, 0.3)[0, [0, 2, 3]], torch.tensor(expected, dtype=torch.float64)[[0, 2, 3]])


@pytest.mark.parametrize("denominator", ["token", "sequence", "batch"])
def test_denominators(denominator):
    """Denominators for two rows of 7 and 4 tokens that may be hidden, from the definition."""
    task, tested = MaskedDiffusion(random_length=0.0, denominator=denominator), model().double()
    batch = task.collate([
        {"input_ids": ids(1, 8)[0], "labels": torch.tensor([-100] * first + [5] * (8 - first)),
         "draw": torch.tensor([1, first])} for first in (1, 4)
    ])  # fmt: skip
    batch["labels"] = torch.where(batch["labels"] == -100, -100, ids(1, 8))
    loss = task.forward(tested.train(), **batch).loss
    noised = batch["input_ids"].masked_fill(batch["input_ids"] == -1, MASK)
    each = F.cross_entropy(tested(noised).logits.flatten(0, 1), ids(1, 8).repeat(2, 1).flatten(), reduction="none")
    reference = MaskedDiffusion(random_length=0.0)
    weights = reference.hide(
        {"input_ids": ids(1, 8).repeat(2, 1), "labels": batch["labels"]}, torch.zeros(2, 1, dtype=torch.float64),
        [torch.Generator().manual_seed(0)] * 2,
    )["loss_weights"]  # fmt: skip
    assert weights.shape == (2, 8)
    may = (batch["labels"] != -100).sum(1).tolist()
    assert may == [7, 4]
    scale = {"token": [11, 11], "sequence": [7 * 2, 4 * 2], "batch": [2, 2]}[denominator]
    own = batch["loss_weights"] * (torch.tensor(may)[:, None] if denominator == "sequence" else 1)  # 1/p where hidden
    expected = sum(float((each.view(2, 8)[row] * own[row]).sum()) / scale[row] for row in range(2))
    assert float(loss) == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("options", "said"), [
    ({"max_new_tokens": 10, "block_length": 4}, "max_new_tokens=10: must be a multiple of block_length=4"),
    ({"max_new_tokens": 12, "block_length": 4, "steps": 8}, "steps=8: must be a multiple of the 3 blocks"),
    ({"max_new_tokens": 12, "block_length": 4, "steps": 15}, "steps=15: must be at most max_new_tokens=12"),
    ({"temperature": -1.0}, "temperature=-1.0: must be finite and at least 0"),
    ({"top_p": 0.0}, "top_p=0.0: must be above 0"),
    ({"top_k": 0}, "top_k=0: must be at least 1"),
    ({"policy": "fourier_samplr"}, r"policy='fourier_samplr': no such method \(did you mean 'fourier_sampler'\?\)"),
    ({"block_cache": "duel"}, r"block_cache='duel': no such method \(did you mean 'dual'\?\)"),
    ({"schedule": "cosine"}, "schedule='cosine': must be one of linear, dream, exact"),
    ({"num_beams": 4}, "num_beams=4 is an option of autoregressive models.*no beams"),
    ({"do_sample": True}, "do_sample=True is an option of autoregressive models: give temperature"),
    ({"top_kk": 3}, r"top_kk=3: no option of DiffusionGenerationConfig \(did you mean 'top_k'\?\)"),
    ({"infill": True}, "max_new_tokens=64: infill=True"),
    ({"infill": True, "max_new_tokens": 0}, "infill=True: no row holds the mask token 96"),
    ({"mask_token_id": 97}, "mask_token_id=97: must be below vocab_size=97"),
    ({"mask_token_id": 2}, "mask_token_id=2 is a real token"),
    ({"eos_token_id": -1}, "eos_token_id=-1: must be at least 0 and below vocab_size=97"),
    ({"pad_token_id": 97}, "pad_token_id=97: must be at least 0"),
    ({"cfg_keep_tokens": [1, 97]}, "cfg_keep_tokens=97: must be at least 0"),
    ({"max_new_tokens": 8.0}, "max_new_tokens=8.0: must be a whole number"),
    ({"steps": True}, "steps=True: must be a whole number"),
    ({"temperature": "1"}, "temperature='1': must be a number"),
    ({"policy": Fourier}, r"policy=<class .*: give a name, or a method such as .*\(\)"),
    ({"block_cache": 3}, "block_cache=3: give a name, or a method"),
    ({"seed": "a"}, "seed='a': give a whole number, or one a row"),
    ({"seed": [1]}, "seed of 1 rows: inputs have 2"),
    ({"suppress_eos": "yes"}, "suppress_eos='yes': must be"),
    ({"generation_config": {}}, "generation_config of type dict"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        model().generate(ids(), **options)


def test_inputs_that_do_not_fit_are_refused():
    tested = model()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, -2:] = 0
    with pytest.raises(ValueError, match="row 1 is padded on the right"):
        tested.generate(ids(), mask)
    for wrong in (-2, 97):
        holes = ids()
        holes[1, 3] = wrong
        with pytest.raises(ValueError, match=f"inputs: row 1 holds the id {wrong}, .* below vocab_size=97"):
            tested.generate(holes)
        mask = torch.ones_like(holes)
        mask[1, :4] = 0  # of padding it does not matter
        assert tested.generate(holes, mask, max_new_tokens=2, block_length=2)[1, 3] == wrong
    with pytest.raises(ValueError, match="inputs: give token ids"):
        tested.generate([[1, 2]])
    for kind in (torch.float64, torch.bool, torch.uint8, torch.int16):  # a comparison with a large size would wrap
        with pytest.raises(ValueError, match=rf"inputs of {kind}: give token ids of torch\.int64"):
            tested.generate(ids().to(kind))
    short = {"max_new_tokens": 2, "block_length": 2}
    assert torch.equal(tested.generate(ids().int(), **short), tested.generate(ids(), **short).int())
    holes = ids()
    holes[1, 3] = MASK
    with pytest.raises(ValueError, match="row 1 holds the mask token 96; pass infill=True"):
        tested.generate(holes)
    with pytest.raises(ValueError, match="row 0 has no first token"):
        model(shift=True).generate(ids(1, 0))
    refused = pytest.raises(ValueError, match="is a diffusion model: caches evict causally")
    with refused, compress(tested, StreamingLLM(budget=16)):
        pass
    with pytest.raises(ValueError, match="of type DiffusionGenerationConfig: an autoregressive model takes a Generat"):
        FathomForCausalLM(FathomConfig(**SIZES)).generate(ids(1), generation_config=DiffusionGenerationConfig())
    with pytest.raises(ValueError, match="past_key_values: a diffusion model's tokens see later ones"):
        tested(ids(), past_key_values=fathom.models.hf_versions.new_cache(tested.config, 1))
    causal = tiny_model()
    with pytest.raises(ValueError, match=r"config\.is_causal=True"):
        generate(causal, ids(), mask_token_id=MASK)
    causal = FathomForCausalLM(FathomConfig(**SIZES, is_causal=False))
    with pytest.raises(ValueError, match="names no mask token; give its id"):
        generate(causal, ids())
    with pytest.raises(ValueError, match="prompt's 20 tokens that is more than the model's 24 learned"):
        model("gpt2", max_position_embeddings=24).generate(ids(1, 20), max_new_tokens=8, block_length=8)


@pytest.mark.parametrize(("section", "said"), [
    ({"name": "masked"}, "mask_token_id=None: name the mask token"),
    ({"name": "masked", "mask_token_id": 97}, "mask_token_id=97: must be below vocab_size=97"),
    ({"name": "masked", "mask_token_id": 2}, "mask_token_id=2 is eos_token_id"),
])  # fmt: skip
def test_mask_tokens_of_the_config(section, said):
    with pytest.raises(ValueError, match=said):
        FathomConfig(**SIZES, diffusion=section)


def test_options_of_the_task():
    for options, said in (
        ({"eps": 0.0}, "eps=0.0: must be between 0 and 1"), ({"weight": "t"}, "weight='t'"),
        ({"prompt_field": "q"}, "answer_field=None: must be given if and only if"), ({"draws": 0}, "draws=0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            MaskedDiffusion(**options)
    assert callable(with_mask)


# ---------------------------------------------------------------- the authors' checkpoints


@pytest.mark.parametrize("sharded", [False, True], ids=["", "sharded"])
@pytest.mark.parametrize("layout", ["llada", "Dream"])
def test_the_authors_layouts_load(layout, sharded, tmp_path):
    """Against the block written out, from weights under the names and fields that the authors' files have."""
    llada = layout == "llada"
    theirs = model("llama" if llada else "qwen2", shift=not llada, init="hf", embed_scale=1.0,
                   num_key_value_heads=4 if llada else 2, norm_eps=1e-5 if llada else 1e-6)  # fmt: skip
    state = {name: x.contiguous() for name, x in theirs.state_dict().items()}
    config = {"model_type": layout, "vocab_size": 97, "mask_token_id": MASK, "eos_token_id": 2, "pad_token_id": 0,
              "rope_theta": 10_000.0, "rms_norm_eps": theirs.config.norm_eps,
              "auto_map": {"AutoModel": "x.Y"}}  # fmt: skip
    if llada:
        names = {"embed_tokens": "wte", "input_layernorm": "attn_norm", "self_attn.o_proj": "attn_out",
                 "post_attention_layernorm": "ff_norm", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj",
                 "mlp.down_proj": "ff_out", "self_attn.": "", "model.layers": "model.blocks",
                 "model.norm": "model.ln_f", "lm_head": "model.ff_out", "model.": "model.transformer."}  # fmt: skip
        renamed = {}
        for name, tensor in state.items():
            for ours, other in names.items():
                name = name.replace(ours, other, 1)
            renamed[name] = tensor
        assert "model.transformer.blocks.0.q_proj.weight" in renamed and "model.transformer.ff_out.weight" in renamed
        state = renamed
        config |= {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 56,
                   "max_sequence_length": 64, "embedding_size": 97, "weight_tying": False, "block_type": "llama",
                   "layer_norm_type": "rms", "activation_type": "silu", "include_bias": False,
                   "rope": True}  # fmt: skip
    else:
        config |= {**GROUPED, "hidden_act": "silu", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if sharded:
        parts = [dict(list(state.items())[i::2]) for i in range(2)]
        where = {name: f"model-{i}.safetensors" for i, part in enumerate(parts) for name in part}
        for i, part in enumerate(parts):
            save_file(part, tmp_path / f"model-{i}.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    else:
        save_file(state, tmp_path / "model.safetensors")
    loaded = FathomForMaskedDiffusion.from_pretrained(tmp_path).eval()
    assert loaded.config.diffusion == {**MASKED, "shift": not llada}
    assert sum(p.numel() for p in loaded.parameters()) == sum(x.numel() for x in state.values())
    plain = PlainModel(loaded)
    states = plain.run(ids(1)[0].tolist(), range(9), [{}, {}])
    expected = torch.stack([plain.weights["lm_head.weight"] @ states[max(c - (not llada), 0)] for c in range(9)])
    with torch.no_grad():
        assert_close(loaded(ids(1)).logits[0].double(), expected)
        assert_close(loaded(ids(1)).logits, theirs(ids(1)).logits)
    if llada:
        (tmp_path / "config.json").write_text(json.dumps({**config, "alibi": True}))
        with pytest.raises(ValueError, match="llada config field alibi=True is not implemented here"):
            FathomForMaskedDiffusion.from_pretrained(tmp_path)
