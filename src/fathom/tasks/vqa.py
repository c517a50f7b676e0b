"""Answering questions about generated scenes: how much few vision tokens lose on small pictures and words.

`fathom.vision.scenes` makes the scenes, and pictures are drawn when a batch is put together. Models are LLaVA's
(`LlavaForConditionalGeneration`): a vision tower, a projector and a language model, each from scratch or from a folder.
The recipe's section `vision_compress` names the compressor. A row has one image token for its picture, which becomes as
many as the model's compressor keeps, so all methods learn from the same rows. A row may hold several questions about
its picture. Each sees only the picture and itself, so together they cost little more than one and teach as much as
several.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Dinov2Config, LlamaConfig

from fathom.cost.vision import kv_bytes, llava_flops, patch_grid, vision_tokens
from fathom.data import DataConfig, PreparedData, collate, load_tokenizer
from fathom.data.config import EMBEDDED
from fathom.data.packing import IGNORED
from fathom.data.prepared import build_once, cache_key, make_tokenizer
from fathom.data.tokenizer import tokenizer_hash
from fathom.models.device import device_of
from fathom.models.local_paths import refuse_absent
from fathom.models.method import check_number, check_range
from fathom.tasks.base import Sample, Score, Sizes, Task, register_task
from fathom.tasks.encoders import padded
from fathom.vision.pictured import Album
from fathom.vision.scenes import KINDS, MOST, OBJECT_SIZES, PERIOD, WORD_SIZES, Scene, questions, scene

IMAGE, PAD = "<image>", "<pad>"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, DINOv2's
IMAGES = -1  # in a row's `question`: an image token, which every question sees
BATCH = 32
SAMPLES = 6
SIZED = (*(f"objects_{size}" for size in OBJECT_SIZES), *(f"words_{size}" for size in WORD_SIZES))


@register_task("vqa")
@dataclass(frozen=True)
class VQA(Task):
    """Options:

    side: of a picture, in pixels.
    scenes: number of different training scenes.
    questions: number of held-out questions.
    asked: the most questions about each training picture.
    things: the most things in a picture, without those that are to be counted.
    pictures: folder of pictures and photographs from which scenes are made (recipes/make_pictures.py); None: shapes
        and words on drawn backgrounds.
    trains: "all"; "language", the projector and the language model; or "projector", the projector alone.
    align: examples of a first stage in which only the projector trains, as in LLaVA; 0: no such stage.
    align_lr: peak learning rate of that stage.
    """

    side: int = 336
    scenes: int = 20_000
    questions: int = 4 * PERIOD
    asked: int = 1
    things: int = MOST
    pictures: str | None = None
    trains: Literal["all", "language", "projector"] = "all"
    align: int = 0
    align_lr: float = 1e-3

    summary = "Answer questions about generated scenes of pictures, shapes and words."
    scores = (
        Score(
            "accuracy", "of answers right", "higher", "The share of held-out questions whose answer is exactly right."
        ),
        Score(
            "new_scenes",
            "on new scenes",
            "higher",
            "Of those about a colour and shape, a picture and its place, or a word, that training does not combine, on "
            "a new background.",
        ),
        *(Score(kind, f"on '{kind}'", "higher", f"Of the questions of the kind {kind}.") for kind in KINDS),
        *(Score(name, f"on {name}", "higher", f"Of the questions about {name.replace('_', ' ')}.") for name in SIZED),
    )
    held_out = "held-out questions"
    loss_unit = "nats per answer token"
    answer = "picture, question and answer"
    cost_heading = "FLOPs per question"
    reference_name = "majority"
    reference_note = "The most frequent answer to the questions of a kind in training, whatever the picture."
    samples_note = "Answers to the first held-out questions"
    checkpoint_fields = ("vision_compress",)
    alternates = True  # the tower's last layer, behind the one whose states are read, takes part in no step
    unused = (
        *("document_mask", "keep_remainder", "streaming", "max_tokens", "max_validation_tokens", "max_documents"),
        *("text_field", "train_split", "validation_split"),
    )

    def __post_init__(self) -> None:
        check_range("task vqa", "side", self.side, 1)
        check_range("task vqa", "scenes", self.scenes, 1)
        check_range("task vqa", "questions", self.questions, PERIOD)
        check_range("task vqa", "asked", self.asked, 1)
        check_range("task vqa", "things", self.things, 1, MOST)
        check_range("task vqa", "align", self.align, 0)
        check_number("task vqa", "align_lr", self.align_lr, 0)
        if self.trains not in ("all", "language", "projector"):
            raise ValueError(f"task vqa option trains={self.trains!r}: use 'all', 'language' or 'projector'")

    def check(self, data: DataConfig) -> None:
        super().check(data)
        for name in ("train", "validation"):
            if getattr(data, name) not in (EMBEDDED, None):
                raise ValueError(
                    f"data.{name}={getattr(data, name)!r}: task 'vqa' makes its scenes itself; leave it out"
                )

    @functools.cached_property
    def album(self) -> Album:
        """The files of `pictures`."""
        assert self.pictures is not None
        return Album.read(self.pictures)

    # The model

    @property
    def model_class(self) -> Any:
        from fathom.vision.checkpoints import FathomLlavaForConditionalGeneration

        return FathomLlavaForConditionalGeneration

    @classmethod
    def model_fields(cls) -> list[str]:
        return ["tower", "language", "vision_feature_layer", "vision_compress"]

    def model_config(self, fields, data, tokenizer):
        """LLaVA's config. `tower` and `language` are each a folder, or a mapping of the fields of Dinov2Config and
        LlamaConfig; `vision_feature_layer` is −2 as in LLaVA where the tower is a folder, else −1."""
        from fathom.vision import from_dict
        from fathom.vision.base import LanguageCompressor
        from fathom.vision.configuration import FathomLlavaConfig

        method = from_dict(fields.get("vision_compress") or {"name": "all_tokens"})
        if isinstance(method, LanguageCompressor):
            raise ValueError(
                f"vision_compress.name={method.name!r}: it chooses by a prompt's last tokens, and a row of task 'vqa' "
                "ends with its answer; train with another method, and put this one on the model with compress_vision"
            )
        compress = method.to_dict()
        if fields.get("checkpoint") is not None:
            config = AutoConfig.from_pretrained(fields["checkpoint"])
            if not isinstance(config, FathomLlavaConfig):
                raise ValueError(
                    f"model.checkpoint={fields['checkpoint']!r}: model_type={config.model_type!r}; task 'vqa' "
                    "continues with models that it has made"
                )
            config.vision_compress = compress if "vision_compress" in fields else config.vision_compress
            vision_tokens(config, self.side)
            return config
        if tokenizer is None and isinstance(data.tokenizer, str):
            tokenizer = with_image(load_tokenizer(data.tokenizer))
        ids: dict[str, Any] = {}
        if tokenizer is None:
            image, vocabulary = data.tokenizer["bpe"], data.tokenizer["bpe"] + 2  # type: ignore[index]
        else:
            image, vocabulary = tokenizer.convert_tokens_to_ids(IMAGE), max(tokenizer.get_vocab().values()) + 1
            ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        tower = part_config("model.tower", fields.get("tower"), Dinov2Config, {"image_size": self.side})
        language = part_config("model.language", fields.get("language"), LlamaConfig, {})
        for name, value in {**ids, "vocab_size": vocabulary}.items():
            setattr(language, name, value)
        config = FathomLlavaConfig(
            vision_config=tower,
            text_config=language,
            image_token_index=image,
            vision_feature_layer=fields.get("vision_feature_layer", -2 if isinstance(fields.get("tower"), str) else -1),
            vision_compress=compress,
        )
        vision_tokens(config, self.side)  # refuses what the method cannot keep of this grid
        return config

    def new_model(self, config, fields, data):
        """The model with the weights of the folders that the recipe names; parts that do not train are frozen."""
        if fields.get("checkpoint") is not None:
            model = self.model_class.from_pretrained(fields["checkpoint"], config=config, dtype=torch.float32)
        else:
            model = self.model_class(config)
            if isinstance(fields.get("tower"), str):
                tower = AutoModel.from_pretrained(fields["tower"], dtype=torch.float32)
                model.model.vision_tower.load_state_dict(tower.state_dict())
            if isinstance(fields.get("language"), str):
                language: Any = AutoModelForCausalLM.from_pretrained(fields["language"], dtype=torch.float32)
                if language.get_input_embeddings().weight.shape[0] < config.text_config.vocab_size:
                    language.resize_token_embeddings(config.text_config.vocab_size, mean_resizing=False)
                model.model.language_model.load_state_dict(language.base_model.state_dict())
                model.lm_head.load_state_dict(language.get_output_embeddings().state_dict())
        if self.trains != "all":
            model.model.vision_tower.requires_grad_(False)
        if self.trains == "projector":
            model.model.language_model.requires_grad_(False)
            model.lm_head.requires_grad_(False)
        return model

    def before(self, recipe):
        if not self.align:
            return None
        training = dataclasses.replace(recipe.training, examples=self.align, tokens=None, lr=self.align_lr)
        return dataclasses.replace(
            recipe, task=dataclasses.replace(self, trains="projector", align=0), training=training
        )

    def sections(self, config):
        return {"vision_compress": config.vision_compress}

    def processor(self, data, config):
        from transformers import CLIPImageProcessorPil

        from fathom.vision.checkpoints import PROCESSORS

        images = CLIPImageProcessorPil(
            size={"height": self.side, "width": self.side}, do_center_crop=False, image_mean=MEAN, image_std=STD
        )
        return PROCESSORS["llava"](
            images, data.tokenizer, patch_size=config.vision_config.patch_size, image_token=IMAGE,
            vision_feature_select_strategy="default", num_additional_image_tokens=1,
        )  # fmt: skip

    # Its cost

    def training_flops(self, config, block_size, checkpointing, ran=None):
        """FLOPs of three forwards of parts that train or pass gradients on, and of one of a frozen tower."""
        parts, times = llava_flops(config, self.side, block_size), 4 if checkpointing else 3
        tower = parts["tower"] * (times if self.trains == "all" else 1)
        return (tower + times * (parts["projector"] + parts["language"])) / block_size

    def sizes(self, config, block_size, dtype, ran=None):
        with torch.device("meta"):
            model: Any = self.model_class(type(config).from_dict(config.to_dict()))
        total = sum(weight.numel() for weight in model.parameters())
        heads: list[Any] = [model.get_input_embeddings().weight, model.lm_head.weight]
        tables = {id(weight): weight.numel() for weight in heads}  # a tied head is counted once
        flops = sum(llava_flops(config, self.side, block_size).values())
        cache = kv_bytes(config, self.side, block_size, dtype)
        return Sizes(total, total - sum(tables.values()), flops / block_size, cache / block_size)

    def answer_flops(self, config, data, block_size, ran: Sequence[float] | None = None):
        return sum(llava_flops(config, self.side, block_size).values())

    # Its data

    def scene(self, seed: int, number: int, held_out: bool) -> Scene:
        made = scene if self.pictures is None else self.album.scene
        return made(seed, number, held_out, self.things)

    def prepare(self, data: DataConfig, cache_dir: Path) -> PreparedData:
        cache = Path(cache_dir)
        cache.mkdir(parents=True, exist_ok=True)

        try:
            files = "" if self.pictures is None else self.album.digest()
        except (OSError, ValueError) as error:
            raise type(error)(f"task.pictures={self.pictures!r}: {error}") from error
        drawn_as: list[Any] = [] if self.things == MOST else [{"things": self.things}]
        drawn_as += [{"pictures": files}] if files else []
        drawn_from = [min(self.scenes, 10_000), *drawn_as]

        def texts() -> Iterator[str]:
            for number in range(min(self.scenes, 10_000)):
                drawn = self.scene(data.seed, number, False)
                yield f"\n{drawn.question}\n{drawn.answer}"

        tokenizer = make_tokenizer(data, texts, lambda: cache_key("vqa", data.seed, *drawn_from), cache)
        tokenizer = with_image(tokenizer)

        def rows(held_out: bool, count: int) -> datasets.Dataset:
            options = [self.name, data.seed, held_out, count, data.block_size, *drawn_as]
            asked = 1 if held_out else self.asked
            if asked > 1:
                options.append(asked)
            folder = cache / f"vqa-{cache_key(tokenizer_hash(tokenizer), *options)}"

            def build(work: Path) -> None:
                size = data.block_size
                made = (
                    {
                        **row_of(self.scene(data.seed, number, held_out), tokenizer, size, asked),
                        "seed": data.seed,
                        "number": number,
                        "held_out": int(held_out),
                    }
                    for number in range(count)
                )
                datasets.Dataset.from_list(list(made)).save_to_disk(str(work / "rows"))

            build_once(folder, build)
            return datasets.load_from_disk(str(folder / "rows")).with_format("torch")

        training, validation = rows(False, self.scenes), None if data.validation is None else rows(True, self.questions)
        targets = size = 0
        if validation is not None:
            targets = int((validation["labels"][:] != IGNORED).sum())
            size = sum(len(self.scene(data.seed, number, True).answer.encode()) for number in range(self.questions))
        notes = ["FLOPs here are torch's count for one picture and its row of text, attention as whole products."]
        if self.align:
            notes.append(
                f"Before each run its projector has learned alone from {self.align:,} examples, at learning rate "
                f"{self.align_lr:g}; lengths and FLOPs are without these."
            )
        return PreparedData(training, validation, tokenizer, targets, size, notes=tuple(notes), files=files)

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate(examples)
        keys = zip(*(batch[name].tolist() for name in ("seed", "number", "held_out")), strict=True)
        pixels = [picture(self.scene(seed, number, bool(held_out)), self.side) for seed, number, held_out in keys]
        return {**batch, "pixel_values": torch.stack(pixels)}

    def forward(self, model: Any, **batch: Any) -> Any:
        """The model's output; a row's image token, its first, is repeated as often as the compressor keeps tokens."""
        from fathom.vision import compress_vision, from_dict

        ids, labels, items = batch["input_ids"], batch["labels"], batch.get("num_items_in_batch")
        inner = getattr(model, "module", model)
        method = from_dict(inner.config.vision_compress)
        step = method.in_training() if model.training else method
        count = step.count(patch_grid(inner.config, self.side))
        long = torch.cat((ids[:, :1].expand(-1, count), ids[:, 1:]), 1)
        apart = {} if "question" not in batch else several(batch["question"], count, inner.dtype)
        with contextlib.nullcontext() if step == method else compress_vision(inner, None, step):
            out = model(
                input_ids=long,
                pixel_values=batch["pixel_values"],
                logits_to_keep=ids.shape[1],
                use_cache=False,
                **apart,
            )
        total = F.cross_entropy(
            out.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        out["loss"] = total / (self.targets(batch).clamp(min=1) if items is None else items)
        return out

    def held_out_size(self, data: PreparedData) -> str:
        assert data.validation is not None
        return f"{len(data.validation):,} questions"

    # Its scores

    @torch.no_grad()
    def answers(self, model: Any, data: PreparedData, count: int) -> Iterator[tuple[Scene, str, bool]]:
        """For the first held-out questions: scene, likeliest tokens at the places of the right answer, and whether they
        are that answer; greedy generation then gives it, too."""
        rows: Any = data.validation
        for start in range(0, count, BATCH):
            batch = self.collate([rows[i] for i in range(start, min(start + BATCH, count))])
            batch = {name: value.to(model.device) for name, value in batch.items()}
            said = self.forward(model, **batch).logits[:, :-1].argmax(-1)
            for row, (labels, tokens) in enumerate(zip(batch["labels"][:, 1:], said, strict=True)):
                asked = labels != IGNORED
                found = self.scene(int(batch["seed"][row]), int(batch["number"][row]), True)
                text = str(data.tokenizer.decode(tokens[asked], skip_special_tokens=True))
                yield found, text, bool((tokens == labels)[asked].all())

    def score(self, data: PreparedData, loss: float | None, checkpoint: Path) -> dict[str, float | None]:
        values: dict[str, float | None] = dict.fromkeys((score.name for score in self.scores), None)
        if loss is None:
            return values
        model = self.model_class.from_pretrained(checkpoint)
        model.eval().to(device_of())
        right, asked = Counter[str](), Counter[str]()
        for drawn, _, fits in self.answers(model, data, self.questions):
            sized = f"{'words' if drawn.kind == 'read' else 'objects'}_{drawn.size}"
            for name in ("accuracy", drawn.kind, sized, *(("new_scenes",) if drawn.new else ())):
                asked[name] += 1
                right[name] += fits
        return {name: right[name] / asked[name] for name in values}

    def reference(self, data: PreparedData, sequences: int) -> float:
        assert data.validation is not None
        seen: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        for row in itertools.islice(data.train, min(sequences, self.scenes)):
            drawn = self.scene(int(row["seed"]), int(row["number"]), False)
            seen[drawn.kind][drawn.answer] += 1
        common = {kind: counts.most_common(1)[0][0] if counts else "" for kind, counts in seen.items()}
        held_out = [self.scene(int(row["seed"]), int(row["number"]), True) for row in data.validation]
        return sum(common[drawn.kind] == drawn.answer for drawn in held_out) / len(held_out)

    def samples(self, model: Any, data: PreparedData, room: int) -> list[Sample]:
        found = self.answers(model, data, SAMPLES)
        return [Sample(f"{drawn.question} ", text, drawn.answer) for drawn, text, _ in found]


def row_of(drawn: Scene, tokenizer: Any, size: int, asked: int) -> dict[str, Any]:
    """A scene's text as padded ids: one image token, then each question with its answer and end token."""
    pairs = [(drawn.question, drawn.answer)] if asked == 1 else questions(drawn, asked)
    ids, labels, owners = [tokenizer.convert_tokens_to_ids(IMAGE)], [IGNORED], [IMAGES]
    for owner, (question, answer) in enumerate(pairs):
        before = tokenizer(f"\n{question}\n", add_special_tokens=False)["input_ids"]
        after = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids += before + after
        labels += [IGNORED] * len(before) + after
        owners += [owner] * len(before + after)
    if len(ids) > size:
        raise ValueError(f"data.block_size={size}: a row of task 'vqa' has {len(ids)} tokens; use at least that")
    row = {"input_ids": padded(ids, size, tokenizer.pad_token_id), "labels": padded(labels, size, IGNORED)}
    if asked > 1:
        row["question"] = padded(owners, size, len(pairs))
    return row


