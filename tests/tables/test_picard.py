"""The acceptor against gold queries and SQLite, and PICARD in generation against its definition."""

from __future__ import annotations

import json
import lzma
import random
import re
from pathlib import Path

import pytest
import small_databases
import torch
from test_sql_match import schema_of
from transformers import T5Config, T5ForConditionalGeneration

from fathom.tables.acceptor import MODES, Acceptor
from fathom.tables.database import Database
from fathom.tables.picard import Picard
from fathom.tables.source import answer_text, normalised

KEPT = json.loads(lzma.decompress((Path(__file__).parent / "data" / "exact_match_pairs.json.xz").read_bytes()))
QUERIES = [
    "SELECT name FROM town WHERE big = 1",
    "SELECT T1.age, count(*) FROM person AS T1 JOIN visit AS T2 ON T1.person_id = T2.person_id GROUP BY T1.age",
    "SELECT count(DISTINCT town_id) FROM visit WHERE day LIKE '2020%' AND person_id NOT IN (SELECT head FROM town)",
    "SELECT fullName FROM person WHERE age > (SELECT avg(age) FROM person) ORDER BY age DESC LIMIT 1",
    "SELECT name FROM town EXCEPT SELECT T2.name FROM visit AS T1 JOIN town AS T2 ON T1.town_id = T2.town_id",
    "SELECT max(age) - min(age) FROM person WHERE age BETWEEN 3 AND 40.5 OR NOT town_id = 2",
]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    with Database(small_databases.make(tmp_path_factory.mktemp("databases"))) as opened:
        yield opened


def accepts(acceptor: Acceptor, text: str) -> str:
    """ "reject", "partial" or "complete"."""
    state = acceptor.advance(Acceptor.START, text)
    return "reject" if state is None else "complete" if acceptor.complete(state) else "partial"


def test_gold_queries_are_chains_of_partials_that_end_complete():
    schemas = {name: schema_of(kept) for name, kept in KEPT["schemas"].items()}
    acceptor = Acceptor(schemas)
    rejected = []
    for name, gold in sorted({(pair[0], pair[1]) for pair in KEPT["pairs"]}):
        state = Acceptor.START
        for piece in re.findall(r".{1,3}", answer_text(gold, name)):
            state = acceptor.advance(state, piece)
            if state is None:
                break
        if state is None or not acceptor.complete(state):
            rejected.append(gold)
    # what is left has texts of more than 32 characters, or orders by a comparison
    rejected = [gold for gold in rejected if ">=  5" not in gold]
    assert all(max(map(len, re.findall(r"\"[^\"]*\"|'[^']*'", gold)), default=0) > 34 for gold in rejected), rejected
    assert len(rejected) < 5 and acceptor.cut_off == 0


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_takes_right_queries(database, mode):
    acceptor = Acceptor({"county": database.schema}, mode)
    for query in QUERIES:
        assert accepts(acceptor, answer_text(query, "county")) == "complete"
        database.run(query)  # SQLite takes them, too


def test_a_name_is_refused_at_its_first_impossible_character(database):
    acceptor = Acceptor({"county": database.schema})
    for text, last in [
        ("county | select nz", -1), ("county | select name frz", -1), ("county | select name from toz", -1),
        ("county | select name from town where ag", -1), ("county | select t1.age from town as t1 ", -1),
        ("county | select age from town w", -1), ("county | select t2.name from town as t1 w", -1),
        ("county | select name from town as t1 where t1.f", -1), ("countz", -1), ("county | select name,, ", -2),
        ("county | select count(*) from town limit x", -1), ("county | select name from town as x", -1),
        ("county | select town.a", -1), ("county | select name from town where name = '" + "x" * 33, -1),
    ]:  # fmt: skip
        assert accepts(acceptor, text) == "reject", text
        assert accepts(acceptor, text[:last]) == "partial", text
    assert accepts(Acceptor({"county": database.schema}, "parse_without_guards"), "county | select age from town") == (
        "complete"
    )
    typed = Acceptor({"county": database.schema}, "parse_with_types")
    assert (
        accepts(typed, "county | select avg(n") == "reject" and accepts(typed, "county | select avg(age") == "partial"
    )
    assert accepts(typed, "county | select age from person where age like") == "reject"
    lexed = Acceptor({"county": database.schema}, "lex")
    assert (
        accepts(lexed, "county | from select name = , 3") == "complete"
        and accepts(lexed, "county | sele q") == "reject"
    )


