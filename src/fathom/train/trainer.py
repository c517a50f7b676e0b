"""Training one model: from a recipe, a method and a seed to a checkpoint, through transformers' `Trainer`.

A run has one folder:

    run.json        what the run is; a folder in which another run has trained is refused
    metrics.jsonl   metrics.py
    checkpoint-N/   everything needed to resume, checkpoints.py
    model/          the trained model and its tokenizer, an ordinary Hugging Face checkpoint
    before/         the run that this one begins with, where the task has one
    result.json     appears last: the run is finished

Devices, DDP and FSDP2 come from the launcher (`torchrun`, `accelerate launch`); the model knows nothing of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from fathom.data import PreparedData, StreamingBlocks
from fathom.data.mixing import MixedBlocks
from fathom.feed_forward.base import FeedForward
from fathom.models.causal_lm import FathomForCausalLM
from fathom.models.configuration import FathomConfig
from fathom.models.model_card import describe
from fathom.models.registry import lookup
from fathom.models.steps.graphs import Foresight, StepGraphs
from fathom.ops.cross_entropy import gradients_of_chunk, losses_of_chunk
from fathom.ops.cudnn_attention import sound_attention
from fathom.ops.vocabulary_mixture import mixture_of_chunk
from fathom.tasks import Task
from fathom.train import complete_checkpoints as checkpoints
from fathom.train.devices import check_graphs, check_version, leave_together, why_not_sharded
from fathom.train.facts import training_facts
from fathom.train.metrics import Metrics
from fathom.train.muon import MuonAndAdamW, matrices_of_blocks
from fathom.train.order import ShuffledBlocks, reseeded
from fathom.train.other_layout import layout_of, layout_of_run, read_moments, read_weights
from fathom.train.phases import Phases
from fathom.train.progress import ProgressDisplay
from fathom.train.recipe import MethodConfig, Recipe, Training, model_config
from fathom.train.result import MODEL, TrainResult, report
from fathom.train.run_folder import claim, identity, processes
from fathom.train.tracking import check_trackers, place, tracking
from fathom.train.trained_parts import add_low_rank, freeze, merge_low_rank
from fathom.writing import naming

BEFORE = "before"
# transformers 5.24 has both names and deprecates the second, 5.15 has only the second
_fields = {field.name for field in dataclasses.fields(TrainingArguments)}
_CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _fields else "gradient_checkpointing"


class FathomTrainer(Trainer):
    """transformers' Trainer with the task's loss, our FLOPs, weight decay on matrices, and an exact held-out loss."""

    def __init__(
        self,
        *,
        task: Task,
        metrics: Metrics,
        flops_per_token: float,
        targets_per_sequence: float,
        muon: bool = False,
        scaled: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_collator=task.collate, **kwargs)
        self.task, self.metrics, self.muon, self.scaled = task, metrics, muon, scaled
        self.flops_per_token, self.targets_per_sequence = flops_per_token, targets_per_sequence
        if self.is_fsdp_enabled:
            check_version(self.accelerator.state.fsdp_plugin)
            leave_together(self.model, task.shards)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The task's loss. Auxiliary losses and statistics of methods go to the metrics."""
        forward = functools.partial(self.task.forward, model)
        inputs = {**inputs, "output_auxiliary": True}
        if not model.training:  # else 5.24 divides by the targets of all ranks, which prediction_step would weigh twice
            num_items_in_batch = None
        loss, output = super().compute_loss(forward, inputs, True, num_items_in_batch)  # type: ignore[arg-type]
        if model.training:
            self.metrics.add(output)
        return (loss, output) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        counted = [{"labels": self.task.counted(batch)} for batch in batch_samples]
        found = super()._get_num_items_in_batch(counted, device)
        return found if found is None else max(found, 1) if isinstance(found, int) else found.clamp(min=1)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices other than embedding tables.

        The usual Hugging Face rule leaves out biases and norms; this one leaves out every vector and scalar, whatever
        its name, and input tables and learned positions (a tied head is an input table).
        """
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        return [name for name, weight in model.named_parameters() if weight.ndim >= 2 and id(weight) not in tables]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if not self.muon or self.optimizer is not None:
            made = super().create_optimizer(model)
            for group in made.param_groups if self.scaled else ():
                group["scale_parameter"] = True  # of Adafactor, which transformers' arguments leave off
            return made
        trained: Any = self.model if model is None else model
        matrices, decayed = matrices_of_blocks(trained), set(self.get_decay_parameter_names(trained))
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, weight in trained.named_parameters():
            if weight.requires_grad:
                groups.setdefault((name in matrices, name in decayed), []).append(weight)
        given = [
            {"params": weights, "muon": muon, "weight_decay": self.args.weight_decay if decays else 0.0}
            for (muon, decays), weights in groups.items()
        ]
        args = self.args
        betas, fused = (args.adam_beta1, args.adam_beta2), str(args.optim).endswith("fused")
        self.optimizer = MuonAndAdamW(given, args.learning_rate, args.weight_decay, betas, args.adam_epsilon, fused)
        return self.optimizer

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return round(self.flops_per_token * self.task.tokens(inputs, self.model.config))  # type: ignore[union-attr]

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """The loss of a batch, weighted so that the Trainer's mean over sequences is the mean over targets."""
        share = self.task.targets(inputs) / len(inputs["labels"]) / self.targets_per_sequence
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        assert loss is not None  # there are labels
        return loss * share.to(loss.device), logits, labels

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Weights of a checkpoint that other processes may have shared otherwise (other_layout.py)."""
        if self._is_of_this_layout(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            read_weights(Path(resume_from_checkpoint), self.model)  # type: ignore[arg-type]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._is_of_this_layout(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        read_moments(Path(checkpoint), self.model, self.optimizer)  # type: ignore[arg-type]
        schedule: Any = self.lr_scheduler
        schedule.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _is_of_this_layout(self, checkpoint: str) -> bool:
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        return layout_of(Path(checkpoint)) == layout_of_run(plugin)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore each process's random state if the number of processes is unchanged; else seed it by seed, step,
        rank.
        """
        if checkpoint is not None:
            stored = len(list(Path(checkpoint).glob("rng_state*.pth")))
            if stored != self.args.world_size:
                set_seed((self.args.seed + 1_000_003 * self.state.global_step + self.args.process_index) % 2**32)
                return
        super()._load_rng_state(checkpoint)


