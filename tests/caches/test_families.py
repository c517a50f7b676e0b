"""Families beside the suite's: layers without positions, partial rotation, linear attention; and those refused."""

import pytest
import torch
import transformers
from cache_cases import LARGE, SIZES, SMALL, make, method_of, randomize, relative
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from fathom import FathomConfig, FathomForCausalLM
from fathom.caches import (
    FourierAttention,
    Full,
    StreamingLLM,
    TreeKV,
    build_cache,
    cache_shape,
    compress,
    prefill,
    search_channels,
)
from fathom.caches.record import record
from fathom.caches.versions import CACHE_NAME

NOPE = {"no_rope_layers": [1, 0, 1]}
FAMILIES = {
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(num_key_value_heads=2, **NOPE, **SIZES)),
    "stablelm": lambda: StableLmForCausalLM(StableLmConfig(num_key_value_heads=2, **SIZES)),
    "lfm2": lambda: Lfm2ForCausalLM(
        Lfm2Config(num_key_value_heads=2, layer_types=["conv", "full_attention", "full_attention"], **SIZES)
    ),
}


def narrow_values():
    if not hasattr(transformers, "MiMoV2FlashConfig"):
        pytest.skip("this transformers has no MiMo-V2-Flash")
    torch.manual_seed(0)
    kinds = {"layer_types": ["full_attention"] * 3, "mlp_layer_types": ["dense"] * 3}
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 8, **kinds, **SIZES}
    return randomize(transformers.MiMoV2FlashForCausalLM(transformers.MiMoV2FlashConfig(**sizes))).eval()


@pytest.fixture(params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    return randomize(FAMILIES[request.param]()).eval()


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("name", ["treekv", "freqkv"])
def test_slot_positions_with_room_are_the_stock_model(model, name, ids):
    stock = model(ids).logits
    with compress(model, make(name, {name: {"budget": 256}})):
        cache = prefill(model, ids[:, :20])[CACHE_NAME]
        steps = [model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(20, 30)]
    assert relative(torch.cat(steps, dim=1), stock[:, 20:]) < 1e-5


def test_beams_take_every_layer_along(model, ids):
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    stock = model.generate(ids, **options)
    with compress(model, Full()):
        assert torch.equal(model.generate(ids, **options), stock)


@torch.no_grad()
def test_bytes_count_every_layer():
    model = FAMILIES["lfm2"]().eval()
    ids = torch.randint(1, 97, (2, 30))
    with compress(model, Full()):
        cache = prefill(model, ids)[CACHE_NAME]
    states = cache.layers[0].conv_states[0]
    assert cache.nbytes() == sum(layer.nbytes() for layer in cache.layers[1:]) + states.untyped_storage().nbytes()


@torch.no_grad()
def test_recorded_keys_of_a_layer_without_positions(ids):
    """Calibration sees the same keys before and after a rotation that is not there."""
    torch.manual_seed(0)
    model = randomize(FAMILIES["smollm3"]()).eval()
    pairs = [[keys for keys, _ in record(model, ids[:1], pre_rope=before)] for before in (True, False)]
    same = [relative(before, after) < 1e-5 for before, after in zip(*pairs)]
    assert same == [False, True, False]


@pytest.mark.parametrize("name", ["treekv", "tova", "freqkv"])
def test_dynamic_rope_of_a_row_does_not_depend_on_the_others(name, ids):
    """Dynamic NTK scales by the longest position: with slot positions by the slots of the row itself."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes = {**SIZES, "max_position_embeddings": 8}
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=2, rope_parameters=rope, **sizes)
    model, mask = randomize(LlamaForCausalLM(config)).eval(), torch.ones_like(ids)
    mask[1, :18] = 0
    with compress(model, make(name, SMALL)):
        together = model.generate(ids, attention_mask=mask, max_new_tokens=15, do_sample=False)
        alone = model.generate(ids[1:, 18:], max_new_tokens=15, do_sample=False)
    assert torch.equal(together[1:, 18:], alone)


@torch.no_grad()
def test_values_narrower_than_keys(method_name, ids):
    """Closed forms in bytes know both widths (MiMo-V2: 16 for keys, 8 for values)."""
    if method_of(method_name).calibration is not None:
        pytest.skip("its files know one width")
    model, method = narrow_values(), make(method_name, SMALL, positions="original")
    stock = model(ids).logits
    shape = cache_shape(model, batch=2)
    assert (shape.key_dim, shape.value_dim) == (16, 8)
    if method.pre_rope:
        return  # rotates a part of the channels
    with compress(model, make(method_name, LARGE, positions="original")):
        assert relative(model(ids).logits, stock) < 1e-5
    with compress(model, method):
        cache = prefill(model, ids)[CACHE_NAME]
        assert cache.nbytes() == method.cache_bytes(shape, 30)


def test_values_narrower_than_keys_have_no_channel_sets(ids):
    model = narrow_values()
    with pytest.raises(ValueError, match="16 channels for keys and 8 for values"), compress(model, FourierAttention()):
        pass
    with pytest.raises(ValueError, match="16 channels for keys and 8 for values"):
        search_channels(model, [ids[:1]], frequencies=2, n_local=8)


def test_differential_attention_is_refused():
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(num_key_value_heads=2, **SIZES))
    with pytest.raises(ValueError, match="differential scores"), compress(model, Full()):
        pass


def test_refused():
    latent = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            first_k_dense_replace=3, **SIZES,
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="latents"), compress(latent, StreamingLLM(positions="original")):
        pass
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
    interleaved = GPTJForCausalLM(GPTJConfig(vocab_size=97, bos_token_id=None, eos_token_id=None, **sizes))
    words = r"half-split.*positions='original'|can be hooked"  # from transformers 5.24 it can be
    with pytest.raises(ValueError, match=words), compress(interleaved, TreeKV()):
        pass
    for depth, words in (("pause", "2 slots a token"), ("adaponderlm", "as many slots as a token runs")):
        slots = FathomForCausalLM(FathomConfig(num_key_value_heads=2, depth=depth, **SIZES))
        with pytest.raises(ValueError, match=f"{depth}.*{words}"), compress(slots, Full()):
            pass


def test_build_cache_refuses_the_same():
    slots = FathomForCausalLM(FathomConfig(num_key_value_heads=2, depth="pause", **SIZES))
    with pytest.raises(ValueError, match="2 slots a token"):
        build_cache(slots, Full())
