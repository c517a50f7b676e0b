"""Papers as GROBID parses them (TEI XML) → Markdown with the scientific tokens of Galactica.

    title            # title                        formula        [START_FORMULA]…[END_FORMULA]
    abstract         ## Abstract                    note           [START_NOTE]…[END_NOTE]
    head             ## head, ### for 2.1           figure         [START_FIGURE]⏎head⏎⏎description⏎⏎[END_FIGURE]
    citation         [START_REF]title[END_REF]      table          [START_TABLE]⏎head⏎⏎| a | b |⏎[END_TABLE]

A figure or table stands after its first reference; one that no text refers to, at the end of its section. The mapping
is GeoGalactica's (arXiv 2401.00434, sciparser), without its defects: ids that lead nowhere, a missing title or
abstract, nested divisions and tails of paragraphs are read for what they are, and no float is repeated or lost.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from lxml import etree

SUFFIXES = (".tei.xml", ".tei", ".xml")
_XML_ID = "{http://www.w3.org/XML/1998/namespace}id"
_SPACE = re.compile(r"\s+")
_SUBSECTION = re.compile(r"[1-9][0-9]*\.[0-9]")
_MARKER = re.compile(r"\[(START|END)_[A-Z_]+\]")
_WIDEST = 64  # columns that a cell may say it takes
_BLOCKS = ("div", "p", "head", "figure", "list", "item", "quote", "note", "formula", "table")


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper as Markdown: title, abstract and body. `sections` counts the body's headings, `unresolved` the
    references whose id leads nowhere."""

    text: str
    title: str
    sections: int
    unresolved: int


def read_tei(xml: bytes, name: str, ref_format: str = "title") -> Paper:
    """The paper in a TEI document.

    Args:
        name: of the file, for messages.
        ref_format: "title", or "title_author", as Galactica writes citations: `[START_REF] title, author [END_REF]`.

    Raises:
        ValueError: not well-formed, or no TEI, with file and line.
    """
    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True)
    try:
        root = etree.fromstring(xml, parser)
    except etree.XMLSyntaxError as error:
        where = f"{name}, line {error.lineno or 1}"
        raise ValueError(f"{where}: malformed TEI ({str(error.msg).split(', line')[0]})") from None
    if root is None or _tag(root) != "TEI":
        found = "nothing" if root is None else f"<{_tag(root)}>"
        raise ValueError(f"{name}, line {1 if root is None else root.sourceline}: not TEI, its root is {found}")
    return _Rendering(root, ref_format).paper()


