"""What else of torch meets an operator: checkpoints, tracing, copies, ensembles, and functions that stand in for it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from common import assert_close, float32_only, gradients, parametrize_samples, tensors_of, with_grad
from specs import SPECS
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import deformc


def core(sample):
    return sample.core and "nan_result" not in sample.tags


def of_tensors(spec, arguments):
    names = tensors_of(spec, arguments)
    return lambda *tensors: spec.function(**arguments | dict(zip(names, tensors, strict=True)))


@pytest.mark.usefixtures("deterministic_algorithms")
@pytest.mark.parametrize("use_reentrant", [False, True])
@parametrize_samples(core, float32_only)
def test_checkpoint(device, spec, sample, dtypes, use_reentrant):
    arguments = sample.make(device, dtypes, 0)
    wanted = tensors_of(spec, arguments)

    def recomputed(**arguments):
        tensors = (arguments[name] for name in wanted)
        return checkpoint(of_tensors(spec, arguments), *tensors, use_reentrant=use_reentrant)

    output, actual = gradients(recomputed, arguments, wanted) if not use_reentrant else backward(recomputed, arguments)
    expected_output, expected = gradients(spec.function, arguments, wanted)
    assert torch.equal(output, expected_output)
    for name in wanted:
        assert torch.equal(actual[name], expected[name]), name


def backward(function, arguments):
    """torch.autograd.grad is not for reentrant checkpoints."""
    names = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    leaves = with_grad(arguments, names)
    output = function(**leaves)
    output.backward(torch.ones_like(output))
    return output.detach(), {name: leaves[name].grad for name in names}


@pytest.mark.usefixtures("deterministic_algorithms")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@parametrize_samples(core, float32_only)
def test_jit_trace(device, spec, sample, dtypes):
    """Traced, saved and loaded, with gradients."""
    arguments = sample.make(device, dtypes, 0)
    names = tensors_of(spec, arguments)
    tensors = tuple(arguments[name] for name in names)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(of_tensors(spec, arguments), tensors), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    other = sample.make(device, dtypes, 1)

    def function(**arguments):
        return loaded(*(arguments[name] for name in names))

    output, actual = gradients(function, other, names)
    expected_output, expected = gradients(spec.function, other, names)
    assert torch.equal(output, expected_output)
    for name in names:
        assert torch.equal(actual[name], expected[name]), name


@parametrize_samples(core, float32_only)
def test_fx_symbolic_trace(device, spec, sample, dtypes):
    """One node, whatever Python there is in the function."""
    arguments = sample.make(device, dtypes, 0)
    names = tensors_of(spec, arguments)

    class Call(nn.Module):
        def forward(self, first, second):
            return spec.function(**arguments | {names[0]: first, names[1]: second})

    traced = torch.fx.symbolic_trace(Call())
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls == [spec.function]
    assert torch.equal(traced(arguments[names[0]], arguments[names[1]]), spec.function(**arguments))


@parametrize_samples(core, float32_only)
def test_functions_that_stand_in(device, spec, sample, dtypes):
    """As for torch's own functions, a mode sees the call, and a subclass of Tensor comes out as it went in."""
    arguments = sample.make(device, dtypes, 0)
    calls = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **kwargs or {})

    class Subclass(torch.Tensor):
        pass

    expected = spec.function(**arguments)
    with Mode():
        assert torch.equal(spec.function(**arguments), expected)
    assert calls.count(spec.function) == 1
    name = spec.differentiable[0]
    output = spec.function(**arguments | {name: arguments[name].as_subclass(Subclass)})
    assert type(output) is Subclass
    assert torch.equal(output.as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("key", ["AutogradCPU", "AutogradCUDA", "AutogradMPS", "AutogradMeta"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_autograd_is_registered(spec, key):
    """opcheck cannot look at devices that are not there."""
    for op in (spec.op, spec.backward_op):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), key)


@pytest.mark.parametrize("key", ["AutocastCPU", "AutocastCUDA", "AutocastMPS"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_autocast_is_registered(spec, key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(spec.op.name(), key)


# ---- modules ---------------------------------------------------------------------------------------------------------

SHAPES = [(5, 6), (3, 2)]


def uniform(module: nn.Module) -> nn.Module:
    """Offsets that lead somewhere: at first they are zero."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return module


MODULES = {
    "DeformConv2d": (
        lambda: deformc.nn.DeformConv2d(4, 6, 3, padding=1),
        lambda: (torch.randn(2, 4, 5, 6), torch.randn(2, 18, 5, 6), torch.rand(2, 9, 5, 6)),
    ),
    "DeformConv2dPack": (
        lambda: deformc.nn.DeformConv2dPack(4, 6, 3, padding=1),
        lambda: (torch.randn(2, 4, 5, 6),),
    ),
    "MSDeformAttn": (
        lambda: deformc.nn.MSDeformAttn(16, 2, 4, 3),
        lambda: (torch.randn(2, 7, 16), torch.rand(2, 7, 2, 2), torch.randn(2, 36, 16), SHAPES),
    ),
}


@pytest.fixture(params=MODULES)
def module_and_inputs(request):
    make, inputs = MODULES[request.param]
    return uniform(make()), inputs()


def test_every_module_is_here():
    assert set(MODULES) == {name for name in deformc.nn.__all__ if isinstance(getattr(deformc.nn, name), type)}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_modules(module_and_inputs, duplicate):
    module, inputs = module_and_inputs
    twin = duplicate(module)
    assert torch.equal(twin(*inputs), module(*inputs))
    assert repr(twin) == repr(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(parameter.any() for parameter in module.parameters())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_functional_call_and_ensembles(module_and_inputs, compiled):
    """Models of one kind as one: torch.func.stack_module_state and vmap, and the gradients of each."""
    module, inputs = module_and_inputs
    models = [uniform(copy.deepcopy(module)) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    rest = [value for value in inputs if not isinstance(value, torch.Tensor)]

    def loss(parameters, buffers, *tensors):
        return torch.func.functional_call(module, (parameters, buffers), (*tensors, *rest)).sin().sum()

    def ensemble(*tensors):
        return torch.func.vmap(torch.func.grad_and_value(loss), (0, 0, *[None] * len(tensors)))(
            parameters, buffers, *tensors
        )

    if compiled:
        torch._dynamo.reset()
        ensemble = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    found, values = ensemble(*tensors)
    for i, model in enumerate(models):
        value = model(*inputs).sin().sum()
        assert_close(values[i], value, factor=4)
        for (name, _), gradient in zip(
            model.named_parameters(), torch.autograd.grad(value, list(model.parameters())), strict=True
        ):
            assert_close(found[name][i], gradient, name, factor=4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("name", ["DeformConv2d", "DeformConv2dPack"])
def test_tracing_of_modules(name):
    make, inputs = MODULES[name]
    module, inputs = uniform(make()), inputs()
    traced = torch.fx.symbolic_trace(module)
    assert torch.equal(traced(*inputs), module(*inputs))
    assert deformc.deform_conv2d in [node.target for node in traced.graph.nodes]
    assert torch.equal(torch.jit.trace(module, inputs)(*inputs), module(*inputs))
