"""DEFORMC_TEST_DEVICES names the devices to test, "cpu" if it is not set. DEFORMC_SIMULATE=mps simulates one."""

import pytest
import torch
from sim import build

# Before anything asks torch for the device, and before deformc looks for its kernels.
build.simulate_as_asked()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """No compiled code of another test: counts of compilations start from nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
