"""Retrieval from long texts: exact lengths, seeds, and what readers that know everything or nothing score."""

import json
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM
from transformers.utils import ModelOutput

from fathom.caches import Full, StreamingLLM, compress, prefill
from fathom.caches.versions import CACHE_NAME
from fathom.data.packing import encode
from fathom.evaluate.long_context import (
    LONG_TASKS,
    evaluate_long,
    nats_by_position,
    samples,
    score,
    task_names,
    wilson,
)
from tiny import tiny_model, tokens
from tiny_checkpoint import TEXT, run_cli, save_fathom, save_stock, tiny_tokenizer

FILLER = encode([TEXT], tiny_tokenizer())[0]
LENGTH = 1024  # of a tokenizer that has hardly more than bytes


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


class Stub(torch.nn.Module):
    """A language model whose cache is the tokens it has read; `following` gives the logits after them."""

    def __init__(self, following):
        super().__init__()
        self.following, self.config = following, LlamaConfig()

    def forward(self, input_ids, use_cache=True, logits_to_keep=0, **given):
        before = given.get(CACHE_NAME)
        rows = [list(old) + new for old, new in zip(before or [[]] * len(input_ids), input_ids.tolist(), strict=True)]
        width = input_ids.shape[1]
        keep = logits_to_keep or width
        logits = [[self.following(row[: len(row) - i]) for i in reversed(range(keep))] for row in rows]
        held = torch.stack([torch.stack(row) for row in logits])
        return ModelOutput(logits=held, **{CACHE_NAME: rows})


def perfect(tokenizer, tasks, lengths, count):
    """After a sample, its answer."""
    known = {}
    for task in tasks:
        for length in lengths:
            for sample in samples(task, tokenizer, FILLER, length, count):
                row = sample.context + sample.question
                for token in tokenizer(sample.answers[0], add_special_tokens=False).input_ids:
                    known[tuple(row)] = token
                    row = [*row, token]

    def following(row):
        return torch.nn.functional.one_hot(torch.tensor(known.get(tuple(row), 0)), 300) * 9.0

    return Stub(following)


@pytest.mark.parametrize("task", LONG_TASKS)
def test_samples_have_exactly_the_length_and_the_seed_decides(tokenizer, task):
    for length in (LENGTH, LENGTH + 7):
        made = samples(task, tokenizer, FILLER, length, 5, seed=3)
        assert all(len(sample.context) + len(sample.question) == length for sample in made)
        assert made == samples(task, tokenizer, FILLER, length, 5, seed=3)
        assert made != samples(task, tokenizer, FILLER, length, 5, seed=4)
    assert made[:2] == samples(task, tokenizer, FILLER, length, 2, seed=3)  # more samples leave the first as they were
    for sample in made:
        text = tokenizer.decode(sample.context)
        assert len(set(sample.answers)) == 4
        for answer in sample.answers:
            parts = answer.strip().split(", ")
            assert all(part in text for part in parts)  # distractors stand in the same text


def test_the_answer_follows_from_the_text(tokenizer):
    """The text solved by reading it: chains followed, words counted, values looked up."""
    for sample in samples("vt", tokenizer, FILLER, LENGTH, 8):
        value = re.search(r"are (\d+),", tokenizer.decode(sample.question))[1]
        held = {}
        for name, source in re.findall(r"VAR (\w+) = (\w+)\.", tokenizer.decode(sample.context)):
            held[name] = held.get(source, source)
        assert ", ".join(name for name in held if held[name] == value) == sample.answers[0].strip()
    for task in ("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery"):
        for sample in samples(task, tokenizer, FILLER, LENGTH, 8):
            found = re.findall(r"number of the (\w+) is (\d+)\.", tokenizer.decode(sample.context))
            asked = re.findall(r"the (anchor|\w+)", tokenizer.decode(sample.question).split("?")[0].split("of", 1)[1])
            values = [value for key in dict.fromkeys(asked) for own, value in found if own == key]
            assert ", ".join(values) == sample.answers[0].strip()
    for sample in samples("words", tokenizer, FILLER, 4 * LENGTH, 8):
        (word, _), *_ = Counter(tokenizer.decode(sample.context).split()).most_common(1)
        assert word == sample.answers[0].strip()
    for sample in samples("frequent_words", tokenizer, FILLER, 4 * LENGTH, 8):
        most = Counter(tokenizer.decode(sample.context).split()).most_common(3)
        assert ", ".join(word for word, _ in most) == sample.answers[0].strip()
    for asked in (1, 2, 3):
        for sample in samples(f"facts{asked}", tokenizer, FILLER, LENGTH, 8):
            been, holder = {}, {}
            found = re.findall(r"(\w+) (took|went to) the (\w+)\.", tokenizer.decode(sample.context))
            for person, did, what in found:
                if did == "took":
                    holder[what] = person
                else:
                    been.setdefault(person, []).append(what)
            name = re.search(r"Where (?:is|was) (?:the )?(\w+)", tokenizer.decode(sample.question))[1]
            assert been[holder.get(name, name)][-2 if asked == 3 else -1] == sample.answers[0].strip()


