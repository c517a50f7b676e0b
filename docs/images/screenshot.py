"""The picture of the README, of the demo's report: needs a Chromium or Chrome on PATH.

make demo && .venv/bin/python docs/images/screenshot.py runs/demo/report.html docs/images/report.png
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1240, 1560


def screenshot(page: Path, picture: Path, browser: str) -> None:
    """The top of a page, WIDTH × HEIGHT, in 256 colours."""
    with tempfile.TemporaryDirectory() as profile:
        size = f"--window-size={WIDTH},{HEIGHT}"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
        command += [f"--user-data-dir={profile}", f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    Image.open(picture).quantize(256).save(picture, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"No browser: put one of {', '.join(NAMES)} on PATH")
    if not arguments.page.is_file():
        sys.exit(f"{arguments.page}: no such file; `make demo` writes runs/demo/report.html")
    screenshot(arguments.page, arguments.picture, browser)


if __name__ == "__main__":
    main()
