"""The task vqa beyond what all tasks promise: parts of folders, LLaVA's two stages, methods with weights, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers as hf
import yaml
from cases import recipe
from PIL import Image

from fathom.cost.vision import kv_bytes, llava_flops, vision_tokens
from fathom.train import MethodConfig, load_recipe, model_config, train_run
from fathom.train.run_folder import content
from fathom.vision import MQT, compress_vision
from tiny_checkpoint import tiny_tokenizer

LANGUAGE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 300, "tie_word_embeddings": True,
}  # fmt: skip


def load(folder, **sections):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe("vqa", folder, **sections)))
    loaded = load_recipe(folder / "recipe.yaml")
    return loaded, loaded.task.prepare(loaded.data, folder / ".data")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Folders of a tower whose pictures were larger and of a language model with its tokenizer."""
    folder = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 24}
    hf.Dinov2Model(hf.Dinov2Config(**tower)).save_pretrained(folder / "tower")
    hf.LlamaForCausalLM(hf.LlamaConfig(**LANGUAGE)).save_pretrained(folder / "language")
    tiny_tokenizer().save_pretrained(folder / "language")
    return folder


def test_two_stages_train_the_projector_then_the_language_model_of_given_folders(parts, tmp_path):
    model = {"tower": str(parts / "tower"), "language": str(parts / "language")}
    task = {"name": "vqa", "side": 16, "scenes": 40, "questions": 72, "trains": "language", "align": 4, "align_lr": 0.1}
    data = {"tokenizer": str(parts / "language"), "block_size": 90}
    loaded, data = load(tmp_path, model=model, task=task, data=data, training={"examples": 4})
    assert "4 examples, at learning rate 0.1" in data.notes[1]
    result = train_run(loaded, MethodConfig("vanilla"), seed=0, folder=tmp_path / "run", data=data)
    assert (tmp_path / "run" / "before" / "result.json").exists() and result.steps == 2
    first = loaded.task.model_class.from_pretrained(tmp_path / "run" / "before" / "model").model
    second = loaded.task.model_class.from_pretrained(result.model)
    tower, language = (hf.AutoModel.from_pretrained(parts / name) for name in ("tower", "language"))
    for name, weight in tower.state_dict().items():
        assert weight.equal(first.vision_tower.state_dict()[name]) and weight.equal(
            second.model.vision_tower.state_dict()[name]
        )
    given = language.state_dict()
    assert all(first.language_model.state_dict()[name][: len(weight)].equal(weight) for name, weight in given.items())
    assert not any(
        second.model.language_model.state_dict()[name].equal(weight)
        for name, weight in first.language_model.state_dict().items()
    )
    assert second.lm_head.weight is second.get_input_embeddings().weight and len(second.lm_head.weight) == 302
    a, b = (model.multi_modal_projector.state_dict() for model in (first, second.model))
    assert not any(a[name].equal(b[name]) for name in a)
    again = train_run(loaded, MethodConfig("vanilla"), seed=0, folder=tmp_path / "run", data=data)
    assert again == result


