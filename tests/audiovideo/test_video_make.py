"""`fathom video make`: from a saved pipeline to a file that is read back."""

from __future__ import annotations

import json
import sys

import mova_tiny as tiny
import numpy as np
import pytest
from PIL import Image

from fathom.audiovideo import FlowMatchPairScheduler, MovaPipeline
from fathom.audiovideo.clips import read_clip
from fathom.audiovideo.generator import Generator
from fathom.audiovideo.pca_codecs import PcaCodec
from fathom.data.tokenizer import train_bpe
from tiny_checkpoint import run_cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    clips = Generator(frames=25, size=(32, 48), sample_rate=8000).clips(4)
    model = tiny.model(vocab_size=270, frames=25)
    made = MovaPipeline(
        scheduler=FlowMatchPairScheduler(),
        tokenizer=train_bpe(["a red ball bounces"] * 3, 260),
        **dict(model.named_children()),
    )
    made.settings, made.codec = model.config, PcaCodec.fit(clips, 4, 6, 160)
    folder = tmp_path_factory.mktemp("pipeline") / "model"
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def make(monkeypatch, capsys, folder):
    return lambda *more: run_cli(monkeypatch, capsys, "video", "make", folder, "--prompt", "a red ball", *more)


def test_a_clip_is_written_and_read_back(make, tmp_path):
    path = tmp_path / "clip.mp4"
    Image.fromarray(np.full((40, 40, 3), 90, np.uint8)).save(tmp_path / "first.png")
    image = ("--image", tmp_path / "first.png")
    code, out, err = make("-o", path, "--steps", "2", "--device", "cpu", *image, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said["clip"] == str(path) and said["seed"] == 0 and "offset_ms" in said
    clip = read_clip(path, frame_rate=24.0, sample_rate=8000)
    assert clip.frames.shape == (25, 32, 48, 3) and abs(len(clip.audio) / 8000 - 25 / 24) < 1 / 24
    plain = ("--text-scale", "1", "--bridge-scale", "1", "--in-turn")
    code, out, _ = make("-o", path, "--steps", "1", "--device", "cpu", *plain)
    assert code == 0 and f"{path}: 25 pictures, 1.04 s; " in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("-o", "clip.avi"), "--output clip.avi: name a file that ends in .mp4"),
        (("-o", "nowhere/clip.mp4"), "--output nowhere/clip.mp4: no folder nowhere; make it first"),
        (("--image", "none.png"), "--image none.png: no such file"),
    ],
)
def test_what_cannot_be_written_is_refused_first(make, more, message):
    code, _, err = make(*more)
    assert code == 2 and message in err


def test_a_folder_without_a_model_is_named(monkeypatch, capsys, tmp_path):
    code, _, err = run_cli(monkeypatch, capsys, "video", "make", tmp_path, "--prompt", "a")
    assert code == 2 and "no config.json in this folder, so it is no checkpoint" in err


def test_without_diffusers_it_names_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "fathom.audiovideo.pipeline")
    code, _, err = make("-o", "clip.mp4")
    assert code == 2 and "MovaPipeline needs diffusers: pip install 'fathom-lm[media]'" in err
