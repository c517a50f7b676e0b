"""Codecs learn: the loss of both falls, statistics follow, and what cannot be trained is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from fathom.audiovideo.codec_training import (
    Crops,
    PictureCrop,
    PictureLoss,
    SoundCrop,
    SoundLoss,
    Training,
    set_statistics,
    start,
    train,
)
from fathom.audiovideo.codecs import NeuralCodec
from fathom.audiovideo.dac import Dac
from fathom.audiovideo.generator import Generator

GENERATOR = Generator(frames=25, size=(32, 32))


class Same(Crops):
    """One batch of crops again and again, which a codec can learn by heart."""

    def __getitem__(self, n):
        known = self.__dict__.setdefault("known", {})
        if n % 2 not in known:
            known[n % 2] = super().__getitem__(n % 2)
        return known[n % 2]


def test_both_codecs_learn_and_latents_get_unit_variance():
    torch.manual_seed(0)
    training = Training(steps=30, batch=2, lr=5e-3)
    video = AutoencoderKLWan(base_dim=3, dim_mult=[1] * 4, num_res_blocks=1, temperal_downsample=[False, True, True])
    losses = train(PictureLoss(video, 1e-6), Same(GENERATOR, PictureCrop(5, 32), 60), training, lambda _: None)
    assert len(losses) == 30 and np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    audio = Dac(4, (2, 4, 4, 5), 8, 64, (5, 4, 4, 2), 8000)
    start(audio)
    losses = train(SoundLoss(audio, 1e-6), Same(GENERATOR, SoundCrop(1600), 60), training, lambda _: None)
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    set_statistics(video, GENERATOR, 4)
    codec = NeuralCodec(video, audio, 24.0)
    latents = torch.cat([codec.encode(clip)[0].flatten(1) for clip in GENERATOR.clips(4)], dim=1)
    assert latents.mean(dim=1).abs().max() < 1e-3 and (latents.std(dim=1) - 1).abs().max() < 1e-3


def test_a_started_dac_keeps_the_size_of_its_signal_at_any_width():
    for width in (4, 24):
        torch.manual_seed(0)
        dac = Dac(width, (2, 3, 5), 8, 8 * width, (5, 3, 2), 8000)
        sound = torch.randn(1, 1, 900)
        with torch.no_grad():
            start(dac)
            assert 0.05 < dac(sound).std() < 1 and dac.moments(sound)[1].mean() == pytest.approx(-6, abs=1)


def test_crops_are_the_eventful_places_of_each_clip():
    crops = Crops(GENERATOR, SoundCrop(800), 5)
    assert torch.equal(crops[3], crops[3]) and crops[3].shape == (1, 800)
    loud = np.mean([float(crops[n].square().mean()) for n in range(5)])
    assert loud > np.mean([float(np.square(clip.audio).mean()) for clip in GENERATOR.clips(5)])
    picture = Crops(GENERATOR, PictureCrop(9, 32), 5)[2]
    assert picture.shape == (3, 9, 32, 32) and picture.abs().max() <= 1 and len(crops) == 5


def test_too_few_steps_or_crops_are_refused():
    with pytest.raises(ValueError, match="steps=5"):
        Training(steps=5)
    with pytest.raises(ValueError, match="crops: 10, and 30 steps need 60"):
        train(SoundLoss(Dac(4, (2,), 4, 4, (2,)), 0.0), Crops(GENERATOR, SoundCrop(), 10), Training(steps=30, batch=2))
    with pytest.raises(ValueError, match="graph=True: CUDA graphs need one process on a GPU"):
        many = Crops(GENERATOR, SoundCrop(), 60)
        train(SoundLoss(Dac(4, (2,), 4, 4, (2,)), 0.0), many, Training(steps=30, batch=2, graph=True))


def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path):
    def run(stop, folder):
        torch.manual_seed(0)
        dac = Dac(4, (2, 5), 4, 16, (5, 2), 8000)
        start(dac)
        crops = Crops(GENERATOR, SoundCrop(800), 22)

        def said(text):
            if text.startswith(stop):
                raise KeyboardInterrupt

        try:
            losses = train(SoundLoss(dac, 1e-6), crops, Training(steps=22, batch=1), said, folder)
        except KeyboardInterrupt:
            return run("never", folder)
        return losses, dac.state_dict()

    whole, weights = run("never", tmp_path / "whole")
    again, same = run("step 13", tmp_path / "cut")
    assert len(again) == 22 and again == pytest.approx(whole, rel=1e-5)
    assert all(torch.allclose(weights[name], same[name], atol=1e-6) for name in weights)
    with pytest.raises(ValueError, match="minutes=1"):
        both = Training(steps=30, batch=1, minutes=1)
        train(SoundLoss(Dac(4, (2,), 4, 4, (2,)), 0.0), Crops(GENERATOR, SoundCrop(), 99), both, state=tmp_path)
