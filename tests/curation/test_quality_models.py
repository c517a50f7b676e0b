"""Levels two and three: what models say of documents, against their numbers computed here."""

import json
import math

import pytest
import torch
from raw_texts import prose
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification

from fathom.curation import Curation, curate
from fathom.curation.models import QUESTION
from tiny_checkpoint import save_fathom, save_stock, tiny_tokenizer

TEXTS = [prose(seed, 60) for seed in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A judge without positions that end, a stock model, a classifier, and the raw texts."""
    made = tmp_path_factory.mktemp("models")
    save_fathom(made / "judge", max_position_embeddings=4096)
    save_stock(made / "stock")
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, num_labels=3, id2label={0: "good", 1: "dull", 2: "bad"},
        label2id={"good": 0, "dull": 1, "bad": 2},
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=5.0)
    model.save_pretrained(made / "classes")
    tiny_tokenizer().save_pretrained(made / "classes")
    (made / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return made


def run(folder, tmp_path, **options):
    found = curate(folder / "raw.jsonl", tmp_path / "out", Curation(**{"model_characters": 120} | options), workers=2)
    kept = (json.loads(line) for line in (tmp_path / "out" / "corpus" / "part_0.jsonl").read_text().splitlines())
    return found, {row["text"]: row["meta"] for row in kept}


def test_perplexity_lies_in_the_band(folder, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "stock").double(), tiny_tokenizer()
    expected = []
    for text in TEXTS:
        ids = torch.tensor([[0, *tokenizer(text[:60])["input_ids"]]])
        assert ids.shape[1] <= 65  # one window of the model's 64 positions
        with torch.no_grad():
            log_p = model(ids[:, :-1]).logits.log_softmax(-1)
        expected.append(math.exp(-float(log_p[0].gather(1, ids[0, 1:, None]).mean())))
    ranked = sorted(expected)
    low, high = (ranked[1] + ranked[2]) / 2, (ranked[5] + ranked[6]) / 2
    made, kept = run(
        folder, tmp_path, perplexity_model=str(folder / "stock"), min_perplexity=low, max_perplexity=high,
        model_characters=60,
    )  # fmt: skip
    assert set(kept) == {text for text, value in zip(TEXTS, expected) if low <= value <= high} and len(kept) == 4
    assert made["dropped"] == {"perplexity": {"too low": 2, "too high": 2}}
    assert all(kept[t]["perplexity"] == pytest.approx(v, rel=1e-4) for t, v in zip(TEXTS, expected) if t in kept)


def test_classes_that_are_kept(folder, tmp_path):
    model, tokenizer = BertForSequenceClassification.from_pretrained(folder / "classes").eval(), tiny_tokenizer()
    inputs = [torch.tensor([tokenizer(text[:120])["input_ids"][:64]]) for text in TEXTS]
    said = [model.config.id2label[int(model(ids).logits.argmax())] for ids in inputs]
    wanted = tuple({said[0], said[1]})[:1]
    made, kept = run(folder, tmp_path, classifier_model=str(folder / "classes"), classes=wanted)
    assert set(kept) == {text for text, one in zip(TEXTS, said) if one in wanted}
    assert made["dropped"].get("classes", {}).get("class", 0) == 8 - len(kept)
    with pytest.raises(ValueError, match=r"classes=\['great'\]: .* says good, dull, bad"):
        run(folder, tmp_path / "b", classifier_model=str(folder / "classes"), classes=("great",))


def test_the_judge_reads_the_probabilities_of_the_scores(folder, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "judge").eval(), tiny_tokenizer()
    digits = [tokenizer(str(k))["input_ids"] for k in range(1, 6)]
    assert all(len(ids) == 1 for ids in digits)
    scores = []
    for text in TEXTS:
        ids = tokenizer(QUESTION.format(text=text[:120]) + "Score:")["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits
        shares = logits[0, -1].double().exp()[[ids[0] for ids in digits]]
        scores.append(float((shares * torch.arange(1, 6)).sum() / shares.sum()))
    bound = round(sorted(scores)[3] + 1e-5, 5)
    made, kept = run(folder, tmp_path, judge_model=str(folder / "judge"), min_score=bound)
    assert set(kept) == {text for text, score in zip(TEXTS, scores) if score >= bound} and len(kept) == 4
    assert made["dropped"] == {"judge": {"score": 4}}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>judge</td><td>scores</td><td>8</td><td>4</td><td>4</td>" in page
    assert AutoTokenizer.from_pretrained(folder / "judge").chat_template is None


def test_a_checkpoint_that_is_not_there(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"judge_model='\./none': no such folder"):
        run(folder, tmp_path, judge_model="./none")
