"""Settings that all tests share: no network, one thread, one GPU where there are several."""

import gc
import os

for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # training refuses a process that sees more

import pytest  # noqa: E402  after the settings
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(params=["rows", "flat"])
def form(request, monkeypatch):
    """How step-by-step methods gather tokens: by row; or of all rows end to end as on a GPU, with a dense mask."""
    from fathom.models.steps.stack import StepStack

    monkeypatch.setattr(StepStack, "flat_pays", lambda stack: request.param == "flat")
    return request.param


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Sets aside what earlier files left, modules and compiled graphs above all. Every full collection would look
    through it again, and training makes several: half of its tests' time."""
    gc.collect()
    gc.freeze()
