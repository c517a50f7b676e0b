"""Exact set match of Spider (arXiv 1809.08887), on sqlglot's tree, and the hardness of a query.

Two queries match if each clause has the same parts, in any order, and the FROM clauses name the same tables. Values and
DISTINCT are ignored, and columns bound by foreign keys count as one. The verdicts are those of the official script
(`evaluation.py` of the test suites), with its rules: an alias holds for the whole query, an inner query is compared as
it is written, and queries that the script cannot read (outer joins, IS NULL, conditions in brackets) match nothing.
What is only spelling is read, which the script cannot do: names in backticks or brackets, an alias without AS, INNER
never, `==`, `<>`, NOT before an IN or a LIKE, signs without spaces, comments, and quotes within a text.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from fathom.tables.schema import Schema

LEVELS = ("easy", "medium", "hard", "extra")
_SPLIT_SIGN = re.compile(r"""('[^']*'|"[^"]*"|`[^`]*`|\[[^\]]*\])|[<>!]\s+=|<\s+>""")  # group 1: texts, names


class ColumnUnit(NamedTuple):
    """agg(DISTINCT column); column is "*" or (table, name)."""

    aggregate: str
    column: Any
    distinct: bool | None


class ValueUnit(NamedTuple):
    """first, or first op second."""

    operator: str
    first: ColumnUnit
    second: ColumnUnit | None


class Condition(NamedTuple):
    """left [NOT] op value [AND second]; a value is text as it stands, a ColumnUnit, or a Query."""

    negated: bool
    operator: str
    left: ValueUnit
    value: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Query:
    """The clauses of a query. Conditions alternate with "and" and "or"."""

    distinct: bool | None
    select: tuple[tuple[str, ValueUnit], ...]
    tables: tuple[Any, ...]
    on: tuple[Any, ...] = ()
    where: tuple[Any, ...] = ()
    group: tuple[ColumnUnit, ...] = ()
    having: tuple[Any, ...] = ()
    direction: str = ""
    order: tuple[ValueUnit, ...] = ()
    limit: bool = False
    joined: tuple[tuple[str, Query], ...] = ()  # "union", "intersect" or "except", and the query behind it

    @property
    def conditions(self) -> Iterator[Condition]:
        yield from (*self.on[::2], *self.where[::2], *self.having[::2])

    @property
    def connectors(self) -> tuple[str, ...]:
        return (*self.on[1::2], *self.where[1::2], *self.having[1::2])

    @property
    def nested(self) -> list[Query]:
        values = [value for c in self.conditions for value in (c.value, c.second)]
        return [value for value in values if isinstance(value, Query)] + [query for _, query in self.joined]


class Unreadable(ValueError):
    """The error of a query outside Spider's grammar."""


def parse(sql: str, schema: Schema) -> Query:
    """The clauses of a query over a database. Raises Unreadable."""
    import sqlglot
    from sqlglot import errors

    try:
        tree = sqlglot.parse_one(plain_quotes(whole_signs(sql)), dialect="sqlite")
        tree.set("offset", None)  # a value, as that of LIMIT; the script cannot read one in an inner query
        return _Reader(tree, schema).query(tree)
    except (errors.SqlglotError, RecursionError) as error:
        raise Unreadable(f"no SQL ({type(error).__name__}): {sql}") from error


def whole_signs(sql: str) -> str:
    """The query with signs that a tokenizer split, as `> =`, joined."""
    return _SPLIT_SIGN.sub(lambda found: found[1] or "".join(found[0].split()), sql)


def plain_quotes(sql: str) -> str:
    """The query with every quoted text in single quotes, as SQL writes them: Spider's values have either."""
    parts, place = [], 0
    while place < len(sql):
        quote = sql[place]
        if quote not in "'\"":
            parts.append(quote)
            place += 1
            continue
        stop = sql.find(quote, place + 1)
        while 0 <= stop < len(sql) - 1 and sql[stop + 1] == quote:  # a doubled quote is one in the text
            stop = sql.find(quote, stop + 2)
        if stop < 0:
            raise Unreadable(f"a quote does not end: {sql}")
        text = sql[place + 1 : stop].replace(quote * 2, quote)
        parts.append("'" + text.replace("'", "''") + "'")
        place = stop + 1
    return "".join(parts)


