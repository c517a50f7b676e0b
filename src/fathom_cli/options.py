"""Options that several verbs have, with one meaning everywhere.

`--output` (`-o`) also means one thing, where what is made goes; what that is, a folder or a file, the verb's help says.
`fathom cost --gpus` alone takes as `--device` a kind of GPU to plan for, which need not be here.
"""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; default: the GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
