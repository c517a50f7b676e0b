"""`FathomForCausalLM`: the decoder and a depth method behind the interface of a transformers causal LM.

`generate`, `pipeline`, `Trainer`, `peft` and `lm_eval` work on it as on any other model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from fathom.models import checkpoints, hf_versions, saved_files
from fathom.models.configuration import FathomConfig
from fathom.models.decoder import Decoder, RotaryEmbedding, Stack
from fathom.models.initialization import initialize
from fathom.models.registry import build_options, lookup
from fathom.models.slots import RaggedSlotLayer, SlotLayer, SlotStack, hold_slots
from fathom.models.step_cache import StepLayer, hold_steps
from fathom.models.step_graphs import Foresight, StepGraphs
from fathom.models.steps import StepStack
from fathom.models.vocabulary import Vocabulary
from fathom.ops.cross_entropy import IGNORE, cross_entropy

# What data collators tell flash kernels of packed documents, in tokens.
TOKEN_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class FathomForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model of the GPT-2, GPT-NeoX, Llama or Qwen3 family, with the methods its config names.

        E = c·W_in[x];   h = depth(stack, E);   logits = h W_outᵀ

    `from_pretrained` also reads stock checkpoints of these families; `save_stock_pretrained` writes them.
    """

    config_class = FathomConfig
    config: FathomConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FathomConfig):
        super().__init__(config)
        self.model = Decoder(config)
        self.depth = lookup("depth", config.depth["name"])(config, build_options("depth", config.depth))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.compiled: dict[Callable[..., Any], Callable[..., Any]] = {}  # of the vocabulary, by what they were before
        self.step_graphs: StepGraphs | None = None
        self.foresight: Foresight | None = None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RotaryEmbedding):
            frequencies, module.attention_scaling = module.initial_frequencies()
            for name in ("inv_freq", "original_inv_freq"):
                getattr(module, name).copy_(frequencies)
        initialize(module, self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T d"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Arguments as in transformers; the cache may come as `cache` or `past_key_values`.

        `inputs_embeds` are rows of the input table: they are scaled like looked-up ones. Without `position_ids`
        positions count the attended tokens of `attention_mask`, so left-padded rows equal the same rows alone. In
        training mode with labels the logits are not materialised (`logits` is None), as the loss needs none.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`; no token in them; a cache with the wrong
                number of layers, that another method filled with slots, or that holds tokens where gradient
                checkpointing keeps layers from reading it; where tokens have several slots, an
                `attention_mask` that is not [batch, cached and new tokens], or `cu_seq_lens_q` without `position_ids`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        shift_labels = kwargs.pop("shift_labels", None)  # in the signature, Trainer would demand it as a second label
        cache = past_key_values if cache is None else cache
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if (use_cache or cache is not None) and hf_versions.layers_lose_cache(self):
            if cache is not None and cache.get_seq_length():
                raise ValueError(
                    f"{hf_versions.CACHE_NAME} holds {cache.get_seq_length()} tokens, which layers under gradient "
                    "checkpointing do not read in training; call eval() or gradient_checkpointing_disable() first"
                )
            warnings.warn("no cache under gradient checkpointing in training: use_cache=False instead", stacklevel=2)
            cache, use_cache = None, False
        if cache is None and use_cache:
            cache = hf_versions.new_cache(self.config, self.depth.options.passes)

        embeddings = self.model.embed(input_ids) if inputs_embeds is None else self.model.scale(inputs_embeds)
        if 0 in embeddings.shape[:2]:
            rows, length = embeddings.shape[:2]
            raise ValueError(f"the input is empty ({rows} rows of {length} tokens): give at least one token")
        stack = self.bind_stack(embeddings, attention_mask, position_ids, cache, dict(kwargs, use_cache=use_cache))
        stack.hidden_states = [] if _wanted(output_hidden_states, self.config.output_hidden_states) else None
        stack.attentions = [] if _wanted(output_attentions, self.config.output_attentions) else None

        targets = shift_labels
        if targets is None and labels is not None:
            # token t+1 is the target of position t; shifting the labels copies less than shifting the states
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        stack.targets = targets
        out = self.depth(stack, embeddings, self.vocabulary())
        if stack.hidden_states is not None:
            stack.hidden_states.append(out.hidden_states)

        logits = loss = None
        if targets is None:
            logits = self.lm_head(slice_positions(out.hidden_states, logits_to_keep))
        else:
            own = (targets != IGNORE).sum()
            if out.objective is not None:
                total = out.objective * own
            elif self.training and type(self.lm_head) is nn.Linear:  # an adapter on the head takes the plain path
                total, _ = self.vocabulary().loss(out.hidden_states, targets)
            else:
                logits = self.lm_head(out.hidden_states)
                total = cross_entropy(logits.flatten(0, 1), targets.flatten()).sum()
                logits = slice_positions(logits, logits_to_keep)
            items = own if num_items_in_batch is None else num_items_in_batch
            loss = total / items
            if out.losses:  # means over this batch, weighted like it among the batches of a step
                loss = loss + sum(out.losses.values()) * own / items
        return hf_versions.causal_lm_output(
            cache if use_cache else None,
            loss=loss,
            logits=logits,
            hidden_states=tuple(stack.hidden_states) if stack.hidden_states is not None else None,
            attentions=tuple(stack.attentions) if stack.attentions is not None else None,
        )

    def bind_stack(
        self,
        embeddings: Float[Tensor, "B T d"],
        attention_mask: Any,
        position_ids: Int[Tensor, "B T"] | None,
        cache: Cache | None,
        layer_kwargs: dict[str, Any],
    ) -> Stack:
        """The layer stack with this forward's positions, mask and cache."""
        length, seen, slots = embeddings.shape[1], 0, self.depth.slots
        layer = RaggedSlotLayer if self.depth.ragged else SlotLayer
        if cache is not None:
            hf_versions.check_cache_layers(cache, self.config, self.depth.options.passes, self.depth.name)
            if self.depth.segments:
                hold_steps(cache, self.config, self.depth.segments, self.depth.name)
            elif slots > 1:
                hold_slots(cache, self.config, slots, self.depth.name, layer)
            else:
                hold_tokens(cache, self.depth.name)
            seen = cache.get_seq_length()
        given = position_ids
        if position_ids is None:
            if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
            else:
                position_ids = (torch.arange(length, device=embeddings.device) + seen).unsqueeze(0)
        if slots > 1:
            shape = [len(embeddings), seen + length]
            got = list(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
            if attention_mask is not None and got != shape:
                raise ValueError(
                    f"attention_mask of shape {got} with depth={self.depth.name!r}: a token has {slots} slots, so the "
                    f"mask must say [batch, tokens] which tokens are real: {shape} for {seen} cached and {length} new"
                )
            layer_kwargs = self.without_boundaries(layer_kwargs, given, len(embeddings))
            if self.depth.segments:
                rows = position_ids.expand(len(embeddings), -1)
                most = self.depth.most_steps(self.depth.options)
                return StepStack(
                    self.model, rows, None, attention_mask, cache, layer_kwargs, most=most, packed=given is not None,
                    graphs=self.step_graphs,
                    foresight=self.foresight,
                )  # fmt: skip
            return SlotStack(
                self.model, position_ids, None, attention_mask, cache, layer_kwargs, stages=slots,
                packed=given is not None, layer=layer,
            )  # fmt: skip
        # Only the caller's own position ids can mean packed documents. Ours count upwards; handing them on would make a
        # traced mask builder, which cannot look, build a [B, 1, T, T] mask, and attention lose its causal kernel.
        mask = hf_versions.causal_mask(self.config, embeddings, attention_mask, cache, given)
        rotary = self.model.rotary_emb
        return Stack(
            self.model, position_ids, rotary(embeddings, position_ids) if rotary else None, mask, cache, layer_kwargs
        )

    def without_boundaries(
        self, layer_kwargs: dict[str, Any], position_ids: Int[Tensor, "B T"] | None, rows: int
    ) -> dict[str, Any]:
        """Without the boundaries of packed documents in tokens: a pass runs over other numbers of slots, whose ids say
        where documents start. Raises ValueError where these cannot say it."""
        if layer_kwargs.get("cu_seq_lens_q") is not None:
            needs = None
            if position_ids is None:
                needs = "position_ids, which say where a document starts: pass them"
            elif rows > 1 and "flash" in str(self.config._attn_implementation):
                needs = f"one row of all documents, not {rows} rows"
            if needs:
                raise ValueError(
                    f"cu_seq_lens_q with depth={self.depth.name!r}: a token has {self.depth.slots} slots, and packed "
                    f"documents need {needs}, as DataCollatorWithFlattening does"
                )
        return {name: value for name, value in layer_kwargs.items() if name not in TOKEN_BOUNDARIES}

    def vocabulary(self) -> Vocabulary:
        """Head and input table as depth methods see them."""
        return Vocabulary(self.lm_head, self.model.embed_tokens, self.config.embed_scale, self.compiled)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Refuses reentrant checkpointing where more than one tensor passes from layer to layer, or layers read a bias
        or earlier slots that have a gradient: it would lose gradients without a word."""
        function = args[0] if args else kwargs.get("gradient_checkpointing_func")
        reentrant = getattr(function, "keywords", {}).get("use_reentrant")
        depth, mixer, residual = (getattr(self.config, section)["name"] for section in ("depth", "mixer", "residual"))
        several = self.depth.ragged or self.depth.adaptive or (mixer, residual) != ("none", "standard")
        if enable and reentrant and several:
            raise ValueError(
                f"use_reentrant=True loses gradients with mixer={mixer!r}, residual={residual!r}, depth={depth!r}; "
                "use False, which is the default"
            )
        super()._set_gradient_checkpointing(enable, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        with hf_versions.generating_cache_for(self, self.depth.options.passes):
            return super()._prepare_cache_for_generation(*args, **kwargs)  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> FathomForCausalLM:
        """As in transformers, and a stock GPT-2, GPT-NeoX, Llama or Qwen3 checkpoint loads too.

        `depth`, `mixer` and `residual` (and other config fields) may be given to put methods on the checkpoint, for a
        Fathom checkpoint also a `config` with them. Only such a method's parameters may be absent from the files.
        Raises ValueError for any other tensor that is absent, another family, a config field of the family that the
        decoder lacks, and a damaged file.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, **kwargs)
        with checkpoints.damage_named(pretrained_model_name_or_path):
            given = isinstance(kwargs.get("config"), FathomConfig)
            loaded = None if given else checkpoints.load_stock(pretrained_model_name_or_path, kwargs)
            if loaded is None:
                return cls._from_fathom(pretrained_model_name_or_path, *args, **kwargs)
        config, state, generation_config, placement = loaded
        model = super().from_pretrained(None, config=config, state_dict=state, **placement)
        model.depth.adapt(model.model)
        if generation_config is not None:
            model.generation_config = generation_config
        return model

    @classmethod
    def _from_fathom(cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        with checkpoints.changes_named(path, kwargs):
            loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        model, report = loaded
        hub = {name: kwargs[name] for name in checkpoints.HUB if name in kwargs}
        stored = FathomConfig.from_pretrained(path, **hub)
        checkpoints.check_depth(path, model.config, stored)
        added = checkpoints.new_parameters(model.config, stored)
        missing = set(report["missing_keys"])
        checkpoints.refuse_missing(path, {name for name in missing if not name.startswith(added)})
        if {f"depth.{name}" for name, _ in model.depth.named_parameters()} <= missing:
            model.depth.adapt(model.model, stored.depth)
        return loaded if output_loading_info else model

    def get_decoder(self) -> Decoder:
        """The module of the parameters: table, layers, norm. The depth method, not the decoder, runs the layers."""
        return self.model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with a model card, unless the folder has one."""
        if self.should_save_on_this_rank(kwargs.get("is_main_process", True)):
            saved_files.write_card(self, save_directory)  # before an upload, which super() may do
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing: transformers would copy this class's source into every checkpoint saved afterwards."""

    def save_stock_pretrained(self, folder: str | os.PathLike) -> None:
        """Write a vanilla model as the stock checkpoint of its family. Raises ValueError where that is impossible."""
        checkpoints.save_stock(self, folder)


def hold_tokens(cache: Cache, depth: str) -> None:
    """Make layers of slots in an empty cache ordinary ones; refuse a cache with slots of another method in it."""
    slotted = [layer for layer in cache.layers if isinstance(layer, SlotLayer | StepLayer)]
    if any(layer.get_seq_length() for layer in slotted):
        raise ValueError(
            f"{hf_versions.CACHE_NAME} holds several slots a token, but depth={depth!r} keeps 1 with these options; "
            "pass an empty DynamicCache()"
        )
    if slotted:
        cache.layers[:] = [DynamicLayer() for _ in cache.layers]


def _wanted(argument: bool | None, default: bool | None) -> bool:
    return bool(default if argument is None else argument)


def slice_positions(x: Float[Tensor, "B T d"], logits_to_keep: int | Tensor) -> Tensor:
    """The last n positions (0 keeps all), or the positions that a tensor names."""
    if isinstance(logits_to_keep, int):
        return x[:, -logits_to_keep:] if logits_to_keep else x
    return x[:, logits_to_keep]