class _Reader:
    """From sqlglot's tree to clauses. The names that the script reads as aliases hold everywhere in the query."""

    def __init__(self, tree: Any, schema: Schema):
        from sqlglot import exp

        self.exp, self.schema = exp, schema
        self.operators = {
            exp.EQ: "=", exp.GT: ">", exp.LT: "<", exp.GTE: ">=", exp.LTE: "<=", exp.NEQ: "!=", exp.Like: "like",
            exp.NullSafeEQ: "is",
        }  # fmt: skip
        self.arithmetic = {exp.Sub: "-", exp.Add: "+", exp.Mul: "*", exp.Div: "/"}
        self.aggregates = {exp.Max: "max", exp.Min: "min", exp.Count: "count", exp.Sum: "sum", exp.Avg: "avg"}
        self.last = tree  # the SELECT at the query's end: there alone the script passes over what it cannot read
        while isinstance(self.last, exp.SetOperation):
            self.last = self.last.expression
        self.aliases = {name: name for name in schema.by_name}
        for table in tree.find_all(exp.Table, bfs=False):
            if table.alias:
                if table.alias.lower() in schema.by_name:
                    raise Unreadable(f"alias {table.alias} is the name of a table")
                self.aliases[table.alias.lower()] = table.name.lower()

    def query(self, node: Any) -> Query:
        """A SELECT, or several that a set operation joins: the script reads the second with all that follows it."""
        exp = self.exp
        if isinstance(node, exp.Subquery) and not node.alias:
            node = node.this
        if isinstance(node, exp.SetOperation):
            parts = self._flat(node)
            last = parts[-1][1]
            found = self.select(last, node.args.get("order"), node.args.get("limit"))
            for (operator, _), (_, before) in zip(parts[:0:-1], parts[-2::-1], strict=True):
                found = dataclasses.replace(self.select(before), joined=((operator, found),))
            return found
        return self.select(node)

    def _flat(self, node: Any) -> list[tuple[str, Any]]:
        """[("", first), (operator, second), …]."""
        exp = self.exp
        if not isinstance(node, exp.SetOperation):
            return [("", node)]
        if not isinstance(node.expression, exp.Select | exp.Subquery) or not node.args.get("distinct", True):
            raise Unreadable(f"{node.key} of something else than two queries")
        return [*self._flat(node.this), (node.key, node.expression)]

    def select(self, node: Any, order: Any = None, limit: Any = None) -> Query:
        exp = self.exp
        if isinstance(node, exp.Subquery):
            node = node.this
        if not isinstance(node, exp.Select):
            raise Unreadable(f"no SELECT: {node.key}")
        known = {"distinct", "expressions", "from_", "joins", "where", "group", "having", "order", "limit"}
        others = [name for name, value in node.args.items() if value and name not in known]
        if others or node.args.get("from_") is None:
            raise Unreadable(f"clause {others[0]}" if others else "no FROM")
        if node.args.get("having") and not node.args.get("group"):
            raise Unreadable("HAVING without GROUP BY")
        tables, on, scope = self._from(node)
        units = functools.partial(self.value_unit, scope=scope)
        group = node.args.get("group")
        having, where = node.args.get("having"), node.args.get("where")
        order = node.args.get("order") or order
        direction = "asc" if order else ""
        ordered = []
        for entry in order.expressions if order else ():
            more = type(entry.this) in (exp.Collate, *self.operators)
            ordered.append(units(entry.this.this if more else entry.this))
            down = bool(entry.args.get("desc"))
            if entry.args.get("desc") is not None and not more:
                direction = "desc" if down else "asc"
            if more or bool(entry.args.get("nulls_first")) == down:  # SQLite has them first where the order is up
                if node is not self.last:
                    raise Unreadable(f"ORDER BY {entry.sql()}")
                limit, node = None, _without_limit(node)  # the script stops at a sign or a word, and reads no limit
                break
        limit = node.args.get("limit") or limit
        if limit is not None and not isinstance(limit, exp.Limit):
            raise Unreadable(f"clause {limit.key}")
        return Query(
            distinct=node.args.get("distinct") is not None,
            select=tuple(self._selected(entry, scope) for entry in node.expressions),
            tables=tables,
            on=on,
            where=self.conditions(where.this, scope) if where else (),
            group=tuple(self.column_unit(entry, scope) for entry in group.expressions) if group else (),
            having=self.conditions(having.this, scope) if having else (),
            direction=direction,
            order=tuple(ordered),
            limit=limit is not None,
        )

    def _from(self, node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], list[str]]:
        """(tables and inner queries, conditions of joins, tables in scope)."""
        joins = node.args.get("joins") or []
        tables: list[Any] = []
        on: list[Any] = []
        scope: list[str] = []
        for place, source in enumerate([node.args["from_"].this, *(join.this for join in joins)]):
            if place:
                join = joins[place - 1]
                if join.args.get("side") or join.args.get("kind") or join.args.get("using") or join.method:
                    raise Unreadable("a join other than JOIN … ON")
            if isinstance(source, self.exp.Subquery):
                if source.alias:
                    raise Unreadable("an inner query with an alias in FROM")
                tables.append(self.query(source.this))
            else:
                name = source.name.lower()
                if others := [key for key, value in source.args.items() if value and key not in ("this", "alias")]:
                    raise Unreadable(f"{others[0]} of table {name}")
                if name not in self.schema.by_name:
                    raise Unreadable(f"no table {name}")
                tables.append(name)
                scope.append(name)
            condition = joins[place - 1].args.get("on") if place else None
            if condition is not None and not isinstance(condition, self.exp.Boolean):  # sqlglot's "true" for none
                on += ["and"] if on else []
                on += self.conditions(condition, scope)
        return tuple(tables), tuple(on), scope

    def _selected(self, node: Any, scope: list[str]) -> tuple[str, ValueUnit]:
        aggregate = self.aggregates.get(type(node))
        if type(node) in self.arithmetic and type(node.this) in self.aggregates:
            raise Unreadable(f"{node.sql()} without brackets")
        if aggregate is None:
            return "", self.value_unit(node, scope)
        inner, distinct = self._inside(node)
        unit = self.value_unit(inner, scope)
        if distinct:
            unit = unit._replace(first=unit.first._replace(distinct=True))
        return aggregate, unit

    def _inside(self, node: Any) -> tuple[Any, bool]:
        """The argument of an aggregate, and whether it is over distinct values."""
        if isinstance(node.this, self.exp.Distinct):
            if len(node.this.expressions) != 1:
                raise Unreadable("an aggregate over several columns")
            return node.this.expressions[0], True
        return node.this, False

    def value_unit(self, node: Any, scope: list[str]) -> ValueUnit:
        if isinstance(node, self.exp.Paren):
            node = node.this
        operator = self.arithmetic.get(type(node))
        if operator is None:
            return ValueUnit("", self.column_unit(node, scope), None)
        if isinstance(node.this, self.exp.Paren):
            raise Unreadable(f"brackets before a sign in {node.sql()}")
        return ValueUnit(operator, self.column_unit(node.this, scope), self.column_unit(node.expression, scope))

    def column_unit(self, node: Any, scope: list[str]) -> ColumnUnit:
        if isinstance(node, self.exp.Paren):
            node = node.this
        aggregate, distinct = self.aggregates.get(type(node), ""), False
        if aggregate:
            node, distinct = self._inside(node)
        if isinstance(node, self.exp.Star):
            return ColumnUnit(aggregate, "*", distinct)
        if not isinstance(node, self.exp.Column) or isinstance(node.this, self.exp.Star):
            raise Unreadable(f"{node.sql() if node is not None else 'nothing'} where a column should be")
        if node.args.get("db"):
            raise Unreadable(f"a database's name before {node.name}")
        name, table = node.name.lower(), node.table.lower()
        if table:
            table = self.aliases.get(table, "")
            if name not in self.schema.by_name.get(table, ()):
                raise Unreadable(f"no column {node.sql()}")
            return ColumnUnit(aggregate, (table, name), distinct)
        for candidate in scope:
            if name in self.schema.by_name[candidate]:
                return ColumnUnit(aggregate, (candidate, name), distinct)
        raise Unreadable(f"no column {name}")

    def conditions(self, node: Any, scope: list[str]) -> tuple[Any, ...]:
        """Conditions and connectors in turn. The script takes what follows a column on the right of a sign, up to the
        next "and", for a part of it."""
        found = self._connected(node, scope)
        kept = list(found[:1])
        for connector, condition in zip(found[1::2], found[2::2]):
            swallowed = connector == "or" and isinstance(kept[-1].second or kept[-1].value, ColumnUnit)
            kept += [] if swallowed else [connector, condition]
        return tuple(kept)

    def _connected(self, node: Any, scope: list[str]) -> tuple[Any, ...]:
        exp = self.exp
        if isinstance(node, exp.And | exp.Or):
            word = "and" if isinstance(node, exp.And) else "or"
            return (*self._connected(node.this, scope), word, *self._connected(node.expression, scope))
        return (self.condition(node, scope),)

    def condition(self, node: Any, scope: list[str]) -> Condition:
        exp = self.exp
        negated = bool(node.args.get("negate"))
        if isinstance(node, exp.Not):
            negated, node = True, node.this
            if not isinstance(node, exp.In | exp.Between | exp.Like):
                raise Unreadable(f"NOT before {node.sql()}")
        if isinstance(node, exp.Between):
            values = [self.value(node.args[name], scope) for name in ("low", "high")]
            return Condition(negated, "between", self.value_unit(node.this, scope), *values)
        if isinstance(node, exp.In):
            query, listed = node.args.get("query"), node.expressions
            if query is None and len(listed) != 1:
                raise Unreadable("IN a list of several values")
            return Condition(
                negated, "in", self.value_unit(node.this, scope), self.value(query or listed[0], scope), None
            )
        operator = self.operators.get(type(node))
        if operator is None:
            raise Unreadable(f"condition {node.sql()}")
        return Condition(negated, operator, self.value_unit(node.this, scope), self.value(node.expression, scope), None)

    def value(self, node: Any, scope: list[str]) -> Any:
        exp = self.exp
        if isinstance(node, exp.Paren):
            node = node.this
            if isinstance(node, exp.Column):
                raise Unreadable(f"brackets around {node.sql()}")
        if isinstance(node, exp.Subquery | exp.Select | exp.SetOperation):
            return self.query(node)
        if isinstance(node, exp.Literal):
            return node.this if node.is_string else float(node.this)
        if isinstance(node, exp.Neg) and isinstance(node.this, exp.Literal):
            return -float(node.this.this)
        while type(node) in self.arithmetic:  # the script reads the first column and no further
            node = node.this
        return self.column_unit(node, scope)


