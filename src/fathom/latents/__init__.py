"""The `latents` wing: continuous diffusion over vectors of tokens, and what turns the vectors into words.

    x_0 = norm(f(y));   x_t = α_t x_0 + σ_t ε;   x̂_0 = D(x_t, t);   y_i ~ p(y_i | y_<i, x̂_0)

`process.py` has α and σ, `encoder.py` f and its norm, `denoiser.py` D, `decoder.py` p, `sampling.py` the solvers;
`heads.py` other ways from vectors to words, `recovery.py` the study that compares them, `controls.py` the test whether
the decoder reads the vectors at all. `import fathom` imports only `configuration` from here; everything else is
imported when it is first named.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "CoDAR": "codar",
    "METHODS": "codar",
    "FathomLatentConfig": "configuration",
    "FathomForLatentDiffusion": "model",
    "LatentGenerationConfig": "sampling",
    "Process": "process",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
