"""Arguments of a tool held against its JSON schema: the part of JSON Schema that signatures of functions need."""

from __future__ import annotations

import math
from typing import Any

KINDS: dict[str, Any] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
NOTES = {"description", "title", "default", "return"}  # which restrict nothing
CHECKED = {
    "type", "enum", "nullable", "anyOf", "items", "prefixItems", "properties", "required", "additionalProperties",
    "minimum", "maximum",
}  # fmt: skip


def check_schema(schema: Any, where: str) -> None:
    """Raises ValueError for a keyword that `check` would pass over, so that no restriction is silently lost."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{where}: a schema must be an object, got {type(schema).__name__}")
    for keyword in schema:
        if keyword not in CHECKED | NOTES:
            raise ValueError(
                f"{where}: the schema's keyword {keyword!r} is not checked; use {', '.join(sorted(CHECKED))}"
            )
    for kind in _listed(schema.get("type", [])):
        if kind not in KINDS:
            raise ValueError(f"{where}: type {kind!r} is no type of JSON; use {', '.join(KINDS)}")
    parts = [*schema.get("properties", {}).items(), *((f"[{i}]", s) for i, s in enumerate(schema.get("anyOf", [])))]
    parts += [(f"[{i}]", part) for i, part in enumerate(schema.get("prefixItems", []))]
    parts += [(name, schema[name]) for name in ("items", "additionalProperties") if name in schema]
    for name, part in parts:
        check_schema(part, f"{where}.{name}")


def check(value: Any, schema: Any, where: str) -> None:
    """Raises ValueError that names the place, the value and what the schema asks for.

    An integer may stand for a number, not the other way round; `nullable` allows null; properties that the schema does
    not name are refused unless `additionalProperties` allows them.
    """
    if isinstance(schema, bool):
        if not schema:
            raise ValueError(f"{where}={_short(value)} must not be given")
        return
    if value is None and schema.get("nullable"):
        return
    kinds = _listed(schema.get("type", []))
    if kinds and not any(KINDS[kind](value) for kind in kinds):
        raise ValueError(f"{where}={_short(value)} must be of type {' or '.join(kinds)}")
    if "enum" in schema and not any(value == one and type(value) is type(one) for one in schema["enum"]):
        raise ValueError(f"{where}={_short(value)} must be one of {', '.join(map(_short, schema['enum']))}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if not low <= value <= high:
            raise ValueError(f"{where}={_short(value)} must lie between {low} and {high}")
    if "anyOf" in schema and not any(_fits(value, one, where) for one in schema["anyOf"]):
        raise ValueError(f"{where}={_short(value)} fits none of the schema's {len(schema['anyOf'])} choices")
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        if first and len(value) != len(first):
            raise ValueError(f"{where}={_short(value)} must have {len(first)} items")
        for index, item in enumerate(value):
            check(item, first[index] if first else schema.get("items", {}), f"{where}[{index}]")
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        known = {name: part for name, part in schema.get("properties", {}).items() if name != "return"}
        for name in schema.get("required", []):
            if name not in value:
                raise ValueError(f"{where}: {name!r} is missing")
        for name, item in value.items():
            if name not in known and schema.get("additionalProperties", False) is False:
                raise ValueError(f"{where}: {name!r} is unknown; it takes {', '.join(known) or 'nothing'}")
            check(item, known.get(name, schema.get("additionalProperties", {})), f"{where}.{name}")


def _fits(value: Any, schema: Any, where: str) -> bool:
    try:
        check(value, schema, where)
    except ValueError:
        return False
    return True


def _listed(kinds: Any) -> list[str]:
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
