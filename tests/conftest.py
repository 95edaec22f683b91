import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """No compiled code of another test: counts of compilations start from nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
