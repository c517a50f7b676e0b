"""Train small Llamas that are hard to tell apart: same data other seed, same seed other data, and their descendants.

    python benchmarks/lineage/toys.py OUT_DIR TEXT [TEXT …] [--seeds 4] [--width 96] [--layers 3] [--steps 300]
    python benchmarks/lineage/toys.py OUT_DIR TEXT [TEXT …] --seconds 35 --seeds 6 --width 512 --layers 8 --batch 32 \
        --length 512 --vocab 8192 --lr 1e-3 --chars 20000000 --device cuda

TEXT: .txt, .jsonl or their .xz. Writes OUT_DIR/seed{i}, trained on the first half of every text, OUT_DIR/other-data
(seed 0 on the second halves) and OUT_DIR/continued (seed 0, trained on with the second halves), as stock Llama
checkpoints with one shared byte-pair tokenizer, and OUT_DIR/training.json. With --seconds the number of steps is what
the first model manages in that time, the same for all.
"""

import argparse
import json
import lzma
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fathom import FathomConfig, FathomForCausalLM
from fathom.models.checkpoints.stock import save_stock


def read_text(path: Path, limit: int) -> str:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        if ".jsonl" in path.name:
            parts, size = [], 0
            for line in file:
                parts.append(json.loads(line)["text"])
                size += len(parts[-1])
                if size > limit:
                    break
            return "\n".join(parts)
        return file.read(limit)


def train(
    model: FathomForCausalLM, ids: torch.Tensor, steps: int, batch: int, length: int, lr: float, seed: int
) -> float:
    """AdamW with one cycle of the learning rate; returns the mean loss of the last tenth of the steps."""
    device = ids.device
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps, pct_start=0.1)
    offsets, losses = torch.arange(length, device=device), []
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - length, (batch, 1), generator=generator).to(device)
        rows = ids[starts + offsets]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses[-max(1, steps // 10) :]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, help="training time of one model, instead of --steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--chars", type=int, default=4_000_000, help="of each text")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    texts = [read_text(path, args.chars) for path in args.texts]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # the tokenizer sees the beginning of each text: enough for its merges, and quick
    begin = [text[:4_000_000] for text in texts]
    tokenizer.train_from_iterator(begin, trainers.BpeTrainer(vocab_size=args.vocab, initial_alphabet=alphabet))
    lines = [text.splitlines(keepends=True) for text in texts]
    halves = []
    for part in (lambda x: x[: len(x) // 2], lambda x: x[len(x) // 2 :]):
        coded = tokenizer.encode_batch([line for text in lines for line in part(text)])
        halves.append(torch.tensor([i for line in coded for i in line.ids]).to(args.device))
    heads = max(2, args.width // 64)
    config = FathomConfig(
        vocab_size=args.vocab, hidden_size=args.width, intermediate_size=args.width * 8 // 3 // 32 * 32,
        num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        head_dim=args.width // heads, max_position_embeddings=args.length, init="hf",
    )  # fmt: skip

    def fresh(seed: int) -> FathomForCausalLM:
        torch.manual_seed(seed)
        return FathomForCausalLM(config).to(args.device)

    def run(model: FathomForCausalLM, half: int, seed: int, lr: float = args.lr, steps: int | None = None) -> float:
        return train(model, halves[half], steps or args.steps, args.batch, args.length, lr, seed)

    if args.seconds:
        scratch = fresh(0)
        for steps in (5, 20):  # once to warm up, once to measure
            start = time.perf_counter()
            run(scratch, 0, 0, steps=steps)
        args.steps = max(20, int(args.seconds / (time.perf_counter() - start) * 20))
    tokens = args.steps * args.batch * args.length
    record = {"steps": args.steps, "tokens": tokens, "text_tokens": [len(half) for half in halves], "losses": {},
              "width": args.width, "layers": args.layers}  # fmt: skip
    print(json.dumps(record), flush=True)

    def keep(model: FathomForCausalLM, name: str, loss: float) -> None:
        save_stock(model.float(), args.out / name)
        tokenizer.save(str(args.out / name / "tokenizer.json"))
        record["losses"][name] = loss
        (args.out / "training.json").write_text(json.dumps(record, indent=1))
        print(f"{name}: loss {loss:.3f}", flush=True)

    for seed in range(args.seeds):
        model = fresh(seed)
        keep(model, f"seed{seed}", run(model, 0, seed))
        if seed == 0:
            keep(model, "continued", run(model, 1, 100, args.lr / 4))
    other = fresh(0)
    keep(other, "other-data", run(other, 1, 0))


if __name__ == "__main__":
    main()