def test_nats_by_position_are_the_models_losses():
    model, ids = tiny_model(), tokens(1, 40)[0].tolist()
    rows = nats_by_position(model, [ids, ids[:8], ids[:9]], [0, 4, 8], windows=2)
    assert len(rows) == 2  # a text of eight tokens has nothing to say of a ninth
    for row, starts in zip(rows, ([0, 31], [0, 0]), strict=True):
        for bucket, (low, high) in enumerate(((0, 4), (4, 8))):
            log_p = [
                model(torch.tensor([ids[start : start + 8]])).logits[0].log_softmax(-1)[at, ids[start + at + 1]]
                for start in starts
                for at in range(low, high)
            ]
            assert row[bucket] == pytest.approx(-float(sum(log_p).detach()) / 8, rel=1e-5)
    with pytest.raises(ValueError, match="length 64: no document has more than as many tokens"):
        nats_by_position(model, [ids], [0, 64])


def test_a_perfect_reader_scores_1(tokenizer):
    tasks = list(LONG_TASKS)
    found = evaluate_long(perfect(tokenizer, tasks, [LENGTH], 4), tokenizer, tasks, [LENGTH], TEXT, count=4)
    for kind in ("generation", "likelihood"):
        assert all(found["tasks"][task][kind]["lengths"][str(LENGTH)]["score"] == 1 for task in tasks)
    assert found["mean"]["generation"][str(LENGTH)] == 1


def test_a_reader_that_guesses_is_at_chance_and_out_of_the_mean(tokenizer):
    """Logits drawn anew at each token: each answer is the likeliest a quarter of the time."""
    draw = torch.Generator().manual_seed(0)
    guess = Stub(lambda row: torch.randn(300, generator=draw))
    found = evaluate_long(guess, tokenizer, ["niah_multikey"], [LENGTH], TEXT, count=200, batch_size=50)
    cell = found["tasks"]["niah_multikey"]
    assert cell["generation"]["lengths"][str(LENGTH)]["hits"] == 0
    likelihood = cell["likelihood"]["lengths"][str(LENGTH)]
    assert likelihood["low"] < 0.25 < likelihood["high"]
    assert not cell["generation"]["signal"] and not cell["likelihood"]["signal"]
    assert found["mean"] == {"generation": {str(LENGTH): None}, "likelihood": {str(LENGTH): None}}


@pytest.mark.parametrize("method", [None, Full(), "mamba"], ids=["no cache", "full", "mamba"])
def test_scores_are_those_of_transformers_without_a_cache(tokenizer, method):
    """Likelihoods from one forward over context, question and answer; the text from generate()."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape, initializer_range=0.3)).eval()
    if method == "mamba":  # whose state is lost by calls of several tokens
        method, model = None, MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)).eval()
        for weight in model.parameters():
            weight.data *= 3 if weight.ndim > 1 else 1
    made = samples("niah_multikey", tokenizer, FILLER, 700, 6)
    found = score(model, tokenizer, made, method, chunk=128)
    for (_, likeliest), sample in zip(found, made, strict=True):
        prompt, values = sample.context + sample.question, []
        for answer in sample.answers:
            ids = tokenizer(answer, add_special_tokens=False).input_ids
            with torch.no_grad():
                log_p = model(torch.tensor([prompt + ids])).logits[0].double().log_softmax(-1)
            values.append(sum(log_p[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids)))
        assert likeliest == (max(values) == values[0])


@pytest.mark.parametrize("method", [None, Full()], ids=["no cache", "full"])
def test_generation_is_that_of_generate(tokenizer, method):
    """Found is the beginning of what generate() says, if a word ends there, and nothing else."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape, initializer_range=0.3, eos_token_id=None)).eval()
    seen = set()
    for sample in samples("niah_single", tokenizer, FILLER, 700, 6):
        prompt = torch.tensor([sample.context + sample.question])
        new = model.generate(prompt, do_sample=False, max_new_tokens=40)[0, prompt.shape[1] :].tolist()
        for answer in (tokenizer.decode(new[:5]).strip(), tokenizer.decode(new[:5]).strip() + "~"):
            count = len(tokenizer(answer, add_special_tokens=False).input_ids) + 1
            said = tokenizer.decode(new[:count]).strip()
            expected = re.match(re.escape(answer) + r"(?![^\W_])", said) is not None
            tried = replace(sample, answers=[answer, *sample.answers[1:]])
            assert score(model, tokenizer, [tried], method, chunk=128)[0][0] == expected
            seen.add(expected)
    assert seen == {True, False}


