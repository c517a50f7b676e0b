"""Coreference and parses from files, tokenizers without "<", and what is refused."""

from __future__ import annotations

import json
import sys

import pytest
import small_databases
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import Metaspace
from transformers import PreTrainedTokenizerFast

from fathom.tables.ask import encode
from fathom.tables.base import require
from fathom.tables.database import Database
from fathom.tables.questions import Databases, questions_of
from fathom.tables.rasat import Rasat
from fathom.tables.source import Source
from fathom.tables.spoken import read_conllu, read_coreference, spoken_turns
from fathom.tasks.text_to_sql import with_signs

TURNS = ("Which town is big?", "Who is its head?", "Is he old | or not?")
GOAL = "Who heads the big town ?"
# as the public files: turn 0 is the goal, positions count the words of the text, "3#1" is the part behind a bar
ENTRY = {
    "coref": {
        "0": {"group": [[{"turn": "1", "position": 1, "ori": 7}], [{"turn": "2", "position": 2, "ori": 13}]]},
        "1": {"group": [[{"turn": "0", "position": 0, "ori": 0}], [{"turn": "2", "position": 3, "ori": 14}],
                        [{"turn": "3#0", "position": 1, "ori": 17}], [{"turn": "3#1", "position": 1, "ori": 20}]]},
    },
    "text_list": f"{GOAL} Which town is big ? Who is its head ? Is he old or not ?",
}  # fmt: skip


def test_the_public_coreference_layout_names_our_words():
    said = spoken_turns(TURNS, 0, ENTRY)
    assert [turn.mentions for turn in said] == [((0, (1,)),), ((0, (2,)), (1, (3,))), ((1, (1,)), (1, (4,)))]
    assert spoken_turns(TURNS[:1], 0, {"coref": {}})[0].mentions == ()
    with pytest.raises(ValueError, match="coreference of row 3: its text has 'Who' where the question has 'Where"):
        spoken_turns((TURNS[0], "Where?", "x"), 3, ENTRY)


def test_dialogues_are_read_with_what_files_say(tmp_path):
    row = {
        "db_id": "county", "interaction": [{"utterance": t, "query": f"q{i}"} for i, t in enumerate(TURNS)],
        "final": {"utterance": GOAL, "query": "q"},
    }  # fmt: skip
    found = list(questions_of(row, "here", 5, ("question", "query", "db_id"), True, ENTRY, {(5, 1): (-1, 0, 0, 0, 0)}))
    assert [len(question.turns) for question in found] == [1, 2, 3, 1] and found[3].turns == (GOAL,)
    assert {question.interaction for question in found} == {5} and found[2].query == "q2"
    assert found[1].spoken[1].heads == (-1, 0, 0, 0, 0) and found[1].spoken[1].mentions == ((0, (2,)), (1, (3,)))
    with pytest.raises(ValueError, match=r"here: no text in field 'query' \(found: db_id, question\)"):
        list(questions_of({"db_id": "county", "question": "a"}, "here", 0, ("question", "query", "db_id")))
    (tmp_path / "coref.json").write_text(json.dumps([ENTRY]))
    assert read_coreference(tmp_path / "coref.json") == [ENTRY]
    (tmp_path / "bad.json").write_text("[3]")
    with pytest.raises(ValueError, match=r"bad\.json: not a list of coreference entries"):
        read_coreference(tmp_path / "bad.json")


def test_conllu(tmp_path):
    def word(number, head):
        return "\t".join([str(number), "w", "w", "X", "_", "_", str(head), "dep", "_", "_"])

    lines = [
        "# sent_id = 0.0",
        word(1, 0),
        word("2-3", 9),
        word(2, 1),
        "",
        "# sent_id = 4.1.0",
        word(1, 2),
        word(2, 0),
        "",
    ]
    lines += ["# text = more", "# sent_id = 4.1.1", word(1, 0), word(2, 1)]
    (tmp_path / "a.conllu").write_text("\n".join(lines))
    assert read_conllu(tmp_path / "a.conllu") == {(0, 0): (-1, 0), (4, 1): (1, -1, -1, 2)}
    for text, said in [
        (word(1, 0), "line 1: needs a word's 10 fields"),
        ("# sent_id = a", "line 1: sent_id='a': must be"),
    ]:
        (tmp_path / "b.conllu").write_text(text)
        with pytest.raises(ValueError, match=said):
            read_conllu(tmp_path / "b.conllu")


def unigram() -> PreTrainedTokenizerFast:
    """A tokenizer like T5's: unigram, spaces as ▁, and no "<"."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>")
    text = "what is the name of every person and town on that day who visited Upper Brome from Lind head age visit big"
    tokenizer.train_from_iterator(
        [f"{text} | county | town_id , : ; [ ] full select > = * ( ) 0123456789 ' . ? j k x z q"] * 5, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def test_a_tokenizer_like_t5s_gets_signs_and_keeps_words_apart(tmp_path):
    with Database(small_databases.make(tmp_path)) as database:
        tokenizer = unigram()
        with pytest.raises(ValueError, match='tokenizer: reads "<" as unknown'):
            encode(None, tokenizer, database, ["name ?"])
        tokenizer = with_signs(tokenizer)
        query = "town | select name from person where age < 3 and age <= 4"
        ids = tokenizer(query)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        said = tokenizer.decode(ids, skip_special_tokens=True)
        assert said.split() == query.split()
        made = Source().encode(tokenizer, ["what is the name of every town"], database.schema, database)
        text, offsets = made.text, tokenizer(made.text.text, return_offsets_mapping=True)["offset_mapping"]
        relations = made.relation_ids(Rasat.Options())
        words = [item for item in text.items if item.kind == "word"]
        name = next(
            i
            for i, item in enumerate(text.items)
            if item.kind == "word" and text.text[item.start : item.stop] == "name"
        )
        tokens = [t for t, (a, b) in enumerate(offsets) if a < text.items[name].stop and text.items[name].start < b]
        column = next(
            item for item in text.items if item.kind == "column" and text.text[item.start : item.stop] == "name"
        )
        there = [t for t, (a, b) in enumerate(offsets) if a < column.stop and column.start < b]
        assert len(words) == 7 and tokens and there and {relations[t, c] for t in tokens for c in there} == {18}


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="databases='none': no such folder"):
        Databases("none")
    with pytest.raises(ValueError, match="databases=None and schemas=None: name a folder"):
        Databases(None)
    (tmp_path / "tables.json").write_text("{}")
    (tmp_path / "other.json").write_text('[{"db_id": 3}]')
    with pytest.raises(ValueError, match=r"other\.json: not a list of schemas as in Spider's tables\.json"):
        Databases(None, tmp_path / "other.json")
    monkeypatch.setitem(sys.modules, "sqlglot", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"task 'x' needs sqlglot: pip install 'fathom-lm\[tables\]'"):
        require("task 'x'", "sqlglot")
