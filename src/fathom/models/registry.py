"""The config's sections, and for each a registry of its methods.

They are on this floor because the decoder looks methods up by name. The wings above fill the registries
(`@register(...)` on the method's class), so that imports only go down. The wings are imported when `REGISTRIES` is
first read: `import fathom` only stores the function that imports them (`fill_with`).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import threading
import typing
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


@dataclasses.dataclass(frozen=True)
class Section:
    """One section of the config, `{"name": …, options}`.

    Attributes:
        plain: the methods of an ordinary decoder; the first is the default where the family names none.
        owns: pattern of the names of its methods' parameters in a model.
    """

    plain: tuple[str, ...]
    owns: re.Pattern[str]


# Whoever needs "all sections" reads this table: config, recipes, cost, checkpoints, reports, tests.
SECTIONS: dict[str, Section] = {
    "depth": Section(("vanilla",), re.compile(r"depth\.")),
    "mixer": Section(("none",), re.compile(r"model\.mixer\.")),
    "residual": Section(("standard",), re.compile(r"model\.residual\.")),
    "positions": Section(("rotary", "learned"), re.compile(r"model\.(position_method|embed_positions|rotary_emb)\.")),
    "feed_forward": Section(("dense",), re.compile(r"model\.layers\.\d+\.mlp\.")),
    "diffusion": Section(("none", "masked"), re.compile(r"(?!)")),  # what it predicts; no parameters of its own
}
_REGISTRIES: dict[str, dict[str, type]] = {section: {} for section in SECTIONS}
# Sections of an encoder's config (models/encoder_configs.py), which no decoder has, and their plain methods: what its
# layers run on (encoders/base.py), and what its attention knows of pairs of tokens (tables/relation_base.py).
ENCODER, RELATIONS = "encoder", "relations"
ENCODER_PLAIN = {ENCODER: "full", RELATIONS: "none"}
_ENCODER_REGISTRIES: dict[str, dict[str, type]] = {section: {} for section in ENCODER_PLAIN}
_fill: Callable[[], None] | None = None
_filling, _lock = False, threading.RLock()

if TYPE_CHECKING:
    REGISTRIES: dict[str, dict[str, type]]
    ENCODERS: dict[str, type]


def fill_with(fill: Callable[[], None]) -> None:
    """Store the function that is called once before `REGISTRIES` or `ENCODERS` are first read."""
    global _fill
    _fill = fill


def __getattr__(name: str) -> Any:
    if name == "REGISTRIES":
        return filled()
    if name == "ENCODERS":
        return methods_of(ENCODER)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def filled() -> dict[str, dict[str, type]]:
    """`REGISTRIES` with the methods of all wings."""
    global _fill, _filling
    if _fill is None:
        return _REGISTRIES
    with _lock:  # other threads wait until the registries are full
        if _fill is not None and not _filling:  # what is imported now may read the registries on its way
            _filling = True
            try:
                _fill()
                _fill = None
            finally:  # an import that failed is tried again, and says again what is missing
                _filling = False
    return _REGISTRIES


def methods_of(registry: str) -> dict[str, type]:
    """The methods by name of a section of the decoder's or an encoder's config."""
    decoder = filled()
    return (_ENCODER_REGISTRIES if registry in _ENCODER_REGISTRIES else decoder)[registry]


def register(registry: str, name: str) -> Callable[[type], type]:
    """Class decorator: make a method available as `FathomConfig(<registry>={"name": <name>, ...})`."""

    def add(cls: type) -> type:
        methods = (_ENCODER_REGISTRIES if registry in _ENCODER_REGISTRIES else _REGISTRIES)[registry]
        if name in methods and methods[name].__qualname__ != cls.__qualname__:
            raise ValueError(f"{registry} method {name!r} is registered already, by {methods[name]}")
        cls.name, cls.registry = name, registry  # type: ignore[attr-defined]
        methods[name] = cls
        return cls

    return add


def nearest(word: str, known: list[str]) -> str:
    """' (did you mean …?)' for the known name closest to `word`, or an empty string."""
    match = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def lookup(registry: str, name: str) -> type:
    """The method class of that name. Raises ValueError that lists what exists."""
    methods = methods_of(registry)
    if name not in methods:
        raise ValueError(
            f"{registry} method {name!r} does not exist{nearest(name, list(methods))}; "
            f"available: {', '.join(sorted(methods))}"
        )
    return methods[name]


def check_type(option: str, value: Any, hint: Any) -> None:
    """Raise ValueError if a plain value (bool, int, float, str, None) has another type than annotated. A config file
    that says "false" as text must not switch an option on.
    """
    kinds = typing.get_args(hint) or (hint,)
    plain = {bool, int, float, str, type(None)}
    if set(kinds) <= plain and type(value) not in kinds and not (type(value) is int and float in kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{option}={value!r}: must be of type {names}")


def resolve_section(registry: str, section: dict[str, Any] | str | None) -> dict[str, Any]:
    """A section of the config as a complete dict: `{"name": …, every option with its value}`, validated.

    Raises ValueError on an unknown method or option (naming the nearest real one) or an option out of range.
    """
    if section is None:
        section = {"name": ENCODER_PLAIN.get(registry) or SECTIONS[registry].plain[0]}
    if isinstance(section, str):
        section = {"name": section}
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        raise ValueError(
            f'{registry} needs a "name", got {section!r}; available: {", ".join(sorted(methods_of(registry)))}'
        )
    options = {key: value for key, value in section.items() if key != "name"}
    cls = lookup(registry, section["name"])
    known = typing.get_type_hints(cls.Options)  # type: ignore[attr-defined]
    known = {field.name: known[field.name] for field in dataclasses.fields(cls.Options)}  # type: ignore[attr-defined]
    for key, value in options.items():
        if key not in known:
            raise ValueError(
                f"{registry} method {section['name']!r} has no option {key!r}{nearest(key, list(known))}; "
                f"its options: {', '.join(known) or 'none'}"
            )
        check_type(f"{registry} method {section['name']!r} option {key}", value, known[key])
    return {"name": section["name"], **dataclasses.asdict(cls.Options(**options))}  # type: ignore[attr-defined]


def override_section(registry: str, stored: dict[str, Any] | str | None, given: Any) -> Any:
    """The section `given` by the caller, completed by a checkpoint's `stored` one if both name the same method.

    Another method starts from its own defaults; a warning says which stored options it resets.
    """
    if isinstance(given, str):
        given = {"name": given}
    if not stored or not isinstance(given, dict) or given.get("name") not in methods_of(registry):
        return given
    stored = resolve_section(registry, stored)
    if given["name"] == stored["name"]:
        return {**stored, **given}
    defaults = resolve_section(registry, stored["name"])
    now = resolve_section(registry, given)
    reset = [f"{key}={value!r}" for key, value in stored.items() if value not in (defaults[key], now.get(key))]
    if reset:
        warnings.warn(
            f"{registry}={given['name']!r} resets these options of the checkpoint's {stored['name']!r}: "
            f"{', '.join(reset)}",
            stacklevel=2,
        )
    return given


def build_options(registry: str, section: dict[str, Any]) -> Any:
    """The typed options object of a resolved section."""
    cls = lookup(registry, section["name"])
    return cls.Options(**{key: value for key, value in section.items() if key != "name"})  # type: ignore[attr-defined]
