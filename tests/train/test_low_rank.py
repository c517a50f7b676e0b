"""LoRA and weights of sources by method: what trains, what is saved, what a run is."""

import dataclasses
import json

import pytest
import torch
from transformers import TrainerCallback, set_seed

from fathom import FathomForCausalLM
from fathom.data import prepare
from fathom.data.config import NamedSource
from fathom.train import TrainResult, load_recipe, train_run
from fathom.train.recipe import LowRank, MethodConfig
from fathom.train.trained_parts import add_low_rank, freeze, merge_low_rank
from tiny import tiny_model, tokens

LORA = MethodConfig("lora", trains="lora")


def test_the_matrices_beside_layers_are_merged_by_the_equation():
    model = tiny_model().double()
    add_low_rank(model, LowRank(rank=2, alpha=6.0, dropout=0.0, targets=("q_proj", "down_proj")))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if name in trained:
            torch.nn.init.normal_(weight)
    merged = merge_low_rank(model)
    ids = tokens(2, 8)
    assert torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-10)
    for name, weight in merged.state_dict().items():
        part = name.removesuffix(".weight")
        if f"{part}.base_layer.weight" not in before:
            assert torch.equal(weight, before[name])
            continue
        a, b = (model.get_parameter(f"{part}.lora_{x}.default.weight") for x in "AB")
        assert torch.allclose(weight, before[f"{part}.base_layer.weight"] + 6 / 2 * b @ a, atol=1e-12)
    assert set(merged.state_dict()) == set(tiny_model().state_dict()) and merge_low_rank(merged) is merged


def test_a_run_saves_an_ordinary_checkpoint_and_resumes(recipe, data, folder, tmp_path):
    made = recipe(model={"residual_dropout": 0.0}, lr=3e-2, lora=LowRank(dropout=0.0))
    whole = train_run(made, LORA, seed=0, folder=folder, data=data)
    after = FathomForCausalLM.from_pretrained(whole.model)
    set_seed(0)
    first = FathomForCausalLM(after.config).state_dict()
    assert {name for name, t in after.state_dict().items() if not torch.equal(t, first[name])} == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qkv"
    }
    assert whole.parameters == sum(p.numel() for p in after.parameters())
    assert json.loads((folder / "run.json").read_text())["training"]["trains"] == "lora"

    class Stop(Exception):
        pass

    class StopAt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise Stop

    with pytest.raises(Stop):
        train_run(made, LORA, seed=0, folder=tmp_path / "cut", data=data, callbacks=[StopAt()])
    resumed = train_run(made, LORA, seed=0, folder=tmp_path / "cut", data=data)
    assert resumed.interruptions == 1
    again = FathomForCausalLM.from_pretrained(resumed.model).state_dict()
    assert all(torch.allclose(t, again[name], atol=1e-6) for name, t in after.state_dict().items())


def test_targets_that_are_not_there(recipe, data, folder):
    with pytest.raises(ValueError, match=r"training\.lora\.targets=\['k_prj'\]: the model's layers are \['down_proj'"):
        train_run(recipe(lora=LowRank(targets=("k_prj",))), LORA, seed=0, folder=folder, data=data)


def test_a_head_that_shares_its_weights_with_the_input_is_refused():
    with pytest.raises(ValueError, match="the weights of lm_head are those of the input embeddings"):
        add_low_rank(tiny_model(tie_word_embeddings=True), LowRank(targets=("q_proj", "lm_head")))
    model = tiny_model(tie_word_embeddings=False).double()
    add_low_rank(model, LowRank(rank=2, targets=("lm_head",)))
    torch.nn.init.normal_(model.lm_head.lora_B["default"].weight)
    ids = tokens(2, 8)
    assert torch.allclose(merge_low_rank(model.eval())(ids).logits, model(ids).logits, atol=1e-10)


def test_a_method_reads_the_sources_by_its_own_weights(recipe, text, tmp_path):
    sources = {"domain": NamedSource(text["train"]), "general": NamedSource(text["validation"])}
    made = recipe(data={"train": sources, "validation": None, "max_tokens": None}, save_every=None)
    data = prepare(made.data, tmp_path / "data")
    notes = {}
    for method in (MethodConfig("mixed"), MethodConfig("alone", weights={"general": 2.0})):
        result: TrainResult = train_run(made, method, seed=0, folder=tmp_path / method.name, data=data)
        notes[method.name] = result.notes[-1]
        stored = json.loads((tmp_path / method.name / "run.json").read_text())["data"]["train"]
        assert stored["domain"]["weight"] == {"mixed": 8.0, "alone": 0.0}[method.name]
    assert "domain" in notes["mixed"] and "general" in notes["mixed"]
    assert "general 40 blocks" in notes["alone"] and "domain" not in notes["alone"]
    with pytest.raises(ValueError, match=r"holds another run: its data\.train\.domain\.weight is 8\.0, now 0"):
        train_run(made, MethodConfig("mixed", weights={"general": 1.0}), seed=0, folder=tmp_path / "mixed", data=data)
    for weights, said in (({"genral": 1.0}, "did you mean 'general'"), ({}, "must name a source")):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(made, methods=(MethodConfig("m", weights=weights),))
    with pytest.raises(ValueError, match=r"methods\.m\.weights: data\.train names one text"):
        dataclasses.replace(recipe(), methods=(MethodConfig("m", weights={"general": 1.0}),))


def test_in_yaml(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "name: r\nmodel: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
        "data: {train: {domain: {text: a.txt}, general: {text: b.txt}}, validation: null, tokenizer: {bpe: 270}}\n"
        "methods:\n  - {name: continued, weights: {domain: 9, general: 1}}\n  - {name: lora, trains: lora}\n"
        "training: {tokens: 1e4, lora: {rank: 4, targets: [q_proj]}}\n"
    )
    made = load_recipe(tmp_path / "r.yaml")
    assert [(m.name, m.fields, made.trains(m)) for m in made.methods] == [
        ("continued", {}, "all"),
        ("lora", {}, "lora"),
    ]
    assert made.methods[0].weights == {"domain": 9.0, "general": 1.0} and made.training.lora.targets == ("q_proj",)


@pytest.mark.parametrize("trains", ["feed_forward", "router"])
def test_what_has_no_decoder_layers_has_no_such_parts(trains):
    with pytest.raises(ValueError, match=f"training.trains='{trains}': only a decoder's layers have such parts"):
        freeze(torch.nn.Linear(2, 2), trains)