def test_sqlite_knows_the_same_columns(database):
    """Queries with another column in one place are refused exactly if SQLite finds no such column."""
    acceptor, verdicts = Acceptor({"county": database.schema}), set()
    names = [column.name for column in database.schema.columns[1:]]
    for query in QUERIES:
        for place in re.finditer(r"(?<!AS )\b(t\d\.)?(\w+)\b", query):
            if place.group(2).lower() not in map(str.lower, names):
                continue
            for other in names:
                changed = query[: place.start(2)] + other + query[place.end(2) :]
                try:
                    database.run(changed)
                    there = True
                except ValueError as error:
                    there = "no such column" not in str(error)
                assert (accepts(acceptor, answer_text(changed, "county")) == "complete") == there, changed
                verdicts.add(there)
    assert verdicts == {True, False}


def test_random_walks_name_only_what_there_is(database):
    """Every answer that the acceptor lets end is SQL whose tables and columns SQLite finds."""
    acceptor, draw = Acceptor({"county": database.schema}), random.Random(0)
    pieces = sorted({p for q in QUERIES for p in re.findall(r" ?\w+|[^\w]", normalised(q))} | {" t1", " t2", ".name"})
    ended = 0
    for _ in range(150):
        state, text = acceptor.advance(Acceptor.START, "county | select"), "select"
        for _ in range(40):
            open_ = [p for p in pieces if acceptor.advance(state, p) is not None]
            if acceptor.complete(state) and (draw.random() < 0.3 or not open_):
                ended += 1
                try:
                    database.run(text)
                except ValueError as error:
                    if re.search(r"(from|join) *\( *select", text):  # whose columns are not followed
                        break
                    assert not re.search(r"no such|syntax error|unrecognized|incomplete", str(error)), error
                break
            if not open_:
                break
            piece = draw.choice(open_)
            state, text = acceptor.advance(state, piece), text + piece
    assert ended > 20


def test_the_limit_counts_steps_and_cut_offs_are_reported(database):
    text = answer_text(QUERIES[3], "county")
    cut = Acceptor({"county": database.schema}, steps=20)
    for _ in range(2):  # what is remembered does not count less
        assert accepts(cut, text) == "reject"
    assert cut.cut_off == 2
    assert accepts(Acceptor({"county": database.schema}, steps=20_000), text) == "complete"


class Veto:
    """PICARD by its definition, on whole texts, with an acceptor that remembers nothing."""

    def __init__(self, tokenizer, schema, k):
        self.tokenizer, self.schema, self.k = tokenizer, schema, k

    def fine(self, ids, token):
        acceptor = Acceptor({"county": self.schema})
        if token == self.tokenizer.eos_token_id:
            return accepts(acceptor, self.tokenizer.decode(ids)) == "complete"
        return accepts(acceptor, self.tokenizer.decode([*ids, token]).rstrip("�")) != "reject"

    @torch.no_grad()
    def greedy(self, model, source, length):
        ids, end = [], self.tokenizer.eos_token_id
        for _ in range(length):
            given = torch.tensor([[0, *ids]])
            scores = model(input_ids=source, decoder_input_ids=given).logits[0, -1]
            best = scores.topk(self.k).indices.tolist()
            allowed = [token for token in best if self.fine(ids, token)]
            if end not in best or not allowed:
                allowed.append(end)
            token = max(allowed, key=lambda token: scores[token].item())
            ids.append(token)
            if token == end:
                break
        return ids


