"""The names and signatures under which code calls multi-scale deformable attention: change the import, not the calls.

``MSDeformAttnFunction`` is that of Deformable DETR's ``functions`` and its copies, ``MultiScaleDeformableAttnFunction``
and ``multi_scale_deformable_attn`` are those of mmcv, and the ``*_pytorch`` functions are the slow ones both come with.
All of them are :func:`deformc.ms_deform_attn`, on every device it has kernels for, and differentiable like it. Shapes
may be tensors, as those have them, or lists of (H, W). As in mmcv, locations and weights of another dtype than value
are converted to it, but those in float32 are not rounded. Locations ``[N, Q, M, T, 2]`` and weights ``[N, Q, M, T]``,
the form in ultralytics and others, have T / L points in each of L levels.
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
        return _ms_deform_attn(
            value, value_spatial_shapes, sampling_locations, attention_weights, value_level_start_index
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
    return _ms_deform_attn(value, value_spatial_shapes, sampling_locations, attention_weights)


multi_scale_deformable_attn_pytorch = multi_scale_deformable_attn
ms_deform_attn_core_pytorch = multi_scale_deformable_attn


def _ms_deform_attn(
    value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor, level_start_index: Tensor | None = None
) -> Tensor:
    levels = len(shapes)
    is_flat = locations.dim() == 5 and levels > 0
    return ms_deform_attn(
        value,
        shapes,
        *(tensor if tensor.dtype == torch.float32 else tensor.to(value.dtype) for tensor in (locations, weights)),
        level_start_index=level_start_index,
        num_points=[locations.shape[3] // levels] * levels if is_flat else None,
    )
