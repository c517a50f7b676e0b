"""Codecs for MOVA's generated clips, trained and measured. Three minutes on one GPU, the halves side by side:

    python recipes/make_mova_codecs.py runs/mova_codecs --only video --minutes 3 --video-dim 32 --precision bf16 \
        --steps 100000 --workers 6 &
    python recipes/make_mova_codecs.py runs/mova_codecs --only audio --minutes 3 --audio-dim 32 --batch 32 --lr 1e-3 \
        --steps 100000 --workers 6 & wait

That video codec stays below 30 dB (docs/results/mova.md). What should reach them in eight minutes and has not been run:
crops long enough that most latents see a whole past, more latents, and a step that is one launch:

    python recipes/make_mova_codecs.py runs/mova_codecs --only video --minutes 8 --video-dim 32 --video-latents 32 \
        --frames 33 --batch 4 --lr 5e-4 --precision bf16 --steps 20000 --workers 6 --graph

In `runs/mova_codecs`: the codec, which `fathom.audiovideo.codecs.load_codec` reads, and for each half coding_….json:
what coding changes in clips that it never saw. Without `--only` both are trained, one after the other; under
`accelerate launch` on several GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
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
MEASURED = {
    "video": ("psnr_db", "psnr_db_worst", "events_moved_frames", "clips_with_other_events"),
    "audio": ("spectral_distance_db", "onsets_moved_ms", "clips_with_other_onsets"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("video", "audio"))
    parser.add_argument("--video-dim", type=int, default=16, help="base_dim of AutoencoderKLWan")
    parser.add_argument("--video-mult", type=int, nargs=4, default=(1, 1, 2, 2), help="its dim_mult")
    parser.add_argument("--video-latents", type=int, default=16, help="channels of its latents; MOVA's has 16")
    parser.add_argument(
        "--audio-dim", type=int, default=16, help="encoder_dim of the DAC; decoder_dim is 16 times that"
    )
    parser.add_argument("--audio-latents", type=int, default=32, help="channels of the DAC's latents")
    parser.add_argument("--side", type=int, default=64, help="of crops of pictures; a multiple of 8")
    parser.add_argument("--frames", type=int, default=17, help="of crops of pictures; 1 more than a multiple of 4")
    parser.add_argument("--held-out", type=int, default=60, help="clips that are measured")
    parser.add_argument("--resume", action="store_true", help="save the run, and go on where one was saved")
    for field in dataclasses.fields(Training):
        kind = {"minutes": float, "precision": str}.get(field.name, type(field.default))
        how: Any = {"action": "store_true"} if kind is bool else {"type": kind, "default": field.default}
        parser.add_argument(f"--{field.name}", **how)
    said = parser.parse_args()
    training = Training(**{field.name: getattr(said, field.name) for field in dataclasses.fields(Training)})
    generator = Generator(seed=training.seed, things=0)

    set_seed(training.seed)
    video = AutoencoderKLWan(
        base_dim=said.video_dim,
        dim_mult=list(said.video_mult),
        z_dim=said.video_latents,
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

    def state(half: str) -> Path | None:
        return said.folder / f"state_{half}" if said.resume else None

    losses = {}
    if said.only != "audio":
        crops = Crops(generator, PictureCrop(said.frames, said.side), HELD_OUT)
        losses["video"] = train(PictureLoss(video, training.kl), crops, training, state=state("video"))
        set_statistics(video, generator)
    if said.only != "video":
        sound = dataclasses.replace(training, precision="no")
        small = dataclasses.replace(generator, size=(32, 32))  # the same sound, with pictures that are sooner made
        crops = Crops(small, SoundCrop(), HELD_OUT)
        losses["audio"] = train(SoundLoss(audio, training.kl), crops, sound, state=state("audio"))
    if not PartialState().is_main_process:
        return
    codec = NeuralCodec(video, audio, generator.frame_rate)
    measured = coding_loss(codec, generator.clips(said.held_out, HELD_OUT))
    sizes = {"video": video.num_parameters(), "audio": audio.num_parameters()}
    halves = (said.only,) if said.only else ("video", "audio")
    codec.save(said.folder, halves)
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(said).items()}
    for half in halves:
        kept = {name: measured[name] for name in ("clips", *MEASURED[half])}
        print(half, sizes[half], "parameters,", kept)
        facts = {"parameters": sizes[half], "steps": len(losses[half]), "torch": torch.__version__, "options": options}
        write_json(said.folder / f"coding_{half}.json", {**kept, **facts, "losses": losses[half][::10]})


if __name__ == "__main__":
    main()
