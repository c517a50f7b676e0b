"""GROBID's TEI as Markdown: every element, ids that lead nowhere, and what is no TEI."""

import re

import pytest
from raw_texts import MARKDOWN, TEI

from fathom.curation.tei import read_tei


def read(xml: str, **options):
    return read_tei(xml.encode(), "p.xml", **options)


def test_every_element():
    paper = read(TEI)
    assert paper.text == MARKDOWN
    assert (paper.title, paper.sections, paper.unresolved) == ("On the drift of made-up plates", 3, 2)


def test_every_start_has_its_end_and_a_float_stands_once():
    text = read(TEI).text
    open_, marks = [], re.findall(r"\[(START|END)_(\w+)\]", text)
    for side, kind in marks:
        if side == "START":
            open_.append(kind)
        else:
            assert open_.pop() == kind
    assert not open_ and marks
    for said in ("A map of it.", "Speeds.", "Alone", "Circle", "Back"):
        assert text.count(said) == 1


def test_the_citation_of_galactica():
    assert "Plates move [START_REF] A theory, Reed [END_REF] and" in read(TEI, ref_format="title_author").text


@pytest.mark.parametrize("part", ["<teiHeader", "<profileDesc", "<back", "<titleStmt", "<text", "<listBibl"])
def test_what_is_missing_is_left_out(part):
    name = part[1:]
    paper = read(re.sub(rf"{part}\b.*</{name}>", "", TEI, flags=re.DOTALL))
    assert paper.text.startswith("# ") == (name in ("back", "profileDesc", "text", "listBibl"))
    assert ("A theory" in paper.text) == (name in ("profileDesc", "teiHeader", "titleStmt"))


@pytest.mark.parametrize(
    ("xml", "said"),
    [
        ("<TEI>\n<text><p>x</text></TEI>", r"p\.xml, line 2: malformed TEI \(Opening and ending tag mismatch"),
        ("", r"p\.xml, line 1: malformed TEI"),
        ("\n<html/>", r"p\.xml, line 2: not TEI, its root is <html>"),
        ("<TEI><p>&none;</p></TEI>", r"p\.xml, line 1: malformed TEI"),
    ],
)
def test_malformed_files_are_named_by_line(xml, said):
    with pytest.raises(ValueError, match=said):
        read(xml)


def test_what_is_nested_too_deeply_and_cells_that_lie():
    with pytest.raises(ValueError, match=r"line 1: malformed TEI \(Excessive depth"):
        read(f"<TEI><text><body>{'<div>' * 5000}x{'</div>' * 5000}</body></text></TEI>")
    cells = '<row><cell cols="99999999">a</cell></row><row><cell cols="²">b</cell><cell cols="2">c</cell></row>'
    text = read(f'<TEI><text><body><figure type="table"><table>{cells}</table></figure></body></text></TEI>').text
    assert text.count("---") == 64 and "| b | c |  |" in text


def test_entities_are_not_expanded():
    bomb = '<!DOCTYPE d [<!ENTITY a "boom"><!ENTITY b "&a;&a;">]><TEI><text><body><p>x &b; y</p></body></text></TEI>'
    assert "boom" not in read(bomb).text
