"""Tools: schemas, files of functions, and calls that end in one line whatever happens."""

from __future__ import annotations

import time
from typing import Literal

import pytest
from transformers.utils import get_json_schema

from fathom.tools import Tool, ToolError, load_tools
from fathom.tools.schema import check, check_schema
from fathom.tools.tool import LONGEST, as_tools, call


def area(width: float, height: float, unit: Literal["m", "km"] = "m", names: list[str] | None = None) -> str:
    """The area of a rectangle.

    Args:
        width: one side.
        height: the other.
        unit: of both.
        names: of the sides.
    """
    return f"{width * height:g} {unit}2"


def fails(text: str) -> str:
    """Raises.

    Args:
        text: what it says.
    """
    raise RuntimeError(f"{text}\nsecond line")


def loops() -> str:
    """Never returns."""
    while True:
        time.sleep(0.001)


TOOLS = as_tools([area, fails, loops])


def test_a_call_is_checked_and_its_result_is_text():
    assert call(TOOLS, "area", {"width": 2, "height": 1.5}) == "3 m2"
    assert call(TOOLS, "area", {"width": 2, "height": 1.5, "unit": "km", "names": None}) == "3 km2"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("aera", {}, "tool 'aera' does not exist (did you mean 'area'?); there are area, fails, loops"),
        ("area", [2, 1], "area: the arguments must be a JSON object, got list"),
        ("area", {"width": 2}, "area: 'height' is missing"),
        ("area", {"width": "2", "height": 1}, "area.width='2' must be of type number"),
        ("area", {"width": True, "height": 1}, "area.width=True must be of type number"),
        ("area", {"width": float("inf"), "height": 1}, "area.width=inf must be of type number"),
        ("area", {"width": 2, "height": 1, "unit": "mi"}, "area.unit='mi' must be one of 'm', 'km'"),
        ("area", {"width": 2, "height": 1, "names": ["a", 2]}, "area.names[1]=2 must be of type string"),
        (
            "area",
            {"width": 2, "height": 1, "__class__": 0},
            "area: '__class__' is unknown; it takes width, height, unit",
        ),
        ("area", {"width": 2, "height": 1, "return": "x"}, "area: 'return' is unknown; it takes width, height, unit"),
        ("fails", {"text": "no"}, "fails: RuntimeError: no second line"),
        ("area", {"width": 10**400, "height": 0.5}, "area: OverflowError: int too large to convert to float"),
    ],
)
def test_what_goes_wrong_is_one_line(name, arguments, message):
    with pytest.raises(ToolError) as error:
        call(TOOLS, name, arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_tool_that_loops_is_ended():
    before = time.monotonic()
    with pytest.raises(ToolError, match=r"loops: took longer than 0\.05 s"):
        call(TOOLS, "loops", {}, seconds=0.05)
    assert time.monotonic() - before < 2


def test_a_long_result_is_cut_and_says_so():
    def long() -> list[int]:
        """Long."""
        return [1] * LONGEST

    text = Tool.of(long).call({})
    assert text.endswith("characters are left out)") and len(text) < LONGEST + 50


def test_what_returns_no_result_is_refused_and_names_of_files_are_text():
    async def later() -> str:
        """Later."""
        return "x"

    def named() -> str:
        """A name that is no UTF-8."""
        return "a \ud800 b"

    with pytest.raises(ValueError, match="tool 'later': is async or yields"):
        Tool.of(later)
    assert Tool.of(named).call({}) == "a ? b"


def test_results_that_are_no_text_and_what_is_printed(capsys):
    def circle() -> list:
        """A list that holds itself."""
        print("from the tool")
        found: list = []
        found.append(found)
        return found

    def leaves() -> str:
        """Ends the program."""
        raise SystemExit(3)

    with pytest.raises(ToolError, match="circle: ValueError: Circular reference detected"):
        Tool.of(circle).call({})
    out, err = capsys.readouterr()
    assert out == "" and "from the tool" in err
    with pytest.raises(ToolError, match="leaves: SystemExit: 3"):
        Tool.of(leaves).call({})


def accepted(value, schema) -> bool:
    try:
        check(value, schema, "x")
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [  # by the JSON Schema specification, draft 2020-12, and OpenAPI's nullable
        ({}, [1, None, "a", []], []),
        (True, [1, None], []),
        (False, [], [1, None]),
        ({"type": "integer"}, [0, -3], [1.5, True, "1", None]),
        ({"type": "number", "minimum": 0, "maximum": 2}, [0, 1.5, 2], [-1, 2.1, float("nan"), True]),
        ({"type": ["string", "null"]}, ["", None], [0]),
        ({"type": "string", "nullable": True}, ["", None], [0, []]),
        ({"enum": [1, "a"]}, [1, "a"], [True, 1.0, "b", None]),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}, [1, ["a"]], ["a", [1]]),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [[1, "a"]], [[1], ["a", 1]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "b"}, []]),
        ({"type": "object"}, [{"a": "b"}], [1]),
        (
            {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "null"}}}}},
            [{}, {"a": {"b": None}}],
            [{"a": {"b": 1}}, {"a": {"c": None}}],
        ),
    ],
)
def test_values_against_schemas(schema, right, wrong):
    check_schema(schema, "x")
    assert all(accepted(value, schema) for value in right)
    assert not any(accepted(value, schema) for value in wrong)


