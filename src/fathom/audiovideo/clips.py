"""Clips: pictures and sound on one clock, written to and read from .mp4 files and folders of them.

Time 0 is the first picture. Picture i is shown from i / frame_rate on; sample j sounds at j / sample_rate.
PyAV does the coding (`pip install 'fathom-lm[media]'`) and is imported only when a file is read or written.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from scipy.signal import resample_poly

from fathom.writing import new_folder, whole, write_text

SEAM = 0.005  # seconds by which a block of sound may miss the end of the last one and yet follow it
INDEX = "clips.jsonl"  # of a folder: one line a clip


@dataclasses.dataclass(frozen=True)
class Clip:
    """Pictures with their sound.

    Attributes:
        frames: RGB pictures.
        frame_rate: pictures per second.
        audio: one channel, −1 … 1.
        sample_rate: samples per second.
        caption: what is seen and heard.
        events: seconds at which something happens that should be heard, where they are known.
        offset: seconds by which the sound is later than the picture, if known: 0 in a true pair; None: no sound.
    """

    frames: UInt8[np.ndarray, "F H W 3"]
    frame_rate: float
    audio: Float32[np.ndarray, " n"]
    sample_rate: int
    caption: str = ""
    events: tuple[float, ...] = ()
    offset: float | None = 0.0

    def __post_init__(self) -> None:
        if self.frames.ndim != 4 or self.frames.shape[-1] != 3 or self.frames.dtype != np.uint8 or not len(self.frames):
            raise ValueError(
                f"frames of shape {self.frames.shape}, {self.frames.dtype}: give at least one RGB picture as uint8 "
                "[F, H, W, 3]"
            )
        if self.audio.ndim != 1:
            raise ValueError(f"audio of shape {self.audio.shape}: give one channel, [samples]")

    @property
    def duration(self) -> float:
        """Seconds that the pictures last."""
        return len(self.frames) / self.frame_rate


def samples_of(frames: int, frame_rate: float, sample_rate: int) -> int:
    """The number of samples that last as long as the pictures: ⌊sample_rate · frames / frame_rate⌋, exact."""
    return math.floor(Fraction(sample_rate) * frames / Fraction(frame_rate).limit_denominator(100_000))


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ImportError("clips are read and written by PyAV: pip install 'fathom-lm[media]'") from error
    return av


# Writing


def write_clip(clip: Clip, path: Path, crf: int = 12) -> None:
    """Write H.264 (yuv420p) with AAC at the clip's own rates, in a file that a browser plays.

    The sound is written in two equal channels, cut or filled with silence to the length of the pictures. `crf`: 0 is
    the best picture, 51 the smallest file. Raises ValueError for sides that are odd, which yuv420p cannot hold, and for
    rates that AAC lacks; ImportError where PyAV or one of its encoders is missing.
    """
    av = _av()
    height, width = clip.frames.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(
            f"{path}: {width} × {height} pictures: H.264 with 4:2:0 colours needs even sides, such as "
            f"{width + width % 2} × {height + height % 2}"
        )
    encoders = [_encoder(av, name) for name in ("libx264", "aac")]
    rates = sorted(encoders[1].audio_rates or ())
    if rates and clip.sample_rate not in rates:
        near = min(rates, key=lambda rate: abs(rate - clip.sample_rate))
        raise ValueError(f"{path}: sample_rate={clip.sample_rate}: AAC has no such rate; the nearest is {near}")
    audio = fitted(clip.audio, samples_of(len(clip.frames), clip.frame_rate, clip.sample_rate))
    with (
        whole(path) as partial,
        av.open(str(partial), "w", format="mp4", options={"movflags": "+faststart"}) as file,
    ):
        rate = Fraction(clip.frame_rate).limit_denominator(100_000)
        pictures = file.add_stream("libx264", rate=rate, options={"crf": str(crf), "preset": "veryfast"})
        pictures.width, pictures.height, pictures.pix_fmt = width, height, "yuv420p"
        # frames hold the sRGB of a screen: say so, else players guess, by the size of the picture
        pictures.codec_context.colorspace, pictures.codec_context.color_range = 1, 1  # BT.709, limited
        # AAC has at most 6144 bits a channel in 1024 samples
        bits = min(192_000, 2 * 6 * clip.sample_rate)
        sound = file.add_stream("aac", rate=clip.sample_rate, layout="stereo", bit_rate=bits)
        for index, picture in enumerate(clip.frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
            frame.pts, frame.time_base = index, 1 / rate
            file.mux(pictures.encode(frame))
        file.mux(pictures.encode(None))
        size = 1024
        for start in range(0, len(audio), size):
            block = audio[start : start + size].astype(np.float32)
            frame = av.AudioFrame.from_ndarray(np.stack([block, block]), format="fltp", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = clip.sample_rate, start, Fraction(1, clip.sample_rate)
            file.mux(sound.encode(frame))
        file.mux(sound.encode(None))


def _encoder(av: Any, name: str) -> Any:
    try:
        return av.codec.Codec(name, "w")
    except av.codec.codec.UnknownCodecError as error:
        raise ImportError(
            f"this PyAV has no encoder {name!r}; the wheels on PyPI have it: pip install --force-reinstall av"
        ) from error


def fitted(audio: np.ndarray, samples: int) -> np.ndarray:
    """The first `samples` samples, filled with silence where there are fewer."""
    return np.pad(audio[:samples], (0, max(0, samples - len(audio))))


# Reading


@dataclasses.dataclass(frozen=True)
class Recording:
    """A decoded file at its own rates. times: when each picture is shown.   start: when the first sample sounds, both
    in seconds after the first picture.
    """

    frames: UInt8[np.ndarray, "F H W 3"]
    times: np.ndarray
    frame_rate: float
    audio: Float32[np.ndarray, " n"]
    start: float
    sample_rate: int
    duration: float

    def clip(
        self, frame_rate: float | None, sample_rate: int | None, frames: int | None = None, begin: float = 0.0
    ) -> Clip:
        """Pictures and sound from `begin` on at other rates, by time: picture i is the one shown at
        begin + i / frame_rate. Without `frames`: as many as there are."""
        frame_rate, sample_rate = frame_rate or self.frame_rate, sample_rate or self.sample_rate
        frames = frames or max(1, self.count(frame_rate))
        slack = 1e-3  # a timestamp in ticks may come after the moment that it stands for
        at = begin + np.arange(frames) / frame_rate
        shown = np.clip(np.searchsorted(self.times, at + slack, side="right") - 1, 0, len(self.times) - 1)
        audio = self.resampled(sample_rate).audio
        skip = round((begin - self.start) * sample_rate)
        audio = audio[skip:] if skip >= 0 else np.pad(audio, (-skip, 0))
        return Clip(
            self.frames[shown], frame_rate, fitted(audio, samples_of(frames, frame_rate, sample_rate)), sample_rate
        )

    def resampled(self, sample_rate: int) -> Recording:
        """The recording with its sound at another rate."""
        if sample_rate == self.sample_rate:
            return self
        common = math.gcd(sample_rate, self.sample_rate)
        audio = resample_poly(self.audio, sample_rate // common, self.sample_rate // common).astype(np.float32)
        return dataclasses.replace(self, audio=audio, sample_rate=sample_rate)

    def count(self, frame_rate: float) -> int:
        """The number of pictures at this rate that fit into the file's duration."""
        return math.floor(self.duration * frame_rate + 0.5)