@pytest.mark.parametrize("compress", [{"name": "all_tokens"}, {"name": "average_pooling", "ratio": "1/2"}])
def test_the_saved_processor_writes_as_many_placeholders_as_the_model_keeps(tmp_path, compress):
    loaded, data = load(tmp_path, model={"vision_compress": compress}, training={"examples": 6})
    result = train_run(loaded, MethodConfig("vanilla"), seed=0, folder=tmp_path / "run", data=data)
    model = hf.AutoModelForImageTextToText.from_pretrained(result.model).eval()
    processor = hf.AutoProcessor.from_pretrained(result.model)
    from fathom.vision.scenes import scene

    inputs = processor(images=scene(0, 1, True).draw(16), text="<image>", return_tensors="pt")
    config = model.config.vision_config
    side = config.image_size // config.patch_size
    kept = side**2 if compress["name"] == "all_tokens" else (side // 2) ** 2
    assert (inputs["input_ids"] == processor.image_token_id).sum() == kept
    assert torch.isfinite(model(**inputs).logits).all()


def test_a_resampler_trains_with_its_model_and_then_serves_fewer_tokens(tmp_path):
    compress = {"name": "mqt", "tokens": 4, "queries": 9, "heads": 2}
    loaded, data = load(tmp_path, model={"vision_compress": compress}, training={"examples": 6})
    result = train_run(loaded, MethodConfig("vanilla"), seed=0, folder=tmp_path / "run", data=data)
    model = hf.AutoModelForImageTextToText.from_pretrained(result.model).eval()
    processor = hf.AutoProcessor.from_pretrained(result.model)
    from fathom.vision.scenes import scene

    picture = scene(0, 1, True).draw(16)
    counts = []
    for method in (None, MQT(tokens=3, queries=9, heads=2)):
        if method is None:
            inputs = processor(images=picture, text="<image>", return_tensors="pt")
            taken = model(**inputs).logits
        else:
            with compress_vision(model, processor, method):
                inputs = processor(images=picture, text="<image>", return_tensors="pt")
                taken = model(**inputs).logits
        counts.append(taken.shape[1])
        assert torch.isfinite(taken).all()
    assert counts[0] == counts[1] + 1
    batch = loaded.task.collate([data.train[0], data.train[1]])
    model.train()
    model.zero_grad()
    loaded.task.forward(model, **batch).loss.backward()
    assert model.model.multi_modal_projector.resampler.attention.in_proj_weight.grad.abs().max() > 0
    fresh = model_config(loaded, MethodConfig("vanilla"), data.tokenizer)
    assert fresh.vision_compress["tokens"] == 4


@torch.no_grad()
def test_questions_of_one_row_see_the_picture_and_themselves_alone(tmp_path):
    language = {**LANGUAGE, "max_position_embeddings": 600}
    task = {"name": "vqa", "side": 16, "scenes": 12, "questions": 72, "asked": 5}
    compress = {"name": "fourier_vlm", "tokens": 4}
    loaded, data = load(tmp_path, model={"language": language, "vision_compress": compress}, task=task,
                        data={"block_size": 500})  # fmt: skip
    config = model_config(loaded, MethodConfig("vanilla"), data.tokenizer)
    model = loaded.task.new_model(config, loaded.model, None).eval()
    for weight in model.parameters():  # so that attention matters
        weight.normal_(0, 0.3)
    batch = loaded.task.collate([data.train[0], data.train[7]])
    together = loaded.task.forward(model, **batch)
    assert "question" not in data.validation.column_names and batch["question"].max() == 5
    total = 0.0
    for row in range(2):
        for owner in range(5):
            mine = batch["question"][row] == owner
            ids, labels = (
                torch.cat((batch[name][row, :1], batch[name][row][mine]))[None] for name in ("input_ids", "labels")
            )
            pixels = batch["pixel_values"][row : row + 1]
            alone = loaded.task.forward(model, input_ids=ids, labels=labels, pixel_values=pixels)
            torch.testing.assert_close(together.logits[row, mine], alone.logits[0, 1:], atol=1e-4, rtol=1e-4)
            total += alone.loss * (labels != -100).sum()
    torch.testing.assert_close(together.loss, total / (batch["labels"] != -100).sum(), atol=1e-5, rtol=1e-5)


def test_flops_are_those_of_a_forward_and_bytes_those_of_its_cache(tmp_path):
    from torch.utils.flop_counter import FlopCounterMode

    for compress in ({"name": "fourier_vlm", "tokens": 4}, {"name": "fastv", "tokens": 5, "layer": 1}):
        folder = tmp_path / compress["name"]
        folder.mkdir()
        language = {**LANGUAGE, "tie_word_embeddings": False}
        loaded, data = load(folder, model={"language": language})
        config = model_config(loaded, MethodConfig("vanilla"), data.tokenizer)
        config.vision_compress = compress
        model = loaded.task.new_model(config, loaded.model, None).eval()
        model.set_attn_implementation("eager")  # the counter does not know the CPU's fused attention
        batch = loaded.task.collate([data.train[0]])
        size = loaded.data.block_size
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            loaded.task.forward(model, **batch)
        assert counter.get_total_flops() == sum(llava_flops(config, 16, size).values())
        count = 4 if compress["name"] == "fourier_vlm" else 16
        ids = torch.cat((batch["input_ids"][:, :1].expand(-1, count), batch["input_ids"][:, 1:]), 1)
        with torch.no_grad():
            out = model(input_ids=ids, pixel_values=batch["pixel_values"], use_cache=True)
        cache = getattr(out, "cache", None) or out.past_key_values
        stored = sum(2 * layer.keys.numel() * 4 for layer in cache.layers)
        assert stored == kv_bytes(config, 16, size, torch.float32)
        sizes = loaded.task.sizes(config, size, torch.float32)
        assert sizes.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"side": 18}}, "side=18: no whole number of patches of 4 pixels; use 16"),
        ({"task": {"asked": 0}}, "asked=0: must be an integer of at least 1"),
        ({"task": {"questions": 71}}, "questions=71: must be an integer of at least 72"),
        ({"task": {"trains": "tower"}}, "option trains='tower': use"),
        ({"data": {"train": "words.txt"}}, "task 'vqa' makes its scenes itself"),
        ({"data": {"max_documents": 3}}, "does not use it"),
        ({"data": {"block_size": 12}}, "data.block_size=12: a row of task 'vqa' has"),
        ({"model": {"tower": "no/such"}}, "model.tower='no/such': no config.json"),
        ({"model": {"tower": {"width": 3}}}, "model.tower.width=3: Dinov2Config has no such field"),
        ({"model": {"vision_compress": {"name": "fourier_vlm", "tokens": 5}}}, "no grid with the proportions"),
        ({"model": {"vision_compress": {"name": "fastv", "tokens": 4}}}, "ends with its answer; train with another"),
        ({"model": {"hidden_size": 8}}, "unknown key model.hidden_size"),
    ],
)
def test_what_cannot_be_is_refused(sections, message, tmp_path):
    whole = recipe("vqa", tmp_path)
    for name, section in sections.items():
        whole[name] = {**whole[name], **section}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
    with pytest.raises((ValueError, OSError), match=message):
        loaded = load_recipe(tmp_path / "recipe.yaml")
        model_config(loaded, MethodConfig("vanilla"))
        loaded.task.prepare(loaded.data, tmp_path / ".data")


