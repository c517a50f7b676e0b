"""Texts that are one token each: in every tokenizer's reading of a text, in a model's tables, after saving."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fathom import FathomForCausalLM
from fathom.data import DataConfig, add_atoms, load_tokenizer, prepare, token_byte_lengths
from fathom.data.config import NamedSource
from fathom.data.packing import encode
from fathom.data.tokenizer import SCIENTIFIC
from fathom.train import Recipe, Training, train_run
from fathom.train.recipe import MethodConfig, model_config
from tiny_checkpoint import tiny_tokenizer

MARKED = "Mud [START_REF]On mud[END_REF] is <work>wet</work>.[START_FORMULA]x[END_FORMULA][START_SMILES]CO[END_SMILES] "


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A stock checkpoint whose tokenizer has no atoms."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, tie_word_embeddings=False, **sizes)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "domain.txt").write_text(MARKED * 40)
    (folder / "general.txt").write_text("The sea was calm. " * 80)
    return folder


def test_atoms_are_one_token_each_and_bytes_are_kept():
    plain, tokenizer = tiny_tokenizer(), tiny_tokenizer()
    assert add_atoms(tokenizer, SCIENTIFIC) == len(SCIENTIFIC) and add_atoms(tokenizer, SCIENTIFIC) == 0
    (before,), (after,) = encode([MARKED], plain), encode([MARKED], tokenizer)
    marks = [tokenizer.convert_ids_to_tokens(i) for i in after if i >= len(plain)]
    assert marks == ["[START_REF]", "[END_REF]", "<work>", "</work>", "[START_FORMULA]", "[END_FORMULA]",
                     "[START_SMILES]", "[END_SMILES]"]  # fmt: skip
    assert tokenizer.decode(after, skip_special_tokens=True) == plain.decode(before) == MARKED
    for one, ids in ((plain, before), (tokenizer, after)):
        assert token_byte_lengths(one)[ids].sum() == len(MARKED.encode())


def test_what_cannot_be_an_atom_is_refused():
    with pytest.raises(ValueError, match=r"data\.atoms: '<\|endoftext\|>' does not stay one token"):
        add_atoms(tiny_tokenizer(), ["<|endoftext|>"])
    for atoms in (("",), ("a", "a")):
        with pytest.raises(ValueError, match=r"data\.atoms=.*must not be empty texts or the same twice"):
            DataConfig(atoms=atoms)


def test_ratios_of_a_domain_are_the_sheets():
    def weights(**named):
        data = DataConfig(train={name: NamedSource("x", weight) for name, weight in named.items()})
        return {name: source.weight for name, source in data.train.items()}

    assert weights(domain=None, general=None, code=None) == {"domain": 8, "general": 1, "code": 1}
    assert weights(domain=None, tables=None) == {"domain": 8, "tables": 1}
    assert weights(domain=None, general=3.0) == {"domain": 1, "general": 3}
    assert weights(general=None, physics=None) == {"general": 1, "physics": 1}
    assert weights(domain=None, physics=None) == {"domain": 1, "physics": 1}


def trained(base: Path, texts: Path, folder: Path, trains: str = "all", **data) -> tuple:
    fields = {"train": str(texts / "domain.txt"), "validation": None, "tokenizer": str(base), "block_size": 16}
    config = DataConfig(**fields | {"num_proc": 1} | data)
    recipe = Recipe("atoms", Training(tokens=64, sequences=2, lr=1e-9), {"checkpoint": str(base)}, data=config)
    method = MethodConfig("vanilla", {"depth": {"name": "vanilla"}}, trains=trains)
    run = train_run(recipe, method, seed=0, folder=folder, data=prepare(config, folder / "cache"))
    return run, model_config(recipe, method)


def test_a_checkpoint_gets_rows_by_the_mean(base, texts, tmp_path):
    """Stock, then the model of that run once more, whose tokenizer has the atoms already."""
    run, config = trained(base, texts, tmp_path / "a", atoms="scientific")
    old, new = LlamaForCausalLM.from_pretrained(base), FathomForCausalLM.from_pretrained(run.model)
    count = 300 + len(SCIENTIFIC)
    assert config.vocab_size == new.config.vocab_size == count
    for table in ("get_input_embeddings", "get_output_embeddings"):
        before, after = getattr(old, table)().weight, getattr(new, table)().weight
        assert after.shape[0] == count and torch.allclose(after[:300], before, atol=1e-5)
        assert torch.allclose(after[300:], before.mean(0).expand(len(SCIENTIFIC), -1), atol=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    ids = torch.tensor(encode([MARKED], tokenizer))
    assert (ids >= 300).sum() == 8
    new.save_stock_pretrained(tmp_path / "stock")
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "stock")
    assert torch.allclose(stock(ids).logits, new(ids).logits, atol=1e-5) and stock.config.vocab_size == count
    again, _ = trained(run.model, texts, tmp_path / "b", atoms="scientific")
    assert FathomForCausalLM.from_pretrained(again.model).config.vocab_size == count
    assert not any(note.startswith("Atoms") for note in again.notes)  # none was added


def test_a_run_says_bytes_a_token_of_every_source(base, texts, tmp_path):
    sources = {name: NamedSource(str(texts / f"{name}.txt")) for name in ("domain", "general")}
    run, _ = trained(base, texts, tmp_path / "a", atoms=("[START_REF]", "[END_REF]"), train=sources)
    note = next(note for note in run.notes if note.startswith("Atoms"))
    plain, tokenizer = load_tokenizer(str(base)), load_tokenizer(str(base))
    add_atoms(tokenizer, ("[START_REF]", "[END_REF]"))
    parts = []
    for name in sources:
        text = (texts / f"{name}.txt").read_text()
        rates = [len(text.encode()) / len(encode([text], one)[0]) for one in (tokenizer, plain)]
        parts.append(f"{name} {rates[0]:.3f}, without them {rates[1]:.3f}")
        assert (rates[0] > rates[1]) == (name == "domain")
    assert note == f"Atoms: 2 tokens were added. Bytes a token: {'; '.join(parts)}."


def test_new_rows_are_refused_where_they_would_not_learn(base, texts, tmp_path):
    with pytest.raises(ValueError, match=r"data\.atoms: .* lacks 20 of them, .* would not learn with trains='lora'"):
        trained(base, texts, tmp_path / "a", trains="lora", atoms="scientific")


def test_runs_of_a_time_without_atoms_go_on(base, texts, tmp_path):
    trained(base, texts, tmp_path / "a")
    file = tmp_path / "a" / "run.json"
    stored = json.loads(file.read_text())
    assert stored["data"].pop("atoms") == []
    file.write_text(json.dumps(stored))
    assert trained(base, texts, tmp_path / "a")[0].steps == 2