class _Rendering:
    """One paper: what its ids mean, and which floats have been placed."""

    def __init__(self, root: Any, ref_format: str):
        self.root, self.ref_format = root, ref_format
        self.cited: dict[str, str] = {}
        self.floats: dict[str, Any] = {}
        self.placed: set[Any] = set()
        self.sections = self.unresolved = 0
        for element in root.iter("{*}biblStruct"):
            self.cited.setdefault(element.get(_XML_ID, ""), self._citation(element))
        for element in root.iter("{*}figure"):
            self.floats.setdefault(element.get(_XML_ID, ""), element)
        # floats that running text refers to wait for that reference
        self.awaited = {
            self.floats.get(_target(ref))
            for ref in root.iter("{*}ref")
            if ref.get("type") in ("figure", "table") and not any(_tag(a) == "figure" for a in ref.iterancestors())
        }

    def paper(self) -> Paper:
        title = self._title()
        parts = [f"# {title}"] if title else []
        abstract = self.root.find(".//{*}profileDesc/{*}abstract")
        if abstract is not None:
            blocks = [block for block in self._blocks(abstract, headings=False) if block]
            parts += ["## Abstract", *blocks] if blocks else []
        body = self.root.find("{*}text/{*}body")
        if body is not None:
            parts += self._blocks(body)
            parts += [self._float(f) for f in body.iter("{*}figure") if f not in self.placed]  # that refer in a circle
        return Paper(_tidy("\n\n".join(parts)), title, self.sections, self.unresolved)

    def _title(self) -> str:
        for path in ("{*}titleStmt/{*}title", "{*}sourceDesc//{*}analytic/{*}title"):
            for found in self.root.iterfind(f"{{*}}teiHeader//{path}"):
                if text := _plain(found):
                    return text
        return ""

    def _citation(self, bibliography: Any) -> str:
        title = next((t for path in ("analytic", "monogr") for e in bibliography.iterfind(f"{{*}}{path}/{{*}}title")
                      if (t := _plain(e))), "")  # fmt: skip
        if not title or self.ref_format == "title":
            return title and f"[START_REF]{title}[END_REF]"
        author = bibliography.find(".//{*}author//{*}surname")
        name = "" if author is None else _plain(author)
        return f"[START_REF] {title}{', ' + name if name else ''} [END_REF]"

    def _blocks(self, element: Any, headings: bool = True) -> list[str]:
        """The paragraphs of a division and of the divisions in it, then its own floats that nothing awaits."""
        blocks: list[str] = []
        if element.text and element.text.strip():
            blocks.append(_text(element.text).strip())
        for child in element:
            tag = _tag(child)
            if tag == "head":
                heading = self._inline(child).strip()
                if heading and headings:
                    self.sections += 1
                    deep = _SUBSECTION.match(child.get("n", "")) or _SUBSECTION.search(heading)
                    blocks.append(f"{'###' if deep else '##'} {heading}")
            elif tag == "figure" or tag is None:
                pass  # placed where it is referred to, or below
            elif tag in ("formula", "note"):
                blocks.append(self._part(child).strip())
            elif tag == "item":
                blocks.append(f"- {self._inline(child).strip()}")
            elif tag != "p" and any(_tag(inner) in _BLOCKS for inner in child):
                blocks += self._blocks(child, headings)
            else:
                blocks.append(self._inline(child).strip())
            if child.tail and child.tail.strip():
                blocks.append(_text(child.tail).strip())
        own = (child for child in element if _tag(child) == "figure")
        return blocks + [self._float(f) for f in own if f not in self.placed and f not in self.awaited]

    def _inline(self, element: Any) -> str:
        """The running text of an element without its own tail."""
        parts = [_text(element.text)]
        for child in element:
            parts += [self._part(child), _text(child.tail)]
        return "".join(parts)

    def _part(self, element: Any) -> str:
        tag = _tag(element)
        if tag == "ref":
            return self._reference(element)
        if tag == "formula":
            return f"[START_FORMULA]{_plain(element, without='label')}[END_FORMULA]"
        if tag == "note":
            note = f"[START_NOTE]{self._inline(element).strip()}[END_NOTE]"
            return f"\n\n{note}\n\n" if element.get("place") == "foot" else note
        if tag == "figure" or tag is None:
            return ""
        return " " if tag == "lb" else self._inline(element)

    def _reference(self, ref: Any) -> str:
        kind, target = ref.get("type"), _target(ref)
        if kind == "bibr":
            self.unresolved += not self.cited.get(target)
            return self.cited.get(target, "")
        text = self._inline(ref)
        if kind not in ("figure", "table"):
            return text
        found = self.floats.get(target)
        self.unresolved += found is None
        return text if found is None or found in self.placed else f"{text}\n\n{self._float(found)}\n\n"

    def _float(self, figure: Any) -> str:
        self.placed.add(figure)  # first, as its own description may refer to it
        said = [self._inline(part).strip() for name in ("head", "figDesc") for part in figure.iterfind(f"{{*}}{name}")]
        said = [text for text in said if text]
        table = figure.find("{*}table")
        if table is None and figure.get("type") != "table":
            return "[START_FIGURE]\n" + "\n\n".join([*said, "[END_FIGURE]"]) if said else ""
        rows = [] if table is None else [self._cells(row) for row in table.iter("{*}row")]
        notes = [self._part(note).strip() for note in figure.iterfind("{*}note")]
        if not said and not any(rows):
            return ""
        return "[START_TABLE]\n" + "\n\n".join([*said, *(_markdown(rows)), *notes]) + "\n[END_TABLE]"

    def _cells(self, row: Any) -> list[str]:
        cells = []
        for cell in row.iterfind("{*}cell"):
            cells.append(_SPACE.sub(" ", self._inline(cell)).strip().replace("|", "\\|"))
            wide = cell.get("cols", "")
            cells += [""] * (min(int(wide), _WIDEST) - 1 if wide.isdecimal() else 0)
        return cells


def _markdown(rows: list[list[str]]) -> Iterator[str]:
    """The table as one block, if it has any cell; short rows are filled up."""
    width = max(map(len, rows), default=0)
    if width:
        lines = [f"| {' | '.join(row + [''] * (width - len(row)))} |" for row in rows if row]
        yield "\n".join([lines[0], "|" + " --- |" * width, *lines[1:]])


def _tag(element: Any) -> str | None:
    """The name without its namespace; None for a comment or processing instruction."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else None


def _target(ref: Any) -> str:
    return ref.get("target", "").partition("#")[2] or "no id"


def _text(text: str | None) -> str:
    """Spaces as one, and no markers: those are ours."""
    return _SPACE.sub(" ", _MARKER.sub("", text) if "[" in text else text) if text else ""


def _plain(element: Any, without: str = "") -> str:
    """All text of an element, but for children of the name `without`."""
    parts = [element.text or ""]
    for child in element:
        parts += ["" if _tag(child) in (None, without) else _plain(child), child.tail or ""]
    return _text("".join(parts)).strip()


def _tidy(text: str) -> str:
    """No spaces beside line ends, and at most one empty line."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" *\n *", "\n", text)).strip()
