"""lm_eval on a local task: what it reports against log-likelihoods computed token by token."""

import builtins
import json
import math

import pytest
import torch

from fathom.evaluate import evaluate_tasks
from tiny import tiny_model
from tiny_checkpoint import tiny_tokenizer

DOCUMENTS = [
    {"context": "The sea was", "continuation": " calm", "choices": ["calm", "nothing at all"], "gold": 0},
    {"context": "Under the keel:", "continuation": " 40 fathoms", "choices": ["40 fathoms", "sea"], "gold": 1},
    {"context": "then nothing to", "continuation": " sound", "choices": ["the", "sound"], "gold": 1},
]
LIKELIHOOD = """
task: local_likelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_target: gold
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    pytest.importorskip("lm_eval", reason="lm_eval is the optional extra [eval]")
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in (("likelihood", LIKELIHOOD), ("choice", CHOICE)):
        (folder / f"{name}.yaml").write_text(task.format(file=file))
    return folder


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=300, depth={"name": "pondering", "steps": 1})


def log_likelihood(model, context: str, continuation: str) -> float:
    tokenizer, total = tiny_tokenizer(), 0.0
    ids = tokenizer(context + continuation)["input_ids"]
    for position in range(len(tokenizer(context)["input_ids"]), len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:position]])).logits[0, -1].double()
        total += (logits[ids[position]] - torch.logsumexp(logits, 0)).item()
    return total


def test_an_answer_longer_than_the_context_is_named(task_dir):
    short = tiny_model(vocab_size=300, max_position_embeddings=2)
    with pytest.raises(ValueError, match="an answer has 3 tokens and the model's context 2: a question can be cut"):
        evaluate_tasks(short, tiny_tokenizer(), ["local_likelihood"], task_dir)


def test_metrics_equal_likelihoods_token_by_token(task_dir, model):
    scores = evaluate_tasks(model, tiny_tokenizer(), ["local_likelihood", "local_choice"], task_dir, batch_size=2)
    likelihoods = [log_likelihood(model, d["context"], d["continuation"]) for d in DOCUMENTS]
    assert math.isclose(scores["local_likelihood"]["perplexity"], math.exp(-sum(likelihoods) / 3), rel_tol=1e-4)
    right = [
        max(range(2), key=lambda i: log_likelihood(model, d["context"], " " + d["choices"][i])) == d["gold"]
        for d in DOCUMENTS
    ]
    mean = sum(right) / 3
    assert math.isclose(scores["local_choice"]["acc"], mean)
    # the standard error of a mean of n zeros and ones, with n - 1; every number is a metric or the error of one
    assert math.isclose(scores["local_choice"]["acc_stderr"], math.sqrt(mean * (1 - mean) / 2))
    assert set(scores["local_choice"]) == {"acc", "acc_stderr"}
    assert set(scores["local_likelihood"]) == {"acc", "acc_stderr", "perplexity", "perplexity_stderr"}


def test_examples_and_the_chat_template_stand_before_the_question(task_dir, model, monkeypatch):
    """What the model is asked, from lm_eval's own request."""
    from lm_eval.models.huggingface import HFLM

    asked = []
    real = HFLM.loglikelihood

    def loglikelihood(self, requests, *arguments, **options):
        asked.append([request.args[0] for request in requests])
        return real(self, requests, *arguments, **options)

    monkeypatch.setattr(HFLM, "loglikelihood", loglikelihood)
    tokenizer = tiny_tokenizer()
    for options in ({}, {"num_fewshot": 1}, {"apply_chat_template": True}):
        if options.get("apply_chat_template"):
            tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        evaluate_tasks(model, tokenizer, ["local_likelihood"], task_dir, **options)
    plain, examples, chat = (set(texts) for texts in asked)
    questions = {document["context"] for document in DOCUMENTS}
    assert plain == questions
    assert all(any(text.endswith(q) and len(text) > len(q) for q in questions) for text in examples)
    assert chat == {f"<user>{question}" for question in questions}
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        evaluate_tasks(model, tokenizer, ["local_likelihood"], task_dir, apply_chat_template=True)
    with pytest.raises(ValueError, match="num_fewshot=-1: must be at least 0"):
        evaluate_tasks(model, tokenizer, ["local_likelihood"], task_dir, num_fewshot=-1)


def test_limit_scores_the_first_documents(task_dir, model):
    scores = evaluate_tasks(model, tiny_tokenizer(), ["local_likelihood"], task_dir, limit=1)
    expected = math.exp(-log_likelihood(model, DOCUMENTS[0]["context"], DOCUMENTS[0]["continuation"]))
    assert math.isclose(scores["local_likelihood"]["perplexity"], expected, rel_tol=1e-4)


def test_bad_arguments(task_dir, model):
    with pytest.raises(ValueError, match=r"'local_choise' does not exist \(did you mean 'local_choice'\?\)"):
        evaluate_tasks(model, tiny_tokenizer(), ["local_choise"], task_dir)
    with pytest.raises(FileNotFoundError, match=r"task_dir='.*absent': no such folder"):
        evaluate_tasks(model, tiny_tokenizer(), ["x"], task_dir / "absent")
    with pytest.raises(ValueError, match="limit=0: must be at least 1"):
        evaluate_tasks(model, tiny_tokenizer(), ["local_choice"], task_dir, limit=0)


def test_without_lm_eval_the_extra_is_named(monkeypatch, model):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.split(".")[0] == "lm_eval":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install 'fathom-lm\[eval\]'"):
        evaluate_tasks(model, tiny_tokenizer(), ["x"])
