"""What is written is whole or absent, and a full disk is named with the path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from fathom.writing import naming, new_folder, whole, write_json, write_text


@pytest.fixture
def full_disk(monkeypatch):
    """Every file that Python opens for writing is on a full disk, as /dev/full is."""
    real = Path.open

    def opened(self: Path, mode: str = "r", *arguments, **options):
        if "w" in mode or "a" in mode:
            real(self, mode).close()  # the file appears, its content does not
            return open("/dev/full", mode, *arguments, **options)
        return real(self, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "numbers.json"
    write_json(path, [1])
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, [float("nan")])
    with pytest.raises(RuntimeError), whole(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "[\n  1\n]\n" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_names_the_path(tmp_path, full_disk):
    with pytest.raises(OSError) as refused:
        write_text(tmp_path / "run.json", "text")
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, str(tmp_path / "run.json"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_errors_of_the_disk_are_named_whoever_raises_them(error):
    with pytest.raises(OSError) as refused, naming("model"):
        raise error
    assert refused.value.filename == "model" and refused.value.strerror == os.strerror(refused.value.errno)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        OSError(errno.ENOSPC, "No space left on device", "elsewhere"),
        ConnectionError("refused"),
        ValueError("no matter of disks"),
    ],
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as same, naming("model"):
        raise error
    assert same.value is error


def test_what_a_killed_process_left_goes_with_the_next_try(tmp_path):
    child = os.fork()
    if child == 0:
        with new_folder(tmp_path / "model") as work:
            (work / "half").write_text("")
            os._exit(9)
    os.waitpid(child, 0)
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".model-") and (left / "half").exists()
    (tmp_path / ".model-of-mine").mkdir()
    with new_folder(tmp_path / "models"):
        assert left.exists()  # of another folder
    with new_folder(tmp_path / "model") as first, pytest.raises(RuntimeError), new_folder(tmp_path / "model") as second:
        assert first.exists() and second != first and not left.exists()  # the first's process is alive
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model-of-mine", "model", "models"]
