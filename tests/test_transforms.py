"""The transforms of torch.func, derivatives of second order and forward mode: the reference's values under the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from common import (
    DEVICES,
    FLOAT64,
    TORCH,
    assert_close,
    float32_only,
    float64_only,
    parametrize_samples,
    subsets,
    tensors_of,
    widened,
    widest_only,
    with_grad,
)
from specs import SPECS, Dtypes
from torch import Tensor, func
from torch.autograd import forward_ad

import deformc
from deformc import _transforms


def smooth(sample):
    return sample.smooth


def core_smooth(sample):
    return sample.smooth and sample.core


def of_tensors(spec, arguments, function=None) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The operator as a function of its differentiable tensors alone, and those."""
    function = function or spec.function
    names = tensors_of(spec, arguments)

    def call(*tensors):
        return function(**arguments | dict(zip(names, tensors, strict=True)))

    return call, tuple(arguments[name] for name in names)


def bare_op(spec) -> Callable[..., Tensor]:
    return lambda **arguments: spec.op(*spec.op_arguments(arguments))


def random(tensors: tuple[Tensor, ...], seed: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype).to(t.device) for t in tensors
    )


def loss(call):
    return lambda *tensors: call(*tensors).sin().sum()


def all_of(tensors):
    return tuple(range(len(tensors)))


def stacked(tensors):
    return tuple(torch.stack([tensor, 0.9 * tensor, tensor.flip(0)]) for tensor in tensors)


# Each takes the function, its tensors, and tangents.
TRANSFORMS: dict[str, Callable] = {
    "grad": lambda f, x, t: func.grad(loss(f), argnums=all_of(x))(*x),
    "vjp": lambda f, x, t: func.vjp(f, *x)[1](f(*x)),
    "jvp": lambda f, x, t: func.jvp(f, x, t),
    "linearize": lambda f, x, t: func.linearize(f, *x)[1](*t),
    "jacrev": lambda f, x, t: func.jacrev(lambda *x: f(*x).flatten()[::7], argnums=all_of(x))(*x),
    "jacfwd": lambda f, x, t: func.jacfwd(loss(f), argnums=all_of(x))(*x),
    "hessian": lambda f, x, t: func.hessian(loss(f), argnums=(1, len(x) - 1))(*x),
    "hessian_of_one": lambda f, x, t: func.hessian(loss(f), argnums=1)(*x),
    "forward_over_reverse": lambda f, x, t: func.jvp(func.grad(loss(f), argnums=all_of(x)), x, t),
    "reverse_over_reverse": lambda f, x, t: func.vjp(func.grad(loss(f), argnums=all_of(x)), *x)[1](t),
    "reverse_over_forward": lambda f, x, t: func.grad(lambda *x: func.jvp(loss(f), x, t)[1], argnums=all_of(x))(*x),
    "third": lambda f, x, t: func.grad(
        lambda *x: func.jvp(func.grad(loss(f), argnums=1), x, t)[1].sin().sum(), argnums=all_of(x)
    )(*x),
    "vmap": lambda f, x, t: func.vmap(f)(*stacked(x)),
    "vmap_data": lambda f, x, t: func.vmap(f, in_dims=(0, *[None] * (len(x) - 1)))(stacked(x)[0], *x[1:]),
    "vmap_positions": lambda f, x, t: func.vmap(f, in_dims=(None, 0, *[None] * (len(x) - 2)))(
        x[0], stacked(x)[1], *x[2:]
    ),
    "nested_vmap": lambda f, x, t: func.vmap(func.vmap(f, in_dims=(0, 1)[:1] * len(x)), in_dims=1, out_dims=1)(
        *(torch.stack([tensor, -tensor], 1) for tensor in stacked(x))
    ),
    "vmap_grad": lambda f, x, t: func.vmap(func.grad(loss(f), argnums=all_of(x)))(*stacked(x)),
    "vmap_jvp": lambda f, x, t: func.vmap(lambda *t: func.jvp(f, x, t)[1])(*stacked(t)),
    "jacobian_vectorized": lambda f, x, t: torch.autograd.functional.jacobian(
        lambda *x: f(*x).flatten()[::7], x, vectorize=True
    ),
}
# Dynamo does not trace them, whatever the function is; torch 2.10's no jacfwd of several arguments at once.
NOT_COMPILED = {"jacobian_vectorized", "linearize"} | ({"jacfwd", "hessian"} if TORCH < (2, 13) else set())


