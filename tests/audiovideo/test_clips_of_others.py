"""Files as phones and editors leave them: turned, trimmed, long; and what is kept of them between runs."""

from __future__ import annotations

import dataclasses
import json
import shutil

import av
import numpy as np
import pytest
import torch
from PIL import Image

from fathom.audiovideo import clips as clip_files
from fathom.audiovideo.clips import ClipFolder, duration, read_clip, read_recording, write_clip
from fathom.audiovideo.configuration import MovaConfig
from fathom.audiovideo.generator import Generator
from fathom.audiovideo.pipeline import fitted_picture
from fathom.data import DataConfig
from fathom.tasks import audiovideo
from fathom.tasks.audiovideo import AudioVideo
from fathom.train.run_folder import content


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("clips") / "clip.mp4"
    write_clip(Generator(seed=1).clip(0), found)
    return found


def copied(source, target, earlier=0.0, **options):
    """The packets of a file in another one, `earlier` seconds earlier."""
    with av.open(str(source)) as old, av.open(str(target), "w", options=options) as new:
        streams = {stream.index: new.add_stream_from_template(stream) for stream in old.streams}
        for packet in old.demux():
            if packet.dts is not None:
                back = round(earlier / packet.time_base)
                packet.pts, packet.dts = packet.pts - back, packet.dts - back
                packet.stream = streams[packet.stream.index]
                new.mux(packet)


def test_a_file_that_was_trimmed_without_coding_it_anew_is_whole(path, tmp_path):
    """Such a file keeps the pictures before the cut, which others need, and its header says not to show them."""
    copied(path, tmp_path / "trimmed.mp4", earlier=0.25, avoid_negative_ts="disabled")
    whole, trimmed = read_recording(path), read_recording(tmp_path / "trimmed.mp4")
    assert len(trimmed.frames) == 43 and np.array_equal(trimmed.frames, whole.frames[6:])
    assert np.abs(trimmed.audio[1000:9000] - whole.audio[3000:11000]).max() < 0.02
    assert duration(tmp_path / "trimmed.mp4")[0] == pytest.approx(43 / 24, abs=2e-3)


def test_matroska_that_is_cut_short_is_refused(path, tmp_path):
    copied(path, tmp_path / "whole.mkv")
    assert len(read_recording(tmp_path / "whole.mkv").frames) == 49
    content = (tmp_path / "whole.mkv").read_bytes()
    (tmp_path / "half.mkv").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"half.mkv: cut short: 1\.\d\d of 2\.\d\d s could be read"):
        read_clip(tmp_path / "half.mkv")


