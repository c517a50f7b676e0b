"""From captions to clips, files and back: seeds, batches, experts, offloading, the release's layout, LoRA."""

from __future__ import annotations

import json
import math

import mova_reference as reference
import mova_tiny as tiny
import numpy as np
import pytest
import torch
from peft import get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathom.audiovideo import FlowMatchPairScheduler, MovaModel, MovaPipeline, lora_config, read_release, write_release
from fathom.audiovideo.checkpoints import BRIDGE, to_diffusers, to_release
from fathom.audiovideo.joint import condition, joint_forward
from fathom.audiovideo.lora import lora_targets
from fathom.audiovideo.pipeline import first_latents, fitted_picture, settings_of, tokenized


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "a", "red", "blue", "ball", "bounces", "flashes", "?"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="?")


class Averages:
    """A codec: mean brightness of 4 × 8 × 8 blocks in every channel, means of 60 samples; what it loses is lost."""

    frame_rate, sample_rate, video_strides, audio_stride = 24.0, 3000, (4, 8, 8), 60
    video_channels, audio_channels = 4, 6

    def encode_video(self, frames):
        grey = frames.float().mean(-1) / 127.5 - 1
        grey = torch.cat([grey[:, :1].expand(-1, 4, -1, -1), grey[:, 1:]], 1)
        blocks = torch.nn.functional.avg_pool3d(grey[:, None], self.video_strides)
        return blocks.expand(-1, self.video_channels, -1, -1, -1)

    def decode_video(self, latents):
        sizes = [latents.shape[2] * 4, latents.shape[3] * 8, latents.shape[4] * 8]
        grey = torch.nn.functional.interpolate(latents.mean(1, keepdim=True), sizes)[:, 0, 3:]
        return ((grey + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)[..., None].expand(-1, -1, -1, -1, 3)

    def encode_audio(self, waveform):
        padded = torch.nn.functional.pad(waveform, (0, -waveform.shape[1] % 60))
        return torch.nn.functional.avg_pool1d(padded[:, None], 60).expand(-1, self.audio_channels, -1)

    def decode_audio(self, latents):
        return latents.mean(1).repeat_interleave(60, dim=1)


def pipeline(**mova) -> MovaPipeline:
    made = tiny.model(**{"vocab_size": 16, **mova})
    named = dict(made.named_children())
    found = MovaPipeline(scheduler=FlowMatchPairScheduler(), tokenizer=tokenizer(), **named)
    found.settings = made.config
    found.codec = Averages()
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture(scope="module")
def pipe() -> MovaPipeline:
    return pipeline()


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def latents(pipe, prompt, *seeds, **options):
    found = pipe(prompt, generator=seeded(*seeds), steps=3, output="latent", **options)
    return found.frames, found.audio


def close(found, right, tolerance=1e-5):
    for a, b in zip(found, right, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_a_clip_has_its_frames_and_as_much_sound(pipe):
    out = pipe(["a red ball", "a blue ball"], generator=seeded(0, 1), steps=2)
    assert out.frames.shape == (2, 9, 32, 48, 3) and out.frames.dtype == np.uint8
    assert out.audio.shape == (2, math.floor(3000 * 9 / 24)) and abs(out.audio).max() <= 1
    assert (out.frame_rate, out.sample_rate) == (24.0, 3000)
    other = pipe("a red ball", steps=1, frames=5, height=16, width=32, output="latent")
    assert other.frames.shape == (1, 4, 2, 2, 4) and other.audio.shape == (1, 6, 11)


def test_the_seed_of_a_clip_decides_it_whatever_else_is_in_the_batch(pipe):
    both = latents(pipe, ["a red ball", "a blue ball"], 3, 4)
    assert all(torch.equal(a, b) for a, b in zip(both, latents(pipe, ["a red ball", "a blue ball"], 3, 4), strict=True))
    close(latents(pipe, ["a blue ball"], 4), (x[1:] for x in both))
    assert not torch.allclose(latents(pipe, ["a blue ball"], 5)[0], both[0][1:], atol=0.1)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (4.0, 1.0), (3.0, 3.0), (4.0, 2.5)])
def test_branches_in_turn_are_branches_in_a_batch(pipe, scales):
    options = dict(zip(("text_scale", "bridge_scale"), scales, strict=True))
    together, in_turn = (latents(pipe, "a red ball", 0, batched=batched, **options) for batched in (True, False))
    close(in_turn, together, 1e-4)


