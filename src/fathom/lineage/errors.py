"""Errors of reading weights. Every message names the file or tensor, what was found, and the remedy."""


class CheckpointError(ValueError):
    """The folder or file holds no usable checkpoint: corrupt shard, missing tensor, NaN weights, unknown layout."""


class PackedWeightsError(CheckpointError):
    """Weights are stored in a packed format that Fathom does not dequantise (GPTQ, AWQ, NF4, MXFP4 …): abstain."""


class NoEvidenceError(CheckpointError):
    """A pair cannot be compared by a method: a model has none of the weights it reads. Abstain."""


class NoAnchorError(NoEvidenceError):
    """The residual axes of two models cannot be aligned: no embedding, or no token in common."""
