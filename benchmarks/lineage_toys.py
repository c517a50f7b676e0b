"""Train small Llamas that are hard to tell apart: same data other seed, same seed other data, and their descendants.

    python benchmarks/lineage_toys.py OUT_DIR TEXT.xz [--seeds 4] [--width 96] [--layers 3] [--steps 300] [--device cpu]

TEXT: .txt, .jsonl or their .xz. Writes OUT_DIR/seed{i}, OUT_DIR/other-data (seed 0 on the second half of the text) and
OUT_DIR/continued (seed 0, trained on with the second half): ordinary checkpoints with one shared byte-pair tokenizer.
"""

import argparse
import json
import lzma
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM


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
    model: LlamaForCausalLM, ids: torch.Tensor, steps: int, batch: int, length: int, lr: float, seed: int
) -> float:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps, pct_start=0.1)
    loss = torch.zeros(())
    for step in range(steps):
        starts = torch.randint(0, len(ids) - length - 1, (batch,), generator=generator)
        rows = torch.stack([ids[s : s + length] for s in starts]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % max(1, steps // 5) == 0:
            print(f"  step {step} loss {loss.item():.3f}", flush=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--chars", type=int, default=4_000_000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    text = read_text(args.text, args.chars)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=args.vocab, initial_alphabet=alphabet))
    halves = [torch.tensor(tokenizer.encode(part).ids) for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    heads = max(2, args.width // 32)
    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.width, intermediate_size=args.width * 8 // 3 // 8 * 8,
        num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), head_dim=32,
        max_position_embeddings=args.length, bos_token_id=None, eos_token_id=None, initializer_range=0.02,
    )  # fmt: skip

    def fresh(seed: int) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(args.device)

    def keep(model: LlamaForCausalLM, name: str, loss: float) -> None:
        model.float().cpu().save_pretrained(args.out / name)
        tokenizer.save(str(args.out / name / "tokenizer.json"))
        print(f"{name}: loss {loss:.3f}", flush=True)

    def run(model: LlamaForCausalLM, half: int, seed: int, lr: float = args.lr) -> float:
        return train(model, halves[half], args.steps, args.batch, args.length, lr, seed)

    for seed in range(args.seeds):
        model = fresh(seed)
        keep(model, f"seed{seed}", run(model, 0, seed))
        if seed == 0:
            model.to(args.device)
            keep(model, "continued", run(model, 1, 100, args.lr / 4))
    other = fresh(0)
    keep(other, "other-data", run(other, 1, 0))


if __name__ == "__main__":
    main()
