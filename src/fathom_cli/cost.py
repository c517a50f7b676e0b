"""`fathom cost`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Json

COLUMNS = {
    "name": "model",
    "parameters": "parameters",
    "active_parameters": "active",
    "non_embedding_parameters": "non-embed.",
    "linear": "linear",
    "attention": "attention",
    "head": "head",
    "method": "method",
    "matmul": "Σ matmul",
    "elementwise": "elementw.",
    "training_flops_per_token": "training",
    "kv_bytes_per_token": "KV bytes",
    "mixing_flops_per_token": "mixing",
    "mixing_bytes_per_token": "mixing bytes",
}


def command(
    model: Annotated[str, typer.Argument(help="A checkpoint (folder or hub name) or a recipe (YAML file).")],
    sequence_length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence; default: the recipe's block size, the checkpoint's positions.", min=1),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Accelerator-hours of a training: adds energy and CO2, with the assumptions.")
    ] = None,
    tdp: Annotated[float, typer.Option(help="With --hours: watts that an accelerator draws.")] = 700.0,
    kg_per_kwh: Annotated[float, typer.Option(help="With --hours: CO2 equivalent of a kWh.")] = 0.475,
    pue: Annotated[float, typer.Option(help="With --hours: the site's energy / the accelerators' energy.")] = 1.0,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Plan the recipe's training on this many GPUs: memory, communication, time of a step.", min=1
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --gpus: the kind of GPU to plan for, by default the one measured, h200.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="With --gpus: ddp or fsdp2; default: ddp if the model fits, else fsdp2.")
    ] = None,
    per_host: Annotated[int, typer.Option(help="With --gpus: GPUs of one host.", min=1)] = 8,
    network: Annotated[
        float | None, typer.Option(help="With --gpus: GB/s between hosts, of each GPU; default: 50, an assumption.")
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            help="For diffusion models: cost of an answer to a prompt of this many tokens, by block cache.", min=0
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="With --prompt: tokens of the answer.", min=1)] = 256,
    steps: Annotated[
        int | None, typer.Option(help="With --prompt: total number of steps; default: one for each token.", min=1)
    ] = None,
    block_length: Annotated[int, typer.Option(help="With --prompt: tokens of a block.", min=1)] = 32,
    json_output: Json = False,
) -> None:
    """Parameters, FLOPs and KV-cache bytes per token, in closed form: no weights are loaded.

    \b
    Example:
      fathom cost recipes/demo.yaml --sequence-length 1024
      fathom cost recipes/specialist.yaml
      fathom cost MODEL --hours 24 --tdp 700
      fathom cost recipes/depth_attention_1.5b.yaml --gpus 64 --device h200 --strategy fsdp2
      fathom cost MODEL --prompt 1024 --new-tokens 256
    """
    planned, assumed, answered = (
        (device, strategy, per_host, network),
        (tdp, kg_per_kwh, pue),
        (new_tokens, steps, block_length),
    )
    orphans = [
        (gpus, planned != (None, None, 8, None), "--device, --strategy, --per-host and --network go with --gpus"),
        (hours, assumed != (700.0, 0.475, 1.0), "--tdp, --kg-per-kwh and --pue go with --hours"),
        (prompt, answered != (256, None, 32), "--new-tokens, --steps and --block-length go with --prompt"),
    ]
    for belongs_to, given, said in orphans:
        if given and belongs_to is None:
            raise ValueError(said)
    alone = {"--gpus": (gpus, "plans the recipe's training"), "--prompt": (prompt, "prices an answer")}
    for name, (value, what) in alone.items():
        for other, beside in {"--sequence-length": sequence_length, "--hours": hours, "--prompt": prompt}.items():
            if value is not None and beside is not None and other != name:
                raise ValueError(f"{other} {beside:g}: {name} {what} and does not read it; leave one of them out")
    if gpus is not None:
        _plan(model, gpus, device or "h200", strategy, per_host, network, json_output)
        return

    from fathom.cost import estimate_carbon

    carbon = None if hours is None else estimate_carbon(hours, tdp, kg_per_kwh, pue)
    if model.endswith((".yaml", ".yml")) and (priced := _growths(model, sequence_length, prompt)):
        priced |= {} if carbon is None else {"carbon": dataclasses.asdict(carbon)}
        typer.echo(json.dumps(priced, indent=2) if json_output else _stages(priced) + (f"\n\n{carbon}" * bool(carbon)))
        return
    from fathom.evaluate.steps_run import is_adaptive

    if model.endswith((".yaml", ".yml")):
        length, dtype, checkpointing, configs, note = _recipe(model)
    else:
        (length, dtype, checkpointing, configs), note = _checkpoint(model), ""
    length = sequence_length or length
    if prompt is None and model.endswith((".yaml", ".yml")) and (priced := _encoders(model, length)):
        table = _table([{**dict.fromkeys(COLUMNS), **row} for row in priced["models"]])
        note = f"\n\nPer token of a source of {length}: one example costs {length} times as much."
        priced |= {} if carbon is None else {"carbon": dataclasses.asdict(carbon)}
        note += "" if carbon is None else f"\n\n{carbon}"
        typer.echo(json.dumps(priced, indent=2) if json_output else table + note)
        return
    if prompt is not None:
        _answers(configs, dtype, prompt, new_tokens, steps, block_length, json_output)
        return
    rows = [{"name": name, **_cost(config, length, dtype, checkpointing)} for name, config in configs]
    if json_output:
        about: dict[str, Any] = {"sequence_length": length, "kv_dtype": str(dtype).removeprefix("torch.")}
        about |= {} if carbon is None else {"carbon": dataclasses.asdict(carbon)}
        typer.echo(json.dumps({**about, "gradient_checkpointing": checkpointing, "models": rows}, indent=2))
        return
    typer.echo(_table([{**row, **row["forward_flops_per_token"]} for row in rows]))
    mixing = any(row["mixing_flops_per_token"] for row in rows)
    stopping = [name for name, config in configs if is_adaptive(config)]
    swept = [name for name, config in configs if config.depth.get("sweeps", 0) is None and config.most_steps > 1]
    typer.echo(
        f"{note}\nFLOPs per token at sequence length {length}, a multiply-add as 2, causal attention at (T+1)/2 keys.\n"
        "linear + attention + head + method = Σ matmul, of the forward pass; elementwise work beside it.\n"
        f"training: matrix products of forward and backward{' with gradient checkpointing' if checkpointing else ''}. "
        f"KV bytes: per token, in {str(dtype).removeprefix('torch.')}."
        + ("\nmixing: a cross-layer method's scores, projections and weighted sums; the bytes they move." * mixing)
        + (
            f"\nAs if every token ran all its steps: {', '.join(stopping)}. `fathom inspect` counts those that run."
            * bool(stopping)
        )
        + (
            f"\nThe forward pass is decoding's. Texts that are read at once: {', '.join(swept)}, by Jacobi sweeps\n"
            "until thoughts have settled; how many depends on the text. `sweeps: J` fixes it." * bool(swept)
        )
        + ("" if carbon is None else f"\n\n{carbon}")
    )


def _plan(
    model: str, gpus: int, device: str, strategy: str | None, per_host: int, network: float | None, json_output: bool
) -> None:
    """What `--gpus` prints."""
    from fathom.cost.measured import DEVICES, MEASURED_TOKENS
    from fathom.cost.plan import STRATEGIES, larger_batches, layout_of, require_fit
    from fathom.models.registry import nearest
    from fathom.train.devices import check_graphs, why_not_sharded
    from fathom.train.recipe import load_recipe, model_config

    if not model.endswith((".yaml", ".yml")):
        raise ValueError(f"{model}: --gpus plans a training: give a recipe (YAML file)")
    if device not in DEVICES:
        raise ValueError(f"--device {device}: no step was measured on it; there are {', '.join(DEVICES)}")
    if network is not None and not network > 0:
        raise ValueError(f"--network {network:g}: must be above 0 GB/s")
    if strategy not in (None, *STRATEGIES):
        raise ValueError(f"--strategy {strategy}: must be ddp or fsdp2{nearest(str(strategy), list(STRATEGIES))}")
    recipe, given = load_recipe(Path(model)), DEVICES[device]
    training, length = recipe.training, recipe.data.block_size
    if recipe.task.checkpoint_fields is not None:
        raise ValueError(f"{model}: --gpus plans decoders; task {recipe.task.name!r} trains another model")
    only = {
        "precision": (training.precision, "bf16", "its peak and the MFU are of bf16"),
        "optimizer": (training.optimizer, "adamw", "AdamW's moments are counted"),
    }
    for name, (value, planned, why) in only.items():
        if value != planned:
            raise ValueError(f"{model}: training.{name}={value!r}: --gpus plans {name}: {planned} alone ({why})")
    for method in recipe.methods:
        if recipe.trains(method) != "all":
            raise ValueError(
                f"{model}: {method.name} trains {recipe.trains(method)!r}: --gpus plans trainings of all weights"
            )
    check_graphs(training, gpus)
    compiled = "layers" if isinstance(training.compile, str) else "model" if training.compile else "no"
    rows, advice = [], []
    for method in recipe.methods:
        config = model_config(recipe, method)
        refused = why_not_sharded(recipe, method, config) if gpus > 1 else ""
        if refused and strategy == "fsdp2":
            raise ValueError(f"--strategy fsdp2: {method.name}: {refused}")
        wanted = [strategy] if strategy else list(STRATEGIES[: 1 if gpus == 1 or refused else 2])
        for last, kind in zip([False] * (len(wanted) - 1) + [True], wanted, strict=True):
            layout = layout_of(
                training.sequences, training.gradient_accumulation, gpus, kind,
                checkpointing=training.gradient_checkpointing, compile=compiled, per_host=per_host,
            )  # fmt: skip
            try:
                found = require_fit(config, length, layout, given, network and network * 1e9)
                break
            except ValueError as error:
                if last:
                    raise ValueError(f"{method.name}: {error}" + f"; not fsdp2: {refused}" * bool(refused)) from None
        hours = None if training.tokens is None else training.tokens / found.tokens_per_second / 3600
        rows.append((method.name, found, hours))
        if found.layout.sequences * gpus != training.sequences:
            advice.append(
                f"{method.name}: {gpus} GPUs cannot share training.sequences={training.sequences}; planned with "
                f"sequences: {found.layout.sequences * gpus} and gradient_accumulation: {found.layout.accumulation}, "
                "the same step"
            )
        better = larger_batches(config, length, found, given, network and network * 1e9)
        if better is not None:
            advice.append(
                f"{method.name}: sequences: {better.layout.sequences * gpus} with gradient_accumulation: "
                f"{better.layout.accumulation} make the same step in {better.step_s:.3g} s"
            )
    few = min(found.layout.sequences for _, found, _ in rows) * length
    if few < MEASURED_TOKENS:
        advice.append(
            f"a GPU has {few:,} tokens at a time; steps were measured with {MEASURED_TOKENS:,}: with fewer a real step "
            "is slower than planned, in small models many times"
        )
    if training.tokens is None:
        advice.append(
            f"training.examples={training.examples:,}: how many tokens they have, the data say, so no hours are "
            "planned; give training.tokens for them"
        )
    if json_output:
        made = [
            {"name": name, **dataclasses.asdict(found), "tokens_per_second": found.tokens_per_second, "hours": hours,
             "efficiency": found.efficiency} for name, found, hours in rows
        ]  # fmt: skip
        typer.echo(json.dumps({"device": given.name, "gpus": gpus, "plans": made}, indent=2))
        return
    titles = ["model", "", "at a time", "weights", "gradients", "moments", "activ.", "peak", "sent", "compute", "comm.",
              "step", "tokens/s", "hours", "GPU-hours"]  # fmt: skip
    cells = [titles]
    for name, p, hours in rows:
        sizes = [p.weights, p.gradients, p.optimizer, p.activations, p.peak_bytes, p.sent_bytes]
        cells.append([
            name, p.layout.strategy if gpus > 1 else "one", f"{p.layout.sequences} × {p.layout.accumulation}",
            *(f"{size / 1e9:.3g}" for size in sizes),
            *(f"{seconds:.3g}" for seconds in (p.compute_s, p.communication_s, p.step_s)),
            _short(p.tokens_per_second), f"{hours:.3g}" if hours else "", f"{gpus * hours:.4g}" if hours else "",
        ])  # fmt: skip
    widths = [max(len(line[i]) for line in cells) for i in range(len(titles))]
    lines = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in cells
    ]
    said = list(dict.fromkeys(f"{name}: {line}" for name, found, _ in rows for line in found.stands_on))
    typer.echo("\n".join(line.rstrip() for line in lines))
    typer.echo(
        f"\n{gpus} × {given.name}. Sequences on a GPU at a time × batches a step; GB on each GPU; GB that leave each\n"
        "GPU in a step; seconds of computation, of collectives and of a step.\n" + "\n".join([*said, *advice])
    )


def _answers(
    configs: list[tuple[str, Any]], dtype: Any, prompt: int, new: int, steps: int | None, block: int, as_json: bool
) -> None:
    """`--prompt`: what an answer costs under every block cache whose cost does not depend on the text."""
    from fathom.cost.sampling import sampling_cost
    from fathom.diffusion import DiffusionGenerationConfig

    masked = [
        (name, config) for name, config in configs if getattr(config, "diffusion", {"name": "none"})["name"] != "none"
    ]
    if not masked:
        raise ValueError(f"--prompt={prompt}: none of {', '.join(name for name, _ in configs)} is a diffusion model")
    found: dict[str, dict[str, Any]] = {}
    for name, config in masked:
        own = config.diffusion.get("block_length")  # of block diffusion, which has one cache, its own
        others = (None, "prefix", "dual", "sparse_dllm", *(() if config.diffusion.get("shift") else ("dkv_cache",)))
        for cache in others if own is None else (None,):
            sampled = DiffusionGenerationConfig(
                max_new_tokens=new, steps=steps, block_length=own or block, block_cache=cache
            )
            cost = sampling_cost(config, prompt, sampled, dtype)
            found.setdefault(name, {})[cache or ("none" if own is None else "exact")] = dataclasses.asdict(cost)
    if as_json:
        about = {"prompt": prompt, "new_tokens": new, "steps": steps or new, "block_length": block}
        typer.echo(json.dumps({**about, "models": found}, indent=2))
        return
    sizes = {name: config.diffusion.get("block_length", block) for name, config in masked}
    for name, caches in found.items():
        typer.echo(f"{name}: {new} tokens after {prompt}, in {steps or new} steps, blocks of {sizes[name]}")
        for cache, cost in caches.items():
            saved = next(iter(caches.values()))["flops"] / cost["flops"]
            typer.echo(
                f"  {cache:<12} {cost['full']:>5} full passes {cost['block']:>5} of blocks  {_short(cost['flops']):>8} "
                f"FLOPs ({saved:.1f}× fewer)  cache {_short(cost['cache_bytes'])}B"
            )


def _recipe(path: str) -> tuple[int, Any, bool, list[tuple[str, Any]], str]:
    import torch

    from fathom.train.recipe import load_recipe, model_config

    recipe = load_recipe(Path(path))
    dtype = torch.bfloat16 if recipe.training.precision == "bf16" else torch.float32
    configs = [(method.name, model_config(recipe, method)) for method in recipe.methods]
    note = ""
    if isinstance(recipe.data.tokenizer, dict) and "vocab_size" not in recipe.model:
        note = (
            f"\nThe vocabulary has the {recipe.data.tokenizer['bpe']} tokens of data.tokenizer; a BPE of a text too "
            "short for them has fewer."
        )
    return recipe.data.block_size, dtype, recipe.training.gradient_checkpointing, configs, note


def _growths(path: str, length: int | None, prompt: int | None) -> dict[str, Any] | None:
    """The price of a recipe with a base and methods in stages; None for another recipe."""
    from fathom.report.growths import load_growths, price
    from fathom.train.loading import parse_yaml

    raw = parse_yaml(Path(path).read_text(encoding="utf-8"))
    if not isinstance(raw, dict) or "base" not in raw:
        return None
    if (length, prompt) != (None, None):
        raise ValueError(
            f"{path}: its stages are priced at its own block size; leave --sequence-length and --prompt out"
        )
    return price(load_growths(path))


def _stages(priced: dict[str, Any]) -> str:
    """A line a method, its stages behind it."""
    cells = [["method", "seeds", "parameters", "active", "tokens", "training FLOPs", "stages"]]
    for row in priced["methods"]:
        stages = []
        for one in row["stages"]:
            task = "" if one["task"] == "causal_lm" else f" {one['task']}"
            stages.append(f"{one['name']}{task} {_short(one['tokens'])}")
        sizes = [_short(row[key]) for key in ("parameters", "active_parameters", "tokens")]
        cells.append([row["name"], str(row["seeds"]), *sizes, f"{row['train_flops']:.3g}", ", ".join(stages)])
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for name, *numbers, stages_of in cells:
        right = [cell.rjust(width) for cell, width in zip(numbers, widths[1:])]
        lines.append("  ".join([name.ljust(widths[0]), *right, stages_of]).rstrip())
    return "\n".join(lines) + (
        "\n\nTokens and matrix products of training, of one seed; a method's own, without the base's.\n"
        f"The whole recipe, where what methods share is trained once: {priced['train_flops']:.3g} FLOPs."
    )


def _encoders(path: str, length: int) -> dict[str, Any] | None:
    """The costs of a recipe whose task has encoders; None for a decoder's."""
    import torch

    from fathom.train.recipe import load_recipe, model_config

    recipe = load_recipe(Path(path))
    if recipe.task.checkpoint_fields is None:
        return None
    dtype = torch.bfloat16 if recipe.training.precision == "bf16" else torch.float32
    rows = []
    for method in recipe.methods:
        config = model_config(recipe, method)
        sizes = recipe.task.sizes(config, length, dtype)
        training = recipe.task.training_flops(config, length, recipe.training.gradient_checkpointing)
        rows.append({
            "name": method.name, "parameters": sizes.parameters, "non_embedding_parameters": sizes.non_embedding,
            "matmul": sizes.flops_per_token, "training_flops_per_token": training,
            "kv_bytes_per_token": sizes.cache_bytes_per_token,
        })  # fmt: skip
    return {"sequence_length": length, "models": rows}


