from pathlib import Path

import pytest
import torch
from cache_cases import FAMILIES, SHARED, SMALL, VOCABULARY, get_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(autouse=True)
def shared_models_stay_as_they_are():
    """All tests read the same models: one that moves, casts, trains or hooks one would fail others, not itself."""
    yield
    for family, model in SHARED.items():
        places = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
        hooked = [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]
        stands = places, model.training, model.config._attn_implementation, hooked
        expected = {("cpu", torch.float32)}, False, "sdpa", []
        assert stands == expected, f"this test left the shared {family} as {stands}: copy.deepcopy it first"


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> torch.nn.Module:
    return get_model(family)


@pytest.fixture
def llama() -> torch.nn.Module:
    return get_model("llama")


@pytest.fixture(params=sorted(SMALL))
def method_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama saved with a tokenizer of ten words, and a text of 100 tokens."""
    path = tmp_path_factory.mktemp("model")
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    core = Tokenizer(models.WordLevel({"<unk>": 0, **{word: i + 1 for i, word in enumerate(words)}}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<unk>").save_pretrained(path)
    get_model("llama").save_pretrained(path)
    (path / "text.txt").write_text(" ".join(words * 10))
    return path
