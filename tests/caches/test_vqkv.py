"""VQKV: codes, packing, the three attention paths, bookkeeping, codebook training and files."""

from __future__ import annotations

import dataclasses
import os
import warnings
from importlib.util import find_spec

import pytest
import torch
from cache_cases import SMALL, VOCABULARY, codebooks, get_model, make, relative

from fathom.caches import (
    VQKV,
    Codebooks,
    CodebookTraining,
    cache_shape,
    compress,
    load_codebooks,
    prefill,
    rope_bands,
    train_codebooks,
)
from fathom.caches.codebooks import learn, learn_groups, simvq_loss
from fathom.caches.record import fingerprint, record
from fathom.caches.versions import CACHE_NAME
from fathom.ops.bitpack import pack, packed_bytes, unpack
from fathom.ops.code_attention import histogram_mix, lookup_scores
from fathom.ops.residual_vq import decode, encode

SIZE = {"n_sink": 2, "n_local": 6, "flush_every": 4}


def long_ids(length=50, rows=2):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("entries", [2, 512, 1024, 65536])
def test_pack_round_trip(entries):
    bits = max(1, (entries - 1).bit_length())
    codes = torch.randint(0, entries, (3, 5, 7), dtype=torch.int32)
    packed = pack(codes, bits)
    assert packed.shape[-1] == packed_bytes(7, bits) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, 7), codes)
    with pytest.raises(ValueError, match="1 to 16 bits"):
        pack(codes, 17)


def test_encode_is_greedy_one_vector_at_a_time():
    torch.manual_seed(0)
    x, books = torch.randn(20, 6, dtype=torch.float64), torch.randn(4, 9, 6, dtype=torch.float64)
    codes = encode(x, books)
    for row in range(20):
        residual = x[row].clone()
        for stage in range(4):
            distance = ((residual - books[stage]) ** 2).sum(-1)
            assert codes[row, stage] == distance.argmin()
            residual -= books[stage, codes[row, stage]]
        torch.testing.assert_close(x[row] - residual, decode(codes[row], books))


def test_lookup_attention_equals_rebuilding():
    torch.manual_seed(0)
    codes = torch.randint(0, 11, (2, 3, 37, 5))
    books = torch.randn(1, 5, 11, 8, dtype=torch.float64)
    query, weights = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.rand(2, 3, 4, 37, dtype=torch.float64)
    dense = decode(codes, books[0])
    torch.testing.assert_close(lookup_scores(query, codes, books), query @ dense.transpose(2, 3))
    torch.testing.assert_close(histogram_mix(weights, codes, books), weights @ dense)


