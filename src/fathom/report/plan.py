"""The runs of a comparison: every method × seed under every budget of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fathom.data import PreparedData
from fathom.models.configuration import FathomConfig
from fathom.train import Budget, MethodConfig, Recipe, model_config


@dataclass(frozen=True)
class Planned:
    """One planned run."""

    budget: str
    method: MethodConfig
    layers: int
    deepened: bool  # layers were added to match inference FLOPs
    seed: int
    tokens: int
    residual_percent: float = 0.0
    again: int = 0  # the how manieth repetition of the same seed

    @property
    def model_folder(self) -> str:
        """The name of the folder of the method at this depth. Budgets that ask for the same run share it."""
        return f"{self.method.name}-{self.layers}-layers" if self.deepened else self.method.name

    @property
    def folder(self) -> str:
        repeated = f"-again-{self.again}" if self.again else ""
        return f"{self.model_folder}/tokens-{self.tokens}-seed-{self.seed}{repeated}"


def plan(recipe: Recipe, data: PreparedData) -> list[Planned]:
    """All runs, budget by budget, in the recipe's order.

    Raises ValueError for a method that does not fit the model, for a budget of less than a step, and for
    inference_flops with `model.checkpoint`, whose layers are fixed.
    """
    planned: list[Planned] = []
    for budget in recipe.budgets:
        for model in _models(recipe, budget, data):
            planned += [replace(model, seed=seed) for seed in model.method.seeds or recipe.seeds]
    first = planned[0]
    return planned + [replace(first, again=number) for number in range(1, recipe.retrain + 1)]


def inference_flops(
    config: FathomConfig, recipe: Recipe, data: PreparedData, ran: tuple[float, ...] | None = None
) -> float:
    """Matrix-product FLOPs of one of the task's answers. ran: measured shares of tokens that run each step; None: all
    do.
    """
    return recipe.task.answer_flops(config, data, recipe.data.block_size, ran)


def _models(recipe: Recipe, budget: Budget, data: PreparedData) -> list[Planned]:
    configs = [model_config(recipe, method, data.tokenizer) for method in recipe.methods]
    tokens = recipe.training_tokens(data)
    if budget.amount is not None and budget.kind == "tokens":
        tokens = int(budget.amount)
    elif budget.amount is not None and budget.kind == "examples":
        tokens = recipe.tokens_of_examples(budget.amount, data)
    models = [
        Planned(budget.kind, method, config.num_hidden_layers, False, recipe.seeds[0], tokens)
        for method, config in zip(recipe.methods, configs, strict=True)
    ]
    if budget.kind == "train_flops":
        costs = [
            recipe.task.training_flops(config, recipe.data.block_size, recipe.training.gradient_checkpointing)
            for config in configs
        ]
        flops = costs[0] * tokens if budget.amount is None else budget.amount
        # whole steps, as are trained: budgets that come to the same steps share a run
        tokens_of = [int(flops / cost) for cost in costs]
        step = recipe.step_tokens
        tokens_of = [tokens if n // step == tokens // step else n - n % step or n for n in tokens_of]
        models = [replace(model, tokens=n) for model, n in zip(models, tokens_of, strict=True)]
    for model in models:
        if model.tokens < recipe.step_tokens:
            length = "tokens" if recipe.training.examples is None else "examples"
            given = f"training.{length}={getattr(recipe.training, length)}"
            if budget.amount:
                given = f"budgets.{budget.kind}={budget.amount:g}"
            raise ValueError(
                f"{given}: leaves {model.method.name} {model.tokens} tokens under the budget {budget.kind}, less than "
                f"one step of {recipe.step_tokens} (sequences × gradient_accumulation × block_size); use more"
            )
    if budget.kind == "inference_flops":
        if "checkpoint" in recipe.model:
            raise ValueError(
                "budgets: inference_flops adds layers to the cheaper methods, but model.checkpoint fixes them; "
                "drop this budget or train from scratch"
            )
        if recipe.task.checkpoint_fields is not None:
            raise ValueError(
                f"budgets: inference_flops adds layers to a decoder, which task {recipe.task.name!r} has not; "
                "drop this budget"
            )
        if any(recipe.task.exact(config) is False for config in configs):
            raise ValueError(
                "budgets: inference_flops adds layers until answers cost alike, but what a diffusion model's answer "
                "costs is up to the steps of its sampler; drop this budget"
            )
        target = max(inference_flops(config, recipe, data) for config in configs)
        return [_deepen(model, recipe, data, target) for model in models]
    return models


def _deepen(model: Planned, recipe: Recipe, data: PreparedData, target: float) -> Planned:
    """Add the whole layers that bring the method's inference FLOPs nearest to `target`."""

    def at(layers: int) -> tuple[MethodConfig, float]:
        method = replace(model.method, fields={**model.method.fields, "num_hidden_layers": layers})
        return method, inference_flops(model_config(recipe, method, data.tokenizer), recipe, data)

    layers = model.layers
    while at(layers)[1] < target:
        layers += 1
    if layers > model.layers and target - at(layers - 1)[1] < at(layers)[1] - target:
        layers -= 1
    method, cost = at(layers)
    residual = 100 * (cost / target - 1)
    if layers == model.layers:  # nothing to add: the run of the other budgets
        return replace(model, residual_percent=residual)
    return replace(model, method=method, layers=layers, deepened=True, residual_percent=residual)
