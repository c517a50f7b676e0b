"""A null for lineage verdicts: many small models trained in one process, and the raw scores of their pairs, layer by
layer.

    python benchmarks/lineage/zoo.py prepare TEXT_DIR BOOKS WIKI     # on any machine: three tokenizers, four parts each
    python benchmarks/lineage/zoo.py run OUT_DIR TEXT_DIR --seconds 470 --device cuda
    python benchmarks/lineage/zoo.py run OUT_DIR TEXT_DIR --seconds 95 --device cuda --relatives

BOOKS, WIKI: .txt, .jsonl or their .xz. A group is one shape and recipe; its models differ in seed and in the part of
the text they read, and are trained together (weights stacked, batched products, bfloat16 with float32 masters). Every
group is kept at three lengths of training. OUT_DIR gets models.json (recipes, losses), pairs.json.gz and a few of the
trained models as safetensors. Scores of a pair are raw: unbiased CKA of every layer of one with every layer of the
other, by mode and by role, so that any statistic over layers can be computed from them later. The run stops by itself
within --seconds with what it has; pairs are written in a random order, so that a cut is no selection.
"""

import argparse
import gzip
import json
import lzma
import math
import platform
import random
import time
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fathom.lineage import canonical
from fathom.lineage.align import TokenTable, align, cross_covariance, fixed_frame
from fathom.lineage.families import Family, geometry
from fathom.lineage.huref import DEFAULT, Term, invariant_terms
from fathom.lineage.reader import Checkpoint
from fathom.lineage.token_rows import normalise, shared_rows
from fathom.lineage.weights import MemoryStore

PARTS = ("books0", "books1", "wiki0", "wiki1")
VOCABULARIES = {"small": 2048, "other": 4096, "large": 8192}
ROLES = ("v", "o", "gate", "up", "down")


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lines_of(path: Path, chars: int) -> list[str]:
    opener = lzma.open if path.suffix == ".xz" else open
    found, size = [], 0
    with opener(path, "rt", encoding="utf-8") as file:
        for line in file:
            text = json.loads(line)["text"] if ".jsonl" in path.name else line
            found += text.splitlines(keepends=True)
            size += len(text)
            if size > chars:
                break
    return found


def prepare(out: Path, books: Path, wiki: Path, tokens: int) -> None:
    """Tokenizers and token ids. `small` and `large` have learned from both texts, `other` from the second alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    out.mkdir(parents=True, exist_ok=True)
    texts = {"books": lines_of(books, tokens * 9), "wiki": lines_of(wiki, tokens * 9)}
    begin = {name: lines[: len(lines) // 4] for name, lines in texts.items()}
    for name, size in VOCABULARIES.items():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator(begin["wiki"] + ([] if name == "other" else begin["books"]), trainer)
        (out / f"{name}.json").write_text(json.dumps(tokenizer.get_vocab()))
        for text, lines in texts.items():
            for half, part in enumerate((lines[: len(lines) // 2], lines[len(lines) // 2 :])):
                coded = tokenizer.encode_batch(part)
                ids = np.array([i for line in coded for i in line.ids][:tokens], dtype=np.uint16)
                np.save(out / f"{name}_{text}{half}.npy", ids)
                print(name, text, half, len(ids), flush=True)


# ── models and recipes ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Group:
    """One shape and recipe. share: part of the training time. source, relation: the group it continues, copies the
    initial weights of, or learns the outputs of."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: str
    tied: bool
    models: int
    steps: int
    batch: int
    length: int
    lr: float
    share: float
    decay: float = 0.1
    init: float = 0.02
    source: str = ""
    relation: str = "independent"

    @property
    def config(self) -> dict:
        return {"model_type": "llama", "hidden_size": self.width, "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
                "head_dim": self.width // self.heads, "intermediate_size": self.feed,
                "vocab_size": VOCABULARIES[self.vocabulary], "tie_word_embeddings": self.tied,
                "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"}  # fmt: skip

    @property
    def feed(self) -> int:
        return self.width * 8 // 3 // 32 * 32

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, h, vocab = self.width, self.width // self.heads, VOCABULARIES[self.vocabulary]
        found = {"model.embed_tokens": (vocab, d), "model.norm": (d,)}
        if not self.tied:
            found["lm_head"] = (vocab, d)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            found |= {at + "self_attn.q_proj": (d, d), at + "self_attn.k_proj": (self.kv_heads * h, d),
                      at + "self_attn.v_proj": (self.kv_heads * h, d), at + "self_attn.o_proj": (d, d),
                      at + "mlp.gate_proj": (self.feed, d), at + "mlp.up_proj": (self.feed, d),
                      at + "mlp.down_proj": (d, self.feed), at + "input_layernorm": (d,),
                      at + "post_attention_layernorm": (d,)}  # fmt: skip
        return found


