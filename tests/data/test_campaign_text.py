"""recipes/make_campaign_text.py: training files as they are, held-out texts cut at paragraphs and taking turns."""

import json
import lzma
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "recipes" / "make_campaign_text.py"


def test_held_out_documents_are_of_alike_size_and_no_text_is_lost(tmp_path):
    book = "\n\n".join(f"Paragraph {n}. " + "word " * 200 for n in range(20)).strip()
    articles = [f"Article {n}." for n in range(3)]
    lines = {
        name: "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        for name, texts in {"book": [book], "articles": articles}.items()
    }
    (tmp_path / "book.jsonl").write_bytes(lines["book"])
    (tmp_path / "articles.jsonl.xz").write_bytes(lzma.compress(lines["articles"]))
    files = [tmp_path / "book.jsonl", tmp_path / "articles.jsonl.xz"]
    runpy.run_path(str(SCRIPT))["main"](tmp_path / "made", files, files)

    assert (tmp_path / "made" / "train" / "articles.jsonl").read_bytes() == lines["articles"]
    made = [json.loads(line)["text"] for line in (tmp_path / "made" / "validation" / "passages.jsonl").open()]
    passages = [text for text in made if text.startswith("Paragraph")]
    assert "\n\n".join(passages) == book and [text for text in made if text not in passages] == articles
    assert all(4000 <= len(passage) < 5100 for passage in passages[:-1]) and len(passages) == 5
    assert made[:4] == [passages[0], articles[0], passages[1], articles[1]]
