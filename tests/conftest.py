"""Settings that all tests share: no network, one thread, one GPU where there are several."""

import gc
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub as a folder: what HfApi would be asked."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    place = tmp_path / "hub"

    def create_repo(self, repo_id, **_):
        (place / repo_id).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns=None, commit_message, **_):
        ignored = shutil.ignore_patterns(*(ignore_patterns or ()))
        shutil.copytree(folder_path, place / repo_id, ignore=ignored, dirs_exist_ok=True)
        return f"hub://{repo_id}#{commit_message}"

    def load(path, token=None, **_):
        file = place / path / "README.md" if (place / path).is_dir() else Path(path)
        if not file.exists():
            raise EntryNotFoundError("none")
        return huggingface_hub.ModelCard(file.read_text())

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub.ModelCard, "load", staticmethod(load))
    return place