def test_key_groups_are_quantisers_of_their_own():
    """Codes over all stages = the codes of two residual quantisers, each on its own dims."""
    assert rope_bands(8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    options = CodebookTraining(steps=5, batch=128)
    fast, slow = rope_bands(8)
    books = learn_groups(x, 5, 12, (fast, slow), options)
    parts = learn(x[:, fast], 2, 12, options), learn(x[:, slow], 3, 12, options)
    codes = torch.cat([encode(x[:, dims], part) for dims, part in zip((fast, slow), parts)], dim=-1)
    assert torch.equal(encode(x, books), codes)
    rebuilt = torch.empty_like(x)
    rebuilt[:, fast], rebuilt[:, slow] = decode(codes[:, :2], parts[0]), decode(codes[:, 2:], parts[1])
    torch.testing.assert_close(decode(codes, books), rebuilt)
    unequal = learn_groups(x, 3, 12, ((0,), (1,), tuple(range(2, 8))), options)
    assert (unequal != 0).any(1).sum(1).tolist() == [1, 1, 6]


@pytest.mark.parametrize(
    "options,words",
    [
        ({"key_groups": ((0, 1), (1, 2))}, "each dim"),
        ({"key_groups": ((0,), ())}, "each dim"),
        ({"key_groups": ((0,), (1,)), "key_stages": 1}, "one stage or more"),
    ],
)
def test_key_groups_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        CodebookTraining(**options)


def test_key_groups_of_another_width_are_refused():
    with pytest.raises(ValueError, match="name 4 dims, but a key has 8"):
        train_codebooks(get_model("llama"), long_ids(), CodebookTraining(key_groups=rope_bands(4), steps=1))


def test_two_branches_attend_like_any_codes():
    model, ids, logits = get_model("llama"), long_ids(), []
    path = codebooks("llama", key_groups=rope_bands(8))
    for attention in ("dense", "lut"):
        with compress(model, VQKV(codebooks=path, attention=attention, **SIZE)):
            cache = prefill(model, ids[:, :30])[CACHE_NAME]
            logits.append(torch.cat([model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(30, 40)], 1))
    assert relative(logits[1], logits[0]) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("share", ["layer", "head", "model"])
def test_the_three_paths_agree(family, share):
    model, ids = get_model(family), long_ids()
    path = codebooks(family, share=share)
    logits = {}
    for attention in ("dense", "blocks", "lut"):
        for packing in ("int16", "bits"):
            method = VQKV(codebooks=path, attention=attention, pack=packing, **SIZE)
            with compress(model, method):
                cache = prefill(model, ids[:, :30])[CACHE_NAME]
                parts = [
                    model(ids[:, a:b], **{CACHE_NAME: cache}).logits
                    for a, b in ((30, 31), (31, 45), (45, 46), (46, 50))
                ]
                assert cache.nbytes() <= cache_shape(model, 2).token_bytes() * 50 * cache_shape(model).layers
            logits[attention, packing] = torch.cat(parts, 1)
    for got in logits.values():
        assert relative(got, logits["dense", "int16"]) < 1e-4


def test_codebooks_that_hold_every_vector_change_nothing(tmp_path):
    """N = 1, S ≥ M: the middle is exact, so are the logits."""
    model, ids = get_model("llama"), long_ids(rows=1)
    pairs = list(record(model, ids, pre_rope=False))
    keys = tuple(k.flatten(0, 2).view(1, 1, -1, k.shape[-1]) for k, _ in pairs)
    values = tuple(v.flatten(0, 2).view(1, 1, -1, v.shape[-1]) for _, v in pairs)
    Codebooks(keys, values, "layer", "post", "", fingerprint(model)).save(tmp_path / "all.safetensors")
    stock = model(ids).logits
    for attention in ("dense", "blocks", "lut"):
        with compress(model, VQKV(codebooks=str(tmp_path / "all.safetensors"), attention=attention, **SIZE)):
            cache = prefill(model, ids[:, :40])[CACHE_NAME]
            assert cache.layers[0].states[0].coded > 0
            steps = torch.cat([model(ids[:, t : t + 1], **{CACHE_NAME: cache}).logits for t in range(40, 50)], 1)
        assert relative(steps, stock[:, 40:]) < 1e-5


def test_keys_before_rotation():
    """rope="pre" codebooks: with enough room the stock model; compressed, dense and blockwise agree."""
    model, ids = get_model("llama"), long_ids()
    path = codebooks("llama", rope="pre")
    with compress(model, VQKV(codebooks=path, n_local=100)):
        inside = model(ids).logits
    assert relative(inside, model(ids).logits) < 1e-5
    got = []
    for attention in ("dense", "blocks"):
        with compress(model, VQKV(codebooks=path, attention=attention, **SIZE)):
            cache = prefill(model, ids[:, :40])[CACHE_NAME]
            got.append(model(ids[:, 40:], **{CACHE_NAME: cache}).logits)
    assert relative(got[0], got[1]) < 1e-4


def test_tail_bookkeeping():
    method = VQKV(codebooks=codebooks("llama"), n_sink=2, n_local=6)
    model, ids = get_model("llama"), long_ids(60, 1)
    with compress(model, method):
        cache = prefill(model, ids[:, :5])[CACHE_NAME]
        for t in range(5, 60):
            model(ids[:, t : t + 1], **{CACHE_NAME: cache})
            state = cache.layers[1].states[0]
            tail = state.tail_key.shape[2]
            assert 2 + state.coded + tail == t + 1 == state.seen
            assert state.coded == method.coded(5, t - 4) and tail < 12 and (tail >= 6 or state.coded == 0)


def residual_energy(x, books):
    """‖r_i‖² / ‖x‖² after each stage: the energy of the residual as a share of the vectors'."""
    codes, residual, energy = encode(x, books), x, []
    for stage in range(books.shape[0]):
        residual = residual - books[stage, codes[..., stage]]
        energy.append((residual.square().sum() / x.square().sum()).item())
    return energy


def test_training_lowers_the_loss_and_the_error():
    torch.manual_seed(0)
    centres = torch.randn(12, 8) * 3
    x = centres[torch.randint(12, (2000,))] + 0.3 * torch.randn(2000, 8)
    held_out = centres[torch.randint(12, (500,))] + 0.3 * torch.randn(500, 8)
    short = CodebookTraining(steps=1, batch=512)
    long = dataclasses.replace(short, steps=200, learning_rate=1e-2)
    energies = {}
    for name, options in (("untrained", short), ("simvq", long), ("kmeans", dataclasses.replace(short, init="kmeans"))):
        books = learn(x, 3, 16, options)
        energy = residual_energy(held_out, books)
        energies[name] = energy[-1]
        assert books.shape == (3, 16, 8)
    assert energies["simvq"] < 0.7 * energies["untrained"]
    assert energies["simvq"] < 1.5 * energies["kmeans"] < 0.05


def test_loss_is_the_sheet():
    torch.manual_seed(0)
    x, table, projection = torch.randn(7, 4), torch.randn(2, 5, 4), torch.randn(2, 4, 4)
    books = table @ projection.transpose(1, 2)
    codes, residual, stage = encode(x, books), x.clone(), 0.0
    for i in range(2):
        word = books[i, codes[:, i].long()]
        stage += ((residual - word) ** 2).mean()
        residual = residual - word
    expected = 2.0 * (residual**2).mean() + 0.5 * stage
    torch.testing.assert_close(simvq_loss(x, table, projection, 2.0, 0.5), expected)


def test_zero_codeword_makes_stages_harmless():
    torch.manual_seed(0)
    x = torch.randn(300, 8)
    books = learn(x, 4, 8, CodebookTraining(steps=2, batch=128, zero_codeword=True))
    energy = residual_energy(x, books)
    assert all(b <= a + 1e-6 for a, b in zip([1.0, *energy], energy))


@pytest.mark.parametrize("rope", ["post", "pre"])
def test_texts_longer_than_the_calibration_are_said(tmp_path, rope):
    """Once, at the first token beyond; keys before rotation have no position."""
    model, path = get_model("llama"), str(tmp_path / "b.safetensors")
    train_codebooks(model, long_ids(20), CodebookTraining(2, 4, 1, 4, steps=1, batch=16, rope=rope)).save(path)
    with warnings.catch_warnings(record=True) as said, compress(model, VQKV(codebooks=path, n_local=4)):
        warnings.simplefilter("always")
        cache = prefill(model, long_ids(20))[CACHE_NAME]
        assert not said
        for _ in range(3):
            model(long_ids(1), **{CACHE_NAME: cache})
    messages = [str(w.message) for w in said if "texts of 20 tokens" in str(w.message)]
    assert len(messages) == (1 if rope == "post" else 0)


def test_files(tmp_path):
    model = get_model("llama")
    books = train_codebooks(model, long_ids(20), CodebookTraining(2, 4, 1, 4, steps=1, batch=16))
    books.save(tmp_path / "b.safetensors")
    again = load_codebooks(tmp_path / "b.safetensors", model)
    assert all(torch.equal(a, b) for a, b in zip(books.keys + books.values, again.keys + again.values))
    assert books.tokens == again.tokens == 20
    with (
        pytest.raises(ValueError, match="not on this model"),
        compress(get_model("qwen3"), VQKV(codebooks=str(tmp_path / "b.safetensors"))),
    ):
        pass
    with pytest.raises(FileNotFoundError, match="train_codebooks"):
        load_codebooks(tmp_path / "none.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a readable safetensors"):
        load_codebooks(tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match="train_codebooks"):
        VQKV()


@pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs the package triton and a GPU (or TRITON_INTERPRET=1)",
)
@pytest.mark.parametrize(
    "rows,groups,queries,tokens,sets,stages",
    [(2, 2, 3, 300, 1, 3), (1, 4, 4, 128, 4, 8), (2, 1, 1, 5, 1, 4), (1, 1, 6, 70, 1, 6), (1, 2, 2, 70, 1, 12)],
)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_kernels_equal_the_rebuilt_vectors(monkeypatch, rows, groups, queries, tokens, sets, stages, shared, dtype):
    """Words of 1, 2 and 4 codes, one and two at once; rows that do not fill a program; tables too large to share."""
    from fathom.ops.code_attention import code_mix, code_scores
    from fathom.ops.code_attention import kernel as code_attention

    if not shared:
        monkeypatch.setattr(code_attention, "SHARED_ENTRIES", 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    books = torch.randn(sets, stages, 20, 16, generator=generator).to(device)
    codes = torch.randint(20, (rows, groups, tokens, stages), generator=generator).to(device)
    query = torch.randn(rows, groups, queries, 16, generator=generator).to(device)
    weights = torch.rand(rows, groups, queries, tokens, generator=generator).to(device)
    rebuilt = torch.zeros(rows, groups, tokens, 16, device=device)
    for group in range(groups):
        for stage in range(stages):
            rebuilt[:, group] += books[group % sets, stage][codes[:, group, :, stage]]
    held = (codes - 32768 if dtype == torch.int16 else codes).to(dtype)
    assert relative(code_scores(query, held, books), query @ rebuilt.transpose(2, 3)) < 1e-5
    assert relative(code_mix(weights, held, books), weights @ rebuilt) < 1e-5
    inside = torch.cat((held.flatten()[:1], held.flatten()))[1:].view(held.shape)  # not at the start of a word
    assert torch.equal(code_scores(query, inside, books), code_scores(query, held, books))


def test_triton_without_a_gpu_says_what_to_use(llama):
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the kernel runs here")
    with pytest.raises(ValueError, match=r"attention='triton'.*CUDA.*attention='lut'"):
        compress(llama, make("vqkv", SMALL, attention="triton")).__enter__()
