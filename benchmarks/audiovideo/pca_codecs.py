"""What principal components keep of clips that they were not fitted to.

python benchmarks/audiovideo/pca_codecs.py      # a minute
"""

from __future__ import annotations

import json

from fathom.audiovideo.generator import Generator
from fathom.audiovideo.metrics import coding_loss
from fathom.audiovideo.pca_codecs import PcaCodec

HELD_OUT = 10_000_000  # the number of the first clip that is only measured


def main() -> None:
    generator = Generator(things=0)
    clips = list(generator.clips(100))
    for video, audio in ((16, 16), (16, 32), (48, 64)):
        codec = PcaCodec.fit(clips, video, audio)
        measured = coding_loss(codec, generator.clips(40, HELD_OUT))
        print(json.dumps({"video_channels": video, "audio_channels": audio, **measured}), flush=True)


if __name__ == "__main__":
    main()