GROUPS = [
    #     name           d    L   H  kv  text     tied  M    steps  B   T    lr    share
    Group("w64",         64,  4,  4, 2,  "small", False, 192, 700,  16, 64,  3e-3, 0.03),
    Group("w64-tied",    64,  4,  4, 2,  "small", True,  192, 700,  16, 64,  3e-3, 0.03),
    Group("w256",        256, 6,  4, 2,  "large", False, 32,  1000, 16, 128, 1e-3, 0.08),
    Group("w256-tied",   256, 6,  4, 2,  "large", True,  32,  1000, 16, 128, 1e-3, 0.08),
    Group("w1024",       1024, 4, 16, 16, "large", False, 10, 500,  16, 128, 5e-4, 0.08),
    Group("w1024-tied",  1024, 6, 16, 4, "large", True,  10,  500,  16, 128, 5e-4, 0.10),
    Group("w128-tied",   128, 4,  4, 4,  "other", True,  64,  800,  16, 128, 2e-3, 0.05),
    Group("w128-deep",   128, 8,  4, 2,  "other", False, 48,  800,  16, 128, 2e-3, 0.06),
    Group("w512",        512, 8,  8, 4,  "large", False, 16,  700,  16, 128, 8e-4, 0.08),
    Group("w512-tied",   512, 8,  8, 4,  "large", True,  16,  700,  16, 128, 8e-4, 0.08),
    Group("w96-long",    96,  3,  4, 4,  "small", False, 64,  4000, 16, 64,  2e-3, 0.06),
    Group("w96-long-tied", 96, 3, 4, 4,  "small", True,  64,  4000, 16, 64,  2e-3, 0.06),
    Group("w768",        768, 4,  12, 4, "other", False, 12,  500,  16, 128, 6e-4, 0.05),
    Group("w768-tied",   768, 4,  12, 4, "other", True,  12,  500,  16, 128, 6e-4, 0.05),
    Group("w128-two",    128, 2,  4, 4,  "other", False, 64,  600,  16, 128, 2e-3, 0.03),
    Group("w256-deep-tied", 256, 12, 8, 8, "small", True, 16, 600,  16, 128, 1e-3, 0.05),
    Group("w256-hot",    256, 4,  8, 2,  "small", False, 32,  600,  16, 128, 6e-3, 0.03, decay=0.01, init=0.06),
    Group("w64-hot-tied", 64, 2,  2, 1,  "small", True,  96,  500,  8,  64,  1e-2, 0.02, decay=0.01, init=0.1),
    # relatives and what is no relative by weights: same initial weights on other text, a teacher's outputs
    Group("w64-continued", 64, 4, 4, 2,  "small", False, 32,  250,  16, 64,  1e-3, 0.01, source="w64",
          relation="continued"),
    Group("w64-tied-continued", 64, 4, 4, 2, "small", True, 32, 250, 16, 64, 1e-3, 0.01, source="w64-tied",
          relation="continued"),
    Group("w256-tied-continued", 256, 6, 4, 2, "large", True, 12, 250, 16, 128, 5e-4, 0.01, source="w256-tied",
          relation="continued"),
    Group("w1024-tied-continued", 1024, 6, 16, 4, "large", True, 4, 150, 16, 128, 2e-4, 0.02, source="w1024-tied",
          relation="continued"),
    Group("w128-same-init", 128, 4, 4, 4, "other", True, 24,  800,  16, 128, 2e-3, 0.02, source="w128-tied",
          relation="same initial weights"),
    Group("w256-distilled", 256, 6, 4, 2, "large", True, 12,  800,  16, 128, 1e-3, 0.03, source="w256-tied",
          relation="distilled"),
    Group("w64-distilled", 64, 4, 4, 2,  "small", False, 32,  700,  16, 64,  3e-3, 0.02, source="w64",
          relation="distilled"),
    Group("w64-tied-distilled", 64, 4, 4, 2, "small", True, 32, 700, 16, 64, 3e-3, 0.02, source="w64-tied",
          relation="distilled"),
]  # fmt: skip


