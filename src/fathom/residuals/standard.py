"""The default of the `residual` section: one stream, every sublayer adds to it."""

from fathom.models.registry import register
from fathom.residuals.base import Counts, ResidualTopology


@register("residual", "standard")
class StandardResidual(ResidualTopology):
    """x ← x + sublayer(norm x)."""

    summary = "One residual stream that every sublayer adds to (the ordinary decoder)."
    equation = "x ← x + sublayer(norm x)"
    identity = {}  # noqa: RUF012

    def start(self, hidden_states):
        return hidden_states

    def read(self, stream, sublayer):
        return stream, None

    def write(self, stream, sublayer, output, carry):
        return stream + output

    def finish(self, stream):
        return stream

    @classmethod
    def counts(cls, config, options) -> Counts:
        writes = config.passes * config.num_hidden_layers * (1 if config.parallel_residual else 2)
        return Counts(elementwise=writes * config.hidden_size)
