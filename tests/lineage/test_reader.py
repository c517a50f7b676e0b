"""The reader against transformers: formats, layouts, errors."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import FAMILIES
from fathom.lineage.attack import logits
from fathom.lineage.errors import CheckpointError, PackedWeightsError
from fathom.lineage.reader import halves_from_pairs, open_checkpoint, pairs_from_halves
from fathom.lineage.token_rows import normalise, shared_rows
from fathom.lineage.weights import Weights


def all_equal(a, b, roles=("q", "k", "v", "o", "up", "down", "attn_norm")):
    return all(torch.equal(a.read(l, r), b.read(l, r)) for l in range(a.geometry.layers) for r in roles)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
def test_fused_layouts_compute_the_attention_of_transformers(folders, family):
    """q·k scores of layer 0 from the reader's weights = those of the stock attention module, head by head."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folders(family), dtype=torch.float64, attn_implementation="eager")
    reader = open_checkpoint(folders(family), dtype=torch.float64)
    g = reader.geometry
    x = torch.randn(1, 1, g.hidden, dtype=torch.float64)
    fused = next(m for n, m in model.named_modules() if n.endswith(("attn.c_attn", "query_key_value", "qkv_proj")))
    out = fused(x)[0, 0]

    def bias(role):
        return reader.read(0, role + ".bias") if reader.has(0, role + ".bias") else 0

    q, k, v = ((reader.read(0, r) @ x[0, 0] + bias(r)).view(-1, g.head_dim) for r in "qkv")
    if family == "gpt_neox":
        want = out.view(g.heads, 3, g.head_dim)
        want = want[:, 0], want[:, 1], want[:, 2]
    else:
        want = (
            t.view(-1, g.head_dim) for t in out.split([len(q) * g.head_dim, len(k) * g.head_dim, len(v) * g.head_dim])
        )
    for mine, theirs in zip((q, k, v), want):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_latent_attention_products_equal_the_modules(folders):
    """MLA: effective q, k, v reproduce the stock module's projections up to the token's own norm factor."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folders("deepseek_v3"), dtype=torch.float64)
    reader = open_checkpoint(folders("deepseek_v3"), dtype=torch.float64)
    attention, g = model.layers[0].self_attn, reader.geometry
    x = torch.randn(g.hidden, dtype=torch.float64)
    eps = attention.q_a_layernorm.variance_epsilon
    latent = attention.q_a_proj(x)
    q = attention.q_b_proj(attention.q_a_layernorm(latent)).view(g.heads, -1)
    mine = (reader.read(0, "q") @ x).view(g.heads, -1) / (latent.square().mean() + eps).sqrt()
    rope = q[:, g.nope_dim :]
    want = torch.cat([rope[:, 0::2], rope[:, 1::2], q[:, : g.nope_dim]], 1)
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)  # the module's norm runs in float32
    latent, rope = attention.kv_a_proj_with_mqa(x).split([32, 8])
    size = (latent.square().mean() + eps).sqrt()
    keys = attention.kv_b_proj(attention.kv_a_layernorm(latent)).view(g.heads, -1)
    mine_k, mine_v = ((reader.read(0, r) @ x).view(g.heads, -1) for r in "kv")
    torch.testing.assert_close(mine_v / size, keys[:, g.nope_dim :], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine_k[:, 8:] / size, keys[:, : g.nope_dim], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine_k[:, :8], torch.cat([rope[0::2], rope[1::2]]).expand(g.heads, -1))


def test_direct_queries_of_latent_attention_equal_the_module(folders):
    """DeepSeek-V2-Lite: q_proj without low rank; rotating dims first and in halves, the rest after them."""
    from transformers import AutoModel

    module = AutoModel.from_pretrained(folders("deepseek_v2"), dtype=torch.float64).layers[1].self_attn.q_proj
    reader = open_checkpoint(folders("deepseek_v2"), dtype=torch.float64)
    x = torch.randn(reader.geometry.hidden, dtype=torch.float64)
    heads = module(x).view(reader.geometry.heads, 16)
    want = torch.cat([heads[:, 8::2], heads[:, 9::2], heads[:, :8]], 1)
    torch.testing.assert_close((reader.read(1, "q") @ x).view_as(want), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_by_role_go_back_to_the_stored_tensors(folders, weights, family):
    """What the attack bench writes of an unchanged model is the file it read, name by name."""
    stored = {n: t for f in folders(family).glob("*.safetensors") for n, t in load_file(f).items()}
    written = weights(family).state_dict()
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(written[name], tensor, rtol=1e-14, atol=1e-15, check_dtype=False)


def test_pairs_and_halves_are_inverse():
    x = torch.randn(3 * 10, 5)
    torch.testing.assert_close(pairs_from_halves(halves_from_pairs(x, 10, 6), 10, 6), x)
    assert halves_from_pairs(torch.arange(6.0), 6, 6).tolist() == [0, 2, 4, 1, 3, 5]


def test_shards_dtype_and_bin_read_the_same(folders, weights, tmp_path):
    original = open_checkpoint(folders("llama"))
    sharded = weights("llama").save(tmp_path / "sharded", shard_bytes=50_000)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert all_equal(original, open_checkpoint(sharded))
    state = load_file(next(folders("llama").glob("*.safetensors")))
    (tmp_path / "bin").mkdir()
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_bytes((folders("llama") / "config.json").read_bytes())
    assert all_equal(original, open_checkpoint(tmp_path / "bin"))


def test_bin_never_unpickles(folders, tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("executed",)

    torch.save({"model.layers.0.self_attn.q_proj.weight": Evil()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((folders("llama") / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="tensors only"):
        open_checkpoint(tmp_path)


def test_multimodal_prefix_and_vision_tower(folders, tmp_path):
    """Only the language tower is read, under whichever prefix."""
    state = load_file(next(folders("llama").glob("*.safetensors")))
    moved = {n.replace("model.", "model.language_model.", 1): t for n, t in state.items()}
    moved |= {f"model.vision_tower.layers.{i}.self_attn.q_proj.weight": torch.zeros(8, 8) for i in range(40)}
    save_file(moved, tmp_path / "model.safetensors")
    config = json.loads((folders("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": config, "vision_config": {}})
    )
    assert all_equal(open_checkpoint(folders("llama")), open_checkpoint(tmp_path))


def test_lora_adapter_equals_peft_merge(folders, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.float32)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "down_proj"])
    )
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    mine, want = open_checkpoint(tmp_path / "adapter", base=folders("llama")), open_checkpoint(tmp_path / "merged")
    for role in ("q", "k", "down"):
        torch.testing.assert_close(mine.read(2, role), want.read(2, role), rtol=1e-5, atol=1e-6)
    assert not torch.equal(mine.read(2, "q"), open_checkpoint(folders("llama")).read(2, "q"))


def test_gguf_answers_a_question(smollm2):
    """Dequantised, with its q/k rows un-permuted, the model knows the capital of France; wrong rows break that."""
    weights, vocabulary = Weights.load(smollm2), smollm2.vocabulary
    words = [b"The", b" capital", b" of", b" France", b" is"]
    tokens = torch.tensor([[vocabulary[w] for w in words]])
    assert logits(weights, tokens, torch.float32)[0, -1].argmax() == vocabulary[b" Paris"]


def test_spellings_of_tokens_meet():
    byte_level = normalise({"Ġthe": 0, "Ã©": 1, "A": 2, "<|im_end|>": 3})
    pieces = normalise({"▁the": 5, "é": 6, "<0x41>": 7, "A": 8, "<0x0A>": 9})
    assert set(byte_level) & set(pieces) == {b" the", "é".encode(), b"A"}
    assert shared_rows(byte_level, pieces, 10, 10) == ([0, 1, 2], [5, 6, 8])
    assert pieces[b"A"] == 8 and pieces[b"\n"] == 9
    assert shared_rows(byte_level, pieces, 10, 6)[0] == [0], "ids beyond a padded or cut table are left out"


def test_any_vocabulary_survives_a_save(weights, tmp_path):
    """Tokens that are no UTF-8 (single bytes of a GGUF or SentencePiece vocabulary) come back as they were."""
    odd = weights("llama").clone()
    odd.source = None
    odd.vocabulary = {b" the": 0, b"\xff\xfe": 1, b"<|x|>": 2, "é▁Ġ".encode(): 3, b"\n": 4, b" ": 5}
    assert open_checkpoint(odd.save(tmp_path / "odd")).vocabulary == odd.vocabulary


def test_errors_name_the_culprit(folders, tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint("./nowhere")
    (tmp_path / "config.json").write_bytes((folders("llama") / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="safetensors"):
        open_checkpoint(tmp_path)
    source = next(folders("llama").glob("*.safetensors"))
    (tmp_path / "model.safetensors").write_bytes(source.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt"):
        open_checkpoint(tmp_path)
    state = load_file(source)
    state["model.layers.1.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj.*NaN"):
        open_checkpoint(tmp_path).read(1, "q")
    without = {n: t for n, t in state.items() if "embed" not in n}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no input embedding"):
        open_checkpoint(tmp_path)
    packed = without | {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)}
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(PackedWeightsError, match="dequantise"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    with pytest.raises(CheckpointError, match="missing"):
        open_checkpoint(tmp_path)


def test_what_does_not_fit_is_refused(folders, tmp_path):
    """Layers without tensors, an index that lies, sizes that the weights deny, files that are something else."""
    state, config = load_file(next(folders("llama").glob("*.safetensors"))), folders("llama") / "config.json"
    sizes = json.loads(config.read_text())

    def model(name, tensors=state, **changes):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes | changes))
        save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    partial = model("partial", {n: t for n, t in state.items() if "layers.2" not in n})
    with pytest.raises(CheckpointError, match=r"1 of 4 layers have no tensors \(first: layer 2\)"):
        open_checkpoint(partial)
    index = {"weight_map": dict.fromkeys([*state, "model.layers.0.lost.weight"], "shard.safetensors")}
    (model("index") / "model.safetensors").rename(tmp_path / "index" / "shard.safetensors")
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names 'model\.layers\.0\.lost\.weight', which no shard holds"):
        open_checkpoint(tmp_path / "index")
    for changes, message in (
        ({"hidden_size": 80}, "80 wide"),
        ({"hidden_size": "64"}, "hidden size is '64'"),
        ({"num_key_value_heads": 0}, "key-value heads is 0"),
        ({"num_key_value_heads": 16}, "cannot share"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(model(str(changes), **changes))
    with pytest.raises(CheckpointError, match=r"layer 0 'q' has shape \(64, 64\).*4 heads"):
        open_checkpoint(model("heads", num_attention_heads=4)).read(0, "q")
    with pytest.raises(CheckpointError, match="fused q, k, v: 192 rows"):
        changed = json.loads((folders("gpt_neox") / "config.json").read_text()) | {"num_attention_heads": 8}
        fused = model("fused", load_file(next(folders("gpt_neox").glob("*.safetensors"))))
        (fused / "config.json").write_text(json.dumps(changed | {"head_dim": 16}))
        open_checkpoint(fused).read(0, "q")
    for file, text in (("vocab.json", "{oops"), ("vocab.json", "[1]"), ("tokenizer.json", '{"model": {}}')):
        (partial / file).write_text(text)
        with pytest.raises(CheckpointError, match="tokenizer files"):
            open_checkpoint(partial)
    for file, text, message in (
        ("model.safetensors.index.json", "[]", "index.json: holds a list"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": 5}}',
            "index.json: a file name is expected where it has 5",
        ),
        ("config.json", json.dumps(sizes | {"rope_parameters": "x"}), "sizes in its configuration.*'str'"),
        ("config.json", json.dumps(sizes | {"kv_lora_rank": 8}), "sizes in its configuration.*qk_nope_head_dim"),
        ("config.json", json.dumps(sizes | {"head_dim": "8"}), "head_dim is '8'"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("adapter_config.json", "{", "adapter_config.json: not valid JSON"),
        ("adapter_config.json", "{}", "adapter without its base"),
    ):
        folder = model(f"json{len(list(tmp_path.iterdir()))}")
        (folder / file).write_text(text)
        if file == "adapter_config.json":
            (folder / "config.json").unlink()
        if file.endswith(".index.json"):
            (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="model type 'gptj' is read"):
        open_checkpoint(model("unknown", {n: t for n, t in state.items() if "embed" not in n}, model_type="gptj"))
    with pytest.raises(ValueError, match="device: 'xyz' cannot be used"):
        open_checkpoint(folders("llama"), device="xyz")
    torch.save([1, 2], tmp_path / "list.bin")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "config.json").write_text("[]")
    for file, message in (("list.bin", "holds a list"), ("empty.gguf", "empty"), ("index", "no shard")):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / file)


def test_integers_without_a_scale_are_packed_weights(folders, tmp_path):
    """In every format; with bitsandbytes' row maxima int8 is read, from .bin as from safetensors."""
    state = load_file(next(folders("llama").glob("*.safetensors")))
    name = "model.layers.0.self_attn.q_proj.weight"
    (tmp_path / "config.json").write_bytes((folders("llama") / "config.json").read_bytes())
    file = tmp_path / "pytorch_model.bin"
    torch.save(state | {name: state[name].to(torch.int8)}, file)
    with pytest.raises(PackedWeightsError, match="int8"):
        open_checkpoint(tmp_path).read(0, "q")
    largest = state[name].abs().amax(1)
    codes = (state[name] / largest[:, None] * 127).round().to(torch.int8)
    torch.save(state | {name: codes, name.replace("weight", "SCB"): largest}, file)
    got, want = open_checkpoint(tmp_path).read(0, "q"), state[name].float()
    assert (got - want).abs().max() <= largest.max() / 254 * 1.001


def test_adapters_that_are_not_plain_lora_are_refused(folders, tmp_path):
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    good = {q.format("A"): torch.zeros(4, 64), q.format("B"): torch.zeros(64, 4)}
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    for tensors, config, message in (
        (good, {"peft_type": "LORA"}, "no value for 'r'"),
        ({q.format("A"): torch.zeros(4, 64)}, whole, "do not make"),
        (good | {q.format("B"): torch.zeros(64, 5)}, whole, "do not make"),
        (good | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 384)}, whole, "with peft"),
        (good | {q.format("B").replace("weight", "bias"): torch.zeros(64)}, whole, "with peft"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path, base=folders("llama"))


def test_a_file_that_may_not_be_read_is_not_called_corrupt(folders, tmp_path, monkeypatch):
    """Root reads everything, so the refusal is played here."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fathom.lineage.store.safe_open", refuse)
    with pytest.raises(CheckpointError, match=r"safetensors: cannot be opened \(.*Permission denied"):
        open_checkpoint(folders("llama"))
