"""One layer of VQKV's attention over codes on one GPU: old and new kernels, their parts, tiles and the rebuild.

    PYTHONPATH=src python vqkvbench.py --out vqkvbench.json          (--tiny: a dry run, TRITON_INTERPRET=1 on a CPU)
"""
import argparse
import json
import os
import sys
import time
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "src"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
import triton
import triton.language as tl
import vqkv_old as old

from fathom.ops import code_attention as new
from fathom.ops.residual_decode import sum_codewords
from fathom.ops.residual_vq import histogram_mix, lookup_scores

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="vqkvbench.json")
parser.add_argument("--tiny", action="store_true")
parser.add_argument("--seconds", type=float, default=85)
args = parser.parse_args()
START = time.time()
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOKENS, G, R, D, NK, SK, NV, SV = (70, 2, 4, 16, 8, 16, 4, 32) if args.tiny else (31740, 8, 4, 128, 56, 1024, 16, 512)
rows_out = []


@triton.jit
def wide_global(words, tables, scores, tokens, R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, PER: tl.constexpr,
                WIDE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Old gather from tables [pair, N·S, R], codes in wide loads (new loads, old gather)."""
    pair = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, R)
    exists = token < tokens
    held = words + (pair * tokens + token) * (N // PER)
    table = tables + pair * (N * S * R) + row[None, :]
    total = tl.zeros((BLOCK, R), dtype=tl.float32)
    for step in range(N // (PER * WIDE)):
        pieces = new._words(held + step * WIDE, exists, WIDE)
        for i in tl.static_range(WIDE):
            for j in tl.static_range(PER):
                entry = new._code(pieces[i], j, BITS) + ((step * WIDE + i) * PER + j) * S
                total += tl.load(table + entry[:, None] * R, mask=exists[:, None], other=0.0)
    tl.store(scores + (pair * R + row[None, :]) * tokens + token[:, None], total, mask=exists[:, None])


def note(batch, part, ms, **more):
    row = {"batch": batch, "part": part, "ms_a_layer": ms, "at_s": round(time.time() - START, 1), **more}
    if ms is not None:
        row["ms_32_layers"] = 32 * ms
    rows_out.append(row)
    shown = "failed" if ms is None else f"{ms:9.4f} ms  x32 {32 * ms:8.2f} ms"
    print(f"B={batch}  {part:46s} {shown}  {more or ''}", flush=True)
    about = {"device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__,
             "triton": triton.__version__, "rows": rows_out}
    with open(args.out, "w") as file:
        json.dump(about, file, indent=1)


def timed(run, copies):
    """ms a call: `copies` calls (each with its own codes) in a CUDA graph, best of 3 replays of 2 or more."""
    if not CUDA:
        began = time.time()
        run(0)
        return 1e3 * (time.time() - began)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(2):
            run(i % copies)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = max(copies, 2)
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i % copies)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best, repeats = float("inf"), 3
    for _ in range(4):
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / (repeats * calls))
    return best


def attempt(batch, part, run, copies, check=None):
    if time.time() - START > args.seconds:
        print("no time left for", part, flush=True)
        return
    try:
        more = {} if check is None else {"max_relative_error": check()}
        note(batch, part, timed(run, copies), **more)
    except Exception as error:
        traceback.print_exc(limit=2)
        note(batch, part, None, error=repr(error)[:300])
        if CUDA:
            torch.cuda.synchronize()


def relative(a, b):
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


TILES = [(2048, 8, None), (2048, 16, None), (1024, 8, None), (1024, 8, 128), (2048, 8, 128), (4096, 16, None),
         (1024, 4, None), (512, 4, None), (4096, 32, 64), (1024, 16, 64)]
HIST = [(128, 4), (256, 4), (64, 2), (512, 4), (256, 8), (1024, 8)]
if args.tiny:
    TILES, HIST = [(32, 4, None), (128, 4, None)], [(32, 2), (128, 4)]


def bench(batch):
    copies = 1 if batch == 8 else 4  # batch 1: the codes of one layer would stay in the L2 cache
    gen = torch.Generator(DEVICE).manual_seed(0)
    half = torch.bfloat16
    books_k = torch.randn(1, NK, SK, D, generator=gen, device=DEVICE).to(half)
    books_v = torch.randn(1, NV, SV, D, generator=gen, device=DEVICE).to(half)
    query = torch.randn(batch, G, R, D, generator=gen, device=DEVICE).to(half)

    def coded(n, s):
        made = torch.randint(s, (copies, batch, G, TOKENS, n), generator=gen, device=DEVICE, dtype=torch.int32)
        return (made - 32768).to(torch.int16)

    kc, vc = coded(NK, SK), coded(NV, SV)
    weights = torch.randn(batch, G, R, TOKENS, generator=gen, device=DEVICE).softmax(-1)
    pairs = batch * G
    right_s = lookup_scores(query, kc[0].int() + 32768, books_k)
    right_m = histogram_mix(weights, vc[0].int() + 32768, books_v)
    scores = torch.empty(batch, G, R, TOKENS, device=DEVICE)
    mass = torch.zeros(batch, G, NV * SV, R, device=DEVICE)
    words_k, layout_k = zip(*(new._in_words(c) for c in kc))
    words_v, layout_v = zip(*(new._in_words(c) for c in vc))

    # whole calls
    attempt(batch, "old code_scores", lambda i: old.code_scores(query, kc[i], books_k), copies,
            lambda: relative(old.code_scores(query, kc[0], books_k), right_s))
    attempt(batch, "old code_mix", lambda i: old.code_mix(weights, vc[i], books_v), copies,
            lambda: relative(old.code_mix(weights, vc[0], books_v), right_m))
    attempt(batch, "new code_scores", lambda i: new.code_scores(query, kc[i], books_k), copies,
            lambda: relative(new.code_scores(query, kc[0], books_k), right_s))
    attempt(batch, "new code_mix", lambda i: new.code_mix(weights, vc[i], books_v), copies,
            lambda: relative(new.code_mix(weights, vc[0], books_v), right_m))

    # scores: tables
    flat = books_k[0].flatten(0, 1)
    wide, rows = flat.float(), query.reshape(-1, D)
    attempt(batch, "tables: books to fp32", lambda i: flat.float(), copies)
    attempt(batch, "tables: old product fp32 [NS,D]x[D,BGR]", lambda i: wide @ rows.float().T, copies)
    made = (wide @ rows.float().T).view(-1, pairs, R)
    attempt(batch, "tables: old copy", lambda i: made.transpose(0, 1).contiguous(), copies)
    attempt(batch, "tables: product fp32 [BGR,D]x[D,NS]", lambda i: rows.float() @ wide.T, copies)
    expected = rows.float() @ wide.T
    attempt(batch, "tables: new (16-bit in, fp32 out)", lambda i: new._products(query, books_k), copies,
            lambda: relative(new._products(query, books_k).view(-1, NK * SK), expected))
    by_entry = made.transpose(0, 1).contiguous()  # [pair, NS, R]
    by_row = expected.contiguous()  # [pair·R, NS]
    del made, wide

    # scores: kernels
    def old_kernel(i):
        old._scores[(triton.cdiv(TOKENS, old.BLOCK), pairs)](kc[i], by_entry, scores, TOKENS,
                                                             **old._constants(R, NK, SK, kc[i]))

    def check_s(run):
        def inner():
            scores.fill_(float("nan"))
            run(0)
            return relative(scores, right_s)
        return inner

    attempt(batch, "scores kernel: old", old_kernel, copies, check_s(old_kernel))
    for block, warps, most in TILES:
        def kernel(i, block=block, warps=warps, most=most):
            more = {"maxnreg": most} if most and CUDA else {}
            new._scores[(triton.cdiv(TOKENS, block), pairs, 1)](
                words_k[i], by_row, scores, TOKENS, R=R, ROWS=4, N=NK, S=SK, SIZE=SK, SHARED=True, BLOCK=block,
                num_warps=warps, **layout_k[i], **more)
        attempt(batch, f"scores kernel: shared {block}, {warps} warps, {most}", kernel, copies, check_s(kernel))
    for block, warps in [(128, 4), (512, 4)] if not args.tiny else [(32, 2)]:
        def kernel(i, block=block, warps=warps):
            wide_global[(triton.cdiv(TOKENS, block), pairs)](
                words_k[i], by_entry, scores, TOKENS, R=R, N=NK, S=SK, BLOCK=block, num_warps=warps, **layout_k[i])
        attempt(batch, f"scores kernel: global, wide codes {block}, {warps}", kernel, copies, check_s(kernel))

    # mix: parts
    attempt(batch, "mass: zeroing", lambda i: torch.zeros(batch, G, NV * SV, R, device=DEVICE), copies)
    attempt(batch, "mass: books to fp32", lambda i: books_v.float(), copies)
    flat_v = books_v.flatten(1, 2).float()
    ready = torch.rand(batch, G, NV * SV, R, device=DEVICE)
    attempt(batch, "mass: old product (broadcast)", lambda i: ready.transpose(2, 3) @ flat_v, copies)
    expected = ready.transpose(2, 3) @ flat_v
    attempt(batch, "mass: new product (copy, one product)",
            lambda i: ready.transpose(2, 3).reshape(-1, NV * SV) @ flat_v[0], copies,
            lambda: relative((ready.transpose(2, 3).reshape(-1, NV * SV) @ flat_v[0]).view_as(expected), expected))

    def old_histogram(i):
        old._histogram[(triton.cdiv(TOKENS, old.BLOCK), pairs)](vc[i], weights, mass, TOKENS,
                                                                **old._constants(R, NV, SV, vc[i]))

    def check_h(run):
        def inner():
            mass.zero_()
            run(0)
            return relative(mass.transpose(2, 3) @ flat_v, right_m)
        return inner

    attempt(batch, "histogram kernel: old", old_histogram, copies, check_h(old_histogram))
    for block, warps in HIST:
        def kernel(i, block=block, warps=warps):
            new._histogram[(triton.cdiv(TOKENS, block), pairs)](
                words_v[i], weights, mass, TOKENS, R=R, ROWS=4, N=NV, S=SV, BLOCK=block, num_warps=warps, **layout_v[i])
        attempt(batch, f"histogram kernel: wide codes {block}, {warps} warps", kernel, copies, check_h(kernel))

    # for comparison
    def rebuild(i):
        keys, values = sum_codewords(kc[i], books_k), sum_codewords(vc[i], books_v)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    attempt(batch, "rebuild keys and values", lambda i: (sum_codewords(kc[i], books_k), sum_codewords(vc[i], books_v)),
            copies)
    attempt(batch, "rebuild and SDPA", rebuild, copies)


for batch in (1, 8):
    with torch.no_grad():
        bench(batch)
    if CUDA:
        torch.cuda.empty_cache()
print(f"{time.time() - START:.0f} s, {args.out}")
