"""CTRLSciTab: source variants, retrievers, and what must not train them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from table_cases import GRID, tokenizer

from fathom.tables.text import CTRLSciTab, metrics
from fathom.tables.text.ctrlscitab import parse, pieces, query, serialize, source_parts
from fathom.tables.text.linearize import STOP_WORDS, TableLinearizer, words
from fathom.tables.text.retrieval import TSDAE, CrossEncoder, Random, TfIdf, make_retriever, strings
from fathom.tables.text.stages import Stage

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
TWO = GRID.background[:2]
HEAD = "our net <C> 27.5 <H> <R> <C> model <C> F1 <C> time"
BODY = "<R> <C> our net <C> 27.5 <C> 3 <R> <C> base <C> 21.0 <C> 2 <R> <C> old <C> 9.25 <C> 1"
TAIL = "<CAP> Scores of models ."
SAID = f"<BKG> {TWO[0]} {TWO[1]}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, f"{HEAD} {TAIL} {SAID}"),
        ({"background": False}, f"{HEAD} {TAIL}"),
        ({"highlights": False}, f"{BODY} {TAIL} {SAID}"),
        ({"highlights": False, "background": False}, f"{BODY} {TAIL}"),
        ({"include_body": True}, f"{HEAD} {BODY} {TAIL} {SAID}"),
    ],
)
def test_the_four_sources_are_the_tables_of_the_sheet_and_are_read_back(options, expected):
    source = serialize(GRID, CTRLSciTab(**options), TWO)
    assert source == expected
    found = parse(source)
    assert found["caption"] == GRID.caption and found["highlights"] == (list(GRID.highlights) if HEAD in source else [])
    rows = ([list(GRID.header)] if HEAD in source else []) + ([list(r) for r in GRID.rows] if BODY in source else [])
    assert found["rows"] == rows and found["background"] == (" ".join(TWO) if SAID in source else "")
    empty = dataclasses.replace(GRID, background=())
    assert "<BKG>" not in serialize(empty, CTRLSciTab(**options), ())


def test_methods_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="retriever='none': choose one, or use background=False"):
        CTRLSciTab(retriever="none")
    with pytest.raises(ValueError, match="sentences=0: must be at least 1"):
        CTRLSciTab(sentences=0)
    with pytest.raises(ValueError, match="retriever='tfidff': use tsdae, tfidf"):
        make_retriever("tfidff", [GRID], ["x"], tokenizer())


def test_tfidf_is_scikit_learns():
    texts = ["The base is a tree.", "Time and time in hours", "scores of our net", "trees of nets"]
    vectorizer = TfidfVectorizer(tokenizer=words, lowercase=False, token_pattern=None, stop_words=sorted(STOP_WORDS))
    matrix = vectorizer.fit_transform(texts)
    for asked in ("time of our net", "The base base tree", "zzz"):
        expected = (matrix @ vectorizer.transform([asked]).T).toarray()[:, 0]
        assert TfIdf().scores(asked, texts) == pytest.approx(expected.tolist(), abs=1e-12)


class MeanOfAnUntrainedEncoder(TSDAE):
    """Cosine of the mean states of the query and of each sentence by itself."""

    @torch.no_grad()
    def scores(self, asked, sentences):
        def mean(text):
            return self.encoder(input_ids=torch.tensor([self.ids(text)])).last_hidden_state.mean(1)

        return [torch.cosine_similarity(mean(asked), mean(text)).item() for text in sentences]


def test_what_retrievers_have_in_common():
    asked = query(GRID)
    for retriever in (TfIdf(), Random(), TSDAE(None, tokenizer(), **TINY), CrossEncoder(None, tokenizer(), **TINY)):
        scores = retriever.scores(asked, GRID.background)
        for order in itertools.islice(itertools.permutations(range(4)), 5):
            assert retriever.scores(asked, [GRID.background[i] for i in order]) == pytest.approx(
                [scores[i] for i in order]
            )
        top = retriever.top(asked, GRID.background, 2)
        assert top == [GRID.background[i] for i in sorted(range(4), key=lambda i: -scores[i])[:2]]
        assert sorted(retriever.top(asked, GRID.background * 2, 9)) == sorted(GRID.background)  # all of them, once
        assert retriever.top(asked, [], 3) == []
    planted = "our net 27.5 model F1 time"
    assert TfIdf().top(asked, [*GRID.background, planted], 1) == [planted]
    untrained = MeanOfAnUntrainedEncoder(None, tokenizer(), **TINY).eval()
    assert untrained.top(planted, [*GRID.background, planted], 1) == [planted]
    found = {tuple(Random(seed).top(asked, GRID.background, 3)) for seed in range(9)}
    assert len(found) > 3


def test_tsdae_decodes_from_one_vector_with_the_encoders_weights():
    model = TSDAE(None, tokenizer(), **TINY)
    shared = {p.data_ptr() for p in model.encoder.parameters()}
    decoder = dict(model.decoder.named_parameters())
    own = [name for name, p in decoder.items() if p.data_ptr() not in shared]
    assert all("crossattention" in name or name.startswith("cls.") for name in own) and len(own) < len(decoder)
    row = model.ids(TWO[0])
    for deleted, least in ((0.0, len(row)), (0.99, 3)):
        model.deleted = deleted
        kept = [model.corrupted(row) for _ in range(20)]
        assert all(k[0] == row[0] and k[-1] == row[-1] and len(k) >= 3 for k in kept)
        assert min(map(len, kept)) == least
    model.deleted = 0.6
    share = sum(len(model.corrupted(row)) - 2 for _ in range(300)) / 300 / (len(row) - 2)
    assert share == pytest.approx(0.4, abs=0.04)
    # its loss changes with the vector, and with nothing else of the encoder's states
    model.eval()
    with torch.no_grad():
        vectors = model.encode([row])
        states = model.encoder(input_ids=torch.tensor([row])).last_hidden_state
        assert torch.equal(states[:, 0], vectors)
        was = model.reconstruction(vectors, [row])
        assert not torch.equal(model.reconstruction(vectors + 1, [row]), was)
    with pytest.raises(ValueError, match=r"deleted=1.0: use a share in \[0, 1\)"):
        TSDAE(None, tokenizer(), deleted=1.0, **TINY)
    losses = model.fit(list(GRID.background), Stage(steps=30, batch_size=4, lr=1e-2, schedule="constant"))
    assert losses[-1] < 0.8 * losses[0]


def test_no_held_out_text_trains_a_retriever():
    other = dataclasses.replace(GRID, background=("A test says so.", "Time is in hours."))
    texts, dropped = strings([GRID, other], ["Our net wins.", "The base loses."])
    assert len(texts) == 4 + 2 + 2 and dropped == 0
    held = ["a test SAYS so", "Our net wins."]
    texts, dropped = strings([GRID, other], ["Our net wins.", "The base loses."], held)
    assert dropped == 2 and not [text for text in texts if "says so" in text or "wins" in text]


def test_a_cross_encoder_learns_evidence():
    model = CrossEncoder(None, tokenizer(), **TINY)
    examples = [
        (query(GRID), GRID.background[i], [b for b in GRID.background if b != GRID.background[3]]) for i in (3, 3)
    ]
    losses = model.fit(examples, Stage(steps=40, batch_size=2, lr=1e-2))
    assert losses[-1] < 0.3 * losses[0]
    assert model.top(query(GRID), GRID.background, 1) == [GRID.background[3]]


def test_the_reference_covers_highlights_that_come_from_it():
    text = "Our net reaches 27.5 F1, against 21.0 of the base."
    cells = [cell for cell in GRID.cells if metrics.mentioned(cell, text)]
    assert set(cells) == {"our net", "27.5", "base", "21.0"} and metrics.coverage(text, cells) == 1
    lines = TableLinearizer(tokenizer())
    assert lines.sentences(["The base is a tree."], True, None) == ["base tree."]
    (cut,) = lines.sentences(["The base is a tree."], False, 4)
    assert "The base is a tree.".startswith(cut) and len(lines.plain(cut)) == 4


def test_a_marker_in_a_cell_the_caption_or_the_background_is_text():
    known = tokenizer()
    lines = TableLinearizer(known, "Table to text: ")
    marks = {mark: known.convert_tokens_to_ids(mark) for mark in ("<R>", "<C>", "<CAP>", "<BKG>", "<H>")}
    hostile = dataclasses.replace(
        GRID,
        header=("model", "<CAP> F1", "<R>"),
        rows=(("our net", "27.5", "<H>"), ("a <BKG> b", "</s>", "<pad>")),
        caption="Scores <H> of <C> models .",
        highlights=("<H>", "27.5"),
    )
    said = ["One <BKG> two", "<CAP>"]
    found = dict(source_parts(hostile, said, lines, 512))
    assert [[ids.count(mark) for mark in marks.values()] for ids in found.values()] == [
        [0, 0, 0, 0, 0],  # the prefix
        [0, 1, 0, 0, 1],  # <C> between two highlights, <H> behind them
        [1, 3, 0, 0, 0],
        [2, 6, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
    ]
    strange = {known.eos_token_id, known.pad_token_id}
    assert not strange & {token for ids in found.values() for token in ids}
    text = serialize(hostile, CTRLSciTab(include_body=True), said)
    assert known.decode([token for ids in found.values() for token in ids]).split() == f"Table to text: {text}".split()
    # without a marker in a text, the ids are those of the whole source at once
    for part, ids in source_parts(GRID, TWO, lines, 512)[1:]:
        alone = " " + " ".join(word for word in pieces(GRID, TWO)[part] if word)
        assert ids == known(alone, add_special_tokens=False)["input_ids"]
