"""The places of compressors in transformers' vision-language models, and how their processors and positions follow.

A *family* has a subclass for each module that changes, which replaces an instance's class while a compressor is active
(`compress.py`). The stock methods run through `super()`, and other instances are not affected.

    LLaVA         tower → compressor → projector → language model
    LLaVA-NeXT    the same for every tile, before the tiles are joined and lines get their newline tokens
    SmolVLM       tower → connector → compressor (the paper says nothing of this family; our rule)
    Qwen2.5-VL    tower with its merger → compressor for each temporal slice; positions of the kept grid

The tower always gets the original grid. Placeholders, features and positions follow from the same `compressor`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image
from transformers.models.llava_next.processing_llava_next import select_best_resolution

from fathom.vision.base import Compressor, Grid, LanguageCompressor, TowerCompressor
from fathom.vision.methods.mqt import MQT


def square(tokens: int) -> Grid:
    """The grid of `tokens` tokens of a square image. Raises ValueError if they make no square."""
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ValueError(f"{tokens} vision tokens are no square grid: only square images can be compressed here")
    return side, side


class Compressed:
    """A module or processor with a compressor, which is set on the instance."""

    compressor: Compressor


class ProjectorAfter(Compressed):
    """LLaVA's projector, which gets the compressed features."""

    def forward(self, image_features: Tensor) -> Tensor:
        grid, asked = square(image_features.shape[1]), self.compressor
        if isinstance(asked, TowerCompressor):
            features = asked(image_features, grid, self.watch.seen)  # type: ignore[attr-defined]
        elif "resampler" in self._modules and isinstance(asked, MQT):  # type: ignore[attr-defined]
            features = self.resampler(image_features, grid, asked.count(grid))  # type: ignore[attr-defined]
        else:
            features = asked(image_features, grid)
        if isinstance(asked, LanguageCompressor):
            self.watch.grid = features.shape[1]  # type: ignore[attr-defined]
        return super().forward(features)  # type: ignore[misc]


class ConnectorBefore(Compressed):
    """SmolVLM's connector, whose output is compressed."""

    def forward(self, image_hidden_states: Tensor) -> Tensor:
        features = super().forward(image_hidden_states)  # type: ignore[misc]
        return self.compressor(features, square(features.shape[1]))


class NextModel(Compressed):
    """LLaVA-NeXT: tiles of the kept size are joined to the picture, cut to its proportions and ended by newlines."""

    def pack_image_features(
        self, image_features: Any, image_sizes: Any, vision_feature_select_strategy: str, image_newline: Any = None
    ) -> tuple[list[Tensor], Tensor]:
        config: Any = self.config  # type: ignore[attr-defined]
        packed = []
        for tiles, size in zip(image_features, image_sizes):
            if tiles.shape[0] == 1:
                newline = [] if image_newline is None else [image_newline[None].to(tiles)]
                packed.append(torch.cat((tiles[0], *newline)))
                continue
            h, w = square(tiles.shape[1])
            rows, columns = get_anyres_image_grid_shape(
                size, config.image_grid_pinpoints, config.vision_config.image_size
            )
            picture = tiles[1:].reshape(rows, columns, h, w, -1).permute(4, 0, 2, 1, 3)
            picture = unpad_image(picture.flatten(3, 4).flatten(1, 2), size)  # [C, rows·h, columns·w], cut
            if image_newline is not None:
                newline = image_newline[:, None, None].expand(*picture.shape[:-1], 1).to(picture)
                picture = torch.cat((picture, newline), -1)
            packed.append(torch.cat((tiles[0], picture.flatten(1).T)))
        lengths = torch.tensor([len(one) for one in packed], device=packed[0].device)
        return packed, lengths


