"""The generator of StyleGAN2-ADA (Karras et al., arXiv 1912.04958, 2006.06676): HuRef's pictures, from weights you
have.

    z ∈ R^512 → mapping (8 fully connected layers) → w → synthesis (modulated convolutions, 4² … resolution²) → RGB

Weights are read from safetensors under the names of the official `G_ema` state dict (`mapping.fc0.weight`,
`synthesis.b4.const`, …). NVIDIA publishes pickles; convert them once in an environment you trust — Fathom never
unpickles.
"""

import math
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from fathom.lineage.picture import Picture

_GAIN = math.sqrt(2)  # of leaky ReLU 0.2
_MAPPING_LR = 0.01
_CLAMP = 256.0


class StyleGAN2:
    """A renderer (512-vector → picture) over a StyleGAN2 state dict; noise is the stored constant, so it is
    deterministic.

    truncation, cutoff: w is drawn to its mean by this factor in the first `cutoff` layers (HuRef: 0.5, 8).
    """

    def __init__(self, state: dict[str, Tensor], truncation: float = 0.5, cutoff: int = 8) -> None:
        self._state = {name.removeprefix("G_ema."): t.float() for name, t in state.items()}
        needed = ("mapping.fc0.weight", "mapping.w_avg", "synthesis.b4.const", "synthesis.b4.torgb.weight")
        if missing := [name for name in needed if name not in self._state]:
            raise ValueError(f"state: no tensor {missing[0]!r}; expected the G_ema state dict of StyleGAN2-ADA")
        blocks = {name.split(".")[1] for name in self._state if name.startswith("synthesis.b")}
        self.resolutions = sorted(int(b[1:]) for b in blocks)
        self._truncation, self._cutoff = truncation, cutoff

    @classmethod
    def load(cls, path: str | Path, truncation: float = 0.5, cutoff: int = 8) -> "StyleGAN2":
        """Read a safetensors file. Raises ValueError when it is not one, or not a StyleGAN2 generator."""
        try:
            return cls(load_file(path), truncation, cutoff)
        except SafetensorError as error:
            message = f"{path}: not a safetensors file ({error}); convert the pickle with safetensors.torch.save_file"
            raise ValueError(message) from error

    def __call__(self, vector: np.ndarray) -> Picture:
        z = torch.as_tensor(np.asarray(vector), dtype=torch.float32)[None]
        with torch.no_grad():
            image = self.synthesis(self.mapping(z))[0]
        return ((image + 1) / 2 * 256).clamp(0, 255).permute(1, 2, 0).to(torch.uint8).numpy()

    def mapping(self, z: Tensor) -> Tensor:
        """z [n, 512] → w [n, layers, 512], truncated."""
        x = z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt()
        layer = 0
        while f"mapping.fc{layer}.weight" in self._state:
            weight, bias = self._state[f"mapping.fc{layer}.weight"], self._state[f"mapping.fc{layer}.bias"]
            x = F.linear(x, weight * (_MAPPING_LR / math.sqrt(weight.shape[1])), bias * _MAPPING_LR)
            x = F.leaky_relu(x, 0.2) * _GAIN
            layer += 1
        count = 2 * len(self.resolutions)
        w = x[:, None].repeat(1, count, 1)
        w[:, : self._cutoff] = self._state["mapping.w_avg"].lerp(w[:, : self._cutoff], self._truncation)
        return w

    def synthesis(self, w: Tensor) -> Tensor:
        """w [n, layers, 512] → image [n, 3, r, r] in about [−1, 1]. A block uses its w's, its RGB the next block's
        first."""
        x = self._state["synthesis.b4.const"].expand(len(w), -1, -1, -1)
        image, at = None, 0
        for resolution in self.resolutions:
            block = f"synthesis.b{resolution}."
            if resolution > 4:
                x = self._layer(block + "conv0", x, w[:, at], up=True)
                at += 1
            x = self._layer(block + "conv1", x, w[:, at])
            at += 1
            rgb = self._to_rgb(block + "torgb", x, w[:, at])
            image = rgb if image is None else rgb + _upsample(image, self._filter)
        assert image is not None
        return image

    @property
    def _filter(self) -> Tensor:
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
        return torch.outer(taps, taps) / taps.sum() ** 2

    def _style(self, name: str, w: Tensor) -> Tensor:
        weight, bias = self._state[f"{name}.affine.weight"], self._state[f"{name}.affine.bias"]
        return F.linear(w, weight / math.sqrt(weight.shape[1]), bias)

    def _layer(self, name: str, x: Tensor, w: Tensor, up: bool = False) -> Tensor:
        weight = self._state[f"{name}.weight"][None] * self._style(name, w)[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        n, outer, inner, k, _ = weight.shape
        x = x.reshape(1, -1, *x.shape[2:])  # one group for each picture
        if up:
            x = F.conv_transpose2d(x, weight.transpose(1, 2).reshape(n * inner, outer, k, k), stride=2, groups=n)
            x = _blur(x, 4 * self._filter, (1, 1))
        else:
            x = F.conv2d(x, weight.reshape(n * outer, inner, k, k), padding=k // 2, groups=n)
        x = x.reshape(n, outer, *x.shape[2:])
        x = x + self._state[f"{name}.noise_const"] * self._state[f"{name}.noise_strength"]
        x = F.leaky_relu(x + self._state[f"{name}.bias"][:, None, None], 0.2) * _GAIN
        return x.clamp(-_CLAMP, _CLAMP)

    def _to_rgb(self, name: str, x: Tensor, w: Tensor) -> Tensor:
        weight = self._state[f"{name}.weight"]
        style = self._style(name, w) / math.sqrt(weight.shape[1])
        rgb = torch.einsum("ochw,nc,ncij->noij", weight, style, x) + self._state[f"{name}.bias"][:, None, None]
        return rgb.clamp(-_CLAMP, _CLAMP)


def _blur(x: Tensor, kernel: Tensor, pad: tuple[int, int]) -> Tensor:
    """Depthwise FIR over [n, c, h, w]."""
    x = F.pad(x, (*pad, *pad))
    return F.conv2d(x, kernel.expand(x.shape[1], 1, -1, -1), groups=x.shape[1])


def _upsample(image: Tensor, kernel: Tensor) -> Tensor:
    """Twice the size: zeros between pixels, then the FIR with gain 4."""
    n, c, h, w = image.shape
    wide = image.new_zeros(n, c, h, 2, w, 2)
    wide[:, :, :, 0, :, 0] = image
    return _blur(wide.reshape(n, c, 2 * h, 2 * w), 4 * kernel, (2, 1))