@pytest.mark.parametrize(
    ("matrix", "corner"), [((0, 1, -1, 0), (0, -1)), ((-1, 0, 0, -1), (-1, -1)), ((0, -1, 1, 0), (-1, 0))]
)
def test_pictures_stored_lying_down_are_shown_upright(matrix, corner, tmp_path):
    """By the matrix (a, b, c, d) of the file, (x, y) is shown at (a x + c y, b x + d y), y counted from above."""
    picture = np.full((32, 64, 3), 128, np.uint8)
    picture[:16, :32] = 255
    with av.open(str(tmp_path / "phone.mp4"), "w") as file:
        pictures, sound = file.add_stream("libx264", rate=24), file.add_stream("aac", rate=8000, layout="mono")
        pictures.width, pictures.height = 64, 32
        a, b, c, d = (part << 16 for part in matrix)
        pictures.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])
        for _ in range(3):
            file.mux(pictures.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(pictures.encode(None))
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        file.mux(sound.encode(frame))
        file.mux(sound.encode(None))
    upright = (32, 64) if matrix[0] else (64, 32)
    for options, size in (({}, upright), ({"shorter_side": 16}, tuple(n // 2 for n in upright)), ({"size": (48, 24)},
                          (48, 24))):  # fmt: skip
        shown = read_clip(tmp_path / "phone.mp4", **options).frames[0]
        assert shown.shape == (*size, 3)
        bright = [(y, x) for y in (0, -1) for x in (0, -1) if shown[y, x].mean() > 200]
        assert bright == [corner]


def test_pictures_are_taken_as_they_are_meant_or_refused():
    light = Image.new("RGB", (8, 16), "white")
    light.paste((0, 0, 0), (0, 0, 8, 8))
    light.getexif()[0x0112] = 3  # the camera was held upside down
    assert fitted_picture(light, 16, 8).mean(axis=(1, 2))[[0, -1]].tolist() == [255, 0]
    with pytest.raises(ValueError, match="image of float64: give RGB as uint8"):
        fitted_picture(np.ones((8, 8, 3)), 8, 8)


def test_a_long_file_is_decoded_once_for_all_its_windows(tmp_path, monkeypatch):
    write_clip(dataclasses.replace(Generator(), frames=100).clip(3), tmp_path / "long.mp4")
    (tmp_path / "clips.jsonl").write_text(json.dumps({"file": "long.mp4", "caption": "it bounces"}))
    read: list[str] = []
    plain = clip_files.read_recording
    monkeypatch.setattr(clip_files, "read_recording", lambda p, *rest: read.append(p.name) or plain(p, *rest))
    folder = ClipFolder(tmp_path, frames=33, frame_rate=24.0, sample_rate=16_000, size=(32, 32))
    assert [folder.caption(n) for n in range(3)] == ["it bounces"] * 3 and read == []
    found = [*folder]
    assert read == ["long.mp4"]
    whole = plain(tmp_path / "long.mp4", (32, 32))
    for n, clip in enumerate(found):
        alone = whole.clip(24.0, 16_000, 33, n * 33 / 24)
        assert np.array_equal(clip.frames, alone.frames) and np.array_equal(clip.audio, alone.audio)


@pytest.mark.parametrize(("row", "named"), [({"caption": None}, "caption=None"), ({"events": "0.5"}, "events='0.5'")])
def test_what_an_index_says_of_a_clip_is_checked(row, named, path, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(path.read_bytes())
    (tmp_path / "clips.jsonl").write_text(json.dumps({"file": "clip.mp4", **row}))
    with pytest.raises(ValueError, match=f"line 1: {named}"):
        ClipFolder(tmp_path, frames=49, frame_rate=24.0, sample_rate=8000, size=(64, 64))


# What is kept between runs


def task(**options) -> AudioVideo:
    sizes = {"frames": 25, "height": 32, "width": 32, "video_channels": 4, "audio_channels": 8}
    return AudioVideo(**{**sizes, "train_clips": 3, "held_out_clips": 2, **options})


def prepared(folder, cache, **options):
    data = DataConfig(train=str(folder), validation=None, tokenizer={"bpe": 258}, block_size=81)
    return task(**options).prepare(data, cache)


def test_latents_are_made_anew_when_what_they_are_made_of_changes(tmp_path):
    """Captions, sizes and rates of a folder's clips; the code of the codec and of the generator."""
    folder, cache = tmp_path / "set", tmp_path / "cache"
    folder.mkdir()
    clips = [*Generator(frames=25).clips(2)]
    for n, clip in enumerate(clips):
        write_clip(clip, folder / f"{n}.mp4")
    index = folder / "clips.jsonl"
    index.write_text("".join(json.dumps({"file": f"{n}.mp4", "caption": "a ball"}) + "\n" for n in (0, 1)))
    first = prepared(folder, cache)
    assert prepared(folder, cache).train.folder == first.train.folder
    first_again = shutil.copytree(folder, tmp_path / "copy")
    index.write_text("".join(json.dumps({"file": f"{n}.mp4", "caption": "a ring"}) + "\n" for n in (1, 0)))
    second = prepared(folder, cache)
    assert second.train.captions == ["a ring", "a ring"]
    assert torch.allclose(second.train[0]["video"], first.train[1]["video"], atol=2e-2)
    assert content(first)[0] == first.files != second.files  # what says that a finished run read other clips
    assert first.files == prepared(first_again, cache).files
    for options in ({"sample_rate": 16_000}, {"width": 48}, {"frames": 17}):
        assert prepared(folder, cache, **options).codec != second.codec


def test_a_clip_that_is_trained_on_is_not_held_out(path, tmp_path):
    for name, file in (("a", "../clip.mp4"), ("b", str(tmp_path / "clip.mp4"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "clips.jsonl").write_text(json.dumps({"file": file}))
    (tmp_path / "clip.mp4").write_bytes(path.read_bytes())
    for held_out in ("a", "a/", "b"):
        data = DataConfig(train=str(tmp_path / "a"), validation=f"{tmp_path}/{held_out}", tokenizer={"bpe": 258})
        with pytest.raises(ValueError, match=r"clip.mp4 is trained on; hold other clips out"):
            task().check(data)


@pytest.mark.parametrize("changed", ["generator", "dac", "pca_codecs"])
def test_latents_are_made_anew_by_other_code(changed, tmp_path, monkeypatch):
    first = prepared("generated", tmp_path)
    plain = audiovideo.sources
    monkeypatch.setattr(audiovideo, "sources", lambda *names: plain(*names) + ("new" if changed in names else ""))
    assert prepared("generated", tmp_path).train.folder != first.train.folder


def test_captions_are_as_long_in_training_as_in_sampling(tmp_path):
    data = DataConfig(train="generated", validation=None, tokenizer={"bpe": 258}, block_size=81)
    fields = {"preset": "tiny", "freq_dim": 32}
    for length in (32, 9):
        made = task(text_length=length)
        assert made.model_config(fields, data, None).text_length == length
        assert prepared("generated", tmp_path, text_length=length).train[0]["input_ids"].shape == (length,)
    with pytest.raises(ValueError, match=r"model.text_length=64: the task's clips have 32"):
        task().model_config({**fields, "text_length": 64}, data, None)


@pytest.mark.parametrize("patch", [[1, 2, 2], [1, 1, 1], [1, 4, 2]])
def test_a_batch_has_the_tokens_of_the_model_whatever_its_patches(patch):
    config = MovaConfig(preset="tiny", patch_size=patch)
    video = torch.zeros(3, *config.video_shape)
    tokens = video[:, 0].numel() // (patch[1] * patch[2]) + 3 * config.audio_shape[1]
    assert AudioVideo().tokens({"video": video}, config) == tokens
