"""`fathom generate`."""

import pytest

from fathom.evaluate import load_checkpoint
from tiny_checkpoint import run_cli, save_fathom, save_stock


@pytest.fixture(scope="module", params=[save_fathom, save_stock], ids=["fathom", "stock"])
def folder(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: run_cli(monkeypatch, capsys, "generate", *arguments)


def greedy(folder, prompt: str, length: int) -> str:
    """The likeliest token, one forward after another."""
    import torch

    model, tokenizer = load_checkpoint(str(folder), "cpu")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for _ in range(length):
        with torch.no_grad():
            following = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, following], dim=1)
        if following.item() == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0], skip_special_tokens=True)


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_greedy(run, folder, stream):
    code, out, _ = run(folder, "--prompt", "The sea", "--temperature", 0, "--max-new-tokens", 8, *stream)
    assert code == 0
    assert out.rstrip("\n") == greedy(folder, "The sea", 8)


def test_streamed_and_printed_at_once_are_the_same(run, folder):
    options = (folder, "--prompt", "The sea", "--max-new-tokens", 8, "--seed", 3)
    assert run(*options)[1].strip() == run(*options, "--stream")[1].strip()


def test_seed_decides_the_sample(run, folder):
    options = (folder, "--prompt", "The sea", "--max-new-tokens", 8, "--temperature", 2)
    texts = [run(*options, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("option", [("--top-k", 1), ("--top-p", 0.0001)])
def test_only_the_likeliest(run, folder, option):
    out = run(folder, "--prompt", "The sea", "--max-new-tokens", 8, *option)[1]
    assert out.rstrip("\n") == greedy(folder, "The sea", 8)


def test_refusals(run, folder, tmp_path):
    code, _, err = run(folder, "--prompt", " ")
    assert (code, err) == (2, "fathom: --prompt is empty: give the text to continue\n")
    code, _, err = run(folder, "--prompt", "caf\udce9")
    assert (code, err) == (2, "fathom: --prompt is not UTF-8: give it as UTF-8 text\n")
    code, _, err = run(folder, "--prompt", "x", "--seed", 2**64)
    assert code == 2 and "--seed" in err
    code, _, err = run(tmp_path / "absent", "--prompt", "x")
    assert code == 2 and err.endswith("absent: no such folder\n")
    assert run(folder, "--prompt", "x")[0] == 0  # no length given: what fits
    code, _, err = run(folder, "--prompt", "x", "--max-new-tokens", 64)
    assert code == 2 and "more than the model's 64 positions; at most 63 are possible" in err
    code, _, err = run(folder, "--prompt", "x", "--top-p", 2)
    assert code == 2 and "--top-p" in err
    code, _, err = run(folder, "--prompt", "x", "--device", "gpu")
    assert code == 2 and "device='gpu'" in err


def test_truncated_weights(run, tmp_path):
    file = save_fathom(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, _, err = run(tmp_path, "--prompt", "x")
    assert code == 2 and f"fathom: {file}: truncated or corrupt safetensors file" in err


def test_help_has_an_example(run):
    assert "fathom generate runs/" in run("--help")[1]


def test_a_question_with_tools(run, folder, tmp_path, monkeypatch):
    """A checkpoint of random weights answers nothing sensible: what is looked at is the way there and the trace."""
    import json

    file = tmp_path / "mine.py"
    file.write_text("def one() -> int:\n    '''One.'''\n    return 1\n")
    question = (folder, "--prompt", "One?", "--tools", file, "--rounds", 1)
    code, _, err = run(*question)
    assert code == 2 and "with the tools' descriptions it is" in err and "the model has 64 positions" in err
    from fathom.data.templates import TEMPLATES

    monkeypatch.setitem(TEMPLATES, "react", "{{ messages[0]['content'] }}")  # short enough for the tiny model
    code, out, _ = run(*question, "--json")
    trace = json.loads(out)
    assert code == 0 and trace["question"] == "One?" and trace["template"] == "react, built in"
    assert run(*question)[1].startswith("Question: One?\n")
    assert run(*question, "--stream")[1] == run(*question)[1]
    code, _, err = run(folder, "--prompt", "x", "--tools", tmp_path / "absent.py")
    assert code == 2 and "absent.py: no such file; --tools takes a Python file with functions" in err
    code, _, err = run(folder, "--prompt", "x", "--rounds", 2)
    assert (code, err) == (2, "fathom: --rounds and --json go with --tools FILE\n")
    code, _, err = run(*question, "--policy", "entropy")
    assert code == 2 and "--block-cache and --set do not go with --tools" in err
    code, _, err = run(*question, "--top-p", 0.5)
    assert code == 2 and "--top-k and --top-p: with --tools the likeliest token is taken" in err
    assert run(*question, "--temperature", 5, "--top-p", 0)[1] == run(*question)[1]
