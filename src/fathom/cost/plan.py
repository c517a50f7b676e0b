"""A plan of a training on several GPUs: memory of each, communication between them, and time of a step.

N GPUs, P parameters, b sequences of T tokens on a GPU at a time, A such batches a step. Weights and AdamW's two moments
are fp32; products run in bf16.

    ddp     weights 4P,   gradients 4P + buckets 4P,   moments 8P         on every GPU
    fsdp2   weights 4P/N, gradients 4P/N, moments 8P/N, and in bf16 what is whole at a time: tables and two layers
    activations of a layer and a token    8d (under fsdp2 4d) + 4d + 4HD + 4GD + 6m: the residual stream, normed inputs,
            queries and what attention gives, keys and values, and three tensors of the gated network;
            with gradient_checkpointing the stream alone, of every layer, and one layer in full
    the loss    8V of each of the tokens whose logits exist at a time

    bytes out of a GPU a step    ddp     2 (N−1)/N · 4P
                                 fsdp2   (N−1)/N · A (2P · gathers + 4P),   gathers: each forward's, and one backward's
    step  =  A·b·T·FLOPs a token / (MFU · peak)   +   bytes / bandwidth

Collectives overlap with computation, but their time is added in full: on two GPUs the step grew by about that much
(docs/results/several_gpus.md). Between hosts it may grow less. MFU, the factor on activations and the bandwidth within
a host are measured (measured.py); the bandwidth between hosts is given.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

from fathom.cost.flops import attention_weights, method_counts, training_flops_per_token
from fathom.cost.measured import DEVICES, Device, Measured, nearest
from fathom.cost.sizes import parameter_counts
from fathom.models.configuration import FathomConfig
from fathom.models.registry import SECTIONS
from fathom.ops.cross_entropy import CHUNK_TOKENS

Strategy = Literal["ddp", "fsdp2"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2")
USABLE = 0.92  # of the memory: CUDA's own, and pieces that the allocator cannot use


@dataclasses.dataclass(frozen=True)
class Layout:
    """The division of a step among GPUs. Attributes:
    gpus, per_host: number of GPUs in all, and on one host.
    sequences: of a batch on one GPU.
    accumulation: number of such batches in a step.
    """

    gpus: int
    strategy: Strategy
    sequences: int
    accumulation: int
    checkpointing: bool
    compile: str = "model"
    per_host: int = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on each GPU, and seconds of a step. Attributes:
    weights, gradients, optimizer, activations, loss, gathered: bytes; `gathered` is of shards that are whole for a
        while.
    peak_bytes: the most bytes at one time.
    sent_bytes: bytes that leave a GPU in a step.
    compute_s, communication_s, step_s: their sum.
    tokens_per_step: of all GPUs.
    mfu: the MFU used in the plan.   bandwidth: bytes per second of the slowest link.
    stands_on: where these were measured, or what is assumed.
    """

    layout: Layout
    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    gathered: float
    peak_bytes: float
    sent_bytes: float
    compute_s: float
    communication_s: float
    step_s: float
    tokens_per_step: int
    mfu: float
    bandwidth: float
    stands_on: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def efficiency(self) -> float:
        """Time of computation / time of the step."""
        return self.compute_s / self.step_s


def method_name(config: FathomConfig) -> str:
    """The names of a model's methods other than plain ones."""
    active = [
        getattr(config, name)["name"] for name, s in SECTIONS.items() if getattr(config, name)["name"] not in s.plain
    ]
    return "+".join(active) or "vanilla"


