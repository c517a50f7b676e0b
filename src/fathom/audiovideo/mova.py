"""MOVA (arXiv 2602.08794): a video and an audio diffusion transformer, joined by a bridge and trained together.

    x_σ = (1 − σ) x₀ + σ ε,   target ε − x₀,   L = L_video + λ_a · L_audio
    σ_v and σ_a are drawn independently, each from its own shift σ(u) = a·u / (1 + (a − 1)·u)

Two video experts share the audio tower and the bridge: one for σ_v ≥ 0.9, one below; they alternate by optimiser step.

Where paper and release differ, the paper is the default. What the release does is `audio_weight=1`, `noise="shared"`,
`text_dropout=0`, `sigma="table"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from fathom.models.method import check_choice, check_number, check_range

STRATEGIES = ("full", "shallow_focus", "distributed", "progressive", "custom")
PHASE = ("share", "video_shift", "audio_shift", "text_dropout", "bridge_dropout")


@dataclasses.dataclass(frozen=True)
class Mova:
    """Options of the bridge between the towers, and of their training.

    strategy: at which layers the towers exchange: "full" all that both have; "shallow_focus" the first min(10, L // 3);
        "distributed" every third; "progressive" 0 to 7, then every third; "custom" those of `layers`.
    layers: for "custom".
    directions: "both", "v2a" (the audio tower reads the video), "a2v", or "off": two towers without an exchange.
    rotary: positions of the two streams in the bridge: "aligned" on one clock; "first_frame", which adds that the first
        latent frame is one picture long; "unaligned" plain indices; "none".
    pooled_adaln: audio queries are also modulated by what a learned query pools of each frame.
    bridge_init: "default" PyTorch's; "zero_out": the bridge's output matrices start at 0.
    experts: video experts, 2 or 1.
    boundary: the least σ_v at which the first expert is used.
    even_expert: which expert trains in steps 0, 2, …: "high" or "low".
    audio_weight: λ_a.
    noise: "independent": u_v and u_a are; "shared": both are one (release).
    sigma: noise levels of training, "continuous", or one of the 1000 entries of the release's "table".
    video_shift, audio_shift: a of σ(u).
    text_dropout: probability that a clip is trained with the empty caption.
    bridge_dropout: probability that a clip is trained with the bridge off; about 0.1 lets a model from scratch learn
        what dual guidance subtracts.
    phases: phases of the training, each a mapping with `share` and its values of the five options above; (): one phase.
    """

    strategy: str = "full"
    layers: tuple[int, ...] = (0, 2, 4, 6, 8, 12, 16, 20)
    directions: str = "both"
    rotary: str = "aligned"
    pooled_adaln: bool = False
    bridge_init: str = "default"
    experts: int = 2
    boundary: float = 0.9
    even_expert: str = "high"
    audio_weight: float = 0.2
    noise: str = "independent"
    sigma: str = "continuous"
    video_shift: float = 5.0
    audio_shift: float = 5.0
    text_dropout: float = 0.2
    bridge_dropout: float = 0.0
    phases: tuple[dict[str, Any], ...] = ()

    name = "mova"
    paper = "2602.08794"
    summary = "A video and an audio diffusion transformer that exchange states at every layer, on one clock."
    equation = (
        "x ← x + Wo softmax(R(p_x) q · R(p_y) k / √d) v;  ṽ = v(∅,∅) + s_B [v(∅,B) − v(∅,∅)] + s_T [v(T,B) − v(∅,B)]"
    )

    def __post_init__(self) -> None:
        for option, choices in {
            "strategy": STRATEGIES,
            "directions": ("both", "v2a", "a2v", "off"),
            "rotary": ("aligned", "first_frame", "unaligned", "none"),
            "bridge_init": ("default", "zero_out"),
            "even_expert": ("high", "low"),
            "noise": ("independent", "shared"),
            "sigma": ("continuous", "table"),
        }.items():
            check_choice("mova", option, getattr(self, option), choices)
        check_range("mova", "experts", self.experts, 1, 2)
        for option in ("boundary", "text_dropout", "bridge_dropout"):
            check_number("mova", option, getattr(self, option), 0, 1)
        check_number("mova", "audio_weight", self.audio_weight, 0)
        for option in ("video_shift", "audio_shift"):
            if not getattr(self, option) > 0:
                raise ValueError(f"mova option {option}={getattr(self, option)!r}: must be above 0")
        for layer in self.layers:
            check_range("mova", "layers", layer, 0)
        for phase in self.phases:
            unknown = [key for key in phase if key not in PHASE]
            if unknown or not phase.get("share", 0) > 0:
                raise ValueError(
                    f"mova option phases={list(self.phases)!r}: each needs a `share` above 0, and may change "
                    f"{', '.join(PHASE[1:])}"
                )
            dataclasses.replace(self, phases=(), **{key: value for key, value in phase.items() if key != "share"})

    @classmethod
    def from_section(cls, section: Mapping[str, Any] | None) -> Self:
        """The options in the section `mova` of a config or a recipe. Raises ValueError for an unknown option."""
        section = {key: value for key, value in (section or {}).items() if key != "name"}
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in section if key not in known]
        if unknown:
            raise ValueError(f"mova.{unknown[0]}={section[unknown[0]]!r}: the options are {', '.join(known)}")
        for key in ("layers", "phases"):
            if key in section:
                section[key] = tuple(section[key])
        return cls(**section)

    def to_section(self) -> dict[str, Any]:
        """The options as JSON has them."""
        found = dataclasses.asdict(self)
        return {"name": self.name, **found, "layers": list(self.layers), "phases": [dict(p) for p in self.phases]}

    def at(self, progress: float) -> Mova:
        """The options at a share of the training, 0 … 1."""
        total, passed = sum(phase["share"] for phase in self.phases), 0.0
        for phase in self.phases:
            passed += phase["share"] / total
            if progress < passed or phase is self.phases[-1]:
                changes = {key: value for key, value in phase.items() if key != "share"}
                return dataclasses.replace(self, phases=(), **changes)
        return self

    def exchanges(self, layers: int) -> tuple[int, ...]:
        """The layers of `layers` before which the towers exchange, by `strategy`."""
        if self.directions == "off":
            return ()
        found = {
            "full": range(layers),
            "shallow_focus": range(min(10, layers // 3)),
            "distributed": range(0, layers, 3),
            "progressive": [*range(min(8, layers)), *range(8, layers, 3)],
            "custom": [layer for layer in self.layers if layer < layers],
        }[self.strategy]
        if not list(found):
            raise ValueError(
                f"mova option strategy={self.strategy!r}: no layer of {layers} exchanges; use 'full', or "
                "directions='off' for towers without a bridge"
            )
        return tuple(found)