def read_recording(path: Path, size: tuple[int, int] | None = None, shorter_side: int | None = None) -> Recording:
    """Decode a file. `size` (height, width): pictures are cut to these proportions about their centre and resized. Else
    `shorter_side` is how long that may be: larger pictures are made smaller.

    Raises FileNotFoundError; ValueError for a file that is no clip, is cut short, or has no picture or audio track.
    """
    av = _av()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with av.open(str(path)) as file:
            for kind, tracks in (("video", file.streams.video), ("audio", file.streams.audio)):
                if not tracks:
                    raise ValueError(f"{path}: no {kind} track; a clip here is pictures with their sound")
            pictures, sound = file.streams.video[0], file.streams.audio[0]
            pictures.thread_type = "AUTO"
            promised, seconds = pictures.frames, pictures.duration and float(pictures.duration * pictures.time_base)
            guessed = pictures.average_rate or pictures.guessed_rate or Fraction(24)
            # Matroska counts no pictures, and its header has the length of the whole file alone
            whole_file = file.duration / av.time_base if "matroska" in file.format.name and file.duration else 0.0
            frames, times, ends, blocks, rate = [], [], [], [], sound.rate
            for frame in file.decode(pictures, sound):
                if isinstance(frame, av.VideoFrame):
                    if size is None and shorter_side is not None:
                        share = min(1.0, shorter_side / min(frame.height, frame.width))
                        sides = frame.height, frame.width
                        size = tuple(round(side * share) for side in (sides[::-1] if _turns(frame) % 2 else sides))
                    frames.append(_picture(frame, size))
                    times.append(frame.time)
                    ends.append(frame.time + float((frame.duration or 0) * frame.time_base))
                else:
                    blocks.append((frame.time, _mono(frame)))
    except (av.error.FFmpegError, EOFError) as error:
        raise ValueError(f"{path}: not a readable clip, or cut short ({_said(error)})") from error
    if not frames or not blocks:
        raise ValueError(f"{path}: cut short: no {'sound' if frames else 'pictures'} could be read")
    # A file that was trimmed without coding it anew holds more pictures than it shows: its length decides.
    shown, frame = max(ends) - min(times), 1 / float(guessed)
    if len(frames) < promised and shown < (seconds or math.inf) - frame:
        raise ValueError(f"{path}: cut short: {len(frames)} of {promised} pictures could be read")
    last = max(*ends, blocks[-1][0] + len(blocks[-1][1]) / rate)
    if last < whole_file - max(0.5, 2 * frame):
        raise ValueError(f"{path}: cut short: {last:.2f} of {whole_file:.2f} s could be read")
    order = np.argsort(times, kind="stable")
    at = np.array(times)[order]
    first = at[0]
    start, audio = _joined(blocks, rate)
    return Recording(
        frames=np.stack([frames[i] for i in order]),
        times=at - first,
        frame_rate=float(guessed),
        audio=audio,
        start=start - first,
        sample_rate=rate,
        duration=max(float(seconds or 0), at[-1] - first + frame),
    )


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _turns(frame: Any) -> int:
    """Quarter turns to the left before a picture is shown, as phones store pictures rotated."""
    return round(frame.rotation / 90) % 4


