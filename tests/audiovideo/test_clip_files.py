""".mp4 files: what is written is what is read, by time; what cannot be read is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import sys
from fractions import Fraction

import av
import numpy as np
import pyloudnorm
import pytest

from fathom.audiovideo.clips import (
    Clip,
    ClipFolder,
    normalized,
    read_clip,
    read_recording,
    samples_of,
    write_clip,
    write_folder,
)
from fathom.audiovideo.generator import Generator
from fathom.audiovideo.onsets import picture_events, sound_onsets


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A clip and its file."""
    clip, path = Generator(things=2).clip(0), tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_clip(clip, path)
    return clip, path


def test_rates_and_lengths_are_read_back_and_sound_stays_on_its_sample(pair):
    clip, path = pair
    with av.open(str(path)) as file:  # what any player reads
        pictures, sound = file.streams.video[0], file.streams.audio[0]
        assert (pictures.frames, pictures.average_rate, pictures.codec_context.name) == (49, 24, "h264")
        assert (sound.rate, sound.codec_context.name, pictures.codec_context.pix_fmt) == (8000, "aac", "yuv420p")
        assert pictures.start_time == 0 and abs(float(sound.duration * sound.time_base) - clip.duration) < 1 / 24
    back = read_clip(path)
    assert (back.frame_rate, back.sample_rate, back.frames.shape) == (24, 8000, clip.frames.shape)
    assert len(back.audio) == len(clip.audio) == samples_of(49, 24, 8000)
    lags = np.correlate(back.audio.astype(float), clip.audio.astype(float), "full")
    assert lags.argmax() == len(clip.audio) - 1  # the offset of sound against picture is 0 samples
    error = np.mean((back.frames.astype(float) - clip.frames) ** 2)
    assert 10 * np.log10(255**2 / error) > 32
    assert np.abs(picture_events(back.frames, 24) - clip.events).mean() < 0.01
    assert np.abs(sound_onsets(back.audio, 8000) - clip.events).mean() < 0.01


@pytest.mark.parametrize("rate, sample_rate", [(30000 / 1001, 44100), (25, 48000)])
def test_other_rates(tmp_path, rate, sample_rate):
    clip = Generator(frame_rate=rate, frames=31, sample_rate=sample_rate).clip(1)
    write_clip(clip, tmp_path / "clip.mp4")
    back = read_clip(tmp_path / "clip.mp4")
    assert back.frame_rate == pytest.approx(rate, rel=1e-9) and back.sample_rate == sample_rate
    assert back.frames.shape == clip.frames.shape and len(back.audio) == len(clip.audio)


def colours(count: int) -> np.ndarray:
    """Pictures that tell their number by their brightness."""
    return np.broadcast_to((8 * np.arange(count, dtype=np.uint8))[:, None, None, None], (count, 32, 32, 3))


