"""Codecs: shapes, what they keep, what is refused; the DAC against its layers written out, and under old names."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from torch.nn import functional

from fathom.audiovideo.checkpoints import read_codec
from fathom.audiovideo.codecs import NeuralCodec, check_frames, load_codec
from fathom.audiovideo.dac import Dac
from fathom.audiovideo.generator import Generator
from fathom.audiovideo.metrics import coding_loss
from fathom.audiovideo.pca_codecs import PcaCodec

SHORT = Generator(frames=25, things=0)


@pytest.fixture(scope="module")
def pca():
    return PcaCodec.fit(SHORT.clips(24), video_channels=24, audio_channels=48)


def tiny_dac(**options) -> Dac:
    torch.manual_seed(0)
    return Dac(encoder_dim=4, encoder_rates=(2, 4, 4, 5), latent_dim=6, decoder_dim=64, decoder_rates=(5, 4, 4, 2),
               sample_rate=8000, **options)  # fmt: skip


@pytest.fixture(scope="module")
def neural():
    torch.manual_seed(0)
    downsample = [False, True, True]
    video = AutoencoderKLWan(base_dim=3, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=downsample)
    assert sum(weight.numel() for weight in video.parameters()) == 13_861
    return NeuralCodec(video, tiny_dac(), frame_rate=24.0)


@pytest.mark.parametrize("kind", ["pca", "neural"])
def test_shapes_rates_and_a_saved_copy(kind, tmp_path, request):
    codec, clip = request.getfixturevalue(kind), SHORT.clip(100)
    assert (codec.video_strides, codec.audio_stride, codec.frame_rate, codec.sample_rate) == ((4, 8, 8), 160, 24, 8000)
    video, audio = codec.encode(clip)
    assert video.shape == (codec.video_channels, 7, 8, 8) and audio.shape == (codec.audio_channels, 53)
    assert codec.decode_audio(audio[None]).shape == (1, 53 * 160) and math.ceil(len(clip.audio) / 160) == 53
    coded = codec.through(clip)
    assert coded.frames.shape == clip.frames.shape and coded.audio.shape == clip.audio.shape
    assert coded.frames.dtype == np.uint8 and coded.audio.dtype == np.float32
    codec.save(tmp_path / "codec")
    again = load_codec(tmp_path / "codec")
    assert all(torch.equal(one, other) for one, other in zip(again.encode(clip), (video, audio)))
    both = codec.encode_video(torch.from_numpy(np.stack([clip.frames, SHORT.clip(101).frames])))
    assert torch.allclose(both[0], video, atol=1e-5)


def test_the_first_picture_is_coded_alone(pca, neural):
    frames = torch.from_numpy(SHORT.clip(3).frames)[None]
    for codec in (pca, neural):
        with torch.no_grad():
            assert torch.allclose(codec.encode_video(frames[:, :1]), codec.encode_video(frames)[:, :, :1], atol=1e-4)


def test_components_are_those_of_the_singular_value_decomposition():
    clips = list(SHORT.clips(3))
    codec = PcaCodec.fit(clips, video_channels=5, audio_channels=160)
    x = np.concatenate([np.pad(c.audio, (0, -len(c.audio) % 160)).reshape(-1, 160) for c in clips]).astype(np.float64)
    _, values, vectors = np.linalg.svd(x - x.mean(0), full_matrices=False)
    agree = np.abs(np.sum(codec.audio.components[:8].numpy() * vectors[:8], axis=1))
    assert agree == pytest.approx(1, abs=1e-3)
    assert codec.audio.scale[:8].numpy() == pytest.approx(values[:8] / math.sqrt(len(x)), rel=1e-3)
    whole = codec.through(clips[0]).audio  # with all components nothing is lost
    assert np.abs(whole - clips[0].audio).max() < 1e-3
    patches = np.concatenate([c.frames[0].reshape(8, 8, 8, 8, 3).swapaxes(1, 2).reshape(64, 192) for c in clips])
    patches = patches / 127.5 - 1
    values = np.linalg.svd(patches - patches.mean(0), compute_uv=False)
    assert codec.first.scale[:4].numpy() == pytest.approx(values[:4] / math.sqrt(len(patches)), rel=1e-3)


def test_what_components_keep(pca):
    lost = coding_loss(pca, SHORT.clips(8, first=200))
    assert lost["clips"] == 8 and lost["psnr_db"] > 28 and lost["psnr_db_worst"] <= lost["psnr_db"]
    assert lost["events_moved_frames"][0] < 0.25


def test_what_does_not_fit_is_refused_with_the_nearest(pca, neural):
    clip = SHORT.clip(0)
    for frames, near in ((24, 25), (26, 25), (2, 1), (8, 9)):
        with pytest.raises(
            ValueError, match=f"frames={frames}: must be 1 more than a multiple of 4; the nearest is {near}"
        ):
            check_frames((1, frames, 64, 64, 3), (4, 8, 8))
    for codec in (pca, neural):
        with pytest.raises(ValueError, match="64 × 60: sides must be multiples of 8 and 8; the nearest are 64 × 64"):
            codec.encode_video(torch.zeros(1, 5, 64, 60, 3, dtype=torch.uint8))
        with pytest.raises(ValueError, match="frame_rate=25: the codec was made for 24"):
            codec.encode(dataclasses.replace(clip, frame_rate=25.0))
        with pytest.raises(ValueError, match="sample_rate=16000: the codec was made for 8000"):
            codec.encode(dataclasses.replace(clip, sample_rate=16000))
        with pytest.raises(ValueError, match=r"give \[B, samples\]"):
            codec.encode_audio(torch.zeros(3, 1, 160))
    with pytest.raises(ValueError, match="193 channels"):
        PcaCodec.fit(SHORT.clips(1), video_channels=193)
    with pytest.raises(ValueError, match="none given"):
        PcaCodec.fit([])


def test_a_folder_of_another_kind_is_refused_and_imports_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"codec.json"):
        load_codec(tmp_path)
    (tmp_path / "codec.json").write_text(json.dumps({"kind": "os.system", "frame_rate": 24}))
    with pytest.raises(ValueError, match=r"kind='os.system' is none of pca, neural"):
        load_codec(tmp_path)


# DAC


def test_samples_and_latents_for_odd_and_even_strides():
    for rates in ((2, 3), (3, 5), (2, 4, 5), (8,)):
        dac = Dac(4, rates, 6, 4 * 2 ** len(rates), rates[::-1], 8000)
        hop = math.prod(rates)
        for samples in (1, hop - 1, hop, hop + 1, 3 * hop, 3 * hop + 2):
            latents = dac.encode(torch.randn(2, 1, samples))
            assert latents.shape == (2, 6, math.ceil(samples / hop))
            assert dac.decode(latents).shape == (2, 1, latents.shape[2] * hop)
    with pytest.raises(ValueError, match=r"product must be the encoder's, 6, such as \(3, 2\)"):
        Dac(4, (2, 3), 6, 16, (5, 2))


def test_the_mode_is_deterministic_and_in_float32_under_autocast():
    dac, sound = tiny_dac(), torch.randn(1, 1, 800)
    with torch.no_grad():
        latents = dac.encode(sound)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = dac.encode(sound)
            assert again.dtype == dac.decode(again).dtype == torch.float32
        assert torch.equal(latents, again) and torch.equal(latents, dac.moments(sound)[0])


def old_names(state):
    """Names of files written with PyTorch's first weight norm, which the release's are."""
    return {
        name.replace("parametrizations.weight.original0", "weight_g").replace(
            "parametrizations.weight.original1", "weight_v"
        ): value
        for name, value in state.items()
    }


def literal(state, x, rates):
    """The autoencoder layer by layer, from old names: weight = g · v / |v| over all axes but the first."""

    def weight(name):
        v, g = state[f"{name}.weight_v"], state[f"{name}.weight_g"]
        return g * v / v.pow(2).sum(dim=(1, 2), keepdim=True).sqrt(), state[f"{name}.bias"]

    def snake(name, x):
        alpha = state[f"{name}.alpha"]
        return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)

    def units(prefix, first, x):
        for n, dilation in enumerate((1, 3, 9)):
            p = f"{prefix}.block.{first + n}.block"
            inner = functional.conv1d(snake(f"{p}.0", x), *weight(f"{p}.1"), padding=3 * dilation, dilation=dilation)
            x = x + functional.conv1d(snake(f"{p}.2", inner), *weight(f"{p}.3"))
        return x

    h = functional.conv1d(x, *weight("encoder.block.0"), padding=3)
    for n, stride in enumerate(rates, start=1):
        p = f"encoder.block.{n}"
        h = snake(f"{p}.block.3", units(p, 0, h))
        h = functional.conv1d(h, *weight(f"{p}.block.4"), stride=stride, padding=math.ceil(stride / 2))
    n = len(rates) + 1
    h = functional.conv1d(snake(f"encoder.block.{n}", h), *weight(f"encoder.block.{n + 1}"), padding=1)
    latents = functional.conv1d(h, state["quant_conv.weight"], state["quant_conv.bias"]).chunk(2, dim=1)[0]
    h = functional.conv1d(latents, state["post_quant_conv.weight"], state["post_quant_conv.bias"])
    h = functional.conv1d(h, *weight("decoder.model.0"), padding=3)
    for n, stride in enumerate(reversed(rates), start=1):
        p = f"decoder.model.{n}"
        h = functional.conv_transpose1d(
            snake(f"{p}.block.0", h), *weight(f"{p}.block.1"), stride=stride, padding=math.ceil(stride / 2),
            output_padding=stride % 2,
        )  # fmt: skip
        h = units(p, 2, h)
    n = len(rates) + 1
    h = functional.conv1d(snake(f"decoder.model.{n}", h), *weight(f"decoder.model.{n + 1}"), padding=3)
    return latents, torch.tanh(h)


def test_weights_under_old_names_load_and_compute_what_the_layers_do():
    source = tiny_dac().double()
    with torch.no_grad():
        for weight in source.parameters():  # so that no part is at a value that hides it
            weight.copy_(torch.randn_like(weight) * 0.3 + 0.3)
    old = old_names(source.state_dict())
    assert not any("parametrizations" in name for name in old)
    assert {"encoder.block.0.weight_g", "decoder.model.1.block.1.weight_v", "quant_conv.weight"} < set(old)
    fresh = tiny_dac().double()
    fresh.load_state_dict(old)
    assert old_names(fresh.state_dict()).keys() == old.keys()
    sound = torch.randn(2, 1, 480, dtype=torch.float64)
    with torch.no_grad():
        latents, decoded = literal(old, sound, (2, 4, 4, 5))
        fresh, sound = fresh.float(), sound.float()  # sound is coded in float32
        assert torch.allclose(fresh.encode(sound).double(), latents, rtol=1e-4, atol=1e-5 * latents.abs().max())
        assert torch.allclose(fresh.decode(latents).double(), decoded, atol=1e-3)


def test_a_release_is_read_and_written_one_for_one():
    source = tiny_dac()
    config, weights = source.released()
    assert weights.keys() == old_names(source.state_dict()).keys() and len(weights) == len(source.state_dict())
    released = {**config, "n_codebooks": 9, "continuous": True, "_class_name": "os.system"}
    again = Dac.from_release(json.loads(json.dumps(released)), weights)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in source.state_dict().items())
    assert again.released()[0] == json.loads(json.dumps(config))
    for name, fewer, said in (
        ("latent_dim", weights, "'latent_dim' is missing"),
        ("", {name: weight for name, weight in weights.items() if name != "quant_conv.bias"}, "quant_conv.bias"),
        ("", {**weights, "quantizer.codes": weights["quant_conv.bias"]}, "quantizer.codes"),
    ):
        with pytest.raises(ValueError, match=said):
            Dac.from_release({key: value for key, value in config.items() if key != name}, fewer)


def test_the_release_has_its_modules_and_hop():
    with torch.device("meta"):
        release = Dac()
    assert release.hop == 960 and release.config.sample_rate == 48_000
    assert old_names(release.state_dict())["encoder.block.5.block.4.weight_v"].shape == (4096, 2048, 16)
    assert old_names(release.state_dict())["decoder.model.1.block.1.weight_v"].shape == (2048, 1024, 16)


def test_the_codec_of_a_release_is_read_from_its_folders(neural, tmp_path):
    neural.video.save_pretrained(tmp_path / "video_vae")
    folder = tmp_path / "audio_vae"
    folder.mkdir()
    config, weights = neural.audio.released()
    (folder / "config.json").write_text(json.dumps({"_class_name": "DAC", "n_codebooks": 9, **config}))
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    clip = SHORT.clip(100)
    read = read_codec(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(read.encode(clip), neural.encode(clip)))
    del config["sample_rate"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="audio_vae: config of the DAC: 'sample_rate' is missing"):
        read_codec(tmp_path)
