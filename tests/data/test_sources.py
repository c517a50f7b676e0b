"""Every kind of text source gives the same documents in the same order, and says what is wrong with a bad one."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from fathom.data import Source

DOCUMENTS = ["First line.\r\nSecond, naïve 雪.\n", "Another 🙂 one."]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(DOCUMENTS)).encode()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet"])
def test_rows_of_every_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS, "id": [0, 1]}), path)
    else:
        path.write_bytes({".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.xz": lzma.compress}[suffix](LINES))
    assert list(Source(str(path)).documents()) == DOCUMENTS
    assert list(Source(str(path), max_documents=1).documents()) == DOCUMENTS[:1]


def test_folder_is_read_in_order_of_name_and_plain_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_bytes(b"\xef\xbb\xbf" + DOCUMENTS[1].encode())  # with a byte-order mark
    (tmp_path / "a.txt").write_bytes(DOCUMENTS[0].encode())
    (tmp_path / "c.txt").write_text("  \n")  # no document
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert list(Source(str(tmp_path)).documents()) == DOCUMENTS


def test_content_hash_follows_bytes_not_names(tmp_path: Path) -> None:
    first, copy = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("some text")
    copy.write_text("some text")
    before = Source(str(first)).content_hash()
    assert before == Source(str(copy)).content_hash()
    assert before != Source(str(first), max_documents=1).content_hash()
    first.write_text("some texT")
    assert before != Source(str(first)).content_hash()


def test_hub_name_is_opened_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*args: object, **options: object) -> list[dict]:
        calls.append((args, options))
        return [{"body": text} for text in DOCUMENTS]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(Source("owner/set:subset@v2", "held", "body").documents()) == DOCUMENTS
    assert calls == [(("owner/set", "subset"), {"split": "held", "revision": "v2", "streaming": True})]

    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"data\.train='owner/set': no such file here.*'train' \(ConnectionError"):
        next(Source("owner/set").documents())


def test_embedded_corpus_is_split_by_book_and_author_and_small() -> None:
    folder = Source("embedded").files()[0].parent
    assert sum(file.stat().st_size for file in folder.glob("*.xz")) <= 4_000_000
    books = {
        split: [json.loads(line) for line in lzma.decompress((folder / f"{split}.jsonl.xz").read_bytes()).splitlines()]
        for split in ("train", "validation")
    }
    assert not {book["author"] for book in books["train"]} & {book["author"] for book in books["validation"]}
    assert list(Source("embedded", argument="data.validation").documents()) == [
        book["text"] for book in books["validation"]
    ]
    listed = (folder / "SOURCES.md").read_text(encoding="utf-8")
    for book in books["train"] + books["validation"]:
        row = f"| {book['title']} | {book['author']} | {book['year']} | {len(book['text'].encode()):,} |"
        assert row in listed and book["year"] <= 1922


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, r"data\.train='.*gone\.txt': no such file or folder"),
        ("picture.png", b"x", r"not a kind of file read: \.txt, \.md, \.jsonl"),
        ("latin.txt", b"one\ntwo caf\xe9", r"latin\.txt: not UTF-8 at byte 11 \(0xe9, line 2\): convert"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"latin\.jsonl: not UTF-8 at byte 24 \(0xff, line 2\)"),
        ("nul.txt", b"one\ntwo\0", r"nul\.txt: NUL at byte 7 \(0x00, line 2\): remove it; if .* UTF-16, convert it"),
        ("nul.jsonl", b'{"text": "a"}\n{"text": "b\0"}\n', r"nul\.jsonl: NUL at byte 25 \(0x00, line 2\)"),
        ("esc.jsonl", b'{"text": "a\\u0000"}\n', r"line 1: field 'text' has a NUL character at offset 1"),
        ("half.jsonl", b'{"text": "a\\ud800"}\n', r"line 1: '\\ud800' at character 1 of a text is half of a pair"),
        ("deep.jsonl", b'{"text": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", r"deep\.jsonl, line 1: not JSON \(maximum"),
        ("nul.jsonl.gz", gzip.compress(b'{"text": "\0"}', mtime=0), r"nul\.jsonl\.gz: NUL at byte 10"),
        ("utf16.txt", "one".encode("utf-16-le"), r"utf16\.txt: NUL at byte 1"),
        ("bad.jsonl", b'{"text": "a"}\n{"text"\n', r"bad\.jsonl, line 2: not JSON"),
        ("field.jsonl", b'{"body": "a"}\n', r"line 1: no field 'text' \(found: body\); set data\.text_field"),
        ("list.jsonl", b"[1]\n", r"line 1: no field 'text' \(found: none\)"),
        ("number.jsonl", b'{"text": 3}\n', r"line 1: field 'text' holds int, not text"),
        ("cut.jsonl.xz", lzma.compress(LINES)[:-20], r"damaged or truncated \.xz file"),
        ("cut.jsonl.gz", gzip.compress(LINES, mtime=0)[:-12], r"damaged or truncated \.gz file"),
        ("cut.parquet", b"PAR1 no more", r"damaged or truncated Parquet file"),
    ],
)
def test_bad_input(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        list(Source(str(path)).documents())


def test_unreadable_file_and_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no \.txt, .* file in this folder"):
        Source(str(tmp_path)).files()
    path = tmp_path / "locked.txt"
    path.write_text("text")

    def refuse(self: Path, *args: object) -> None:  # permission bits do not stop root, who runs many a CI
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=r"data\.train='.*': cannot read .*locked\.txt \(Permission denied\)"):
        list(Source(str(path)).documents())


def test_a_nul_in_a_parquet_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["fine", "no\0t"]}), path)
    with pytest.raises(ValueError, match=r"rows\.parquet, row 2: field 'text' has a NUL character at offset 2"):
        list(Source(str(path)).documents())


def test_parquet_without_the_field(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": DOCUMENTS}), path)
    with pytest.raises(ValueError, match=r"no field 'text' \(found: body\)"):
        list(Source(str(path)).documents())
    assert list(Source(str(path), text_field="body").documents()) == DOCUMENTS


def test_the_embedded_corpus_may_be_one_of_several_sources():
    (file,) = Source("embedded", argument="data.train.general.text").files()
    assert file.is_file() and file.name == "train.jsonl.xz"


def test_rows_hold_no_half_of_a_pair(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}\n{"a": [{"b": "x\\udc00"}]}\n')
    rows = Source(str(path), argument="CORPUS").rows()
    assert next(rows)[0] == {"a": "😀"}
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: '\\udc00' at character 1 of a text is half of a pair"):
        next(rows)
    assert len(list(Source(str(path), argument="CORPUS").rows(halves=True))) == 2
