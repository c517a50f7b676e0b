"""Made-up papers and texts for the tests of curation. Ours, CC0."""

from __future__ import annotations

import random

PHRASES = (
    "the river moved slowly over old stone while warm rain fell on a quiet valley and small birds crossed the grey sky "
    "above many green hills where people had built long walls of clay to hold water for their fields in summer heat "
    "because winter storms often carried mud from high mountains down toward the narrow coast near an empty town"
)
WORDS = PHRASES.split()


def prose(seed: int, words: int = 120) -> str:
    """English words that no other seed has in this order, in lines of ten."""
    draw = random.Random(seed)
    drawn = [draw.choice(WORDS) for _ in range(words)]
    return "\n".join(" ".join(drawn[i : i + 10]) for i in range(0, words, 10))


TEI = """<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader>
<fileDesc><titleStmt><title level="a" type="main">On the  drift of
 made-up plates</title></titleStmt></fileDesc>
<profileDesc><abstract><div><p>We drift.</p><p>And <ref type="bibr" target="#b0">[1]</ref> cite.</p></div></abstract>
</profileDesc></teiHeader>
<text><body>
<div><head n="1">Introduction</head>
<p>Plates move <ref type="bibr" target="#b0">(Reed, 1999)</ref> and <ref type="bibr" target="#b9">[9]</ref><!-- no -->,
see <ref type="figure" target="#fig_0">Fig. 1</ref> and again <ref type="figure" target="#fig_0">Fig. 1</ref>, not
<ref type="figure" target="#fig_9">Fig. 9</ref>.<note place="foot" n="1">A foot.</note> End <note>aside</note>.</p>
<formula xml:id="f0">E = m c<label>(1)</label></formula>
<div><head n="2.1">Inner</head><p>With <formula>x &lt; 2</formula> in [START_REF] line.</p></div></div>
<div><head>On 10.2 kinds</head><p>Table <ref type="table" target="#tab_0">1</ref></p>
<figure xml:id="fig_2"><head>Figure 3</head><figDesc>Alone, see
<ref type="figure" target="#fig_2">3</ref></figDesc></figure>
<list><item>one</item><item>two</item></list></div>
<figure xml:id="fig_0"><head>Figure 1</head><figDesc>A <hi>map</hi>
of it.</figDesc></figure>
<figure type="table" xml:id="tab_0"><head>Table 1</head><figDesc>Speeds.</figDesc><table>
<row><cell>a</cell><cell>b|c</cell></row><row><cell>1</cell></row></table></figure>
<figure xml:id="fig_5"><figDesc>Circle <ref type="figure" target="#fig_6">6</ref></figDesc></figure>
<figure xml:id="fig_6"><figDesc>Back <ref type="figure" target="#fig_5">5</ref></figDesc></figure>
</body><back><div type="references"><listBibl>
<biblStruct xml:id="b0"><analytic><title level="a">A theory</title><author><persName><forename>Ann</forename>
<surname>Reed</surname></persName></author></analytic><monogr><title>A journal</title></monogr></biblStruct>
</listBibl></div></back></text></TEI>"""

MARKDOWN = """# On the drift of made-up plates

## Abstract

We drift.

And [START_REF]A theory[END_REF] cite.

## Introduction

Plates move [START_REF]A theory[END_REF] and , see Fig. 1

[START_FIGURE]
Figure 1

A map of it.

[END_FIGURE]

and again Fig. 1, not Fig. 9.

[START_NOTE]A foot.[END_NOTE]

End [START_NOTE]aside[END_NOTE].

[START_FORMULA]E = m c[END_FORMULA]

### Inner

With [START_FORMULA]x < 2[END_FORMULA] in line.

### On 10.2 kinds

Table 1

[START_TABLE]
Table 1

Speeds.

| a | b\\|c |
| --- | --- |
| 1 |  |
[END_TABLE]

- one

- two

[START_FIGURE]
Figure 3

Alone, see 3

[END_FIGURE]

[START_FIGURE]
Circle 6

[START_FIGURE]
Back 5

[END_FIGURE]

[END_FIGURE]"""
