"""The style of a method in all plots and tables: colour, marker and line, distinct also without colour."""

from __future__ import annotations

from dataclasses import dataclass

# Okabe and Ito's palette for colour-blind readers: (on white, on near-black)
COLOURS = (
    ("#0072B2", "#56B4E9"),
    ("#C46A00", "#F0A830"),
    ("#00825F", "#2CC79B"),
    ("#B0508A", "#E08FC0"),
    ("#A33B00", "#F07B45"),
    ("#5B5B5B", "#B8B8B8"),
    ("#7A6A00", "#E6D94A"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
LINES = ("-", "--", "-.", ":")

# matplotlib's markers as paths in a 16 × 16 box
MARKER_PATHS = {
    "o": "M8 3a5 5 0 1 0 0 10a5 5 0 1 0 0-10z",
    "s": "M3.5 3.5h9v9h-9z",
    "^": "M8 2.5L13.5 13h-11z",
    "D": "M8 2L14 8L8 14L2 8z",
    "v": "M8 13.5L2.5 3h11z",
    "P": "M6 2.5h4v3.5h3.5v4H10v3.5H6V10H2.5V6H6z",
    "X": "M5 2.5L8 5.5L11 2.5L13.5 5L10.5 8L13.5 11L11 13.5L8 10.5L5 13.5L2.5 11L5.5 8L2.5 5z",
    "<": "M2.5 8L13 2.5v11z",
}


@dataclass(frozen=True)
class Style:
    """Colour on a light and on a dark page, marker and line style of one method."""

    light: str
    dark: str
    marker: str
    line: str

    @property
    def path(self) -> str:
        """The marker as SVG path data."""
        return MARKER_PATHS[self.marker]


def styles(methods: list[str]) -> dict[str, Style]:
    """By position in the recipe. Of 7 colours, 8 markers and 4 lines, 28 methods differ in every picture."""
    return {
        method: Style(*COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], LINES[i % len(LINES)])
        for i, method in enumerate(methods)
    }
