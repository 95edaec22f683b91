"""What the fake kernels promise about results, and what they refuse."""

import re

import pytest
import torch
from common import (
    DEVICES,
    assert_same_layout,
    float32_only,
    parametrize_samples,
    random_like,
    subsets,
    tensors_of,
)
from specs import SPECS
from torch._subclasses.fake_tensor import FakeTensorMode

import deformc


def to_fake(value, mode):
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def to_meta(value, mode=None):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def assert_same_promise(promised, actual):
    """Layouts agree, on whatever device the promise is made for."""
    assert_same_layout(
        torch.empty_strided(promised.shape, promised.stride(), dtype=promised.dtype, device=actual.device), actual
    )


@pytest.mark.parametrize("convert", [to_fake, to_meta])
@parametrize_samples(lambda sample: sample.op_level)
def test_forward_promise(device, spec, sample, dtypes, convert):
    arguments = sample.make(device, dtypes, 0)
    actual = spec.function(**arguments)
    with FakeTensorMode() as mode:
        converted = {name: convert(value, mode) for name, value in arguments.items()}
    with mode if convert is to_fake else torch.no_grad():
        promised = spec.function(**converted)
    assert_same_promise(promised, actual)


@pytest.mark.parametrize("convert", [to_fake, to_meta])
@parametrize_samples(lambda sample: sample.op_level)
def test_backward_promise(device, spec, sample, dtypes, convert):
    arguments = sample.make(device, dtypes, 0)
    grad_output = random_like(spec.function(**arguments))
    names = tensors_of(spec, arguments)
    choices = subsets(names) if sample.core else (frozenset(names),)
    for needs in choices:
        actual = spec.backward_op(*spec.backward_arguments(arguments, grad_output, needs))
        with FakeTensorMode() as mode:
            converted = {name: convert(value, mode) for name, value in arguments.items()}
            fake_grad = convert(grad_output, mode)
        with mode if convert is to_fake else torch.no_grad():
            promised = spec.backward_op(*spec.backward_arguments(converted, fake_grad, needs))
        for one_promised, one_actual in zip(promised, actual, strict=True):
            assert_same_promise(one_promised, one_actual)


@parametrize_samples(lambda sample: not sample.op_level, float32_only)
def test_public_function_promise(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    actual = spec.function(**arguments)
    with FakeTensorMode() as mode:
        promised = spec.function(**{name: to_fake(value, mode) for name, value in arguments.items()})
    assert_same_promise(promised, actual)


def error_parameters(select=lambda error: True):
    parameters = [
        pytest.param(spec, error, id=f"{spec}-{error.level}-{error.name}")
        for spec in SPECS
        for error in filter(select, spec.errors)
    ]
    return pytest.mark.parametrize(("spec", "error"), parameters)


def call(spec, error, arguments):
    function = {"forward": spec.op, "backward": spec.backward_op, "public": spec.function}[error.level]
    return function(**arguments)


def expected_text(error, device, other):
    # Not str.format: a text may have braces of its own.
    device, other = (f"{name}:0" if name in ("cuda", "mps") else name for name in (device, other))
    return error.message.replace("{device}", device).replace("{other}", other)


# A device's fake tensors need no such device; another device's real ones do.
@pytest.mark.parametrize("device", [*DEVICES, "cuda:0"])
@error_parameters()
def test_errors_of_fake_tensors(spec, error, device):
    other = "cuda:0" if device == "cpu" else "cpu"
    with FakeTensorMode(), pytest.raises(RuntimeError) as raised:
        call(spec, error, error.make(device, other))
    assert str(raised.value) == expected_text(error, device, other)


@error_parameters()
def test_errors_of_meta_tensors(spec, error):
    with pytest.raises(RuntimeError) as raised:
        call(spec, error, error.make("meta", "cpu"))
    assert str(raised.value) == expected_text(error, "meta", "cpu")


def test_error_with_symbolic_sizes(fresh_compiler):
    """Under torch.compile the sentence is the same, with symbols where sizes are not known."""
    function = torch.compile(with_padding_1, fullgraph=True, backend="eager", dynamic=True)
    input, offset, weight = torch.zeros(2, 3, 6, 7), torch.zeros(2, 18, 9, 11), torch.zeros(4, 3, 3, 3)
    with pytest.raises(Exception) as raised:
        function(input, offset, weight)
    sentence = r"deform_conv2d: offset must have shape \[N, 2\*G\*Kh\*Kw, Ho, Wo\] = \[.+\], got \[.+\]"
    assert re.search(sentence, str(raised.value)), str(raised.value)


def with_padding_1(input, offset, weight):
    return deformc.deform_conv2d(input, offset, weight, padding=1)
