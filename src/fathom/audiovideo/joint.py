"""One forward of MOVA, and the model that is trained.

A forward reads top to bottom in `joint_forward`: both towers embed their tokens, then layer by layer exchange through
the bridge and run their own block; video layers beyond the last audio layer run alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import UMT5Config, UMT5EncoderModel

from fathom.audiovideo.bridge import Blocks, Bridge, exchange
from fathom.audiovideo.configuration import MovaConfig
from fathom.audiovideo.mova import Mova
from fathom.audiovideo.scheduler import TABLE, add_noise, draw, shifted, unshifted
from fathom.audiovideo.towers import AudioTower, VideoTower
from fathom.models.hf_versions import FathomOutput

FIRST, SECOND = "text_encoder.shared.weight", "text_encoder.encoder.embed_tokens.weight"
TEXT_SEED = 0  # of the text encoder that a model from scratch has


def joint_forward(
    video: VideoTower,
    audio: AudioTower,
    bridge: Bridge | None,
    video_latents: Float[Tensor, "B Ci f h w"],
    audio_latents: Float[Tensor, "B Ca l"],
    text: Float[Tensor, "B T C"],
    video_timestep: Float[Tensor, " B"],
    audio_timestep: Float[Tensor, " B"],
    scale: Float[Tensor, " B"] | None = None,
    *,
    compiled_layer: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Float[Tensor, "B Cv f h w"], Float[Tensor, "B Ca l"]]:
    """Velocities of both modalities.

    Args:
        bridge: None: the towers run without any exchange.
        video_latents: noisy latents with the condition on the first picture (`condition`).
        text: states of the caption, zero after its end.
        video_timestep, audio_timestep: τ = 1000 σ of each clip.
        scale: 1 for clips with the bridge, 0 for those without; None: all with.
        compiled_layer: `layer_forward`, compiled; None: its three parts run one by one.
    """
    v = video(video_latents, video_timestep, text, part="begin")
    a = audio(audio_latents, audio_timestep, text, part="begin")
    frames = v.sizes[0]
    tables: Any = (None, None)
    if bridge is not None:
        tables = bridge.tables(frames, v.hidden.shape[1], a.hidden.shape[1], v.hidden.dtype, v.hidden.device)
    for layer, block in enumerate(video.blocks):
        if compiled_layer is not None and layer < len(audio.blocks):
            blocks = (None, None) if bridge is None else bridge.blocks(layer)
            rest = (v.given, a.given, tables, frames, scale)
            run = functools.partial(compiled_layer, blocks, block, audio.blocks[layer])
            if torch.is_grad_enabled() and video.gradient_checkpointing:
                v.hidden, a.hidden = video._gradient_checkpointing_func(run, v.hidden, a.hidden, *rest)
            else:
                v.hidden, a.hidden = run(v.hidden, a.hidden, *rest)
            continue
        if bridge is not None and bridge.exchanges(layer):
            given = (layer, v.hidden, a.hidden, tables, frames, scale)
            if torch.is_grad_enabled() and video.gradient_checkpointing:
                v.hidden, a.hidden = video._gradient_checkpointing_func(bridge, *given)
            else:
                v.hidden, a.hidden = bridge(*given)
        video.run(block, v)
        if layer < len(audio.blocks):
            audio.run(audio.blocks[layer], a)
    return video(stream=v, part="end"), audio(stream=a, part="end")


def layer_forward(
    blocks: Blocks,
    video_block: nn.Module,
    audio_block: nn.Module,
    video: Float[Tensor, "B L D"],
    audio: Float[Tensor, "B M K"],
    of_video: tuple[Any, ...],
    of_audio: tuple[Any, ...],
    tables: tuple[Any, Any],
    frames: int,
    scale: Float[Tensor, " B"] | None,
) -> tuple[Tensor, Tensor]:
    """The states of both towers after one layer that both have: the exchange, then each its own block.

    Compiled as a whole it is one call of Python where its parts are four, which is what small steps wait for.
    """
    video, audio = exchange(blocks, video, audio, tables, frames, scale)
    return video_block(video, *of_video), audio_block(audio, *of_audio)


def condition(first: Float[Tensor, "B C f h w"], stride: int) -> Float[Tensor, "B M f h w"]:
    """The condition on the first picture for the video towers: `stride` mask channels, 1 at latent frame 0, and the
    latents of the picture followed by zeros."""
    mask = torch.zeros_like(first[:, :1]).repeat(1, stride, 1, 1, 1)
    mask[:, :, 0] = 1
    return torch.cat([mask, first], dim=1)


def text_states(
    encoder: nn.Module, input_ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"]
) -> Float[Tensor, "B T C"]:
    """States of captions, zero after their end: the towers attend to all of them."""
    with torch.no_grad():
        states = encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
    return states * attention_mask[..., None].to(states.dtype)


def make_parts(config: MovaConfig) -> dict[str, Any]:
    """New towers and bridge by their names in a checkpoint. `video_dit_2` is left out with one expert, and the bridge
    where it is off."""
    method = config.method
    video = {
        "patch_size": config.patch_size,
        "num_attention_heads": config.video_heads,
        "in_channels": 2 * config.video_channels + config.video_strides[0],
        "out_channels": config.video_channels,
        "ffn_dim": config.video_ffn,
        "num_layers": config.video_layers,
    }
    both = {"attention_head_dim": config.head_dim, "text_dim": config.text_dim, "freq_dim": config.freq_dim}
    parts: dict[str, Any] = {"video_dit": VideoTower(**video, **both)}
    if method.experts == 2:
        parts["video_dit_2"] = VideoTower(**video, **both)
    parts["audio_dit"] = AudioTower(
        num_attention_heads=config.audio_heads,
        in_channels=config.audio_channels,
        out_channels=config.audio_channels,
        ffn_dim=config.audio_ffn,
        num_layers=config.audio_layers,
        **both,
    )
    if method.directions == "off":
        return parts
    parts["dual_tower_bridge"] = Bridge(
        video_layers=config.video_layers,
        audio_layers=config.audio_layers,
        video_width=config.video_width,
        audio_width=config.audio_width,
        head_dim=config.head_dim,
        frame_rate=config.frame_rate,
        video_stride=config.video_strides[0],
        audio_rate=config.audio_rate,
        strategy=method.strategy,
        layers=list(method.layers),
        directions=method.directions,
        rotary=method.rotary,
        pooled_adaln=method.pooled_adaln,
        bridge_init=method.bridge_init,
    )
    return parts


def make_text_encoder(config: MovaConfig) -> UMT5EncoderModel:
    """The text encoder of a model from scratch: UMT5 with random weights that are the same in every run."""
    sizes = UMT5Config(  # type: ignore[call-arg]
        vocab_size=config.vocab_size,
        d_model=config.text_dim,
        d_kv=config.text_dim // 4,
        d_ff=2 * config.text_dim,
        num_layers=config.text_layers,
        num_heads=4,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        dropout_rate=0.0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(TEXT_SEED)
        return UMT5EncoderModel(sizes).eval()


def _name_once(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
    state.pop(f"{prefix}{SECOND}", None)


def _name_twice(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    if f"{prefix}{FIRST}" in state:
        state[f"{prefix}{SECOND}"] = state[f"{prefix}{FIRST}"]


class MovaModel(nn.Module):
    """The towers, the bridge and the text encoder, and their training loss.

    Attributes:
        step: optimiser step, which says whose turn it is among the video experts.
        progress: share of the training that is done, which says the phase.
    """

    text_encoder: Any
    audio_dit: Any
    accepts_loss_kwargs = True  # the loss is divided by the clips of a whole step
    _no_split_modules = ("WanTransformerBlock", "BridgeBlock")

    def __init__(self, config: MovaConfig, parts: Mapping[str, nn.Module] | None = None) -> None:
        """`parts`: towers, bridge and `text_encoder` that exist; None makes them."""
        super().__init__()
        self.config = config
        for name, part in (parts or {**make_parts(config), "text_encoder": make_text_encoder(config)}).items():
            self.add_module(name, part)
        self.text_encoder.requires_grad_(False)
        self.step, self.progress = 0, 0.0
        self.compiled_layer: Callable[..., tuple[Tensor, Tensor]] | None = None
        # The text encoder has one table under two names, which a safetensors file does not hold.
        self.register_state_dict_post_hook(_name_once)
        self.register_load_state_dict_pre_hook(_name_twice)

    def on_step(self, step: int, of_steps: int) -> None:
        """Note the optimiser step; train.Phases calls this before each."""
        self.step, self.progress = step, step / of_steps

    @classmethod
    def from_config(cls, config: MovaConfig) -> MovaModel:
        return cls(config)

    @classmethod
    def from_pretrained(cls, folder: str | Path, config: MovaConfig | None = None) -> MovaModel:
        """The model in a pipeline's folder. A config may change what is trained and how, and none of the sizes."""
        from fathom.audiovideo.pipeline import read_parts

        stored, parts = read_parts(folder)
        if config is not None:
            for name in ("strategy", "layers", "directions", "rotary", "pooled_adaln", "experts"):
                before, now = stored.mova[name], config.mova[name]
                if before != now:
                    raise ValueError(f"mova.{name}={now!r}: the checkpoint {folder} has {before!r}, which stays")
        return cls(stored if config is None else config, parts)

    @property
    def device(self) -> torch.device:
        return self.audio_dit.device

    @property
    def experts(self) -> tuple[VideoTower, ...]:
        """The experts for high and for low noise; a single expert is both."""
        return tuple(getattr(self, name) for name in ("video_dit", "video_dit_2") if hasattr(self, name))

    @property
    def bridge(self) -> Bridge | None:
        return getattr(self, "dual_tower_bridge", None)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **kwargs: Any) -> None:
        """Blocks and exchanges run again in the backward pass. transformers' Trainer calls it by this name, or the one
        below in earlier versions."""
        for tower in (*self.experts, self.audio_dit):
            tower.enable_gradient_checkpointing()

    gradient_checkpointing_enable = activation_checkpointing_enable

    def compile_blocks(self, **options: Any) -> None:
        """Compile a layer of both towers with its exchange into one graph, shared by all layers and both experts; and a
        block into another, for video layers without an audio layer."""
        for tower in (*self.experts, self.audio_dit):
            tower.compile_repeated_blocks(**options)
        self.compiled_layer = torch.compile(layer_forward, **options)

    def expert(self, sigma: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
        """The expert of each noise level: 0 at and above the boundary, 1 below."""
        if len(self.experts) == 1:
            return torch.zeros_like(sigma, dtype=torch.long)
        return (sigma < self.config.method.boundary).long()

    def training_expert(self, step: int) -> int:
        """The expert that trains in this optimiser step."""
        first = 0 if self.config.method.even_expert == "high" else 1
        return (first + step) % 2 if len(self.experts) == 2 else 0

    def noise_levels(
        self, u: Float[Tensor, "B 2"], method: Mova, expert: int | None
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """σ_v and σ_a from uniform numbers; σ_v in the range of `expert`, if one is named."""
        table = method.sigma == "table"
        alone = expert is not None and len(self.experts) == 2
        above = method.boundary if alone and expert == 0 else None
        below = method.boundary if alone and expert == 1 else None
        sigma_v = draw(u[:, 0], method.video_shift, table, above, below)
        if method.noise == "independent":
            return sigma_v, draw(u[:, 1], method.audio_shift, table)
        u_v = unshifted(sigma_v, method.video_shift)
        return sigma_v, shifted(u_v, method.audio_shift)

    def forward(
        self,
        video: Float[Tensor, "B Cv f h w"],
        audio: Float[Tensor, "B Ca l"],
        first: Float[Tensor, "B Cv f h w"],
        input_ids: Int[Tensor, "B T"],
        attention_mask: Int[Tensor, "B T"],
        null_ids: Int[Tensor, "B T"],
        null_mask: Int[Tensor, "B T"],
        video_noise: Float[Tensor, "B Cv f h w"],
        audio_noise: Float[Tensor, "B Ca l"],
        uniform: Float[Tensor, "B 4"],
        num_items_in_batch: Any = None,
        **unused: Any,
    ) -> FathomOutput:
        """The training loss: the sum over the clips of L_video + λ_a L_audio, over `num_items_in_batch` (None: the
        clips of the batch). In training mode the expert is that of `step`; else each clip's own, by its noise.

        Args:
            video, audio: clean latents.
            first: latents of the first picture followed by nothing.
            null_ids, null_mask: the empty caption.
            video_noise, audio_noise: ε.
            uniform: numbers in [0, 1): for σ_v, σ_a, and for dropping text and bridge.
        """
        method = self.config.method.at(self.progress)
        turn = self.training_expert(self.step) if self.training else None
        sigma_v, sigma_a = self.noise_levels(uniform[:, :2], method, turn)
        scale = None
        if self.training:
            dropped = uniform[:, 2] < method.text_dropout
            input_ids = torch.where(dropped[:, None], null_ids, input_ids)
            attention_mask = torch.where(dropped[:, None], null_mask, attention_mask)
            if method.bridge_dropout:
                scale = (uniform[:, 3] >= method.bridge_dropout).to(video.dtype)
        text = text_states(self.text_encoder, input_ids, attention_mask)
        noisy = add_noise(video, video_noise, sigma_v)
        conditioned = torch.cat([noisy, condition(first, self.config.video_strides[0])], dim=1)
        given = (conditioned, add_noise(audio, audio_noise, sigma_a), text, TABLE * sigma_v, TABLE * sigma_a, scale)
        if turn is not None:
            of_video, of_audio = self.velocities(turn, *given)
        else:
            of_video, of_audio = torch.zeros_like(video), torch.zeros_like(audio)
            asked = self.expert(sigma_v)
            for expert in range(len(self.experts)):
                rows: Bool[Tensor, " B"] = asked == expert
                if rows.any():
                    some = (x if x is None else x[rows] for x in given)
                    part = self.velocities(expert, *some)
                    of_video[rows], of_audio[rows] = (found.to(video.dtype) for found in part)
                elif isinstance(self, FSDPModule):  # other ranks may run it, and gather its weights with this one
                    self.velocities(expert, *(x if x is None else x[:1] for x in given))
        losses = [
            F.mse_loss(found.float(), noise.float() - clean.float(), reduction="none").flatten(1).mean(1)
            for found, noise, clean in ((of_video, video_noise, video), (of_audio, audio_noise, audio))
        ]
        clips = len(video) if num_items_in_batch is None else num_items_in_batch
        total = (losses[0] + method.audio_weight * losses[1]).sum() / clips
        return FathomOutput(
            loss=total, losses={}, trace={}, auxiliary={"video_loss": losses[0], "audio_loss": losses[1]}
        )

    def velocities(self, expert: int, *given: Any) -> tuple[Tensor, Tensor]:
        """`joint_forward` of one video expert, the audio tower and the bridge."""
        towers = self.experts[expert], self.audio_dit, self.bridge
        return joint_forward(*towers, *given, compiled_layer=self.compiled_layer)  # type: ignore[misc]
