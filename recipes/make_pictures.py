"""A folder of pictures and photographs for the task vqa, which draws its scenes of them (option `pictures`).

    npm pack emoji-datasource-twitter@16.0.0 && tar xzf emoji-datasource-twitter-16.0.0.tgz    # 62 MB
    pip install scikit-image scikit-learn
    python recipes/make_pictures.py package runs/pictures

Pictures are Twemoji's (CC BY 4.0), 64 pixels wide, by the names of their own data: animals, food, things and places of
one word. Photographs are those that scikit-image and scikit-learn hold; `--photographs` and `--new-photographs` name
folders of your own instead. The folder's LICENCES.txt says whose they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CATEGORIES = ("Activities", "Animals & Nature", "Food & Drink", "Objects", "Travel & Places")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "moon")  # the task draws these itself
SIDE = 768  # of a photograph, at most
NEW = ("chelsea", "flower")  # photographs of held-out scenes
LICENCES = {
    "pictures": "Twemoji, copyright Twitter, Inc and other contributors, CC BY 4.0 "
    "(https://creativecommons.org/licenses/by/4.0), from the npm package emoji-datasource-twitter",
    "astronaut": "NASA, public domain, from scikit-image",
    "chelsea": "Stefan van der Walt, CC0, from scikit-image",
    "coffee": "Rachel Michetti, CC0, from scikit-image",
    "rocket": "SpaceX, CC0, from scikit-image",
    "china": "danielbuechele, CC BY 2.0 (https://creativecommons.org/licenses/by/2.0), from scikit-learn",
    "flower": "vultilion, CC BY 2.0 (https://creativecommons.org/licenses/by/2.0), from scikit-learn",
}


def pictures(package: Path, out: Path) -> int:
    """Copies the pictures of one word; returns how many."""
    found = 0
    for one in json.loads((package / "emoji.json").read_text(encoding="utf-8")):
        name = one["short_name"]
        fits = one["category"] in CATEGORIES and name.isalpha() and len(name) > 2 and name not in SHAPES
        if fits and one["has_img_twitter"]:
            shutil.copyfile(package / "img" / "twitter" / "64" / one["image"], out / f"{name}.png")
            found += 1
    return found


def packaged() -> Iterator[tuple[str, Any]]:
    """Names and pixels of the photographs that packages hold."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    for name in ("astronaut", "chelsea", "coffee", "rocket"):
        yield name, getattr(data, name)()
    for name, pixels in zip(("china", "flower"), load_sample_images().images):
        yield name, pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the unpacked npm package emoji-datasource-twitter")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--photographs", type=Path, help="folder of images instead of the packaged ones")
    parser.add_argument("--new-photographs", type=Path, help="folder of images for held-out scenes")
    given = parser.parse_args()
    if (given.photographs is None) != (given.new_photographs is None):
        parser.error("give --photographs and --new-photographs, or neither")
    from PIL import Image

    for part in ("pictures", "photographs", "new_photographs"):
        (given.out / part).mkdir(parents=True, exist_ok=True)
    count, used = pictures(given.package, given.out / "pictures"), ["pictures"]
    if given.photographs is None:
        for name, pixels in packaged():
            photograph = Image.fromarray(pixels)
            photograph.thumbnail((SIDE, SIDE))
            photograph.save(given.out / ("new_photographs" if name in NEW else "photographs") / f"{name}.png")
            used.append(name)
    else:
        for source, part in ((given.photographs, "photographs"), (given.new_photographs, "new_photographs")):
            for path in sorted(source.iterdir()):
                photograph = Image.open(path).convert("RGB")
                photograph.thumbnail((SIDE, SIDE))
                photograph.save(given.out / part / f"{path.stem}.png")
    (given.out / "LICENCES.txt").write_text("".join(f"{name}: {LICENCES[name]}\n" for name in used))
    print(f"{given.out}: {count} pictures, {len(used) - 1 or 'your own'} photographs")


if __name__ == "__main__":
    main()
