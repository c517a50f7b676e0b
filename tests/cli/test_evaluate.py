"""`fathom evaluate`."""

import json

import pytest

from fathom.evaluate import evaluate_text, load_checkpoint
from tiny_checkpoint import TEXT, run_cli, save_fathom, save_stock

TASK = """
task: local_likelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module", params=[save_fathom, save_stock], ids=["fathom", "stock"])
def folder(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: run_cli(monkeypatch, capsys, "evaluate", *arguments)


def test_text(run, folder, text):
    code, out, _ = run(folder, "--text", text, "--window", 32, "--stride", 8, "--json")
    found = json.loads(out)
    expected = evaluate_text(*load_checkpoint(str(folder), "cpu"), TEXT, 32, 8)
    assert code == 0
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert found["perplexity"] == pytest.approx(expected.perplexity)
    assert (found["tokens"], found["bytes"]) == (expected.tokens, len(TEXT.encode()))
    assert (found["window"], found["stride"]) == (32, 8)


def test_text_in_words(run, folder, text):
    out = run(folder, "--text", text)[1]
    assert "perplexity" in out and "bits per byte" in out and "window 64, stride 32" in out and "\x1b" not in out


def test_a_folder_is_read_as_training_reads_it(run, folder, tmp_path):
    """Every document by itself: the rows of JSONL, the files of plain text, in the order of their names."""
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    documents = ["The sea was calm.", "Under the keel: 40 fathoms.", TEXT]
    rows = [json.dumps({"text": document}) + "\n" for document in (documents[0], " ", documents[1])]
    (texts / "a.jsonl").write_text("".join(rows))
    (texts / "sub" / "b.txt").write_text(TEXT, encoding="utf-8")
    (texts / "notes.csv").write_text("no text")
    model, tokenizer = load_checkpoint(str(folder), "cpu")
    scores = [evaluate_text(model, tokenizer, document, 32, 8) for document in documents]
    found = json.loads(run(folder, "--text", texts, "--window", 32, "--stride", 8, "--json")[1])
    assert found["documents"] == 3
    assert found["nats"] == pytest.approx(sum(score.nats for score in scores))
    assert (found["tokens"], found["bytes"]) == (sum(s.tokens for s in scores), sum(len(d.encode()) for d in documents))
    assert "documents      2, each by itself" in run(folder, "--text", texts / "a.jsonl")[1]
    (texts / "a.jsonl").write_text('{"body": "x"}\n')
    said = "line 1: no field 'text' (found: body); give the one with the text that name, 'text'"
    assert said in run(folder, "--text", texts)[2]
    (texts / "a.jsonl").write_bytes(b"{}\0")
    assert "a.jsonl: NUL at byte 2 (0x00, line 1)" in run(folder, "--text", texts)[2]


def test_tasks(run, folder, tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is the optional extra [eval]")
    (tmp_path / "documents.jsonl").write_text('{"context": "The sea was", "continuation": " calm"}\n' * 3)
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "documents.jsonl"))
    options = (folder, "--tasks", "local_likelihood", "--task-dir", tmp_path, "--limit", 2)
    code, out, _ = run(*options, "--json")
    assert code == 0
    assert json.loads(out)["tasks"]["local_likelihood"]["acc"] in (0.0, 1.0)
    lines = run(*options)[1].splitlines()
    assert [line.split()[:2] for line in lines] == [["local_likelihood", "acc"]]  # its error beside it, no bookkeeping
    assert lines[0].endswith(" ± 0.0000")  # both documents are the same
    assert json.loads(run(*options, "--num-fewshot", 1, "--json")[1])["num_fewshot"] == 1
    code, _, err = run(*options, "--apply-chat-template")
    assert (code, "the tokenizer has no chat template" in err) == (2, True)


def test_names_are_checked_before_a_model_is_loaded(run, folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm_eval is the optional extra [eval]")
    monkeypatch.setattr("fathom.evaluate.load_checkpoint", lambda *arguments: pytest.fail("loaded"))
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "documents.jsonl"))
    code, _, err = run(folder, "--tasks", "local_likelyhood", "--task-dir", tmp_path)
    assert code == 2 and "task 'local_likelyhood' does not exist (did you mean 'local_likelihood'?)" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "book.txt: holds no text"),
        (b"\n \n", "book.txt: holds no text"),
        (b"one\ntwo\0", "book.txt: NUL at byte 7 (0x00, line 2): remove it"),
        (b"one\ntwo \xff", "book.txt: not UTF-8 at byte 8 (0xff, line 2): convert the file to UTF-8"),
    ],
)
def test_bad_text(run, folder, text, content, message):
    text.write_bytes(content)
    code, _, err = run(folder, "--text", text)
    assert code == 2 and message in err and err.count("\n") == 1


def test_missing_text(run, folder, tmp_path):
    code, _, err = run(folder, "--text", tmp_path / "absent.txt")
    assert (code, err) == (2, f"fathom: {tmp_path / 'absent.txt'}: No such file or directory\n")


def test_unreadable_text(run, folder, tmp_path):
    code, _, err = run(folder, "--text", tmp_path)
    assert code == 2 and f"--text='{tmp_path}/': no .txt, .md, .jsonl" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give either --text FILE, --tasks NAME,NAME or --long NAME,NAME"),
        (("--text", "a", "--tasks", "b"), "give either --text FILE, --tasks NAME,NAME or --long NAME,NAME"),
        (("--text", "a", "--limit", 1), "--task-dir, --limit, --num-fewshot and --apply-chat-template go with --tasks"),
        (("--tasks", ","), "--tasks=',': names no task"),
    ],
)
def test_options_that_do_not_go_together(run, folder, options, message):
    assert run(folder, *options)[::2] == (2, f"fathom: {message}\n")


def test_stride_beyond_window(run, folder, text):
    code, _, err = run(folder, "--text", text, "--window", 16, "--stride", 17)
    assert code == 2 and "stride=17: must be at least 1 and at most window=16" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model_type": "t5", "auto_map": {}}, "family 't5' is not supported"), ({"vocab_size": 299}, "300 token ids")],
)
def test_bad_checkpoint(run, tmp_path, text, change, message):
    folder = save_fathom(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    code, _, err = run(folder, "--text", text)
    assert code == 2 and message in err and err.count("\n") == 1


def test_help_has_an_example(run):
    assert "fathom evaluate runs/" in run("--help")[1]


def test_a_text_of_each_domain_has_its_own_score(run, folder, tmp_path):
    sea, land = tmp_path / "sea.txt", tmp_path / "land.txt"
    sea.write_text(TEXT, encoding="utf-8")
    land.write_text("Grass, and more grass on the hill. " * 5)
    both = json.loads(run(folder, "--text", sea, "--text", land, "--json")[1])["texts"]
    for found, path in zip(both, (sea, land), strict=True):
        alone = json.loads(run(folder, "--text", path, "--json")[1])
        assert {"checkpoint": str(folder), **found} == alone
    out = run(folder, "--text", sea, "--text", land)[1]
    assert out.startswith(f"{sea}:\n") and f"\n{land}:\nperplexity" in out
    code, _, err = run(folder, "--text", sea, "--text", land, "--long", "passkey")
    assert code == 2 and "--long takes one --text" in err


def test_calls_of_tools_are_scored(run, folder, tmp_path, monkeypatch):
    from fathom.data.templates import TEMPLATES

    monkeypatch.setitem(TEMPLATES, "react", "{{ messages[0]['content'] }}")  # short enough for the tiny model
    tools, questions = tmp_path / "mine.py", tmp_path / "questions.jsonl"
    tools.write_text("def one() -> int:\n    '''One.'''\n    return 1\n")
    questions.write_text('{"question": "One?", "answer": "1"}\n' * 3)
    found = json.loads(run(folder, "--questions", questions, "--tools", tools, "--limit", 2, "--json")[1])
    assert found["answer"] == {"share": 0.0, "error": 0.0, "n": 2} and found["calls"]["share"] == 1  # none is right
    out = run(folder, "--questions", questions, "--tools", tools)[1]
    assert "answer without tools  0.0000 ± 0.0000  n 3\n" in out and "\n\nQuestion: One?\n" in out