def relatives() -> list[Group]:
    """The groups of relatives and what they come from, small, and the two recipes unlike the rest: a run of minutes."""
    sources = {g.source for g in GROUPS}
    chosen = [g for g in GROUPS if g.source or "hot" in g.name or g.name in sources]
    count = {64: 24, 128: 24, 256: 8}
    return [
        replace(g, models=count[g.width] * (2 if "hot" in g.name else 1), share=0.5 if "continued" in g.name else 1.0)
        for g in chosen
        if g.width in count
    ]


def fresh(group: Group, seed: int, device: str) -> dict[str, Tensor]:
    """Stacked initial weights [M, …]; model i has the seed `seed + i`, whatever the size of the group."""
    stacked = {name: [] for name in group.shapes()}
    for i in range(group.models):
        generator = torch.Generator().manual_seed(seed + i)
        for name, shape in group.shapes().items():
            if len(shape) == 1:
                stacked[name].append(torch.ones(shape))
                continue
            scale = group.init / math.sqrt(2 * group.layers) if name.endswith(("o_proj", "down_proj")) else group.init
            stacked[name].append(torch.randn(shape, generator=generator) * scale)
    return {name: torch.stack(tensors).to(device) for name, tensors in stacked.items()}


def logits(w: dict[str, Tensor], group: Group, tokens: Tensor) -> Tensor:
    """[M, B·T, vocab] of tokens [M, B, T] under stacked weights."""
    m, b, t = tokens.shape
    d, h = group.width, group.width // group.heads
    table = w["model.embed_tokens"]
    ids = tokens.reshape(m, -1) + torch.arange(m, device=tokens.device)[:, None] * table.shape[1]
    x = F.embedding(ids, table.flatten(0, 1))
    angle = torch.arange(t, device=tokens.device)[:, None] * 10000.0 ** (
        -torch.arange(0, h, 2, device=tokens.device) / h
    )
    cos, sin = (f(torch.cat([angle, angle], 1)).to(x.dtype) for f in (torch.cos, torch.sin))

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, (d,), eps=1e-5) * gain[:, None]

    def heads(x: Tensor, n: int) -> Tensor:
        return x.reshape(m * b, t, n, h).transpose(1, 2)

    def turn(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., h // 2 :], x[..., : h // 2]], -1) * sin

    for layer in range(group.layers):
        at = f"model.layers.{layer}."
        y = norm(x, w[at + "input_layernorm"])
        q, k, v = (torch.bmm(y, w[f"{at}self_attn.{r}_proj"].mT) for r in "qkv")
        q, k, v = turn(heads(q, group.heads)), turn(heads(k, group.kv_heads)), heads(v, group.kv_heads)
        k, v = (z.repeat_interleave(group.heads // group.kv_heads, 1) for z in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(m, b * t, d)
        x = x + torch.bmm(mixed, w[at + "self_attn.o_proj"].mT)
        y = norm(x, w[at + "post_attention_layernorm"])
        gate, up = (torch.bmm(y, w[f"{at}mlp.{r}_proj"].mT) for r in ("gate", "up"))
        x = x + torch.bmm(F.silu(gate) * up, w[at + "mlp.down_proj"].mT)
    return torch.bmm(norm(x, w["model.norm"]), (table if group.tied else w["lm_head"]).mT)


def train(
    group: Group,
    masters: dict[str, Tensor],
    ids: list[Tensor],
    parts: Tensor,
    seed: int,
    budget: float,
    teacher: tuple[Group, dict[str, Tensor]] | None,
) -> tuple[dict[int, dict[str, Tensor]], Tensor, int]:
    """AdamW, warm-up, constant rate, linear decay in the last fifth. Steps are those of the recipe, or as many as fit
    into `budget` seconds. Returns ({step: bfloat16 weights}, loss of every model over the last tenth, steps)."""
    device = ids[0].device
    generator = torch.Generator(device).manual_seed(seed)
    names, offsets = list(masters), torch.arange(group.length + 1, device=device)
    momentum = [torch.zeros_like(t) for t in masters.values()]
    second = [torch.zeros_like(t) for t in masters.values()]
    decays = [group.decay if masters[n].ndim > 2 else 0.0 for n in names]
    text, starts_of = torch.cat(ids), torch.tensor([0, *np.cumsum([len(p) for p in ids])[:-1]], device=device)
    sizes = torch.tensor([len(p) for p in ids], device=device)
    work = torch.bfloat16 if device.type == "cuda" else torch.float32
    steps, kept, losses = group.steps, {}, []
    begin, step = time.perf_counter(), 0
    while step < steps:
        at = torch.rand(group.models, group.batch, 1, generator=generator, device=device, dtype=torch.float64)
        at = (at * (sizes[parts][:, None, None] - group.length - 1)).long() + starts_of[parts][:, None, None]
        rows = text[at + offsets].long()
        short = [t.to(work).requires_grad_() for t in masters.values()]
        with torch.enable_grad():
            out = logits(dict(zip(names, short)), group, rows[..., :-1]).float()
            if teacher is None:
                each = F.cross_entropy(out.flatten(0, 1), rows[..., 1:].reshape(-1), reduction="none")
            else:
                with torch.no_grad():
                    told = logits(teacher[1], teacher[0], rows[..., :-1]).float().softmax(-1)
                each = -(told * out.log_softmax(-1)).sum(-1)
            loss = each.view(group.models, -1).mean(1)
            grads = list(torch.autograd.grad(loss.sum(), short))
        losses.append(loss.detach())
        grads = [g.float() for g in grads]
        norm = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
        clip = (1 / norm.clamp_min(1e-6)).clamp_max(1.0)
        grads = [g * clip.view(-1, *[1] * (g.ndim - 1)) for g in grads]
        torch._foreach_lerp_(momentum, grads, 0.1)
        torch._foreach_mul_(second, 0.95)
        torch._foreach_addcmul_(second, grads, grads, 0.05)
        rate = group.lr * min(1.0, (step + 1) / (0.05 * steps + 1), (steps - step) / (0.2 * steps))
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, math.sqrt(1 - 0.95 ** (step + 1)))
        torch._foreach_add_(root, 1e-8)
        for master, decay in zip(masters.values(), decays):
            master.mul_(1 - rate * decay)
        torch._foreach_addcdiv_(list(masters.values()), momentum, root, -rate / (1 - 0.9 ** (step + 1)))
        step += 1
        if step == min(12, steps // 2):
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        if step == min(32, steps):  # 20 steps measured: what fits?
            if device.type == "cuda":
                torch.cuda.synchronize()
            pace = (time.perf_counter() - begin) / max(1, step - 12)
            steps = max(step, min(steps, int(0.95 * budget / max(pace, 1e-6))))
        if step == steps or (step in {steps // 8, steps // 3} and step >= 32):
            kept[step] = {n: t.to(torch.bfloat16) for n, t in masters.items()}
    return kept, torch.stack(losses[-max(1, steps // 10) :]).mean(0), steps


# ── scores ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Name:
    """A trained model: its group, its number there, and the step at which it was kept."""

    group: str
    index: int
    step: int


@dataclass
class Features:
    """What all pairs of a model need: anchors, Gram matrices WᵀW [L, d, d] by role, and HuRef's terms."""

    model: Checkpoint
    embedding: Tensor
    head: Tensor
    grams: dict[str, Tensor]
    terms: dict[int, list]  # by the size of the other vocabulary

    @classmethod
    def of(cls, model: Checkpoint) -> "Features":
        found: dict[str, list[Tensor]] = {role: [] for role in ("q", "k", "raw_q", "raw_k", *ROLES)}
        for layer in range(model.geometry.layers):
            q, k = canonical.query_key(model, layer)
            v, o = canonical.value_output(model, layer)
            gate, up, down = canonical.feed_forward(model, layer, "")
            raw_q, raw_k = model.read(layer, "q"), model.read(layer, "k")
            for role, weight in (("q", q), ("k", k), ("raw_q", raw_q), ("raw_k", raw_k), ("v", v), ("o", o.T),
                                 ("gate", gate), ("up", up), ("down", down.T)):  # fmt: skip
                found[role].append(weight.T @ weight)
        grams = {role: torch.stack(g) for role, g in found.items()}
        return cls(model, canonical.embedding(model, None), canonical.output_head(model, None), grams, {})


def centred(grams: Tensor) -> Tensor:
    """U-centred, unit-norm Gram matrices [n, d·d]."""
    d = grams.shape[-1]
    k = grams - torch.diag_embed(grams.diagonal(dim1=1, dim2=2))
    m = k.sum(2, dtype=torch.float64) / (d - 2)
    m = (m - m.sum(1, keepdim=True) / (2 * (d - 1))).to(k.dtype)
    k = k - m[:, :, None] - m[:, None, :]
    k = k - torch.diag_embed(k.diagonal(dim1=1, dim2=2))
    flat = k.flatten(1)
    return flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-30)


def polar(cross: Tensor) -> Tensor:
    """The orthogonal factor U·Vᵀ of a square matrix by Newton's iteration (Higham 1986), float64."""
    x = cross.double()
    for _ in range(60):
        inverse = torch.linalg.inv(x).mT
        g = (inverse.norm() / x.norm()).sqrt()
        new = (g * x + inverse / g) / 2
        if (new - x).norm() < 1e-10 * new.norm():
            break
        x = new
    return new.to(cross.dtype)


def rotation_of(a: TokenTable, b: TokenTable, rows: tuple[list[int], list[int]]) -> Tensor:
    if a.width == b.width >= 128:  # ten times as fast as the decomposition
        found = polar(cross_covariance(a, b, *rows)[0])
        if torch.isfinite(found).all() and (found.mT @ found).diagonal().sub(1).abs().max() < 1e-3:
            return found
    return align(a, b, *rows, "procrustes").rotation


def rows_agree(a: Tensor, b: Tensor) -> float:
    """Linear CKA of two tables over their rows: whether row i of one is about what row i of the other is."""
    a, b = a - a.mean(0), b - b.mean(0)
    return ((a.T @ b).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm())).item()


def rounded(x: Tensor) -> list:
    return [[round(v, 5) for v in row] for row in x.tolist()] if x.ndim == 2 else [round(v, 5) for v in x.tolist()]


def correlations(a: list[Term], b: list[Term]) -> list:
    """Correlations of every term of one model with every term of the other, [6, 6]."""
    energies = [[m.covariance(m) for m in side] for side in (a, b)]
    return [
        [round(m.covariance(n) / math.sqrt(max(e * f, 1e-300)), 5) for n, f in zip(b, energies[1])]
        for m, e in zip(a, energies[0])
    ]


def without_rows(term: Term, x: Tensor) -> Term:
    """M − cXXᵀ, c by least squares: without what the token rows alone say."""
    rows = Term(x, x)
    c = term.covariance(rows) / max(rows.covariance(rows), 1e-300)
    return Term(torch.cat([term.left, -c * x], 1), torch.cat([term.right, x], 1))


def score(a: Features, b: Features) -> dict:
    """Raw scores of a pair. a is the wider one. Matrices have a row for every layer of a."""
    rows = shared_rows(a.model.vocabulary, b.model.vocabulary, len(a.embedding), len(b.embedding))
    tables = {}
    for side, f in (("a", a), ("b", b)):
        for name in ("embedding", "head"):
            whole = getattr(f, name)
            tables[side, name] = TokenTable(lambda r, t=whole: t if r is None else t[r], whole.shape[1])
    index_a, index_b = (torch.tensor(r, device=a.embedding.device) for r in rows)
    mixed = index_b[torch.randperm(len(index_b), generator=torch.Generator().manual_seed(0)).to(index_b.device)]
    record = {"tokens": len(rows[0]), "rows_agree": rows_agree(a.embedding[index_a], b.embedding[index_b]),
              "rows_agree_by_chance": rows_agree(a.embedding[index_a], b.embedding[mixed])}  # fmt: skip
    frame = fixed_frame(b.embedding.shape[1], b.embedding)
    same_width, same_depth = a.embedding.shape[1] == b.embedding.shape[1], len(a.grams["q"]) == len(b.grams["q"])

    def cosines(left: Tensor, right: Tensor, roles: tuple[str, ...]) -> dict:
        """left, right: maps of grams to common axes, by role."""
        found = {}
        for role in roles:
            x, y = centred(left(a.grams[role])), centred(right(b.grams[role]))
            if role in {"q", "k", "raw_q", "raw_k"}:
                found[role] = rounded(x @ y.T)
            elif same_depth:
                found[role] = rounded((x * y).sum(1))
        return found

    for anchor in ("embedding", "head", "identity"):
        roles = ("q", "k", "raw_q", "raw_k", *ROLES) if anchor == "embedding" else ("q", "k")
        if anchor == "identity":
            if same_width:
                record["identity"] = cosines(lambda g: g, lambda g: g, roles)
            continue
        if anchor == "head" and a.model.tied and b.model.tied:
            continue
        at = tables["a", anchor], tables["b", anchor]
        lap = align(*at, *rows, "lap", anchor)
        sign = lap.sign[:, None] * lap.sign
        record[f"{anchor}_lap"] = cosines(lambda g, i=lap.index, s=sign: g[:, i][:, :, i] * s, lambda g: g, roles) | {
            "confidence": lap.confidence,
            "margin": lap.margin,
        }
        turn = rotation_of(*at, rows) @ frame
        record[f"{anchor}_procrustes"] = cosines(
            lambda g, t=turn: t.T @ g @ t, lambda g: frame.T @ g @ frame, tuple(r for r in roles if r[:3] != "raw")
        )
    for f, other, r in ((a, b, rows[0]), (b, a, rows[1])):
        if len(other.embedding) not in f.terms:
            f.terms[len(other.embedding)] = invariant_terms(f.model, r[-DEFAULT.tokens :], DEFAULT)
    terms = a.terms[len(b.embedding)], b.terms[len(a.embedding)]
    record["huref"] = correlations(*terms)
    record["huref_without_rows"] = correlations(*([without_rows(m, side[2].right) for m in side] for side in terms))
    return record


def pairs_of(groups: dict[str, tuple[Group, list[int]]], parts: dict[str, list[int]], seed: int) -> list[dict]:
    """Which pairs: two partners of every model in its group, one at its width, one at another width; early stops with
    early stops and with the end; every relative with its source, and with a stranger."""
    choose, found = random.Random(seed), []

    def add(kind: str, a: Name, b: Name) -> None:
        found.append({"kind": kind, "a": a, "b": b})

    free = [n for n, (g, _) in groups.items() if g.relation == "independent"]
    for name in free:
        group, steps = groups[name]
        order = list(range(group.models))
        choose.shuffle(order)
        for hop in (1, 2):  # neighbours on a circle: every model meets 2 · hop others, half of the pairs are disjoint
            for i, j in zip(order, order[hop:] + order[:hop]):
                add("independent", Name(name, i, steps[-1]), Name(name, j, steps[-1]))
        for step in steps[:-1]:
            for i, j in zip(order[: min(16, len(order)) : 2], order[1 : min(16, len(order)) : 2]):
                add("independent", Name(name, i, step), Name(name, j, step))
                add("independent", Name(name, i, step), Name(name, j, steps[-1]))
    for one, two in combinations(free, 2):
        (g, s), (h, t) = groups[one], groups[two]
        count = min(24 if g.width == h.width else 3, g.models, h.models)
        for i, j in zip(choose.sample(range(g.models), count), choose.sample(range(h.models), count)):
            add("independent", Name(one, i, s[-1]), Name(two, j, t[-1]))
    for name, (group, steps) in groups.items():
        if group.relation == "independent":
            continue
        source, ends = groups[group.source]
        for i in range(group.models):
            add(group.relation, Name(group.source, i, ends[-1]), Name(name, i, steps[-1]))
            other = choose.choice([j for j in range(source.models) if j != i])
            add(f"{group.relation}, of another", Name(group.source, other, ends[-1]), Name(name, i, steps[-1]))
    choose.shuffle(found)
    found.sort(key=lambda pair: pair["kind"] == "independent")  # relatives are few: they come first
    for pair in found:
        pair["parts"] = [parts[pair[side].group][pair[side].index] for side in "ab"]
    return found


def run(out: Path, folder: Path, seconds: float, device: str, groups: list[Group]) -> None:
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    vocabularies = {name: normalise(json.loads((folder / f"{name}.json").read_text())) for name in VOCABULARIES}

    def ids(name: str) -> Tensor:
        return torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int32)).to(device)

    text = {name: [ids(f"{name}_{part}") for part in PARTS] for name in VOCABULARIES}
    share, training = sum(g.share for g in groups), (0.5 * seconds - (time.perf_counter() - start))
    kept: dict[str, dict[int, dict[str, Tensor]]] = {}
    done: dict[str, tuple[Group, list[int]]] = {}
    parts: dict[str, list[int]] = {}
    records: dict[str, dict] = {}
    for group in groups:
        left = training - (time.perf_counter() - start)
        if left < 2 or (group.source and group.source not in done):
            print(f"no time left for {group.name}", flush=True)
            continue
        began = time.perf_counter()
        # A quarter of the models reads each part; relatives read another part than their source.
        mine = [
            (i + (group.relation != "independent" and group.relation != "distilled")) % 4 for i in range(group.models)
        ]
        if group.relation == "distilled":  # on the teacher's text or on another, in turn
            mine = [(i + i // 4 % 2) % 4 for i in range(group.models)]
        origin = done[group.source][0] if group.source else group
        seed = 10_000 * [g.name for g in GROUPS].index(
            origin.name if group.relation == "same initial weights" else group.name
        )
        masters, teacher = fresh(group, seed, device), None
        if group.relation in {"continued", "distilled"}:
            last = kept[group.source][done[group.source][1][-1]]
            if group.relation == "continued":
                masters = {n: t[: group.models].float() for n, t in last.items()}
            else:
                work = torch.bfloat16 if device.startswith("cuda") else torch.float32
                teacher = (
                    replace(origin, models=group.models),
                    {n: t[: group.models].to(work) for n, t in last.items()},
                )
        budget = min(left, training * group.share / share * 0.95)
        kept[group.name], losses, steps = train(
            group, masters, text[group.vocabulary], torch.tensor(mine, device=device), seed + 7, budget, teacher
        )
        del masters, teacher
        done[group.name], parts[group.name] = (group, list(kept[group.name])), mine
        records[group.name] = asdict(group) | {
            "steps_done": steps, "kept": list(kept[group.name]), "seed": seed, "parts": [PARTS[p] for p in mine],
            "losses": [round(v, 4) for v in losses.tolist()], "seconds": round(time.perf_counter() - began, 2),
            "tokens_each": steps * group.batch * group.length}  # fmt: skip
        print(f"{time.perf_counter() - start:6.1f} s {group.name}: {group.models} models, {steps} of {group.steps} "
              f"steps, loss {losses.mean():.3f} ({losses.min():.3f}–{losses.max():.3f})", flush=True)  # fmt: skip
    about = {"torch": torch.__version__, "python": platform.python_version(), "device": torch.cuda.get_device_name()
             if device.startswith("cuda") else platform.processor(), "parts": PARTS, "vocabularies": VOCABULARIES,
             "seconds_of_training": round(time.perf_counter() - start, 1)}  # fmt: skip
    (out / "models.json").write_text(json.dumps(about | {"groups": records}, indent=1))
    export(out, done, kept, vocabularies)

    cache: dict[Name, Features] = {}

    def features(name: Name) -> Features:
        if name not in cache:
            group = done[name.group][0]
            state = {n + ".weight": t[name.index] for n, t in kept[name.group][name.step].items()}
            model = Checkpoint(f"{name.group}/{name.index}@{name.step}", MemoryStore(state), group.config, Family(),
                               geometry(group.config, Family()), vocabularies[group.vocabulary],
                               torch.device(device))  # fmt: skip
            found = Features.of(model)
            if group.width > 512 and sum(n.group == name.group for n in cache) > 24:
                return found
            cache[name] = found
        return cache[name]

    wanted = pairs_of(done, parts, 0)
    print(f"{time.perf_counter() - start:6.1f} s {len(wanted)} pairs", flush=True)
    scored: list[dict] = []
    for pair in wanted:
        if time.perf_counter() - start > seconds - 12:
            break
        a, b = pair["a"], pair["b"]
        if done[a.group][0].width < done[b.group][0].width:
            a, b, pair["parts"] = b, a, pair["parts"][::-1]
        try:
            found = score(features(a), features(b))
        except (RuntimeError, ValueError, ArithmeticError) as error:  # one pair must not cost the rest
            found = {"error": repr(error)[:200]}
        scored.append({"kind": pair["kind"], "a": list(asdict(a).values()), "b": list(asdict(b).values()),
                       "parts": pair["parts"], **found})  # fmt: skip
        if len(scored) % 400 == 0:
            print(f"{time.perf_counter() - start:6.1f} s {len(scored)} of {len(wanted)}", flush=True)
            write(out, about, scored, len(wanted))
    write(out, about, scored, len(wanted))
    print(f"{time.perf_counter() - start:6.1f} s done: {len(scored)} of {len(wanted)} pairs, "
          f"{sum('error' in p for p in scored)} errors", flush=True)  # fmt: skip


def write(out: Path, about: dict, scored: list[dict], wanted: int) -> None:
    with gzip.open(out / "pairs.json.gz", "wt", compresslevel=6) as file:
        json.dump(about | {"wanted": wanted, "pairs": scored}, file, separators=(",", ":"))


def export(out: Path, done: dict, kept: dict, vocabularies: dict) -> None:
    """The first models of the small groups, for attacks on trained models elsewhere. Each file below 16 MiB."""
    from safetensors.torch import save_file

    for label, names, count in (("w64", ("w64", "w64-tied", "w64-continued", "w64-tied-continued"), 3),
                                ("w128", ("w128-two", "w128-tied", "w96-long"), 2),
                                ("w256", ("w256-hot",), 1)):  # fmt: skip
        state, configs = {}, {}
        for name in names:
            if name in done:
                group, steps = done[name]
                for i in range(min(count, group.models)):
                    state |= {f"{name}/{i}/{n}.weight": t[i].cpu().clone() for n, t in kept[name][steps[-1]].items()}
                configs[name] = json.dumps(group.config | {"vocabulary": group.vocabulary})
        if state:
            save_file(state, out / f"weights_{label}.safetensors", metadata=configs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("prepare")
    first.add_argument("out", type=Path)
    first.add_argument("books", type=Path)
    first.add_argument("wiki", type=Path)
    first.add_argument("--tokens", type=int, default=1_500_000, help="of each part")
    second = verbs.add_parser("run")
    second.add_argument("out", type=Path)
    second.add_argument("text", type=Path)
    second.add_argument("--seconds", type=float, default=470)
    second.add_argument("--device", default="cpu")
    second.add_argument("--relatives", action="store_true", help="only groups that continue, copy or learn from others")
    second.add_argument("--tiny", action="store_true", help="a dry run: few, small, hardly trained models")
    args = parser.parse_args()
    if args.verb == "prepare":
        prepare(args.out, args.books, args.wiki, args.tokens)
    else:
        with torch.no_grad():
            groups = relatives() if args.relatives else GROUPS
            if args.tiny:
                small = [g for g in groups if g.width <= 96 or g.name in {"w128-tied", "w128-same-init"}]
                groups = [replace(g, models=4, steps=48, batch=2, length=32) for g in small]
            run(args.out, args.text, args.seconds, args.device, groups)


if __name__ == "__main__":
    main()