def test_pictures_are_taken_by_timestamp(tmp_path):
    write_clip(Clip(colours(30), 30.0, np.zeros(8000, np.float32), 8000), tmp_path / "thirty.mp4")
    slower = read_clip(tmp_path / "thirty.mp4", frame_rate=12.0, frames=12)
    assert np.rint(slower.frames.mean(axis=(1, 2, 3)) / 8).tolist() == [int(i / 12 * 30) for i in range(12)]
    faster = read_clip(tmp_path / "thirty.mp4", frame_rate=60.0)
    assert np.rint(faster.frames.mean(axis=(1, 2, 3)) / 8).tolist() == [i // 2 for i in range(60)]
    with pytest.raises(ValueError, match="have 12 pictures at this rate, frames=13"):
        read_clip(tmp_path / "thirty.mp4", frame_rate=12.0, frames=13)


def write_by_hand(path, times, sound_start, sample_rate=8000, seconds=1.0):
    """Pictures at any times, in milliseconds, and a click 0.5 s after the first picture in sound that starts later."""
    with av.open(str(path), "w") as file:
        pictures = file.add_stream("libx264", rate=1000, options={"crf": "4", "bf": "0"})
        pictures.width = pictures.height = 32
        sound = file.add_stream("pcm_s16le" if path.suffix == ".mkv" else "aac", rate=sample_rate, layout="mono")
        for n, picture in enumerate(colours(len(times))):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = times[n], Fraction(1, 1000)
            file.mux(pictures.encode(frame))
        file.mux(pictures.encode(None))
        samples = np.zeros(round((seconds - sound_start) * sample_rate), np.int16)
        samples[round((0.5 - sound_start) * sample_rate)] = 30000
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base = sample_rate, Fraction(1, sample_rate)
        frame.pts = round((times[0] / 1000 + sound_start) * sample_rate)
        file.mux(sound.encode(frame))
        file.mux(sound.encode(None))


def test_pictures_at_uneven_times_and_sound_that_starts_later_keep_their_clock(tmp_path):
    times = [200, 250, 400, 420, 700, 1100]
    write_by_hand(tmp_path / "uneven.mkv", times, sound_start=0.3)
    recording = read_recording(tmp_path / "uneven.mkv")
    assert recording.times.tolist() == pytest.approx([t / 1000 - 0.2 for t in times], abs=2e-3)
    assert recording.start == pytest.approx(0.3, abs=2e-3)
    clip = recording.clip(10.0, 8000, 9)
    assert np.rint(clip.frames.mean(axis=(1, 2, 3)) / 8).tolist() == [0, 1, 2, 3, 3, 4, 4, 4, 4]
    assert clip.audio.argmax() / 8000 == pytest.approx(0.5, abs=2e-3)


def test_sound_in_blocks_of_rounded_times_has_no_seams(tmp_path):
    """Matroska rounds times to milliseconds: 1,024 samples at 48 kHz are 21.33 of them."""
    tone = (10_000 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)).astype(np.int16)
    with av.open(str(tmp_path / "tone.mkv"), "w") as file:
        pictures, sound = file.add_stream("libx264", rate=24), file.add_stream("pcm_s16le", rate=48_000, layout="mono")
        pictures.width = pictures.height = 32
        for picture in colours(24):
            file.mux(pictures.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        file.mux(pictures.encode(None))
        for start in range(0, 48_000, 1024):
            frame = av.AudioFrame.from_ndarray(tone[None, start : start + 1024], format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 48_000, start, Fraction(1, 48_000)
            file.mux(sound.encode(frame))
        file.mux(sound.encode(None))
    recording = read_recording(tmp_path / "tone.mkv")
    assert np.array_equal(np.rint(recording.audio * 32767), tone)


def test_a_folder_gives_its_clips_and_drops_short_ones(tmp_path):
    generator = Generator(shifted=0.5, seed=5)
    made = [*generator.clips(2), dataclasses.replace(generator, frames=25).clip(2)]
    made += [dataclasses.replace(generator, frames=100).clip(3)]
    assert write_folder(made, tmp_path / "set") == 4
    folder = ClipFolder(tmp_path / "set", frames=49, frame_rate=24.0, sample_rate=8000, size=(32, 32))
    assert folder.dropped == ["00002.mp4"] and len(folder) == 4
    assert [line for line, _ in folder.kept] == [0, 1, 3, 3]
    for clip, source in zip(folder, made[:2]):
        assert clip.frames.shape == (49, 32, 32, 3) and len(clip.audio) == 16333
        assert (clip.caption, clip.events, clip.offset) == (source.caption, source.events, source.offset)
    second = folder[3]
    begin = 49 / 24
    assert second.events == pytest.approx([t - begin for t in made[3].events if 0 <= t - begin < begin])
    assert np.abs(second.audio - made[3].audio[16333 : 2 * 16333]).max() < 0.05
    assert len(dataclasses.replace(folder, windows=False)) == 3
    with pytest.raises(ValueError, match="none of 4 files lasts 8"):
        dataclasses.replace(folder, frames=193)
    with pytest.raises(FileExistsError):
        write_folder(made, tmp_path / "set")


def test_pictures_are_cut_about_their_centre(tmp_path):
    frames = np.zeros((24, 32, 64, 3), np.uint8)
    frames[:, :, 16:48] = 200  # the middle square
    write_clip(Clip(frames, 24.0, np.zeros(8000, np.float32), 8000), tmp_path / "wide.mp4")
    middle = read_clip(tmp_path / "wide.mp4", size=(16, 16)).frames
    assert read_clip(tmp_path / "wide.mp4", shorter_side=24).frames.shape == (24, 24, 48, 3)
    assert read_clip(tmp_path / "wide.mp4", shorter_side=100).frames.shape == frames.shape
    assert middle.shape == (24, 16, 16, 3) and np.abs(middle.astype(int) - 200).mean() < 4


def test_loudness_is_what_the_standard_measures():
    clip = Generator(seed=8).clip(2)
    louder = normalized(clip, -33.0)
    assert pyloudnorm.Meter(8000).integrated_loudness(louder.audio.astype(float)) == pytest.approx(-33, abs=0.05)
    assert np.abs(normalized(clip, 0.0).audio).max() == pytest.approx(1)  # as loud as it gets without clipping
    silent = dataclasses.replace(clip, audio=np.zeros_like(clip.audio))
    assert normalized(silent, -23.0) is silent


def test_what_is_no_clip_is_refused_in_a_line_that_names_it(pair, tmp_path, monkeypatch):
    _, path = pair
    whole = path.read_bytes()
    with pytest.raises(FileNotFoundError, match=r"absent.mp4: no such file"):
        read_clip(tmp_path / "absent.mp4")
    for name, content in {"text": b"not a film" * 50, "empty": b"", "head": whole[:300]}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: (not a readable clip, or cut short|no video track)"):
            read_clip(tmp_path / name)
    for share in (0.3, 0.6, 0.9):
        (tmp_path / "half.mp4").write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"half.mp4: (not a readable clip, or )?cut short"):
            read_clip(tmp_path / "half.mp4")
    for kind in ("video", "audio"):
        with av.open(str(path)) as source, av.open(str(tmp_path / "other.mp4"), "w") as target:
            stream = getattr(source.streams, {"video": "audio", "audio": "video"}[kind])[0]
            copy = target.add_stream_from_template(stream)
            for packet in source.demux(stream):
                if packet.dts is not None:
                    packet.stream = copy
                    target.mux(packet)
        with pytest.raises(ValueError, match=f"other.mp4: no {kind} track"):
            read_clip(tmp_path / "other.mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"pip install 'fathom-lm\[media\]'"):
        read_clip(path)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(pair, tmp_path, monkeypatch):
    clip, _ = pair
    path = tmp_path / "clip.mp4"
    with pytest.raises(ValueError, match="64 × 64"):
        write_clip(dataclasses.replace(clip, frames=clip.frames[:, :63]), path)
    with pytest.raises(ValueError, match="sample_rate=8100: AAC has no such rate; the nearest is 8000"):
        write_clip(dataclasses.replace(clip, sample_rate=8100), path)

    def missing(name, mode):
        raise av.codec.codec.UnknownCodecError(name)

    monkeypatch.setattr(av.codec, "Codec", missing)
    with pytest.raises(ImportError, match="no encoder 'libx264'"):
        write_clip(clip, path)
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_is_wrong_is_named_by_its_line(pair, tmp_path):
    options = {"frames": 49, "frame_rate": 24.0, "sample_rate": 8000, "size": (64, 64)}
    with pytest.raises(FileNotFoundError, match=r"clips.jsonl: no such file"):
        ClipFolder(tmp_path, **options)
    for line, named in (("{", "line 2: not JSON"), ('{"caption": "x"}', "line 2: give an object with")):
        (tmp_path / "clip.mp4").write_bytes(pair[1].read_bytes())
        (tmp_path / "clips.jsonl").write_text(json.dumps({"file": "clip.mp4"}) + "\n" + line)
        with pytest.raises(ValueError, match=named):
            ClipFolder(tmp_path, **options)
