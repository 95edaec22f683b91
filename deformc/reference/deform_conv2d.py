"""Deformable convolution written with PyTorch's indexing operators."""

from __future__ import annotations

import torch
from torch import Tensor

# Past any image, and exact in float32: what floor(offset) is clamped to before it becomes an integer.
_FAR = 2.0**31


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Deformable convolution, versions 1 and 2 (``mask``), as a composition of differentiable PyTorch operators.

    The definition :func:`deformc.deform_conv2d` is tested against. It works in eager mode, under ``torch.func``
    transforms, in forward mode and for derivatives of any order, needs memory for Kh*Kw copies of the input and
    checks its arguments only as far as PyTorch does.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``; float64, float32, float16 or bfloat16.
        offset: ``[N, 2*G*Kh*Kw, Ho, Wo]`` displacements of the sampling points in pixels, ordered (offset group, kernel
            row, kernel column, [dy, dx]); the dtype of ``input`` or float32. Without N when ``input`` is unbatched.
        weight: ``[O, C/groups, Kh, Kw]``, the dtype of ``input``.
        bias: ``[O]``, the dtype of ``input``, or None.
        stride: step of the kernel in pixels, one int or (vertical, horizontal).
        padding: zeros around the image in pixels, one int or (vertical, horizontal), or ``"same"`` or ``"valid"`` as in
            :func:`torch.nn.functional.conv2d`.
        dilation: distance of the kernel's elements in pixels, one int or (vertical, horizontal).
        mask: ``[N, G*Kh*Kw, Ho, Wo]`` factors of the sampled values, the dtype of ``input`` or float32, or None.

    Returns:
        ``[N, O, Ho, Wo]`` (``[O, Ho, Wo]`` for unbatched input) in the dtype of ``input``, computed in float64 for
        float64 input and in float32 otherwise, and rounded once. It is channels_last when ``input`` is, and contiguous
        otherwise.

    The sampling point of kernel element (i, j) for output pixel (h, w) is

        y = h * stride_h - pad_h + i * dilation_h + dy,    x = w * stride_w - pad_w + j * dilation_w + dx

    and its value the bilinear interpolation of the four pixels around it, each 0 outside the image; a point with y or x
    outside the open interval from -1 to the image's size contributes 0. The derivative with respect to (y, x) is that
    of the cell (floor(y), floor(x)), also where y or x is an integer. A point with a NaN coordinate has the value NaN,
    and NaN gradients for its offset and mask, and adds nothing to the gradient of ``input``.

    Sources: Dai et al., "Deformable Convolutional Networks", ICCV 2017 (arXiv:1703.06211); Zhu et al., "Deformable
    ConvNets v2", CVPR 2019 (arXiv:1811.11168). Borders and derivatives at integers are torchvision's.
    """
    if input.dim() == 3:
        batched_mask = None if mask is None else mask.unsqueeze(0)
        return deform_conv2d(
            input.unsqueeze(0), offset.unsqueeze(0), weight, bias, stride, padding, dilation, batched_mask
        ).squeeze(0)

    batch, channels, height, width = input.shape
    out_channels, group_channels, kernel_h, kernel_w = weight.shape
    stride_h, stride_w = _pair(stride)
    dilation_h, dilation_w = _pair(dilation)
    if padding == "same":
        # As conv2d: the odd zero of an even kernel goes to the bottom and to the right.
        total_h, total_w = dilation_h * (kernel_h - 1), dilation_w * (kernel_w - 1)
        pad_top, pad_left = total_h // 2, total_w // 2
    else:
        pad_top, pad_left = (0, 0) if padding == "valid" else _pair(padding)
        total_h, total_w = 2 * pad_top, 2 * pad_left
    out_h = (height + total_h - dilation_h * (kernel_h - 1) - 1) // stride_h + 1
    out_w = (width + total_w - dilation_w * (kernel_w - 1) - 1) // stride_w + 1
    offset_groups = offset.size(1) // (2 * kernel_h * kernel_w)
    groups = channels // group_channels

    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    device = input.device
    points = offset.to(dtype).reshape(batch, offset_groups, kernel_h, kernel_w, 2, out_h, out_w)
    dy, dx = points.unbind(4)  # each [N, G, Kh, Kw, Ho, Wo]

    def arange(size: int) -> Tensor:
        return torch.arange(size, device=device)

    base_y = arange(out_h)[:, None] * stride_h - pad_top + (arange(kernel_h) * dilation_h)[:, None, None, None]
    base_x = arange(out_w) * stride_w - pad_left + (arange(kernel_w) * dilation_w)[:, None, None]

    is_nan = dy.isnan() | dx.isnan()
    cell_y, in_cells_y, counts_y = _locate(dy.detach(), base_y, height)
    cell_x, in_cells_x, counts_x = _locate(dx.detach(), base_x, width)
    in_cells = in_cells_y & in_cells_x & ~is_nan
    counts = counts_y & counts_x & ~is_nan

    fraction_y = _fraction(dy, in_cells)
    fraction_x = _fraction(dx, in_cells)

    # One more pixel, 0, stands for everything outside the image, so that nothing is read from or added to a real pixel
    # in place of one that does not exist.
    pixels = input.to(dtype).reshape(batch, offset_groups, channels // offset_groups, height * width)
    pixels = torch.cat([pixels, pixels.new_zeros(*pixels.shape[:3], 1)], dim=-1)

    value = 0.0
    for step_y, weight_y in ((0, 1 - fraction_y), (1, fraction_y)):
        for step_x, weight_x in ((0, 1 - fraction_x), (1, fraction_x)):
            y, x = cell_y + step_y, cell_x + step_x
            inside = in_cells & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            index = torch.where(inside, y * width + x, height * width).flatten(2).unsqueeze(2)
            corner = pixels.gather(3, index.expand(-1, -1, pixels.size(2), -1))
            corner = corner.reshape(*corner.shape[:3], *dy.shape[2:])  # [N, G, C/G, Kh, Kw, Ho, Wo]
            # A point exactly at -1 does not count but has the derivative of its cell: it gets there by weights of 0,
            # which an infinite pixel would turn into NaN.
            corner = torch.where(counts.unsqueeze(2) | corner.isfinite(), corner, 0.0)
            value = value + (weight_y * weight_x).unsqueeze(2) * corner

    if out_channels:  # else there is no output for a NaN to reach, and the gradients are zeros
        # NaN into the value and, by the product rule, into the gradients of dy and dx. The other points add 0 * 0.
        nan = torch.where(is_nan, float("nan"), 0.0).to(dtype)
        value = value + ((torch.where(is_nan, dy, 0.0) + torch.where(is_nan, dx, 0.0)) * nan).unsqueeze(2)

    if mask is not None:
        value = value * mask.to(dtype).reshape(batch, offset_groups, 1, kernel_h, kernel_w, out_h, out_w)

    columns = value.reshape(batch, groups, group_channels * kernel_h * kernel_w, out_h * out_w)
    kernel = weight.to(dtype).reshape(groups, out_channels // groups, group_channels * kernel_h * kernel_w)
    output = torch.matmul(kernel, columns).reshape(batch, out_channels, out_h, out_w)
    if bias is not None:
        output = output + bias.to(dtype)[:, None, None]
    output = output.to(input.dtype)
    if _is_channels_last(input):
        # The same as contiguous(memory_format=torch.channels_last), which vmap does not know.
        output = output.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return output


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _locate(displacement: Tensor, base: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The cell floor(base + displacement), whether it has a corner in the image, and whether the point counts.

    The integer base is added to an integer, so no bit of the displacement is lost however wide the image is.
    """
    floor = displacement.floor()
    cell = base + floor.nan_to_num(0.0, _FAR, -_FAR).clamp(-_FAR, _FAR).to(torch.int64)
    in_cells = (cell >= -1) & (cell < size)
    counts = in_cells & ((cell >= 0) | (displacement > floor))
    return cell, in_cells, counts


def _fraction(displacement: Tensor, in_cells: Tensor) -> Tensor:
    """The position within the cell, 0 to 1; 0, with a derivative of 0, for a point that is in none."""
    displacement = torch.where(in_cells, displacement, 0.0)
    return displacement - displacement.detach().floor()


def _is_channels_last(tensor: Tensor) -> bool:
    """Contiguous in channels_last and not plainly contiguous, told from the strides, which exist under vmap too."""
    if tensor.is_contiguous():
        return False
    _, channels, height, width = tensor.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )
