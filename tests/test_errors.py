"""Every wrong call raises RuntimeError with a text that names the argument, what was expected and what was given."""

import pytest
import torch
from common import DEVICES
from expecttest import TestCase
from specs import SPECS, Dtypes
from test_fake import call, error_parameters, expected_text

import deformc
from deformc import _library


@pytest.mark.parametrize("device", DEVICES)
@error_parameters()
def test_errors(spec, error, device):
    # No other device may exist; the meta device always does.
    with pytest.raises(RuntimeError) as raised:
        call(spec, error, error.make(device, "meta"))
    assert str(raised.value) == expected_text(error, device, "meta")


@pytest.mark.parametrize("device", DEVICES)
@error_parameters(lambda error: error.level != "backward")
def test_errors_of_differentiable_calls(spec, error, device):
    arguments = error.make(device, "meta")
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            arguments[name] = value.detach().requires_grad_()
    with pytest.raises(RuntimeError) as raised:
        call(spec, error, arguments)
    assert str(raised.value) == expected_text(error, device, "meta")


@pytest.mark.parametrize("key", ["CUDA", "MPS"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_device_without_kernels(spec, key):
    """One sentence, after the arguments are found right. Tensors of the CPU stand in for those of the device."""
    device = {name: device for device, name in _library.DEVICES.items()}[key]
    if deformc.backends()[device].available:
        pytest.skip(f"there are kernels for {device}")
    arguments = spec.samples[0].make("cpu", Dtypes(torch.float32, torch.float32, torch.float32), 0)
    grad_output = spec.function(**arguments)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    needs = frozenset(spec.differentiable)
    for op, values in (
        (spec.op, spec.op_arguments(arguments)),
        (spec.backward_op, spec.backward_arguments(arguments, grad_output, needs)),
    ):
        with pytest.raises(RuntimeError) as raised:
            op.redispatch(keys, *values)
        name = op._schema.name.split("::")[1]
        reason = deformc.backends()[device].reason
        assert str(raised.value) == f"{name}: no kernel for {device} tensors: {reason}"


class TestTexts(TestCase):
    """A few of the texts as the user sees them."""

    def text(self, **changes):
        arguments = {
            "input": torch.zeros(2, 4, 5, 5),
            "offset": torch.zeros(2, 18, 5, 5),
            "weight": torch.zeros(8, 4, 3, 3),
            "padding": 1,
        }
        with pytest.raises(RuntimeError) as raised:
            deformc.deform_conv2d(**arguments | changes)
        return str(raised.value)

    def test_offset_of_another_image_size(self):
        self.assertExpectedInline(
            self.text(offset=torch.zeros(2, 18, 9, 9)),
            """deform_conv2d: offset must have shape [N, 2*G*Kh*Kw, Ho, Wo] = [2, 18, 5, 5], got [2, 18, 9, 9]""",
        )

    def test_offset_channels(self):
        self.assertExpectedInline(
            self.text(offset=torch.zeros(2, 9, 5, 5)),
            """deform_conv2d: offset must have shape [N, 2*G*Kh*Kw, Ho, Wo] = [2, 18, 5, 5], got [2, 9, 5, 5]""",
        )

    def test_stride(self):
        self.assertExpectedInline(self.text(stride=0), """deform_conv2d: stride must be at least 1, got [0, 0]""")

    def test_padding(self):
        self.assertExpectedInline(
            self.text(padding="full"),
            """deform_conv2d: padding must be an int, a pair of ints, "same" or "valid", got 'full'""",
        )

    def test_kernel(self):
        self.assertExpectedInline(
            self.text(weight=torch.zeros(8, 4, 9, 9)),
            """deform_conv2d: kernel must not be larger than the padded input, [7, 7], got [9, 9]""",
        )

    def test_groups(self):
        self.assertExpectedInline(
            self.text(weight=torch.zeros(8, 3, 3, 3)),
            """deform_conv2d: weight must have shape [O, C/groups, Kh, Kw] with C/groups dividing C = 4, got [8, 3, 3, 3]""",  # noqa: E501
        )

    def test_dtype(self):
        self.assertExpectedInline(
            self.text(weight=torch.zeros(8, 4, 3, 3, dtype=torch.float16)),
            """deform_conv2d: weight must have the dtype of input, float32, got float16""",
        )
