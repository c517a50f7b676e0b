"""The published sizes of the Fourier and the Fovea Transformer, which recipes hold and `fathom cost` prices."""

from pathlib import Path

import pytest
import torch

from fathom.cost.encoders import encoder_flops
from fathom.train.recipe import load_recipe, model_config

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "updates"),
    [
        ("fourier_bart_large", 406_291_456, 512 * 6400, 5000),
        ("fourier_bart_large_summary", 406_291_456, 1024 * 64, 20_000),
        ("fovea_longt5_base", 247_577_856 - 32128 * 768, 16_384 * 128, 3516),  # transformers 5 ties the head
    ],
)
def test_sequence_to_sequence_models_have_the_published_size(name, parameters, tokens, updates):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    training, sizes = recipe.training, {}
    for method in recipe.methods:
        config = model_config(recipe, method)
        sizes[method.name] = recipe.task.sizes(config, recipe.data.block_size, torch.bfloat16)
    tables = 12 * 768 + 32 * 12  # a norm a layer, and one table of distances
    assert all(size.parameters == parameters + tables * (name == "transient-global") for name, size in sizes.items()), (
        sizes
    )
    assert training.sequences * training.gradient_accumulation * recipe.data.block_size == tokens
    assert round(training.examples / training.sequences / training.gradient_accumulation) == updates
    flops = {name: size.flops_per_token for name, size in sizes.items()}
    assert max(flops, key=flops.get) == "full"


@pytest.mark.parametrize("name", ["listops", "text", "retrieval", "image", "pathfinder"])
def test_classifiers_keep_a_fifth_of_the_positions(name):
    recipe = load_recipe(RECIPES / f"fourier_lra_{name}.yaml")
    length = recipe.data.block_size
    configs = {method.name: model_config(recipe, method) for method in recipe.methods}
    official, full = configs["fourier-official"], configs["full"]
    assert official.max_position_embeddings == length + 1 and official.towers == 1 + (name == "retrieval")
    share = encoder_flops(official, length) / encoder_flops(full, length)
    assert share < 0.2 and recipe.training.schedule == "linear" and recipe.training.eps == 1e-6
