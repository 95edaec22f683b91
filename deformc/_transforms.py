"""Derivatives of any order and kind, and vmap: an op under ``torch.autograd`` and the transforms of ``torch.func``.

``torch.library.register_autograd`` serves plain reverse mode, also in ``torch.compile`` and ``torch.export``. Alone, it
raises under ``torch.func.grad`` and ``vmap(grad)`` and gives zero tangents in forward mode. So the same formulas are
registered a second time, as an ``autograd.Function`` with ``jvp`` and ``vmap``:

- for the dispatch key at which the transforms of ``torch.func`` catch every operator, also inside ``torch.compile``;
- behind the autograd keys of the devices, for the dual numbers of ``torch.autograd.forward_ad``.

Other calls do not come here. An op brings ``Formulas``. They are written with the op itself, its backward op and
differentiable operators of PyTorch, so what is differentiated or mapped again finds the same rules again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deformc import _eager, _library
from deformc._autocast import Autocast
from deformc._schema import Arguments

try:  # not part of torch's interface; torch 2.10 to 2.14 have it
    from torch._library.autograd import Info, make_autograd_impl
except ImportError:
    make_autograd_impl = None

Tensors = Sequence[Tensor | None]


class Formulas(ABC):
    """The mathematics of an op, in terms of the op, its backward op and differentiable operators of PyTorch.

    ``primals`` are the backward op's tensors but for the output's gradient, in its order. ``tangents`` has a tensor or
    None, which is zero, for each differentiable argument, and so have the results of ``second``. ``rest`` is the op's
    arguments that are not tensors.
    """

    differentiable: tuple[str, ...]  # arguments of the op, in the order of the backward op's results

    def __init__(self, op: torch._ops.OpOverload, backward_op: torch._ops.OpOverload) -> None:
        self.op, self.backward_op = op, backward_op

    @abstractmethod
    def jvp(self, primals: Tensors, tangents: Tensors, rest: tuple) -> Tensor:
        """The output's tangent. At least one of the tangents is not None."""

    @abstractmethod
    def second(
        self, grad_output: Tensor, primals: Tensors, tangents: Tensors, rest: tuple, needs: Sequence[bool]
    ) -> Tensors:
        """The derivative of the backward op's results in the direction of ``tangents``, where it is needed.

        It is the gradient of ``<grad_output, jvp(primals, tangents)>`` with respect to the primals. So it is both the
        tangent of the backward op and, for tangents that are the gradients of its results, its gradient.
        """

    @abstractmethod
    def vmap(self, size: int, tensors: Tensors, mapped: Sequence[bool], rest: tuple) -> tuple[Tensor, int]:
        """The output, and which of its dimensions is the mapped one. In the tensors that have it, it is the first."""

    @abstractmethod
    def vmap_backward(self, size: int, tensors: Tensors, mapped: Sequence[bool], rest: tuple) -> tuple[Tensors, tuple]:
        """The same of the backward op, whose last arguments are in ``rest`` too."""


class Rest:
    """The arguments that are not tensors, as one opaque object: lists among a Function's would break ``hessian``."""

    __slots__ = ("values",)

    def __init__(self, values: tuple) -> None:
        self.values = values


class Direction(ABC):
    """What the op and its backward op have in common."""

    def __init__(self, op: torch._ops.OpOverload, vmap: Callable) -> None:
        self.op = op
        self.arguments = Arguments(op)
        self.function = _function(self, vmap)

    @abstractmethod
    def save(self, ctx, tensors: Tensors, rest: tuple, output) -> None:
        """Keep what a derivative needs."""

    @abstractmethod
    def gradients(self, ctx, grads: Tensors, needs: Sequence[bool]) -> Tensors:
        """Those of the tensors."""

    @abstractmethod
    def jvp(self, ctx, tangents: Tensors) -> Tensor | Tensors:
        """The tangent of each output."""

    def register(self, autocast: Autocast | None = None) -> None:
        arguments, function = self.arguments, self.function

        def setup_context(ctx, inputs, output):
            self.save(ctx, arguments.tensors(inputs), arguments.rest(inputs), output)

        def backward(ctx, *grads):
            needs = arguments.tensors(ctx.needs_input_grad)
            return arguments.of_tensors(self.gradients(ctx, grads, needs))

        torch.library.register_autograd(self.op, backward, setup_context=setup_context)

        def as_function(*args):
            return function.apply(*arguments.tensors(args), Rest(arguments.rest(args)))

        def transformed(*args):
            # The transforms come before autocast, and a formula must see what the kernel computes with.
            return as_function(*(autocast.of(args) if autocast else args))

        if make_autograd_impl is not None:
            plain = make_autograd_impl(self.op, Info(backward, setup_context))
        else:
            plain = registered_autograd(self.op)

        def autograd(keyset, *args):
            # In a dual level, register_autograd's kernel would drop the tangents without a word. Inside of the Function
            # there is nothing more to differentiate.
            if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
                return as_function(*args)
            return plain(keyset, *args)

        library = torch.library.Library(_library.NAMESPACE, "IMPL")
        name = self.op._opname
        library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
        for key in _library.DEVICES.values():
            library.impl(name, autograd, f"Autograd{key}", with_keyset=True)
        _libraries.append(library)


_libraries: list[torch.library.Library] = []


def registered_autograd(op: torch._ops.OpOverload) -> Callable:
    """The kernel that register_autograd made, by torch's interface alone; it costs 1 to 2 microseconds more a call.

    It is found behind the autograd key of any device for which nothing else is registered.
    """
    return torch.library.get_kernel(op.name(), "AutogradXLA").call_boxed