def several(question: Tensor, count: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Mask and positions of rows [B, L] with several questions after `count` vision tokens. A token sees the picture
    and earlier tokens of its own question; positions of each question follow the picture's.
    """
    owner = torch.cat((question[:, :1].expand(-1, count), question[:, 1:]), 1)
    same = owner[:, :, None] == owner[:, None, :]
    allowed = (same | (owner == IMAGES)[:, None, :]).tril()
    within = (same.tril().sum(-1) - 1).clamp(min=0)  # tokens of the same question before it
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, -torch.inf)
    return {"attention_mask": mask[:, None], "position_ids": within + count * (owner != IMAGES)}


def picture(drawn: Scene, side: int) -> Tensor:
    """The scene as a tower reads it [3, side, side]."""
    import numpy as np

    pixels = torch.from_numpy(np.array(drawn.draw(side))).permute(2, 0, 1).float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def with_image(tokenizer: Any) -> Any:
    """The tokenizer with a token for an image, and a padding token that differs from EOS."""
    if IMAGE not in tokenizer.get_vocab():
        tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


def part_config(where: str, given: Any, kind: Any, defaults: dict[str, Any]) -> Any:
    """The config in a folder, or of a mapping of fields."""
    if isinstance(given, str):
        refuse_absent(given, f"{where}={given!r}")
        try:
            return AutoConfig.from_pretrained(given)
        except OSError as error:  # the hub's message need not name it
            raise ValueError(f"{where}={given!r}: no config.json could be read ({error})") from error
    if not isinstance(given, dict):
        raise ValueError(f"{where}={given!r}: name a folder, or give fields of {kind.__name__}")
    known = {field.name for field in dataclasses.fields(kind)}
    for name in given:
        if name not in known:
            raise ValueError(f"{where}.{name}={given[name]!r}: {kind.__name__} has no such field")
    return kind(**{**defaults, **given})
