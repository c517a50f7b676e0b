"""Multiple choice by letters: readers, prompts, tokens of letters, accuracies, and the same accuracies by lm_eval."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathom.evaluate import evaluate_tasks
from fathom.evaluate.letters import (
    GROUPS,
    ChoiceQuestion,
    evaluate_choices,
    export_choices,
    label_ids,
    letter_probabilities,
    mean_with_signal,
    prompts,
    read_choices,
    split_options,
)
from tiny import tiny_model
from tiny_checkpoint import run_cli, save_fathom, tiny_tokenizer

ROCKS = ChoiceQuestion("Of lava is", ("basalt", "marble", "chalk"), 0, "rocks")
WAVES = ChoiceQuestion("Fastest are", ("P waves", "S waves", "L waves", "tides"), 2, "waves")
TRUE = ChoiceQuestion("The sea is deep.", (), 0)
FALSE = ChoiceQuestion("The sea is dry.", (), 1)
QUESTIONS = [ROCKS, WAVES, TRUE, FALSE]


def whole_words() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that has True and False as tokens, with and without a space."""
    tokenizer = tiny_tokenizer(280)
    for word in ("True", "False", " True", " False"):
        tokenizer.add_tokens([word])
    return tokenizer


class Likes:
    """A model whose logits at every position are those that it is made with."""

    def __init__(self, logits, shift=0.0):
        self.config, self.device = SimpleNamespace(max_position_embeddings=None), torch.device("cpu")
        self.logits, self.shift = logits, shift

    def __call__(self, **options):
        return self.forward(**options)

    def forward(self, input_ids, attention_mask, use_cache):
        rows = self.logits(input_ids) if callable(self.logits) else self.logits.expand(len(input_ids), 1, -1)
        return SimpleNamespace(logits=rows + self.shift)


def test_prompts_of_both_styles():
    woa, wa = (prompts([ROCKS], [FALSE], style)[0] for style in ("woa", "wa"))
    assert woa == (
        "### Instruction:\nSay whether the statement is true or false.\nThe sea is dry.\n\n### Response:\nFalse\n\n\n"
        "### Instruction:\nIdentify the choice that best completes the statement or answers the question.\nOf lava is\n"
        "Choose from:\nA. basalt\nB. marble\nC. chalk\n\n### Response:\n"
    )
    assert wa == woa.replace("### Response:\n", "### Response:\nThe answer is:\n")


def test_questions_are_shown_of_the_same_subject():
    shots = [ChoiceQuestion(f"{subject} {i}", ("x", "y"), 0, "", subject) for subject in ("a", "b") for i in range(3)]
    of_b, of_none = prompts([ChoiceQuestion("Q", ("x", "y"), 0, "", "b"), ROCKS], shots, "woa", 2)
    assert [f"b {i}" in of_b for i in range(3)] == [True, True, False] and "a 0" not in of_b
    assert [f"a {i}" in of_none for i in range(3)] == [True, True, False] and "b 0" not in of_none


def test_uniform_models_have_the_accuracy_of_guessing():
    tokenizer = whole_words()
    found = evaluate_choices(Likes(torch.zeros(len(tokenizer))), tokenizer, QUESTIONS)
    assert found["accuracy"] == found["guessing"] == pytest.approx((1 / 3 + 1 / 4 + 1 / 2 + 1 / 2) / 4)
    assert found["entropy"] == pytest.approx((math.log2(3) + 2 + 1 + 1) / 4)
    assert found["mass"] == pytest.approx((3 + 4 + 2 + 2) / 4 / len(tokenizer))
    assert not found["signal"] and found["groups"]["rocks"]["guessing"] == 1 / 3 and found["groups"]["waves"]["n"] == 1


def test_a_model_that_knows_is_always_right_and_a_constant_changes_nothing():
    tokenizer = whole_words()

    def right(input_ids):
        rows = torch.zeros(len(input_ids), 1, len(tokenizer))
        for row, ids in enumerate(input_ids):
            text = tokenizer.decode(ids)
            question = next(one for one in QUESTIONS if one.question in text)
            label = question.labels[question.gold]
            rows[row, 0, tokenizer(label).input_ids[0]] = 9
        return rows

    for shift in (0.0, -3.0):
        found = evaluate_choices(Likes(right, shift), tokenizer, QUESTIONS * 3)
        assert (found["accuracy"], found["error"], found["n"]) == (1, 0, 12) and found["signal"]
    noise = torch.randn(len(tokenizer), generator=torch.Generator().manual_seed(0))
    plain, shifted = (evaluate_choices(Likes(noise, shift), tokenizer, QUESTIONS) for shift in (0.0, 40.0))
    assert plain["accuracy"] == shifted["accuracy"] and plain["entropy"] == pytest.approx(shifted["entropy"], abs=1e-4)