class Forward(Direction):
    def __init__(self, formulas: Formulas) -> None:
        super().__init__(formulas.op, formulas.vmap)
        self.formulas = formulas
        names, of_backward = self.arguments.tensor_names, Arguments(formulas.backward_op)
        self.primals = [names.index(name) for name in of_backward.tensor_names[1:]]
        self.differentiable = [names.index(name) for name in formulas.differentiable]
        self.join_backward = of_backward.join

    def save(self, ctx, tensors, rest, output):
        ctx.set_materialize_grads(False)
        ctx.rest = rest
        primals = [tensors[i] for i in self.primals]
        ctx.save_for_backward(*primals)
        ctx.save_for_forward(*primals)

    def gradients(self, ctx, grads, needs):
        gradients = [None] * len(self.arguments.tensor_names)
        if grads[0] is None:
            return gradients
        needs = [needs[i] for i in self.differentiable]
        tensors = (grads[0], *ctx.saved_tensors)
        rest = (*ctx.rest, *needs, torch.are_deterministic_algorithms_enabled())
        results = _eager.call(self.formulas.backward_op, self.join_backward(tensors, rest), tensors)
        for i, need, gradient in zip(self.differentiable, needs, results, strict=True):
            if need:
                gradients[i] = gradient
        return gradients

    def jvp(self, ctx, tangents):
        tangents = [tangents[i] for i in self.differentiable]
        return self.formulas.jvp(ctx.saved_tensors, tangents, ctx.rest)


class Backward(Direction):
    """Its tensors are the output's gradient and the primals; its rest is that of the op, what is needed, and a flag."""

    def __init__(self, formulas: Formulas) -> None:
        super().__init__(formulas.backward_op, formulas.vmap_backward)
        self.formulas = formulas
        names = self.arguments.tensor_names[1:]
        self.differentiable = [names.index(name) if name in names else None for name in formulas.differentiable]
        self.count = len(formulas.differentiable)

    def save(self, ctx, tensors, rest, output):
        ctx.set_materialize_grads(False)
        ctx.rest, ctx.needed = rest[: -self.count - 1], rest[-self.count - 1 : -1]
        ctx.results = [(result.shape, result.dtype) for result in output]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    def gradients(self, ctx, grads, needs):
        grad_output, *primals = ctx.saved_tensors
        need_grad_output, *need = needs
        directions = [g if needed else None for g, needed in zip(grads, ctx.needed, strict=True)]
        if all(direction is None for direction in directions):
            return [None] * len(needs)
        first = self.formulas.jvp(primals, directions, ctx.rest) if need_grad_output else None
        need_primals = [i is not None and need[i] for i in self.differentiable]
        second = self.formulas.second(grad_output, primals, directions, ctx.rest, need_primals)
        gradients = [None] * len(primals)
        for i, gradient in zip(self.differentiable, second, strict=True):
            if i is not None:
                gradients[i] = gradient
        return [first, *gradients]

    def jvp(self, ctx, tangents):
        grad_output, *primals = ctx.saved_tensors
        tangent, *others = tangents
        results: list = [None] * self.count
        if tangent is not None:
            flags = (*ctx.needed, torch.are_deterministic_algorithms_enabled())
            results = list(self.op(*self.arguments.join((tangent, *primals), (*ctx.rest, *flags))))
        directions = [None if i is None else others[i] for i in self.differentiable]
        if any(direction is not None for direction in directions):
            second = self.formulas.second(grad_output, primals, directions, ctx.rest, ctx.needed)
            results = [add(one, other) for one, other in zip(results, second, strict=True)]
        return tuple(
            grad_output.new_zeros(shape, dtype=dtype) if result is None else result
            for result, (shape, dtype) in zip(results, ctx.results, strict=True)
        )


def register(formulas: Formulas, autocast: Autocast) -> None:
    """Make an op and its backward op differentiable and mappable in every way that torch has."""
    Forward(formulas).register(autocast)
    Backward(formulas).register()


def _function(direction: Direction, vmap: Callable) -> type[torch.autograd.Function]:
    op, join = direction.op, direction.arguments.join

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            *tensors, rest = args
            return op(*join(tensors, rest.values))

        @staticmethod
        def setup_context(ctx, inputs, output):
            *tensors, rest = inputs
            direction.save(ctx, tensors, rest.values, output)

        @staticmethod
        def backward(ctx, *grads):
            return (*direction.gradients(ctx, grads, ctx.needs_input_grad[:-1]), None)

        @staticmethod
        def jvp(ctx, *tangents):
            return direction.jvp(ctx, tangents[:-1])

        @staticmethod
        def vmap(info, in_dims, *args):
            *tensors, rest = args
            mapped = [dim is not None for dim in in_dims[:-1]]
            tensors = [
                tensor.movedim(dim, 0) if is_mapped else tensor
                for tensor, dim, is_mapped in zip(tensors, in_dims, mapped, strict=False)
            ]
            return vmap(info.batch_size, tensors, mapped, rest.values)

    Function.__name__ = Function.__qualname__ = f"Function_deformc_{op._opname}"
    return Function


# ---- for the formulas ------------------------------------------------------------------------------------------------


def add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum, where None is zero."""
    if one is None or other is None:
        return one if other is None else other
    return one + other


def with_mapped(tensor: Tensor, is_mapped: bool, size: int) -> Tensor:
    """The tensor with the mapped dimension, the first, which it may lack."""
    return tensor if is_mapped else tensor.expand(size, *tensor.shape)


def fold(tensor: Tensor | None, is_mapped: bool, size: int, dim: int) -> Tensor | None:
    """The mapped dimension made part of dimension ``dim``, as its slower half."""
    if tensor is None:
        return None
    return with_mapped(tensor, is_mapped, size).movedim(0, dim).flatten(dim, dim + 1)