def _picture(frame: Any, size: tuple[int, int] | None) -> np.ndarray:
    turns = _turns(frame)
    if turns % 2 and size is not None:
        size = size[::-1]
    return np.rot90(_stored_picture(frame, size), turns)


def _stored_picture(frame: Any, size: tuple[int, int] | None) -> np.ndarray:
    standard = {"src_colorspace": "ITU709"} if frame.colorspace == 1 else {}  # BT.601 is what is assumed otherwise
    if size is None:
        return frame.to_ndarray(format="rgb24", **standard)
    height, width = size
    scale = max(height / frame.height, width / frame.width)
    inner = (max(height, round(frame.height * scale)), max(width, round(frame.width * scale)))
    whole_frame = frame.to_ndarray(format="rgb24", width=inner[1], height=inner[0], interpolation="AREA", **standard)
    top, left = (inner[0] - height) // 2, (inner[1] - width) // 2
    return whole_frame[top : top + height, left : left + width]


def _mono(frame: Any) -> np.ndarray:
    samples = frame.to_ndarray()
    if samples.dtype.kind == "i":
        samples = samples / np.iinfo(samples.dtype).max
    elif samples.dtype.kind == "u":
        samples = samples / 127.5 - 1
    if not frame.format.is_planar:
        samples = samples.reshape(-1, len(frame.layout.channels)).T
    return samples.mean(axis=0).astype(np.float32)


