"""The example tools, and the accuracy of calls on questions of which it is known."""

from __future__ import annotations

import math

import pytest
from test_tool_loop import Scripted

from fathom.data import train_bpe
from fathom.evaluate.tool_calls import Share, ToolQuestion, evaluate_tool_calls, is_right, read_questions
from fathom.tools import ToolError
from fathom.tools.examples import calculator, passages, table


@pytest.mark.parametrize(
    ("expression", "value"),
    [("17 * 23", "391"), ("2 ** 10 - 1", "1023"), ("1 / 3", "0.333333333333"), ("-(4 - 6.5) * 2", "5"),
     ("sqrt(2) * cos(0)", "1.41421356237"), ("7 // 2 + 7 % 2", "4"), ("log(e)", "1"), ("10 ** 300", str(10**300))],
)  # fmt: skip
def test_the_calculator(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["9 ** 9 ** 9", "10 ** 301", "__import__('os')", "(1).real", "'a' * 9", "[1]", "x + 1", "", "1 +", "True + 1",
     "sqrt(1, 2)", "sqrt(-1)", "(-8) ** 0.5", "1e300 * 10", "1 / 0", "(" * 300 + ")" * 300, "1" * 501, "1j",
     "1 if 1 else 2"],
)  # fmt: skip
def test_the_calculator_does_nothing_else(expression):
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculator(expression)


def test_a_table_is_looked_up(tmp_path):
    file = tmp_path / "minerals.csv"
    file.write_text('mineral,hardness,colour\nquartz,7,"white, clear"\nTalc,1,green\n')
    tool = table(file)
    assert tool.call({"row": " Quartz", "column": "colour"}) == "white, clear"
    assert tool.call({"row": "talc", "column": "hardness"}) == "1"
    for arguments, message in (
        (
            {"row": "quarz", "column": "hardness"},
            r"there is no mineral 'quarz' \(did you mean 'quartz'\?\)",
        ),
        ({"row": "talc", "column": "weight"}, "look_up.column='weight' must be one of 'hardness', 'colour'"),
    ):
        with pytest.raises(ToolError, match=message):
            tool.call(arguments)
    file.write_text("mineral,hardness\nquartz\n")
    with pytest.raises(ValueError, match=r"minerals.csv, row 2: 1 cells, and the first has 2"):
        table(file)
    for text in ("mineral,hardness\nquartz,7\nQuartz,8\n", "mineral,hardness,hardness\nquartz,7,8\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="two rows or two columns have one name"):
            table(file)
    file.write_text("mineral\nquartz\n")
    with pytest.raises(ValueError, match="a table needs a line of names, a row and two columns"):
        table(file)


def test_passages_are_found(tmp_path):
    pytest.importorskip("bm25s", reason="bm25s is the optional extra [curate]")
    (tmp_path / "a.md").write_text("Basalt is a dark rock of lava.\n\n" + "Sand lies on beaches. " * 20)
    (tmp_path / "b.md").write_text("Granite cools slowly\nunder the ground.")
    tool = passages(f"{tmp_path}/", k=2)
    assert tool.call({"query": "granite"}) == "Granite cools slowly under the ground."
    assert tool.call({"query": "dark basalt"}).startswith("Basalt is a dark rock of lava. Sand")
    assert tool.call({"query": "comet"}) == tool.call({"query": "the"}) == tool.call({"query": ""}) == "nothing found"


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        ("391", "391.0", True),
        ("white", " White. ", True),
        ("391", "392", False),
        ("12345678", "12345679", False),
        ("0.3333333", "0.33333334", True),
        ("NaN", "nan", True),
        ("a", None, False),
        ("7", "7 m", False),
    ],
)
def test_right_answers(expected, answer, right):
    assert is_right(expected, answer) == right


def test_shares_have_the_error_of_a_mean():
    share = Share.of([True, False, False, True])
    assert (share.share, share.n) == (0.5, 4) and math.isclose(share.error, math.sqrt(0.25 / 3))
    assert Share.of([True]).error is None


def test_accuracy_of_calls(tmp_path):
    tokenizer = train_bpe(["Action Input expression Final Answer"] * 3, 300)
    call = 'Action: calculator\nAction Input: {"expression": "%s"}\n'
    questions = [
        ToolQuestion("2 * 3?", "6", ({"name": "calculator", "arguments": {"expression": "2 * 3"}},)),
        ToolQuestion("2 + 3?", "5", ({"name": "calculator", "arguments": {"expression": "2 + 3"}},)),
        ToolQuestion("1 / 0?", "none", ()),
    ]
    with_tools = [
        call % "2 * 3",
        "Final Answer: 6",
        call % "3 + 2",
        "Final Answer: 5",
        call % "1 / 0",
        "Final Answer: 1",
    ]
    model = Scripted(tokenizer, *with_tools, "Final Answer: 6", "Final Answer: 6", call % "1")
    found = evaluate_tool_calls(model, tokenizer, questions, [calculator])
    assert {name: found[name]["share"] * 3 for name in ("calls", "answer", "answer_without_tools", "failed_calls")} == {
        "calls": 1, "answer": 2, "answer_without_tools": 1, "failed_calls": 1,
    }  # fmt: skip
    assert found["traces"][2].endswith(
        "Observation: error: calculator: ZeroDivisionError: division by zero\nFinal Answer: 1"
    )
    with pytest.raises(ValueError, match="questions is empty"):
        evaluate_tool_calls(model, tokenizer, [], [calculator])


def test_questions_of_a_file(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "a", "answer": "b", "calls": [{"name": "f", "arguments": {}}]}\n')
    assert read_questions(file) == [ToolQuestion("a", "b", ({"name": "f", "arguments": {}},))]
    for text, message in (
        ('{"question": "a"}', "line 1: no text in field 'answer'"),
        ('{"question": "a", "answer": "b", "calls": ["f"]}', "line 1: field 'calls' must be a list of"),
        ("\n", "holds no question"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_questions(file)
