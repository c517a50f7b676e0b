"""The `lineage` wing: which model does this one come from? Fingerprints of weights."""

from typing import NamedTuple


class Fingerprint(NamedTuple):
    """The entry of `fathom methods` for a way to compare weights. `call` is the function, `options` the dataclass of
    its options where they are not its keywords, `verb` the command line that runs it, if there is one.
    """

    paper: str
    summary: str
    equation: str
    call: str
    options: str = ""
    verb: str = ""


METHODS = {
    "awm": Fingerprint(
        paper="2510.06738",
        summary="Unbiased CKA of aligned query and key weights; hardened against rotations.",
        equation="score = ½ mean_ℓ [UCKA(W_q^ℓ, W_q'^ℓ P) + UCKA(W_k^ℓ, W_k'^ℓ P)],  P matches the residual axes",
        call="fathom.lineage.awm.awm",
        verb="fathom lineage compare A B --method awm",
    ),
    "huref": Fingerprint(
        paper="2312.04828",
        summary="Invariant products of weights, their cosine, and a picture of them.",
        equation="M_a = X W_qᵀ W_k Xᵀ,  M_b = X W_vᵀ W_oᵀ Xᵀ,  M_c = X W_upᵀ W_downᵀ Xᵀ;  ICS = 100 · mean corr(M, M')",
        call="fathom.lineage.huref.ics",
        options="fathom.lineage.huref.HuRefOptions",
        verb="fathom lineage compare A B --method huref",
    ),
    "pcs": Fingerprint(
        paper="2312.04828",
        summary="Baseline: cosine of all equally shaped weights.",
        equation="⟨W, W'⟩ / (‖W‖ ‖W'‖) over all equally shaped weights side by side",
        call="fathom.lineage.baselines.pcs",
    ),
    "sigma_profile": Fingerprint(
        paper="2507.03014",
        summary="Baseline: correlation of the weights' standard deviations over layers.",
        equation="mean over W ∈ {W_q, W_k, W_v, W_o} of corr_ℓ(std(W^ℓ), std(W'^ℓ))",
        call="fathom.lineage.baselines.sigma_profile",
    ),
    "reef": Fingerprint(
        paper="2410.14273",
        summary="Baseline: CKA of hidden states on the same inputs.",
        equation="CKA(H, H'),  H and H' the hidden states that two models have of the same texts",
        call="fathom.lineage.baselines.reef",
    ),
}