def _joined(blocks: list[tuple[float, np.ndarray]], rate: int) -> tuple[float, np.ndarray]:
    """(Time of the first sample, samples). Blocks closer than `SEAM` seconds are joined without a gap:
    Matroska's times are whole milliseconds, and blocks placed by them would click. Longer gaps are filled
    with silence.
    """
    start, places, end = blocks[0][0], [], 0
    for time, block in blocks:
        start_at = round((time - start) * rate)
        places.append(end if abs(start_at - end) < SEAM * rate else start_at)
        end = places[-1] + len(block)
    audio = np.zeros(max(at + len(block) for at, (_, block) in zip(places, blocks)), np.float32)
    for at, (_, block) in zip(places, blocks):
        audio[max(0, at) : at + len(block)] = block[max(0, -at) :]
    return start, audio


def read_clip(
    path: Path,
    frame_rate: float | None = None,
    sample_rate: int | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    shorter_side: int | None = None,
) -> Clip:
    """The clip in a file, resampled by timestamps to these rates (default: the file's own), from its first picture on.

    `size` and `shorter_side` are those of `read_recording`. Raises ValueError if the file is shorter than `frames`
    pictures, and as `read_recording`.
    """
    recording = read_recording(path, size, shorter_side)
    there = recording.count(frame_rate or recording.frame_rate)
    if frames is not None and there < frames:
        raise ValueError(f"{path}: {recording.duration:.2f} s have {there} pictures at this rate, frames={frames}")
    return recording.clip(frame_rate, sample_rate, frames)


def loudness(clip: Clip) -> float | None:
    """Integrated loudness in LUFS (ITU-R BS.1770); None for silence, and for less than the 0.4 s of a block."""
    try:
        import pyloudnorm
    except ImportError as error:
        raise ImportError("loudness is measured by pyloudnorm: pip install 'fathom-lm[media]'") from error
    block = 0.4
    if len(clip.audio) <= block * clip.sample_rate or not clip.audio.any():
        return None
    meter = pyloudnorm.Meter(clip.sample_rate, block_size=block)
    measured = float(meter.integrated_loudness(clip.audio.astype(np.float64)))
    return measured if math.isfinite(measured) else None


def normalized(clip: Clip, target: float) -> Clip:
    """The clip at an integrated loudness of `target` LUFS, or less if samples would clip.

    A clip without a loudness, such as silence, stays as it is.
    """
    measured = loudness(clip)
    if measured is None:
        return clip
    gain = min(10 ** ((target - measured) / 20), 1 / float(np.abs(clip.audio).max()))
    return dataclasses.replace(clip, audio=clip.audio * np.float32(gain))


# Folders


def write_folder(clips: Iterable[Clip], folder: Path) -> int:
    """Write clips as 00000.mp4, 00001.mp4 … beside `clips.jsonl`, and return how many. Raises FileExistsError where the
    folder has files already."""
    lines: list[str] = []
    with new_folder(folder) as work:
        for clip in clips:
            name = f"{len(lines):05}.mp4"
            write_clip(clip, work / name)
            row = {"file": name, "caption": clip.caption, "events": list(clip.events), "offset": clip.offset}
            lines.append(json.dumps(row))
        write_text(work / INDEX, "".join(f"{line}\n" for line in lines))
    return len(lines)


