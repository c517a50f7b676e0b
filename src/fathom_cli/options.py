"""Options that several verbs share, with one meaning everywhere.

`--output` (`-o`) is always the place of the result; the verb's help says whether that is a folder or a file. `--device`
is where the verb computes, except in `fathom cost --gpus`, where it is a kind of GPU to plan for.
"""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; default: the GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
