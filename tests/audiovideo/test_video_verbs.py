"""`fathom video score`: what a user reads, the page it writes, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import av
import pytest

from fathom.audiovideo.clips import write_clip
from fathom.audiovideo.generator import Generator
from tiny_checkpoint import run_cli

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for number, options in enumerate(({"actions": ("bounce",)}, {"silent": 1.0})):
        write_clip(Generator(frames=33, **options).clip(number), folder / f"{number}.mp4")
    return [folder / "0.mp4", folder / "1.mp4"]


@pytest.fixture
def run(monkeypatch, capsys):
    return lambda *arguments: run_cli(monkeypatch, capsys, "video", "score", *map(str, arguments))


def test_score_says_what_is_heard_when_it_is_seen(run, files):
    code, out, _ = run(*files, "--json")
    clips = json.loads(out)["clips"]
    assert code == 0 and [clip["file"] for clip in clips] == [str(file) for file in files]
    assert clips[0]["offset_ms"] < 10 and clips[0]["missed"] == clips[0]["extra"] == 0
    assert clips[1]["offset_ms"] is None and clips[1]["missed"] == len(clips[1]["seen"]) > 0
    assert json.loads(out)["summary"]["missed"]["clips"] == 2
    table = run(*files)[1].splitlines()
    assert table[0].split()[0] == "offset_ms" and table[1].startswith(str(files[0])) and table[3].startswith("mean")


def test_the_page_holds_the_clips_and_asks_for_nothing_else(run, files, tmp_path):
    page = tmp_path / "page.html"
    _, out, _ = run(*files, "-o", page)
    assert f"Page: {page}" in out
    text = page.read_text()
    embedded = re.findall(r'src="data:video/mp4;base64,([^"]+)"', text)
    assert [base64.b64decode(one) for one in embedded] == [file.read_bytes() for file in files]
    assert re.findall(r'(?:src|href)="(?!data:)', text) == [] and "://" not in re.sub(r"data:[^\"]*", "", text)
    assert (
        text.count('class="seen"')
        == text.count('class="heard"') + json.loads(run(*files, "--json")[1])["clips"][1]["missed"]
    )


def test_a_clip_that_browsers_do_not_play_is_coded_again(run, files, tmp_path):
    with av.open(str(files[0])) as source, av.open(str(tmp_path / "clip.mkv"), "w") as target:
        copies = {stream: target.add_stream_from_template(stream) for stream in source.streams}
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = copies[packet.stream]
                target.mux(packet)
    run(tmp_path / "clip.mkv", "-o", tmp_path / "page.html")
    found = re.search(r"data:video/mp4;base64,([^\"]+)", (tmp_path / "page.html").read_text())
    with av.open(io.BytesIO(base64.b64decode(found[1]))) as file:
        assert file.streams.video[0].frames == 33 and file.streams.audio[0].rate == 8000


def test_the_guide_works_as_written(run, files, tmp_path, monkeypatch):
    text = Path(__file__).parents[2].joinpath("docs/clips.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shutil.copy(files[0], "dog.mp4")
    command = re.search(r"^fathom video score (.*)$", text, re.M)[1]
    assert run(*command.split())[0] == 0 and Path("scores.html").is_file()
    names = {"clip": Generator().clip(0), "my_metric": Loudest()}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block.replace("clips(100)", "clips(2)"), names)
    assert names["numbers"]["loudest"] == names["clip"].audio.max() and len(names["train"]) == 2


class Loudest:
    name, unit, better, meaning = "loudest", "", "higher", "largest sample"

    def __call__(self, clip):
        return float(clip.audio.max())


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on PATH")
def test_a_browser_plays_picture_and_sound(run, files, tmp_path):
    page = tmp_path / "page.html"
    run(files[0], "-o", page)
    probe = """<script>
      const v = document.querySelector("video"), said = document.body.appendChild(document.createElement("p"));
      v.muted = true;
      v.addEventListener("timeupdate", () => {
        const both = [v.webkitDecodedFrameCount > 3, v.webkitAudioDecodedByteCount > 0];
        said.textContent = ["PLAYED", v.error ? 1 : 0, v.videoWidth, v.duration.toFixed(2), ...both].join(" ");
      });
      v.play().catch(error => { said.textContent = "REFUSED " + error; });
    </script></body>"""
    page.write_text(page.read_text().replace("</body>", probe))
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --autoplay-policy=no-user-gesture-required "
        "--virtual-time-budget=3000 --dump-dom"
    )
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = re.search(r"(?<=<p>)(PLAYED|REFUSED) [^<]*", done.stdout)
    assert said and said[0] == "PLAYED 0 64 1.38 true true", said and said[0]


def test_what_cannot_be_scored_is_refused_in_one_line(run, files, tmp_path):
    (tmp_path / "text.mp4").write_text("not a film")
    for arguments, named in (
        ((tmp_path / "absent.mp4",), "absent.mp4: no such file"),
        ((tmp_path / "text.mp4",), "text.mp4: not a readable clip, or cut short"),
        ((files[0], "-o", tmp_path / "no" / "page.html"), "no folder"),
    ):
        code, _, err = run(*arguments)
        assert code == 2 and named in err and len(err.strip().splitlines()) == 1
