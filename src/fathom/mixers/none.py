"""The default of the `mixer` section: keys and values reach attention and the cache as they are."""

from fathom.mixers.base import Mixer
from fathom.models.registry import register


@register("mixer", "none")
class NoMixer(Mixer):
    """No cross-layer mixing; the decoder skips the seam."""

    summary = "No cross-layer mixing (the ordinary decoder)."
    equation = "O = CausalAttention(q, k, v)"
    identity = {}  # noqa: RUF012