def train_run(
    recipe: Recipe,
    method: MethodConfig,
    *,
    seed: int,
    folder: str | Path,
    data: PreparedData,
    lr: float | None = None,
    tokens: int | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainResult:
    """Train one model, or resume a run that was stopped. A finished run is returned as it is.

    Args:
        folder: of this run alone.
        data: `recipe.task.prepare(recipe.data, …)`.
        lr: peak learning rate; None: the method's or the recipe's, which must then be one number (sweep.py).
        tokens: number of training tokens, instead of the recipe's, with a full schedule.
        callbacks: further Trainer callbacks.

    Raises:
        ValueError: options that do not fit together, or a folder that holds another run.
        OSError: a checkpoint could not be written; the complete one before it stays.
    """
    folder, training, task = Path(folder), recipe.training, recipe.task
    lr = _single_lr(recipe, method) if lr is None else lr
    config = model_config(recipe, method, data.tokenizer)
    share = sequences_per_process(training)
    tokens_per_step = recipe.step_tokens
    tokens = recipe.training_tokens(data) if tokens is None else tokens
    steps = tokens // tokens_per_step
    if steps < 1:
        given = f"training.tokens={tokens}"
        if training.tokens is None:
            given = f"training.examples={training.examples}: {tokens} tokens"
        raise ValueError(
            f"{given}: less than one step of {tokens_per_step} tokens (sequences × gradient_accumulation × block_size)"
        )
    check_extras(training)
    arguments = _arguments(
        training, share, folder, lr, seed, steps, evaluate=data.validation is not None, alternates=task.alternates,
        project=recipe.name, run_name=f"{method.name} seed {seed} lr {lr:g} ({place(folder, recipe.name)})",
    )  # fmt: skip
    check_graphs(training, arguments.world_size)

    folder.mkdir(parents=True, exist_ok=True)
    spec = identity(recipe, method, config, seed, lr, steps, tokens_per_step, data)
    claim(folder, spec, arguments.should_save)
    finished = TrainResult.load(folder)
    if finished is not None and finished.model.is_dir():
        return finished

    flops_per_token = task.training_flops(config, recipe.data.block_size, training.gradient_checkpointing)
    if training.compile:  # of many models in one process, those past the limit would run uncompiled
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    before, begun = task.before(recipe), None
    if before is not None:
        assert isinstance(before.training.lr, float)
        begun = train_run(before, method, seed=seed, folder=folder / BEFORE, data=data, lr=before.training.lr)
    set_seed(seed)
    model = _make_model(recipe, method, config, data, begun)
    parameters = sum(weight.numel() for weight in model.parameters())  # before anything shards them or stands beside
    freeze(model, recipe.trains(method))
    if recipe.trains(method) == "lora":
        add_low_rank(model, training.lora)
    if training.compile and hasattr(model, "compile_blocks"):
        if training.compile != "layers":
            raise ValueError(
                f"training.compile={training.compile!r}: parts of {task.name} models take turns, so that each would be "
                "compiled again; use 'layers'"
            )
        model.compile_blocks()
    elif training.compile in ("layers", "graphs") and not hasattr(model, "depth"):
        raise ValueError(f"training.compile={training.compile!r}: {task.name} models have no such layers; use true")
    elif training.compile in ("layers", "graphs"):
        gathers = not model.depth.replaces  # else training runs all tokens, whose kernels take longer than launches
        compile_layers(model, graphs=training.compile == "graphs" and gathers and torch.cuda.is_available())
    length = steps * tokens_per_step // recipe.data.block_size
    order = _ordered(data, recipe.data.seed + seed, length, task.numbered, method.weights)
    if isinstance(order, MixedBlocks):
        data = dataclasses.replace(data, notes=(*data.notes, order.note))
    metrics = Metrics(
        folder,
        tokens_per_step,
        lambda ran: task.training_flops(config, recipe.data.block_size, training.gradient_checkpointing, ran),
        getattr(model, "depth", None),
        lookup("feed_forward", config.feed_forward["name"]) if hasattr(config, "feed_forward") else FeedForward,  # type: ignore[arg-type]
    )
    trainer = FathomTrainer(
        task=task,
        metrics=metrics,
        flops_per_token=flops_per_token,
        targets_per_sequence=data.validation_targets / len(data.validation) if data.validation is not None else 1.0,
        muon=training.optimizer == "muon",
        scaled=training.optimizer == "adafactor_scaled",
        model=model,
        args=arguments,
        train_dataset=order,
        eval_dataset=data.validation,
        processing_class=task.processor(data, config),
    )
    reason = why_not_sharded(recipe, method, config) if trainer.is_fsdp_enabled else ""
    if reason:
        raise ValueError(reason)
    trainer.remove_callback(PrinterCallback)
    display = ProgressDisplay(f"{method.name} seed {seed} lr {lr:g}", metrics)
    complete = checkpoints.CompleteCheckpoints(
        folder, training.keep, lambda: _save_model(trainer, folder / MODEL, config, data)
    )
    watching = [Phases(), complete, metrics, display, *task.callbacks(), *callbacks]
    for callback in watching:
        trainer.add_callback(callback)

    if arguments.should_save:
        checkpoints.remove_incomplete(folder)
    found = checkpoints.checkpoints(folder)
    if not found or checkpoints.step_of(found[-1]) < steps:  # else killed after the last checkpoint: only report
        with tracking(training.trackers, folder, arguments.should_save) as trackers:
            for tracker in trackers:
                trainer.add_callback(tracker)
            _train(trainer, folder, str(found[-1]) if found else None, display)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    del trainer, model, complete, metrics, display
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if arguments.should_save:
        reported = report(folder, method.name, seed, lr, parameters, data, task)
        config = task.config_of(folder / MODEL)
        describe(folder / MODEL, config, parameters, training_facts(recipe, method, reported, data, config))
        reported.save()
    PartialState().wait_for_everyone()
    result = TrainResult.load(folder)
    assert result is not None  # written by the process that saves
    return result


def sequences_per_process(training: Training) -> int:
    """A process's share of every batch. Raises ValueError where a batch does not divide."""
    sequences, accumulation, count = training.sequences, training.gradient_accumulation, processes()
    if sequences % count == 0:
        return sequences // count
    fewer = [n for n in range(1, count) if sequences % n == 0]
    remedy = f"start {' or '.join(map(str, fewer))}, or make training.sequences a multiple of {count}"
    merged = [n for n in range(2, accumulation + 1) if accumulation % n == 0 and sequences * n % count == 0]
    if merged:
        remedy = (
            f"sequences: {sequences * merged[0]} with gradient_accumulation: {accumulation // merged[0]} make the same "
            f"step on {count}; or {remedy}"
        )
    raise ValueError(f"training.sequences={sequences}: {count} processes cannot share a batch of that many; {remedy}")


def check_extras(training: Training) -> None:
    """Raise ImportError with the pip command where an extra that the training needs is not installed."""
    check_trackers(training.trackers)


def _single_lr(recipe: Recipe, method: MethodConfig) -> float:
    lr = recipe.training.lr if method.lr is None else method.lr
    if isinstance(lr, tuple):
        raise ValueError(f"lr={list(lr)!r}: one run needs one learning rate; sweep_lr chooses")
    return lr


def _arguments(
    training: Training, share: int, folder: Path, lr: float, seed: int, steps: int, evaluate: bool, alternates: bool,
    project: str, run_name: str,
) -> TrainingArguments:  # fmt: skip
    schedule: tuple[str, dict[str, float]] = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": training.min_lr_ratio}),
        "linear": ("linear", {}),
        "wsd": (
            "warmup_stable_decay",
            {"num_decay_steps": round(training.decay_ratio * steps), "min_lr_ratio": training.min_lr_ratio},
        ),
        "constant": ("constant_with_warmup", {}),
    }[training.schedule]
    checkpointing: dict[str, Any] = {_CHECKPOINTING: training.gradient_checkpointing}
    if training.gradient_checkpointing:
        checkpointing[f"{_CHECKPOINTING}_kwargs"] = {"use_reentrant": False}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        gradient_accumulation_steps=training.gradient_accumulation,
        learning_rate=lr,
        lr_scheduler_type=schedule[0],
        lr_scheduler_kwargs=schedule[1],
        warmup_steps=round(training.warmup_ratio * steps),
        weight_decay=training.weight_decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        adam_epsilon=training.eps,
        max_grad_norm=training.grad_clip,
        optim="adafactor" if "adafactor" in training.optimizer else f"adamw_torch{'_fused' if training.fused else ''}",
        use_cpu=not torch.accelerator.is_available(),  # bf16 on a CPU must be asked for
        bf16=training.precision == "bf16",
        torch_compile=training.compile is True,
        seed=seed,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,  # a diverged run must show, and the filter waits for the device every step
        eval_strategy="steps" if evaluate else "no",
        eval_steps=training.eval_every or steps,
        prediction_loss_only=True,
        ddp_find_unused_parameters=alternates,  # else every parameter takes part in every step
        ddp_broadcast_buffers=False,  # the only buffers are rotary frequencies, the same on all ranks
        label_names=["labels"],  # not every argument of forward that has "label" in its name
        save_strategy="steps",
        save_steps=training.save_every or steps,
        save_total_limit=None,  # checkpoints.rotate, which knows what is complete
        train_sampling_strategy="sequential",  # order.py shuffles
        dataloader_num_workers=training.num_workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        # Otherwise the copy of each batch waits until the device has finished the step before it.
        accelerator_config={"non_blocking": torch.cuda.is_available()},
        remove_unused_columns=False,
        report_to="none",  # tracking.py adds them, each with an end
        disable_tqdm=True,
        project=project,
        run_name=run_name,
        **checkpointing,
    )
    if arguments.n_gpu > 1:  # the Trainer would fall back to DataParallel
        raise ValueError(
            f"{arguments.n_gpu} GPUs are visible to one process: start one process a GPU with `torchrun "
            f"--nproc-per-node {arguments.n_gpu} -m fathom train …`, or choose one with CUDA_VISIBLE_DEVICES=0"
        )
    return arguments


