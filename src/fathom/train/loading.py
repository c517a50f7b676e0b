"""YAML to typed dataclasses, strictly: an unknown or missing key, or a value of the wrong type, is refused by name."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import yaml

from fathom.models.registry import nearest

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML forbids it, PyYAML keeps the last)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The YAML value of `text`. Raises ValueError that says where it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from None


def build(cls: type[T], raw: Any, where: str = "") -> T:
    """An instance of the dataclass `cls` from a mapping; `where` is the dotted place of `raw` in the recipe.

    A class with its own YAML form has a classmethod `from_yaml(raw, where)`. Raises ValueError.
    """
    from_yaml = getattr(cls, "from_yaml", None)
    if from_yaml is not None:
        return from_yaml(raw, where)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(raw, dict):
        raise ValueError(f"{where or 'the recipe'} is {raw!r}: needs a mapping with keys {', '.join(fields)}")
    check_keys(raw, fields, where)
    for name, field in fields.items():
        if name not in raw and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{_join(where, name)} is missing")
    hints = typing.get_type_hints(cls)
    return cls(**{key: convert(value, hints[key], _join(where, key)) for key, value in raw.items()})


def check_keys(raw: Iterable[Any], known: Iterable[str], where: str) -> None:
    """Raise ValueError for a key of `raw` that is not known, naming the nearest one."""
    names = list(known)
    for key in raw:
        if key not in names:
            raise ValueError(f"unknown key {_join(where, key)}{nearest(str(key), names)}; known: {', '.join(names)}")


def convert(value: Any, kind: Any, where: str) -> Any:
    """`value` as the annotated type `kind`. Numbers may be written as YAML reads them as text (1e-3)."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)  # type: ignore[arg-type]
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, arguments, where)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ValueError(f"{where}={value!r}: use {' or '.join(map(repr, arguments))}")
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else _refuse(value, "a list", where)
        if arguments[-1] is not Ellipsis and len(items) != len(arguments):
            _refuse(value, f"a list of {len(arguments)}", where)
        return tuple(convert(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        if not isinstance(value, dict):
            _refuse(value, "a mapping", where)
        return {key: convert(item, arguments[1], _join(where, key)) for key, item in value.items()}
    return _scalar(value, kind, where)


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    """The value as the first type that fits. A list or mapping is tried as its own kind first, for the message."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    containers = tuple(kind for kind in kinds if typing.get_origin(kind) in (tuple, dict))
    if isinstance(value, list | dict) and containers:
        return convert(value, containers[0], where)
    errors = []
    for kind in kinds:
        try:
            return convert(value, kind, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _scalar(value: Any, kind: type, where: str) -> Any:
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
            if kind is float:
                return number
            if number.is_integer():
                return value if isinstance(value, int) else int(number)
        except (TypeError, ValueError, OverflowError):
            pass
        _refuse(value, "a number" if kind is float else "a whole number", where)
    if type(value) is not kind:  # True is no number
        _refuse(
            value,
            {str: "text", bool: "true or false", int: "a whole number", float: "a number"}.get(kind, kind.__name__),
            where,
        )
    return value


def _refuse(value: Any, wanted: str, where: str) -> typing.NoReturn:
    raise ValueError(f"{where}={value!r}: must be {wanted}")


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)