def assert_trees_close(actual, expected, factor: float = 8) -> None:
    actual, expected = (torch.utils._pytree.tree_leaves(tree) for tree in (actual, expected))
    assert len(actual) == len(expected)
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.shape == other.shape, f"result {i}"
        assert_close(one, other, f"result {i}", factor)


@pytest.fixture
def no_slow_loops():
    """torch warns where it maps by a loop for want of a rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


@pytest.mark.usefixtures("no_slow_loops")
@pytest.mark.parametrize("transform", TRANSFORMS)
@parametrize_samples(smooth, widest_only)
def test_eager(device, spec, sample, dtypes, transform):
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, arguments)
    reference, _ = of_tensors(spec, arguments, spec.reference)
    tangents = random(tensors)
    apply = TRANSFORMS[transform]
    assert_trees_close(apply(call, tensors, tangents), apply(reference, tensors, tangents))


@pytest.mark.usefixtures("no_slow_loops")
@pytest.mark.parametrize("transform", TRANSFORMS)
@parametrize_samples(lambda sample: core_smooth(sample) and sample.op_level, widest_only)
def test_bare_op(device, spec, sample, dtypes, transform):
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, arguments, bare_op(spec))
    reference, _ = of_tensors(spec, arguments, spec.reference)
    tangents = random(tensors)
    apply = TRANSFORMS[transform]
    reshaped = lambda *tensors: reference(*tensors).reshape(call(*tensors).shape)  # noqa: E731
    assert_trees_close(apply(call, tensors, tangents), apply(reshaped, tensors, tangents))


def compiled_samples(sample):
    return core_smooth(sample) and sample.op_level


def check_compiled(backend, functions, device, spec, sample, transform, dtypes=FLOAT64):
    arguments = sample.make(device, dtypes, 0)
    reference, tensors = of_tensors(spec, arguments, spec.reference)
    tangents = random(tensors)
    apply = TRANSFORMS[transform]
    expected = apply(reference, tensors, tangents)
    for function in functions:
        call, _ = of_tensors(spec, arguments, function)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, t: apply(call, x, t), fullgraph=True, backend=backend)  # noqa: B023
        assert_trees_close(compiled(tensors, tangents), expected)


@pytest.mark.usefixtures("fresh_compiler", "no_slow_loops")
@pytest.mark.parametrize("transform", sorted(TRANSFORMS.keys() - NOT_COMPILED))
@parametrize_samples(compiled_samples, float64_only)
def test_compiled(device, spec, sample, dtypes, transform):
    check_compiled("aot_eager", (spec.function, bare_op(spec)), device, spec, sample, transform)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler", "no_slow_loops")
@pytest.mark.parametrize("transform", sorted(TRANSFORMS.keys() - NOT_COMPILED))
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device, spec, transform):
    check_compiled("inductor", (spec.function,), device, spec, next(filter(compiled_samples, spec.samples)), transform)


@pytest.mark.usefixtures("no_slow_loops")
@parametrize_samples(core_smooth, widest_only)
def test_every_subset_of_mapped_tensors(device, spec, sample, dtypes):
    """vmap, and vmap(grad) with respect to all and to each tensor, against a loop."""
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, arguments)
    batches = stacked(tensors)
    for mapped in subsets(all_of(tensors)):
        if not mapped:
            continue
        in_dims = tuple(0 if i in mapped else None for i in all_of(tensors))
        inputs = [batches[i] if i in mapped else tensors[i] for i in all_of(tensors)]
        rows = [[batches[i][k] if i in mapped else tensors[i] for i in all_of(tensors)] for k in range(3)]
        assert_close(func.vmap(call, in_dims)(*inputs), torch.stack([call(*row) for row in rows]), f"{mapped}", 4)
        for argnums in (all_of(tensors), *((i,) for i in all_of(tensors))):
            gradient = func.grad(loss(call), argnums=argnums)
            expected = [torch.stack(parts) for parts in zip(*(gradient(*row) for row in rows), strict=True)]
            assert_trees_close(func.vmap(gradient, in_dims)(*inputs), expected)


@pytest.mark.usefixtures("no_slow_loops")
@parametrize_samples(smooth, float64_only)
def test_gradcheck(device, spec, sample, dtypes):
    """First and second derivatives against finite differences, in all modes, alone and batched."""
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, with_grad(arguments, tensors_of(spec, arguments)))
    torch.autograd.gradcheck(
        call, tensors, fast_mode=True, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    torch.autograd.gradgradcheck(
        call, tensors, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@parametrize_samples(core_smooth, widest_only)
def test_each_combination_of_second_derivatives(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, arguments)
    reference, _ = of_tensors(spec, arguments, spec.reference)

    def second(call, first, second):
        leaves = [tensor.detach().requires_grad_(i in (first, second)) for i, tensor in enumerate(tensors)]
        (gradient,) = torch.autograd.grad(loss(call)(*leaves), leaves[first], create_graph=True)
        return torch.autograd.grad(gradient.sin().sum(), leaves[second])

    for i in all_of(tensors):
        for j in all_of(tensors):
            assert_trees_close(second(call, i, j), second(reference, i, j))


@pytest.mark.usefixtures("fresh_compiler")
@parametrize_samples(compiled_samples, widest_only)
def test_second_derivative_of_a_compiled_function_raises(device, spec, sample, dtypes):
    """It is torch that has none; a transform inside of the compiled function, above, does the same."""
    call, tensors = of_tensors(spec, sample.make(device, dtypes, 0))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    output = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    gradient = torch.autograd.grad(output.sin().sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(gradient.sum(), leaves[1])


@pytest.mark.parametrize("public", [True, False], ids=["public", "bare"])
@parametrize_samples(lambda sample: core_smooth(sample) and sample.op_level, widest_only)
def test_dual_numbers(device, spec, sample, dtypes, public):
    """Each tensor's tangent alone, and with a gradient of the tangent."""
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, arguments, None if public else bare_op(spec))
    reference, _ = of_tensors(spec, arguments, spec.reference)
    tangents = random(tensors)

    def tangent(call, wanted):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(leaf, tangent) if i in wanted else leaf
                for i, (leaf, tangent) in enumerate(zip(leaves, tangents, strict=True))
            ]
            output = forward_ad.unpack_dual(call(*duals)).tangent
            result = output.sin().sum() + 0 * sum(leaf.sum() for leaf in leaves)  # the bias' tangent depends on none
            return output, torch.autograd.grad(result, leaves)

    for wanted in subsets(all_of(tensors)):
        if len(wanted) == 1 or len(wanted) == len(tensors):
            (actual, actual_gradients), (expected, expected_gradients) = (
                tangent(call, wanted),
                tangent(reference, wanted),
            )
            assert_trees_close((actual.reshape(expected.shape), actual_gradients), (expected, expected_gradients))