def compile_layers(model: FathomForCausalLM, backend: str = "inductor", graphs: bool = False) -> None:
    """Compile the layers, which share one set of graphs, and each product with the vocabulary by itself.

    graphs: for methods that run step by step, replay layers as CUDA graphs (`StepGraphs`) of forecast sizes; not with a
        mixer, whose layers read each other's states.
    """
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # or a layer's number makes another graph of each
    if graphs and model.depth.segments and model.model.mixer is None:
        model.step_graphs, model.foresight = StepGraphs(model.model), Foresight()
    else:
        for layer in model.model.layers:
            layer.compile(backend=backend)
    for score in model.depth.scores:
        score.compile(backend=backend, dynamic=True)
    for function in (gradients_of_chunk, losses_of_chunk, mixture_of_chunk):
        model.compiled[function] = torch.compile(function, backend=backend)


def _make_model(
    recipe: Recipe, method: MethodConfig, config: FathomConfig, data: PreparedData, begun: TrainResult | None
) -> Any:
    """The model with fp32 weights: initialised by the config's rule, or those of `model.checkpoint` or of the run
    before it, or as the task makes it.
    """
    came_before = {} if begun is None else {"checkpoint": str(begun.model)}
    own = recipe.task.new_model(config, {**recipe.model, **method.fields, **came_before}, data)
    if own is not None:
        return own
    checkpoint = recipe.model.get("checkpoint")
    make: Any = recipe.task.class_of(config)
    if not isinstance(config, make.config_class if hasattr(make, "config_class") else ()):  # one of the Auto classes
        return make.from_config(config) if checkpoint is None else make.from_pretrained(checkpoint, config=config)
    if checkpoint is None:
        return make(config)
    changes = {key: value for key, value in {**recipe.model, **method.fields}.items() if key != "checkpoint"}
    if config.diffusion["name"] != "none":
        changes["diffusion"] = config.diffusion
    stored = FathomConfig.get_config_dict(checkpoint)[0]
    if stored.get("model_type") == FathomConfig.model_type:
        rows = {"vocab_size": stored["vocab_size"]} if recipe.data.atoms else {}
        first = FathomConfig.from_dict({**config.to_dict(), **rows})
        model = make.from_pretrained(checkpoint, config=first, dtype=torch.float32)
    else:
        model = make.from_pretrained(checkpoint, dtype=torch.float32, **changes)
    if recipe.data.atoms and model.config.vocab_size < config.vocab_size:
        if recipe.trains(method) != "all":
            raise ValueError(
                f"data.atoms: {checkpoint} lacks {config.vocab_size - model.config.vocab_size} of them, and their rows "
                f"would not learn with trains={recipe.trains(method)!r}: train all of a model with them first, or "
                "leave atoms out"
            )
        model.resize_token_embeddings(config.vocab_size)  # new rows: the mean of the old ones, all but a trace
    return model


