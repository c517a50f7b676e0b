"""Own error of the detectors of events on true pairs: as they are made, and read back from .mp4.

python benchmarks/audiovideo/detectors.py      # a minute
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np

from fathom.audiovideo.clips import read_clip, write_clip
from fathom.audiovideo.generator import Generator
from fathom.audiovideo.metrics import paired
from fathom.audiovideo.onsets import picture_events, sound_onsets

CLIPS = 60


def main() -> None:
    for name, options in (
        ("bounce", {"actions": ("bounce",)}),
        ("flash", {"actions": ("flash",)}),
        ("two things", {"things": 2}),
    ):
        for coded in (False, True):
            errors: dict[str, list[float]] = {"heard": [], "seen": []}
            wrong = {"heard": 0, "seen": 0}
            for clip in Generator(**options).clips(CLIPS):
                if coded:
                    with tempfile.TemporaryDirectory() as folder:
                        write_clip(clip, Path(folder) / "clip.mp4")
                        clip = dataclasses.replace(read_clip(Path(folder) / "clip.mp4"), events=clip.events)
                found = {
                    "heard": sound_onsets(clip.audio, clip.sample_rate),
                    "seen": picture_events(clip.frames, clip.frame_rate),
                }
                for kind, times in found.items():
                    pairs = paired(clip.events, times)
                    errors[kind] += [1000 * abs(a - b) for a, b in pairs.pairs]
                    wrong[kind] += len(pairs.missed) + len(pairs.extra)
            row = {"clips": name, "read_back": coded, "missed_or_made_up": wrong}
            for kind, values in errors.items():
                row[f"{kind}_ms"] = {"mean": round(float(np.mean(values)), 2), "worst": round(max(values), 1)}
            print(json.dumps(row))


if __name__ == "__main__":
    main()
