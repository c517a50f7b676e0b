"""`fathom lineage`: which model does this one come from?"""

import base64
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from fathom_cli.options import Device, Json

app = typer.Typer(
    help="Say which model another one comes from: compare, fingerprint, verify, matrix, merge, attack.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)

Model = Annotated[str, typer.Argument(help="Folder, .gguf file, LoRA adapter folder, or hub name.")]


@contextmanager
def _bars(quiet: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A context that yields title → callback(done, total), which shows a progress bar in a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=_err, transient=True, disable=quiet or not _err.is_terminal) as progress:

        def start(title: str) -> Callable[[int, int], None]:
            task = progress.add_task(title, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield start


def _place(device: str | None) -> str:
    from fathom.models.device import device_of

    return str(device_of(device))


def _print_json(record: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, float) and value != value:
            return None  # JSON has no NaN
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    typer.echo(json.dumps(plain(record), indent=2))


@app.command()
def compare(
    a: Model,
    b: Model,
    method: Annotated[Literal["awm", "huref", "all"], typer.Option(help="The fingerprint to compare by.")] = "all",
    alignment: Annotated[
        Literal["auto", "lap", "procrustes"], typer.Option(help="How AWM matches residual axes.")
    ] = "auto",
    paper: Annotated[bool, typer.Option("--paper", help="AWM as published: stored weights, LAP.")] = False,
    parts: Annotated[bool, typer.Option("--parts", help="Also score gate, up, v, o and down.")] = False,
    base: Annotated[str | None, typer.Option(help="Base model, when A or B is a LoRA adapter.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page here.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints. Exit code: 0 related; 3 inconclusive, also where no method could judge; 4 unrelated (no
    trace found, a disguise is not excluded); 5 shares parts.

    \b
    Example:
      fathom lineage compare my-llama my-finetuned-llama --html lineage.html
    """
    from fathom.lineage.errors import NoEvidenceError, PackedWeightsError
    from fathom.lineage.html import write_page
    from fathom.lineage.pairs import abstain
    from fathom.lineage.pairs import compare as run
    from fathom.lineage.reader import open_checkpoint

    try:
        models = [open_checkpoint(m, base=base, device=_place(device)) for m in (a, b)]
        with _bars(as_json) as bars:
            result = run(models[0], models[1], method, alignment, paper=paper, parts=parts, progress=bars)
    except (PackedWeightsError, NoEvidenceError) as error:
        result = abstain(a, b, str(error))
    if as_json:
        _print_json(result.as_dict())
    else:
        _show(result)
    if html is not None:
        write_page(result, html)
    raise typer.Exit(result.exit_code)


def _show(result: Any) -> None:
    from fathom.lineage.html import p_words

    _out.print(
        f"{result.verdict.upper()}",
        style={"related": "bold green", "unrelated": "bold"}.get(result.verdict, "bold yellow"),
    )
    for reason in result.reasons:
        _out.print(f"  {reason}", soft_wrap=True, markup=False)
    for side, files in result.files.items():
        read, beside = (_few(files[key]) for key in ("read", "beside"))
        if read:
            line = f"  {side}: read {read}" + (f"; not read, as transformers would not: {beside}" if beside else "")
            _out.print(line, soft_wrap=True, markup=False)
    if not result.details:
        return
    table = Table("method", "score", "judged", "p", "strangers", "verdict", box=None)
    for column in table.columns:
        column.no_wrap = True
    for name, r in result.details.items():
        null = r["null"]
        about = "not measured" if null is None else f"≤ {null['max']:.3f} ({null['pairs']})"
        table.add_row(
            name.removeprefix("awm "), f"{r['score']:.4f}", f"{r['judged']:.3f}", p_words(r), about, r["verdict"]
        )
    _out.print(table)
    tests = next(iter(result.details.values()))["tests"]
    _out.print(
        "judged: agreement beyond what neighbouring layers share (AWM), median term (HuRef); strangers: highest of so "
        f"many independently trained pairs; p: share of them that agree as much, corrected for {tests} methods (Holm)",
        soft_wrap=True,
    )
    if result.layers:
        cells = " ▁▂▃▄▅▆▇█"
        for role in ("q", "k"):
            line = "".join(cells[round(8 * min(max(layer[role], 0), 1))] for layer in result.layers)
            _out.print(f"{role} by layer |{line}|", markup=False, soft_wrap=True)


def _few(names: list[str]) -> str:
    return ", ".join(names if len(names) < 4 else [names[0], "…", names[-1]])


@app.command()
def fingerprint(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder for the fingerprint.")],
    key: Annotated[Path | None, typer.Option(help="Ed25519 private key (PEM) to sign with.")] = None,
    generator: Annotated[Path | None, typer.Option(help="StyleGAN2 generator (safetensors) for the picture.")] = None,
    opening: Annotated[
        bool, typer.Option("--opening", help="Also write opening/, for an auditor (shows weights!).")
    ] = False,
    device: Device = None,
) -> None:
    """Write a model's vector, picture and commitment. Keep secret.key: it opens the commitment.

    \b
    Example:
      fathom lineage fingerprint my-llama -o my-fingerprint
    """
    from fathom import __version__
    from fathom.lineage import commitment
    from fathom.lineage.huref import fingerprint as compute
    from fathom.lineage.picture import Renderer, creature, save_picture
    from fathom.lineage.reader import open_checkpoint
    from fathom.lineage.stylegan2 import StyleGAN2
    from fathom.lineage.weights import new_folder

    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output}: exists and is not empty; name a new folder")
    signer = None if key is None else commitment.load_key(key)
    opened = open_checkpoint(model, device=_place(device))
    mark = compute(opened)
    secret = secrets.token_bytes(32)
    record = commitment.statement(opened, mark, secret, __version__)
    render: Renderer = creature if generator is None else StyleGAN2.load(generator)
    document = {"statement": record, "signature": None if signer is None else commitment.sign(record, signer)}
    with new_folder(output) as folder:
        save_picture(render(mark.vector.numpy()), folder / "picture.png")
        (folder / "fingerprint.json").write_text(json.dumps(document, indent=1))
        handle = os.open(folder / "secret.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(base64.b64encode(secret).decode())
        if opening:
            part = commitment.open_selected(opened, record, secret)
            (folder / "opening").mkdir()
            (folder / "opening" / "opened.safetensors").write_bytes(part.tensors)
            (folder / "opening" / "proof.json").write_text(json.dumps(part.proof))
    _out.print(f"root {record['root']}", markup=False)
    _out.print(f"written: {output} (keep secret.key private)", markup=False, soft_wrap=True)


def _read_json(file: Path, *keys: str) -> dict[str, Any]:
    """A JSON object with these keys. Raises ValueError when the file holds anything else."""

    def refuse(name: str) -> None:
        raise ValueError(f"it has {name} in it")

    try:
        record = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8
        raise ValueError(f"{file}: not a JSON file ({error}); name what `fathom lineage fingerprint` wrote") from error
    if not isinstance(record, dict) or not set(keys) <= set(record):
        raise ValueError(
            f"{file}: no {' and '.join(keys) or 'object'} in it; name what fathom lineage fingerprint wrote"
        )
    return record


def _read_secret(file: Path) -> bytes:
    try:
        return base64.b64decode(file.read_text(), validate=True)
    except ValueError as error:
        raise ValueError(f"{file}: not a secret.key ({error})") from error


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="Fingerprint folder or its fingerprint.json.")],
    model: Annotated[str | None, typer.Argument(help="The model, to recompute everything (tier 0).")] = None,
    trust: Annotated[Path | None, typer.Option(help="Public key (PEM) that the signature must verify with.")] = None,
    secret: Annotated[Path | None, typer.Option(help="secret.key of the owner, to recompute the root.")] = None,
) -> None:
    """Check a fingerprint: signature, then the weights (tier 0) or the opening beside it (tier 1). Lists what was
    checked and what was not. Exit code: 1 mismatch; 3 nothing ties the vector to the weights under the root.

    \b
    Example:
      fathom lineage verify my-fingerprint my-llama --secret my-fingerprint/secret.key
    """
    from fathom.lineage import commitment
    from fathom.lineage.reader import open_checkpoint

    file = folder / "fingerprint.json" if folder.is_dir() else folder
    document = _read_json(file, "statement", "signature")
    record, signature = document["statement"], document["signature"]
    if not isinstance(record, dict):
        raise ValueError(
            f"{file}: its statement is a {type(record).__name__}; name what fathom lineage fingerprint wrote"
        )
    checked: list[str] = []
    unchecked: list[str] = []
    bound = False
    try:
        if signature is not None:
            trusted = None if trust is None else commitment.load_public_key(trust)
            signer = commitment.check_signature(record, signature, trusted)
            checked.append(
                f"signature: the statement is as {'the trusted key' if trust else f'key {signer}'} signed it"
            )
            if trust is None:
                unchecked.append("whose key that is: it needs --trust")
        elif trust is not None:
            raise commitment.CommitmentError("signature: there is none, but --trust asks for one")
        else:
            unchecked.append("who made this fingerprint: it is unsigned")
        if model is not None:
            salt = None if secret is None else _read_secret(secret)
            found = commitment.check_model(record, open_checkpoint(model), salt)
            checked.append(f"vector recomputed from the weights: cosine {found['cosine']:.6f}")
            bound = "root" in found
            if bound:
                checked.append("root recomputed: equal, so every weight is the committed one")
            else:
                unchecked.append("every weight that the vector does not read: the root needs --secret")
        part = file.parent / "opening"
        if part.is_dir():
            proof = _read_json(part / "proof.json")
            opened = commitment.Opening((part / "opened.safetensors").read_bytes(), proof)
            cosine = commitment.check_opening(record, opened)
            checked.append(f"opening belongs to the root; vector from it: cosine {cosine:.6f}")
            bound = bound or model is None
        if model is None:
            unchecked.append("any model: none was given" if part.is_dir() else "vector and root: no model was given")
    except commitment.CommitmentError as error:
        _err.print(f"MISMATCH {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    for title, lines in (("checked", checked), ("not checked", unchecked)):
        for line in lines:
            _out.print(f"{title}: {line}", markup=False, soft_wrap=True)
    if not bound:
        raise typer.Exit(3)


@app.command()
def matrix(
    models: Annotated[list[str], typer.Argument(help="Two or more models.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="PNG of the clustered heat map and tree.")
    ] = None,
    alignment: Annotated[
        Literal["auto", "lap", "procrustes"],
        typer.Option(help="How AWM matches residual axes; auto: LAP, and Procrustes where that scores below 0.5."),
    ] = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compare all pairs of models by hardened AWM, and cluster them. Packed 4-bit models and models without query and
    key weights are left out. Exit code: 3 when fewer than two remain.

    \b
    Example:
      fathom lineage matrix my-llama my-finetuned-llama my-gpt2 -o matrix.png
    """
    from fathom.lineage.errors import NoEvidenceError, PackedWeightsError
    from fathom.lineage.pairs import matrix as run
    from fathom.lineage.reader import open_checkpoint

    opened, left_out = [], {}
    for name in models:
        try:
            opened.append(open_checkpoint(name, device=_place(device)))
        except PackedWeightsError as error:
            left_out[name] = str(error)
    try:
        if left_out and len(opened) < 2:
            raise NoEvidenceError("fewer than two models can be compared")
        with _bars(as_json) as bars:
            result = run(opened, alignment, bars("pairs"))
    except NoEvidenceError as error:
        for reason in (*left_out.values(), error):
            _err.print(f"abstained: {reason}", markup=False, soft_wrap=True)
        raise typer.Exit(3) from error
    left_out |= result.left_out
    for name, reason in left_out.items():
        _err.print(f"left out: {name} ({reason})", markup=False, soft_wrap=True)
    if output is not None:
        from fathom.lineage.heatmap import save_matrix

        save_matrix(result, output)
    if as_json:
        tree, scores = result.tree.tolist(), result.scores.tolist()
        record = {"models": result.names, "scores": scores, "order": result.order, "tree": tree}
        _print_json(record | {"left_out": left_out})
        return
    columns = range(len(result.names))
    table = Table("", *(f"[{i}]" for i in columns), box=None)
    for i in result.order:
        table.add_row(f"[{i}] {result.names[i]}".replace("[", "\\["), *(f"{result.scores[i, j]:.3f}" for j in columns))
    _out.print(table)


@app.command()
def merge(
    suspect: Model,
    parents: Annotated[list[str], typer.Argument(help="Two or more candidate parents.")],
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Estimate which parents a model was merged from, and in what proportion.

    \b
    Example:
      fathom lineage merge my-merge my-llama my-finetuned-llama
    """
    from fathom.lineage.merge import merge_weights
    from fathom.lineage.reader import open_checkpoint

    opened = [open_checkpoint(m, device=_place(device)) for m in (suspect, *parents)]
    with _bars(as_json) as bars:
        found = merge_weights(opened[0], opened[1:], bars("layers"))
    if as_json:
        record = {"parents": parents, "weights": found.weights, "errors": found.errors}
        _print_json(record | {"explained": found.explained, "unexplained": found.unexplained, "layers": found.layers})
        return
    for name, weight, error in zip(parents, found.weights, found.errors):
        _out.print(f"{weight:8.4f} ± {error:.4f}  {name}", markup=False, soft_wrap=True)
    _out.print(f"left over: {found.unexplained:.1%} of what the nearest parent alone leaves")


@app.command()
def attack(
    model: Model,
    transform: Annotated[str, typer.Option(help="Name of a transform; see --list.")] = "all",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="New folder for the changed model.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the transform.")] = 0,
    show: Annotated[bool, typer.Option("--list", help="List transforms and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Disguise a model by transforms that keep its function, and check the logits. Exit code: 1 if they changed.

    \b
    Example:
      fathom lineage attack my-llama --transform all -o my-disguised-llama
    """
    import torch

    from fathom.lineage.attack import apply_exact, logit_error, probe_tokens
    from fathom.lineage.perturb import INEXACT
    from fathom.lineage.reader import open_checkpoint
    from fathom.lineage.transforms import EXACT
    from fathom.lineage.weights import Weights

    if show:
        for name, entry in EXACT.items():
            _out.print(f"{name:18} exact {entry.code:5} {entry.summary}", markup=False)
        for name in INEXACT:
            _out.print(f"{name:18} inexact", markup=False)
        return
    if transform not in EXACT and transform not in INEXACT:
        raise ValueError(f"transform: {transform!r} is unknown; see fathom lineage attack MODEL --list")
    original = Weights.load(open_checkpoint(model))
    if transform in EXACT:
        changed = apply_exact(original, transform, seed)
    else:
        changed = INEXACT[transform](original, torch.Generator().manual_seed(seed))
    same_tokens = (
        changed.tensors["embed"].shape[0] == original.tensors["embed"].shape[0] or changed.renumbering is not None
    )
    error = logit_error(original, changed, probe_tokens(original), torch.float32) if same_tokens else None
    if output is not None:
        changed.save(output)
    record = {"model": model, "transform": transform, "seed": seed, "exact": transform in EXACT, "logit_error": error}
    if as_json:
        _print_json(record)
    elif error is not None:
        _out.print(f"{transform}: logits differ by {error:.1e} of the largest", markup=False)
    # float32 rounding through a whole model stays below 1e-3; rounding to bfloat16 is exact only for bfloat16 models
    if transform in EXACT and transform != "half_precision" and error is not None and not error <= 1e-3:  # NaN too
        raise typer.Exit(1)