@pytest.mark.usefixtures("deterministic_algorithms")
@parametrize_samples(core_smooth, widest_only)
def test_nothing_is_lost_without_tangents(device, spec, sample, dtypes):
    """Inside of a dual level, plain tensors behave as outside."""
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, with_grad(arguments, tensors_of(spec, arguments)))
    expected = call(*tensors)
    with forward_ad.dual_level():
        output = call(*tensors)
        assert forward_ad.unpack_dual(output).tangent is None
    assert torch.equal(output, expected)
    for one, other in zip(
        torch.autograd.grad(output.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        assert torch.equal(one, other)


@parametrize_samples(core_smooth)
def test_precision_of_forward_mode(device, spec, sample, dtypes):
    """Tangents have the dtype of the output, and its precision."""
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, arguments)
    wide = widened(arguments)
    reference, wide_tensors = of_tensors(spec, wide, spec.reference)
    tangents = random(tensors)
    output, tangent = func.jvp(call, tensors, tangents)
    _, expected = func.jvp(reference, wide_tensors, tuple(tangent.cpu().double() for tangent in tangents))
    assert tangent.dtype == output.dtype
    assert_close(tangent, expected, factor=4)


@parametrize_samples(core_smooth, float32_only)
def test_functionalize_raises(device, spec, sample, dtypes):
    """torch has no rule for operators like this one under functionalize. It must not be a wrong value."""
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, arguments)
    with pytest.raises(RuntimeError):
        func.functionalize(call)(*tensors)


