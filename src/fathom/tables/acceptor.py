"""A prefix acceptor of Spider's SQL: whether a text can still become an answer, character by character.

    answer  database | query
    query   SELECT [DISTINCT] value, … [FROM unit [JOIN unit [ON conditions]] …] [WHERE conditions] [GROUP BY column, …]
            [HAVING conditions] [ORDER BY value [ASC | DESC], …] [LIMIT number] [INTERSECT | EXCEPT | UNION query]
    unit    table [AS tN]  or  (query) [AS tN]
    value   column, number, 'text', MAX | MIN | COUNT | SUM | AVG (value) or (query); one sign between two of them

The grammar is a table (`RULES`), read top down with a stack of what must follow. Where several readings are open all of
them are kept. What a name may be follows from the tables in scope: before FROM every name of the database is possible,
and is looked at again when FROM ends. States are numbered and remembered, so that a prefix is read once.

Modes: "lex" takes any sequence of the words that the grammar has; "parse_without_guards" the grammar, with every name
of the database everywhere; "parse_with_guards" also asks that columns are those of tables in scope; "parse_with_types"
also that SUM and AVG are over columns of numbers, and that LIKE is not on one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fathom.tables.schema import Schema

MODES = ("lex", "parse_without_guards", "parse_with_guards", "parse_with_types")
_COMPARE = (("=", "value"), (">", "value"), ("<", "value"), (">=", "value"), ("<=", "value"), ("!=", "value"))
# A symbol → its readings, each a sequence of symbols. Upper case in <> is a kind of word, "!" an act, all else itself.
RULES: dict[str, tuple[tuple[str, ...], ...]] = {
    "query": (("!open", "select", "distinct?", "shown", "more shown", "from?", "clauses", "!close", "joined?"),),
    "clauses": (("where?", "group?", "tail"),),
    "distinct?": ((), ("distinct",)),
    "item": (("*",), ("value",)),
    "shown": (("<STARS>",), ("value",)),
    "more shown": ((), (",", "shown", "more shown")),
    "from?": (("!from",), ("from", "unit", "joins", "!from")),
    "unit": (("<TABLE>", "alias?"), ("(", "!inside", "query", ")", "!derived", "alias?")),
    "alias?": ((), ("as", "<ALIAS>")),
    "joins": ((), ("join", "unit", "on?", "joins")),
    "on?": ((), ("on", "conditions")),
    "where?": ((), ("where", "conditions")),
    "group?": ((), ("group", "by", "<COLUMN>", "columns")),
    "columns": ((), (",", "<COLUMN>", "columns")),
    "tail": (("having?", "order?", "limit?"), ("order", "by", "sorted", "having", "conditions", "limit?")),
    "having?": ((), ("having", "conditions")),
    "order?": ((), ("order", "by", "sorted")),
    "sorted": (("value", "direction?", "more sorted"),),
    "more sorted": ((), (",", "sorted")),
    "direction?": ((), ("asc",), ("desc",)),
    "limit?": ((), ("limit", "<NUMBER>")),
    "joined?": ((), ("intersect", "query"), ("except", "query"), ("union", "query")),
    "conditions": (("condition", "more conditions"),),
    "more conditions": ((), ("and", "conditions"), ("or", "conditions")),
    "condition": (("not", "condition"), ("(", "conditions", ")"), ("value", "test"), ("like left", "like test")),
    "test": (*_COMPARE, ("not", "listed"), ("listed",)),
    "listed": (("in", "(", "inside", ")"), ("between", "value", "and", "value")),
    "like left": (("value",),),
    "like test": (("like", "value"), ("not", "like", "value")),
    "inside": (("query",), ("literal", "literals")),
    "literal": (("<NUMBER>",), ("<TEXT>",)),
    "literals": ((), (",", "literal", "literals")),
    "value": (("primary", "arithmetic?"),),
    "arithmetic?": ((), ("+", "primary"), ("-", "primary"), ("*", "primary"), ("/", "primary")),
    "primary": (
        ("<COLUMN>",), ("<NUMBER>",), ("<TEXT>",), ("(", "value", ")"), ("(", "query", ")"),
        ("max", "(", "over", ")"), ("min", "(", "over", ")"), ("count", "(", "over", ")"),
        ("sum", "(", "amount", ")"), ("avg", "(", "amount", ")"),
    ),
    "over": (("distinct?", "item"),),
    "amount": (("over",),),
}  # fmt: skip
_TYPED = {
    "like left": (("<WORDS>",), ("max", "(", "over", ")"), ("min", "(", "over", ")")),
    "amount": (("distinct?", "sum of"),),
    "sum of": (("<AMOUNT>", "more amount"), ("(", "sum of", ")"), ("<NUMBER>", "more amount")),
    "more amount": ((), *((sign, "sum of") for sign in "+-*/")),
}
_WORDS = sorted(
    {s for rule in RULES.values() for reading in rule for s in reading if s not in RULES and s[0] not in "!<"}
    | {"<", "<=", "!="}
)
_LEX = {
    "query": (("any", "more"),),
    "more": ((), ("any", "more")),
    "any": (*((word,) for word in _WORDS), ("<TABLE>",), ("<COLUMN>",), ("<ALIAS>",), ("<NUMBER>",), ("<TEXT>",)),
}
_COLUMNS = ("<COLUMN>", "<AMOUNT>", "<WORDS>", "<STARS>")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_NUMBER_BEGINS = re.compile(r"-?(\d+(\.\d*)?)?")
_ALIAS = re.compile(r"t\d+")
_ALIAS_BEGINS = re.compile(r"t\d*")


class Scope(NamedTuple):
    """The tables of one query.

    named: (name or alias, table; "" for an inner query).   waiting: columns that were written before FROM.
    done: whether FROM has ended.   inside: whether an inner query of its FROM is open, which does not see
        these tables.
    """

    named: tuple[tuple[str, str], ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    done: bool = False
    inside: bool = False


class Grammar:
    """Texts that can become a query over one database. States are numbers; 0 is the empty text.

    `characters`: the most of a quoted text.
    """

    def __init__(self, schema: Schema, mode: str = "parse_with_guards", characters: int = 32):
        self.guards, self.characters = mode in MODES[2:], characters
        self.rules = _LEX if mode == "lex" else {**RULES, **(_TYPED if mode == "parse_with_types" else {})}
        self.tables = {table: frozenset(columns) for table, columns in schema.by_name.items()}
        self.every = frozenset().union(*self.tables.values())
        self.kinds = {
            (table, name): schema.columns[number].kind
            for table, columns in schema.by_name.items()
            for name, number in columns.items()
        }
        self._places: dict[Any, int] = {}  # (what must follow, scopes) → its number
        self._known: list[Any] = []
        self._moves: dict[int, list[tuple[str, Any, Any]]] = {}
        self._states: dict[frozenset[tuple[int, str]], int] = {}
        self._readings: list[frozenset[tuple[int, str]]] = []
        self._next: dict[tuple[int, str], int] = {}
        self._ends: dict[int, bool] = {}
        self._begins: dict[tuple[int, str], bool] = {}
        self._state(frozenset({(self._place((("query"), None), None), "")}))

    # --- characters -------------------------------------------------------------------------------------------------

    def step(self, state: int, character: str) -> int:
        """The state after one more character; −1: no query begins this way."""
        key = (state, character)
        found = self._next.get(key)
        if found is None:
            found = self._next[key] = self._state(frozenset(self._read(self._readings[state], character)))
        return found

    def width(self, state: int) -> int:
        """The number of open readings, which is the work of a step."""
        return len(self._readings[state])

    def complete(self, state: int) -> bool:
        """Whether the text is a whole query."""
        if state not in self._ends:
            ends = (self._finish(place) if not word else any(self._finish(p) for p in self._shift(place, word))
                    for place, word in self._readings[state])  # fmt: skip
            self._ends[state] = any(ends)
        return self._ends[state]

    def _read(self, readings: Iterable[tuple[int, str]], c: str) -> Iterator[tuple[int, str]]:
        for place, word in readings:
            quoted = word[:1] in ("'", '"') and word.count(word[0]) % 2 == 1  # a doubled quote is one in the text
            space = c.isspace()
            if not word:
                if space:
                    yield place, ""
                elif self._can_begin(place, c.lower() if c not in "'\"" else c):
                    yield place, c.lower()
                continue
            if quoted:
                if len(word) <= self.characters or c == word[0]:
                    yield place, word + c
                continue
            if c == word[0] and c in "'\"" and len(word) <= self.characters:
                yield place, word + c
            longer = word + c.lower()
            if word[0] not in "'\"" and not space and self._can_begin(place, longer):
                yield place, longer
            if _parts(word, c):
                for after in self._shift(place, word):
                    if space:
                        yield after, ""
                    elif self._can_begin(after, c.lower()):
                        yield after, c.lower()

    # --- words ------------------------------------------------------------------------------------------------------

    def _can_begin(self, place: int, word: str) -> bool:
        """Whether one of the words allowed here begins with `word`."""
        key = (place, word)
        found = self._begins.get(key)
        if found is None:
            found = any(self._begins_with(terminal, scopes, word) for terminal, _, scopes in self.moves(place))
            self._begins[key] = found
        return found

    def _begins_with(self, terminal: str, scopes: Any, word: str) -> bool:
        if terminal[0] != "<" or terminal in ("<", "<="):
            return terminal.startswith(word)
        if terminal == "<NUMBER>":
            return _NUMBER_BEGINS.fullmatch(word) is not None
        if terminal == "<TEXT>":
            return word[0] in "'\""
        if terminal == "<ALIAS>":
            return _ALIAS_BEGINS.fullmatch(word) is not None
        if terminal == "<TABLE>":
            return any(name.startswith(word) for name in self.tables)
        if terminal in _COLUMNS:
            return self._column_begins(terminal, scopes, word)
        return False

    def _shift(self, place: int, word: str) -> list[int]:
        """The places in the grammar where the text may be after a whole word."""
        found = []
        for terminal, rest, scopes in self.moves(place):
            if terminal[0] != "<" or terminal in ("<", "<="):
                fits = terminal == word
            elif terminal == "<NUMBER>":
                fits = _NUMBER.fullmatch(word) is not None
            elif terminal == "<TEXT>":
                fits = word[0] in "'\"" and word[-1] == word[0] and word.count(word[0]) % 2 == 0
            elif terminal == "<ALIAS>":
                fits = _ALIAS.fullmatch(word) is not None
                if fits and self.guards:
                    scope, outer = scopes
                    if any(name == word for name, _ in scope.named):
                        continue
                    table = scope.named[-1][1]
                    meant = [column for name, column in scope.waiting if name == word]
                    if table and any(column not in self.tables[table] and column != "*" for column in meant):
                        continue
                    scopes = (scope._replace(named=(*scope.named[:-1], (word, table))), outer)
            elif terminal == "<TABLE>":
                fits = word in self.tables
                if fits and self.guards:
                    scopes = (scopes[0]._replace(named=(*scopes[0].named, (word, word))), scopes[1])
            else:
                fits = True
                scopes = self._column(terminal, scopes, word)
                if scopes is False:
                    continue
            if fits:
                found.append(self._place(rest, scopes))
        return found

    # --- names ------------------------------------------------------------------------------------------------------

    def _column_begins(self, terminal: str, scopes: Any, word: str) -> bool:
        """Whether a column allowed here begins with `word`."""
        name, dot, column = word.partition(".")
        if dot:
            tables = self._meant(scopes, name)
            return any(c.startswith(column) for t in tables for c in self._columns_of(terminal, t))
        if self.guards and scopes and scopes[0].done:
            names, tables = self._in_scope(scopes)
            if any(n.startswith(name) for n in names):
                return True
        else:
            tables = list(self.tables)
            if _ALIAS_BEGINS.fullmatch(name) or any(t.startswith(name) for t in self.tables):
                return True
        return any(c.startswith(name) for t in tables for c in self._columns_of(terminal, t))

    def _columns_of(self, terminal: str, table: str) -> Iterable[str]:
        if terminal == "<STARS>":
            return ("*",)
        columns = self.tables[table] if table else self.every
        if terminal == "<COLUMN>" or not table:
            return columns
        wanted = terminal == "<AMOUNT>"
        return [c for c in columns if (self.kinds[table, c] == "number") == wanted]

    def _in_scope(self, scopes: Any) -> tuple[list[str], list[str]]:
        """Names and tables of this query and of those around it; "" stands for an inner query's columns."""
        names: list[str] = []
        tables: list[str] = []
        for scope in _visible(scopes):
            names += [name for name, _ in scope.named if name]
            tables += [table for _, table in scope.named]
            if not scope.done:  # its FROM comes later, and may name every table
                names += list(self.tables)
                tables += list(self.tables)
        return names, tables

    def _meant(self, scopes: Any, name: str) -> list[str]:
        """The tables that a name before a dot may mean."""
        anything = [name] if name in self.tables else list(self.tables) if _ALIAS.fullmatch(name) else []
        if not self.guards:
            return anything
        for scope in _visible(scopes):
            found = [table for known, table in scope.named if known == name]
            if found:
                return found
            if not scope.done:
                return anything
        return []

    def _column(self, terminal: str, scopes: Any, word: str) -> Any:
        """The scopes after a column; False: there is none of this name."""
        name, dot, column = word.partition(".")
        if not dot:
            name, column = "", word
        if not self.guards or scopes is None:
            tables = self._meant(None, name) if name else self.tables
            return scopes if any(column in self._columns_of(terminal, t) for t in tables) else False
        there = self._resolved(terminal, scopes, name, column)
        if there is None:  # to be seen when FROM ends
            return _waiting(scopes, (name, column))
        return scopes if there else False

    def _resolved(self, terminal: str, scopes: Any, name: str, column: str) -> bool | None:
        """Whether a column is one of a table in scope; None: a later FROM decides."""
        later = False
        for scope in _visible(scopes):
            for known, table in scope.named:
                if (known == name or not name) and (column in self._columns_of(terminal, table)):
                    return True
                if name and known == name:
                    return False
            later = later or not scope.done
        if not later:
            return False
        possible = self._meant(scopes, name) if name else self.tables
        fits = any(column in self._columns_of(terminal, table) for table in possible)
        return None if fits else False

    # --- the grammar ------------------------------------------------------------------------------------------------

    def moves(self, place: int) -> list[tuple[str, Any, Any]]:
        """(a kind of word that may come, what must follow it, scopes), for every reading."""
        found = self._moves.get(place)
        if found is None:
            stack, scopes = self._known[place]
            found = self._moves[place] = list(self._expand(stack, scopes))
        return found

    def _expand(self, stack: Any, scopes: Any) -> Iterator[tuple[str, Any, Any]]:
        if stack is None:
            return
        symbol, rest = stack
        if symbol[0] == "!" and symbol != "!=":
            after = self._act(symbol, scopes)
            if after is not False:
                yield from self._expand(rest, after)
        elif symbol in self.rules:
            for reading in self.rules[symbol]:
                yield from self._expand(_onto(reading, rest), scopes)
        else:
            yield symbol, rest, scopes

    def _act(self, act: str, scopes: Any) -> Any:
        """The scopes after an act; False if it is impossible."""
        if not self.guards:
            return scopes
        if act == "!open":
            return Scope(), scopes
        scope, outer = scopes
        if act == "!close":
            return outer
        if act == "!inside":
            return scope._replace(inside=True), outer
        if act == "!derived":
            return scope._replace(named=(*scope.named, ("", "")), inside=False), outer
        done = (scope._replace(waiting=(), done=True), outer)
        for column in scope.waiting:
            there = self._resolved("<STARS>" if column[1] == "*" else "<COLUMN>", done, *column)
            if there is False:
                return False
            if there is None:
                done = _waiting(done, column)
        return done

    def _finish(self, place: int) -> bool:
        """Whether the text may end here."""

        def empty(stack: Any, scopes: Any) -> bool:
            if stack is None:
                return True
            symbol, rest = stack
            if symbol[0] == "!" and symbol != "!=":
                after = self._act(symbol, scopes)
                return after is not False and empty(rest, after)
            return any(
                empty(_onto(reading, rest), scopes) for reading in self.rules.get(symbol, ()) if _nullable(reading)
            )

        return empty(*self._known[place])

    def _place(self, stack: Any, scopes: Any) -> int:
        key = (stack, scopes)
        if key not in self._places:
            self._places[key] = len(self._known)
            self._known.append(key)
        return self._places[key]

    def _state(self, readings: frozenset[tuple[int, str]]) -> int:
        if not readings:
            return -1
        if readings not in self._states:
            self._states[readings] = len(self._readings)
            self._readings.append(readings)
        return self._states[readings]


