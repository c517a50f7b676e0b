"""Drop-Upcycling (arXiv 2502.19261): sparse upcycling in which a share of every copy's neurons is drawn anew.

The authors' code draws the dropped indices for each matrix by itself; here one set of neurons serves all three.
"""

from __future__ import annotations

import dataclasses

from fathom.growth.sparse_upcycling import SparseUpcycling
from fathom.models.method import check_number


@dataclasses.dataclass(frozen=True)
class DropUpcycling(SparseUpcycling):
    """experts: E, copies of the network.
    active: k, copies a token runs.
    norm_topk_prob: the gates of a token sum to 1.
    reinit_ratio: share of the neurons of every copy that is drawn anew, from 0 to 1.
    """

    reinit_ratio: float = 0.5

    name = "drop_upcycling"
    summary = "Copies of the dense network in which half of the neurons are drawn anew."
    equation = "y = Σ_{e in top k} g_e F_e(x),  F_e = F but for a share r of its neurons"
    paper = "2502.19261"

    def __post_init__(self):
        super().__post_init__()
        check_number(self.name, "reinit_ratio", self.reinit_ratio, 0.0, 1.0)

    @property
    def drawn_anew(self) -> float:
        return self.reinit_ratio
