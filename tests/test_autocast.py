"""Autocast narrows data and leaves coordinates, masks and float64 alone."""

import itertools

import pytest
import torch
from common import (
    DEVICES,
    FLOAT32,
    all_dtypes,
    assert_close,
    data_names,
    deterministic,
    float32_only,
    gradients,
    parametrize_samples,
    tensors_of,
)
from specs import Dtypes
from specs.deform_conv2d import problem
from torch._subclasses.fake_tensor import FakeTensorMode

import deformc

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_disabled_autocast_changes_nothing(device, dtype):
    arguments = problem()(device, FLOAT32, 0)
    with torch.autocast(device, dtype=dtype), torch.autocast(device, enabled=False):
        assert deformc.deform_conv2d(**arguments).dtype == torch.float32


# ---- for every operator ----------------------------------------------------------------------------------------------

HALVES = (torch.float16, torch.bfloat16)


def any_dtypes(spec, device, *, mixed):
    """Also those that an operator refuses outside of autocast."""
    for data, others in itertools.product((torch.float32, *HALVES), repeat=2):
        yield Dtypes(data, others, others)


def as_autocast_makes_it(data, arguments, dtype):
    def converted(name, value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if name in data:
            return value.to(dtype)
        return value.float() if value.dtype in HALVES and value.dtype != dtype else value

    return {name: converted(name, value) for name, value in arguments.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@parametrize_samples(lambda sample: sample.core, any_dtypes)
def test_any_dtypes(device, spec, sample, dtypes, dtype):
    """Values and gradients are those of the narrowed data, whatever the tensors were."""
    arguments = sample.make(device, dtypes, 0)
    wanted, data = tensors_of(spec, arguments), data_names(sample)

    def narrow(**arguments):
        return spec.function(**as_autocast_makes_it(data, arguments, dtype))

    def function(**arguments):
        with torch.autocast(device, dtype=dtype):
            return spec.function(**arguments)

    with deterministic():
        expected, expected_gradients = gradients(narrow, arguments, wanted)
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        with deterministic():
            actual, actual_gradients = gradients(call, arguments, wanted)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        for name in wanted:
            assert actual_gradients[name].dtype == arguments[name].dtype
            torch.testing.assert_close(
                actual_gradients[name], expected_gradients[name], rtol=0, atol=0, equal_nan=True, msg=name
            )
        torch._dynamo.reset()


def float64_data(spec, device, *, mixed):
    return (dtypes for dtypes in all_dtypes(spec, device, mixed=mixed) if dtypes.data == torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@parametrize_samples(lambda sample: sample.core, float64_data)
def test_float64_data_stays_as_it_is(device, spec, sample, dtypes, dtype):
    arguments = sample.make(device, dtypes, 0)
    with torch.autocast(device, dtype=dtype):
        output = spec.function(**arguments)
    assert output.dtype == torch.float64
    torch.testing.assert_close(output, spec.function(**arguments), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@parametrize_samples(lambda sample: sample.core and sample.smooth, float32_only)
def test_transforms(device, spec, sample, dtypes, dtype):
    """torch.func comes before autocast: gradients, tangents and mapped calls are those of the narrowed data."""
    arguments = sample.make(device, dtypes, 0)
    names, data = tensors_of(spec, arguments), data_names(sample)
    tensors = tuple(arguments[name] for name in names)

    def narrow(*tensors):
        changed = arguments | dict(zip(names, tensors, strict=True))
        return spec.function(**as_autocast_makes_it(data, changed, dtype))

    def function(*tensors):
        with torch.autocast(device, dtype=dtype):
            return spec.function(**arguments | dict(zip(names, tensors, strict=True)))

    def applied(call):
        def loss(*tensors):
            return call(*tensors).float().sin().sum()

        positions = tuple(range(len(tensors)))
        batches = tuple(torch.stack([tensor, tensor / 2]) for tensor in tensors)
        results = (
            torch.func.grad(loss, argnums=positions)(*tensors),
            torch.func.jvp(call, tensors, tensors),
            torch.func.vmap(call)(*batches),
            torch.func.vmap(torch.func.grad(loss, argnums=positions))(*batches),
            torch.func.jvp(torch.func.grad(loss), tensors, tensors),
        )
        return torch.utils._pytree.tree_leaves(results)

    for one, other in zip(applied(function), applied(narrow), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("device_type", ["cuda", "mps"])
@parametrize_samples(lambda sample: sample.core and sample.op_level, any_dtypes)
def test_rule_of_devices_that_are_not_here(device, spec, sample, dtypes, device_type):
    """Fake tensors pass the same keys of the dispatcher as real ones; torch.autocast itself wants the device."""
    arguments = sample.make("cpu", dtypes, 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments = {
            name: torch.empty_like(value, device=device_type) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, torch.bfloat16)
        try:
            output = spec.op(*spec.op_arguments(arguments))
        finally:
            torch.set_autocast_enabled(device_type, before[0])
            torch.set_autocast_dtype(device_type, before[1])
    assert output.dtype == torch.bfloat16
    assert output.device.type == device_type


@parametrize_samples(lambda sample: sample.core and sample.smooth, float32_only)
def test_gradient_scaler(device, spec, sample, dtypes):
    """float16 gradients that would vanish come through, and an overflow skips the step."""
    arguments = sample.make(device, dtypes, 0)
    name = spec.differentiable[0]
    parameter = torch.nn.Parameter(arguments[name])
    optimizer = torch.optim.SGD([parameter], lr=2.0**20)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**14)

    def step(factor):
        before = parameter.detach().clone()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            output = spec.function(**arguments | {name: parameter})
            result = (output * factor).sum()
        scaler.scale(result).backward()
        scaler.step(optimizer)
        scaler.update()
        return before - parameter.detach()

    _, expected = gradients(spec.function, arguments, (name,))
    moved = step(2.0**-26)  # zero in float16
    assert_close(moved.half(), expected[name] * 2.0**-6, factor=8)
    assert not step(float("inf")).any()
    assert scaler.get_scale() < 2.0**14


# ---- in a network ----------------------------------------------------------------------------------------------------


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
        with torch.autocast(input.device.type, dtype=self.dtype):
            return self.network(input)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["eager", "inside", "outside", "export"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("device", DEVICES)
def test_network(device, how, dtype, train):
    if how == "export" and train:
        return
    network, input = Network().to(device), torch.randn(2, 3, 9, 11, device=device)
    with torch.autocast(device, dtype=dtype):
        expected = network(input)
    assert expected.dtype == dtype

    if how == "inside":
        function = torch.compile(AutocastInside(network, dtype), fullgraph=True, backend="aot_eager")
    elif how == "export":
        function = torch.export.export(AutocastInside(network, dtype), (input,)).module()
    else:
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager") if how == "outside" else network

        def function(input):
            with torch.autocast(device, dtype=dtype):
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
