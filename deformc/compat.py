"""The names and signatures under which code calls multi-scale deformable attention: change the import, not the calls.

``MSDeformAttnFunction`` is that of Deformable DETR's ``functions`` and its copies, ``MultiScaleDeformableAttnFunction``
and ``multi_scale_deformable_attn`` are those of mmcv, and the ``*_pytorch`` functions are the slow ones both come with.
All of them are :func:`deformc.ms_deform_attn`, on every device it has kernels for, and differentiable like it. Shapes
may be tensors, as those have them, or lists of (H, W). As in mmcv, locations and weights of another dtype than value
are converted to it, but those in float32 are not rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deformc.ops.ms_deform_attn import ms_deform_attn

__all__ = [
    "MSDeformAttnFunction",
    "MultiScaleDeformableAttnFunction",
    "ms_deform_attn_core_pytorch",
    "multi_scale_deformable_attn",
    "multi_scale_deformable_attn_pytorch",
]

Shapes = Sequence[tuple[int, int]] | Tensor


class MSDeformAttnFunction:
    """Has the ``apply`` of the autograd function of this name."""

    @staticmethod
    def apply(
        value: Tensor,
        value_spatial_shapes: Shapes,
        value_level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int = 64,
    ) -> Tensor:
        """Arguments as :func:`deformc.ms_deform_attn` has them; ``im2col_step`` is ignored, and N need not fit it.

        Returns:
            ``[N, Q, M*D]``.
        """
        return ms_deform_attn(
            value,
            value_spatial_shapes,
            _as_accepted(sampling_locations, value),
            _as_accepted(attention_weights, value),
            level_start_index=value_level_start_index,
        )


class MultiScaleDeformableAttnFunction(MSDeformAttnFunction):
    """mmcv's name of the same."""


def multi_scale_deformable_attn(
    value: Tensor,
    value_spatial_shapes: Shapes,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """The same without ``level_start_index``: one level after the other."""
    return ms_deform_attn(
        value, value_spatial_shapes, _as_accepted(sampling_locations, value), _as_accepted(attention_weights, value)
    )


multi_scale_deformable_attn_pytorch = multi_scale_deformable_attn
ms_deform_attn_core_pytorch = multi_scale_deformable_attn


def _as_accepted(tensor: Tensor, value: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.to(value.dtype)