def _without_limit(node: Any) -> Any:
    node = node.copy()
    node.set("limit", None)
    return node


def without_values(query: Query) -> Query:
    """The query without values on the right of its conditions; inner queries stay, without values."""

    def side(value: Any) -> Any:
        return without_values(value) if isinstance(value, Query) else None

    def each(conditions: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            c if isinstance(c, str) else c._replace(value=side(c.value), second=side(c.second)) for c in conditions
        )

    return dataclasses.replace(
        query,
        on=each(query.on),
        where=each(query.where),
        having=each(query.having),
        joined=tuple((operator, without_values(other)) for operator, other in query.joined),
    )


def key_columns(schema: Schema) -> dict[tuple[str, str], tuple[str, str]]:
    """For each column that foreign keys bind, the first column of those bound together."""
    groups: list[set[int]] = []
    for pair in schema.foreign:
        group = next((g for g in groups if g & set(pair)), None)
        if group is None:
            groups.append(group := set())
        group.update(pair)

    def named(number: int) -> tuple[str, str]:
        column = schema.columns[number]
        return schema.tables[column.table].lower(), column.name.lower()

    return {named(number): named(min(group)) for group in groups for number in group}


def with_key_columns(query: Query, schema: Schema, scope: frozenset[str] | None = None) -> Query:
    """The query with one column for all that foreign keys bind, of tables that its first FROM names, and without
    DISTINCT; inner queries of conditions stay as they are."""
    keys = key_columns(schema)
    tables = scope if scope is not None else frozenset(t for t in query.tables if isinstance(t, str))

    def column(unit: ColumnUnit) -> ColumnUnit:
        name = unit.column
        if name in keys and name[0] in tables:
            name = keys[name]
        return ColumnUnit(unit.aggregate, name, None)

    def value(unit: ValueUnit) -> ValueUnit:
        return ValueUnit(unit.operator, column(unit.first), None if unit.second is None else column(unit.second))

    def each(conditions: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(c if isinstance(c, str) else c._replace(left=value(c.left)) for c in conditions)

    return dataclasses.replace(
        query,
        distinct=None,
        select=tuple((aggregate, value(unit)) for aggregate, unit in query.select),
        on=each(query.on),
        where=each(query.where),
        group=tuple(map(column, query.group)),
        having=each(query.having),
        order=tuple(map(value, query.order)),
        joined=tuple((operator, with_key_columns(other, schema, tables)) for operator, other in query.joined),
    )


def same(predicted: Query, gold: Query) -> bool:
    """Whether two normalised queries match, clause by clause."""
    clauses = (
        Counter(predicted.select) == Counter(gold.select),
        Counter(predicted.where[::2]) == Counter(gold.where[::2]),
        Counter(_names(predicted)) == Counter(_names(gold)),
        bool(predicted.group) == bool(gold.group),
        not gold.group or (_columns(predicted), predicted.having) == (_columns(gold), gold.having),
        bool(predicted.order) == bool(gold.order),
        not gold.order
        or (predicted.direction, predicted.order, predicted.limit) == (gold.direction, gold.order, gold.limit),
        set(predicted.where[1::2]) == set(gold.where[1::2]),
        [operator for operator, _ in predicted.joined] == [operator for operator, _ in gold.joined],
        all(same(a, b) for (_, a), (_, b) in zip(predicted.joined, gold.joined)),
        keywords(predicted) == keywords(gold),
        Counter(predicted.tables) == Counter(gold.tables),
    )
    return all(clauses)


def _columns(query: Query) -> list[Any]:
    return [unit.column for unit in query.group]


def _names(query: Query) -> list[str]:
    """Names of the columns that rows are grouped by, without their tables."""
    return [column if column == "*" else column[1] for column in _columns(query)]


def keywords(query: Query) -> set[str]:
    """The keywords that the script counts."""
    found = {
        "where": query.where, "group": query.group, "having": query.having, "order": query.order, "limit": query.limit,
        query.direction: query.order, "or": "or" in query.connectors,
        "not": any(c.negated for c in query.conditions),
        **{word: any(c.operator == word for c in query.conditions) for word in ("in", "like")},
        **{operator: True for operator, _ in query.joined},
    }  # fmt: skip
    return {word for word, there in found.items() if there}


def exact_match(predicted: str, gold: str, schema: Schema) -> bool:
    """Whether a prediction matches the gold query. Raises Unreadable where the gold query cannot be read."""
    right = parse(gold, schema)
    try:
        said = parse(predicted, schema)
        said, right = (with_key_columns(without_values(query), schema) for query in (said, right))
        return same(said, right)
    except (Unreadable, RecursionError):  # a query of thousands of parts is not the gold one
        return False


def hardness(query: Query) -> str:
    """One of `LEVELS`, by counts of clauses, of inner queries, and of aggregates, columns and conditions."""
    first = sum(map(bool, (query.where, query.group, query.order, query.limit)))
    first += len(query.tables) - 1 + query.connectors.count("or")
    first += sum(c.operator == "like" for c in query.conditions)
    inner = len(query.nested)
    # The script takes a negation for an aggregate, and in HAVING every "and", as their places hold one elsewhere.
    aggregates = sum(bool(aggregate) for aggregate, _ in query.select)
    aggregates += sum(c.negated for c in query.where[::2]) + sum(bool(unit.aggregate) for unit in query.group)
    aggregates += sum(bool(u.aggregate) for unit in query.order for u in (unit.first, unit.second) if u is not None)
    aggregates += sum(isinstance(c, str) or c.negated for c in query.having)
    others = (aggregates > 1) + (len(query.select) > 1) + (len(query.where) > 1) + (len(query.group) > 1)
    if first <= 1 and others == 0 and inner == 0:
        return "easy"
    if inner == 0 and ((others <= 2 and first <= 1) or (first <= 2 and others < 2)):
        return "medium"
    if (inner == 0 and ((others > 2 and first <= 2) or (2 < first <= 3 and others <= 2))) or (
        first <= 1 and others == 0 and inner <= 1
    ):
        return "hard"
    return "extra"
