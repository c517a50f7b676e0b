"""recipes/make_diffusion_text.py: rows of exactly the asked length that say one key, and sums that are right."""

import importlib.util
import itertools
import json
import lzma
import re
import sys
from pathlib import Path

from transformers import AutoTokenizer

from tiny_checkpoint import TEXT

SCRIPT = Path(__file__).parents[2] / "recipes" / "make_diffusion_text.py"


def test_rows_hold_one_key_and_sums_are_right(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_diffusion_text", SCRIPT)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    prose = tmp_path / "prose"
    prose.mkdir()
    for name in ("a-train-0", "a-valid"):
        with lzma.open(prose / f"{name}.jsonl.xz", "wt", encoding="utf-8") as out:
            out.writelines(json.dumps({"text": f"{TEXT} the pass key is and and " * 4}) + "\n" for _ in range(3))
    given = [prose, tmp_path / "corpus", "--passkeys", 20, "--sums", 2000, "--vocabulary", 400, "--length", 160]
    monkeypatch.setattr(sys, "argv", ["make_diffusion_text.py", *map(str, given)])
    made.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "corpus" / "tokenizer")

    def rows(name):
        return [json.loads(line)["text"] for line in (tmp_path / "corpus" / name / f"{name}.jsonl").open()]

    keys, ends = set(), 0
    for text in rows("passkey"):
        assert len(tokenizer(text)["input_ids"]) == 159  # and EOS
        said = re.findall(r"The pass key is((?: \d){8})\.", text)
        assert 3 <= len(said) <= 8 and len(set(said)) == 1
        ends += text.endswith(f"{said[0]}.")
        keys.add(said[0])
    assert len(keys) == 20 and 3 <= ends <= 17
    sums = " ".join(rows("addition")).split(" ;")[:200]
    for line in filter(str.strip, sums):
        a, b, c = (int(part.replace(" ", "")) for part in re.split(r"[+=]", line))
        assert a + b == c
    assert (tmp_path / "corpus" / "text" / "a-train-0.jsonl.xz").exists()
    assert (tmp_path / "corpus" / "validation" / "a-valid.jsonl.xz").exists()


def tasks():
    spec = importlib.util.spec_from_file_location("make_diffusion_tasks", SCRIPT.with_name("make_diffusion_tasks.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tasks_have_one_right_answer_and_disjoint_rows(tmp_path, monkeypatch):
    """Chains follow from what is said of them, keys are those said in the text; every row has the asked length."""
    module, letters = tasks(), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    sizes = {
        "chains": 60,
        "walks": 30,
        "passkeys": 20,
        "countdown": 200,
        "held-out": 10,
        "length": 96,
        "keys": 3,
        "variables": 4,
    }
    given = (tmp_path, *(x for name, size in {**sizes, "digits": 6}.items() for x in (f"--{name}", size)))
    monkeypatch.setattr(sys, "argv", ["make_diffusion_tasks.py", *map(str, given)])
    module.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    prompts, problems = {}, {}
    for task, length, count in (("chains", 9, 60), ("walks", 13, 30), ("passkey", 96, 20), ("countdown", 14, 200)):
        for name, rows in (("train", count), ("validation", 10)):
            lines = (tmp_path / task / f"{name}.jsonl").read_text().splitlines()
            assert len(lines) == rows
            for line in lines:
                parts = [message["content"] for message in json.loads(line)["messages"]]
                assert sum(len(tokenizer(part)["input_ids"]) for part in parts) == length
                prompts.setdefault((task, name), set()).add(parts[0])
                if task == "chains":
                    said, values = parts[0].split()[:-1], [int(x) for x in parts[1].split()]
                    for (before, number), value in zip(said, values, strict=True):
                        start = 0 if before == "Z" else values[letters.index(before)]
                        assert value == (start + "abcdefghij".index(number)) % 10
                    assert sorted(module.depths(parts[0])) == [0, 1, 2, 3]
                elif task == "walks":
                    said, values = parts[0].split()[:-1], [int(x) for x in parts[1].split()]
                    steps = ["abc".index(number) for _, number in said]
                    assert all((a + n) % 10 == b for a, n, b in zip(values, steps, values[1:], strict=False))
                    known = [i for i, (digit, _) in enumerate(said) if digit != "Z"]
                    assert len(known) == 2 and all(letters[values[i]] == said[i][0] for i in known)
                    far = module.distances(parts[0])
                    assert [i for i in range(6) if far[i] == 0] == known
                    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(far))
                elif task == "countdown":
                    assert module.solves(*parts)
                    *numbers, _, target, _ = parts[0].split()
                    problems.setdefault((*sorted(numbers), target), set()).add(name)
                else:
                    for question, answer in zip(parts[::2], parts[1::2], strict=True):
                        assert parts[0][:-1].count(question[-1] + answer) == 1
        assert not prompts[task, "train"] & prompts[task, "validation"]
    assert all(len(names) == 1 for names in problems.values())  # in no other order either
    solved = " 17 9 2 > 10 ="
    assert module.solves(solved, " 9 - 2 7 17 - 7 10") and module.solves(solved, " 17 + 2 19 19 - 9 10")
    for wrong in (
        " 9 - 2 7 17 - 7 11",
        " 17 - 7 10",
        " 17 - 9 8 8 + 8 10",
        " 17 - 9 9 9 + 2 10",
        " 17 - > 8 8 + 2 10",
        "",
    ):
        assert not module.solves(solved, wrong)