def _visible(scopes: Any) -> Iterator[Scope]:
    """The scope of this query and those around it that it sees."""
    while scopes is not None:
        scope, scopes = scopes
        yield scope
        if scopes is not None and scopes[0].inside:
            return


def _waiting(scopes: Any, column: tuple[str, str]) -> Any:
    """The scopes where a column waits for the first FROM that has not ended."""
    scope, outer = scopes
    if scope.done:
        return scope, _waiting(outer, column)
    return (scope if column in scope.waiting else scope._replace(waiting=(*scope.waiting, column))), outer


def _parts(word: str, c: str) -> bool:
    """Whether a word may end before this character: letters and digits go on, and two signs "-" begin a comment."""
    return word + c != "--" and not ((word[-1].isalnum() or word[-1] == "_") and (c.isalnum() or c == "_"))


def _onto(symbols: tuple[str, ...], stack: Any) -> Any:
    for symbol in reversed(symbols):
        stack = (symbol, stack)
    return stack


def _nullable(reading: tuple[str, ...]) -> bool:
    """Whether a reading may be empty: only symbols that end in "?" or go on may, and acts."""
    return all((s[0] == "!" and s != "!=") or s in _OPTIONAL for s in reading)


_OPTIONAL = {symbol for rules in (RULES, _TYPED, _LEX) for symbol, readings in rules.items() if () in readings} | {
    "tail",
    "from?",
}


