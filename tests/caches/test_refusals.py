"""What cannot work is refused before the first forward, with the argument, the value and the remedy."""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from cache_cases import SIZES, build, get_model
from transformers import (
    AttentionInterface,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    pipeline,
)

from fathom.caches import (
    H2O,
    KIVI,
    TOVA,
    VQKV,
    FourierAttention,
    FreqKV,
    Full,
    PyramidKV,
    Scored,
    SnapKV,
    StreamingLLM,
    TreeKV,
    WeightedKV,
    build_cache,
    cache_shape,
    compress,
    from_dict,
    prefill,
    search_channels,
)
from fathom.caches.base import CacheShape
from fathom.caches.versions import CACHE_NAME
from fathom.ops.tree_sweep import tree_sweep
from fathom_cli.cache import parse_method


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: TreeKV(budget=10, n_sink=4, n_recent=8), "n_sink"),
        (lambda: TreeKV(budget=0), "integer ≥ 1"),
        (lambda: TreeKV(budget=64, n_recent=8, block=40), "smaller block"),
        (lambda: TreeKV(scope=3), "pairs"),
        (lambda: TreeKV(score="best"), "avg, sum, last, none"),
        (lambda: WeightedKV(merge_stats="mean"), "keep, sum"),
        (lambda: StreamingLLM(budget=64, n_recent=10), "budget − n_sink = 60"),
        (lambda: TOVA(budget=64, n_recent=3), "no recent window"),
        (lambda: SnapKV(kernel=4), "odd"),
        (lambda: FreqKV(ratio=1.0), "ratio < 1"),
        (lambda: FreqKV(budget=4), "more than"),
        (lambda: KIVI(bits=3), "2, 4 or 8"),
        (lambda: KIVI(bits=4.0), r"bits=4.0\): use an integer"),
        (lambda: KIVI(residual=100), "multiple of group"),
        (lambda: TreeKV(stride=True), r"stride=True\): use an integer"),
        (lambda: TreeKV(scope=2.0), r"scope=2.0\): use an integer"),
        (lambda: Scored(scorer=[1]), r"scorer=\[1\]\): registered are knorm"),
        (lambda: Scored(compression_ratio=False, acts_on="prompt"), "compression_ratio=False"),
        (lambda: FreqKV(ratio=False), "ratio=False.*ratio < 1"),
        (lambda: from_dict({"name": ["treekv"]}), "does not exist"),
        (lambda: Scored(scorer="none"), "knorm"),
        (lambda: Scored(compression_ratio=0.5), "acts_on='prompt'"),
        (lambda: WeightedKV(merge="no"), r"merge='no'\): use True or False"),
        (lambda: TreeKV(budget=True), r"budget=True\): use an integer"),
        (lambda: FreqKV(ratio="half"), "ratio='half'.*ratio < 1"),
        (lambda: Scored(compression_ratio="half", acts_on="prompt"), "compression_ratio='half'.*ratio < 1"),
        (lambda: from_dict({"name": "tree"}), "treekv"),
        (lambda: from_dict({"name": "treekv", "bugdet": 3}), "budget"),
    ],
)
def test_options(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("budget", [6, 16, 64, 100, 1024])
def test_defaults_follow_from_the_budget(budget):
    """One rule in Python, in JSON and on the command line: sinks and recent tokens are half the budget."""
    for cls in (TreeKV, WeightedKV, H2O):
        method = cls(budget=budget)
        assert method.n_recent == max(0, budget // 2 - method.n_sink)
        assert parse_method(cls.name, budget, None) == from_dict({"name": cls.name, "budget": budget}) == method
        assert from_dict(method.to_dict()) == method
    tree = TreeKV(budget=budget)
    assert tree.block == max(1, min(32, (budget - tree.n_sink - tree.n_recent) // 3))
    assert SnapKV(budget=budget).n_recent == PyramidKV(budget=budget).n_recent == min(32, budget // 2)
    shape = CacheShape(1, 2, 8, 8, 2, 3)
    sized = TreeKV.at_fraction(0.25, shape, 512)
    assert sized.n_recent == sized.budget // 2 - 4


@pytest.mark.parametrize("method,argument", [(VQKV, "codebooks"), (FourierAttention, "channels")])
def test_calibration_files_may_be_paths(method, argument):
    """And then survive JSON as strings."""
    by_path = method(**{argument: Path("a") / "b.file"})
    assert by_path == method(**{argument: os.path.join("a", "b.file")})
    assert from_dict(json.loads(json.dumps(by_path.to_dict()))) == by_path
    with pytest.raises(ValueError, match=f"{argument}=5.: name a file"):
        method(**{argument: 5})


def test_papers_split():
    assert TreeKV() == TreeKV(budget=1024, n_sink=4, n_recent=508, block=32)


def test_flash_backend_is_switched_and_says_so():
    """Another attention backend gives no weights: inside the context ours runs, with a warning; outside, it is back."""

    def fused(*args, **kwargs):
        raise AssertionError("the model's own backend ran under compress")

    AttentionInterface.register("backend_without_weights", fused)
    model, ids = build("llama"), torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    with compress(model, H2O(budget=16)):
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    model.set_attn_implementation("backend_without_weights")
    with pytest.raises(AssertionError, match="own backend"):
        model(ids)
    with pytest.warns(UserWarning, match="instead of 'backend_without_weights'"), compress(model, H2O(budget=16)):
        got = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, expected)
    assert model.config._attn_implementation == "backend_without_weights"
    model.set_attn_implementation("sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compress(model, H2O(budget=16)):
            pass


def test_models_without_rotary_positions():
    """GPT-2: slot positions cannot be given, and the error says what works; original ones can."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, **sizes)).eval()
    ids = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    for method, words in ((TreeKV(budget=16), "TreeKV.*GPT2LMHeadModel.*use positions='original'"), (FreqKV(), "TOVA")):
        with pytest.raises(ValueError, match=words), compress(model, method):
            pass
    with pytest.raises(ValueError, match="calibration='post_rope'"):
        search_channels(model, [ids[:1]], frequencies=2, n_sink=1, n_local=4)
    stock = model(ids).logits
    for cls in (TreeKV, WeightedKV, H2O, TOVA, SnapKV, StreamingLLM):
        with compress(model, cls(budget=16, positions="original")):
            cache = prefill(model, ids)[CACHE_NAME]
            assert cache.layers[0].states[0].stored <= 16
            torch.testing.assert_close(model(ids).logits, stock, rtol=1e-5, atol=1e-5)


def test_equality_of_budget_and_protected_is_streaming_llm():
    ids = torch.randint(1, 97, (2, 50), generator=torch.Generator().manual_seed(0))
    model, logits, protected = get_model("llama"), [], {"budget": 16, "n_sink": 3, "n_recent": 13}
    equal = (TreeKV(**protected), H2O(**protected), WeightedKV(**protected, merge=False))
    for method in (StreamingLLM(budget=16, n_sink=3), *equal):
        with compress(model, method):
            cache = prefill(model, ids[:, :30])[CACHE_NAME]
            logits.append(torch.cat([model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(30, 50)], 1))
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-5, atol=1e-5)
    with compress(model, WeightedKV(**protected)):  # the same keys, but values are folded into the window's oldest
        cache = prefill(model, ids[:, :17])[CACHE_NAME]
        merged = model(ids[:, 17:18], **{CACHE_NAME: cache}).logits
    with compress(model, StreamingLLM(budget=16, n_sink=3)):
        cache = prefill(model, ids[:, :17])[CACHE_NAME]
        assert (merged - model(ids[:, 17:18], **{CACHE_NAME: cache}).logits).abs().max() > 1e-3


def test_a_budget_of_sinks_alone_is_streaming_llm():
    ids = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    model, logits, sinks = get_model("llama"), [], {"budget": 3, "n_sink": 3, "n_recent": 0}
    for method in (StreamingLLM(budget=3, n_sink=3), TreeKV(**sinks), H2O(**sinks), TOVA(**sinks), WeightedKV(**sinks)):
        with compress(model, method):
            cache = prefill(model, ids[:, :9], chunk_size=4)[CACHE_NAME]
            logits.append(torch.cat([model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(9, 30)], 1))
            assert cache.nbytes() == method.cache_bytes(cache_shape(model, batch=2), 9, 21)
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [KIVI(group=8, residual=8), TreeKV(budget=8), SnapKV(budget=8)])
def test_other_rows_than_those_of_the_cache(method):
    model, ids = get_model("llama"), torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    with compress(model, method):
        for held, new in ((2, 1), (1, 2)):
            cache = prefill(model, ids[:held])[CACHE_NAME]
            with pytest.raises(ValueError, match=rf"has {new} rows, but the cache holds {held}"):
                model(ids[:new, :1], **{CACHE_NAME: cache})
            again = model(ids[:held, :1], **{CACHE_NAME: cache}).logits  # nothing was stored by the refused call
            fresh = prefill(model, ids[:held])[CACHE_NAME]
            assert torch.equal(again, model(ids[:held, :1], **{CACHE_NAME: fresh}).logits)


@torch.no_grad()
def test_beams_after_a_padded_turn_are_told_of_their_rows():
    """Not of their padding, which is that of other rows."""
    model, ids = get_model("llama"), torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    mask, method = torch.ones_like(ids), TreeKV(budget=8)
    mask[1, :5] = 0
    with compress(model, method):
        cache = prefill(model, ids[:, :12], attention_mask=mask[:, :12])[CACHE_NAME]
        with pytest.raises(ValueError, match="has 4 rows, but the cache holds 2"):
            model.generate(ids, attention_mask=mask, **{CACHE_NAME: cache}, num_beams=2, max_new_tokens=2)


def test_models():
    sliding = MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=8, **SIZES))
    with pytest.raises(ValueError, match="no full-attention layer"), compress(sliding, TreeKV()):
        pass
    model = get_model("llama")
    model.config.num_kv_shared_layers = 1
    try:
        with pytest.raises(ValueError, match="shares keys"), compress(model, TreeKV()):
            pass
    finally:
        del model.config.num_kv_shared_layers
    with pytest.raises(ValueError, match="PreTrainedModel"), compress(torch.nn.Linear(2, 2), TreeKV()):
        pass
    with compress(model, TreeKV()), pytest.raises(ValueError, match="under compress already"), compress(model, TOVA()):
        pass


def test_caches_and_masks():
    model = get_model("llama")
    ids = torch.randint(1, 97, (2, 12))
    method = TreeKV(budget=16, n_recent=4, block=2)
    full = model(ids, use_cache=True)[CACHE_NAME]
    with compress(model, method):
        with pytest.raises(ValueError, match="under compress, pass none"):
            model(ids, **{CACHE_NAME: full})
        with pytest.raises(ValueError, match="StaticCache"):
            model(ids, **{CACHE_NAME: StaticCache(config=model.config, max_cache_len=20)})
        with pytest.raises(ValueError, match="offloaded"):
            model(ids, **{CACHE_NAME: DynamicCache(config=model.config, offloading=True)})
        with pytest.raises(ValueError, match=r"input_ids of shape .2, 0.: give at least 1 token"):
            prefill(model, ids[:, :0])
        with pytest.raises(ValueError, match="2-D padding mask"):
            model(ids, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool))
        ours = prefill(model, ids)[CACHE_NAME]
        assert torch.isfinite(model(ids).logits).all()  # and the model still works after the refusals
    with pytest.raises(ValueError, match="inside"):
        model(ids, **{CACHE_NAME: ours})
    with compress(model, TOVA(budget=16)), pytest.raises(ValueError, match="compress was entered with"):
        model(ids, **{CACHE_NAME: ours})
    with compress(get_model("qwen3"), method), pytest.raises(ValueError, match="another model"):
        get_model("qwen3")(ids, **{CACHE_NAME: ours})


@pytest.mark.parametrize("method", [FreqKV(budget=64), Full(), TreeKV(budget=16)])
def test_packed_documents(method):
    """Refused in training, scoring and with a cache; pads may stand anywhere, and training keeps no cache."""
    model = copy.deepcopy(get_model("llama"))
    ids = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    packed, alone = torch.arange(20).repeat(2)[None], torch.arange(40)[None]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    before = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with compress(model, method):
        for training in (True, False):
            model.train(training)
            for given in ({}, {"use_cache": False}, {"use_cache": None}, {"attention_mask": torch.ones_like(ids)}):
                with pytest.raises(ValueError, match="packed documents"):
                    model(ids, position_ids=packed, **given)
                assert model(ids, position_ids=alone, **given).logits.isfinite().all()
            assert model(ids, position_ids=before, attention_mask=mask).logits.isfinite().all()
            assert (model(ids).get(CACHE_NAME) is None) == training
        cache = prefill(model, ids)[CACHE_NAME]
        with pytest.raises(ValueError, match="packed documents"):
            model(ids[:, :4], position_ids=torch.tensor([[40, 41, 0, 1]]), **{CACHE_NAME: cache})
        assert model(ids[:, :1], position_ids=torch.tensor([[40]]), **{CACHE_NAME: cache}).logits.isfinite().all()


@pytest.mark.parametrize(
    "method", [StreamingLLM(budget=16, positions="original"), Scored(budget=16, scorer="keydiff"), KIVI(2, 8, 16)]
)
def test_plain_cache_objects(method):
    """Passed to generate without `compress`: the same tokens as under it; a batch must be declared free of padding."""
    model = get_model("llama")
    ids = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(4))
    options = {"do_sample": False, "max_new_tokens": 8}
    with compress(model, method):
        expected = model.generate(ids, **options)
    got = model.generate(ids, **{CACHE_NAME: build_cache(model, method, equal_rows=True)}, **options)
    assert torch.equal(got, expected)
    one = model.generate(ids[:1], **{CACHE_NAME: build_cache(model, method)}, **options)
    assert torch.equal(one, expected[:1])
    with pytest.raises(ValueError, match="equal_rows=True"):
        model.generate(ids, **{CACHE_NAME: build_cache(model, method)}, **options)
    with pytest.raises(ValueError, match="inside"):
        model.generate(ids[:1], **{CACHE_NAME: build_cache(model, H2O(budget=16, n_recent=4))}, **options)


def test_pipeline():
    """A text-generation pipeline under compress gives what generate gives."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", padding_side="left")
    model = get_model("llama")
    texts = [" ".join(f"w{i}" for i in range(1, 40)), " ".join(f"w{i}" for i in range(5, 30))]
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")  # else it moves to a GPU
    with compress(model, TreeKV(budget=16, n_recent=4, block=2)):
        both = generate(texts, batch_size=2, max_new_tokens=6, do_sample=False, return_full_text=False)
        for text, result in zip(texts, both):
            ids = tokenizer(text, return_tensors="pt").input_ids
            alone = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
            assert tokenizer.decode(alone) == result[0]["generated_text"].strip()


def test_dynamic_cache_stays_stock_outside():
    model = get_model("llama")
    ids = torch.randint(1, 97, (1, 12))
    with compress(model, TOVA(budget=8)):
        model(ids)
    assert type(model(ids, use_cache=True)[CACHE_NAME]) is DynamicCache


def test_tree_counts_are_dyadic_for_any_scores():
    """T = 512, c = 128: 8, 8, 8, 8, 16, 16, 32, 32 tokens of each 64 stay, whatever the scores."""
    score = torch.rand(2, 3, 512, generator=torch.Generator().manual_seed(0))
    index, pointer = tree_sweep(score, 128, 0)
    counts = torch.stack([((index >= 64 * i) & (index < 64 * (i + 1))).sum(-1) for i in range(8)], -1)
    assert (counts == torch.tensor([8, 8, 8, 8, 16, 16, 32, 32])).all() and pointer == 0
    index, _ = tree_sweep(torch.rand(1, 1, 4608 - 4 - 508), 512, 0)
    counts = [int(((index + 4 >= 4 + 512 * i) & (index + 4 < 4 + 512 * (i + 1))).sum()) for i in range(8)]
    assert counts == [4, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("stride", [1, 2])
def test_tree_sweep_equals_the_rule_one_by_one(stride):
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        capacity = int(torch.randint(1, 12, (), generator=generator))
        excess, pointer = int(torch.randint(0, 30, (), generator=generator)), 0
        pointer = start = int(torch.randint(0, capacity, (), generator=generator))
        score = torch.randint(0, 6, (capacity + excess,), generator=generator).float()
        slots = list(range(capacity))
        for token in range(capacity, capacity + excess):
            slots.append(token)
            older, newer = slots[pointer], slots[pointer + 1]
            slots.remove(newer if score[older] > score[newer] else older)
            pointer = (pointer + stride) % capacity
        index, end = tree_sweep(score.view(1, 1, -1), capacity, start, stride)
        assert index.flatten().tolist() == slots and end == pointer
