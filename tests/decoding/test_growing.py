"""A growing layer holds what transformers' own holds, whatever is done to it, and steps copy nothing of the text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from fathom.decoding.growing import give_room


def caches(expected: int = 0, most: int | None = None) -> tuple[DynamicCache, DynamicCache]:
    stock, ours = DynamicCache(), DynamicCache()
    for cache in (stock, ours):
        cache.layers.append(DynamicLayer())
    give_room(ours, expected, most)
    assert type(ours.layers[0]).__name__ == "GrowingLayer"
    return stock, ours


@pytest.mark.parametrize("expected", [0, 7, 400])
@torch.no_grad()
def test_what_is_done_to_it_leaves_what_the_stock_layer_holds(expected: int) -> None:
    stock, ours = caches(expected)
    generator = torch.Generator().manual_seed(0)
    rows = 2
    for turn in range(120):
        act = int(torch.randint(0, 12, (1,), generator=generator))
        if act == 0 and stock.get_seq_length() > 3:
            for cache in (stock, ours):
                cache.crop(-2)
        elif act == 1:
            chosen = torch.randint(0, rows, (rows,), generator=generator)
            for cache in (stock, ours):
                cache.reorder_cache(chosen)
        elif act == 2 and rows > 1 and turn % 2:
            rows -= 1
            for cache in (stock, ours):
                cache.batch_select_indices(torch.arange(rows))
        elif act == 3 and rows < 4 and stock.get_seq_length():
            rows *= 2
            for cache in (stock, ours):
                cache.batch_repeat_interleave(2)
        elif act == 4:
            stock, ours = copy.deepcopy(stock), copy.deepcopy(ours)
        elif act == 5 and turn % 5 == 0:
            for cache in (stock, ours):
                cache.layers[0].reset()
        else:
            count = int(torch.randint(1, 1 + 40 * (act == 6) + 1, (1,), generator=generator))
            key, value = torch.randn(2, rows, 3, count, 4, generator=generator)
            found = ours.update(key, value, 0)
            for mine, theirs in zip(found, stock.update(key, value, 0), strict=True):
                assert torch.equal(mine, theirs)
    assert ours.get_seq_length() == stock.get_seq_length()


@torch.no_grad()
def test_steps_and_steps_after_a_crop_write_in_place() -> None:
    _, cache = caches(expected=64)
    key = torch.randn(2, 3, 20, 4)
    cache.update(key, key, 0)
    start = cache.layers[0].keys.data_ptr()
    for _ in range(20):
        cache.update(key[:, :, :1], key[:, :, :1], 0)
    cache.crop(-3)
    kept = cache.layers[0].values.clone()
    cache.update(key[:, :, :3], key[:, :, :3], 0)
    assert cache.layers[0].keys.data_ptr() == start
    assert torch.equal(cache.layers[0].values, torch.cat((kept, key[:, :, :3]), dim=2))


@torch.no_grad()
def test_a_copy_has_room_of_its_own() -> None:
    _, cache = caches(expected=64)
    key = torch.randn(1, 1, 5, 4)
    cache.update(key, key, 0)
    other = copy.deepcopy(cache)
    cache.update(key[:, :, :1], key[:, :, :1], 0)
    other.update(-key[:, :, :1], -key[:, :, :1], 0)
    assert torch.equal(cache.layers[0].keys[:, :, 5:], key[:, :, :1])
    assert torch.equal(other.layers[0].keys[:, :, 5:], -key[:, :, :1])


def test_gradients_are_those_of_the_stock_layer() -> None:
    stock, ours = caches(expected=64)
    prompt, gradients = torch.randn(1, 2, 5, 4), []
    for cache in (stock, ours):
        new = [torch.full((1, 2, 2, 4), 0.5 + x, requires_grad=True) for x in range(2)]
        query = torch.ones(4, requires_grad=True)
        with torch.no_grad():
            cache.update(prompt, prompt, 0)
        found = torch.zeros(())
        for x in (prompt, *new, prompt):  # a frozen layer's keys need no gradient, but the query's is made of them
            keys, values = cache.update(x, x, 0)
            found = found + (query * keys * values).sum()
        with torch.no_grad():
            cache.update(prompt, prompt, 0)  # a text goes on before the gradient is taken
        gradients.append(torch.autograd.grad(found, (*new, query)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients[1], gradients[0], strict=True))


@torch.no_grad()
def test_a_text_of_inference_mode_goes_on_outside_it() -> None:
    _, cache = caches(expected=64)
    key = torch.randn(1, 2, 5, 4)
    with torch.inference_mode():
        cache.update(key, key, 0)
    for _ in range(2):
        keys, _ = cache.update(key, key, 0)
    assert torch.equal(keys, key.repeat(1, 1, 3, 1)) and not keys.is_inference()


@pytest.mark.parametrize("shape", [(1, 3, 1, 4), (4, 3, 1, 4), (2, 1, 1, 4), (2, 3, 1, 1)])
@pytest.mark.parametrize("expected", [0, 64])
def test_other_rows_are_refused_and_change_nothing(shape: tuple[int, ...], expected: int) -> None:
    _, cache = caches(expected)
    key = torch.randn(2, 3, 5, 4)
    cache.update(key, key, 0)
    with pytest.raises(ValueError, match=r"cannot follow \(2, 3, 5, 4\)"):
        cache.update(torch.ones(shape), torch.ones(shape), 0)
    assert torch.equal(cache.layers[0].keys, key) and torch.equal(cache.layers[0].values, key)


@torch.no_grad()
def test_a_text_longer_than_was_expected_still_has_room() -> None:
    _, cache = caches(expected=8, most=8)
    key = torch.randn(1, 1, 8, 4)
    cache.update(key, key, 0)
    assert cache.layers[0].buffers["keys"][0].shape[2] == 8
    cache.update(key[:, :, :1], key[:, :, :1], 0)
    start = cache.layers[0].keys.data_ptr()
    cache.update(key[:, :, :1], key[:, :, :1], 0)
    assert cache.layers[0].keys.data_ptr() == start


@torch.no_grad()
def test_a_compiled_step_is_compiled_as_often_as_over_the_stock_layer() -> None:
    key, counts = torch.randn(1, 1, 1, 4), []
    for cache in caches(expected=64):
        torch._dynamo.reset()
        counter = CompileCounter()

        def step(layer: Any, new: torch.Tensor) -> torch.Tensor:
            return (layer.update(new, new)[0] * new).sum()

        cache.update(key, key, 0)
        compiled = torch.compile(step, backend=counter)
        for _ in range(12):
            compiled(cache.layers[0], key)
        assert torch.equal(cache.layers[0].keys, key.repeat(1, 1, 13, 1))
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0] < 4