class Acceptor:
    """Answers over several databases, read token by token. A state is (database, state of its grammar, text before)."""

    START = ("", -2, "")

    def __init__(
        self, schemas: Mapping[str, Schema], mode: str = "parse_with_guards", steps: int = 10_000, characters: int = 32
    ):
        self.schemas, self.mode, self.steps, self.characters = dict(schemas), mode, steps, characters
        self._grammars: dict[str, Grammar] = {}
        self.cut_off = 0  # texts that were given up

    def grammar(self, name: str) -> Grammar:
        if name not in self._grammars:
            self._grammars[name] = Grammar(self.schemas[name], self.mode, self.characters)
        return self._grammars[name]

    def advance(self, state: Any, text: str, names: Iterable[str] | None = None) -> Any:
        """The state after more text; None if no answer begins this way, or if reading it took more than `steps` steps.

        Args:
            names: databases that the answer may be about; None: all.
        """
        name, number, before = state
        place = 0
        if number == -2:  # still in the database's name
            before = (before + text).lstrip()
            for known in self.schemas if names is None else names:
                head = f"{known} | "
                if before.startswith(head):
                    name, number, text, before = known, 0, before[len(head) :], ""
                    break
            else:
                begins = any(f"{known} | ".startswith(before) for known in (self.schemas if names is None else names))
                return ("", -2, before) if begins else None
        grammar, used = self.grammar(name), 0
        for place in range(len(text)):
            used += grammar.width(number)
            if used > self.steps:
                self.cut_off += 1
                return None
            number = grammar.step(number, text[place])
            if number < 0:
                return None
        return name, number, ""

    def unwritable(self, name: str) -> list[str]:
        """Tables and columns of a database that no query of this grammar can name: those that SQL would quote."""
        schema = self.schemas[name]
        found = []
        for table, title in enumerate(schema.tables):
            names = [schema.columns[number].name for number in schema.of_table(table)]
            bare = [column for column in names if not self._whole(name, f"select {column} from {title}")]
            found += [title] if not self._whole(name, f"select * from {title}") else [f"{title}.{c}" for c in bare]
        return found

    def _whole(self, name: str, query: str) -> bool:
        state = self.advance(self.START, f"{name} | {query.lower()}", [name])
        return state is not None and self.complete(state)

    def complete(self, state: Any) -> bool:
        """Whether the text is a whole answer."""
        name, number, _ = state
        return number >= 0 and self.grammar(name).complete(number)
