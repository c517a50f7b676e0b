"""`fathom generate`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fathom_cli.options import Device, Json


def command(
    checkpoint: Annotated[str, typer.Argument(help="Folder or hub name; a Fathom or a stock checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    stream: Annotated[bool, typer.Option("--stream", help="Print each word as it comes.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Length of the continuation; default: 64, or what fits the model.", min=1)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 always takes the likeliest token; default: 0.8, and 0 with --tools.", min=0.0),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.", min=1)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this mass.", min=0.0, max=1.0)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0, max=2**63 - 1)] = 0,
    steps: Annotated[
        int | None, typer.Option(help="Diffusion: total number of steps; default: one for each token.", min=1)
    ] = None,
    block_length: Annotated[
        int | None,
        typer.Option(
            help="Diffusion: tokens of a block; default: the model's own, else 32, or the whole answer.", min=1
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Diffusion: which tokens a step reveals.")] = None,
    block_cache: Annotated[
        str | None, typer.Option(help="Diffusion: a cache of states between steps of a block.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Diffusion: an option of the policy or the block cache, name=value; repeatable."),
    ] = None,
    solver: Annotated[str | None, typer.Option(help="Latent diffusion: ddim, ancestral, ode or sde.")] = None,
    tools: Annotated[
        Path | None,
        typer.Option(help="Python file of functions that the model may call. It is run, so use only a file you trust."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="With --tools: the most calls; default: 5.", min=0)] = None,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Continue a text, or answer a question with tools (--tools). Diffusion models write in blocks: `fathom methods`
    lists policies and block caches. Latent diffusion models write a new text for an empty prompt.

    With --tools the prompt is a question. The functions of FILE, or those in its list TOOLS, need types and a docstring
    that describes their arguments. Arguments are checked before a function is called. If a tool is unknown, raises or
    takes longer than 10 s, the model reads an error line.

    \b
    Example:
      fathom generate runs/demo/vanilla/tokens-700000-seed-0/model --prompt "The old man" --stream
      fathom generate MODEL --prompt "The old man" --block-cache sparse_dllm --set keep_ratio=0.3
      fathom generate MODEL --prompt "What is 17 * 23?" --tools my_tools.py --rounds 3
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:  # the shell handed over bytes that are no text
        raise ValueError("--prompt is not UTF-8: give it as UTF-8 text") from None

    if tools is None and (rounds is not None or json_output):
        raise ValueError("--rounds and --json go with --tools FILE")
    if tools is not None and (steps, block_length, policy, block_cache, settings) != (None,) * 5:
        raise ValueError("--steps, --block-length, --policy, --block-cache and --set do not go with --tools")
    if tools is not None and not temperature and (top_k, top_p) != (None, None):
        raise ValueError(
            "--top-k and --top-p: with --tools the likeliest token is taken; give a --temperature above 0 too"
        )
    if temperature is None:
        temperature = 0.8 if tools is None else 0.0

    import torch
    from transformers import TextStreamer

    from fathom.diffusion.base import is_diffusion, own_blocks
    from fathom.evaluate import load_checkpoint
    from fathom.evaluate.load_model import load_config
    from fathom.latents import FathomLatentConfig

    if load_config(checkpoint).model_type == FathomLatentConfig.model_type:
        others = {"stream": stream or None, "top-k": top_k, "block-length": block_length, "policy": policy,
                  "block-cache": block_cache, "set": settings, "tools": tools}  # fmt: skip
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"--{name}: {checkpoint} is a latent diffusion model, which has no such option")
        given = {"max_new_tokens": max_new_tokens, "steps": steps, "solver": solver, "top_p": top_p}
        given = {name: value for name, value in given.items() if value is not None}
        typer.echo(_from_latents(checkpoint, device, prompt, {**given, "temperature": temperature, "seed": seed}))
        return
    if solver is not None:
        raise ValueError(f"--solver: {checkpoint} is no latent diffusion model; leave it out")
    if not prompt.strip():
        raise ValueError("--prompt is empty: give the text to continue")
    if tools is not None:
        from fathom.tools import answer_with_tools, load_tools

        known = load_tools(tools)  # before the model, which takes longer
        model, tokenizer = load_checkpoint(checkpoint, device)
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        sampling["top_p"] = 1.0 if top_p is None else top_p
        said = stream and not json_output
        if said:
            typer.echo(f"Question: {prompt}")
        trace = answer_with_tools(
            model, tokenizer, prompt, known.values(), 5 if rounds is None else rounds, max_new_tokens or 256,
            on_step=(lambda step: typer.echo(str(step))) if said else None, **(sampling if temperature else {}),
        )  # fmt: skip
        if json_output:
            typer.echo(json.dumps(trace.to_dict(), indent=2, ensure_ascii=False, default=str))
        else:
            typer.echo(trace.last_lines() if said else str(trace))
        return
    model, tokenizer = load_checkpoint(checkpoint, device)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    limit = getattr(model.config, "max_position_embeddings", None)
    of_user = max_new_tokens is not None
    if max_new_tokens is None:
        max_new_tokens = 64 if limit is None else max(1, min(64, limit - length))
    if limit is not None and length + max_new_tokens > limit:
        raise ValueError(
            f"--max-new-tokens={max_new_tokens}: with the prompt's {length} tokens that is more than the model's "
            f"{limit} positions; at most {max(0, limit - length)} are possible"
        )
    diffusion: dict[str, Any] = {
        "steps": steps,
        "block_length": block_length,
        "policy": policy,
        "block_cache": block_cache,
    }
    diffusion = {name: value for name, value in diffusion.items() if value is not None}
    if is_diffusion(model):
        if settings:
            diffusion.update(_with_options(policy or "low_confidence", block_cache, settings))
        size = own_blocks(model)
        if block_length is None and size is not None:
            diffusion["block_length"] = size
            if not of_user:
                max_new_tokens -= max_new_tokens % size
        elif block_length is None and max_new_tokens % 32:
            diffusion["block_length"] = None
        done = length

        def say(ids: Any, stop: int) -> None:
            nonlocal done
            typer.echo(tokenizer.decode(ids[0, done:stop], skip_special_tokens=True), nl=False)
            done = stop

        if stream:
            typer.echo(prompt, nl=False)
        ids = model.generate(
            inputs["input_ids"], inputs["attention_mask"], max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, seed=seed, on_block=say if stream else None, **diffusion,
        )  # fmt: skip
        typer.echo("" if stream else tokenizer.decode(ids[0], skip_special_tokens=True))
        return
    if settings:
        diffusion["set"] = settings
    if diffusion:
        name = next(iter(diffusion)).replace("_", "-")
        raise ValueError(f"--{name}: {checkpoint} is no diffusion model, it writes from left to right; leave it out")
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:  # 0 and None are transformers' "off" for top_k and top_p
        options.update(temperature=temperature, top_k=top_k or 0, top_p=1.0 if top_p is None else top_p)
    torch.manual_seed(seed)
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if stream else None,  # type: ignore[arg-type]
        **options,
    )
    if not stream:
        typer.echo(tokenizer.decode(ids[0], skip_special_tokens=True))


def _from_latents(checkpoint: str, device: str | None, prompt: str, options: dict[str, Any]) -> str:
    """The text of a latent diffusion model."""
    from fathom.latents.model import load

    model, tokenizer = load(checkpoint, device)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False) if prompt else {}
    ids = model.generate(inputs["input_ids"].to(model.device) if prompt else None, **options)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _with_options(policy: str, block_cache: str | None, settings: list[str]) -> dict[str, Any]:
    """The policy and the block cache with the options of `--set name=value`; values are JSON, or plain words."""
    from fathom.diffusion import BLOCK_CACHES, POLICIES

    kinds: dict[str, Any] = {}
    if policy in POLICIES:  # of unknown names generate() says so
        kinds["policy"] = POLICIES[policy]
    if block_cache in BLOCK_CACHES:
        kinds["block_cache"] = BLOCK_CACHES[block_cache]
    options: dict[str, dict[str, Any]] = {axis: {} for axis in kinds}
    for setting in settings:
        name, equals, value = setting.partition("=")
        axes = [axis for axis, kind in kinds.items() if name in {field.name for field in dataclasses.fields(kind)}]
        if not equals or not axes:
            known = ", ".join(field.name for kind in kinds.values() for field in dataclasses.fields(kind)) or "none"
            raise ValueError(f"--set {setting}: give name=value; options of {' and '.join(kinds) or 'these'}: {known}")
        try:
            options[axes[0]][name] = json.loads(value)
        except json.JSONDecodeError:
            options[axes[0]][name] = value
    return {axis: kind(**options[axis]) for axis, kind in kinds.items()}
