"""`FathomForCausalLM`: the decoder and a depth method behind the interface of a transformers causal LM.

`generate`, `pipeline`, `Trainer`, `peft` and `lm_eval` work on it as on any other model.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from fathom.decoding import entry
from fathom.decoding.speculation import Speculation, speculate
from fathom.decoding.versions import CACHE_NAME
from fathom.models import hf_versions
from fathom.models.adapted_layers import plain_weight
from fathom.models.checkpoints import stock as checkpoints
from fathom.models.checkpoints.adapter import find_adapter
from fathom.models.configuration import FathomConfig
from fathom.models.decoder import Decoder, Stack
from fathom.models.initialization import initialize
from fathom.models.model_card import Published
from fathom.models.registry import build_options, lookup
from fathom.models.slots import RaggedSlotLayer, SlotLayer, SlotStack, hold_slots
from fathom.models.steps.cache import StepLayer, hold_steps
from fathom.models.steps.graphs import Foresight, StepGraphs
from fathom.models.steps.stack import StepStack
from fathom.models.token_facts import TokenFacts
from fathom.models.vocabulary import Vocabulary
from fathom.ops.cross_entropy import IGNORE, cross_entropy, without_token
from fathom.ops.visibility import BIDIRECTIONAL, CAUSAL, Visibility

# What data collators tell flash kernels of packed documents, in tokens.
TOKEN_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class FathomForCausalLM(Published, PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal language model of the GPT-2, GPT-NeoX, Llama or Qwen3 family, with the methods its config names.

        E = c·W_in[x];   h = depth(stack, E);   logits = h W_outᵀ

    `from_pretrained` also reads stock checkpoints of these families; `save_stock_pretrained` writes them.
    """

    config_class = FathomConfig
    config: FathomConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    # What accelerate must not move to a layer's device: mixer and residual are modules that all layers call.
    _skip_keys_device_placement = ["cache", "past_key_values", "residual", "mixer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    predicts: tuple[str, ...] = ("none",)  # methods of the `diffusion` section that this class is for

    def __init__(self, config: FathomConfig):
        if config.diffusion["name"] not in self.predicts:
            named = config.diffusion["name"]
            right = "FathomForCausalLM (AutoModelForCausalLM)"
            if named != "none":
                right = "FathomForMaskedDiffusion (AutoModelForMaskedLM)"
            raise ValueError(f"diffusion={named!r}: {type(self).__name__} is not its class; use {right}")
        super().__init__(config)
        self.model = Decoder(config)
        self.depth = lookup("depth", config.depth["name"])(config, build_options("depth", config.depth))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.compiled: dict[Callable[..., Any], Callable[..., Any]] = {}  # of the vocabulary, by what they were before
        self.step_graphs: StepGraphs | None = None
        self.foresight: Foresight | None = None
        self.speculation: Speculation | None = None  # of the last generate() that drafted
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for its decorator in this file

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
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
        output_auxiliary: bool = False,
        visibility: Visibility | None = None,
        num_items_in_batch: Tensor | int | None = None,
        domains: Int[Tensor, " B"] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Arguments as in transformers; the cache may come as `cache` or `past_key_values`.

        `inputs_embeds` are rows of the input table: they are scaled like looked-up ones. Without `position_ids`
        positions count the attended tokens of `attention_mask`, so left-padded rows equal the same rows alone. In
        training mode with labels the logits are not materialised (`logits` is None), as the loss needs none.
        `visibility` says who sees whom (ops/visibility.py) instead of `config.is_causal`.
        `output_auxiliary=True` also returns losses, traces and statistics of the methods by name (`FathomOutput`).
        `domains` [B], the number of the source that each row comes from, is read by losses and statistics of routers.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`; no token in them; two caches; a cache with
                the wrong number of layers, one that another method filled with slots, or one that holds tokens where
                gradient checkpointing keeps layers from reading it; where tokens have several slots, an
                `attention_mask` that is not [batch, cached and new tokens], or `cu_seq_lens_q` without `position_ids`
                or with an `attention_mask`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        shift_labels = kwargs.pop("shift_labels", None)  # in the signature, Trainer would demand it as a second label
        scales, excluded = kwargs.pop("loss_scales", None), kwargs.pop("excluded_token", None)  # masked_diffusion.py
        scored = kwargs.pop("scored_tokens", None)  # the head reads so many tokens of each row, from the first on
        if cache is not None and past_key_values is not None and past_key_values is not cache:
            raise ValueError("pass exactly one of cache and past_key_values: they are names of one argument")
        cache = past_key_values if cache is None else cache
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if (use_cache or cache is not None) and hf_versions.layers_lose_cache(self):
            if cache is not None and cache.get_seq_length():
                raise ValueError(
                    f"{CACHE_NAME} holds {cache.get_seq_length()} tokens, which layers under gradient "
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
        layer_kwargs = dict(kwargs, use_cache=use_cache)
        stack = self.bind_stack(embeddings, attention_mask, position_ids, cache, layer_kwargs, visibility)
        feed_forward: Any = lookup("feed_forward", self.config.feed_forward["name"])
        if feed_forward.reads_tokens and (self.training or output_auxiliary):
            stack.tokens = token_facts(embeddings, attention_mask, domains)
        stack.hidden_states = [] if _wanted(output_hidden_states, self.config.output_hidden_states) else None
        stack.attentions = [] if _wanted(output_attentions, self.config.output_attentions) else None

        targets = shift_labels
        if targets is None and labels is not None:
            # token t+1 is the target of position t; shifting the labels copies less than shifting the states
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        stack.targets = targets
        out = self.depth(stack, embeddings, self.vocabulary())
        if scored is not None:
            out.hidden_states = out.hidden_states[:, :scored]
        if stack.hidden_states is not None:
            stack.hidden_states.append(out.hidden_states)

        losses = {**out.losses, **self.losses_of_layers(stack)}
        logits = loss = None
        if targets is None:
            logits = self.lm_head(slice_positions(out.hidden_states, logits_to_keep))
        else:
            own = (targets != IGNORE).sum()
            if out.objective is not None:
                total = out.objective * own
            elif self.training and plain_weight(self.lm_head, out.hidden_states.device) is not None:
                total, _ = self.vocabulary().loss(out.hidden_states, targets, scales, excluded)
            else:
                logits = self.lm_head(out.hidden_states)
                logits = logits if excluded is None else without_token(logits, excluded)
                each = cross_entropy(logits.flatten(0, 1), targets.flatten())
                total = (each if scales is None else each * scales.flatten()).sum()
                logits = slice_positions(logits, logits_to_keep)
            items = own.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = total / items
            if losses:  # means over this batch, weighted like it among the batches of a step
                loss = loss + sum(losses.values()) * own / items
        said: dict[str, Any] = {}
        if output_auxiliary:
            values = {name: torch.stack(kept) for name, kept in stack.auxiliary.items()}
            said = {"losses": losses, "trace": out.trace, "auxiliary": values}
        return hf_versions.causal_lm_output(
            cache if use_cache else None,
            loss=loss,
            logits=logits,
            hidden_states=tuple(stack.hidden_states) if stack.hidden_states is not None else None,
            attentions=tuple(stack.attentions) if stack.attentions is not None else None,
            **said,
        )

    def losses_of_layers(self, stack: Stack) -> dict[str, Tensor]:
        """The auxiliary losses of the layers by name, summed over the layers that ran."""
        names = lookup("feed_forward", self.config.feed_forward["name"]).losses  # type: ignore[attr-defined]
        return {name: torch.stack(stack.auxiliary[name]).sum() for name in names if name in stack.auxiliary}

    def bind_stack(
        self,
        embeddings: Float[Tensor, "B T d"],
        attention_mask: Any,
        position_ids: Int[Tensor, "B T"] | None,
        cache: Cache | None,
        layer_kwargs: dict[str, Any],
        visibility: Visibility | None = None,
    ) -> Stack:
        """The layer stack with this forward's positions, mask and cache."""
        own = CAUSAL if self.config.is_causal else BIDIRECTIONAL
        visibility = own if visibility is None else visibility
        if visibility != own and not self.depth.sees_anyone(self.config, self.depth.options):
            raise ValueError(
                f"visibility={visibility}: depth={self.depth.name!r} gives a token slots or steps of causal order; "
                "leave it out"
            )
        if visibility.is_causal != own.is_causal:
            layer_kwargs["is_causal"] = visibility.is_causal
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
            layer_kwargs = self.without_boundaries(layer_kwargs, given, attention_mask, len(embeddings))
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
        mask = hf_versions.visible_mask(self.config, embeddings, attention_mask, cache, given, visibility)
        slot_ids = None
        if given is not None and attention_mask is not None and "flash" in str(self.config._attn_implementation):
            # its kernels take restarting ids of a single row for packed documents, which a mask says there are not
            slot_ids = torch.arange(length, device=embeddings.device)[None]
        tables = self.model.positions.tables(embeddings, position_ids)
        return Stack(self.model, position_ids, tables, mask, cache, layer_kwargs, slot_ids=slot_ids)

    def without_boundaries(
        self, layer_kwargs: dict[str, Any], position_ids: Int[Tensor, "B T"] | None, attention_mask: Any, rows: int
    ) -> dict[str, Any]:
        """`layer_kwargs` without boundaries of packed documents that are counted in tokens. A pass runs over slots,
        whose position ids say where documents start. Raises ValueError where these cannot say it.
        """
        if layer_kwargs.get("cu_seq_lens_q") is not None:
            needs = None
            if position_ids is None:
                needs = "position_ids, which say where a document starts: pass them"
            elif attention_mask is not None:
                needs = "no attention_mask, which says that a row is one document: leave it out"
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
        """As in transformers. Refuses reentrant checkpointing where more than one tensor passes from layer to layer, or
        layers read a bias or earlier slots with a gradient: it would lose gradients silently."""
        function = args[0] if args else kwargs.get("gradient_checkpointing_func")
        reentrant = getattr(function, "keywords", {}).get("use_reentrant")
        depth, mixer, residual = (getattr(self.config, section)["name"] for section in ("depth", "mixer", "residual"))
        several = self.depth.ragged or self.depth.adaptive or (mixer, residual) != ("none", "standard")
        several = several or bool(lookup("feed_forward", self.config.feed_forward["name"]).losses)  # type: ignore[attr-defined]
        if enable and reentrant and several:
            raise ValueError(
                f"use_reentrant=True loses gradients with mixer={mixer!r}, residual={residual!r}, depth={depth!r}; "
                "use False, which is the default"
            )
        super()._set_gradient_checkpointing(enable, *args, **kwargs)  # type: ignore[misc]

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers. Raises ValueError, and leaves the model as it is, where a method needs more tokens."""
        if new_num_tokens is not None:
            multiple = pad_to_multiple_of or 1
            config = copy.copy(self.config)
            config.vocab_size = -(-new_num_tokens // multiple) * multiple
            reason = type(self.depth).unsupported(config, self.depth.options)
            if reason:
                raise ValueError(f"new_num_tokens={new_num_tokens} with depth={self.depth.name!r}: {reason}")
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    def generate(self, *args: Any, draft_passes: int | None = None, draft_tokens: int = 4, **kwargs: Any) -> Any:
        """As in transformers. Greedy decoding and sampling run in Fathom's own loop, which gives the same tokens, and
        long prompts are read in parts (`fathom.decoding`).

        draft_passes: passes of a draft of `draft_tokens` tokens at a time, which one full forward verifies. Outputs are
            distributed as without a draft; `model.speculation` counts how many drafted tokens were accepted.
        """
        config = kwargs.get("generation_config")
        if config is not None and not isinstance(config, GenerationConfig):
            raise ValueError(
                f"generation_config of type {type(config).__name__}: an autoregressive model takes a GenerationConfig"
            )
        if draft_passes is not None:
            kwargs = entry.named(args, kwargs)
            return speculate(self, super().generate, draft_passes, draft_tokens, kwargs)
        cut = entry.exact_cut if self.depth.parts_are_exact else entry.whole_prompt
        return entry.generate(self, super().generate, *args, cut=cut, **kwargs)

    def _get_candidate_generator(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        if generation_config.assistant_early_exit is not None:  # it sets num_hidden_layers, and layers run all the same
            raise ValueError(
                f"assistant_early_exit={generation_config.assistant_early_exit!r} is not implemented: all layers run "
                "in every pass; give an assistant_model, or prompt_lookup_num_tokens"
            )
        return super()._get_candidate_generator(generation_config, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        if not self.config.is_causal:
            raise ValueError("is_causal=False: tokens see later ones, so text is not generated from left to right")
        with hf_versions.generating_cache_for(self, self.depth.options.passes):
            return super()._prepare_cache_for_generation(*args, **kwargs)  # type: ignore[misc]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> FathomForCausalLM:
        """As in transformers, and a stock checkpoint of GPT-2, GPT-NeoX, Llama, Qwen2, Qwen3, Qwen2-MoE, Mixtral or
        Qwen3-MoE loads too.

        `depth`, `mixer`, `residual` and other config fields put methods on the checkpoint; a Fathom checkpoint also
        takes a `config` with them. Only parameters of these methods may be absent from the files. `rope_pp_mode`
        ("imag1" for EH, "imag2" for EC) reads a checkpoint of RoPE++'s authors, whose config lacks it. A head that
        differs from the input table is kept, whatever `tie_word_embeddings` says. A peft adapter beside the
        weights, or alone in a folder and naming them, is loaded too: merged into a stock checkpoint's weights, attached
        to a Fathom checkpoint's.

        Raises:
            ValueError: any other tensor that is absent or has no place, another family, a config field of the family
                that the decoder does not implement, or a damaged file.
        """
        path = pretrained_model_name_or_path
        if path is None:
            return super().from_pretrained(None, *args, **kwargs)
        with checkpoints.damage_named(path):
            path, adapter = find_adapter(path, kwargs)
            places = {name: kwargs.pop(name) for name in checkpoints.PLACES if name in kwargs}
            given = isinstance(kwargs.get("config"), FathomConfig)
            loaded = None if given else checkpoints.load_stock(path, adapter, kwargs)
            if loaded is None:
                return cls._from_fathom(path, adapter, places, *args, **kwargs)
        config, stored, state, generation_config, kind = loaded
        read: Any = super().from_pretrained(None, config=config, state_dict=state, output_loading_info=True, **kind)
        model, report = read
        checkpoints.check_names(path, report["missing_keys"], report["unexpected_keys"], config, stored)
        checkpoints.forget_path(model)
        model.depth.adapt(model.model)
        if generation_config is not None:
            model.generation_config = generation_config
        model = cls._placed(model, places)
        return (model, report) if kwargs.get("output_loading_info") else model  # type: ignore[return-value]

    @classmethod
    def _from_fathom(
        cls,
        path: Any,
        adapter: tuple[Any, dict[str, Any]] | None,
        places: dict[str, Any],
        *args: Any,
        output_loading_info: bool = False,
        adapter_name: str = "default",
        **kwargs: Any,
    ) -> Any:
        given, stored = checkpoints.configs(path, kwargs)
        checkpoints.check_depth(path, given, stored)
        checkpoints.check_positions(path, given, stored)
        staged = checkpoints.changed_sections(given, stored)
        converts = checkpoints.converts(given, stored)
        if converts:  # loaded as it is stored, then its tensors become what the method has of them
            kwargs = {name: kwargs[name] for name in kwargs if name not in checkpoints.FIELDS}
            kwargs["config"] = copy.deepcopy(given)
            kwargs["config"].positions = stored.positions
        with checkpoints.changes_named(path, kwargs), hf_versions.weights_alone() as alone:
            direct = {} if staged else places
            loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs, **alone, **direct)
        model, report = loaded
        missing = set(report["missing_keys"])
        checkpoints.check_names(path, missing, report["unexpected_keys"], model.config, stored)
        if {f"depth.{name}" for name, _ in model.depth.named_parameters()} <= missing:
            model.depth.adapt(model.model, stored.depth)
        if "lm_head.weight" not in model.all_tied_weights_keys:  # the files have a head of its own
            model.config.tie_word_embeddings = False
        if converts:
            given.tie_word_embeddings, given.dtype = model.config.tie_word_embeddings, model.dtype
            method, options = lookup("positions", given.positions["name"]), build_options("positions", given.positions)
            state = method.read_stock(model.state_dict(), given, options)  # type: ignore[attr-defined]
            kind: Any = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
            generation_config = model.generation_config
            model = super().from_pretrained(None, config=given, state_dict=state, **kind)
            checkpoints.forget_path(model)
            model.generation_config = generation_config
        if staged:
            model = cls._placed(model, places)
        if adapter is not None:
            where, found = adapter
            if any(parameter.is_meta for parameter in model.parameters()):  # transformers would leave it unread
                raise ValueError(
                    f"{where}: an adapter is not attached to weights that device_map={places.get('device_map')!r} "
                    "offloads; merge it (peft: merge_and_unload), or load without offloading"
                )
            of_adapter = model.load_adapter(where, adapter_name, adapter_kwargs=found)
            checkpoints.check_names(where, of_adapter.missing_keys, of_adapter.unexpected_keys)
        return (model, report) if output_loading_info else model

    @classmethod
    def _placed(cls, model: FathomForCausalLM, places: dict[str, Any]) -> FathomForCausalLM:
        """A model that is complete in memory, moved to the devices of `places`. Loaded there directly, transformers
        would look for the parameters of a new method on the disk, where they are not.
        """
        if places.get("device_map") is None:
            return model
        placed: Any = super().from_pretrained(
            None, config=model.config, state_dict=model.state_dict(), dtype=model.dtype,
            attn_implementation=model.config._attn_implementation, **places,
        )  # fmt: skip
        placed.generation_config = model.generation_config
        placed.config.name_or_path = model.config.name_or_path
        return placed

    def get_decoder(self) -> Decoder:
        """The module of the parameters: table, layers, norm. The depth method, not the decoder, runs the layers."""
        return self.model

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: transformers would copy this class's source into every checkpoint saved afterwards."""

    def save_stock_pretrained(self, folder: str | os.PathLike) -> None:
        """Write a vanilla model as its family's stock checkpoint, or a mixture of experts as Qwen2-MoE, Mixtral or
        Qwen3-MoE. Raises ValueError for any other model."""
        checkpoints.save_stock(self, folder)


def hold_tokens(cache: Cache, depth: str) -> None:
    """Replace layers of slots in an empty cache by ordinary ones; refuse a cache that holds another method's slots."""
    slotted = [layer for layer in cache.layers if isinstance(layer, SlotLayer | StepLayer)]
    if any(layer.get_seq_length() for layer in slotted):
        raise ValueError(
            f"{CACHE_NAME} holds several slots a token, but depth={depth!r} keeps 1 with these options; "
            "pass an empty DynamicCache()"
        )
    if slotted:
        cache.layers[:] = [DynamicLayer() for _ in cache.layers]


def token_facts(
    embeddings: Float[Tensor, "B T d"], attention_mask: Any, domains: Int[Tensor, " B"] | None
) -> TokenFacts:
    """The facts about the new tokens that layers may read. Raises ValueError unless `domains` has one number a row."""
    rows, length = embeddings.shape[:2]
    if domains is not None and domains.shape != (rows,):
        raise ValueError(f"domains of shape {list(domains.shape)}: give one a row, [{rows}]")
    masked = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    real = attention_mask[:, -length:].bool() if masked else None
    return TokenFacts(real, None if domains is None else domains[:, None].expand(rows, length))


def _wanted(argument: bool | None, default: bool | None) -> bool:
    return bool(default if argument is None else argument)


def slice_positions(x: Float[Tensor, "B T d"], logits_to_keep: int | Tensor) -> Tensor:
    """The last n positions (0 keeps all), or the positions that a tensor names."""
    if isinstance(logits_to_keep, int):
        return x[:, -logits_to_keep:] if logits_to_keep else x
    return x[:, logits_to_keep]
