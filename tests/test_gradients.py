"""Every gradient against the reference's autograd."""

import pytest
import torch
from common import (
    assert_close,
    float32_only,
    float64_only,
    gradients,
    is_channels_last,
    parametrize_samples,
    random_like,
    subsets,
    tensors_of,
    widened,
    with_grad,
)
from specs.layouts import transposed


@parametrize_samples()
def test_gradients(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    wanted = tensors_of(spec, arguments)
    grad_output = random_like(spec.function(**arguments))
    _, actual = gradients(spec.function, arguments, wanted, grad_output)
    _, expected = gradients(spec.reference, widened(arguments), wanted, grad_output)
    for name in wanted:
        assert actual[name].dtype == arguments[name].dtype, name
        assert actual[name].shape == arguments[name].shape, name
        assert_close(actual[name], expected[name], name)


@parametrize_samples(lambda sample: sample.core, float32_only)
def test_each_combination_of_gradients(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    grad_output = random_like(spec.function(**arguments))
    _, expected = gradients(spec.reference, widened(arguments), tensors_of(spec, arguments), grad_output)
    for wanted in subsets(tensors_of(spec, arguments)):
        inputs = with_grad(arguments, wanted)
        output = spec.function(**inputs)
        assert output.requires_grad == bool(wanted)
        if wanted:
            output.backward(grad_output)
        for name in tensors_of(spec, arguments):
            if name in wanted:
                assert_close(inputs[name].grad, expected[name], name)
            else:
                assert inputs[name].grad is None, name


@parametrize_samples(lambda sample: sample.core and sample.op_level, float32_only)
def test_backward_op_computes_what_it_is_asked_for(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    grad_output = random_like(spec.function(**arguments))
    _, expected = gradients(spec.reference, widened(arguments), tensors_of(spec, arguments), grad_output)
    for needs in subsets(tensors_of(spec, arguments)):
        results = spec.backward_op(*spec.backward_arguments(arguments, grad_output, needs))
        for name, result in zip(spec.differentiable, results, strict=True):
            if name in needs:
                assert_close(result.reshape(expected[name].shape), expected[name], name)
            else:
                assert result.shape == (0,), name


@parametrize_samples(lambda sample: sample.op_level, float32_only)
def test_gradient_layouts(device, spec, sample, dtypes):
    """The first argument's gradient has its layout, channels_last or contiguous; the others' are contiguous."""
    arguments = sample.make(device, dtypes, 0)
    wanted = tensors_of(spec, arguments)
    _, actual = gradients(spec.function, arguments, wanted)
    for name in wanted:
        first = name == spec.differentiable[0]
        memory_format = torch.channels_last if first and is_channels_last(arguments[name]) else torch.contiguous_format
        assert actual[name].is_contiguous(memory_format=memory_format), name


GRAD_OUTPUT_LAYOUTS = {
    "expanded_scalar": lambda grad: grad.flatten()[:1].reshape(()).expand(grad.shape),
    "expanded_batch": lambda grad: grad[:1].expand(grad.shape),
    "transposed": lambda grad: grad.mT.contiguous().mT,
    "second_dimension_last": lambda grad: grad.movedim(1, -1).contiguous().movedim(-1, 1),  # channels_last of images
    "reversed_dimensions": transposed,
    "every_second": lambda grad: torch.stack([grad, grad.new_full(grad.shape, 7.0)], dim=-1)[..., 0],
    "storage_offset": lambda grad: torch.cat([grad.new_full(grad.shape, 7.0), grad])[len(grad) :],
}


@pytest.mark.parametrize("layout", GRAD_OUTPUT_LAYOUTS)
@parametrize_samples(lambda sample: sample.core and sample.op_level)
def test_strides_of_the_output_gradient(device, spec, sample, dtypes, layout):
    arguments = sample.make(device, dtypes, 0)
    wanted = tensors_of(spec, arguments)
    grad_output = GRAD_OUTPUT_LAYOUTS[layout](random_like(spec.function(**arguments)))
    _, actual = gradients(spec.function, arguments, wanted, grad_output)
    _, expected = gradients(spec.reference, widened(arguments), wanted, grad_output)
    for name in wanted:
        assert_close(actual[name], expected[name], name)


@parametrize_samples(lambda sample: "empty" in sample.tags, float32_only)
def test_gradients_of_nothing_are_zero(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    wanted = [name for name in tensors_of(spec, arguments) if name != "bias"]  # counts the output pixels that exist
    _, actual = gradients(spec.function, arguments, wanted)
    for name in wanted:
        assert torch.equal(actual[name], torch.zeros_like(actual[name])), name
        assert actual[name].shape == arguments[name].shape, name


@parametrize_samples(lambda sample: sample.smooth, float64_only)
def test_gradcheck(device, spec, sample, dtypes):
    """Against finite differences: what the reference and the operator could have wrong in common."""
    arguments = sample.make(device, dtypes, 0)
    wanted = tensors_of(spec, arguments)

    def function(*tensors):
        return spec.function(**arguments | dict(zip(wanted, tensors, strict=True)))

    tensors = with_grad(arguments, wanted)
    torch.autograd.gradcheck(function, [tensors[name] for name in wanted], fast_mode=arguments[wanted[0]].numel() > 100)


@parametrize_samples(lambda sample: "nan_offset" in sample.tags)
def test_nan_positions_add_nothing_to_the_gradient_of_the_data(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    data = spec.differentiable[0]
    _, actual = gradients(spec.function, arguments, (data,))
    assert actual[data].isfinite().all()
