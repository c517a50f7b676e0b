"""Pictures of what a checkpoint does with a text. One file a picture; which are offered follows from the config.

A new picture is a subclass of `Picture` (base.py) in its own file, and a line in PICTURES. `fathom inspect` and the
report of `fathom compare` then show it.
"""

from __future__ import annotations

from typing import Any

from fathom.inspect.base import Picture
from fathom.inspect.depth_map import DepthMap
from fathom.inspect.head_map import HeadMap
from fathom.inspect.node_map import NodeMap
from fathom.inspect.reveal_map import RevealMap
from fathom.inspect.routing_history import RoutingHistory
from fathom.inspect.routing_map import RoutingMap
from fathom.inspect.spectrum import Spectrum
from fathom.inspect.step_map import StepMap
from fathom.models.registry import SECTIONS

PICTURES: dict[str, type[Picture]] = {
    picture.name: picture
    for picture in (DepthMap, StepMap, RoutingMap, RoutingHistory, RevealMap, HeadMap, NodeMap, Spectrum)
}


def offered(config: Any) -> list[type[Picture]]:
    """The pictures that a checkpoint with this config has."""
    return [picture for picture in PICTURES.values() if picture.offered(config)]


def nothing_to_show(checkpoint: str, config: Any) -> ValueError:
    """The error of a checkpoint without a picture: what it is, and which can be inspected."""
    sections = {name: getattr(config, name, None) for name in SECTIONS}
    named = {name: section["name"] for name, section in sections.items() if isinstance(section, dict)}
    methods = ", ".join(method for name, method in named.items() if method not in SECTIONS[name].plain)
    found = methods or ("an ordinary decoder" if named else f"a stock {config.model_type} model")
    can = "; ".join(picture.shows for picture in PICTURES.values())
    return ValueError(f"{checkpoint}: nothing to show of {found}; pictures are of {can}")


__all__ = [
    "PICTURES", "DepthMap", "HeadMap", "NodeMap", "Picture", "RevealMap", "RoutingHistory", "RoutingMap", "Spectrum",
    "StepMap", "nothing_to_show", "offered",
]  # fmt: skip