def test_a_restriction_that_is_not_checked_is_refused():
    for schema, message in (
        ({"type": "string", "pattern": "a*"}, "x: the schema's keyword 'pattern' is not checked"),
        ({"properties": {"a": {"type": "image"}}}, "x.a: type 'image' is no type of JSON"),
        ({"anyOf": [{"type": "string", "format": "uri"}]}, r"x.\[0\]: the schema's keyword 'format'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_schema(schema, "x")


def test_every_type_of_transformers_schemas_is_checked():
    def every(
        a: int, b: float, c: str, d: bool, e: list, f: dict[str, int], g: tuple[int, str], h: int | list[str], i: None
    ) -> dict:
        """Every type.

        Args:
            a: 1
            b: 2
            c: 3
            d: 4
            e: 5
            f: 6
            g: 7
            h: 8
            i: 9
        """
        return {}

    schema = get_json_schema(every)["function"]["parameters"]
    check_schema(schema, "every")
    right = {"a": 1, "b": 1.5, "c": "", "d": True, "e": [], "f": {"x": 1}, "g": [1, "a"], "h": ["a"], "i": None}
    check(right, schema, "every")
    for name, value in {
        "a": 1.5,
        "b": "",
        "c": 1,
        "d": 1,
        "e": {},
        "f": {"x": "1"},
        "g": [1],
        "h": [1],
        "i": 0,
    }.items():
        with pytest.raises(ValueError, match=f"every.{name}"):
            check({**right, name: value}, schema, "every")


FILE = '''
import math

def root(x: float) -> float:
    """The square root.

    Args:
        x: at least 0.
    """
    return math.sqrt(x)

def _hidden(x): ...
'''


def test_a_file_of_functions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    tools = load_tools(file)
    assert list(tools) == ["root"] and call(tools, "root", {"x": 9}) == "3.0"
    with pytest.raises(ToolError, match="root: ValueError: "):
        call(tools, "root", {"x": -1})
    file.write_text(
        FILE + "\ndef more(x: int) -> int:\n    '''One more.\n\n    Args:\n        x: a number.\n    '''\n"
        "    return x + 1\n\nTOOLS = [more]\n"
    )
    assert list(load_tools(file)) == ["more"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "defines no function, and no list TOOLS of some"),
        ("import nothing_there", r"cannot be run \(ModuleNotFoundError: No module named 'nothing_there'\)"),
        ("def f(x:", r"cannot be run \(SyntaxError: "),
        (
            "def f(x):\n    '''F.\n\n    Args:\n        x: a\n    '''",
            "tool 'f': no schema can be made of it .* give its arg",
        ),
        ("def f(x: int): ...", "tool 'f': no schema can be made of it .*docstring"),
        ("raise SystemExit(0)", r"cannot be run \(SystemExit: 0\)"),
        ("TOOLS = 3", "defines no function, and no list TOOLS of some"),
        ("TOOLS = [3]", "tool 3: is no function"),
        (FILE + "TOOLS = [root, root]", "tool 'root': there are two of this name"),
    ],
)
def test_files_that_hold_no_tools_are_named(source, message, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=f"mine.py: {message}") as error:
        load_tools(file)
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"absent\.py: no such file"):
        load_tools(tmp_path / "absent.py")
