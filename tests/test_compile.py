"""torch.compile: no graph breaks, one compilation for all sizes, eager's results."""

import itertools

import pytest
import torch
from common import (
    DEVICES,
    FLOAT32,
    SIMULATED,
    assert_close,
    assert_same_layout,
    gradients,
    parametrize_samples,
    random_like,
    tensors_of,
    widest_only,
)
from specs.deform_conv2d import channels_last, problem

import deformc

SIZES = ((2, 17, 23), (3, 18, 20), (5, 32, 24), (64, 20, 18))
BACKENDS = ("eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow))

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def frames_compiled():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_mask", [True, False], ids=["mask", "no_mask"])
@pytest.mark.parametrize("with_gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("backend", BACKENDS)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_compilation_for_all_sizes(device, backend, with_gradients, with_mask):
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(deformc.deform_conv2d, fullgraph=True, dynamic=True, backend=backend)
    for n, height, width in SIZES:
        # No two sizes of the first call are equal, or dynamo would make it a condition that they stay so.
        make = problem(n=n, c=8, size=(height, width), o=6, mask=with_mask, bias=with_mask, groups=2, offset_groups=2)
        arguments = make(device, FLOAT32, 0)
        if with_gradients:
            wanted = [name for name in ("input", "offset", "weight", "bias", "mask") if arguments[name] is not None]
            output, actual = gradients(compiled, arguments, wanted)
            expected_output, expected = gradients(deformc.deform_conv2d, arguments, wanted)
            for name in wanted:
                assert_close(actual[name], expected[name], name)
        else:
            output, expected_output = compiled(**arguments), deformc.deform_conv2d(**arguments)
        assert_close(output, expected_output)
    assert frames_compiled() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_stride_padding_and_dilation_are_constants_of_the_graph(device):
    """Other numbers make another graph; the same ones do not."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(deformc.deform_conv2d, fullgraph=True, dynamic=False, backend="eager")
    for stride, _ in itertools.product((1, 2), range(2)):
        arguments = problem(size=(9, 11), stride=stride)(device, FLOAT32, 0)
        assert_close(compiled(**arguments), deformc.deform_conv2d(**arguments))
    assert frames_compiled() == 2


@parametrize_samples(lambda sample: sample.core or not sample.op_level or "nan_result" in sample.tags, widest_only)
def test_samples(device, spec, sample, dtypes):
    """Eager's values, NaN where eager has NaN, and eager's layouts."""
    arguments = sample.make(device, dtypes, 0)
    wanted = tensors_of(spec, arguments)
    grad_output = random_like(spec.function(**arguments))
    expected_output, expected = gradients(spec.function, arguments, wanted, grad_output)
    compiled = torch.compile(spec.function, fullgraph=True, backend="aot_eager")
    output, actual = gradients(compiled, arguments, wanted, grad_output)
    results = {name: (actual[name], expected[name]) for name in wanted} | {"output": (output, expected_output)}
    for name, (one, other) in results.items():
        assert_close(one, other, name)
        assert_same_layout(one, other, name)


class ChannelsLastBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4, 3, 3))
        self.offset = torch.nn.Conv2d(4, 18, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, 6)

    def forward(self, input):
        return self.norm(deformc.deform_conv2d(input, self.offset(input), self.weight, padding=1)).relu()


@pytest.mark.slow
@pytest.mark.skipif(bool(SIMULATED), reason="Inductor's own kernels need the device's compiler")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_block_in_inductor(device, memory_format):
    """Between operators whose layout Inductor may choose, trained and not."""
    block = ChannelsLastBlock().to(device)
    compiled = torch.compile(block, fullgraph=True)
    input = torch.randn(2, 4, 9, 11, device=device).contiguous(memory_format=memory_format)
    with torch.no_grad():
        assert_close(compiled(input), block(input), factor=4)
    parameters = list(block.parameters())
    expected = torch.autograd.grad(block(input).square().sum(), parameters)
    actual = torch.autograd.grad(compiled(input).square().sum(), parameters)
    for (name, _), one, other in zip(block.named_parameters(), actual, expected, strict=True):
        assert_close(one, other, name, factor=8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layout_of_compiled_output(device, backend):
    compiled = torch.compile(deformc.deform_conv2d, fullgraph=True, backend=backend)
    for layouts in ({}, {"input": channels_last}):
        arguments = problem(layouts=layouts)(device, FLOAT32, 0)
        assert_same_layout(compiled(**arguments), deformc.deform_conv2d(**arguments))


@pytest.mark.parametrize("device", DEVICES)
def test_autograd_in_the_graph_without_optional_arguments(device):
    """mask and bias change from None to tensors and back: two graphs, both right."""
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(deformc.deform_conv2d, fullgraph=True, backend="aot_eager")
    for present in (True, False, True):
        arguments = problem(mask=present, bias=present)(device, FLOAT32, 0)
        output, actual = gradients(compiled, arguments, ("input", "offset"))
        expected_output, expected = gradients(deformc.deform_conv2d, arguments, ("input", "offset"))
        assert_close(output, expected_output)
        for name in actual:
            assert_close(actual[name], expected[name], name)
    assert frames_compiled() == 2
