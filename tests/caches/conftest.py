import pytest
import torch
from cache_cases import FAMILIES, VOCABULARY, get_model

from fathom.caches import METHODS


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> torch.nn.Module:
    return get_model(family)


@pytest.fixture
def llama() -> torch.nn.Module:
    return get_model("llama")


@pytest.fixture(params=sorted(METHODS))
def method_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(2))