def test_each_answer_is_scored_from_the_same_compressed_cache(tokenizer):
    """Under a method that drops tokens, against a context read anew for each answer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape, initializer_range=0.3)).eval()
    method, hits = StreamingLLM(budget=64), []
    made = samples("niah_multiquery", tokenizer, FILLER, 700, 8)
    for sample in made:
        values = []
        for answer in sample.answers:
            ids = tokenizer(answer, add_special_tokens=False).input_ids
            with torch.no_grad(), compress(model, method):
                cache = prefill(model, torch.tensor([sample.context]), chunk_size=100)[CACHE_NAME]
                calls = [sample.question, *([token] for token in ids[:-1])]
                logits = [model(torch.tensor([c]), **{CACHE_NAME: cache}, use_cache=True).logits[0, -1:] for c in calls]
            log_p = torch.cat(logits).double().log_softmax(-1)
            values.append(log_p.gather(1, torch.tensor(ids)[:, None]).sum().item())
        hits.append(max(values) == values[0])
    assert len({len(sample.question) for sample in made}) > 1  # questions of several lengths in one batch
    assert [likeliest for _, likeliest in score(model, tokenizer, made, method, chunk=100)] == hits


def test_intervals():
    assert wilson(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))  # Wilson 1927; tables in any textbook
    assert wilson(10, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_refusals_are_one_line(tokenizer):
    with pytest.raises(ValueError, match="long task 'nia' does not exist; there are passkey"):
        task_names(["nia"])
    assert task_names(["niah", "niah_single", "vt"])[-1] == "vt" and len(task_names(["niah"])) == 4
    with pytest.raises(ValueError, match="length 50: vt needs at least"):
        samples("vt", tokenizer, FILLER, 50, 1)
    with pytest.raises(ValueError, match="filler text has no tokens"):
        samples("vt", tokenizer, [], 1024, 1)
    with pytest.raises(ValueError, match="count=0: must be at least 1"):
        evaluate_long(None, tokenizer, ["vt"], [1024], TEXT, count=0)
    masked = SimpleNamespace(config=SimpleNamespace(diffusion={"name": "masked"}))
    with pytest.raises(ValueError, match="not implemented for diffusion models"):
        evaluate_long(masked, tokenizer, ["vt"], [1024], TEXT)
    with pytest.raises(ValueError, match="nats by position are of causal models"):
        nats_by_position(masked, [[3] * 9], [0, 4, 8])


def test_command(tmp_path, monkeypatch, capsys):
    folder = save_fathom(tmp_path / "ours")
    call = [folder, "--long", "niah_single,vt", "--lengths", "1k", "--samples", "2", "--cache", "treekv"]
    code, out, _ = run_cli(monkeypatch, capsys, "evaluate", *call, "--budget", "64", "--json")
    found = json.loads(out)
    assert code == 0 and set(found["tasks"]) == {"niah_single", "vt"} and found["cache"]["budget"] == 64
    assert set(found["tasks"]["vt"]["likelihood"]["lengths"]) == {"1024"}
    (tmp_path / "text.txt").write_text(TEXT * 3)
    call = ("--long", "position", "--lengths", "100,200", "--text", tmp_path / "text.txt")
    code, out, _ = run_cli(monkeypatch, capsys, "evaluate", folder, *call)
    assert code == 0 and "over 1 documents" in out and "100 to      199" in out
    for wrong, message in (
        (["--long", "position", "--cache", "treekv", "--budget", "64"], "leave out --cache"),
        (["--long", "position", "--samples", "2"], "leave out --samples, --seed, --chunk and --batch-size"),
        (["--long", "vt", "--lengths", "1x"], "--lengths: '1x' is no number of tokens"),
        (["--long", "vt", "--budget", "4"], "--budget and --option go with --cache NAME"),
        (["--long", "vt", "--tasks", "piqa"], "give either --tasks NAME,NAME or --long NAME,NAME"),
        (["--text", "x.txt", "--cache", "treekv"], "go with --long"),
        (["--text", "x.txt", "--lengths", "4k"], "go with --long"),
    ):
        code, _, err = run_cli(monkeypatch, capsys, "evaluate", folder, *wrong)
        assert code and message in err and len(err.strip().splitlines()) == 1
    stock = save_stock(tmp_path / "stock")  # 64 learned positions
    code, _, err = run_cli(monkeypatch, capsys, "evaluate", stock, "--long", "vt")
    assert code and "length 1024: the model has 64 learned positions" in err
