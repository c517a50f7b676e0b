"""Queries of a model read and do nothing else; results are compared as the official script does."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import sqlite3
import time

import pytest
import small_databases

from fathom.tables.database import Database, QueryError
from fathom.tables.execution import execution_match, runnable, same_rows


@pytest.fixture
def path(tmp_path):
    return small_databases.make(tmp_path)


HOSTILE = [
    "DROP TABLE town",
    "DELETE FROM town",
    "INSERT INTO town VALUES (9, 'x', 1, 1)",
    "UPDATE person SET age = 1",
    "CREATE TABLE t (x)",
    "CREATE TEMP TABLE t AS SELECT * FROM town",
    "ATTACH 'other.sqlite' AS other",
    "VACUUM INTO 'copy.sqlite'",
    "PRAGMA writable_schema = 1",
    "PRAGMA table_info(town)",
    "SELECT * FROM pragma_table_info('town')",
    "SELECT load_extension('x')",
    "SELECT name FROM town; DROP TABLE town",
    "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r",
    "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r",
    "SELECT count(*) FROM " + ", ".join(f"visit AS a{i}" for i in range(30)),
    "SELECT a.day FROM " + ", ".join(f"visit AS {c}" for c in "abcdefghijklm"),
    "SELECT zeroblob(2000000000)",
    "SELECT printf('%.*c', 1000000000, 'x')",
    "SELECT group_concat(a.name) FROM " + ", ".join(f"town AS {c}" for c in "abcdefghijklmnopqrstuvw"),
    "SELECT sum(instr(hex(zeroblob(40000 + a.rowid)), hex(zeroblob(20000 + b.rowid)) || '1')) FROM "
    + ", ".join(f"visit AS {c}" for c in "abcdef"),
    "SELECT 1 WHERE '" + "a" * 50_000 + "' LIKE '" + "%a" * 2000 + "b'",
    "SELECT " + "(" * 2000 + "1" + ")" * 2000,
    "SELECT nothing FROM town",
    "EXPLAIN SELECT name FROM town",
    "/* a */ -- b\n explain query plan SELECT name FROM town",
    "SELECT " + ", ".join(["zeroblob(99999)"] * 600) + " FROM visit",  # 180 MB in three rows
    "BEGIN",
    "",
    "-- nothing",
    "SELECT \0",
]


@pytest.mark.parametrize("query", HOSTILE, ids=lambda query: query[:30])
def test_a_hostile_query_fails_soon_and_the_files_bytes_stay(path, query, monkeypatch):
    monkeypatch.setattr("fathom.tables.database.SECONDS", 0.2)
    before, began = hashlib.sha256(path.read_bytes()).digest(), time.perf_counter()
    with Database(path, steps=2_000_000, rows=1000) as database:
        with pytest.raises(QueryError):
            database.run(query)
        assert not execution_match(query, "SELECT name FROM town", [database])
        assert database.run("SELECT count(*) FROM town").rows == [(2,)]  # it goes on working
    assert hashlib.sha256(path.read_bytes()).digest() == before and time.perf_counter() - began < 5
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


def test_the_limit_counts_steps_and_not_time(path):
    query = "SELECT count(*) FROM " + ", ".join(f"visit AS a{i}" for i in range(11))  # 3 ** 11 rows
    with Database(path, steps=100_000) as few, Database(path, steps=10_000_000) as many:
        for _ in range(3):
            with pytest.raises(QueryError, match="stopped after 100,000 steps"):
                few.run(query)
        assert many.run(query).rows == [(3**11,)]


def test_what_is_no_database_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.sqlite: no such database file"):
        Database(tmp_path / "none.sqlite")
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(ValueError, match=r"empty\.sqlite: an empty file"):
        Database(tmp_path / "empty.sqlite")
    (tmp_path / "text.sqlite").write_text("no database, but a text of some length " * 9)
    with pytest.raises(ValueError, match=r"text\.sqlite: file is not a database; name an SQLite file"):
        Database(tmp_path / "text.sqlite")
    with pytest.raises(ValueError, match="a database without tables"):
        Database(small_databases.make(tmp_path, "bare", "CREATE TABLE t (x); DROP TABLE t;"))
    path = small_databases.make(tmp_path, "held")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ValueError, match=r"held\.sqlite: database is locked; another program holds it"):
        Database(path)
    holder.close()


def test_a_file_that_is_held_says_nothing_of_a_query(tmp_path):
    """Neither a right nor a wrong answer; a hot journal has its own remedy."""
    path = small_databases.make(tmp_path, "held")
    holder = sqlite3.connect(path, isolation_level=None)
    with Database(path) as database:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(OSError, match=r"held\.sqlite: database is locked; end the program that holds it"):
            execution_match("SELECT name FROM town", "SELECT name FROM town", [database])
        holder.execute("COMMIT")
        assert execution_match("SELECT name FROM town", "SELECT name FROM town", [database])
    holder.executescript("PRAGMA cache_size = 1; BEGIN; CREATE TABLE long (x);")
    holder.executemany("INSERT INTO long VALUES (?)", [("y" * 500,)] * 200)
    for end in ("", "-journal"):
        shutil.copy(f"{path}{end}", tmp_path / f"cut.sqlite{end}")
    with pytest.raises(ValueError, match="what wrote to it last was cut short; open it once with the program sqlite3"):
        Database(tmp_path / "cut.sqlite")
    holder.close()


def test_tables_of_json_are_read_and_tables_of_absent_extensions_are_left_out(tmp_path):
    script = """CREATE TABLE doc (id INT, body TEXT); INSERT INTO doc VALUES (1, '{"a": [3, {"b": 4}]}'), (2, NULL);
        PRAGMA writable_schema = 1; INSERT INTO sqlite_master VALUES ('table', 'geo', 'geo', 0,
        'CREATE VIRTUAL TABLE geo USING absent(x)');"""
    with Database(small_databases.make(tmp_path, "docs", script)) as database:
        assert database.schema.tables == ("doc",)
        gold = "SELECT doc.id, value FROM doc, json_each(doc.body, '$.a') WHERE type != 'object'"
        assert database.run(gold).rows == [(1, 3)]
        said = "SELECT j.atom, doc.id FROM doc, json_tree(body) AS j WHERE j.fullkey = '$.a[0]'"
        assert execution_match(said, gold, [database])


def test_a_schema_has_every_column_and_key(tmp_path):
    path = small_databases.make(
        tmp_path,
        "keys",
        "CREATE TABLE sqlitex (a INT, b INT GENERATED ALWAYS AS (a * 2), FOREIGN KEY (b, a) REFERENCES pair);"
        "CREATE TABLE pair (x, y, z, PRIMARY KEY (y, x)); INSERT INTO sqlitex VALUES (4);",
    )
    with Database(path) as database:
        assert database.schema.tables == ("sqlitex", "pair")
        assert [column.name for column in database.schema.columns] == ["*", "a", "b", "x", "y", "z"]
        assert set(database.schema.foreign) == {(2, 4), (1, 3)}  # in the order of the key, not of the columns
        assert database.schema.primary == {3, 4} and database.values(2) == (8,)


def test_reading_a_file_with_a_write_ahead_log_makes_no_files(tmp_path):
    path = small_databases.make(tmp_path, "log", f"PRAGMA journal_mode = WAL; {small_databases.SCRIPT}")
    assert [p.name for p in tmp_path.iterdir()] == ["log.sqlite"]
    with Database(path) as database:
        assert database.run("SELECT count(*) FROM town").rows == [(2,)]
        assert [p.name for p in tmp_path.iterdir()] == ["log.sqlite"]
    writer = sqlite3.connect(path, isolation_level=None)  # what is in the log alone is read, too
    writer.execute("INSERT INTO town VALUES (3, 'New', 1, 0)")
    with Database(path) as database:
        assert database.run("SELECT count(*) FROM town").rows == [(3,)]
    writer.close()


def by_permutations(gold, said, ordered):
    """The definition: some order of the columns makes equal lists, or equal sorted lists."""
    if len(gold) != len(said) or (gold and len(gold[0]) != len(said[0])):
        return False
    if not gold:
        return True
    key = (lambda rows: rows) if ordered else (lambda rows: sorted(rows, key=repr))
    orders = itertools.permutations(range(len(gold[0])))
    return any(key([tuple(row[i] for i in order) for row in said]) == key(list(gold)) for order in orders)


def test_results_are_equal_up_to_the_order_of_columns():
    values = list(itertools.product((0, 1), repeat=2))
    tables = [list(rows) for n in (0, 1, 2) for rows in itertools.product(values, repeat=n)]
    tables += [[(0,)], [(0, 1, 1)], [(1, 0, 1), (0, 0, None)], [(1, 1, 0), (None, 0, 0)]]
    for gold, said in itertools.product(tables, repeat=2):
        for ordered in (True, False):
            assert same_rows(gold, said, ordered) == by_permutations(gold, said, ordered)


def test_many_equal_columns_are_not_tried_in_every_order():
    began = time.perf_counter()
    assert not same_rows([(*[1] * 15, 2)], [(1,) * 16], False)
    assert not same_rows([(*[None] * 15, 2), (*[None] * 15, 3)], [(None,) * 16] * 2, True)
    assert same_rows([(*[1] * 15, 2)], [(2, *[1] * 15)], False)
    assert time.perf_counter() - began < 1


def test_queries_are_compared_as_they_are_run(path):
    with Database(path) as database:
        gold = "SELECT name, town_id FROM town ORDER BY town_id"
        assert execution_match("select town_id, name from town order by name desc", gold, [database])
        assert not execution_match("select town_id, name from town order by name", gold, [database])
        assert execution_match("select town_id, name from town order by name", gold[:-17], [database])
        assert execution_match("SELECT town_id FROM person", "SELECT DISTINCT town_id FROM person", [database])
        assert not execution_match(
            "SELECT town_id FROM person", "SELECT DISTINCT town_id FROM person", [database], True
        )
        assert (
            execution_match("select fullname from person where age > = 41", "select fullname from person", [database])
            is False
        )
        with pytest.raises(QueryError):
            execution_match(gold, "SELECT nothing FROM town", [database])
    with Database(path) as database:
        gold = "SELECT DISTINCT name FROM town WHERE head IS NOT DISTINCT FROM 1 AND name != 'a < > b'"
        assert runnable(gold) == gold.replace("SELECT DISTINCT", "SELECT ")  # what is in quotes stays, too
        if sqlite3.sqlite_version_info >= (3, 39):
            assert execution_match(gold.replace("IS NOT", "is  not"), gold, [database])
    assert runnable("SELECT `distinct` FROM [distinct]") == "SELECT `distinct` FROM [distinct]"
    assert runnable("SELECT Distinct a FROM t WHERE b > = 'distinct' AND distinction ! = 1") == (
        "SELECT  a FROM t WHERE b >= 'distinct' AND distinction != 1"
    )
