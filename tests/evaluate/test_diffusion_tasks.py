"""lm_eval on a diffusion model: likelihoods of single tokens from the logits, of more from the bound, and texts."""

import json
import math
import types

import pytest
import torch

from fathom import FathomConfig, FathomForMaskedDiffusion
from fathom.diffusion.likelihood import bound
from tiny import SIZES, perturb
from tiny_checkpoint import tiny_tokenizer

pytest.importorskip("lm_eval", reason="lm_eval is the optional extra [eval]")

from fathom.evaluate import diffusion_tasks, evaluate_tasks

TASKS = {
    "one": ("multiple_choice", "doc_to_target: gold\ndoc_to_choice: '{{choices}}'\nmetric_list: [{metric: acc}]"),
    "many": ("loglikelihood", "doc_to_target: '{{continuation}}'\nmetric_list: [{metric: perplexity}, {metric: acc}]"),
    "written": (
        "generate_until",
        "doc_to_target: '{{continuation}}'\nmetric_list: [{metric: exact_match}]\n"
        "generation_kwargs: {until: [x], max_gen_toks: 6, do_sample: false}",
    ),
}
DOCUMENTS = [
    {"context": "The sea", "continuation": " was calm", "choices": ["a", "b"], "gold": 0},
    {"context": "Under the keel:", "continuation": " 40 fathoms", "choices": ["c", "d"], "gold": 1},
]


@pytest.fixture(scope="module", params=[False, True], ids=["", "shift"])
def model(request):
    torch.manual_seed(0)
    section = {"name": "masked", "mask_token_id": 300, "shift": request.param}
    made = FathomForMaskedDiffusion(FathomConfig(**{**SIZES, "vocab_size": 301}, diffusion=section))
    perturb(made)
    return made.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tasks")
    file = place / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, (kind, rest) in TASKS.items():
        (place / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
            f"output_type: {kind}\ndoc_to_text: '{{{{context}}}}'\ntarget_delimiter: ''\n{rest}\n"
        )
    return place


def lm(model, batch_size=2):
    return diffusion_tasks.DiffusionLM(
        pretrained=model, tokenizer=tiny_tokenizer(), batch_size=batch_size, backend="causal"
    )


def test_a_single_token_has_its_probability_from_the_logits(model):
    encode = tiny_tokenizer()
    pairs = [(encode(d["context"])["input_ids"], encode(c)["input_ids"]) for d in DOCUMENTS for c in d["choices"]]
    found = lm(model)._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])
    for (before, (token,)), (score, greedy) in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*before, 300]])).logits[0, -1].double()
        logits[300] = -torch.inf
        assert score == pytest.approx(float(logits[token] - logits.logsumexp(0)), abs=1e-5)
        assert greedy == (int(logits.argmax()) == token)


def test_tasks_report_bounds_and_texts(model, folder, monkeypatch):
    monkeypatch.setattr(diffusion_tasks, "DRAWS", 4)
    found = evaluate_tasks(model, tiny_tokenizer(), list(TASKS), folder, batch_size=2)
    encode, nats, own = tiny_tokenizer(), [], model.diffusion
    for document in DOCUMENTS:
        before = encode(document["context"])["input_ids"]
        row = torch.tensor([encode(document["context"] + document["continuation"])["input_ids"]])
        answer = torch.arange(row.shape[1])[None] >= len(before)
        nats.append(float(bound(model, row, answer, 4, mask_token_id=own.mask_token_id, shift=own.shift)[0]))
    assert found["many"]["perplexity"] == pytest.approx(math.exp(sum(nats) / 2), rel=1e-4)
    assert found["many"]["acc"] == 0 and found["written"]["exact_match"] == 0 and 0 <= found["one"]["acc"] <= 1


def test_texts_end_before_a_stop_sequence_and_at_their_length(model):
    def written(until):
        options = {"until": until, "max_gen_toks": 6, "do_sample": False}
        (text,) = lm(model).generate_until([types.SimpleNamespace(args=("The sea", options))])
        return text

    whole = written([])
    ids = torch.tensor([tiny_tokenizer()("The sea")["input_ids"]])
    alone = model.generate(ids, max_new_tokens=6, block_length=2)[0, ids.shape[1] :]
    assert whole == tiny_tokenizer().decode(alone) and len(whole) > 2
    assert written([whole[2]]) == whole.split(whole[2])[0]
    with pytest.raises(ValueError, match="max_gen_toks=6000: must be below the model's"):
        lm(model).generate_until([types.SimpleNamespace(args=("The sea", {"max_gen_toks": 6000}))])
