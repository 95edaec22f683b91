"""The forward operator against the reference, for every sample and dtype."""

import torch
from common import (
    assert_close,
    float32_only,
    is_channels_last,
    parametrize_samples,
    random_like,
    tensors_of,
    widened,
    with_grad,
)


@parametrize_samples()
def test_forward(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    output = spec.function(**arguments)
    # In float64 from the same, possibly narrow, inputs: what remains is the operator's own rounding.
    assert output.dtype == dtypes.data
    assert_close(output, spec.reference(**widened(arguments)))


@parametrize_samples(lambda sample: sample.op_level, float32_only)
def test_output_layout(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    output = spec.function(**arguments)
    channels_last = is_channels_last(arguments[spec.differentiable[0]])
    assert output.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@parametrize_samples(lambda sample: sample.core)
def test_arguments_are_not_modified(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    output = spec.function(**with_grad(arguments, tensors_of(spec, arguments)))
    output.backward(random_like(output))
    for name, value in before.items():
        torch.testing.assert_close(arguments[name], value, rtol=0, atol=0, equal_nan=True)
