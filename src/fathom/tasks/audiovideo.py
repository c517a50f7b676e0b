"""Pictures with their sound: what MOVA is trained and judged on (fathom.audiovideo).

Clips are encoded once, and the towers learn on latents. Noise, noise levels and dropout are drawn by the seed and a
clip's number in the run, so that they are the same on any number of devices and after a resume. Scores are the error of
predicted velocities on held-out clips at fixed noise levels, and the sync of clips that the model makes from held-out
captions and first pictures: whether sounds come when something happens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fathom.audiovideo.configuration import MovaConfig, fields
from fathom.audiovideo.cost import forward_flops
from fathom.data import DataConfig, PreparedData, load_tokenizer
from fathom.data.prepared import build_once, cache_key, make_tokenizer
from fathom.data.tokenizer import tokenizer_hash
from fathom.models.device import device_of
from fathom.models.method import check_number, check_range
from fathom.tasks.base import Sample, Score, Sizes, Task, register_task

if TYPE_CHECKING:
    from fathom.audiovideo.clips import Clip

GENERATED = "generated"
HELD_OUT = 1_000_000  # number of the first generated clip that is held out
NOISE_SEED = 0  # of held-out clips
FILES_SEEN = 256  # of a folder, to tell it from another one
BATCH = 16  # clips that are encoded, judged or made at once
FAR = 500.0  # ms that stand for the offset of clips in which no sound belongs to an event
DRAWN = ("actions", "materials", "colours", "thing_sizes")  # options that say what a generated thing may be
GOLDEN = (math.sqrt(5) - 1) / 2


@register_task("audiovideo")
@dataclass(frozen=True)
class AudioVideo(Task):
    """Options:

    frames, frame_rate, height, width: of a clip, in pictures, pictures per second and pixels.
    sample_rate: samples of sound per second.
    codec: "pca", fitted to the training clips, or the folder of a codec.
    video_channels, audio_channels: of the codec "pca".
    loudness: LUFS to which the sound of files is brought; None: as it is.
    text_length: tokens of a caption, and of a prompt; longer ones are cut.
    train_clips, held_out_clips: number of generated clips; a folder gives all of its clips, up to `data.max_documents`.
    actions: of generated clips, "bounce" and "flash".
    things: in a generated clip, 1, 2, or 0 for either.
    materials, colours, thing_sizes: of generated things; None: all.
    fixed: generated things that flash stand in one place, before one wall; when they flash differs.
    flashes: the most flashes of a generated thing.
    shifted, silent: shares of generated training clips whose sound comes at the wrong time, or not at all.
    made: number of held-out captions and pictures from which a model makes clips to be judged.
    steps: of sampling.
    text_scale, bridge_scale: guidance of sampling.
    """

    frames: int = 49
    frame_rate: float = 24.0
    height: int = 64
    width: int = 64
    sample_rate: int = 8000
    codec: str = "pca"
    video_channels: int = 16
    audio_channels: int = 32
    loudness: float | None = None
    text_length: int = 32
    train_clips: int = 2000
    held_out_clips: int = 200
    actions: tuple[str, ...] = ("bounce", "flash")
    things: int = 1
    materials: tuple[str, ...] | None = None
    colours: tuple[str, ...] | None = None
    thing_sizes: tuple[str, ...] | None = None
    fixed: bool = False
    flashes: int = 3
    shifted: float = 0.0
    silent: float = 0.0
    made: int = 16
    steps: int = 25
    text_scale: float = 1.0
    bridge_scale: float = 1.0

    summary = "Make pictures and their sound by two diffusion transformers and a bridge."
    scores = (
        Score(
            "velocity_error",
            "squared error of velocities",
            "lower",
            "The mean squared error of the predicted velocities of held-out clips, at a fixed noise level each: of the "
            "video plus of the sound.",
        ),
        Score("video_error", "squared error", "lower", "The video's part of it."),
        Score("audio_error", "squared error", "lower", "The sound's part of it."),
        Score(
            "offset_ms",
            "ms",
            "lower",
            "In clips that the model makes: the mean distance of a sound from the event that it belongs to, within "
            "half a second; 500 where nothing belongs together.",
        ),
        Score(
            "within_frame",
            "of the events",
            "higher",
            "In clips that the model makes: the share of the events that are seen and are heard within the time of one "
            "picture.",
        ),
        Score(
            "together",
            "of events and sounds",
            "higher",
            "In clips that the model makes: of all events and sounds, the share that are seen and heard within the "
            "time of one picture. Sounds without an event lower it.",
        ),
    )
    held_out = "held-out clips"
    loss_unit = "squared error"
    answer = "clip"
    cost_heading = "FLOPs per clip"
    reference_name = "mean"
    reference_note = "The mean model knows only the average latents."
    samples_note = "Clips made of held-out captions and first pictures"
    checkpoint_fields = ("mova",)
    numbered = True
    alternates = True
    unused = (
        *("document_mask", "keep_remainder", "streaming", "max_tokens", "max_validation_tokens", "max_documents"),
        *("text_field", "train_split", "validation_split"),
    )

    def __post_init__(self) -> None:
        where = "task audiovideo"
        for name in ("frames", "height", "width", "sample_rate", "video_channels", "audio_channels", "train_clips"):
            check_range(where, name, getattr(self, name), 1)
        for name in ("held_out_clips", "made", "steps", "text_length"):
            check_range(where, name, getattr(self, name), 1)
        check_number(where, "frame_rate", self.frame_rate, 1)
        for name in DRAWN:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def model_fields(cls) -> list[str]:
        return list(fields())

    @property
    def model_class(self) -> Any:
        from fathom.audiovideo.joint import MovaModel

        return MovaModel

    def check(self, data: DataConfig) -> None:
        super().check(data)
        for package in ("diffusers", "av", "pyloudnorm"):
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"task 'audiovideo' needs {package}: pip install 'fathom-lm[media]'")
        for name in ("train", "validation"):
            value = getattr(data, name)
            if value not in (GENERATED, None) and not (Path(value) / "clips.jsonl").is_file():
                raise ValueError(
                    f"data.{name}={value!r}: give {GENERATED!r}, or a folder of clips with clips.jsonl"
                    + (", or null" if name == "validation" else "")
                )
        shared = clip_files(data.train) & clip_files(data.validation)
        if shared:
            raise ValueError(
                f"data.validation={data.validation!r}: {min(shared)} is trained on; hold other clips out, or give null"
            )

    def model_config(self, fields: dict[str, Any], data: DataConfig, tokenizer: Any) -> MovaConfig:
        fields = dict(fields)
        checkpoint = fields.pop("checkpoint", None)
        if tokenizer is None and isinstance(data.tokenizer, str):
            tokenizer = load_tokenizer(data.tokenizer)
        codec = self._codec_sizes()
        for name, value in {**self._sizes(), "text_length": self.text_length, **codec}.items():
            if fields.get(name, value) != value:
                raise ValueError(f"model.{name}={fields[name]!r}: the task's clips have {value!r}; leave it out")
            fields[name] = value
        if checkpoint is not None:
            stored = MovaConfig.from_pretrained(checkpoint).to_dict()
            changed = {**stored["mova"], **fields.pop("mova", {})}
            config = MovaConfig.from_dict({**stored, **fields, "mova": changed})
        else:
            if tokenizer is None:
                fields["vocab_size"] = data.tokenizer["bpe"]  # type: ignore[index]
            else:
                end = tokenizer.eos_token_id
                pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
                fields |= {"vocab_size": max(tokenizer.get_vocab().values()) + 1, "pad_token_id": pad}
                fields["eos_token_id"] = end
            config = MovaConfig(**fields)
        if data.block_size != sum(config.tokens):
            video, audio = config.tokens
            raise ValueError(
                f"data.block_size={data.block_size}: a clip has {video} video and {audio} audio tokens; write "
                f"{video + audio}"
            )
        return config

    def _sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("frames", "frame_rate", "height", "width")}

    def _codec_sizes(self) -> dict[str, Any]:
        if self.codec == "pca":
            sizes = (self.video_channels, self.audio_channels, [4, 8, 8], self.sample_rate / 160)
        else:
            codec = self._load_codec()
            strides = list(codec.video_strides)
            sizes = (codec.video_channels, codec.audio_channels, strides, codec.sample_rate / codec.audio_stride)
        return dict(zip(("video_channels", "audio_channels", "video_strides", "audio_rate"), sizes))

    def _load_codec(self) -> Any:
        from fathom.audiovideo.codecs import load_codec

        codec = load_codec(Path(self.codec))
        for name in ("frame_rate", "sample_rate"):
            if getattr(codec, name) != getattr(self, name):
                raise ValueError(
                    f"task.{name}={getattr(self, name)!r}: the codec {self.codec} was made for {getattr(codec, name)!r}"
                )
        return codec

    def sections(self, config: MovaConfig) -> dict[str, dict[str, Any]]:
        plain = type(config.method)().to_section()
        changed = {key: value for key, value in config.mova.items() if value != plain[key]}
        return {"mova": {"name": plain["name"], **changed}}

    def training_flops(self, config, block_size, checkpointing, ran=None):
        return (4 if checkpointing else 3) * forward_flops(config) / block_size

    def sizes(self, config, block_size, dtype, ran=None):
        from fathom.audiovideo.joint import make_parts

        with torch.device("meta"):
            made = make_parts(config)
        count = sum(weight.numel() for part in made.values() for weight in part.parameters())
        return Sizes(count, count, forward_flops(config) / block_size, 0.0)

    def answer_flops(self, config, data, block_size, ran=None):
        """FLOPs of sampling one clip."""
        from fathom.audiovideo.guidance import branches

        asked = branches(self.text_scale, self.bridge_scale)
        return self.steps * sum(forward_flops(config, branch.bridge) for branch in asked)

    # Data

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        train, held_out = self._clips(data, "train"), self._clips(data, "validation")
        assert train is not None
        tokenizer = make_tokenizer(data, train.captions, lambda: cache_key("captions", *train.key), cache)
        codec_folder = self._codec_folder(train, cache)

        def latents(clips: Clips) -> LatentClips:
            coder = [codec_sources(), self._codec_key(codec_folder), self.text_length]
            key = cache_key(*clips.key, tokenizer_hash(tokenizer), *coder)
            folder = cache / f"latents-{key}"
            build_once(folder, lambda work: write_latents(clips, codec_folder, tokenizer, work, self.text_length))
            return LatentClips(folder)

        rows = None if held_out is None else latents(held_out)
        notes = tuple(clips.note for clips in (train, held_out) if clips is not None and clips.note)
        digests = [clips.digest for clips in (train, held_out) if clips is not None and clips.digest]
        return PreparedClips(
            latents(train), rows, tokenizer, 0 if rows is None else len(rows), 0 if rows is None else rows.nbytes,
            notes=notes, codec=codec_folder, files=cache_key(*digests) if digests else "",
        )  # type: ignore[arg-type]  # fmt: skip

    def _clips(self, data: DataConfig, name: str) -> Clips | None:
        from fathom.audiovideo.clips import ClipFolder
        from fathom.audiovideo.generator import Generator

        source = getattr(data, name)
        if source is None:
            return None
        held_out = name == "validation"
        if source == GENERATED:
            count = self.held_out_clips if held_out else self.train_clips
            options: dict[str, Any] = {} if held_out else {"shifted": self.shifted, "silent": self.silent}
            options["fixed"] = self.fixed
            options |= {name: getattr(self, name) for name in DRAWN if getattr(self, name) is not None}
            made = Generator(
                seed=data.seed, things=self.things, flashes=self.flashes, frames=self.frames,
                frame_rate=self.frame_rate, size=(self.height, self.width), sample_rate=self.sample_rate, **options,
            )  # fmt: skip
            first = HELD_OUT if held_out else 0
            key = ["generated", dataclasses.asdict(made), sources("generator"), first, count]
            return Clips(lambda index: made.clip(first + index), count, key, "")
        folder = ClipFolder(
            Path(source), self.frames, self.frame_rate, self.sample_rate, (self.height, self.width), self.loudness
        )
        count = len(folder) if held_out or data.max_documents is None else min(len(folder), data.max_documents)
        stats = [(Path(source) / row["file"]).stat() for row in folder.rows]
        files = [[row, stat.st_size, stat.st_mtime_ns] for row, stat in zip(folder.rows, stats)]
        read_as = [self._sizes(), self.sample_rate, self.loudness, sources("clips")]
        note = f"Left out of {source}: {len(folder.dropped)} files that are too short." if folder.dropped else ""
        clips = Clips(folder.__getitem__, count, ["folder", str(source), files, read_as, count], note, folder.caption)
        some = range(0, len(folder.rows), max(1, len(folder.rows) // FILES_SEEN))
        read = [hashlib.sha256((Path(source) / folder.rows[index]["file"]).read_bytes()).hexdigest() for index in some]
        clips.digest = cache_key(folder.rows, [stat.st_size for stat in stats], read)
        return clips

    def _codec_folder(self, train: Clips, cache: Path) -> Path:
        if self.codec != "pca":
            return Path(self.codec)
        from fathom.audiovideo.pca_codecs import PcaCodec

        key = cache_key(*train.key, self.video_channels, self.audio_channels, codec_sources())
        folder = cache / f"codec-{key}"

        def build(work: Path) -> None:
            some = (train[index] for index in range(min(len(train), 400)))
            PcaCodec.fit(some, self.video_channels, self.audio_channels).save(work)

        build_once(folder, build)
        return folder

    def _codec_key(self, folder: Path) -> str:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if self.codec == "pca":
            return folder.name
        return str([[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files])

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch with its noise, drawn by the run's seed and the clip's number (by that alone if held out)."""
        batch = {name: torch.stack([torch.as_tensor(example[name]) for example in examples]) for name in examples[0]}
        drawn = batch.pop("draw", None)
        video, audio, uniform = [], [], []
        for row, clip in enumerate(batch["clip"].tolist()):
            seed, number = (NOISE_SEED, clip) if drawn is None else drawn[row].tolist()
            generator = torch.Generator().manual_seed(mixed(seed, number))
            u = torch.rand(4, generator=generator)
            if drawn is None:  # spread evenly over the clips
                u[0], u[1] = (0.5 + clip * GOLDEN) % 1, (0.5 + clip * GOLDEN**2) % 1
            uniform.append(u)
            video.append(torch.randn(batch["video"].shape[1:], generator=generator))
            audio.append(torch.randn(batch["audio"].shape[1:], generator=generator))
        noise = {"video_noise": torch.stack(video), "audio_noise": torch.stack(audio)}
        return {**batch, **noise, "uniform": torch.stack(uniform)}

    def tokens(self, batch: Mapping[str, Tensor], config: Any) -> int:
        return len(batch["video"]) * sum(config.tokens)

    def counted(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["labels"]

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(len(batch["labels"]))

    def forward(self, model: Any, **batch: Any) -> Any:
        return model(**batch)

    # Scores

    def complete(self, folder: Path, config: MovaConfig, data: PreparedData) -> None:
        """Turn the folder of saved weights into a pipeline's, with codec, scheduler, tokenizer and text encoder."""
        from safetensors.torch import load_file

        from fathom.audiovideo.joint import MovaModel
        from fathom.audiovideo.pipeline import CODEC

        model = MovaModel(config)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        pipeline_of(model, data).save_pretrained(folder)
        shutil.copytree(data.codec, folder / CODEC)  # type: ignore[attr-defined]

    def config_of(self, folder: Path) -> MovaConfig:
        return MovaConfig.from_pretrained(folder)

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        values: dict[str, float | None] = dict.fromkeys((score.name for score in self.scores), None)
        if loss is None:
            return values
        model = self.model_class.from_pretrained(checkpoint)
        model.eval().to(device_of())
        errors = self.errors(model, data)
        made = [found for _, found in self._made(model, data, self.made)]
        means = {}
        for name, of_none in {"offset_ms": FAR, "within_frame": 0.0, "together": 0.0}.items():
            found = [said[name] for said in made if said[name] is not None]
            means[name] = float(np.mean(found)) if found else of_none
        return {"velocity_error": sum(errors), "video_error": errors[0], "audio_error": errors[1], **means}

    @torch.no_grad()
    def errors(self, model: Any, data: PreparedData) -> tuple[float, float]:
        """Mean squared error of the velocities of video and of sound, on all held-out clips."""
        found: list[Tensor] = []
        rows: Any = data.validation
        for start in range(0, len(rows), BATCH):
            batch = self.collate([rows[i] for i in range(start, min(start + BATCH, len(rows)))])
            said = model(**{name: value.to(model.device) for name, value in batch.items()}).auxiliary
            found.append(torch.stack([said["video_loss"], said["audio_loss"]]).cpu())
        video, audio = torch.cat(found, dim=1).double().mean(1).tolist()
        return video, audio

    def _made(self, model: Any, data: PreparedData, count: int) -> Iterator[tuple[Clip, dict[str, Any]]]:
        """Clips made from held-out captions and first pictures, with the scores of `fathom video score`."""
        from fathom.audiovideo.codecs import load_codec
        from fathom.audiovideo.metrics import score

        pipeline = pipeline_of(model, data)
        pipeline.codec = load_codec(data.codec)  # type: ignore[attr-defined]
        rows: Any = data.validation
        for start in range(0, min(count, len(rows)), BATCH):
            some = range(start, min(start + BATCH, count, len(rows)))
            yield from ((clip, score(clip)) for clip in self.sample(pipeline, rows, some))

    def sample(self, pipeline: Any, rows: Any, some: Any, **options: Any) -> list[Clip]:
        """Clips that a pipeline makes from rows, each with a seed of its number."""
        from fathom.audiovideo.clips import Clip

        settings = {"steps": self.steps, "text_scale": self.text_scale, "bridge_scale": self.bridge_scale}
        pipeline.set_progress_bar_config(disable=True)
        out = pipeline(
            [rows.captions[i] for i in some],
            image=torch.stack([rows[i]["first"] for i in some]),
            generator=[torch.Generator().manual_seed(i) for i in some],
            **{**settings, **options},
        )
        return [
            Clip(frames, out.frame_rate, audio, out.sample_rate, rows.captions[i])
            for i, frames, audio in zip(some, out.frames, out.audio.astype(np.float32))
        ]

    def reference(self, data: PreparedData, sequences: int) -> float:
        """Error of the best velocities that do not depend on the clip: ε − x₀ of the average latents."""
        train: Any = data.train
        rows: Any = data.validation
        total = 0.0
        for name in ("video", "audio"):
            mean = np.mean(train.arrays[name][: min(len(train), sequences)], axis=0, dtype=np.float64)
            total += 1 + float(np.mean((rows.arrays[name].astype(np.float64) - mean) ** 2))
        return total

    def held_out_size(self, data: PreparedData) -> str:
        assert data.validation is not None
        return f"{len(data.validation):,} clips"

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        found = []
        for clip, said in self._made(model, data, 4):
            times = (", ".join(f"{time:.2f}" for time in said[name]) or "nothing" for name in ("seen", "heard"))
            found.append(Sample(clip.caption, "seen at {} s; heard at {} s".format(*times)))
        return found


@dataclass(frozen=True)
class PreparedClips(PreparedData):
    """Prepared clips, and the folder of the codec that they went through."""

    codec: Path = Path()


class Clips:
    """`count` clips that are made or read on access; `key` identifies the clips and the code that makes them.

    caption: function from a clip's number to its caption, where that is known without reading the clip.
    digest: of files, by all names and sizes and some contents; none of clips that are made.
    """

    digest = ""

    def __init__(self, get: Any, count: int, key: list[Any], note: str, caption: Any = None) -> None:
        self.get, self.count, self.key, self.note, self.caption = get, count, key, note, caption

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Clip:
        return self.get(index)

    def captions(self) -> Iterator[str]:
        caption_of = self.caption or (lambda index: self.get(index).caption)
        return (caption_of(index) for index in range(self.count))


class LatentClips(torch.utils.data.Dataset):
    """Encoded clips in a folder: arrays that are read from the disk as they are needed, and captions."""

    NAMES: ClassVar[tuple[str, ...]] = ("video", "audio", "first", "input_ids", "attention_mask")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open()

    def _open(self) -> None:
        said = json.loads((self.folder / "captions.json").read_text(encoding="utf-8"))
        self.captions, null = said["captions"], said["null"]
        self.null = {f"null_{name}": torch.tensor(value) for name, value in null.items()}
        self.arrays = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in self.NAMES}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder = state["folder"]
        self._open()

    @property
    def nbytes(self) -> int:
        return sum(self.arrays[name].nbytes for name in ("video", "audio"))

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        found = {name: torch.from_numpy(np.array(array[index])) for name, array in self.arrays.items()}
        return {**found, **self.null, "clip": torch.tensor(index), "labels": torch.zeros(1, dtype=torch.long)}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]


