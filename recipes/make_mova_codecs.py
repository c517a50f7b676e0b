"""Codecs for MOVA's generated clips, trained and measured. Three minutes on one GPU:

    accelerate launch recipes/make_mova_codecs.py runs/mova_codecs --minutes 2 --video-dim 32 --audio-dim 32 \
        --precision bf16 --workers 8

In `runs/mova_codecs`: the codec, which `fathom.audiovideo.codecs.load_codec` reads, and coding.json: what coding
changes in clips that it never saw. `--only video` or `--only audio` trains one of the two.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
from accelerate.utils import set_seed
from diffusers import AutoencoderKLWan

from fathom.audiovideo.codec_training import (
    Crops,
    PictureCrop,
    PictureLoss,
    SoundCrop,
    SoundLoss,
    Training,
    set_statistics,
    start,
    train,
)
from fathom.audiovideo.codecs import NeuralCodec
from fathom.audiovideo.dac import Dac
from fathom.audiovideo.generator import Generator
from fathom.audiovideo.metrics import coding_loss
from fathom.writing import write_json

HELD_OUT = 10_000_000  # the number of the first clip that is only measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("video", "audio"))
    parser.add_argument("--video-dim", type=int, default=16, help="base_dim of AutoencoderKLWan")
    parser.add_argument("--video-mult", type=int, nargs=4, default=(1, 1, 2, 2), help="its dim_mult")
    parser.add_argument(
        "--audio-dim", type=int, default=16, help="encoder_dim of the DAC; decoder_dim is 16 times that"
    )
    parser.add_argument("--audio-latents", type=int, default=32, help="channels of the DAC's latents")
    parser.add_argument("--side", type=int, default=64, help="of crops of pictures; a multiple of 8")
    parser.add_argument("--frames", type=int, default=17, help="of crops of pictures; 1 more than a multiple of 4")
    parser.add_argument("--held-out", type=int, default=60, help="clips that are measured")
    for field in dataclasses.fields(Training):
        kind = {"minutes": float, "precision": str}.get(field.name, type(field.default))
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    said = parser.parse_args()
    training = Training(**{field.name: getattr(said, field.name) for field in dataclasses.fields(Training)})
    generator = Generator(seed=training.seed, things=0)
    many = HELD_OUT  # clips are made when they are asked for

    set_seed(training.seed)
    video = AutoencoderKLWan(
        base_dim=said.video_dim,
        dim_mult=list(said.video_mult),
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    audio = Dac(
        encoder_dim=said.audio_dim,
        encoder_rates=(2, 4, 4, 5),
        latent_dim=said.audio_latents,
        decoder_dim=16 * said.audio_dim,
        decoder_rates=(5, 4, 4, 2),
        sample_rate=generator.sample_rate,
    )
    start(audio)
    losses = {}
    if said.only != "audio":
        crops = Crops(generator, PictureCrop(said.frames, said.side), many)
        losses["video"] = train(PictureLoss(video, training.kl), crops, training)
        set_statistics(video, generator)
    if said.only != "video":
        sound = dataclasses.replace(training, precision="no")
        losses["audio"] = train(SoundLoss(audio, training.kl), Crops(generator, SoundCrop(), many), sound)
    codec = NeuralCodec(video, audio, generator.frame_rate)
    measured = coding_loss(codec, generator.clips(said.held_out, HELD_OUT))
    sizes = {name: sum(w.numel() for w in model.parameters()) for name, model in (("video", video), ("audio", audio))}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(said).items()}
    result = {"coding": measured, "parameters": sizes, "options": options, "torch": torch.__version__, "losses": losses}
    codec.save(said.folder)
    write_json(said.folder / "coding.json", result)
    print({**measured, "parameters": sizes})


if __name__ == "__main__":
    main()