def _checkpoint(checkpoint: str) -> tuple[int, Any, bool, list[tuple[str, Any]]]:
    import torch

    from fathom.evaluate.load_model import load_config
    from fathom.models.checkpoints.stock import config_from_stock
    from fathom.models.configuration import FathomConfig

    stored = load_config(checkpoint)
    config = stored if isinstance(stored, FathomConfig) else config_from_stock(stored)
    return config.max_position_embeddings, config.dtype or torch.float32, False, [(checkpoint, config)]


def _cost(config: Any, length: int, dtype: Any, checkpointing: bool) -> dict[str, Any]:
    from fathom.cost import (
        forward_flops_per_token,
        kv_bytes_per_token,
        mixing_per_token,
        parameter_counts,
        training_flops_per_token,
    )

    counts, forward = parameter_counts(config), forward_flops_per_token(config, length)
    mixing = mixing_per_token(config, dtype)
    return {
        "parameters": counts.total,
        "active_parameters": counts.active,
        "non_embedding_parameters": counts.non_embedding,
        "forward_flops_per_token": {**dataclasses.asdict(forward), "matmul": forward.matmul, "total": forward.total},
        "training_flops_per_token": training_flops_per_token(config, length, checkpointing),
        "kv_bytes_per_token": kv_bytes_per_token(config, dtype),
        "mixing_flops_per_token": mixing.flops,
        "mixing_bytes_per_token": mixing.bytes,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    columns = {key: title for key, title in COLUMNS.items() if any(row[key] for row in rows)}  # what costs nothing goes
    if all(row["active_parameters"] == row["parameters"] for row in rows):
        del columns["active_parameters"]
    cells = [list(columns.values())]
    cells += [[row[key] if key == "name" else _short(row[key]) for key in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))).rstrip()
        for line in cells
    )


def _short(value: float) -> str:
    """Three or four digits and a unit: 12.35M. Exact numbers are in --json."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
