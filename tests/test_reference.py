"""The references themselves: derivatives of both orders and modes against finite differences, and torch.func."""

import torch
from common import parametrize_samples, tensors_of, with_grad
from test_gradients import float64_only
from torch.func import grad, jacrev, jvp, vmap


def smooth_and_core(sample):
    return sample.smooth and sample.core


def function_of_tensors(spec, arguments):
    wanted = tensors_of(spec, arguments)
    leaves = with_grad(arguments, wanted)

    def function(*tensors):
        return spec.reference(**arguments | dict(zip(wanted, tensors, strict=True)))

    return function, [leaves[name] for name in wanted]


@parametrize_samples(smooth_and_core, float64_only)
def test_derivatives(device, spec, sample, dtypes):
    function, tensors = function_of_tensors(spec, sample.make(device, dtypes, 0))
    torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True, fast_mode=True)


@parametrize_samples(smooth_and_core, float64_only)
def test_transforms_agree_with_autograd(device, spec, sample, dtypes):
    function, tensors = function_of_tensors(spec, sample.make(device, dtypes, 0))
    arguments = tuple(range(len(tensors)))
    expected = torch.autograd.grad(function(*tensors).sum(), tensors)
    tensors = tuple(tensor.detach() for tensor in tensors)
    for transform in (grad, jacrev):
        actual = transform(lambda *tensors: function(*tensors).sum(), argnums=arguments)(*tensors)
        torch.testing.assert_close(actual, expected)
    _, tangent = jvp(function, tensors, tensors)
    torch.testing.assert_close(tangent.sum(), sum((e * t).sum() for e, t in zip(expected, tensors, strict=True)))
    stacked = tuple(torch.stack([tensor, 2 * tensor]) for tensor in tensors)
    separate = torch.stack([function(*tensors), function(*(2 * tensor for tensor in tensors))])
    torch.testing.assert_close(vmap(function)(*stacked), separate)
