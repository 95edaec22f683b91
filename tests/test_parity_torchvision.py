"""torchvision.ops.deform_conv2d computes the same, wherever it computes at all."""

import pytest
import torch
from common import assert_close, gradients, parametrize_samples, random_like, tensors_of
from specs import Dtypes
from specs.deform_conv2d import SPEC

reason = "torchvision is not installed for this torch: nothing to compare with"
torchvision = pytest.importorskip("torchvision", reason=reason)


# Samples on which deformc differs from torchvision on purpose, and how.
DIFFERENT = {
    "wide": "torchvision rounds offset + position to the dtype of the offset, which shows in float32",
    "tall": "as wide",
    "tiny_negative_offsets": "the same sum, here rounded into the next cell",
    "nan_mask": "torchvision multiplies a NaN mask by the zero derivative of a point outside of the image",
}


def float64_and_float32(spec, device, *, mixed):
    for dtype in (torch.float64, torch.float32):
        yield Dtypes(dtype, dtype, dtype)


def supported(sample):
    """torchvision reads outside the image for offsets that no int32 holds, and takes no empty or unbatched tensors."""
    if sample.name not in DIFFERENT and sample.op_level and "empty" not in sample.tags:
        arguments = sample.make("cpu", Dtypes(torch.float64, torch.float64, torch.float64), 0)
        return bool((arguments["offset"].abs() < 1e6).all())
    return False


@parametrize_samples(supported, float64_and_float32, [SPEC])
def test_forward_and_gradients(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    wanted = tensors_of(spec, arguments)
    grad_output = random_like(spec.function(**arguments))
    output, actual = gradients(spec.function, arguments, wanted, grad_output)
    expected_output, expected = gradients(torchvision.ops.deform_conv2d, arguments, wanted, grad_output)
    # Two sums in float32, each with its own rounding.
    assert_close(output, expected_output, factor=2)
    for name in wanted:
        assert_close(actual[name], expected[name], name, factor=2)
