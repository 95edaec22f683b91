"""Bitwise the same results in every run, where torch is asked for deterministic algorithms."""

import pytest
import torch
from common import (
    DEVICES,
    FLOAT32,
    SIMULATED,
    all_dtypes,
    assert_close,
    deterministic,
    gradients,
    parametrize_samples,
    random_like,
    tensors_of,
    widened,
)
from specs import SPECS

PROBLEMS = [pytest.param(spec, sample, id=f"{spec}-{sample.name}") for spec in SPECS for sample in spec.parallel]


def crowded(spec, sample, device):
    """Coordinates so near to each other that the sums of many samples meet in few pixels."""
    arguments = sample.make(device, FLOAT32, 0)
    coordinates = {"offset": 0.05, "sampling_locations": 0.02}
    for name, scale in coordinates.items():
        if name in arguments:
            arguments[name] = arguments[name] * scale + (0 if name == "offset" else 0.4)
    return arguments


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "sample"), PROBLEMS)
def test_twenty_runs(device, spec, sample):
    arguments = crowded(spec, sample, device)
    grad_output = random_like(spec.function(**arguments))
    wanted = tensors_of(spec, arguments)
    with deterministic():
        output, expected = gradients(spec.function, arguments, wanted, grad_output)
        for _ in range(4 if SIMULATED else 20):
            again, actual = gradients(spec.function, arguments, wanted, grad_output)
            assert torch.equal(again, output)
            for name in wanted:
                assert torch.equal(actual[name], expected[name]), name


@parametrize_samples(lambda sample: sample.op_level, all_dtypes)
def test_gradients(device, spec, sample, dtypes):
    """The deterministic kernels compute what the others do."""
    arguments = sample.make(device, dtypes, 0)
    wanted = tensors_of(spec, arguments)
    grad_output = random_like(spec.function(**arguments))
    with deterministic():
        _, actual = gradients(spec.function, arguments, wanted, grad_output)
    _, expected = gradients(spec.reference, widened(arguments), wanted, grad_output)
    for name in wanted:
        assert_close(actual[name], expected[name], name)


@pytest.mark.parametrize("device", [device for device in DEVICES if device != "cpu"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_order_of_sums_matters_otherwise(device, spec):
    """What the tests above rely on: these sums depend on their order, which nobody fixes."""
    arguments = crowded(spec, spec.parallel[0], device)
    grad_output = random_like(spec.function(**arguments))
    name = spec.differentiable[0]
    runs = [gradients(spec.function, arguments, (name,), grad_output)[1][name] for _ in range(4)]
    assert not all(torch.equal(run, runs[0]) for run in runs)
