"""Autocast narrows data and leaves coordinates, masks and float64 alone."""

import contextlib

import pytest
import torch
from common import assert_close, gradients
from specs import Dtypes
from specs.deform_conv2d import problem

import deformc

DTYPES = (torch.bfloat16, torch.float16)
FLOAT32 = Dtypes(torch.float32, torch.float32, torch.float32)


def autocast(dtype):
    return torch.autocast("cpu", dtype=dtype)


@contextlib.contextmanager
def op_calls():
    """The dtypes of the operator's tensor arguments, as they reach the kernel."""
    calls = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.deformc.deform_conv2d.default:
                calls.append(tuple(arg.dtype if isinstance(arg, torch.Tensor) else None for arg in args[:5]))
            return function(*args, **kwargs or {})

    with Record():
        yield calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optional", [True, False], ids=["mask_and_bias", "neither"])
def test_data_is_narrowed_and_coordinates_are_not(dtype, optional):
    arguments = problem(mask=optional, bias=optional)("cpu", FLOAT32, 0)
    with autocast(dtype), op_calls() as calls:
        output = deformc.deform_conv2d(**arguments)
    optional_dtypes = (dtype, torch.float32) if optional else (None, None)
    assert calls == [(dtype, torch.float32, dtype, *optional_dtypes)]
    assert output.dtype == dtype
    narrow = {
        name: value.to(dtype) if name in ("input", "weight", "bias") and value is not None else value
        for name, value in arguments.items()
    }
    assert torch.equal(output, deformc.deform_conv2d(**narrow))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float64_stays(dtype):
    arguments = problem()("cpu", Dtypes(torch.float64, torch.float64, torch.float64), 0)
    with autocast(dtype):
        output = deformc.deform_conv2d(**arguments)
    assert output.dtype == torch.float64
    assert torch.equal(output, deformc.deform_conv2d(**arguments))


def test_mixed_input_becomes_one_dtype():
    """A half-precision activation, float32 parameters and coordinates of either: what a network under autocast has."""
    for coordinates in (torch.float32, torch.bfloat16):
        arguments = problem()("cpu", Dtypes(torch.float32, coordinates, coordinates), 0)
        arguments["input"] = arguments["input"].bfloat16()
        with autocast(torch.bfloat16), op_calls() as calls:
            deformc.deform_conv2d(**arguments)
        assert calls == [(torch.bfloat16, coordinates, torch.bfloat16, torch.bfloat16, coordinates)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_disabled_autocast_changes_nothing(dtype):
    arguments = problem()("cpu", FLOAT32, 0)
    with autocast(dtype), torch.autocast("cpu", enabled=False):
        assert deformc.deform_conv2d(**arguments).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_dtype_of_the_arguments(dtype):
    arguments = problem()("cpu", FLOAT32, 0)
    wanted = ("input", "offset", "weight", "bias", "mask")

    def function(**arguments):
        with autocast(dtype):
            return deformc.deform_conv2d(**arguments)

    _, actual = gradients(function, arguments, wanted)
    _, expected = gradients(deformc.deform_conv2d, arguments, wanted)
    for name in wanted:
        assert actual[name].dtype == torch.float32
        # Each argument was rounded once, which changes a sum by a few roundings.
        assert_close(actual[name].to(dtype), expected[name], name, factor=4)


class Network(torch.nn.Module):
    """Convolution, offsets and mask predicted from its result, deformable convolution."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.points = torch.nn.Conv2d(8, 27, 3, padding=1)
        self.weight = torch.nn.Parameter(torch.randn(5, 8, 3, 3) / 8)
        self.bias = torch.nn.Parameter(torch.randn(5))

    def forward(self, input):
        features = self.first(input).relu()
        offset, mask = self.points(features).split([18, 9], dim=1)
        return deformc.deform_conv2d(features, offset, self.weight, self.bias, padding=1, mask=mask.sigmoid())


class AutocastInside(torch.nn.Module):
    def __init__(self, network, dtype):
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, input):
        with autocast(self.dtype):
            return self.network(input)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["eager", "inside", "outside", "export"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_network(how, dtype, train):
    if how == "export" and train:
        return
    network, input = Network(), torch.randn(2, 3, 9, 11)
    with autocast(dtype):
        expected = network(input)
    assert expected.dtype == dtype

    if how == "inside":
        function = torch.compile(AutocastInside(network, dtype), fullgraph=True, backend="aot_eager")
    elif how == "export":
        function = torch.export.export(AutocastInside(network, dtype), (input,)).module()
    else:
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager") if how == "outside" else network

        def function(input):
            with autocast(dtype):
                return compiled(input)

    with torch.set_grad_enabled(train):
        output = function(input)
    assert output.dtype == dtype
    assert_close(output, expected, factor=4)
    if train:
        parameters = list(network.parameters())
        actual = torch.autograd.grad(output.float().square().sum(), parameters)
        wanted = torch.autograd.grad(expected.float().square().sum(), parameters)
        for (name, parameter), one, other in zip(network.named_parameters(), actual, wanted, strict=True):
            assert one.dtype == parameter.dtype
            assert one.isfinite().all()
            assert_close(one.to(dtype), other, name, factor=4)
