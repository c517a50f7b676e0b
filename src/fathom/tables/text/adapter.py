"""The knowledge adapter of AKG (arXiv 2302.12468) as a PEFT method: a bottleneck after feed-forward networks.

    A(h) = h + W_up · ReLU(W_down · h + b_down) + b_up,   W_down: [d/r, d]

`every_layer` applies A to what the feed-forward network of each encoder and decoder layer adds to the residual stream,
`last_layer` to the output of the last encoder and the last decoder layer. peft has no adapter of this form.

    model = get_peft_model(stock_model, KnowledgeAdapterConfig())

Under dropout, A reads the network's output before it is dropped; the released code applies A after.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import PeftType, register_peft_method
from torch import Tensor, nn

NAME = "knowledge_adapter"
PREFIX = "knowledge_"  # peft puts the adapter's name after the word that begins so
# model_type → (the linear layer that a feed-forward network ends with, the norms that end encoder and decoder).
PLACES = {
    "t5": (r".*\.DenseReluDense\.wo", r".*(encoder|decoder)\.final_layer_norm"),
    "bart": (r".*\.fc2", r".*(encoder|decoder)\.layers\.{last}\.final_layer_norm"),
    "llama": (r".*\.mlp\.down_proj", r"(.*\.)?norm"),
}
OF_FAMILY = {"fathom_table_t5": "t5", "fathom_table_bart": "bart", "fathom_table_llama": "llama"}
OF_FAMILY |= {"fathom_bart": "bart", "fathom_t5": "t5"}

if NAME.upper() not in list(PeftType):  # peft's list of methods is an enumeration, which Python extends in no other way
    _member: Any = str.__new__(PeftType, NAME.upper())
    _member._name_ = _member._value_ = NAME.upper()
    type.__setattr__(PeftType, NAME.upper(), _member)  # from Python 3.12 on members are attributes of the class
    PeftType._member_map_[NAME.upper()] = PeftType._value2member_map_[NAME.upper()] = _member
    PeftType._member_names_.append(NAME.upper())


@dataclass
class KnowledgeAdapterConfig(PeftConfig):
    """Options of the adapter.

    Attributes:
        reduction: r, width of the model / width of the bottleneck.
        placement: "every_layer", as the released code has it, or "last_layer", as its README says.
        zero_init_up: W_up starts at zero, so that the adapter starts as the identity; else N(0, 0.02²).
        target_modules: the modules whose output is adapted, as in peft; None: the family's.
    """

    reduction: int = field(default=16)
    placement: str = field(default="every_layer")
    zero_init_up: bool = field(default=False)
    target_modules: Any = field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType(NAME.upper())
        if type(self.reduction) is not int or self.reduction < 1:
            raise ValueError(f"reduction={self.reduction!r}: must be an integer of at least 1")
        if self.placement not in ("every_layer", "last_layer"):
            raise ValueError(f'placement={self.placement!r}: use "every_layer" or "last_layer"')
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)


class Bottleneck(nn.Module):
    """h + W_up · ReLU(W_down · h + b_down) + b_up."""

    def __init__(self, width: int, inner: int, zero_init_up: bool, **factory: Any):
        super().__init__()
        self.down, self.up = nn.Linear(width, inner, **factory), nn.Linear(inner, width, **factory)
        self.zero_init_up = zero_init_up
        self.initialize()

    def initialize(self) -> None:
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=0.0 if linear is self.up and self.zero_init_up else 0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, h: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        h = h.to(self.down.weight.dtype) if not torch.is_autocast_enabled(h.device.type) else h
        return h + self.up(self.down(h).relu())


class KnowledgeLayer(nn.Module, BaseTunerLayer):
    """A module whose output is adapted."""

    adapter_layer_names = (NAME,)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: KnowledgeAdapterConfig):
        super().__init__()
        self.base_layer = base_layer
        self.knowledge_adapter = nn.ModuleDict()
        self._disable_adapters, self.merged_adapters = False, []
        self.add(adapter_name, config)

    @property
    def bias(self) -> Any:
        return getattr(self.get_base_layer(), "bias", None)

    def add(self, adapter_name: str, config: KnowledgeAdapterConfig, **kwargs: Any) -> None:
        base: Any = self.get_base_layer()
        weight = base.weight
        width = weight.shape[0]  # of a linear layer and of a norm alike, what comes out
        inner = width // config.reduction
        if inner < 1:
            raise ValueError(f"reduction={config.reduction}: the model has width {width}; use at most {width}")
        factory = {"device": weight.device, "dtype": weight.dtype if weight.is_floating_point() else None}
        self.knowledge_adapter[adapter_name] = Bottleneck(width, inner, config.zero_init_up, **factory)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return out
        for name in self.active_adapters:
            if name in self.knowledge_adapter:
                out = self.knowledge_adapter[name](out).to(out.dtype)
        return out

    def merge(self, safe_merge: bool = False, adapter_names: Any = None) -> None:
        raise ValueError("a knowledge adapter has a ReLU and cannot be merged into the weights; keep it beside them")

    def unmerge(self) -> None:
        """Do nothing: the adapter is never merged."""


class KnowledgeAdapterModel(BaseTuner):
    """The model that `get_peft_model` makes with a `KnowledgeAdapterConfig`."""

    prefix = PREFIX
    tuner_layer_cls = KnowledgeLayer
    target_module_mapping: dict[str, Any] = {}  # noqa: RUF012

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        if peft_config.target_modules is None:
            peft_config.target_modules = places(model_config, peft_config.placement)
        return peft_config

    def _create_and_replace(
        self, peft_config: Any, adapter_name: str, target: Any, target_name: str, parent: Any, current_key: str,
        parameter_name: str | None = None,
    ) -> None:  # fmt: skip
        if isinstance(target, KnowledgeLayer):
            target.add(adapter_name, peft_config)
            return
        layer = KnowledgeLayer(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)


def places(model_config: dict[str, Any], placement: str) -> str:
    """The modules that are adapted, as a regular expression of their names. Raises ValueError for other families."""
    kind = model_config.get("model_type", "")
    kind = OF_FAMILY.get(kind, kind)
    if kind not in PLACES:
        raise ValueError(
            f"model_type={kind!r}: the knowledge adapter knows {', '.join(PLACES)}; name target_modules yourself"
        )
    every, last = PLACES[kind]
    if placement == "every_layer":
        return every
    if kind == "bart":
        layers = {"encoder": model_config["encoder_layers"] - 1, "decoder": model_config["decoder_layers"] - 1}
        return "|".join(rf"(.*\.)?{side}\.layers\.{number}\.final_layer_norm" for side, number in layers.items())
    return last


def _register() -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if PeftType(NAME.upper()) not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(
            name=NAME, config_cls=KnowledgeAdapterConfig, model_cls=KnowledgeAdapterModel, prefix=PREFIX
        )


_register()