def _ordered(
    data: PreparedData, seed: int, length: int, numbered: bool, weights: dict[str, float] | None
) -> torch.utils.data.Dataset:
    if isinstance(data.train, StreamingBlocks):
        return reseeded(data.train, seed)
    if isinstance(data.train, MixedBlocks):
        return data.train.ordered(seed, length, weights, numbered)
    return ShuffledBlocks(data.train, seed, length, numbered)


def _train(trainer: FathomTrainer, folder: Path, checkpoint: str | None, display: ProgressDisplay) -> None:
    """Run `Trainer.train`. A failure to write a checkpoint becomes an OSError that says which one is still complete."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of saving: it would tear our own display
    try:
        with sound_attention() if trainer.task.pads else contextlib.nullcontext():
            trainer.train(resume_from_checkpoint=checkpoint)
    except Exception as error:
        partial = folder / f"{checkpoints.PREFIX}{trainer.state.global_step}"
        if not partial.exists() or checkpoints.is_complete(partial):
            raise
        kept = checkpoints.checkpoints(folder)
        remedy = f"{kept[-1].name} before it is complete and is resumed from" if kept else "no earlier one is complete"
        raise OSError(
            f"{partial} could not be written ({error}); {remedy}. Check the free disk space and run the command again"
        ) from error
    finally:
        display.close()
        if bars:
            logging.enable_progress_bar()


def _save_model(trainer: FathomTrainer, folder: Path, config: Any, data: PreparedData) -> None:
    """Write model and tokenizer as an ordinary checkpoint, whose folder appears once it is complete. All ranks call
    this.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    if trainer.is_fsdp_enabled:  # gather the shards
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trained: Any = trainer.model
    trainer.model = merge_low_rank(trained)
    try:
        with naming(partial):
            trainer.save_model(str(partial))
    finally:
        trainer.model = trained
    if trainer.args.should_save:
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle; run.json says it
        with naming(partial):
            trainer.task.complete(partial, config, data)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
