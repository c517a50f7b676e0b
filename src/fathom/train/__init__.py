"""Recipe to Trainer to checkpoint."""

from fathom.train.phases import Phases
from fathom.train.recipe import Budget, MethodConfig, Recipe, Training, candidates, load_recipe, model_config
from fathom.train.result import TrainResult
from fathom.train.sweep import LearningRateSweep, best_of, sweep_lr, try_lr
from fathom.train.trainer import check_extras, sequences_per_process, train_run

__all__ = [
    "Budget",
    "LearningRateSweep",
    "MethodConfig",
    "Phases",
    "Recipe",
    "TrainResult",
    "Training",
    "best_of",
    "candidates",
    "check_extras",
    "load_recipe",
    "model_config",
    "sequences_per_process",
    "sweep_lr",
    "train_run",
    "try_lr",
]
