"""Files of fathom.inspect's pictures: PNGs for a light and a dark page, and one page for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from fathom import __version__
from fathom.inspect import Picture
from fathom.report.plots import SUFFIX, THEMES, embed
from fathom.writing import whole


def save_picture(picture: Picture, folder: Path, stem: str | None = None) -> dict[str, Path]:
    """Write `folder/<stem>.png` and `<stem>_dark.png` (default stem: the picture's name). Returns them by theme."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for theme, colours in THEMES.items():
        path = folder / f"{stem or picture.name}{SUFFIX[theme]}.png"
        with whole(path) as partial:
            picture.figure(colours).savefig(partial, format="png")
        paths[theme] = path
    return paths


def shown(picture: Picture, paths: dict[str, Path]) -> dict[str, str]:
    """The fields of a picture for a template: `title`, the images `light` and `dark`, and `html` below them."""
    return {"title": picture.title, "html": picture.html(), **{theme: embed(path) for theme, path in paths.items()}}


def write_inspection(checkpoint: str, text: str, methods: str, pictures: Sequence[Picture], folder: Path) -> Path:
    """Write the PNG files and `folder/inspect.html`, one self-contained page. Returns the page's path."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fathom.report"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("inspect.html").render(
        checkpoint=checkpoint,
        text=text,
        methods=methods,
        pictures=[shown(picture, save_picture(picture, folder)) for picture in pictures],
        version=__version__,
    )
    path = folder / "inspect.html"
    with whole(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return path
