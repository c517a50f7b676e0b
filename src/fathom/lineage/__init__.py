"""The `lineage` wing: which model does this one come from? Fingerprints of weights."""

from typing import NamedTuple


class Fingerprint(NamedTuple):
    """What `fathom methods` lists of a way to compare weights."""

    paper: str
    summary: str


METHODS = {
    "awm": Fingerprint("2510.06738", "Unbiased CKA of aligned query and key weights; hardened against rotations."),
    "huref": Fingerprint("2312.04828", "Invariant products of weights, their cosine, and a picture of them."),
    "pcs": Fingerprint("2312.04828", "Baseline: cosine of all equally shaped weights."),
    "sigma_profile": Fingerprint(
        "2507.03014", "Baseline: correlation of the weights' standard deviations over layers."
    ),
    "reef": Fingerprint("2410.14273", "Baseline: CKA of hidden states on the same inputs."),
}
