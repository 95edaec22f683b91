"""Derivatives and vmap of ms_deform_attn, in both forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deformc._transforms import Formulas, add, fold


class MSDeformAttn(Formulas):
    """The output is linear in value and in the weights; in them, jvp is the op itself.

    With respect to x, a bilinear sample's derivative is its value at the right end of its cell minus that at the left
    end: two more points that the op can sample. Likewise for y. All points of a derivative go into one call.
    """

    differentiable = ("value", "sampling_locations", "attention_weights")

    def __init__(self, op, backward_op, shapes: int) -> None:
        """``shapes`` counts the arguments that hold them: a list of sizes, or two tensors."""
        super().__init__(op, backward_op)
        self.shapes_are_tensors = shapes == 2

    def jvp(self, primals, tangents, rest):
        value, shapes, locations, weights, num_points, mode = self._arguments(primals, rest)
        d_value, d_locations, d_weights = tangents
        result = None
        if d_value is not None:
            result = self.op(d_value, *shapes, locations, weights, num_points, mode)
        points = self._points(value, shapes, locations, weights, d_locations, d_weights, num_points, mode)
        if points is not None:
            result = add(result, self.op(value, *shapes, points.locations, points.weights, points.counts, mode))
        if result is None:  # discrete samples do not move with the locations
            batch, queries = locations.shape[:2]
            result = value.new_zeros(batch, queries, value.shape[2] * value.shape[3])
        return result

    def second(self, grad_output, primals, tangents, rest, needs):
        value, shapes, locations, weights, num_points, mode = self._arguments(primals, rest)
        d_value, d_locations, d_weights = tangents
        need_value, need_locations, need_weights = needs
        of_value = of_locations = of_weights = None
        deterministic = torch.are_deterministic_algorithms_enabled()
        if d_value is not None and (need_locations or need_weights):
            needed = (False, need_locations, need_weights)
            _, of_locations, of_weights = self.backward_op(
                grad_output, d_value, *shapes, locations, weights, num_points, mode, *needed, deterministic
            )
        points = self._points(value, shapes, locations, weights, d_locations, d_weights, num_points, mode)
        if points is not None and any(needs):
            needed = (need_value, need_locations, need_weights and points.are_moved)
            of_value, of_points, of_factors = self.backward_op(
                grad_output,
                value,
                *shapes,
                points.locations,
                points.weights,
                points.counts,
                mode,
                *needed,
                deterministic,
            )
            if need_locations:
                of_locations = add(of_locations, points.location_gradient(of_points).to(locations.dtype))
            if needed[2]:
                of_weights = add(of_weights, points.weight_gradient(of_factors).to(weights.dtype))
        results = (of_value, of_locations, of_weights)
        return [result if need else None for result, need in zip(results, needs, strict=True)]

    def _arguments(self, primals, rest):
        value, *shapes, locations, weights = primals
        if self.shapes_are_tensors:
            return value, shapes, locations, weights, *rest
        sizes, num_points, mode = rest
        return value, [sizes], locations, weights, num_points, mode

    def _points(self, value, shapes, locations, weights, d_locations, d_weights, num_points, mode) -> _Points | None:
        """The points, and their weights, whose weighted sum of samples is the part of the output's tangent."""
        if mode == "discrete":
            d_locations = None
        if d_locations is None and d_weights is None:
            return None
        dtype = torch.promote_types(value.dtype, torch.float32)
        if self.shapes_are_tensors:
            sizes = shapes[0].to(dtype).unbind()
            sizes = [size.unbind() for size in sizes]
        else:
            sizes = list(zip(shapes[0][::2], shapes[0][1::2], strict=True))

        def of_levels(tensor: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(sizes) if tensor is None else tensor.to(dtype).split(list(num_points), 3)

        tensors = map(of_levels, (locations, weights, d_locations, d_weights))
        return _Points([list(_parts(*of_level)) for of_level in zip(sizes, *tensors, strict=True)])

    # ---- vmap --------------------------------------------------------------------------------------------------------

    def vmap(self, size, tensors, mapped, rest):
        folded, dim = self._folded(size, tensors, mapped, mapped[0])
        value, *shapes, locations, weights = folded
        return self.op(*self._flat(value, shapes, locations, weights, rest)).unflatten(dim, (size, -1)), dim

    def vmap_backward(self, size, tensors, mapped, rest):
        needs = rest[-4:-1]
        grad_output, *others = tensors
        folded, dim = self._folded(size, others, mapped[1:], mapped[1] or needs[0])
        value, *shapes, locations, weights = folded
        grad_output = fold(grad_output, mapped[0], size, dim)
        results = self.backward_op(grad_output, *self._flat(value, shapes, locations, weights, rest))
        dims = tuple(dim if need else None for need in needs)
        results = [r.unflatten(dim, (size, -1)) if need else r for r, need in zip(results, needs, strict=True)]
        return tuple(results), dims

    def _flat(self, value, shapes, locations, weights, rest):
        if self.shapes_are_tensors:
            return value, *shapes, locations, weights, *rest
        return value, rest[0], locations, weights, *rest[1:]

    def _folded(self, size, tensors, mapped, into_batch: bool):
        """The mapped dimension made part of N, or where value is the same for all, of Q."""
        if any(mapped[1:-2]):
            raise RuntimeError(f"{self.op._opname}: torch.func.vmap cannot map over tensors of shapes")
        value, *shapes, locations, weights = tensors
        dim = 0 if into_batch else 1
        value = fold(value, mapped[0], size, 0) if into_batch else value
        locations, weights = (fold(t, m, size, dim) for t, m in zip((locations, weights), mapped[-2:], strict=True))
        return (value, *shapes, locations, weights), dim


# ---- the points of a derivative --------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Points of one level: one end of each one's cell along x (axis 0) or y (axis 1), or the points as they are."""

    locations: Tensor
    weights: Tensor
    axis: int | None = None
    scale: Tensor | None = None  # what the attention weights were multiplied by


def _parts(size, locations: Tensor, weights: Tensor, d_locations: Tensor | None, d_weights: Tensor | None):
    if d_weights is not None:
        yield _Part(locations, d_weights)
    if d_locations is not None:
        for axis, length in enumerate(reversed(size)):
            cell = (locations[..., axis] * length - 0.5).floor()
            for step, sign in ((1, 1), (0, -1)):
                moved = list(locations.unbind(-1))
                moved[axis] = (cell + (step + 0.5)) / length
                scale = d_locations[..., axis] * length * sign
                yield _Part(torch.stack(moved, -1), weights * scale, axis, scale)


class _Points:
    """The parts of all levels as arguments of one call, and its gradients as those of the locations and weights."""

    def __init__(self, levels: Sequence[Sequence[_Part]]) -> None:
        self._levels = levels
        self._parts = [part for level in levels for part in level]
        self.locations = torch.cat([part.locations for part in self._parts], 3)
        self.weights = torch.cat([part.weights for part in self._parts], 3)
        self.are_moved = any(part.axis is not None for part in self._parts)
        self.counts = [sum(part.weights.shape[3] for part in level) for level in levels]

    def location_gradient(self, gradient: Tensor) -> Tensor:
        return self._sum(gradient, _without_axis)

    def weight_gradient(self, gradient: Tensor) -> Tensor | None:
        return self._sum(gradient, lambda part, of_part: None if part.scale is None else of_part * part.scale)

    def _sum(self, gradient: Tensor, of_part: Callable[[_Part, Tensor], Tensor | None]) -> Tensor | None:
        gradients = iter(gradient.split([part.weights.shape[3] for part in self._parts], 3))
        levels = [functools.reduce(add, [of_part(part, next(gradients)) for part in level]) for level in self._levels]
        return None if levels[0] is None else torch.cat(levels, 3)


def _without_axis(part: _Part, gradient: Tensor) -> Tensor:
    """A moved coordinate is the end of a cell, which does not move with the location."""
    if part.axis is None:
        return gradient
    parts = list(gradient.unbind(-1))
    parts[part.axis] = torch.zeros_like(parts[part.axis])
    return torch.stack(parts, -1)