def test_probabilities_are_those_of_a_prompt_alone():
    model, tokenizer = tiny_model(vocab_size=300, max_position_embeddings=512), whole_words()
    texts = prompts(QUESTIONS, [], "wa")
    together = letter_probabilities(model, tokenizer, texts, [q.labels for q in QUESTIONS], batch_size=3)
    for text, question, found in zip(texts, QUESTIONS, together, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            alone = model(ids).logits[0, -1].double().softmax(-1)
        tokens = [tokenizer(label)["input_ids"] for label in question.labels]
        torch.testing.assert_close(found, alone[torch.tensor(tokens)[:, 0]], rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match=r"a prompt has \d+ tokens, and the model 64 positions; show fewer examples"):
        evaluate_choices(tiny_model(vocab_size=300), tokenizer, QUESTIONS, shots=[ROCKS] * 4)


def sentencepiece() -> PreTrainedTokenizerFast:
    """In the form of Llama 1's: ▁ stands for a space and before the first word of a text."""
    words = ["<unk>", "</s>", "▁", "▁A", "▁B", "A", "B", "\n", "<0x0A>", ":", "▁:", "is", "▁is", "s", "i", "▁Tr", "ue"]
    made = Tokenizer(models.Unigram([(word, -1.0 - 0.1 * i) for i, word in enumerate(words)], 0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def test_tokens_of_letters_of_both_kinds_of_tokenizers():
    byte_level, pieces = tiny_tokenizer(), sentencepiece()
    assert label_ids(byte_level, "x\n", "AB") == [byte_level(letter).input_ids[0] for letter in "AB"]
    tokens = byte_level.convert_ids_to_tokens
    byte_level.add_tokens([" A", " B"])
    assert tokens(label_ids(byte_level, "is:", "AB")) == [" A", " B"]
    assert pieces.convert_ids_to_tokens(label_ids(pieces, "is\n", "AB")) == ["A", "B"]
    assert pieces.convert_ids_to_tokens(label_ids(pieces, "is:", "AB")) == ["▁A", "▁B"]
    for tokenizer, prompt, labels in ((pieces, "is\n", ["True"]), (tiny_tokenizer(), "is:\n", ["True"])):
        with pytest.raises(ValueError, match=r"label 'True' has [0-9]+ tokens after .*cannot be scored by letters"):
            label_ids(tokenizer, prompt, labels)


def test_lm_eval_has_the_same_accuracies(tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is the optional extra [eval]")
    model, tokenizer = tiny_model(vocab_size=300, max_position_embeddings=1024), whole_words()
    draws = torch.Generator().manual_seed(0)
    questions = [
        ChoiceQuestion(f"Question {i}?", tuple("abcd"[:n]), int(torch.randint(n or 2, (), generator=draws)))
        for i, n in enumerate([4, 3, 0, 2, 4, 0, 3, 4, 4, 0])
    ]
    for style in ("woa", "wa"):
        export_choices(tmp_path, f"mine_{style}", questions, style, [ROCKS])
        ours = evaluate_choices(model, tokenizer, questions, style, [ROCKS])
        theirs = evaluate_tasks(model, tokenizer, [f"mine_{style}"], tmp_path)[f"mine_{style}"]
        assert 0 < ours["accuracy"] < 1 and math.isclose(ours["accuracy"], theirs["acc"])
        assert math.isclose(ours["error"], theirs["acc_stderr"])
    with pytest.raises(ValueError, match="name='a b': letters, digits"):
        export_choices(tmp_path, "a b", questions)


def test_groups_are_lm_evals():
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is the optional extra [eval]")
    from pathlib import Path

    tags = {"stem": "STEM", "humanities": "humanities", "social_sciences": "social sciences", "other": "other"}
    files = Path(lm_eval.__file__).parent.joinpath("tasks", "mmlu", "default").glob("mmlu_*.yaml")
    theirs = {}
    for file in files:
        tag = next((t for t in tags if f"mmlu_{t}_tasks" in file.read_text()), None)
        if tag:
            theirs[file.stem.removeprefix("mmlu_")] = tags[tag]
    assert len(theirs) == 57 and theirs == GROUPS


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("A. chalk\nB. lava\nC. ice", ["chalk", "lava", "ice"]),
        ("A. one\nC. three\nB. two", ["one", "two", "three"]),
        ("Which? A. the B-wave B. x-A C. y D. z", ["the B-wave", "x-A", "y", "z"]),
        ("A) a B) b D) d", ["a", "b D) d"]),
        ("no letters", []),
    ],
)
def test_options_of_free_text(text, options):
    assert split_options(text) == options


def test_files_of_questions(tmp_path):
    rows = [
        {"subject": "virology", "question": "Q1", "choices": ["a", "b"], "gold": 1},
        {"query": "Question: Q2\nAnswer:", "choices": ["no", "yes"], "gold": 1},
        {"query": "Question: Q3\nChoices:\nA. x\nB. y z\nAnswer:", "choices": ["A", "B"], "gold": 0},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_choices(file) == [
        ChoiceQuestion("Q1", ("a", "b"), 1, "other", "virology"),
        ChoiceQuestion("Q2", (), 0),
        ChoiceQuestion("Q3", ("x", "y z"), 0),
    ]
    ap = [
        {
            "question": {"stem": "S", "choices": [{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]},
            "answerKey": "B",
        }
    ]
    npee = {
        "noun": {"question": ["n"], "answer": ["m"]},
        "choice": {
            "question": ["S:\nChoose from:\n\nA. x\nB. y", *["T:\nChoose from:\nA. x\nB. y"] * 3],
            "answer": ["A", "D", "Basalt", "(b) y"],
        },
        "tf": {"question": ["U", "V", "W"], "answer": ["False", "unknown", "T."]},
    }
    for name, data, expected in (
        ("ap.json", ap, [ChoiceQuestion("S", ("x", "y"), 1)]),
        (
            "npee.json",
            npee,
            [
                ChoiceQuestion("S:", ("x", "y"), 0, "multiple choice"),
                ChoiceQuestion("T:", ("x", "y"), 1, "multiple choice"),
                ChoiceQuestion("U", (), 1, "true or false"),
                ChoiceQuestion("W", (), 0, "true or false"),
            ],
        ),
    ):
        (tmp_path / name).write_text(json.dumps(data))
        assert read_choices(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"question": "q"}', r"line 1: no question with choices \(found: question\)"),
        ("a.jsonl", '{"question": "q", "choices": ["a", "b"], "gold": 2}', "line 1: gold=2 is none of the 2 choices'"),
        ("a.jsonl", '{"question": "q", "choices": ["a", 2], "gold": 0}', "line 1: no question with choices"),
        (
            "a.jsonl",
            '{"question": "q\\nChoices:\\nA. x\\nB. y\\nAnswer:", "choices": ["A", "B", "C"], "gold": 0}',
            "line 1: no options can be read of the question's 3 choices",
        ),
        ("a.json", '[{"question": {"stem": "s", "choices": [{"text": "x"}]}}]', "a.json, question 1: no 'label'"),
        ("a.json", "[", "a.json: not JSON"),
        ("a.json", "[]", "a.json: holds no question with options"),
        (
            "a.json",
            '[{"question": {"stem": "s", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]}, '
            '"answerKey": "C"}]',
            "a.json, question 1: answerKey='C' is none of",
        ),
    ],
)
def test_files_that_cannot_be_read_are_named(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_choices(tmp_path / name)


def test_scores_at_the_level_of_guessing_stay_outside_means():
    known, guessed = {"accuracy": 0.9, "signal": True}, {"accuracy": 0.26, "signal": False}
    assert mean_with_signal({"a": known, "b": guessed, "c": {"accuracy": 0.7, "signal": True}}) == pytest.approx(0.8)
    assert mean_with_signal({"b": guessed}) is None
    with pytest.raises(ValueError, match="style='x': must be one of 'woa', 'wa'"):
        evaluate_choices(Likes(torch.zeros(9)), tiny_tokenizer(), [ROCKS], "x")
    with pytest.raises(ValueError, match="questions is empty"):
        evaluate_choices(Likes(torch.zeros(9)), tiny_tokenizer(), [])


def test_the_command(monkeypatch, capsys, tmp_path):
    folder = save_fathom(tmp_path / "model", max_position_embeddings=512)
    file = tmp_path / "rocks.jsonl"
    row = {"question": "Q", "choices": ["a", "b"], "gold": 1, "subject": "virology"}
    file.write_text((json.dumps(row) + "\n") * 3)
    run = lambda *options: run_cli(monkeypatch, capsys, "evaluate", folder, *options)  # noqa: E731
    code, out, _ = run("--choices", file, "--json", "--limit", 2, "--export", tmp_path / "tasks")
    found = json.loads(out)
    assert (
        code == 0
        and found["choices"]["rocks"]["n"] == 2
        and found["mean"] in (None, found["choices"]["rocks"]["accuracy"])
    )
    assert (tmp_path / "tasks" / "rocks_woa.yaml").is_file()
    code, out, _ = run("--choices", file, "--style", "wa")
    assert code == 0 and "rocks, wa, 0 shown" in out and "guessing 0.5000  n 3" in out and "  other" in out
    for options, message in (
        (("--choices", file, "--text", file), "--text and --choices: give one of them at a time"),
        (("--choices", file, "--shots", file), "is scored too; show questions of another file"),
        (("--choices", file, "--num-fewshot", 2), "--num-fewshot goes with --shots FILE here"),
        (("--text", file, "--style", "wa"), "--style, --shots and --export go with --choices FILE,FILE"),
        (("--tools", file), "--questions and --tools go together: give both"),
        (("--choices", ","), "names no file, or two of one name"),
    ):
        code, _, err = run(*options)
        assert code == 2 and message in err
