"""Sources of text: files, hub data sets and the embedded corpus, as documents in a stable order."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from fathom.data.config import EMBEDDED
from fathom.models.local_paths import refuse_absent

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
_HUB_NAME = re.compile(r"(?P<path>[\w.-]+(/[\w.-]+)?)(:(?P<subset>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """One text, named as in `DataConfig`."""

    name: str
    split: str = "train"  # of a hub data set
    text_field: str = "text"
    argument: str = "data.train"  # its name in messages; what follows the dot is the split of the embedded corpus
    max_documents: int | None = None

    def files(self) -> list[Path]:
        """The files of this source in reading order; empty for a hub data set.

        Raises FileNotFoundError for a path that is not there, ValueError for a kind of file that is not read.
        """
        if self.name == EMBEDDED:
            folder = Path(str(resources.files("fathom.data") / "corpus"))
            held_out = self.argument.startswith("data.validation")
            return [folder / f"{'validation' if held_out else 'train'}.jsonl.xz"]
        path = Path(self.name).expanduser()
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file))
            if not found:
                raise ValueError(f"{self.argument}={self.name!r}: no {', '.join(SUFFIXES)} file in this folder")
            return found
        if path.exists():
            if not _is_text(path):
                raise ValueError(f"{self.argument}={self.name!r}: not a kind of file read: {', '.join(SUFFIXES)}")
            return [path]
        hub = _HUB_NAME.fullmatch(self.name)
        refuse_absent(hub["path"] if hub else self.name, f"{self.argument}={self.name!r}", "file or folder")
        if hub is None or _is_text(path):
            raise FileNotFoundError(f"{self.argument}={self.name!r}: no such file or folder")
        return []

    def documents(self) -> Iterator[str]:
        """The documents with any text, in the order of the files and of their rows."""
        texts = (self._text(row, where) for row, where in self._all([self.text_field]))
        return islice((text for text in texts if text.strip()), self.max_documents)

    def rows(self, halves: bool = False) -> Iterator[tuple[dict[str, Any], str]]:
        """Every row with all its fields, and its file and line, for messages.

        Raises ValueError for a plain text file, which has no rows, and for what is no row; and, unless `halves`, for
        texts with an unpaired UTF-16 surrogate, which JSON can contain but tokenizers and files cannot.
        """
        plain = [file for file in self.files() if not is_table(file)]
        if plain:
            raise ValueError(f"{self.argument}={self.name!r}: {plain[0].name} has no rows; give JSONL or Parquet")
        for row, where in islice(self._all(None), self.max_documents):
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a row must have named fields, got {type(row).__name__}")
            if not halves:
                _refuse_halves(row, where)
            yield row, where

    def content_hash(self) -> str:
        """Hex digest that identifies the documents: of the bytes of files, or of a hub data set's name and split."""
        files = self.files()
        if files:
            digests = []
            for file in files:
                with _opened(file, self) as stream:
                    digests.append([_format(file), hashlib.file_digest(stream, "sha256").hexdigest()])
            key: list[Any] = [digests, self.text_field, self.max_documents]
        else:
            key = [self.name, self.split, self.text_field, self.max_documents]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()

    def _all(self, fields: list[str] | None) -> Iterator[tuple[Any, str]]:
        """Every row, with at least `fields` (None: all), and its file and line."""
        files = self.files()
        return (found for file in files for found in self._read(file, fields)) if files else self._read_hub()

    def _read(self, file: Path, fields: list[str] | None) -> Iterator[tuple[Any, str]]:
        kind = _format(file)
        with _opened(file, self) as stream:
            if kind == ".parquet":
                yield from self._read_parquet(file, stream, fields)
            elif kind.startswith(".jsonl"):
                yield from self._read_jsonl(file, stream)
            else:
                yield {self.text_field: decode(stream.read(), file)}, str(file)

    def _read_jsonl(self, file: Path, stream: BufferedReader) -> Iterator[tuple[Any, str]]:
        decompress: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix.lower())
        lines = decompress(stream) if decompress else stream
        offset = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        row = json.loads(decode(line, file, offset, number))
                    except (json.JSONDecodeError, RecursionError) as error:
                        raise ValueError(f"{file}, line {number}: not JSON ({error})") from None
                    yield row, f"{file}, line {number}"
                offset += len(line)
        except (gzip.BadGzipFile, lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{file}: damaged or truncated {file.suffix} file ({error})") from None

    def _read_parquet(
        self, file: Path, stream: BufferedReader, fields: list[str] | None
    ) -> Iterator[tuple[dict[str, Any], str]]:
        try:
            table = pyarrow.parquet.ParquetFile(stream)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{file}: damaged or truncated Parquet file ({error})") from None
        if fields is not None and not set(fields) <= set(table.schema_arrow.names):
            raise ValueError(self._no_field(str(file), table.schema_arrow.names))
        batches = table.iter_batches(columns=fields)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield row, f"{file}, row {number}"

    def _read_hub(self) -> Iterator[tuple[Any, str]]:
        parts = _HUB_NAME.fullmatch(self.name)
        assert parts is not None  # files() has refused anything else
        try:
            rows = datasets.load_dataset(
                parts["path"], parts["subset"], split=self.split, revision=parts["revision"], streaming=True
            )
        except Exception as error:  # the hub, its cache and its loaders raise a wide range of types
            raise ValueError(
                f"{self.argument}={self.name!r}: no such file here, and no Hugging Face data set could be opened "
                f"under this name with split {self.split!r} ({type(error).__name__}: {error})"
            ) from error
        for number, row in enumerate(rows, start=1):
            yield row, f"{self.name}, row {number}"

    def _text(self, row: Any, where: str) -> str:
        if not isinstance(row, dict) or self.text_field not in row:
            raise ValueError(self._no_field(where, list(row) if isinstance(row, dict) else []))
        text = row[self.text_field]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise ValueError(f"{where}: field {self.text_field!r} holds {type(text).__name__}, not text")
        if "\0" in text:
            raise ValueError(
                f"{where}: field {self.text_field!r} has a NUL character at offset {text.index(chr(0))}, which is no "
                "text: remove it"
            )
        _refuse_halves(text, where)
        return text

    def _no_field(self, where: str, found: list[str]) -> str:
        rename = f"give the one with the text that name, {self.text_field!r}"
        remedy = "set data.text_field" if self.argument.startswith("data.") else rename
        return f"{where}: no field {self.text_field!r} (found: {', '.join(found) or 'none'}); {remedy}"


def _refuse_halves(value: Any, where: str) -> None:
    """Raise ValueError for a text, in a row or alone, with an unpaired UTF-16 surrogate."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{where}: {one[error.start]!r} at character {error.start} of a text is half of a pair, and no "
                    "text: remove it"
                ) from None
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one


def _format(file: Path) -> str:
    name = file.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")


def is_table(file: Path) -> bool:
    """Whether the file's ending is that of a table whose rows are documents."""
    return _format(file).startswith((".jsonl", ".parquet"))


def _is_text(file: Path) -> bool:
    return _format(file) != ""


def _opened(file: Path, source: Source) -> BufferedReader:
    try:
        return file.open("rb")
    except OSError as error:
        raise type(error)(f"{source.argument}={source.name!r}: cannot read {file} ({error.strerror})") from None


def decode(raw: bytes, file: str | Path, offset: int = 0, line: int = 1) -> str:
    """UTF-8 text without a byte-order mark. `raw` begins at byte `offset`, in line `line`, of the decompressed file.

    Raises ValueError that says at which byte and line it is not UTF-8, or NUL, which no text has.
    """
    try:
        text, at = raw.decode("utf-8-sig"), raw.find(b"\0")
    except UnicodeDecodeError as error:
        text, at = "", error.start
    if at < 0:
        return text
    what, remedy = "not UTF-8", "convert the file to UTF-8"
    if raw[at] == 0:
        what, remedy = "NUL", "remove it; if the file is UTF-16, convert it to UTF-8"
    line += raw.count(b"\n", 0, at)
    raise ValueError(f"{file}: {what} at byte {offset + at} (0x{raw[at]:02x}, line {line}): {remedy}")
