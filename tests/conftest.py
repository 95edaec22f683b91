"""DEFORMC_TEST_DEVICES names the devices to test, "cpu" if it is not set. DEFORMC_SIMULATE=mps simulates one."""

import pytest
import torch
from sim import build

# Before anything asks torch for the device, and before deformc looks for its kernels.
build.simulate_as_asked()

from common import SIMULATED, deterministic  # noqa: E402


def pytest_collection_modifyitems(config, items):
    """With a simulated device, only what runs on it: tests that take a device, and those of the simulation."""
    if SIMULATED is None:
        return

    def takes_a_device(item):
        return "device" in getattr(getattr(item, "callspec", None), "params", {})

    kept = [item for item in items if takes_a_device(item) or item.path.name == "test_simulator.py"]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def deterministic_algorithms():
    """For tests that want the same bits from two calls on any device."""
    with deterministic():
        yield


@pytest.fixture
def fresh_compiler():
    """No compiled code of another test: counts of compilations start from nothing."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