@dataclasses.dataclass(frozen=True)
class ClipFolder:
    """The clips of a folder with `clips.jsonl`: one JSON object a line, with `file` (a path in the folder) and, where
    they are known, `caption`, `events` (seconds) and `offset`.

    A long file gives several clips, one after the other. The rest at its end, and files that are too short, are
    dropped; `dropped` names the short files. `kept` holds (line of the index, begin in seconds).

    Attributes:
        folder: where the index is.
        frames: pictures of a clip.
        frame_rate: pictures per second, to which all are resampled by their timestamps.
        sample_rate: samples per second, likewise.
        size: height and width.
        loudness: LUFS to which sound is brought; None: as it is.
        windows: whether a long file gives several clips, instead of only its first.
    """

    folder: Path
    frames: int
    frame_rate: float
    sample_rate: int
    size: tuple[int, int]
    loudness: float | None = None
    windows: bool = True
    rows: list[dict[str, Any]] = dataclasses.field(init=False, repr=False)
    kept: list[tuple[int, float]] = dataclasses.field(init=False, repr=False)
    dropped: list[str] = dataclasses.field(init=False, repr=False)
    last: dict[int, Recording] = dataclasses.field(init=False, repr=False, compare=False)  # line of the index: decoded

    def __post_init__(self) -> None:
        rows, kept, dropped = list(index_rows(self.folder / INDEX)), [], []
        for line, row in enumerate(rows):
            seconds, has_sound = duration(self.folder / row["file"])
            if not has_sound:
                raise ValueError(f"{self.folder / INDEX}, line {line + 1}: {row['file']} has no audio track")
            there = math.floor(seconds * self.frame_rate + 0.5) // self.frames
            if not there:
                dropped.append(row["file"])
            kept += [(line, n * self.frames / self.frame_rate) for n in range(there if self.windows else min(1, there))]
        if not kept:
            need = self.frames / self.frame_rate
            raise ValueError(f"{self.folder}: none of {len(rows)} files lasts {need:.2f} s ({self.frames} pictures)")
        for name, value in (("rows", rows), ("kept", kept), ("dropped", dropped), ("last", {})):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Clip:
        line, begin = self.kept[index]
        row = self.rows[line]
        if line not in self.last:  # the windows of a file follow one another: it is decoded once for all of them
            self.last.clear()
            self.last[line] = read_recording(self.folder / row["file"], self.size).resampled(self.sample_rate)
        recording = self.last[line]
        clip = recording.clip(self.frame_rate, self.sample_rate, self.frames, begin)
        events = tuple(time - begin for time in row.get("events", ()) if 0 <= time - begin < clip.duration)
        clip = dataclasses.replace(clip, caption=self.caption(index), events=events, offset=row.get("offset", 0.0))
        return clip if self.loudness is None else normalized(clip, self.loudness)

    def caption(self, index: int) -> str:
        """The caption of a clip, read without decoding the clip."""
        return self.rows[self.kept[index][0]].get("caption", "")

    def __iter__(self) -> Iterator[Clip]:
        return (self[index] for index in range(len(self)))


def index_rows(index: Path) -> Iterator[dict[str, Any]]:
    """The rows of a folder's clips.jsonl. Raises ValueError naming file and line of one that is none."""
    if not index.is_file():
        raise FileNotFoundError(f"{index}: no such file; it names the folder's clips, one JSON object a line")
    for number, line in enumerate(index.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{index}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict) or not isinstance(row.get("file"), str):
            raise ValueError(f'{index}, line {number}: give an object with "file", such as {{"file": "dog.mp4"}}')
        if not isinstance(row.get("caption", ""), str):
            raise ValueError(f"{index}, line {number}: caption={row['caption']!r}: give text, or leave it out")
        if not _times(row.get("events", [])):
            raise ValueError(f"{index}, line {number}: events={row['events']!r}: give seconds, such as [0.5, 1.25]")
        yield row


def _times(events: Any) -> bool:
    return isinstance(events, list) and all(isinstance(t, int | float) and not isinstance(t, bool) for t in events)


def duration(path: Path) -> tuple[float, bool]:
    """(seconds of pictures, whether there is sound) by the file's header. Raises as `read_recording`."""
    av = _av()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with av.open(str(path)) as file:
            if not file.streams.video:
                raise ValueError(f"{path}: no video track; a clip here is pictures with their sound")
            pictures = file.streams.video[0]
            known = pictures.duration * pictures.time_base if pictures.duration else None
            seconds = float(known if known is not None else Fraction(file.duration or 0, av.time_base))
            return seconds, bool(file.streams.audio)
    except av.error.FFmpegError as error:
        raise ValueError(f"{path}: not a readable clip, or cut short ({_said(error)})") from error
