"""Multi-scale deformable attention written with PyTorch's indexing operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

# Past any image, and exact in float32: what a position is clamped to before it becomes an integer.
_FAR = 2.0**31


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Sequence[tuple[int, int]] | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    level_start_index: Tensor | Sequence[int] | None = None,
    num_points: Sequence[int] | None = None,
    mode: Literal["bilinear", "discrete"] = "bilinear",
) -> Tensor:
    """Multi-scale deformable attention as a composition of differentiable PyTorch operators.

    The definition :func:`deformc.ms_deform_attn` is tested against. It works in eager mode, under ``torch.func``
    transforms, in forward mode and for derivatives of any order, needs memory for four values per point and checks its
    arguments only as far as PyTorch does. A tensor of shapes is read by the host.

    Args:
        value: ``[N, S, M, D]``; float64, float32, float16 or bfloat16. The levels' pixels follow each other in S, each
            level row by row.
        spatial_shapes: (H, W) of each of the L levels, or an int64 tensor ``[L, 2]``.
        sampling_locations: ``[N, Q, M, L, P, 2]``, or ``[N, Q, M, T, 2]`` with ``num_points``; (x, y), normalised to
            [0, 1] in each level's image: 0 and 1 are its outer edges. The dtype of ``value`` or float32.
        attention_weights: ``[N, Q, M, L, P]`` or ``[N, Q, M, T]``; the dtype of ``value`` or float32.
        level_start_index: ``[L]``, where each level starts in S; one after the other if it is None.
        num_points: how many of the T points belong to each level.
        mode: ``"bilinear"``, or ``"discrete"`` for the value of the nearest pixel.

    Returns:
        ``[N, Q, M*D]`` in the dtype of ``value``, computed in float64 for float64 ``value`` and in float32 otherwise,
        and rounded once.

    With ``"bilinear"``, a location (x, y) is the point (x*W - 0.5, y*H - 0.5) in pixels, and its value the bilinear
    interpolation of the four pixels around it, each 0 outside the image; a point with a coordinate outside the open
    interval from -1 to the image's size contributes 0. The derivative with respect to the location is that of the cell
    that floor() leads to, also where a coordinate is an integer. A point with a NaN coordinate has the value NaN, and
    NaN gradients for its location and weight, and adds nothing to the gradient of ``value``.

    With ``"discrete"``, its value is that of pixel (trunc(x*W + 0.5), trunc(y*H + 0.5)), each clamped to the image. The
    gradient of the location is 0. NaN is as above.

    Sources: Zhu et al., "Deformable DETR", ICLR 2021 (arXiv:2010.04159); "discrete" is that of RT-DETRv2 (Lv et al.,
    2024, arXiv:2407.17140).
    """
    batch, _, heads, head_dim = value.shape
    queries = sampling_locations.size(1)
    shapes = spatial_shapes.tolist() if isinstance(spatial_shapes, Tensor) else [tuple(s) for s in spatial_shapes]
    starts = [0]
    for height, width in shapes:
        starts.append(starts[-1] + height * width)
    if level_start_index is not None:
        starts = level_start_index.tolist() if isinstance(level_start_index, Tensor) else list(level_start_index)
    if num_points is None:
        num_points = [sampling_locations.size(4)] * len(shapes)
    points = sum(num_points)

    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    locations = sampling_locations.to(dtype).reshape(batch, queries, heads, points, 2)
    weights = attention_weights.to(dtype).reshape(batch, queries, heads, points)
    # One more pixel, 0, stands for everything outside the images, so that nothing is read from or added to a real
    # pixel in place of one that does not exist.
    pixels = value.to(dtype).permute(0, 2, 3, 1)
    pixels = torch.cat([pixels, pixels.new_zeros(*pixels.shape[:3], 1)], dim=-1)  # [N, M, D, S + 1]

    output = pixels.new_zeros(batch, heads, head_dim, queries)
    first = 0
    for (height, width), start, count in zip(shapes, starts, num_points, strict=False):
        x, y = locations[:, :, :, first : first + count].permute(0, 2, 1, 3, 4).unbind(-1)  # each [N, M, Q, P]
        weight = weights[:, :, :, first : first + count].permute(0, 2, 1, 3)
        sample = _bilinear if mode == "bilinear" else _discrete
        sampled = sample(pixels, start, height, width, x, y)  # [N, M, D, Q, P]
        output = output + (sampled * weight.unsqueeze(2)).sum(-1)
        first += count
    return output.permute(0, 3, 1, 2).reshape(batch, queries, heads * head_dim).to(value.dtype)


def _bilinear(pixels: Tensor, start: int, height: int, width: int, x: Tensor, y: Tensor) -> Tensor:
    is_nan = x.isnan() | y.isnan()
    x_pixels, y_pixels = x * width - 0.5, y * height - 0.5
    cell_y, in_cells_y, counts_y = _locate(y_pixels.detach(), height)
    cell_x, in_cells_x, counts_x = _locate(x_pixels.detach(), width)
    in_cells = in_cells_y & in_cells_x & ~is_nan
    counts = (counts_y & counts_x & ~is_nan).unsqueeze(2)
    fraction_y, fraction_x = _fraction(y_pixels, in_cells), _fraction(x_pixels, in_cells)

    sampled = 0.0
    for step_y, weight_y in ((0, 1 - fraction_y), (1, fraction_y)):
        for step_x, weight_x in ((0, 1 - fraction_x), (1, fraction_x)):
            row, column = cell_y + step_y, cell_x + step_x
            inside = in_cells & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            corner = _gather(pixels, torch.where(inside, start + row * width + column, pixels.size(3) - 1))
            # A point exactly at -1 does not count but has the derivative of its cell: it gets there by weights of 0,
            # which an infinite pixel would turn into NaN.
            corner = torch.where(counts | corner.isfinite(), corner, 0.0)
            sampled = sampled + (weight_y * weight_x).unsqueeze(2) * corner
    return sampled + _nan(is_nan, x, y).unsqueeze(2)


def _discrete(pixels: Tensor, start: int, height: int, width: int, x: Tensor, y: Tensor) -> Tensor:
    is_nan = x.isnan() | y.isnan()
    column, row = (
        (coordinate.detach() * size + 0.5).nan_to_num(0.0, _FAR, -_FAR).clamp(0, size - 1).to(torch.int64)
        for coordinate, size in ((x, width), (y, height))
    )
    corner = _gather(pixels, torch.where(is_nan, pixels.size(3) - 1, start + row * width + column))
    return corner + _nan(is_nan, x, y).unsqueeze(2)


def _gather(pixels: Tensor, index: Tensor) -> Tensor:
    """The pixels [N, M, D, S + 1] at index [N, M, Q, P], as [N, M, D, Q, P]."""
    flat = index.flatten(2).unsqueeze(2).expand(-1, -1, pixels.size(2), -1)
    return pixels.gather(3, flat).reshape(*pixels.shape[:3], *index.shape[2:])


def _nan(is_nan: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """NaN into the value and, by the product rule, into the gradients of x and y; 0 for the other points."""
    nan = torch.where(is_nan, float("nan"), 0.0).to(x.dtype)
    return (torch.where(is_nan, x, 0.0) + torch.where(is_nan, y, 0.0)) * nan


def _locate(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The cell floor(position), whether it has a corner in the image, and whether the point counts."""
    floor = position.floor()
    cell = floor.nan_to_num(0.0, _FAR, -_FAR).clamp(-_FAR, _FAR).to(torch.int64)
    in_cells = (cell >= -1) & (cell < size)
    counts = in_cells & ((cell >= 0) | (position > floor))
    return cell, in_cells, counts


def _fraction(position: Tensor, in_cells: Tensor) -> Tensor:
    """The position within the cell, 0 to 1; 0, with a derivative of 0, for a point that is in none."""
    position = torch.where(in_cells, position, 0.0)
    return position - position.detach().floor()