def test_sampling_is_its_formula(pipe):
    """Three steps by hand: noise of the clip's generator, the expert of each σ_v, dual guidance, Euler."""
    found = latents(pipe, "a red ball", 7, text_scale=4.0, bridge_scale=2.5, video_shift=5.0, audio_shift=2.0)
    generator = torch.Generator().manual_seed(7)
    z = [torch.randn(1, *shape, generator=generator) for shape in ((4, 3, 4, 6), (6, 19))]
    states = []
    for words in ([2, 3, 5, 1], [1]):
        ids = torch.tensor([words + [0] * (6 - len(words))])
        mask = (torch.arange(6) < len(words)).long()[None]
        states.append(pipe.text_encoder(input_ids=ids, attention_mask=mask)[0] * mask[..., None])
    clip = torch.full((1, 9, 32, 48, 3), 128, dtype=torch.uint8)
    clip[:, 0] = 255
    given = condition(Averages().encode_video(clip), 4)
    u = [1 - n * (1 - 0.003 / 1.002) / 3 for n in range(3)]
    sigma = [[*(a * x / (1 + (a - 1) * x) for x in u), 0.0] for a in (5.0, 2.0)]
    asked = []
    for n in range(3):
        asked.append(sigma[0][n] >= 0.9)
        tower = pipe.video_dit if asked[-1] else pipe.video_dit_2
        parts = tower, pipe.audio_dit, pipe.dual_tower_bridge
        tau = [torch.tensor([1000 * s[n]]) for s in sigma]
        with torch.no_grad():
            nothing, bridge, both = (
                joint_forward(*parts, torch.cat([z[0], given], 1), z[1], states[row], *tau, torch.tensor([on]))
                for row, on in ((1, 0.0), (1, 1.0), (0, 1.0))
            )
        for m in (0, 1):
            v = nothing[m] + 2.5 * (bridge[m] - nothing[m]) + 4.0 * (both[m] - bridge[m])
            z[m] = z[m] + v * (sigma[m][n + 1] - sigma[m][n])
    assert asked == [True, True, False]
    close(found, z, 1e-4)


def test_the_first_picture_is_seen_and_is_white_by_default(pipe):
    white = latents(pipe, "a red ball", 0)
    image = np.full((100, 60, 3), 255, np.uint8)
    close(latents(pipe, "a red ball", 0, image=image), white, 1e-6)
    image[:50] = 0
    assert (latents(pipe, "a red ball", 0, image=image)[0] - white[0]).abs().max() > 1e-3
    assert fitted_picture(image, 32, 48).shape == (32, 48, 3)
    codes = first_latents(Averages(), torch.full((1, 32, 48, 3), 255, dtype=torch.uint8), 9)
    assert (codes[:, :, 0] == 1).all() and codes[:, :, 1:].abs().max() < 0.01


def test_a_cascade_makes_the_video_by_itself():
    cascade = pipeline(directions="v2a")
    once = latents(cascade, "a red ball", 0, order="cascade", text_scale=3.0, bridge_scale=1.0)
    joint = latents(cascade, "a red ball", 0, text_scale=3.0, bridge_scale=1.0)
    close(once[:1], joint[:1], 1e-4)  # the video reads no sound either way
    assert (once[1] - joint[1]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="order='cascade': the model has directions='both'"):
        latents(pipeline(), "a", 0, order="cascade")


def test_saved_and_loaded_it_makes_the_same_clip(tmp_path, pipe):
    right = latents(pipe, "a red ball", 0)
    pipe.codec = None
    try:
        pipe.save_pretrained(tmp_path / "saved")
    finally:
        pipe.codec = Averages()
    card = (tmp_path / "saved" / "README.md").read_text()
    parameters = sum(weight.numel() for weight in tiny.model(vocab_size=16).parameters())
    assert "# mova\n" in card and "library_name: diffusers" in card and f"{parameters:,} parameters" in card
    loaded = MovaPipeline.from_pretrained(tmp_path / "saved")
    loaded.set_progress_bar_config(disable=True)
    loaded.codec = Averages()
    assert all(torch.equal(a, b) for a, b in zip(latents(loaded, "a red ball", 0), right, strict=True))
    assert {**loaded.settings.to_dict(), "_name_or_path": ""} == pipe.settings.to_dict()
    model = MovaModel.from_pretrained(tmp_path / "saved")
    batch = tiny.batch(model.config)
    again = tiny.model(vocab_size=16).eval()
    assert torch.equal(model.eval()(**batch).loss, again(**batch).loss)
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    index["video_dit"] = ["os", "system"]  # names of classes are read by nobody
    (tmp_path / "saved" / "model_index.json").write_text(json.dumps(index))
    MovaPipeline.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("options", [{"experts": 1}, {"directions": "off"}], ids=str)
