"""Plans of slots: read off references, predicted by a pointer, a CRF and a small encoder-decoder, and obeyed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from table_cases import FOODS, PLACES, host, pairs, tokenizer

from fathom.tables.text import PromptMize, Table, TableGenerator
from fathom.tables.text.crf import CRFPlanner, beam_labels, log_partition, path_score, viterbi
from fathom.tables.text.generator import MODELS, make_planner
from fathom.tables.text.kept import keep, load_kept
from fathom.tables.text.plan import PointerPlanner, gold_plan, place
from fathom.tables.text.prototypes import PrototypeSelector
from fathom.tables.text.stages import Stage

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SIZES = (4, 3)  # positions and labels of the CRF that is counted out


def test_the_plan_is_the_order_of_the_reference():
    draw = random.Random(0)
    for _ in range(20):
        slots = [(f"k{i}", f"value{i} x{i}") for i in range(6)]
        order = draw.sample(range(6), 4)
        text = " and ".join(slots[i][1] for i in order) + " it is."
        table = Table((*slots, ("distractor", "never said"), ("empty", "")))
        assert gold_plan(table, text) == [f"k{i}" for i in order]
        assert gold_plan(Table(tuple(slots)), text) == [f"k{i}" for i in order]
    assert place("The Golden Curry House", "at the curry house , golden as ever") == 2  # three content words of three
    assert place("The Golden Curry House", "at the curry place") is None
    assert place("no", "there is no fee") == 2 and place("yes", "there is no fee") is None


def test_slots_that_change_places_change_the_pointers_scores_alike():
    planner = PointerPlanner(tokenizer(), **TINY).eval()
    table, _ = pairs()[0]
    order = [2, 0, 3, 1]
    turned = Table(tuple(table.slots[i] for i in order))
    with torch.no_grad():
        logits, _ = planner.step(planner.slots(table), planner.start, planner.state)
        other, _ = planner.step(planner.slots(turned), planner.start, planner.state)
    torch.testing.assert_close(other[:4], logits[order], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other[4], logits[4], rtol=1e-5, atol=1e-6)
    assert sorted(planner.predict([turned])[0]) == sorted(planner.predict([table])[0])


@pytest.mark.parametrize("kind", ["pointer", "crf", "selector"])
def test_a_marker_in_a_value_is_text_to_planners_and_selectors(kind):
    table = Table((("name", f"Al{tokenizer().eos_token} <eos> <sep>"), ("food", "<pad> Thai")))
    read: list[int] = []
    if kind == "selector":
        ((ids, _),) = PrototypeSelector(None, tokenizer(), **TINY).rows(table, ["<sep> has Thai food"])
        read = ids[1:-1]
    else:
        planner = (PointerPlanner if kind == "pointer" else lambda *a, **o: CRFPlanner(["name"], *a, **o))(
            tokenizer(), **TINY
        )
        planner.encoder.embeddings.word_embeddings.register_forward_pre_hook(
            lambda _, args: read.extend(args[0].flatten().tolist())
        )
        (planner.slots if kind == "pointer" else planner.emissions)(table)
        while read[-1] == tokenizer().pad_token_id:
            read.pop()
    found = [read.count(tokenizer().convert_tokens_to_ids(mark)) for mark in ("<sep>", "<eos>")]
    assert found == ([2, 2] if kind == "selector" else [0, 0])  # its own, one behind each key and each value
    assert "<pad> Thai" in tokenizer().decode(read) and tokenizer().pad_token_id not in read


@pytest.mark.parametrize("beams", [1, 3])
def test_a_pointer_names_no_slot_twice_and_stops(beams):
    planner = PointerPlanner(tokenizer(), beams=beams, **TINY)
    planner.stop.data.fill_(-50.0)
    planner.bilinear.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    for plan, (table, _) in zip(planner.predict([t for t, _ in pairs(4)]), pairs(4), strict=True):
        assert len(set(plan)) == len(plan) <= 4 and set(plan) <= set(table.keys)


def test_a_beam_finds_the_best_plan_of_all():
    """With a beam as wide as all plans: against their probabilities, counted out."""
    planner = PointerPlanner(tokenizer(), beams=100, **TINY).eval()
    planner.bilinear.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    table = Table((("a", "Thai"), ("b", "river"), ("c", "Alan")))
    best = None
    with torch.no_grad():
        for n in range(4):
            for plan in itertools.permutations(table.keys, n):
                value = -float(planner.loss([(table, list(plan))])) * (n + 1)
                best = max(best, (value, list(plan))) if best else (value, list(plan))
    assert planner.predict([table]) == [best[1]]


def scores(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*size, generator=draw, dtype=torch.float64) for size in (SIZES, (SIZES[1], SIZES[1])))


@pytest.mark.parametrize("seed", range(3))
def test_the_crf_is_the_sum_over_all_paths(seed):
    emissions, transitions = scores(seed)
    full = beam_labels(emissions, 99)
    values = {}
    for path in itertools.product(range(SIZES[1]), repeat=SIZES[0]):
        value = sum(emissions[i, label] for i, label in enumerate(path))
        values[path] = value + sum(transitions[a, b] for a, b in itertools.pairwise(path))
        torch.testing.assert_close(path_score(emissions, transitions, torch.tensor(path)), values[path])
    exact = torch.logsumexp(torch.stack(list(values.values())), 0)
    torch.testing.assert_close(log_partition(emissions, transitions, full), exact)
    assert tuple(viterbi(emissions, transitions, full).tolist()) == max(values, key=values.get)
    gold = torch.tensor([2, 0, 1, 2])
    limited = beam_labels(emissions, 2, gold)
    assert all(int(label) in row.tolist() for label, row in zip(gold, limited, strict=True))
    within = log_partition(emissions, transitions, limited)
    assert path_score(emissions, transitions, gold) <= within <= exact


def test_a_crf_plans_with_keys_of_the_table_alone():
    planner = CRFPlanner(["colour", "name", "food", "near", "stars"], tokenizer(), **TINY)
    planner.emit.bias.data[planner.label["colour"]] = 50.0  # what it would say most
    for plan, (table, _) in zip(planner.predict([t for t, _ in pairs(6)]), pairs(6), strict=True):
        assert set(plan) <= set(table.keys) and len(set(plan)) == len(plan)
    assert planner.predict([Table((("unknown", "x"),))]) == [[]]


@pytest.mark.parametrize("kind", ["pointer", "crf", "seq2seq"])
def test_a_planner_learns_and_is_saved(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("fathom.tables.text.encoder.SMALL", {**TINY, "hidden_size": 32})
    losses: dict[str, list[float]] = {}
    planner = make_planner(kind, pairs(8), tokenizer(), None, Stage(steps=25, batch_size=4, lr=1e-2), losses)
    assert sum(losses["planner"][-5:]) < 0.6 * sum(losses["planner"][:5])
    tables = [table for table, _ in pairs(8)]
    if kind != "seq2seq":  # which needs longer
        assert planner.predict(tables) == [["name", "food", "near"]] * 8
    keep(planner, tmp_path)
    assert load_kept(tmp_path).predict(tables) == planner.predict(tables)
    with pytest.raises(ValueError, match="plan item 'colour': no key of the table"):
        planner.fit([(tables[0], ["colour"])], Stage(steps=1))
    with pytest.raises(ValueError, match="planner='crff': use auto, pointer, crf or seq2seq"):
        make_planner("crff", pairs(2), tokenizer())


def test_a_turned_plan_turns_the_description(tmp_path):
    """On a toy grammar, of four tables that were trained on in both orders."""
    host("t5", d_model=64, d_ff=96).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = MODELS["t5"].from_pretrained(tmp_path, table={"name": "promptmize", "adapter": False})
    generator = TableGenerator(model, tokenizer())
    assert isinstance(generator.method, PromptMize)
    tables = [Table((("food", food), ("near", where))) for food in FOODS[:2] for where in PLACES[:2]]
    examples = [(table, " ".join(values)) for table in tables for values in (table.values, table.values[::-1])]
    generator.fit_generator(examples, Stage(steps=150, batch_size=8, lr=3e-3))
    said = [
        generator.describe(tables, [p] * 4, beams=1, max_new_tokens=12) for p in (["food", "near"], ["near", "food"])
    ]
    turned = [a.split()[::-1] == b.split() and len(a.split()) == 2 for a, b in zip(*said, strict=True)]
    assert sum(turned) >= 0.9 * len(tables)
    assert all(a.split() == list(table.values) for a, table in zip(said[0], tables, strict=True))
