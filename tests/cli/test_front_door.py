"""`import fathom` and the command answer quickly: what they need not import, they do not."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time

import pytest

import fathom
from fathom import caches

# What costs a second or more to import. Bounds in seconds are for a busy machine; an idle one takes a tenth.
HEAVY = ("torch", "transformers", "numpy", "fathom")


def python(source: str, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def command(*arguments: str) -> str:
    """Runs the command, and prints which heavy packages it imported."""
    return f"""
import sys
sys.argv = ["fathom", *{arguments!r}]
from fathom_cli import main
try:
    main()
except SystemExit as stopped:
    assert not stopped.code, stopped.code
print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("methods",),
        ("methods", "treekv"),
        *((verb, "--help") for verb in ("train", "compare", "generate", "evaluate", "inspect", "cost", "methods")),
        ("cache", "--help"),
        ("cache", "bench", "--help"),
        ("lineage", "--help"),
    ],
    ids=" ".join,
)
def test_help_and_lists_need_no_torch(arguments):
    start = time.perf_counter()
    out = python(command(*arguments)).stdout
    assert out.endswith("HEAVY []\n") and len(out) > len("HEAVY []\n")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fathom me", {"methods"}),
        ("fathom methods ponderlm", {"ponderlm2", "ponderlm3"}),
        ("fathom cache run MODEL --method tre", {"treekv"}),
        ("fathom cache be", {"bench"}),
    ],
)
def test_completion(words, expected):
    variables = {"_FATHOM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    lines = python(command(), **variables).stdout.splitlines()
    assert lines[-1] == "HEAVY []"
    assert set(lines[:-1]) == expected


def test_import_registers_and_loads_the_rest_when_it_is_asked_for():
    python("""
import sys
import fathom
assert "transformers.modeling_utils" not in sys.modules  # a second of imports
assert "torch.distributed.tensor" not in sys.modules  # what a stock family's config imports
assert "fathom.depth" not in sys.modules and "fathom.caches" not in sys.modules
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("fathom", vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
assert type(AutoModelForCausalLM.from_config(config)) is fathom.FathomForCausalLM
""")


def test_a_stand_in_gives_configs_of_the_real_class():
    python("""
import fathom
from fathom.models.lazy_configs import STAND_INS
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
for kind, stand_in in STAND_INS.items():
    real = stand_in.real()
    assert real.model_type == kind and real.__name__ == stand_in.place[1] and CONFIG_MAPPING[kind] is real
    assert type(CONFIG_MAPPING[kind].from_dict({})) is type(stand_in.from_dict({})) is real
    assert type(AutoConfig.for_model(kind)) is type(stand_in()) is real
""")


def test_a_config_from_a_pickle_finds_its_model():
    config = pickle.dumps(fathom.FathomConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    python(f"""
import pickle
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(pickle.loads({config!r}))
assert type(model).__name__ == "FathomForCausalLM"
""")


def test_dir_is_what_a_user_needs():
    names = dir(fathom)
    assert names == sorted(names)
    assert {"FathomConfig", "FathomForCausalLM", "compress", "compare", "lineage", "__version__"} <= set(names)
    assert {cls.__name__ for cls in caches.METHODS.values()} <= set(names)
    for name in names:
        assert getattr(fathom, name) is not None
    assert fathom.TreeKV is caches.TreeKV


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="no attribute 'TreeKv' \\(did you mean 'TreeKV'\\?\\)"):
        _ = fathom.TreeKv
