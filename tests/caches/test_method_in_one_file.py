"""The cache method that CONTRIBUTING.md shows: one file, and all that is promised of methods holds for it."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path

import cache_cases
import pytest
import test_cache_invariants as promises
import torch

from fathom import caches
from fathom.caches import cache_shape, compress, from_dict, prefill
from fathom.caches.base import CacheShape
from fathom.caches.budgets import NotReachable
from fathom.caches.versions import CACHE_NAME
from fathom_cli.catalogue import Module

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
CASES = ("newest", "newest:1")
if "newest" in caches.METHODS:
    pytest.skip("CONTRIBUTING.md was followed to the letter: the suites run on its example", allow_module_level=True)
PROMISES = {name: test for name, test in vars(promises).items() if name.startswith("test_")}
PROMISES = {name: test for name, test in PROMISES.items() if "method_name" in inspect.signature(test).parameters}


@pytest.fixture
def newest(monkeypatch, tmp_path):
    """The example as a file of `methods/`, found as those are."""
    example = re.search(r"```python\n(\"\"\"The newest tokens.*?)```", GUIDE.read_text(), re.DOTALL).group(1)
    (tmp_path / "newest.py").write_text(example)
    monkeypatch.setattr(caches.methods, "__path__", [*caches.methods.__path__, str(tmp_path)])
    found = caches._found()
    assert found.keys() - caches.METHODS.keys() == {"newest"}
    monkeypatch.setitem(caches.METHODS, "newest", found["newest"])
    for size in (cache_cases.SMALL, cache_cases.LARGE):
        for case in CASES:
            monkeypatch.setitem(size, case, {})
    cache_cases.add_cases(found["newest"])
    yield found["newest"]
    del sys.modules["fathom.caches.methods.newest"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("promise", PROMISES.values(), ids=PROMISES)
def test_what_every_method_promises(promise, case, newest, ids, llama):
    given = {"method_name": case, "family": "llama", "model": llama, "llama": llama, "ids": ids}
    promise(**{name: given[name] for name in inspect.signature(promise).parameters})


def test_it_is_sized_and_found_by_name(newest):
    """4 heads of 2·8 numbers of 4 bytes: a quarter of 400 tokens are 100, whatever else the method is."""
    shape = CacheShape(batch=1, kv_heads=4, key_dim=8, value_dim=8, element_bytes=4, layers=2)
    assert newest.at_fraction(0.25, shape, 400) == newest(budget=100)
    assert newest.at_fraction(0.001, shape, 400) == NotReachable(8 / 400)
    assert caches.Newest is newest and from_dict({"name": "newest", "budget": 7}) == newest(budget=7)


def test_the_command_lists_it(newest, tmp_path):
    shutil.copytree(Path(caches.__file__).parent, tmp_path / "fathom" / "caches")
    place = shutil.copy(tmp_path / "newest.py", tmp_path / "fathom" / "caches" / "methods")
    (entry,) = Module(tmp_path / "fathom", Path(place)).methods()
    assert (entry.name, entry.call, entry.registry, entry.summary) == ("newest", "Newest", "cache", newest.summary)
    assert all(option.meaning for option in entry.options) and "n_recent" in {option.name for option in entry.options}


def test_only_the_newest_are_held(newest, ids, llama):
    with compress(llama, newest(budget=16, positions="original")):
        cache = prefill(llama, ids[:1])[CACHE_NAME]
        assert cache.nbytes() == 16 * cache_shape(llama).token_bytes() * 3
    keys = []
    hook = llama.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, given, out: keys.append(out))
    with torch.no_grad():
        llama(ids[:1])
    hook.remove()
    # a rotation keeps the length of a key
    expected = keys[0].view(1, 40, 2, 8).transpose(1, 2)[:, :, 24:].norm(dim=-1)
    assert torch.allclose(cache.layers[0].states[0].key.norm(dim=-1), expected, atol=1e-5)


def test_a_method_that_nobody_can_size_says_so():
    class Endless(caches.CacheMethod):
        name = "endless"
        new_state = layer_bytes = None

    with pytest.raises(NotImplementedError, match="Endless has no option budget: give it an at_fraction"):
        Endless.at_fraction(0.5, CacheShape(1, 1, 8, 8, 4), 100)
    with pytest.raises(ValueError, match="Endless needs no calibration"):
        Endless.calibrate(None, None)