def clip_files(source: Any) -> set[Path]:
    """The paths of the files that a folder's index names."""
    from fathom.audiovideo.clips import INDEX, index_rows

    if source in (GENERATED, None):
        return set()
    return {(Path(source) / row["file"]).resolve() for row in index_rows(Path(source) / INDEX)}


def sources(*names: str) -> str:
    """A digest of source files of fathom.audiovideo, so that cached results are made again when their code changes."""
    package = Path(importlib.import_module("fathom.audiovideo").__path__[0])
    return hashlib.sha256(b"".join((package / f"{name}.py").read_bytes() for name in names)).hexdigest()


def codec_sources() -> str:
    """A digest of the source files that turn clips into latents."""
    return sources("codecs", "pca_codecs", "dac", "pipeline")


@torch.no_grad()
def write_latents(clips: Clips, codec_folder: Path, tokenizer: Any, folder: Path, text_length: int) -> None:
    """Encode clips into the files of `LatentClips`."""
    from fathom.audiovideo.codecs import load_codec
    from fathom.audiovideo.pipeline import first_latents, tokenized

    codec = load_codec(codec_folder)
    arrays: dict[str, Any] = {}
    captions: list[str] = []
    for start in range(0, len(clips), BATCH):
        some = [clips[index] for index in range(start, min(start + BATCH, len(clips)))]
        for clip in some:
            codec.check_rates(clip)
        frames = torch.stack([torch.from_numpy(clip.frames) for clip in some])
        found = {
            "video": codec.encode_video(frames),
            "audio": codec.encode_audio(torch.stack([torch.from_numpy(clip.audio) for clip in some])),
            "first": first_latents(codec, frames[:, 0], frames.shape[1]),
        }
        for name, value in found.items():
            if name not in arrays:
                shape = (len(clips), *value.shape[1:])
                arrays[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, shape)
            arrays[name][start : start + len(some)] = value.float().cpu().numpy()
        captions += [clip.caption for clip in some]
    for array in arrays.values():
        array.flush()
    ids, mask = tokenized(tokenizer, [*captions, ""], text_length)
    np.save(folder / "input_ids.npy", ids[:-1].numpy())
    np.save(folder / "attention_mask.npy", mask[:-1].numpy())
    null = {"ids": ids[-1].tolist(), "mask": mask[-1].tolist()}
    (folder / "captions.json").write_text(json.dumps({"captions": captions, "null": null}), encoding="utf-8")


def pipeline_of(model: Any, data: PreparedData) -> Any:
    """The pipeline of a model, without its codec."""
    from fathom.audiovideo.pipeline import MovaPipeline
    from fathom.audiovideo.scheduler import FlowMatchPairScheduler

    method = model.config.method.at(1.0)
    scheduler = FlowMatchPairScheduler(video_shift=method.video_shift, audio_shift=method.audio_shift)
    made = MovaPipeline(scheduler=scheduler, tokenizer=data.tokenizer, **dict(model.named_children()))
    made.settings = model.config
    return made


def mixed(seed: int, number: int) -> int:
    """One seed from two numbers."""
    return (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) % 2**63