@pytest.fixture(scope="module")
def writer(database):
    """A tiny T5 that was made to begin with answers of this kind, and its tokenizer."""
    tokenizer = small_databases.tokenizer(330)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer) + 1, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=tokenizer.eos_token_id, pad_token_id=330,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    answers = [[*tokenizer(answer_text(q, "county"))["input_ids"], tokenizer.eos_token_id] for q in QUERIES]
    size = max(map(len, answers))
    labels = torch.tensor([ids + [-100] * (size - len(ids)) for ids in answers])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(25):
        loss = model(input_ids=torch.full((len(answers), 3), 5), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


@pytest.mark.parametrize("k", [1, 2, 5])
def test_greedy_decoding_is_the_definitions(database, writer, k):
    model, tokenizer = writer
    source = torch.full((1, 3), 5)
    processor = Picard(k=k).processor(tokenizer, {"county": database.schema})
    out = model.generate(source, logits_processor=[processor], max_new_tokens=40, num_beams=1, do_sample=False)
    assert out[0, 1:].tolist() == Veto(tokenizer, database.schema, k).greedy(model, source, 40)
    assert processor.checked > 0


def test_beams_end_in_queries_that_run_and_without_it_they_do_not(database, writer):
    model, tokenizer = writer
    source = torch.full((2, 3), 5)
    given = {"max_new_tokens": 60, "num_beams": 4, "do_sample": False}
    processor = Picard(k=4).processor(tokenizer, {"county": database.schema}, ["county", "county"])
    out = model.generate(source, logits_processor=[processor], **given)
    for row in out.tolist():
        text = tokenizer.decode(row[1:], skip_special_tokens=True)
        assert accepts(processor.acceptor, text) != "reject"
        if tokenizer.eos_token_id in row[1:] and not processor.dead_ends:
            database.run(text.split("|", 1)[1])
    assert processor.rejected > 0


def test_the_end_token_outside_the_likeliest_stays_and_a_rejected_one_among_them_goes(database):
    tokenizer = small_databases.tokenizer(330)
    ids = tokenizer("county | select name from")["input_ids"]
    prefix = torch.tensor([[0, *ids]])
    town, end = tokenizer(" town")["input_ids"][0], tokenizer.eos_token_id
    scores = torch.zeros(1, 331)
    scores[0, town], scores[0, 7] = 3.0, 2.0
    processor = Picard(k=2).processor(tokenizer, {"county": database.schema})
    kept = processor(prefix, scores.clone())
    assert kept[0, town] == 3 and kept[0, end] == 0 and torch.isinf(kept[0]).sum() == 329
    scores[0, end] = 2.5
    kept = processor(prefix, scores.clone())
    assert kept[0, town] == 3 and torch.isinf(kept[0]).sum() == 330
    late = Picard(k=2, schedule="finalizing").processor(tokenizer, {"county": database.schema})
    assert torch.isinf(late(prefix, scores.clone())[0]).nonzero().tolist() == [[end]]


def test_rows_answer_about_their_own_database(database):
    tokenizer = small_databases.tokenizer(330)
    schemas = {"county": database.schema, "town": database.schema}
    first = {name: tokenizer(name)["input_ids"][0] for name in schemas}
    scores = torch.zeros(2, 331)
    scores[:, list(first.values())] = 1.0
    processor = Picard(k=2).processor(tokenizer, schemas, ["county", "town"])
    kept = processor(torch.zeros(2, 1, dtype=torch.long), scores)
    assert [int(row.argmax()) for row in kept] == [first["county"], first["town"]]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"mode": "parse"}, "picard option mode='parse': must be one of"), ({"k": 0}, "k=0: must be an integer of"),
     ({"schedule": "late"}, "schedule='late': must be one of")],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Picard(**options)


def test_doubled_quotes_are_read_and_names_that_need_quotes_are_said(tmp_path):
    script = 'CREATE TABLE "order items" ("a" INT); CREATE TABLE fine (size INT, "unit price" REAL, größe TEXT);'
    with Database(small_databases.make(tmp_path, "odd", script)) as database:
        acceptor = Acceptor({"odd": database.schema})
    assert acceptor.unwritable("odd") == ["order items", "fine.unit price"]

    def reads(text):
        state = acceptor.advance(Acceptor.START, f"odd | select size from fine where größe = {text}")
        return None if state is None else acceptor.complete(state)

    assert all(map(reads, ("'O''Brien'", "''", '"say ""x"" "', "''''", "'a' and size = 1")))
    assert reads("'O''Brien") is False and reads("'''") is False
    assert reads("'a' 'b'") is None and reads("'a'\"b\"") is None


def test_tokens_that_write_nothing_and_bytes_of_no_character_are_dropped(tmp_path):
    """A likely padding token and a byte without end are dropped; the first letter of the answer stays."""
    tokenizer = small_databases.tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    with Database(small_databases.make(tmp_path)) as database:
        processor = Picard(k=3).processor(tokenizer, {"county": database.schema}, ["county"])
    letter, byte = tokenizer.convert_tokens_to_ids(["c", "Ģ"])  # the second is the byte 0x80, which begins no character
    scores = torch.full((1, len(tokenizer)), -9.0)
    scores[0, tokenizer.pad_token_id], scores[0, byte], scores[0, letter] = 3.0, 2.0, 1.0
    start, seen = [tokenizer.pad_token_id], []
    for taken in range(5):
        kept = processor(torch.tensor([start + [byte] * taken]), scores)[0].isfinite().nonzero().flatten().tolist()
        seen.append((tokenizer.pad_token_id in kept, byte in kept))
    assert seen == [(False, True)] * 3 + [(False, False)] * 2
    kept = processor(torch.tensor([start]), scores)[0]
    assert kept[letter] == 1.0 and kept[tokenizer.pad_token_id] == -torch.inf
    with pytest.raises(ValueError, match="picard: databases has 2 names, and there are 3 rows"):
        Picard().processor(tokenizer, {"county": database.schema}, ["county"] * 2)(
            torch.tensor([start] * 3), scores.expand(3, -1)
        )
