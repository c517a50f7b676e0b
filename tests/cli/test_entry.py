"""The console script: verbs load on demand, and a failure is one line."""

from __future__ import annotations

import sys
import types

import pytest
import typer
import typer.core

import fathom_cli as cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fathom", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch):
    """A verb `broken` that raises what the test says."""

    def install(error: Exception) -> None:
        module = types.ModuleType("broken_verb")
        module.__spec__ = types.SimpleNamespace(name="broken_verb")  # type: ignore[assignment]

        def command(path: str) -> None:
            """Fails."""
            raise error

        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "broken_verb", module)
        monkeypatch.setitem(cli.VERBS, "broken", "broken_verb:command")

    return install


def test_help_lists_the_verbs_that_exist(monkeypatch, capsys) -> None:
    monkeypatch.setitem(cli.VERBS, "absent", "fathom_cli.absent:command")
    assert run(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert "absent" not in out and "--debug" in out
    assert "\x1b" not in out and "╭" not in out  # plain


def test_an_unknown_verb_is_refused(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "trian") == 2
    assert "No such command 'trian' (did you mean 'train'?)." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("steps=-1:\n  must be positive"), "fathom: steps=-1: must be positive\n"),
        (FileNotFoundError(2, "No such file or directory", "a.yaml"), "fathom: a.yaml: No such file or directory\n"),
        (ImportError("install fathom-lm[eval]"), "fathom: install fathom-lm[eval]\n"),
        (KeyError("x"), "fathom: KeyError: 'x' (--debug shows where)\n"),
    ],
)
def test_a_failure_is_one_line(monkeypatch, capsys, verb, error, line) -> None:
    verb(error)
    assert run(monkeypatch, "broken", "file") == 2
    assert capsys.readouterr().err == line


def test_an_interrupt_while_a_verb_is_imported(monkeypatch, capsys) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    assert run(monkeypatch, "cost", "file") == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_debug_shows_the_traceback(monkeypatch, capsys, verb) -> None:
    verb(ValueError("no"))
    assert run(monkeypatch, "broken", "file", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def every_option() -> list[tuple[str, typer.core.TyperOption]]:
    group = typer.main.get_command(cli.app)
    verbs = {name: group.get_command(typer.Context(group), name) for name in cli.VERBS}
    verbs |= {f"{name} {part}": c for name, verb in verbs.items() for part, c in getattr(verb, "commands", {}).items()}
    return [(name, option) for name, verb in verbs.items() for option in verb.params if option.opts[0][0] == "-"]


def test_a_flag_means_the_same_in_every_verb() -> None:
    meanings: dict[str, set[tuple]] = {}
    for name, option in every_option():
        for flag in option.opts:
            if (name, flag) == ("cost", "--device"):  # a kind of GPU to plan for, which need not be here
                continue
            # where what is made goes; what that is differs
            said = "" if "--output" in option.opts else option.help
            meanings.setdefault(flag, set()).add((tuple(sorted(option.opts)), said, option.is_flag))
    for flag in ("--device", "--json", "--output", "-o"):
        assert len(meanings[flag]) == 1, (flag, meanings[flag])
    assert all(option.default is None for _, option in every_option() if "--device" in option.opts)


@pytest.mark.parametrize("verb", ["train", "compare", "cache run", "lineage compare"])
def test_help_has_no_control_characters(monkeypatch, capsys, verb) -> None:
    assert run(monkeypatch, *verb.split(), "--help") == 0
    assert "\b" not in capsys.readouterr().out
