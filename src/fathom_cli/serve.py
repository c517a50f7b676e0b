"""`fathom serve`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from fathom_cli.options import Device


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder or hub name; a Fathom or a stock checkpoint.")],
    cache: Annotated[str | None, typer.Option(help="Cache method, as in `fathom cache`; default: full.")] = None,
    budget: Annotated[int | None, typer.Option(help="Tokens that the cache method keeps.", min=1)] = None,
    option: Annotated[list[str] | None, typer.Option(help="Another option of the cache method, name=value.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; default: this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="FATHOM_API_KEY", help="The key that clients must send.")
    ] = None,
    batch: Annotated[int, typer.Option(help="The most requests in one batch.", min=1)] = 8,
    waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused (429).", min=1)] = 128,
    timeout: Annotated[float, typer.Option(help="Seconds from a request to its last token.", min=0.1)] = 120.0,
    device: Device = None,
) -> None:
    """Serve a checkpoint to clients of OpenAI's API (chat and text completions).

    \b
    Example:
      fathom serve runs/demo/model --cache treekv --budget 1024
    """
    if cache is None and (budget is not None or option):
        raise ValueError("--budget and --option belong to a cache method: give --cache as well")
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError:
        raise ValueError("fathom serve needs fastapi and uvicorn: pip install 'fathom-lm[serve]'") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ValueError(
            f"--host={host} --port={port}: {error.strerror}; choose another, or 0 for a free port"
        ) from error

    from fathom.evaluate import load_checkpoint
    from fathom.serve.app import make_app
    from fathom.serve.worker import Worker
    from fathom_cli.cache import parse_method

    model, tokenizer = load_checkpoint(checkpoint, device)
    method = None if cache is None else parse_method(cache, budget, option)
    name = Path(checkpoint.rstrip("/")).name
    app = make_app(Worker(model, tokenizer, method, batch, waiting), name, timeout, api_key)
    typer.echo(f"{name} at http://{host}:{listening.getsockname()[1]}/v1")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