def test_without_a_second_expert_or_a_bridge_it_is_saved_and_loaded(tmp_path, options):
    alone = pipeline(**options)
    assert (alone.video_dit_2 is None) == ("experts" in options)
    alone.codec = None
    right = latents(alone, "a red ball", 0)
    alone.save_pretrained(tmp_path)
    loaded = MovaPipeline.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(latents(loaded, "a red ball", 0), right, strict=True))


def test_offloaded_by_groups_it_makes_the_same_clip(pipe):
    right = latents(pipe, "a red ball", 0)
    offloaded = pipeline()
    for part in ("video_dit", "video_dit_2", "audio_dit", "dual_tower_bridge"):
        getattr(offloaded, part).enable_group_offload(
            onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
        )
    close(latents(offloaded, "a red ball", 0), right, 1e-6)


def test_offloaded_part_by_part_it_makes_the_same_clip(pipe):
    """A step needs an expert, the audio tower and the bridge at once, and nothing is called around the hooks."""
    right = latents(pipe, "a red ball", 0)
    offloaded = pipeline()
    offloaded.enable_model_cpu_offload(device="cpu")
    close(latents(offloaded, "a red ball", 0), right, 1e-6)
    held = [
        name for name in ("text_encoder", "video_dit", "video_dit_2") if hasattr(getattr(offloaded, name), "_hf_hook")
    ]
    assert held == ["text_encoder", "video_dit", "video_dit_2"]


def test_captions_end_with_their_end_token():
    ids, mask = tokenized(tokenizer(), ["a red ball", "", "a red ball bounces ? ? ? ?"], 6)
    assert ids.tolist() == [[2, 3, 5, 1, 0, 0], [1, 0, 0, 0, 0, 0], [2, 3, 5, 6, 8, 1]]
    assert mask.sum(1).tolist() == [4, 1, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 10}, "frames=10: must be 1 more than a multiple of 4; the nearest is 9"),
        ({"height": 40}, "height=40: must be a multiple of 16"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"audio_shift": 0.0}, "shift=0.0: must be above 0"),
        ({"order": "both"}, "order='both': must be one of 'joint', 'cascade'"),
        ({"generator": seeded(1, 2)}, "generator: 2 for 1 clips"),
    ],
)
def test_what_cannot_be_made_is_refused(pipe, options, message):
    with pytest.raises(ValueError, match=message):
        pipe("a", **{"steps": 1, **options})


# The release's layout


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    config, parts = tiny.parts()
    folder = tmp_path_factory.mktemp("release") / "MOVA"
    write_release(parts, folder, shard=200_000)
    return config, parts, folder