class QwenModel(Compressed):
    """Qwen2.5-VL: every temporal slice is compressed after the merger, and positions are those of the kept grid."""

    def kept_grids(self, grids: Tensor | None) -> Tensor | None:
        """Grids (T, H, W) of kept tokens, in the patches that `get_rope_index` counts, from the original grids."""
        if grids is None:
            return None
        merge = self.config.vision_config.spatial_merge_size  # type: ignore[attr-defined]
        return torch.tensor(
            [
                (t, *(merge * side for side in self.compressor.kept((h // merge, w // merge))))  # type: ignore[attr-defined]
                for t, h, w in grids.tolist()
            ],
            dtype=grids.dtype,
            device=grids.device,
        )

    def compress_slices(self, features: Any, grids: Tensor) -> tuple[Tensor, ...]:
        merge = self.config.vision_config.spatial_merge_size  # type: ignore[attr-defined]
        return tuple(
            self.compressor(one.unflatten(0, (t, -1)), (h // merge, w // merge)).flatten(0, 1)
            for one, (t, h, w) in zip(features, grids.tolist(), strict=True)
        )

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Any = None, **kwargs: Any) -> Any:
        output = super().get_image_features(  # type: ignore[misc]
            pixel_values, image_grid_thw, **{**kwargs, "return_dict": True}
        )
        output.pooler_output = self.compress_slices(output.pooler_output, image_grid_thw)
        return output if kwargs.get("return_dict", True) else output.to_tuple()

    def get_video_features(self, pixel_values_videos: Tensor, video_grid_thw: Any = None, **kwargs: Any) -> Any:
        output = super().get_video_features(  # type: ignore[misc]
            pixel_values_videos, video_grid_thw, **{**kwargs, "return_dict": True}
        )
        output.pooler_output = self.compress_slices(output.pooler_output, video_grid_thw)
        return output if kwargs.get("return_dict", True) else output.to_tuple()

    def get_rope_index(
        self, *arguments: Any, image_grid_thw: Any = None, video_grid_thw: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().get_rope_index(  # type: ignore[misc]
            *arguments,
            image_grid_thw=self.kept_grids(image_grid_thw),
            video_grid_thw=self.kept_grids(video_grid_thw),
            **kwargs,
        )


class LlavaProcessor(Compressed):
    """LLaVA: as many placeholders of an image as the compressor keeps of its grid."""

    def kept(self, tokens: int) -> int:
        return self.compressor.count(square(tokens))

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs: Any) -> str:
        text = super().replace_image_token(image_inputs, image_idx, **kwargs)  # type: ignore[misc]
        token: str = self.image_token  # type: ignore[attr-defined]
        return token * self.kept(len(text) // len(token))

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **kwargs: Any) -> Any:
        data = super()._get_num_multimodal_tokens(image_sizes=image_sizes, **kwargs)  # type: ignore[misc]
        if image_sizes is not None:
            data.num_image_tokens = [self.kept(tokens) for tokens in data.num_image_tokens]
        return data


class NextProcessor(Compressed):
    """LLaVA-NeXT: placeholders of the whole image and of its tiles joined, at the kept size, with a newline a row."""

    def _get_number_of_features(self, orig_height: int, orig_width: int, height: int, width: int) -> int:
        patch: int = self.patch_size  # type: ignore[attr-defined]
        patches = self.compressor.count((height // patch, width // patch))
        h, w = square(patches)
        best = select_best_resolution(
            (orig_height, orig_width),
            self.image_processor.image_grid_pinpoints,  # type: ignore[attr-defined]
        )
        cut, newlines = self._get_unpadded_features(  # type: ignore[attr-defined]
            orig_height, orig_width, h, w, best[0] // height, best[1] // width
        )
        taken = self.vision_feature_select_strategy == "default"  # type: ignore[attr-defined]  # the caller takes one off
        return patches + cut + newlines + taken


class SmolProcessor(Compressed):
    """SmolVLM: the run of placeholders of one tile has a length of its own."""

    @property
    def image_seq_len(self) -> int:
        return self.compressor.count(square(self.__dict__["image_seq_len"]))

    @image_seq_len.setter
    def image_seq_len(self, tokens: int) -> None:
        self.__dict__["image_seq_len"] = tokens


class QwenProcessor(Compressed):
    """Qwen2.5-VL: placeholders of an image or video, slice by slice."""

    def kept(self, grid: Any, merge: int) -> int:
        t, h, w = (int(side) for side in grid)
        return t * self.compressor.count((h // merge, w // merge))

    def replace_image_token(self, image_inputs: dict, image_idx: int, **kwargs: Any) -> str:
        merge = self.image_processor.merge_size  # type: ignore[attr-defined]
        return self.image_token * self.kept(image_inputs["image_grid_thw"][image_idx], merge)  # type: ignore[attr-defined]

    def replace_video_token(self, video_inputs: dict, video_idx: int, **kwargs: Any) -> str:
        merge = self.video_processor.merge_size  # type: ignore[attr-defined]
        return self.video_token * self.kept(video_inputs["video_grid_thw"][video_idx], merge)  # type: ignore[attr-defined]

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, video_sizes: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "the number of compressed vision tokens follows from the grid of patches: call the processor on the images"
        )


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, with the classes that compress it.

    parts: (path of a module within the base model, the class that goes before its own).
    processors: names of transformers' processor classes for it.
    needs_grid: whether kept tokens must form a grid.
    watched: whether the tower's and the language model's attention can be read, and a resampler added.
    """

    title: str
    parts: tuple[tuple[str, type], ...]
    processor: type
    processors: tuple[str, ...]
    needs_grid: bool = False
    watched: bool = False


FAMILIES: dict[str, Family] = {
    "llava": Family(
        "LLaVA", (("multi_modal_projector", ProjectorAfter),), LlavaProcessor, ("LlavaProcessor",), watched=True
    ),
    "llava_next": Family(
        "LLaVA-NeXT",
        (("multi_modal_projector", ProjectorAfter), ("", NextModel)),
        NextProcessor,
        ("LlavaNextProcessor",),
        needs_grid=True,
    ),
    "smolvlm": Family("SmolVLM", (("connector", ConnectorBefore),), SmolProcessor, ("SmolVLMProcessor",)),
    "qwen2_5_vl": Family("Qwen2.5-VL", (("", QwenModel),), QwenProcessor, ("Qwen2_5_VLProcessor",), needs_grid=True),
}
REFUSED = {
    "qwen3_vl": "its deepstack features enter several layers of the language model and are not compressed",
    "qwen3_vl_moe": "its deepstack features enter several layers of the language model and are not compressed",
}
