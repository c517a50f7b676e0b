"""Build the documentation site: `make docs`. Strict: a link or a picture that leads nowhere ends it.

Pages come from docs/. What stands elsewhere is copied or made, so that it stands in one place: the start page is the
README, the pages of the command line are its help, the list of methods and a card's options come from the sources, and
the reference of Python names from their docstrings.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
import yaml

ROOT = Path(__file__).parents[2]
HERE, BUILD = Path(__file__).parent, ROOT / "build" / "site"
sys.path.insert(0, str(ROOT / "src"))

from fathom_cli import VERBS, app  # noqa: E402  of this checkout
from fathom_cli.catalogue import Entry, entries  # noqa: E402

WINGS = {
    "depth": "Compute and layers",
    "context": "Positions",
    "growth": "Experts and growth",
    "curation": "Curation",
    "caches": "KV caches",
    "lineage": "Lineage",
    "diffusion": "Diffusion of tokens",
    "latents": "Diffusion of vectors",
    "tables": "Tables",
    "vision": "Vision tokens",
    "audiovideo": "Clips with sound",
}
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")  # of a page, but for its anchor


def main() -> None:
    pages = BUILD / "pages"
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns(HERE.name, "*.py", "claims.yml"))
    made = {
        "index.md": of_the_root("README.md"),
        "contributing.md": of_the_root("CONTRIBUTING.md"),
        "methods/index.md": list_of_methods(),
        "commands.md": commands(),
    }
    for place, text in made.items():
        (pages / place).write_text(text, encoding="utf-8")
    shutil.copy(HERE / "claims.js", pages)
    claims = (pages / "claims.md").read_text(encoding="utf-8")  # its table takes the room of the list of headings
    sortable = f'---\nhide: [toc]\n---\n\n{claims}\n<script src="claims.js"></script>\n'
    (pages / "claims.md").write_text(sortable, encoding="utf-8")
    for page in pages.rglob("*.md"):  # on the site a folder is no page, and the root's pages lie beside docs/'s
        text = re.sub(r"methods/\)", "methods/index.md)", page.read_text(encoding="utf-8"))
        page.write_text(re.sub(r"\]\(\.\./CONTRIBUTING\.md", "](contributing.md", text), encoding="utf-8")
    for entry in entries():
        with (pages / "methods" / f"{entry.name}.md").open("a", encoding="utf-8") as card:
            card.write(from_the_sources(entry))
    broken = [f"{page}: {target}" for page in sorted(pages.rglob("*.md")) for target in missing(page)]
    if broken:
        sys.exit("Links that lead nowhere:\n" + "\n".join(broken))
    config = BUILD / "zensical.yml"
    config.write_text(yaml.safe_dump(configuration(pages), allow_unicode=True, sort_keys=False), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(config)], cwd=ROOT
    )
    if done.returncode:
        sys.exit(done.returncode)
    print(f"Open {(BUILD / 'html' / 'index.html').relative_to(ROOT)} in a browser.")


def configuration(pages: Path) -> dict[str, Any]:
    """config.yml with the folders of this checkout and the methods in the navigation, by wing."""
    config = yaml.safe_load((HERE / "config.yml").read_text(encoding="utf-8"))
    config |= {"docs_dir": pages.name, "site_dir": "html"}
    docstrings = next(plugin["mkdocstrings"] for plugin in config["plugins"] if "mkdocstrings" in plugin)
    python = docstrings["handlers"]["python"]
    python["paths"] = [str(ROOT / "src")]
    python["options"]["extensions"] = [str(HERE / "docstrings.py")]
    wings: dict[str, list[Any]] = {}
    for entry in entries():
        wings.setdefault(WINGS.get(entry.wing, entry.wing), []).append({entry.name: f"methods/{entry.name}.md"})
    methods = next(part for part in config["nav"] if "Methods" in part)
    methods["Methods"] = [{"All of them": "methods/index.md"}, *({wing: listed} for wing, listed in wings.items())]
    return config


def missing(page: Path) -> list[str]:
    """Targets of the page's links and pictures that are not there. Zensical checks anchors, but not pictures."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target in LINK.findall(text) if not re.match(r"\w+:", target)]
    return [target for target in targets if not (page.parent / target).exists()]


def of_the_root(name: str) -> str:
    """A page of the repository's root as a page of docs/: its links into docs/ lose the folder."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\]\(CONTRIBUTING\.md", "](contributing.md", text)
    return re.sub(r"\[LICENSE\]\(LICENSE\)", "LICENSE", text)


def list_of_methods() -> str:
    lines = ["# Methods", "", "What `fathom methods` lists, with the verdict of each card.", ""]
    for wing in dict.fromkeys(entry.wing for entry in entries()):
        lines += [
            f"## {WINGS.get(wing, wing)}",
            "",
            "| method | registry | what it does | measured |",
            "|---|---|---|---|",
        ]
        for entry in entries():
            if entry.wing == wing:
                cells = [f"[{entry.name}]({entry.name}.md)", entry.registry, entry.summary, entry.verdict]
                lines.append("| " + " | ".join(map(cell, cells)) + " |")
        lines.append("")
    return "\n".join(lines)


def from_the_sources(entry: Entry) -> str:
    """The end of a card: equation and options, as the class declares them."""
    lines = ["", "## In the code", "", f"`{entry.source}`", "", "```text", *entry.equation.split("; "), "```", ""]
    if entry.options:
        lines += ["| option | default | meaning |", "|---|---|---|"]
    lines += [f"| `{option.name}` | `{option.default!r}` | {cell(option.meaning)} |" for option in entry.options]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """Every verb's help, as the command prints it."""
    group: Any = typer.main.get_command(app)
    lines = ["# Command line", "", "What `fathom VERB --help` prints."]
    for verb in VERBS:
        lines += help_of(group.get_command(typer.Context(group, info_name="fathom"), verb), f"fathom {verb}", 2)
    return "\n".join(lines)


def help_of(command: Any, path: str, level: int) -> list[str]:
    context = command.context_class(command, info_name=path, terminal_width=100, max_content_width=100)
    lines = ["", f"{'#' * level} {path}", "", "```text", command.get_help(context), "```"]
    for name, part in getattr(command, "commands", {}).items():
        lines += help_of(part, f"{path} {name}", level + 1)
    return lines


if __name__ == "__main__":
    main()
