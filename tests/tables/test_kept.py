"""Planners, selectors and retrievers that are kept beside a model choose what they chose before."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from table_cases import CORPUS, GRID, host, pairs, tokenizer
from transformers import BertConfig, BertModel

from fathom.tables.text import CTRLSciTab, TableGenerator
from fathom.tables.text.ctrlscitab import query
from fathom.tables.text.generator import Stages
from fathom.tables.text.kept import keep, load_kept
from fathom.tables.text.plan import PointerPlanner
from fathom.tables.text.prototypes import PrototypeSelector
from fathom.tables.text.retrieval import TSDAE, CrossEncoder
from fathom.tables.text.stages import Stage

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A BERT with its pooler, as hubs have it."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer()), max_position_embeddings=512, **TINY)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@torch.no_grad()
@pytest.mark.parametrize("own", [True, False])
def test_what_is_kept_chooses_as_before(own, published, tmp_path):
    given = (None, tokenizer()) if own else (published, None)
    small = TINY if own else {}
    table, asked = pairs()[0][0], query(GRID)
    selector = PrototypeSelector(*given, dropped=("stars",), margin=0.2, **small).eval()
    keep(selector, tmp_path / "selector")
    again = load_kept(tmp_path / "selector")
    assert torch.equal(again(table, CORPUS[:5]), selector(table, CORPUS[:5]))
    assert (again.dropped, again.margin) == (selector.dropped, 0.2)
    for kind in (TSDAE, CrossEncoder):
        retriever = kind(*given, **small)
        keep(retriever, tmp_path / kind.__name__)
        again = load_kept(tmp_path / kind.__name__)
        assert type(again) is kind
        assert again.scores(asked, GRID.background) == retriever.scores(asked, GRID.background)
    planner = PointerPlanner(given[1] or tokenizer(), given[0], **small)
    keep(planner, tmp_path / "planner")
    assert load_kept(tmp_path / "planner").predict([table]) == planner.predict([table])


def test_a_generator_keeps_its_retriever_and_damage_is_named(tmp_path):
    host().save_pretrained(tmp_path / "stock")
    tokenizer().save_pretrained(tmp_path / "stock")
    generator = TableGenerator.from_pretrained(str(tmp_path / "stock"), CTRLSciTab(sentences=1))
    assert generator.retriever is None  # of a TSDAE that nobody has trained
    generator.retriever = TSDAE(None, tokenizer(), seed=3, **TINY).eval()
    generator.save_pretrained(tmp_path / "kept")
    again = TableGenerator.from_pretrained(str(tmp_path / "kept"))
    assert again.source(GRID) == generator.source(GRID)
    weights = tmp_path / "kept" / "retriever" / "retriever.safetensors"
    save_file({name: value for name, value in load_file(weights).items() if "word_emb" not in name}, weights)
    with pytest.raises(ValueError, match="its weights are not those of a tsdae retriever"):
        TableGenerator.from_pretrained(str(tmp_path / "kept"))


def test_a_generator_of_rows_is_fitted_with_its_retriever(tmp_path, monkeypatch):
    monkeypatch.setattr("fathom.tables.text.encoder.SMALL", TINY)
    host("llama").save_pretrained(tmp_path / "stock")
    tokenizer().save_pretrained(tmp_path / "stock")
    stages = Stages(retriever_steps=1, generator=Stage(steps=2, batch_size=2))
    generator = TableGenerator.from_pretrained(str(tmp_path / "stock"), CTRLSciTab(sentences=1, source_tokens=80))
    losses = generator.fit([(GRID, "Scores rise."), (GRID, "Time falls.")], stages=stages, target_tokens=8)
    assert len(losses["generator"]) == 2 and isinstance(generator.retriever, TSDAE)
    generator.save_pretrained(tmp_path / "kept")
    again = TableGenerator.from_pretrained(str(tmp_path / "kept"))
    assert again.describe(GRID, beams=1, max_new_tokens=4) == generator.describe(GRID, beams=1, max_new_tokens=4)
    oracle = TableGenerator.from_pretrained(str(tmp_path / "stock"), CTRLSciTab(retriever="oracle"))
    with pytest.raises(ValueError, match="retriever='oracle': it reads references"):
        oracle.fit([(GRID, "Scores rise.")])
