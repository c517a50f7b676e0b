"""Named sources with weights: shares, labels, the same blocks after resuming, caps."""

import dataclasses
import math

import pytest
import torch

from fathom import FathomForCausalLM
from fathom.data import DataConfig, collate, prepare
from fathom.data.config import NamedSource
from fathom.tasks import lookup
from fathom.train import Recipe, Training, load_recipe, train_run
from fathom.train.recipe import MethodConfig

WORDS = {"sky": "star moon orbit comet planet. ", "sea": "wave fish salt reef tide. "}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    for name, words in WORDS.items():
        (folder / f"{name}.txt").write_text(words * 60)
    sources = {name: NamedSource(str(folder / f"{name}.txt"), weight) for name, weight in (("sky", 3), ("sea", 1))}
    config = DataConfig(train=sources, validation=None, tokenizer={"bpe": 280}, block_size=8, num_proc=1)
    return config, prepare(config, folder / "cache")


def test_shares_follow_the_weights_and_blocks_know_their_source(mixture):
    _, data = mixture
    order, number = data.train.ordered(seed=3, length=4000), 4000
    share = (torch.tensor(order.chosen) == 0).double().mean()
    assert abs(share - 0.75) < 3 * (0.75 * 0.25 / number) ** 0.5
    for index in range(40):
        block = order[index]
        text = data.tokenizer.decode(block["input_ids"])
        assert any(word.rstrip(".") in text for word in WORDS[("sky", "sea")[block["domains"]]].split())
    batch = collate([order[index] for index in range(5)])
    assert batch["domains"].tolist() == [int(n) for n in order.chosen[:5]] and batch["input_ids"].shape == (5, 8)


def test_an_index_has_its_block_whatever_the_length(mixture):
    _, data = mixture
    short, long, other = (data.train.ordered(seed, length) for seed, length in ((3, 50), (3, 500), (4, 50)))
    for index in range(50):
        assert torch.equal(short[index]["input_ids"], long[index]["input_ids"])
    assert any(not torch.equal(short[i]["input_ids"], other[i]["input_ids"]) for i in range(50))


def test_a_batch_has_the_blocks_of_its_indices_read_one_by_one(mixture):
    _, data = mixture
    order = data.train.ordered(seed=3, length=50, numbered=True)
    indices = [7, 0, 31, 7, 12, 49]
    for index, block in zip(indices, order.__getitems__(indices), strict=True):
        number, rank = int(order.chosen[index]), int(order.rank[index])
        own = list(data.train.sources.values())[number][order.parts[number].position(rank)]
        assert block["domains"] == number and torch.equal(block["input_ids"], own["input_ids"])
        assert block["draw"].tolist() == [3, index]


def test_a_pass_reads_every_block_of_a_source_once(mixture):
    _, data = mixture
    order = data.train.ordered(seed=0, length=4 * len(data.train.sources["sky"]))
    blocks = len(data.train.sources["sky"])
    mine = [order[i]["input_ids"] for i in range(len(order)) if order.chosen[i] == 0][:blocks]
    assert sorted(b.tolist() for b in mine) == sorted(b["input_ids"].tolist() for b in data.train.sources["sky"])


MOE = {"name": "moe", "experts": 4, "active": 2, "slices": 2, "width": 8, "shared": 16, "discipline": 0.1}


def test_a_run_labels_its_blocks_and_says_how_often_it_read_them(mixture, tmp_path):
    config, data = mixture
    model = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = Recipe("tiny", Training(tokens=4 * 2 * 8, sequences=2, log_every=2), model, data=config)
    method = MethodConfig("moe", {"feed_forward": MOE})
    result = train_run(recipe, method, seed=0, folder=tmp_path / "run", data=data)
    line = next(line for line in result.history if "loss" in line)
    assert len(line["domain_information"]) == 2 and line["discipline_loss"] > 0
    assert result.notes[-1].startswith("Training text: sky ") and "epochs; sea " in result.notes[-1]
    capped = {**config.train, "sky": dataclasses.replace(config.train["sky"], max_epochs=0.001)}
    with pytest.raises(ValueError, match=r"data\.train\.sky\.max_epochs=0\.001: the training would pass over it"):
        again = prepare(dataclasses.replace(config, train=capped), tmp_path / "cache")
        train_run(recipe, method, seed=0, folder=tmp_path / "other", data=again)


