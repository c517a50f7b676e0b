"""Matrix-product FLOPs of one forward of MOVA in closed form, a multiply-add counted as 2.

A block on L tokens of width D, with T text states and an inner width F:
    8 L D² + 4 L² D   of its own attention,   4 (L + T) D² + 4 L T D   of the text's,   4 L D F
The bridge at one layer, to video (width D) and to audio (K):
    4 L_v D² + 4 L_a K D + 4 L_v L_a D   and   4 L_a K² + 4 L_v D K + 4 L_a L_v K
"""

from __future__ import annotations

import math

from fathom.audiovideo.configuration import MovaConfig


def _tower(
    tokens: int, width: int, inner: int, layers: int, patch_in: int, patch_out: int, config: MovaConfig
) -> float:
    text = config.text_length
    block = 8 * tokens * width**2 + 4 * tokens**2 * width
    block += 4 * (tokens + text) * width**2 + 4 * tokens * text * width
    block += 4 * tokens * width * inner
    ends = 2 * tokens * width * (patch_in + patch_out)
    time = 2 * width * (config.freq_dim + width) + 12 * width**2
    of_text = 2 * text * width * (config.text_dim + width)
    return layers * block + ends + time + of_text


def _received(tokens: int, width: int, others: int, other: int) -> float:
    return 4 * tokens * width**2 + 4 * others * other * width + 4 * tokens * others * width


def forward_flops(config: MovaConfig, bridge: bool = True) -> float:
    """FLOPs of one forward over a clip: one video expert, the audio tower, and with `bridge` the bridge. Not counted:
    the pooling of `pooled_adaln`, and the text encoder, which runs once a clip."""
    (of_video, of_audio), method = config.tokens, config.method
    patch = math.prod(config.patch_size)
    seen = (2 * config.video_channels + config.video_strides[0]) * patch
    said = config.video_channels * patch
    d, k = config.video_width, config.audio_width
    total = _tower(of_video, d, config.video_ffn, config.video_layers, seen, said, config)
    sound = config.audio_channels
    total += _tower(of_audio, k, config.audio_ffn, config.audio_layers, sound, sound, config)
    if bridge:
        places = len(method.exchanges(config.audio_layers))
        if method.directions in ("both", "a2v"):
            total += places * _received(of_video, d, of_audio, k)
        if method.directions in ("both", "v2a"):
            total += places * _received(of_audio, k, of_video, d)
    return total