def test_a_release_is_read_and_written_bit_for_bit(release, tmp_path):
    _, parts, folder = release
    assert len(list((folder / "video_dit").glob("*.safetensors"))) > 1
    read = read_release(folder)
    assert list(read) == list(parts)
    for name, part in parts.items():
        weights = read[name].state_dict()
        assert weights.keys() == part.state_dict().keys()
        assert all(torch.equal(value, weights[key]) for key, value in part.state_dict().items())
    write_release(read, tmp_path / "again", shard=200_000)
    for path in folder.rglob("*.*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(folder)).read_bytes()
    settings = settings_of(*(read[n] for n in ("video_dit", "audio_dit", BRIDGE, "video_dit_2")))
    assert settings.head_dim == 16 and settings.audio_layers == 3 and settings.method.experts == 2


def test_names_are_a_bijection_and_strangers_are_refused(release):
    _, parts, _ = release
    for name in ("video_dit", "audio_dit"):
        own = list(parts[name].state_dict())
        named = [to_release(key) for key in own]
        assert len(set(named)) == len(own) and [to_diffusers(key) for key in named] == own
    assert to_diffusers("blocks.3.self_attn.o.bias") == "blocks.3.attn1.to_out.0.bias"
    assert to_diffusers("head.modulation") == "scale_shift_table"
    for key in ("blocks.0.attn3.q.weight", "head.body.weight", "blocks.0.modulation.weight.q"):
        with pytest.raises(ValueError, match="no weight of a tower has this name"):
            to_diffusers(key)


def test_what_is_read_computes_what_its_weights_say(release):
    config, _, folder = release
    read = read_release(folder)
    given = tiny.inputs(config)
    weights = []
    for name in ("video_dit_2", "audio_dit", BRIDGE):
        own = read[name].state_dict()
        weights.append({key if name == BRIDGE else to_release(key): value.double() for key, value in own.items()})
    right = reference.joint(
        *weights, *(x.double() for x in given), layers=(0, 1, 2), patch=(1, 2, 2), head_dim=16, freq_dim=32, out=4
    )
    with torch.no_grad():
        close(joint_forward(read["video_dit_2"], read["audio_dit"], read[BRIDGE], *given), right)


def test_names_of_classes_are_not_imported_and_defaults_are_not_guessed(release, tmp_path):
    _, parts, _ = release
    write_release(parts, tmp_path / "R")
    for name in parts:
        path = tmp_path / "R" / name / "config.json"
        said = json.loads(path.read_text())
        said["_class_name"], said["auto_map"] = "antigravity.Fly", {"AutoModel": "evil.Model"}
        path.write_text(json.dumps(said))
    assert list(read_release(tmp_path / "R")) == list(parts)
    path = tmp_path / "R" / BRIDGE / "config.json"
    said = json.loads(path.read_text())
    for missing in ("interaction_strategy", "apply_cross_rope"):
        path.write_text(json.dumps({key: value for key, value in said.items() if key != missing}))
        with pytest.raises(ValueError, match=f"dual_tower_bridge/config.json: '{missing}' is missing"):
            read_release(tmp_path / "R")
    with pytest.raises(FileNotFoundError, match="a release has video_dit"):
        read_release(tmp_path)


def test_an_index_that_leads_outside_or_does_not_fit_is_refused(release, tmp_path):
    _, parts, _ = release
    write_release(parts, tmp_path / "R", shard=200_000)
    path = tmp_path / "R" / "video_dit" / "diffusion_pytorch_model.safetensors.index.json"
    index = json.loads(path.read_text())
    key = next(iter(index["weight_map"]))
    for changed, message in (
        ({**index["weight_map"], key: "../x.safetensors"}, "lies outside the folder"),
        ({**index["weight_map"], "more": index["weight_map"][key]}, "shards and index differ, first in 'more'"),
    ):
        path.write_text(json.dumps({**index, "weight_map": changed}))
        with pytest.raises(ValueError, match=message):
            read_release(tmp_path / "R")


def test_what_a_release_cannot_say_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"directions='v2a'.* have no place in the release's layout"):
        write_release(tiny.parts(directions="v2a")[1], tmp_path / "R")
    assert not (tmp_path / "R").exists()


# LoRA


def test_fresh_adapters_change_nothing_and_train_alone():
    model = tiny.model()
    batch = tiny.batch(model.config)
    base = model.eval()(**batch).loss.detach()
    names = lora_targets(model)
    assert len(names) == len(set(names)) == 10 * (4 + 4 + 3) + 4 * 6
    adapted = get_peft_model(model, lora_config(model, rank=4))
    assert torch.equal(adapted.eval()(**batch).loss, base)
    adapted.train()
    adapted(**batch).loss.backward()
    trained = {name for name, weight in adapted.named_parameters() if weight.grad is not None}
    assert trained and all(".lora_" in name for name in trained)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.eval()
    changed = adapted(**batch).loss.detach()
    assert (changed - base).abs() > 1e-3 * base
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(**batch).loss, changed, rtol=1e-4, atol=0)


def test_layers_to_adapt_are_found_by_whole_names():
    model = tiny.model()
    assert not [name for name in lora_targets(model, ["attn1.to_q"]) if not name.endswith(".attn1.to_q")]
    with pytest.raises(ValueError, match="names='q': no linear layer ends so"):
        lora_targets(model.video_dit, ["q"])