def test_named_held_out_texts_are_scored_together_and_apart(mixture, tmp_path):
    config, data = mixture
    for name, words in WORDS.items():
        (tmp_path / f"{name}.txt").write_text(words * (7 if name == "sky" else 4))
    held = {name: str(tmp_path / f"{name}.txt") for name in WORDS}
    config = dataclasses.replace(config, validation=held)
    data = prepare(config, tmp_path / "cache")
    model = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = Recipe("tiny", Training(tokens=4 * 2 * 8, sequences=2, lr=1e-2), model, data=config)
    result = train_run(recipe, MethodConfig("vanilla"), seed=0, folder=tmp_path / "run", data=data)
    network = FathomForCausalLM.from_pretrained(result.model).eval()
    nats, sizes = {}, {}
    for name, text in held.items():  # each text by itself, from its logits
        alone = prepare(dataclasses.replace(config, validation=text), tmp_path / "cache")
        blocks = torch.stack([block["input_ids"] for block in alone.validation])
        with torch.no_grad():
            logits = network(blocks).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten(), reduction="sum")
        nats[name], sizes[name] = loss.item(), alone.validation_bytes
    for name in held:
        found = result.scores[f"bits_per_byte of {name}"]
        assert found == pytest.approx(nats[name] / math.log(2) / sizes[name], rel=1e-5)
    whole = sum(nats.values()) / math.log(2) / sum(sizes.values())
    assert result.scores["bits_per_byte"] == pytest.approx(whole, rel=1e-5)
    assert recipe.task.remarks(result.scores)[0].startswith("bits per byte: sky ")
    with pytest.raises(ValueError, match=r"data\.validation='.*': .*sky\.txt is also in data\.train"):
        prepare(dataclasses.replace(config, validation={"sky": config.train["sky"].text}), tmp_path / "cache")


def test_a_diffusion_model_learns_from_a_mixture_by_the_numbers_of_its_rows(mixture, tmp_path):
    config, data = mixture
    numbered = data.train.ordered(seed=5, length=3, numbered=True)
    assert [numbered[i]["draw"].tolist() for i in range(3)] == [[5, 0], [5, 1], [5, 2]]
    task = lookup("masked_diffusion")(random_length=1.0)  # every batch is cut
    batch = task.collate([numbered[i] for i in range(3)])
    assert "loss_weights" in batch and batch["input_ids"].shape[1] <= 8 and batch["domains"].shape == (3,)
    recipe = Recipe(
        name="mixed", task=task, data=config, methods=(MethodConfig("masked", {"diffusion": {"name": "masked"}}),),
        model={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        training=Training(tokens=128, sequences=4, log_every=1),
    )  # fmt: skip
    masked = task.prepare(config, tmp_path / "cache")
    result = train_run(recipe, recipe.methods[0], seed=0, folder=tmp_path / "run", data=masked)
    assert result.steps == 4 and result.train_loss is not None


def test_recipes_name_sources(tmp_path):
    text = """
name: mixed
model: {hidden_size: 16}
data:
  train: {general: {text: embedded, weight: 7}, science: {text: science.txt, weight: 3, max_epochs: 4}}
  block_size: 8
training: {tokens: 1000}
"""
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.data.train["science"] == NamedSource("science.txt", 3.0, 4.0)
    for change, said in (
        (("weight: 7", "weight: 0"), r"data\.train\.general\.weight=0\.0: must be above 0"),
        (("block_size: 8", "streaming: true"), r"data\.streaming=True: named sources"),
        (("data:", "task: classification\ndata:"), "task 'classification' reads one data set"),
        (("block_size: 8", "validation: {}"), r"data\.validation is empty"),
    ):
        (tmp_path / "recipe.yaml").write_text(text.replace(*change))
        with pytest.raises(ValueError, match=said):
            load_recipe(tmp_path / "recipe.yaml")
