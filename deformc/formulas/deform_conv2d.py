"""Derivatives and vmap of deform_conv2d."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deformc._transforms import Formulas, Tensors, add, fold, with_mapped


class DeformConv2d(Formulas):
    """The output is linear in input, in weight and bias, and in mask; in them, jvp is the op itself.

    With respect to dy, a bilinear sample's derivative is its value at the upper end of its cell minus that at the lower
    end: two samples that the op can take, with offsets whose dy are integers. Likewise for dx.
    """

    differentiable = ("input", "offset", "weight", "bias", "mask")

    def jvp(self, primals, tangents, rest):
        input, offset, weight, mask = primals
        d_input, d_offset, d_weight, d_bias, d_mask = tangents
        result = None
        if d_input is not None:
            result = self.op(d_input, offset, weight, None, mask, *rest)
        if d_weight is not None:
            result = add(result, self.op(input, offset, d_weight, d_bias, mask, *rest))
        elif d_bias is not None:
            batch, _, out_h, out_w = offset.shape
            result = add(result, d_bias[:, None, None].expand(batch, -1, out_h, out_w))
        if d_mask is not None:
            result = add(result, self.op(input, offset, weight, None, d_mask, *rest))
        if d_offset is not None:
            for _, _, moved, factor in _ends(input, offset, d_offset, mask):
                result = add(result, self.op(input, moved, weight, None, factor, *rest))
        return result

    def second(self, grad_output, primals, tangents, rest, needs):
        input, offset, weight, mask = primals
        d_input, d_offset, d_weight, _, d_mask = tangents
        need_input, need_offset, need_weight, _, need_mask = needs
        need_mask = need_mask and mask is not None
        totals: list[Tensor | None] = [None] * 5
        deterministic = torch.are_deterministic_algorithms_enabled()

        def gradients(needs: Sequence[bool], *tensors: Tensor | None) -> Tensors:
            if not any(needs):
                return (None,) * 5
            results = self.backward_op(grad_output, *tensors, *rest, *needs, deterministic)
            return [result if need else None for result, need in zip(results, needs, strict=True)]

        def accumulate(gradients: Tensors) -> None:
            totals[:] = map(add, totals, gradients)

        if d_input is not None:
            needed = (False, need_offset, need_weight, False, need_mask)
            accumulate(gradients(needed, d_input, offset, weight, mask))
        if d_weight is not None:
            needed = (need_input, need_offset, False, False, need_mask)
            accumulate(gradients(needed, input, offset, d_weight, mask))
        if d_mask is not None:
            needed = (need_input, need_offset, need_weight, False, False)
            accumulate(gradients(needed, input, offset, weight, d_mask))
        if d_offset is not None:
            for axis, scale, moved, factor in _ends(input, offset, d_offset, mask):
                needed = (need_input, need_offset, need_weight, False, need_mask)
                of_input, of_moved, of_weight, _, of_factor = gradients(needed, input, moved, weight, factor)
                if of_moved is not None:  # of its integers, there is no derivative
                    parts = list(_split(of_moved))
                    parts[axis] = torch.zeros_like(parts[axis])
                    of_moved = _join(*parts).to(offset.dtype)
                if of_factor is not None:
                    of_factor = (of_factor * scale).to(mask.dtype)
                accumulate((of_input, of_moved, of_weight, None, of_factor))
        return totals

    # ---- vmap --------------------------------------------------------------------------------------------------------

    def vmap(self, size, tensors, mapped, rest):
        input, offset, weight, bias, mask = tensors
        if not mapped[2]:
            of_bias = bias if mapped[3] else None
            if any(mapped[i] for i in (0, 1, 4)):
                samples = [fold(tensors[i], mapped[i], size, 0) for i in (0, 1, 4)]
                output = self.op(*samples[:2], weight, None if mapped[3] else bias, samples[2], *rest)
                output = output.unflatten(0, (size, -1))
            else:
                output = self.op(input, offset, weight, None, mask, *rest).unsqueeze(0)
            return (output if of_bias is None else output + of_bias[:, None, :, None, None]), 0
        if any(mapped[i] for i in (0, 1, 4)):
            folded = [fold(tensors[i], mapped[i], size, dim) for i, dim in enumerate((1, 1, 0, 0, 1))]
            return self.op(*folded, *rest).unflatten(1, (size, -1)), 1
        # The samples are taken once; every mapped weight has output channels of its own.
        groups = input.shape[1] // weight.shape[2]
        weight, bias = (_into_channels(tensors[i], mapped[i], size, groups, 0) for i in (2, 3))
        return _out_of_channels(self.op(input, offset, weight, bias, mask, *rest), size, groups, 1), 0

    def vmap_backward(self, size, tensors, mapped, rest):
        window, needs, deterministic = rest[:7], rest[7:12], rest[12]
        need_input, need_offset, need_weight, need_bias, need_mask = needs
        grad_output, input, offset, weight, mask = tensors
        is_sampling_mapped = any(mapped[i] for i in (1, 2, 4))
        results: list[Tensor] = [input.new_empty(0)] * 5
        dims: list[int | None] = [None] * 5

        def call(tensors: Tensors, needs: Sequence[bool]) -> Tensors:
            return self.backward_op(*tensors, *window, *needs, deterministic)

        def in_groups(needs: Sequence[bool]) -> None:
            folded = [fold(tensors[i], mapped[i], size, 0 if i == 3 else 1) for i in range(5)]
            for i, result in enumerate(call(folded, needs)):
                if needs[i]:
                    dims[i] = 0 if i in (2, 3) else 1
                    results[i] = result.unflatten(dims[i], (size, -1))

        of_samples = (need_input, need_offset, False, False, need_mask)
        if need_weight:
            if is_sampling_mapped:
                together = any(of_samples) and mapped[3]
                in_groups(
                    (need_input, need_offset, True, False, need_mask)
                    if together
                    else (False, False, True, False, False)
                )
                if together:
                    of_samples = (False,) * 5
            else:
                # It does not depend on the weight, and the samples are taken once.
                groups = input.shape[1] // weight.shape[-3]
                grads = _into_channels(grad_output, mapped[0], size, groups, 1)
                weights = _into_channels(weight, mapped[3], size, groups, 0)
                gradient = call((grads, input, offset, weights, mask), (False, False, True, False, False))[2]
                results[2], dims[2] = _out_of_channels(gradient, size, groups, 0), 0
        if need_bias:
            results[3], dims[3] = (grad_output.sum((1, 3, 4)), 0) if mapped[0] else (grad_output.sum((0, 2, 3)), None)
        if any(of_samples):
            if mapped[3]:
                in_groups(of_samples)
            else:
                folded = [tensor if i == 3 else fold(tensor, mapped[i], size, 0) for i, tensor in enumerate(tensors)]
                for i, result in enumerate(call(folded, of_samples)):
                    if of_samples[i]:
                        results[i], dims[i] = result.unflatten(0, (size, -1)), 0
        return tuple(results), tuple(dims)


def _split(offset: Tensor) -> tuple[Tensor, Tensor]:
    """dy and dx, each [N, G*Kh*Kw, Ho, Wo]."""
    batch, channels, out_h, out_w = offset.shape
    return offset.reshape(batch, channels // 2, 2, out_h, out_w).unbind(2)


def _join(dy: Tensor, dx: Tensor) -> Tensor:
    batch, channels, out_h, out_w = dy.shape
    return torch.stack((dy, dx), 2).reshape(batch, 2 * channels, out_h, out_w)


def _ends(
    input: Tensor, offset: Tensor, d_offset: Tensor, mask: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """For dy and dx, and for both ends of the cell: the axis, the tangent with the end's sign, offset and mask."""
    dtype = torch.promote_types(input.dtype, torch.float32)  # a half-precision number has no room for + 1
    parts, tangents = _split(offset.to(dtype)), _split(d_offset.to(dtype))
    for axis in (0, 1):
        for step, sign in ((1, 1), (0, -1)):
            moved = list(parts)
            moved[axis] = parts[axis].floor() + step
            scale = sign * tangents[axis]
            yield axis, scale, _join(*moved), scale if mask is None else scale * mask


def _into_channels(tensor: Tensor | None, is_mapped: bool, size: int, groups: int, dim: int) -> Tensor | None:
    """Output channels, at ``dim``, of every one of the mapped: group by group, for the groups share their samples."""
    if tensor is None:
        return None
    tensor = with_mapped(tensor, is_mapped, size)
    return tensor.unflatten(dim + 1, (groups, -1)).movedim(0, dim + 1).flatten(dim, dim + 2)


def _out_of_channels(tensor: Tensor, size: int, groups: int, dim: int) -> Tensor:
    return tensor.unflatten(dim, (groups, size, -1)).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)