def plan(
    config: FathomConfig, length: int, layout: Layout, device: Device = DEVICES["h200"], network: float | None = None
) -> Plan:
    """The plan of a training with this layout, whether or not it fits (`require_fit`).

    Args:
        length: T.
        network: bytes a second between hosts, of each GPU; None: the device's assumption.

    Raises ValueError for a mixture of experts, whose load is not planned.
    """
    if config.feed_forward["name"] != "dense":
        raise ValueError(
            f"feed_forward={config.feed_forward['name']!r}: plans for several GPUs cover dense networks only"
        )
    counts, measured = method_counts(config), nearest(method_name(config), config.hidden_size, layout.compile)
    depth = counts["depth"].parallel or counts["depth"]
    total, sharded = parameter_counts(config).total, layout.strategy == "fsdp2" and layout.gpus > 1
    share = layout.gpus if sharded else 1
    whole = layout.gpus > 1 and not sharded

    learns = dict(depth.forwards)
    for slots, times in depth.no_gradient.forwards.items() if depth.no_gradient is not None else ():
        learns[slots] = learns.get(slots, 0) - times
    slots = float(max(learns)) if depth.checkpointed else sum(n * times for n, times in learns.items())
    tokens = layout.sequences * length
    copies = 2 if config.diffusion["name"] == "block" else 1  # a row runs twice, noisy and clean; the loss reads one
    of_layer = layer_bytes(config, sharded)
    stream = config.hidden_size * (2 if sharded else 4)
    if layout.checkpointing:
        activations = copies * tokens * (slots * config.num_hidden_layers * stream + of_layer)
    else:
        activations = copies * tokens * slots * config.num_hidden_layers * of_layer
    activations *= measured.activations
    table = config.hidden_size * config.vocab_size
    tables = table * (1 if config.tie_word_embeddings else 2)
    network_weights = (3 if config.gated_mlp else 2) * config.hidden_size * config.intermediate_size
    one_layer = attention_weights(config) + network_weights
    gathered = 2.0 * (tables + 2 * one_layer) if sharded else 0.0
    loss = 8.0 * config.vocab_size * min(tokens, CHUNK_TOKENS)
    weights, optimizer = 4 * total / share, 8 * total / share
    gradients = (8 if whole else 4) * total / share
    buckets = gradients if whole else 0.0  # DDP's stay
    peak = max(
        weights + optimizer + buckets + gathered + activations + loss, weights + optimizer + gradients + gathered
    )

    flops = training_flops_per_token(config, length, layout.checkpointing)
    compute = layout.accumulation * tokens * flops / (measured.mfu * device.peak)
    hosts = -(-layout.gpus // layout.per_host)
    between = device.network if network is None else network
    within = device.gather if sharded else device.reduce
    bandwidth = within if hosts == 1 else min(within, between)
    part = (layout.gpus - 1) / layout.gpus
    if sharded:
        forwards = sum(depth.forwards.values())
        gathers = forwards + sum(learns.values()) * (2 if layout.checkpointing or depth.checkpointed else 1)
        sent = layout.accumulation * part * total * (2 * gathers + 4)
    else:
        sent = part * 2 * 4 * total
    communication = sent / bandwidth
    return Plan(
        layout, weights, gradients, optimizer, activations, loss, gathered, peak, sent, compute, communication,
        compute + communication,
        layout.gpus * layout.accumulation * tokens, measured.mfu, bandwidth,
        _stands_on(method_name(config), measured, layout, device, within, hosts, network),
    )  # fmt: skip


def layer_bytes(config: FathomConfig, sharded: bool) -> float:
    """Bytes of activations that one layer keeps for a token until its backward pass."""
    stream = config.hidden_size * (4 if sharded else 8)
    inner = (6 if config.gated_mlp else 4) * config.intermediate_size
    heads = config.num_attention_heads * config.head_dim + config.num_key_value_heads * config.head_dim
    return stream + 4 * config.hidden_size + 4 * heads + inner


def layout_of(sequences: int, accumulation: int, gpus: int, strategy: Strategy, **others: Any) -> Layout:
    """The layout of a recipe's step on several GPUs. If they cannot divide a batch, batches of the step are merged.

    Raises ValueError if the GPUs cannot divide the sequences of a step evenly.
    """
    if sequences % gpus == 0:
        return Layout(gpus, strategy, sequences // gpus, accumulation, **others)
    blocks = sequences * accumulation
    if blocks % gpus:
        raise ValueError(
            f"--gpus {gpus}: they cannot share a step of {blocks} sequences (training.sequences × "
            f"gradient_accumulation); make it a multiple of {gpus}"
        )
    own = blocks // gpus
    at_a_time = max(n for n in range(1, own + 1) if own % n == 0 and n <= max(1, sequences // gpus))
    return Layout(gpus, strategy, at_a_time, own // at_a_time, **others)


def require_fit(
    config: FathomConfig, length: int, layout: Layout, device: Device, network: float | None = None
) -> Plan:
    """The plan. Raises ValueError, with what would fit, where a GPU has too little memory."""
    found, room = plan(config, length, layout, device, network), USABLE * device.memory
    if found.peak_bytes <= room:
        return found
    fitting = [f"{said} ({bytes_ / 1e9:.0f} GB)" for said, bytes_ in _alternatives(config, length, layout, device)]
    remedy = "; or ".join(fitting) or "nothing up to 1024 GPUs would: make the model smaller"
    raise ValueError(
        f"{layout.strategy} on {layout.gpus} × {device.name}: {found.peak_bytes / 1e9:.0f} GB on each, which has "
        f"{room / 1e9:.0f} GB to give; what would fit: {remedy}"
    )


def larger_batches(
    config: FathomConfig, length: int, found: Plan, device: Device, network: float | None = None
) -> Plan | None:
    """The plan of the same step with fewer, larger batches that fit, if it is faster by 3 % or more; else None."""
    layout, best = found.layout, found
    own = layout.sequences * layout.accumulation
    for sequences in range(layout.sequences + 1, own + 1):
        if own % sequences == 0:
            changed = dataclasses.replace(layout, sequences=sequences, accumulation=own // sequences)
            other = plan(config, length, changed, device, network)
            if other.peak_bytes <= USABLE * device.memory and other.step_s < 0.97 * best.step_s:
                best = other
    return None if best is found else best


def _alternatives(config: FathomConfig, length: int, layout: Layout, device: Device) -> list[tuple[str, float]]:
    """Up to three small changes with which the training fits: another strategy, checkpointing, smaller batches, more
    GPUs.
    """
    changes: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "strategy": [("--strategy fsdp2", {"strategy": "fsdp2"})] if layout.strategy != "fsdp2" else [],
        "checkpointing": [] if layout.checkpointing else [("gradient_checkpointing: true", {"checkpointing": True})],
        "sequences": [
            (f"{n} sequence{'s' * (n > 1)} a GPU at a time, {layout.sequences // n} × gradient_accumulation",
             {"sequences": n, "accumulation": layout.accumulation * layout.sequences // n})
            for n in range(layout.sequences - 1, 0, -1) if layout.sequences % n == 0
        ],
        "gpus": [(f"--gpus {2**k}", {"gpus": 2**k}) for k in range(1, 11) if 2**k > layout.gpus],
    }  # fmt: skip
    for size in range(1, len(changes) + 1):
        found = []
        for kinds in itertools.combinations(changes, size):
            for chosen in itertools.product(*(changes[kind] for kind in kinds)):
                changed = dataclasses.replace(layout, **{k: v for _, fields in chosen for k, v in fields.items()})
                peak = plan(config, length, changed, device).peak_bytes
                if peak <= USABLE * device.memory:
                    found.append((" with ".join(said for said, _ in chosen), peak))
                    break
        if found:
            return found[:3]
    return []


def _stands_on(
    method: str, measured: Measured, layout: Layout, device: Device, within: float, hosts: int, network: float | None
) -> tuple[str, ...]:
    said = [f"MFU {measured.mfu:.3f} of {device.peak / 1e12:.0f} TFLOP/s and activations × {measured.activations:.2f}: "
            f"{measured.where}"]  # fmt: skip
    if measured.method != method:
        said.append(f"no step of {method} was measured: vanilla's MFU stands for it")
    if measured.compile != layout.compile:
        said.append(
            f"no step with compile={layout.compile!r} was measured: that of compile={measured.compile!r} stands for it"
        )
    if layout.gpus > 1:
        said.append(f"{within / 1e9:.0f} GB/s within a host: {device.links_from}")
    if hosts > 1:
        whose = "assumed, 400 Gbit/s for each GPU" if network is None else "as given"
        said.append(f"{(device.network if network is None else network) / 1e9:.0f} GB/s between hosts: {whose}")
    return tuple(said)
