"""The seam of the `encoder` section: what the layers of an encoder run on.

An encoder is one of three, and its config says which (`config.host`):

    decoder   the decoder's own blocks, each token seeing all             models/sequence_classification.py
    bart      transformers' BART                                          models/seq2seq_bart.py
    longt5    transformers' LongT5                                        models/seq2seq_longt5.py

A method runs the host's layers (`forward`), or replaces their self-attention (`attention`). What follows the encoder, a
decoder with its caches or a head, learns only which positions of the output are real (`memory_mask`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jaxtyping import Bool, Float
from torch import Tensor, nn

from fathom.models.method import Method, NoOptions

__all__ = ["Encoder", "Layer", "NoOptions"]

# layer(x, mask, cut=None, finish=None): one layer of the host on x [B, T, d]; mask [B, T] says which tokens are real,
# None that all are. `cut` shortens what the layer reads (encoders/shortening.py); `finish` is called on the layer's
# output before the norm that ends it, or the encoder.
Layer = Callable[..., Tensor]


class Encoder(Method):
    """A method of the `encoder` section.

    Attributes:
        hosts: the encoders that it runs on.
    """

    wing: ClassVar[str] = "context"
    hosts: ClassVar[tuple[str, ...]]

    def forward(
        self, x: Float[Tensor, "B T d"], mask: Bool[Tensor, "B T"] | None, layers: Sequence[Layer], first: int = 0
    ) -> Float[Tensor, "B S d"]:
        """The output of the layers on embedded tokens. The `first` tokens are no text (a CLS token)."""
        for layer in layers:
            x = layer(x, mask)
        return x

    def memory_mask(self, mask: Bool[Tensor, "B T"] | None, layers: int, first: int = 0) -> Tensor | None:
        """The mask of the output's real positions, given that of the input; None: all are real."""
        return mask

    def attention(self, config: Any, has_relative_attention_bias: bool) -> nn.Module | None:
        """The module that replaces self-attention in LongT5's layers, with the same parameters; None: none does."""
        return None

    @classmethod
    def flops(cls, config: Any, options: Any, length: int) -> float:
        """Matrix-product FLOPs of the encoder's layers on `length` tokens, a multiply-add counted as 2."""
        return config.num_hidden_layers * config.layer_flops(length, length)

    @classmethod
    def memory(cls, config: Any, options: Any, length: int) -> int:
        """Positions of the output for a source of `length` tokens."""
        return length

    @classmethod
    def unsupported(cls, config, options):
        if config.host not in cls.hosts:
            names = " or ".join(cls.hosts)
            return f"encoder={cls.name!r} runs on {names}, and this is {config.host}; use encoder='full' here"
        return None
