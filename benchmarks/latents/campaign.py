"""CoDAR and its rivals on real text, three processes side by side on one GPU; raw JSON after every step.

    for role in codar decoder twin; do
      python benchmarks/latents/campaign.py $role --text BOOKS --held-out books-valid.jsonl.xz --judge SmolLM2-135M \
        --work RUNS -o OUT &
    done

    codar     the encoder, a masked model; then the denoiser; then CoDAR again at three widths of the vectors, shorter
              trained
    decoder   beside the denoiser the contextual decoder, the heads and the autoregressive model of its size; then texts
              by all of them, and what the heads make of the denoiser's estimates of held-out text; CoDAR's decoder
              trained on by `corrupt: denoiser`, and its texts; at the end the token-recovery study
    twin      the encoder trained on as a masked diffusion model for as many tokens as the denoiser; texts by it, and by
              the compressed rival

Or CoDAR and its twin at equal training, one process a seed, whose texts may be judged later and elsewhere:

    python benchmarks/latents/campaign.py data --text BOOKS --held-out … --work RUNS -o OUT
    for seed in 0 1 2; do python benchmarks/latents/campaign.py seed --seed $seed --memory 7 … & done; wait
    python benchmarks/latents/campaign.py judge --judge SmolLM2-135M -o OUT

    data      the text's tokens, which the seeds share
    seed      the stages of recipes/codar.yaml at the sizes given here: encoder, denoiser, decoder; texts by CoDAR.
              Then the encoder trained on as a masked model for the training FLOPs of denoiser and decoder together
              (twin.json says where a deadline left less), and its texts. What a killed process has finished is not
              done again
    judge     the judge's nats of every text that lies in OUT, on a CPU too; what is judged stays judged

BOOKS is a folder of text. With a `--deadline` (seconds since 1970) the denoiser has as many tokens as fit before it,
and a step that would end after it is left out. OUT gets NAME.json of each step; texts-NAME.json.xz is what was written.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import lzma
import time
from pathlib import Path
from typing import Any

import torch
from estimates import estimates

from fathom.evaluate import load_checkpoint
from fathom.latents.controls import controls
from fathom.latents.model import load
from fathom.latents.recovery import RecoveryConfig, study, terms, trained_head
from fathom.latents.writers import WritersConfig, at_entropy, nats_of_texts, table
from fathom.report.provenance import provenance
from fathom.tasks.contextual_decoder import ContextualDecoding
from fathom.train import Recipe, TrainResult, train_run
from fathom.train.loading import build
from fathom.train.stages import load_stages
from fathom.writing import write_json
from fathom_cli.latents import rows

LAYER = 2  # of the encoder, after which states are taken
RECIPE = Path(__file__).parents[2] / "recipes" / "codar.yaml"
ROLES = ("codar", "decoder", "twin")  # side by side
MORE = {"data": "prepare", "seed": "seed", "judge": "judging"}  # and by which method


class Campaign:
    """What the three roles share: sizes, data, folders, the judge."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.work, self.out = given, given.work, given.output
        self.tokens = self.work / ".data"
        if given.role == "seed":
            self.work, self.out = (folder / f"seed-{given.seed}" for folder in (self.work, self.out))
        heads = max(1, given.width // 64)
        self.sizes = {"hidden_size": given.width, "num_hidden_layers": given.layers, "num_attention_heads": heads}
        self.decoder_sizes = {**self.sizes, "num_hidden_layers": given.decoder_layers}
        self.data = {
            "train": str(given.text), "validation": str(given.held_out), "block_size": given.length,
            "tokenizer": given.tokenizer or {"bpe": given.vocabulary}, "max_validation_tokens": 512 * given.length,
            "num_proc": given.processes,
        }  # fmt: skip
        self.step = given.sequences * given.length
        self.judge: Any = None
        self.out.mkdir(parents=True, exist_ok=True)

    # ---------------------------------------------------------------- training

    def train(
        self, name: str, task: Any, model: dict[str, Any], tokens: int, lr: float,
        training: dict[str, Any] | None = None, **data: Any,
    ) -> TrainResult:  # fmt: skip
        """A stage. training: of its options, over those that the stages of the three roles share."""
        raw = {
            "name": name, "task": task, "model": model, "data": {**self.data, **data},
            "training": {
                **({"betas": [0.9, 0.98]} if training is None else training),
                "tokens": tokens // self.step * self.step, "sequences": self.given.sequences, "lr": lr,
                "precision": self.given.precision, "log_every": 50,
            },
        }  # fmt: skip
        if task == "masked_diffusion":
            raw["methods"] = ["masked"]
        recipe = build(Recipe, raw)
        made = train_run(
            recipe, recipe.methods[0], seed=self.given.seed, folder=self.work / name, data=self.prepared(recipe)
        )
        said = {"tokens": made.tokens, "train_flops": made.train_flops, "tokens_per_second": made.tokens_per_second}
        said |= {"validation_loss": made.validation_loss, "scores": made.scores, "seconds": made.seconds, "lr": lr}
        write_json(self.out / f"stage-{name}.json", {**said, **provenance(1)})
        print(f"{name}: {said}", flush=True)
        return made

    def prepared(self, recipe: Recipe) -> Any:
        return recipe.task.prepare(recipe.data, self.tokens)

    def latents(self, encoder: Path, **codar: Any) -> dict[str, Any]:
        """A new latent diffusion model's fields."""
        return {
            "encoder": str(encoder), "denoiser": self.sizes, "decoder": self.decoder_sizes,
            "codar": {"layer": LAYER, "ema": self.given.ema, **codar},
        }  # fmt: skip

    def wait(self, name: str) -> Path:
        """The folder of a model that another process trains."""
        self.until(self.work / name / "result.json")
        return (self.work / name / "model").resolve()

    def until(self, path: Path) -> None:
        while not path.exists():
            if self.left() < 0:
                raise SystemExit(f"{path} did not appear before the deadline")
            time.sleep(1)

    def left(self) -> float:
        return float("inf") if self.given.deadline is None else self.given.deadline - time.time()

    def plan(self, encoder: TrainResult) -> int:
        """Tokens of the denoiser: what fits, at a quarter of the encoder's speed (two more processes begin now, and an
        estimate of the step before is made half of the time), with --after seconds left."""
        fits = 0.25 * encoder.tokens_per_second * (self.left() - self.given.after)
        tokens = int(max(0.1 * self.given.denoiser_tokens, min(self.given.denoiser_tokens, fits)))
        tokens = tokens // self.step * self.step
        write_json(self.out / "plan.json", {"denoiser_tokens": tokens, "left": str(self.left())})
        return tokens

    def planned(self) -> int:
        self.until(self.out / "plan.json")
        return json.loads((self.out / "plan.json").read_text())["denoiser_tokens"]

    # ---------------------------------------------------------------- what was written

    def compare(
        self, name: str, model: Any, tokenizer: Any, writers: tuple[str, ...], made: Any = None, **options: Any
    ) -> None:
        """The table of some writers in NAME.json, with the judge's nats of every text."""
        config = WritersConfig(
            writers=writers, samples=self.given.samples, steps=self.given.steps, rows=self.given.sequences, lr=1e-3,
            **{"temperatures": (0.0, 0.5, 0.7, 0.8, 0.9, 1.0), "head_steps": self.heads(), "seed": self.given.seed,
               **options},
        )  # fmt: skip
        train, held_out = self.text()
        said, texts, started = [], [], time.time()

        def judge(some: list[str]) -> tuple[float, int]:
            each = self.nats(some)
            said.append({"nats": [round(nats, 3) for nats, _ in each], "tokens": [count for _, count in each]})
            return sum(nats for nats, _ in each), sum(count for _, count in each)

        def keep(lines: list[dict[str, Any]], written: list[str]) -> None:
            wanted = lines[0]["entropy"]
            matched = {one: at_entropy(lines, one, wanted) for one in dict.fromkeys(line["writer"] for line in lines)}
            found = {"config": dataclasses.asdict(config), "rows": lines, "entropy_of_data": wanted, "judged": said}
            found |= {"perplexity_at_that_entropy": matched, "controls": shown, "seconds": time.time() - started}
            found |= {"trained": model.config.trained, "parameters": model.part_parameters(), **provenance(1)}
            write_json(self.out / f"{name}.json", found)
            texts.append({**{key: lines[-1][key] for key in ("writer", "temperature")}, "texts": written})
            with lzma.open(self.out / f"texts-{name}.json.xz", "wt") as file:
                json.dump(texts, file)

        task = ContextualDecoding(examples=128)
        shown = controls(model, held_out[: task.examples].to(model.device), None, task)
        table(model, tokenizer, train, held_out, config, judge if self.given.judge else None,
              lambda line: print(f"{name}: {line}", flush=True), keep, made)  # fmt: skip

    @functools.cache  # noqa: B019
    def text(self) -> tuple[torch.Tensor, torch.Tensor]:
        recipe = build(Recipe, {"name": "text", "training": {"tokens": self.step, "sequences": 1}, "data": self.data})
        data = self.prepared(recipe)
        return rows(data.train), rows(data.validation)

    def judges(self) -> Any:
        if self.judge is None:
            if self.given.ready:
                self.until(self.given.ready)
            model, tokenizer = load_checkpoint(self.given.judge)
            self.judge = model.float(), tokenizer
        return self.judge

    def nats(self, texts: list[str]) -> list[tuple[float, int]]:
        """What the judge says. Where another program has taken the memory, once more when it may be back."""
        while True:
            try:
                return nats_of_texts(*self.judges(), texts)
            except torch.OutOfMemoryError:
                if self.left() < 60:
                    raise
                torch.cuda.empty_cache()
                time.sleep(10)

    def heads(self) -> int:
        return max(1, self.given.decoder_tokens // self.step)

    def joined(self, decoder: Path, denoiser: Path) -> tuple[Any, Any]:
        """The model of the decoder's stage with the other stage's denoiser, which was trained beside it."""
        model, tokenizer = load(decoder)
        other, _ = load(denoiser)
        torch.testing.assert_close(model.space.mean, other.space.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.space.deviation, other.space.deviation, rtol=1e-4, atol=1e-5)
        for part in ("denoiser", "denoiser_mean"):
            getattr(model, part).load_state_dict(getattr(other, part).state_dict())
        model.config.trained = ["contextual_decoder", "latent_diffusion"]
        return model, tokenizer

    # ---------------------------------------------------------------- the roles

    def codar(self) -> None:
        made = self.train("encoder", "masked_diffusion", self.sizes, self.given.encoder_tokens, 1e-3)
        encoder = self.wait("encoder")
        tokens, own = self.plan(made), {"tokenizer": str(encoder)}
        self.train("denoiser", "latent_diffusion", self.latents(encoder), tokens, 5e-4, **own)
        for width in self.given.widths:
            if self.left() < 3.5 * self.given.sweep_tokens / made.tokens_per_second + 30:
                break
            pca = {"bottleneck": "pca", "latent_dim": width}
            first = f"width-{width}-denoiser"
            self.train(first, "latent_diffusion", self.latents(encoder, **pca), self.given.sweep_tokens, 5e-4, **own)
            task = {"name": "contextual_decoder", "word_dropout": 0.1}
            both = {"checkpoint": str(self.wait(first))}
            self.train(f"width-{width}", task, both, self.given.sweep_tokens, 1e-3, **own)
            model, tokenizer = load(self.wait(f"width-{width}"))
            self.compare(f"writers-width-{width}", model, tokenizer, ("codar",), temperatures=(0.0, 0.7, 0.9, 1.0))

    def decoder(self) -> None:
        encoder = self.wait("encoder")
        own = {"tokenizer": str(encoder)}
        task = {"name": "contextual_decoder", "word_dropout": 0.1}
        self.train("decoder", task, self.latents(encoder), self.given.decoder_tokens, 1e-3, **own)
        model, tokenizer = load(self.wait("decoder"))
        heads = RecoveryConfig(
            steps=self.heads(), rows=self.given.sequences, lr=1e-3, t_max=0.15, seed=self.given.seed, levels=(0.0,)
        )
        train, held_out = self.text()
        made = {name: trained_head(model, name, train, heads) for name in ("factorised", "mlp")}
        more = dataclasses.replace(heads, steps=max(1, self.planned() // self.step))
        denoised = (self.work / "denoiser" / "result.json").exists()
        if not denoised:  # meanwhile
            made["language"] = trained_head(model, "language", train, more)
        model, tokenizer = self.joined(self.wait("decoder"), self.wait("denoiser"))
        self.compare("writers", model, tokenizer, ("codar", "noise", *made), made)
        self.estimates(model, made, held_out)
        if denoised:
            self.compare("writers-language", model, tokenizer, ("language",), head_steps=more.steps)
        if self.left() > 120:
            folder = self.work / "joined"
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            task = {"name": "contextual_decoder", "word_dropout": 0.1, "corrupt": "denoiser", "t_max": 0.6}
            tokens = self.given.decoder_tokens // 4
            self.train("decoder-denoiser", task, {"checkpoint": str(folder.resolve())}, tokens, 3e-4, **own)
            model, tokenizer = load(self.wait("decoder-denoiser"))
            self.compare("writers-decoder-denoiser", model, tokenizer, ("codar", "noise"))
            self.estimates(model, {}, held_out, "estimates-decoder-denoiser")
        if self.left() < 150:
            return
        config = dataclasses.replace(
            heads, steps=self.given.recovery_steps, t_max=0.3, examples=self.given.samples,
            levels=(0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
        )  # fmt: skip

        def keep(found: dict[str, Any]) -> None:
            write_json(self.out / "recovery.json", {**found, "terms": terms(found), **provenance(1)})

        study(model, train, held_out, config, lambda line: print(line, flush=True), keep)

    def prepare(self) -> None:
        self.text()

    def seed(self) -> None:
        stages = load_stages(RECIPE, ("recovery", "writers")).stages

        def train(
            name: str, tokens: int, model: dict[str, Any], before: TrainResult | None, stage: str = ""
        ) -> TrainResult:
            """A stage by what the recipe says of it. One that would not end in time, at half of the encoder's speed, is
            not begun."""
            said, own = stages[stage or name], {}
            if before is not None:
                own = {"tokenizer": str(before.model.resolve())}
                done = (self.work / name / "result.json").exists()
                if not done and self.left() < tokens / (0.5 * before.tokens_per_second):
                    raise SystemExit(f"{name} of {tokens:,} tokens was not begun: {self.left():.0f} s are left")
            return self.train(name, said["task"], model, tokens, said["training"]["lr"], said["training"], **own)

        first = train("encoder", self.given.encoder_tokens, self.sizes, None)
        encoder = first.model.resolve()
        fields = {**self.latents(encoder), "codar": stages["denoiser"]["model"]["codar"]}
        denoiser = train("denoiser", self.given.denoiser_tokens, fields, first)
        both = {"checkpoint": str(denoiser.model.resolve())}
        decoder = train("decoder", self.given.decoder_tokens, both, first)
        model, tokenizer = load(decoder.model)
        if not (self.out / "writers.json").exists():
            self.compare("writers", model, tokenizer, ("codar", "noise"))
        equal = int((denoiser.train_flops + decoder.train_flops) / (first.train_flops / first.tokens))
        fits = int(max(0.0, min(equal, 0.5 * first.tokens_per_second * (self.left() - 30))))
        plan = self.out / "twin.json"  # once, so that a process that is begun again goes on with the same training
        if not plan.exists():
            write_json(plan, {"tokens_of_equal_flops": equal, "tokens": fits})
        tokens = json.loads(plan.read_text())["tokens"]
        if tokens < equal // 4:
            raise SystemExit(f"the twin was not begun: {fits:,} of {equal:,} tokens would fit")
        twin = train("twin", tokens, {"checkpoint": str(encoder)}, first, "encoder")
        if not (self.out / "writers-masked.json").exists():
            from fathom import FathomForMaskedDiffusion

            twin_model = FathomForMaskedDiffusion.from_pretrained(twin.model).to(model.device)
            model.space.encoder = twin_model.eval()
            self.compare("writers-masked", model, tokenizer, ("masked",))

    def judging(self) -> None:
        """Nats and tokens of every text in texts-*.json.xz, in judged-*.json beside it."""
        for path in sorted(self.out.rglob("texts-*.json.xz")):
            to = path.with_name(path.name.replace("texts-", "judged-").removesuffix(".xz"))
            found = json.loads(to.read_text())["found"] if to.exists() else []
            with lzma.open(path, "rt") as file:
                written = json.load(file)
            for one in written[len(found) :]:
                if self.left() < 20:
                    return
                each = self.nats(one["texts"][: self.given.samples])
                found.append({
                    **{key: one[key] for key in ("writer", "temperature")},
                    "nats": [round(nats, 3) for nats, _ in each], "tokens": [count for _, count in each],
                })  # fmt: skip
                write_json(to, {"judge": str(self.given.judge), "found": found, **provenance(1)})

    def estimates(self, model: Any, made: dict[str, Any], held_out: torch.Tensor, name: str = "estimates") -> None:
        """What heads and CoDAR's own decoder make of the denoiser's estimates of held-out text, in NAME.json."""

        def keep(found: list[dict[str, Any]]) -> None:
            write_json(self.out / f"{name}.json", {"rows": found, **provenance(1)})

        estimates(model, made, held_out[: self.given.samples], self.given.seed, keep)

    def twin(self) -> None:
        encoder, tokens = self.wait("encoder"), self.planned()
        fields = {"checkpoint": str(encoder)}
        self.train("twin", "masked_diffusion", fields, tokens, 1e-3, tokenizer=str(encoder))
        model, tokenizer = load(self.wait("decoder"))
        place, frozen = model.device, model.space.encoder
        from fathom import FathomForMaskedDiffusion

        model.space.encoder = FathomForMaskedDiffusion.from_pretrained(self.wait("twin")).to(place).eval()
        self.compare("writers-masked", model, tokenizer, ("masked",))
        model.space.encoder = frozen
        if self.left() > 200:
            self.compare(
                "writers-compressed", model, tokenizer, ("compressed",), denoiser_steps=tokens // self.step // 2
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=(*ROLES, *MORE))
    parser.add_argument("--text", type=Path, help="needed but by `judge`, as the next two")
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("."), help="folder of checkpoints and tokens")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--judge", help="folder of a causal language model; else nothing is judged")
    parser.add_argument(
        "--tokenizer", help="folder of one, instead of a BPE of --vocabulary tokens that is made of BOOKS"
    )
    parser.add_argument("--ready", type=Path, help="a file that appears when the judge is there")
    parser.add_argument("--deadline", type=float, help="seconds since 1970")
    for name, default in (
        ("width", 384), ("layers", 6), ("decoder-layers", 4), ("length", 128), ("vocabulary", 4096),
        ("sequences", 128), ("encoder-tokens", 24_576_000), ("denoiser-tokens", 81_920_000),
        ("decoder-tokens", 24_576_000), ("sweep-tokens", 8_192_000), ("recovery-steps", 500), ("samples", 256),
        ("after", 330), ("steps", 100), ("seed", 0), ("processes", 6),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 384, 160])
    parser.add_argument("--memory", type=float, help="GiB of the GPU that the process may take; more is refused")
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--precision", default="bf16")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # of what runs without autocast: the encoder of heads, sampling
    if given.memory and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.memory / whole))
    getattr(Campaign(given), MORE.get(given.role, given.role))()
    if torch.cuda.is_available():
        print(f"peak {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB", flush=True)