def test_scenes_of_a_folder_of_pictures_and_a_run_that_knows_its_files(tmp_path):
    for part, names in (("pictures", "abcdefghi"), ("photographs", "j"), ("new_photographs", "k")):
        (tmp_path / part).mkdir()
        for at, name in enumerate(names):
            Image.new("RGBA", (8, 8), (25 * at, 99, 0, 255)).save(tmp_path / part / f"{name * 3}.png")
    task = {"name": "vqa", "side": 16, "scenes": 12, "questions": 72, "asked": 2, "pictures": str(tmp_path)}
    rows = {"block_size": 60}
    loaded, data = load(tmp_path, task=task, data=rows)
    text = data.tokenizer.decode([token for row in data.validation["input_ids"] for token in row.tolist()])
    assert "how many times is there a" in text and "what is the word?" in text
    batch = loaded.task.collate([data.train[0], data.train[1]])
    assert batch["pixel_values"].shape == (2, 3, 16, 16) and batch["pixel_values"][0, 1].std() < 0.5
    named = content(data)
    assert data.files and named[0] == data.files and content(load(tmp_path, task=task, data=rows)[1]) == named
    Image.new("RGB", (8, 8), "red").save(tmp_path / "pictures" / "aaa.png")
    assert content(load(tmp_path, task=task, data=rows)[1])[0] != named[0]
    with pytest.raises(FileNotFoundError, match=r"task\.pictures='no/such': no/such/pictures: no images"):
        load(tmp_path, task={**task, "pictures": "no/such"})


def test_a_model_of_another_kind_is_no_checkpoint_to_go_on_from(parts, tmp_path):
    loaded, _ = load(tmp_path)
    other = dataclasses.replace(loaded, model={"checkpoint": str(parts / "language")})
    with pytest.raises(ValueError, match="task 'vqa' continues with models that it has made"):
        model_config(other, MethodConfig("vanilla"))


RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("name", ["vision_demo", "vision_scratch", "vlm_small"])
def test_methods_of_the_recipes_keep_what_their_names_say(name, parts, tmp_path):
    text = (RECIPES / f"{name}.yaml").read_text()
    if name == "vlm_small":  # a tower of DINOv2-small's shape, and any language model
        hf.Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14).save_pretrained(
            tmp_path / "tower"
        )
        text = text.replace("facebook/dinov2-small", str(tmp_path / "tower"))
        text = text.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(parts / "language"))
    (tmp_path / "recipe.yaml").write_text(text)
    loaded = load_recipe(tmp_path / "recipe.yaml")
    for method in loaded.methods:
        config, (_, _, count) = model_config(loaded, method), method.name.partition("-")
        whole = (loaded.task.side // config.vision_config.patch_size) ** 2
        assert vision_tokens(config, loaded.task.side) == (int(count) if count else whole)
    first = loaded.task.before(loaded)
    assert (first is None) == (name != "vlm_small")
    if first is not None:
        assert (first.task.trains, first.task.align, first.training.lr) == ("projector", 0, 2e-3)
        assert (first.training.examples, first.training.warmup_ratio) == (5_000, 0.03)