@pytest.mark.parametrize("arguments", [0, 1])
def test_vmap_over_tensors_of_shapes_raises(arguments):
    (spec,) = (spec for spec in SPECS if spec.name == "ms_deform_attn_tensor_shapes")
    values = spec.samples[0].make("cpu", Dtypes(*[torch.float32] * 3), 0)
    name = ("spatial_shapes", "level_start_index")[arguments]
    mapped = func.vmap(lambda tensor: spec.function(**values | {name: tensor}))
    with pytest.raises(RuntimeError, match=r"ms_deform_attn_tensor_shapes: torch\.func\.vmap cannot map"):
        mapped(torch.stack([values[name]] * 2))


@pytest.mark.usefixtures("deterministic_algorithms")
@parametrize_samples(lambda sample: sample.core and sample.op_level, widest_only)
def test_kernel_of_register_autograd(device, spec, sample, dtypes):
    """What serves plain calls if torch's own function for it is no longer there."""
    arguments = sample.make(device, dtypes, 0)
    inputs = with_grad(arguments, tensors_of(spec, arguments))
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{device.upper()}"))
    keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
    output = _transforms.registered_autograd(spec.op)(keys, *spec.op_arguments(inputs))
    expected = spec.op(*spec.op_arguments(inputs))
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
    leaves = [inputs[name] for name in tensors_of(spec, arguments)]
    for one, other in zip(
        torch.autograd.grad(output.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# torch makes no dual numbers of tensors that repeat an element by stride 0, as some layouts do; and a pixel or gradient
# that is not finite may reach one pixel further than in the reference.
NO_REFERENCE = {"layout", "nan_offset", "nan_result"}


@pytest.mark.parametrize("transform", ["jvp", "forward_over_reverse"])
@parametrize_samples(lambda sample: not sample.smooth and not sample.tags & NO_REFERENCE, widest_only)
def test_positions_at_borders_integers_and_beyond(device, spec, sample, dtypes, transform):
    """Where derivatives have a jump, they are those of the reference's side."""
    arguments = sample.make(device, dtypes, 0)
    call, tensors = of_tensors(spec, arguments)
    reference, _ = of_tensors(spec, arguments, spec.reference)
    tangents = random(tensors)
    apply = TRANSFORMS[transform]
    assert_trees_close(apply(call, tensors, tangents), apply(reference, tensors, tangents), factor=64)


# ---- all sizes in one compilation ------------------------------------------------------------------------------------


def convolve(input, offset, weight):
    return deformc.deform_conv2d(input, offset, weight, padding=1)


def convolution(n, height, width):
    return torch.randn(n, 4, height, width), torch.rand(n, 18, height, width) + 0.2, torch.randn(8, 4, 3, 3)


def attend(features, locations, weights):
    """One level, of the size of the features."""
    value = features.flatten(2).transpose(1, 2).unflatten(2, (2, 4))
    return deformc.ms_deform_attn(value, [features.shape[2:]], locations, weights)


def attention(n, height, width):
    queries = height + width
    return torch.randn(n, 8, height, width), torch.rand(n, queries, 2, 1, 3, 2), torch.rand(n, queries, 2, 1, 3)


# Different numbers everywhere: torch takes equal sizes for one symbol at first. (Under forward over reverse, torch
# compiles any function, x * x too, anew for every size.)
SIZES = ((5, 17, 29), (7, 31, 19), (11, 23, 41))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("transform", ["grad", "jvp", "reverse_over_reverse", "vmap_grad"])
@pytest.mark.parametrize(("function", "inputs"), [(convolve, convolution), (attend, attention)])
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_compilation_for_all_sizes(function, inputs, transform):
    apply = TRANSFORMS[transform]
    compiled = torch.compile(
        lambda *tensors: apply(function, tensors, tensors), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for size in SIZES:
        tensors = inputs(*size)
        # Compilation orders the operators around ours in another way, in float32.
        assert_trees_close(compiled(*tensors), apply(function, tensors, tensors), factor=64)
