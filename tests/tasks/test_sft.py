"""What `sft` makes of rows: the chat template, which tokens are learned, what is cut, and the messages for mistakes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import yaml
from cases import recipe
from transformers import AutoTokenizer

from fathom.data import DataConfig, train_bpe
from fathom.data.templates import TEMPLATES
from fathom.tasks.sft import SFT, Question, RowText, _batches, _is_right, parts
from fathom.train import load_recipe, train_run
from fathom.train.loading import build

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user begins') }}{% endif %}" + CHATML
FORGETFUL = CHATML.replace("message['content']", "message['content'] if loop.last else '…'")
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Thanks"},
]


def tokenizer(template: str | None = None) -> Any:
    made = train_bpe(
        ["What is 1 + 1? Hello, hi; be brief. Thanks. Instruction Response user assistant system"] * 3, 290
    )
    if template and "im_start" in template:
        made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def prepared(
    folder: Path, rows: list[dict[str, Any]], task: SFT | None = None, template: Any = None, **data: Any
) -> Any:
    """The rows as training and held-out data (each file has a row of its own, too)."""
    folder.mkdir(exist_ok=True)
    tokenizer(template).save_pretrained(folder / "tokenizer")
    for name in ("train", "held-out"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"train": str(folder / "train.jsonl"), "validation": str(folder / "held-out.jsonl")}
    config |= {"tokenizer": str(folder / "tokenizer"), "block_size": 64, **data}
    return (task or SFT()).prepare(build(DataConfig, config), folder / ".data")


def learned(blocks: Any, data: Any) -> list[str]:
    """Every stretch of tokens of the blocks that has labels, decoded."""
    found = []
    for block in blocks:
        labels = [int(label) for label in block["labels"]]
        stretches = "".join("x" if label >= 0 else " " for label in labels)
        at = 0
        for word in stretches.split(" "):
            if word:
                found.append(data.tokenizer.decode(block["input_ids"][at : at + len(word)]))
                assert labels[at : at + len(word)] == block["input_ids"][at : at + len(word)].tolist()
            at += len(word) + 1
    return found


def test_the_built_in_template_and_its_answers():
    found = parts(RowText(DIALOGUE), tokenizer(TEMPLATES["headings"]), "row")
    assert found == [
        ("Be brief.\n\n### Instruction:\nHello\n\n### Response:\n", "prompt"),
        ("Hi.<|endoftext|>", "answer"),
        ("\n\n### Instruction:\n1 + 1?\n\n### Response:\n", "prompt"),
        ("2<|endoftext|>", "answer"),
    ]


def test_answers_of_a_dialogue_are_learned_with_their_ends(tmp_path):
    data = prepared(tmp_path, [{"messages": DIALOGUE}, {"prompt": "1 + 1?", "answer": "2"}], block_size=256)
    assert sorted(learned(data.train, data)) == ["2<|endoftext|>", "2<|endoftext|>", "Hi.<|endoftext|>"]
    assert data.validation_bytes == len("Hi.22") and data.examples_per_sequence == 2
    first, second = data.questions
    assert data.tokenizer.decode(first.prompt).endswith("1 + 1?\n\n### Response:\n")
    assert data.tokenizer.decode(first.answer) == data.tokenizer.decode(second.answer) == "2<|endoftext|>"
    assert "built in" in data.notes[0] and len(data.notes) == 1


def test_the_tokenizers_own_template_is_used_and_its_ends_are_tokens(tmp_path):
    data = prepared(tmp_path, [{"messages": DIALOGUE}], template=CHATML, block_size=256)
    assert learned(data.train, data) == ["Hi.<|im_end|>\n", "2<|im_end|>\n"]
    assert data.notes == ("Chat template: the tokenizer's own.",)
    end = data.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in data.questions[0].answer


def test_inputs_are_learned_too_where_asked_but_not_scored(tmp_path):
    data = prepared(tmp_path, [{"prompt": "1 + 1?", "answer": "2"}], SFT(train_on_inputs=True))
    (whole,) = learned(data.train, data)
    assert whole.endswith("2<|endoftext|>") and "1 + 1?" in whole
    assert data.train[0]["labels"][0] == -100  # nothing comes before it
    assert learned(data.validation, data) == ["2<|endoftext|>"]


def test_parquet_and_fields_of_other_names(tmp_path):
    rows = [{"question": "1 + 1?", "reply": "2", "source": "us"}, {"question": "Hello", "reply": "Hi.", "source": "us"}]
    for name in ("train", "held-out"):
        pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    written = recipe(
        "sft",
        tmp_path,
        data={"train": str(tmp_path / "train.parquet"), "validation": str(tmp_path / "held-out.parquet")},
    )
    written["task"] = {"name": "sft", "prompt_field": "question", "answer_field": "reply"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(written))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    assert learned(data.train, data) == ["2<|endoftext|>", "Hi.<|endoftext|>"]


def test_rows_that_are_too_long_are_cut_counted_and_said(tmp_path):
    rows = [
        {"prompt": "Hello", "answer": "Hi."},
        {"prompt": "Hello", "answer": "Hi. " * 40},
        {"prompt": "Hello " * 80, "answer": "Hi."},
    ]
    data = prepared(tmp_path, rows)
    assert [note.split(": ", 1)[1] for note in data.notes[1:3]] == [
        "2 of 3 rows are longer than data.block_size=64 tokens and cut at their end.",
        "1 of 3 rows are left out: no answer is left in them.",
    ]
    assert data.notes[3].endswith("cut at their end; their exact match is not asked for.")
    assert len(data.questions) == 1 and data.lengths[64] == 1
    assert len(data.train) == 2 and all(len(block["input_ids"]) == 64 for block in data.train)
    with pytest.raises(ValueError, match=r"none of its 1 rows has an answer within data\.block_size=64 tokens"):
        prepared(tmp_path / "long", rows[2:])
    with pytest.raises(ValueError, match=r"data\.validation=.*none of its rows can be asked whole within .*=64 tokens"):
        prepared(tmp_path / "cut", rows[1:])


def test_rows_share_blocks_as_documents(tmp_path):
    rows = [{"prompt": "Hello", "answer": "Hi." * n} for n in (1, 2, 3, 4, 5)]
    data = prepared(tmp_path, rows, block_size=96)
    assert len(data.train) < 5 and data.examples_per_sequence == 5 / len(data.train)
    for block in data.train:
        starts = (block["position_ids"] == 0).nonzero().flatten()
        assert torch.equal(
            block["position_ids"],
            torch.arange(96) - starts[torch.searchsorted(starts, torch.arange(96), right=True) - 1],
        )
    assert sorted(learned(data.train, data)) == sorted(f"{row['answer']}<|endoftext|>" for row in rows)
    apart = prepared(tmp_path, rows, SFT(packing=False), block_size=96)
    assert len(apart.train) == 5 and apart.examples_per_sequence == 1


@pytest.mark.parametrize(
    ("found", "right"),
    [("2<E>", True), ("2", False), ("2 <E>", False), ("<E>", False), ("3<E>", False), ("22", False)],
)
def test_an_exact_match_is_the_text_and_ends(found, right):
    made = tokenizer(TEMPLATES["headings"])
    ids = made(found.replace("<E>", made.eos_token))["input_ids"]
    answer = made("2" + made.eos_token)["input_ids"]
    assert _is_right(Question((1,), tuple(answer)), ids[: len(answer)], made) == right


def test_questions_that_are_asked_together_fit_the_positions():
    questions = [
        Question((1,) * prompt, (2,) * answer) for prompt, answer in ((60, 4), (4, 60), (30, 30), (30, 31), (1, 1))
    ]
    batches = list(_batches(questions, 64))
    assert sorted(index for batch in batches for index in batch) == [0, 1, 2, 3, 4]
    for batch in batches:
        asked = [questions[index] for index in batch]
        assert max(len(q.prompt) for q in asked) + max(len(q.answer) for q in asked) <= 64
    assert max(map(len, batches)) > 1


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"prompt": "a"}, None, r"line 1: no field 'answer' \(found: prompt\); set task.answer_field"),
        ({"prompt": "a", "answer": 2}, None, "line 1: the content of a message by 'assistant' must be text, got int"),
        (
            {"prompt": "a", "answer": " \n"},
            None,
            "line 1: the answer is empty, so there is nothing to learn; leave the",
        ),
        ({"messages": "a"}, None, r"field 'messages' must be a list of {\"role\", \"content\"}"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, None, r"field 'messages' must be a list of {\"role\", "),
        ({"messages": DIALOGUE[:2]}, None, "no message by 'assistant', so there is no answer to learn"),
        ({"prompt": "a<|endoftext|>", "answer": "b"}, None, r"by 'user' holds the special token '<\|endoftext\|>'"),
        ({"messages": [{"role": "tool", "content": ""}, *DIALOGUE]}, None, "refuses these messages .*the role tool"),
        ({"messages": DIALOGUE}, ALTERNATING, r"line 1: the chat template refuses these messages \(a user begins\)"),
        ({"messages": DIALOGUE}, FORGETFUL, "changes earlier messages when an answer follows; give one answer a row"),
    ],
)
def test_rows_that_cannot_be_read_are_named(row, template, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, [row], template=template)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"streaming": True}, "data.streaming=True: task 'sft' reads whole rows and does not use it"),
        ({"max_tokens": 1000}, "data.max_tokens=1000: .* leave it out"),
        ({"train": "embedded"}, "data.train='embedded' is running text; task 'sft' needs rows"),
        ({"validation": "embedded"}, "data.validation='embedded' .*, or give null"),
    ],
)
def test_data_that_the_task_cannot_use_is_refused(data, message, tmp_path):
    written = recipe("sft", tmp_path, data=data)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(written))
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "recipe.yaml")


def test_a_text_file_has_no_rows(tmp_path):
    (tmp_path / "notes.txt").write_text("running text")
    with pytest.raises(ValueError, match=r"data.train='.*notes.txt': notes.txt has no rows; give JSONL or Parquet"):
        prepared(tmp_path, [{"prompt": "a", "answer": "b"}], train=str(tmp_path / "notes.txt"))


def test_the_template_is_saved_with_the_tokenizer(tmp_path):
    data = prepared(tmp_path, [{"prompt": "a", "answer": "b"}])
    data.tokenizer.save_pretrained(tmp_path / "model")
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    asked = again.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert asked == "### Instruction:\na\n\n### Response:\n"


def test_the_recipe_and_its_data(tmp_path, monkeypatch):
    root = Path(__file__).parents[2] / "recipes"
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(root / "make_lookup.py"))["main"](Path("runs/lookup"))
    loaded = load_recipe(root / "sft_cpu.yaml")
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    train, held_out = (Path(f"runs/lookup/{name}.jsonl").read_text().splitlines() for name in ("train", "held-out"))
    assert (len(train), len(held_out)) == (216, 72) and not set(train) & set(held_out)
    assert {json.loads(row)["answer"] for row in held_out} == {json.loads(row)["answer"] for row in train}
    assert len(data.questions) == 72 and len(data.notes) == 1  # no row is cut


SEEN = {"role": "tool", "name": "depth", "content": "40\nFinal Answer: 41"}
CALLED = [
    {"role": "user", "content": "How deep is the bay?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"type": "function", "function": {"name": "depth", "arguments": {"place": "bay"}}}],
    },
    SEEN,
    {"role": "assistant", "content": "40 m"},
]
DEPTH = {"name": "depth", "description": "How deep.", "parameters": {"type": "object", "properties": {"place": {}}}}
TOOLS = [{"type": "function", "function": DEPTH}]
TRACE = (
    "Question: How deep?\nThought: I look.\nAction: depth\nAction Input: {}\nObservation: 40\nmetres\n"
    "Thought: I know.\nFinal Answer: 40 m\n"
)


def test_calls_are_learned_and_what_tools_returned_is_not(tmp_path):
    rows = [{"messages": CALLED, "tools": json.dumps(TOOLS)}, {"trace": TRACE}, {"prompt": "Hello", "answer": "Hi."}]
    data = prepared(tmp_path, rows, SFT(template="react", packing=False), block_size=512)
    assert learned(data.train, data) == [
        'Thought: I look.\nAction: depth\nAction Input: {"place": "bay"}\n',
        "Final Answer: 40 m<|endoftext|>",
        "Thought: I look.\nAction: depth\nAction Input: {}\n",
        "Thought: I know.\nFinal Answer: 40 m<|endoftext|>",
        "Final Answer: Hi.<|endoftext|>",
    ]
    text = data.tokenizer.decode(data.train[0]["input_ids"]).split("<|endoftext|>")[0]
    assert text.startswith("Answer the question.") and "depth(place: {}): How deep.\n" in text
    assert "Observation: 40\n  Final Answer: 41\nFinal Answer: 40 m" in text  # a result's lines stand apart
    for block in data.train:  # no token of an observation has a label, whatever is trained on
        ids, labels = block["input_ids"].tolist(), block["labels"].tolist()
        at = data.tokenizer.decode(ids).find("Observation:")
        assert at < 0 or labels[len(data.tokenizer(data.tokenizer.decode(ids)[:at])["input_ids"])] == -100
    assert data.tokenizer.decode(data.questions[0].answer) == "Final Answer: 40 m<|endoftext|>"
    assert data.notes[0] == "Chat template: 'react', built in; it is saved with the model."


def test_what_tools_returned_is_not_learned_with_inputs_either(tmp_path):
    rows = [{"messages": CALLED, "tools": TOOLS}, {"trace": TRACE}]
    data = prepared(tmp_path, rows, SFT(template="react", packing=False, train_on_inputs=True), block_size=512)
    said = learned(data.train, data)
    assert not [text for text in said if "Observation:" in text or "metres" in text or "41" in text]
    assert [text.startswith("Final Answer:") or "Thought: I know" in text for text in said] == [False, True] * 2


def test_the_template_of_alpaca_with_and_without_an_input(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 + 1", "output": "2"},
        {"instruction": "Hi", "input": "", "output": "Ho"},
    ]
    fields = {"prompt_field": "instruction", "input_field": "input", "answer_field": "output"}
    data = prepared(tmp_path, rows, SFT(**fields, template="alpaca"), block_size=512)
    asked = [data.tokenizer.decode(question.prompt) for question in data.questions]
    assert asked == [
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 + 1\n\n"
        "### Response:\n",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nHi\n\n### Response:\n",
    ]
    data = prepared(tmp_path / "chat", rows, SFT(**fields), template=CHATML, block_size=512)
    assert "<|im_start|>user\nAdd.\n\n1 + 1<|im_end|>" in data.tokenizer.decode(data.questions[0].prompt)


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (
            {"messages": CALLED, "tools": TOOLS},
            "auto",
            "it has tools, and the chat template has no place for them; set t",
        ),
        (
            {"messages": [*CALLED[:2]]},
            "auto",
            "it has tools, and the chat template has no place for them; set task.temp",
        ),
        (
            {"messages": CALLED[:3], "tools": TOOLS},
            "react",
            "line 1: an unclosed Observation: no answer by 'assistant'",
        ),
        (
            {"trace": TRACE.split("Thought: I know")[0]},
            "react",
            "line 1: an unclosed Observation: the trace ends in it",
        ),
        ({"messages": CALLED, "tools": "[{"}, "react", "line 1: field 'tools' is not JSON"),
        (
            {"messages": CALLED, "tools": [3]},
            "react",
            "line 1: field 'tools' must be a list of schemas, or that",
        ),
        ({"trace": 3}, "react", "line 1: field 'trace' must be text, got int"),
        ({"trace": TRACE + "<|endoftext|>"}, "react", "line 1: the trace holds the special token '<\\|endoftext\\|>'"),
        ({"prompt": "a", "input": 3, "answer": "b"}, "alpaca", "line 1: field 'input' must be text, got int"),
    ],
)
def test_rows_with_tools_that_cannot_be_read_are_named(row, template, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, [row], SFT(template=template, input_field="input"))


def test_a_template_that_is_not_built_in_is_refused():
    with pytest.raises(
        ValueError, match="task sft option template='vicuna': must be one of 'auto', 'headings', 'alpaca'"
    ):
        SFT(template="vicuna")


def test_types_of_rows_are_balanced_in_training_alone(tmp_path):
    rows = [{"prompt": f"Hello {i}", "answer": "Hi.", "type": "often"} for i in range(9)]
    rows += [{"prompt": "1 + 1?", "answer": "2", "type": "seldom"}]
    data = prepared(tmp_path, rows, SFT(balance=0.0))
    assert sorted(learned(data.train, data)) == ["2<|endoftext|>"] * 5 + ["Hi.<|endoftext|>"] * 5
    assert sorted(learned(data.validation, data)) == ["2<|endoftext|>"] + ["Hi.<|endoftext|>"] * 9
    with pytest.raises(ValueError, match=r"line 1: no text in field 'kind' .*; set task.type_field, or leave out"):
        prepared(tmp_path / "other", rows, SFT(balance=0.5, type_field="kind"))
    with pytest.raises(ValueError, match="task sft option balance=2"):
        SFT(balance=2)


PROSE = "The old man sat by the sea and said nothing at all, for it was late. " * 40


def mixed(folder: Path, task: SFT | None = None, **sources: Any) -> Any:
    """The rows of a file and running text, one block of four of it."""
    folder.mkdir(exist_ok=True)
    (folder / "prose.txt").write_text(PROSE)
    rows = {"text": str(folder / "train.jsonl"), "weight": 3.0}
    train = {"rows": rows, "prose": {"text": str(folder / "prose.txt"), "weight": 1.0}, **sources}
    return prepared(folder, [{"prompt": "1 + 1?", "answer": "2"}] * 30, task or SFT(text=["prose"]), train=train)


def test_running_text_is_mixed_among_rows_and_learned_whole(tmp_path):
    data = mixed(tmp_path)
    rows, prose = data.train.sources.values()
    assert set(learned(rows, data)) == {"2<|endoftext|>"}
    assert "".join(learned(prose, data)).startswith("The old man sat by the sea")
    assert set(rows[0]) == set(prose[0])  # one batch holds both
    order = data.train.ordered(0, 400)
    assert sum(block["domains"] == 1 for block in order) == pytest.approx(100, abs=25)
    alone = prepared(tmp_path / "alone", [{"prompt": "1 + 1?", "answer": "2"}] * 30)
    assert data.examples_per_sequence == pytest.approx(0.75 * alone.examples_per_sequence)
    assert data.questions == alone.questions and data.validation_targets == alone.validation_targets
    assert SFT(text=["prose"]).reference(data, 5) == pytest.approx(SFT().reference(alone, 5))  # of answers alone


def test_rows_and_text_of_two_sources_train_together(tmp_path):
    written = recipe("sft", tmp_path)
    (tmp_path / "prose.txt").write_text(PROSE)
    written["task"] |= {"text": ["prose"]}
    written["data"]["train"] = {
        "rows": {"text": written["data"]["train"]},
        "prose": {"text": str(tmp_path / "prose.txt")},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(written))
    loaded = load_recipe(path)
    data = loaded.task.prepare(loaded.data, tmp_path / ".data")
    run = {"seed": 0, "folder": tmp_path / "run", "data": data}
    result = train_run(loaded, loaded.methods[0], **run)
    assert (
        any("prose" in note and "epochs" in note for note in result.notes) and result.scores["exact_match"] is not None
    )

    # a run of a version without the option is the same run
    spec = json.loads((tmp_path / "run/run.json").read_text())
    assert spec["task"].pop("tight") is False
    (tmp_path / "run/run.json").write_text(json.dumps(spec))
    assert train_run(loaded, loaded.methods[0], **run) == result


@pytest.mark.parametrize(
    ("train", "text", "message"),
    [
        ("rows.jsonl", ["prose"], "'prose' is no source of data.train"),
        ({"prose": {"text": "prose.txt"}}, ["prose"], "every source is running text; use task 'causal_lm'"),
        ({"rows": {"text": "rows.jsonl"}, "prose": {"text": "embedded"}}, [], "add 'prose' to task.text"),
        ({"rows": {"text": "rows.jsonl"}}, "rows", "must be a list of names"),
    ],
)
def test_sources_that_cannot_be_mixed_are_named(train, text, message):
    with pytest.raises(ValueError, match=message):
        SFT(text=text).check(build(DataConfig, {"train": train, "validation": None}))
