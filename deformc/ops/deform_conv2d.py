"""deform_conv2d: everything about the op that lives in Python. Its schemas and kernels are in csrc/deform_conv2d."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula

from deformc import _checks, _eager, _library, _transforms
from deformc._autocast import Autocast
from deformc.formulas import deform_conv2d as formulas

Pair = int | tuple[int, int]

_forward = _library.op("deform_conv2d")
_backward = _library.op("deform_conv2d_backward")


def deform_conv2d(
    input: torch.Tensor,
    offset: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | Literal["same", "valid"] = 0,
    dilation: Pair = 1,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Deformable convolution: a convolution whose taps are moved by offsets and, with a mask, weighted.

    Output pixel ``(oy, ox)`` is the sum over input channels and taps ``(ky, kx)`` of the weight times the input sampled
    at ``(oy*stride - padding + ky*dilation + dy, ox*stride - padding + kx*dilation + dx)``: bilinear, zero outside the
    image, times the mask.

    Without ``mask`` it is deformable convolution as in Dai et al., "Deformable Convolutional Networks" (2017); with it,
    version 2, Zhu et al., "Deformable ConvNets v2" (2019). Arguments and semantics are those of
    ``torchvision.ops.deform_conv2d``.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``; float64, float32, float16 or bfloat16.
        offset: ``[N, 2*G*Kh*Kw, Ho, Wo]``, in pixels of the input. Channels are ordered (offset group, ky, kx,
            (dy, dx)). ``G``, the number of offset groups, follows from the shape; each serves ``C/G`` consecutive
            channels. dtype of ``input``, or float32.
        weight: ``[O, C/groups, Kh, Kw]``, dtype of ``input``. ``groups`` follows from the shape.
        bias: ``[O]``, dtype of ``input``.
        stride: int or (vertical, horizontal).
        padding: int or (vertical, horizontal) of zeros; ``"valid"`` for none; ``"same"`` for as many as give the output
            the size of the input (stride 1 only; an even kernel gets the odd row or column at the bottom or right, as
            in ``conv2d``).
        dilation: int or (vertical, horizontal).
        mask: ``[N, G*Kh*Kw, Ho, Wo]``, channels ordered (offset group, ky, kx). dtype of ``input``, or float32.

    Returns:
        ``[N, O, Ho, Wo]`` (``[O, Ho, Wo]`` for an input without ``N``) in the dtype of ``input``; channels_last if
        ``input`` is.

    Positions are computed in float32 (float64 for float64 ``input``) whatever the dtypes, sums likewise, and rounded
    once. A NaN offset makes the outputs it touches NaN; infinite offsets and those that lead outside contribute 0.

    Raises:
        RuntimeError: for shapes, dtypes or devices that do not fit; the text names the argument, what was expected and
            what it got.

    Differentiable any number of times, in reverse and forward mode, with respect to ``input``, ``offset``, ``weight``,
    ``bias`` and ``mask``.
    """
    if has_torch_function((input, offset, weight, bias, mask)):
        arguments = (input, offset, weight, bias, stride, padding, dilation, mask)
        return handle_torch_function(deform_conv2d, (input, offset, weight, bias, mask), *arguments)
    stride_h, stride_w = _pair("stride", stride)
    dilation_h, dilation_w = _pair("dilation", dilation)
    batched = input.dim() == 4
    if not batched:
        input, offset, mask = _batched(input, offset, mask)
    if isinstance(padding, str):
        input, pad_h, pad_w = _named_padding(padding, input, weight, (stride_h, stride_w), (dilation_h, dilation_w))
    else:
        pad_h, pad_w = _pair("padding", padding)
    allow_tf32 = input.is_cuda and torch.backends.cudnn.allow_tf32
    tensors = (input, offset, weight, bias, mask)
    window = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    out = _eager.call(_forward, (*tensors, *window, allow_tf32), tensors)
    return out if batched else out.squeeze(0)


def _pair(name: str, value: Pair) -> tuple[int, int]:
    if type(value) is tuple and len(value) == 2 and type(value[0]) is int and type(value[1]) is int:
        return value
    if isinstance(value, (int, torch.SymInt)):
        return value, value
    if isinstance(value, (tuple, list)):
        if len(value) == 1:
            value = (value[0], value[0])
        if len(value) == 2 and all(isinstance(element, (int, torch.SymInt)) for element in value):
            return value[0], value[1]
    kinds = 'an int, a pair of ints, "same" or "valid"' if name == "padding" else "an int or a pair of ints"
    raise RuntimeError(f"deform_conv2d: {name} must be {kinds}, got {value!r}")


def _batched(input, offset, mask):
    """The batch of one that an input without a batch dimension stands for."""
    text = _checks.shape_text
    if input.dim() != 3:
        shape = text(input.shape)
        raise RuntimeError(f"deform_conv2d: input must have shape [N, C, H, W] or [C, H, W], got {shape}")
    for name, shape, tensor in (("offset", "2*G*Kh*Kw", offset), ("mask", "G*Kh*Kw", mask)):
        if tensor is not None and tensor.dim() != 3:
            expected = f"[{shape}, Ho, Wo] when input has shape [C, H, W]"
            raise RuntimeError(f"deform_conv2d: {name} must have shape {expected}, got {text(tensor.shape)}")
    return input.unsqueeze(0), offset.unsqueeze(0), None if mask is None else mask.unsqueeze(0)


def _named_padding(padding: str, input, weight, stride, dilation):
    """Input and padding that "same" or "valid" stand for."""
    if padding == "valid":
        return input, 0, 0
    if padding != "same":
        _pair("padding", padding)
    if tuple(stride) != (1, 1):
        raise RuntimeError(f'deform_conv2d: padding="same" needs stride 1, got {_checks.shape_text(stride)}')
    checks = _checks.Checks("deform_conv2d")
    checks.rank("weight", weight, 4, _WEIGHT)
    checks.at_least("dilation", 1, *dilation)
    total_h, total_w = (d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True))
    if total_h % 2 or total_w % 2:
        # The odd row or column of zeros goes to the bottom or right. A sample there is still outside the image.
        input = F.pad(input, (0, total_w % 2, 0, total_h % 2))
    return input, total_h // 2, total_w // 2


# ---- fake kernels ----------------------------------------------------------------------------------------------------

_WEIGHT, _OFFSET, _MASK = "[O, C/groups, Kh, Kw]", "[N, 2*G*Kh*Kw, Ho, Wo]", "[N, G*Kh*Kw, Ho, Wo]"


def _check_arguments(op, input, offset, weight, bias, mask, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w):
    """check_arguments of csrc/deform_conv2d/deform_conv2d_host.h, in the same order; the size of the output."""
    checks = _checks.Checks(op)
    text = _checks.shape_text
    checks.rank("input", input, 4, "[N, C, H, W]")
    checks.rank("weight", weight, 4, _WEIGHT)
    checks.rank("offset", offset, 4, _OFFSET)
    checks.rank("mask", mask, 4, _MASK)
    checks.rank("bias", bias, 1, "[O]")

    checks.data_dtype("input", input)
    checks.same_dtype("weight", weight, "input", input)
    checks.coordinate_dtype("offset", offset, "input", input)
    checks.coordinate_dtype("mask", mask, "input", input)
    checks.same_dtype("bias", bias, "input", input)
    for name, tensor in (("weight", weight), ("offset", offset), ("mask", mask), ("bias", bias)):
        checks.same_device(name, tensor, "input", input)

    checks.at_least("stride", 1, stride_h, stride_w)
    checks.at_least("padding", 0, pad_h, pad_w)
    checks.at_least("dilation", 1, dilation_h, dilation_w)

    batch, channels, height, width = input.shape
    out_channels, group_channels, kernel_h, kernel_w = weight.shape
    checks.forbid_size(
        lambda: channels == 0, lambda: f"input must have at least one channel, got shape {text(input.shape)}"
    )
    for size in (kernel_h, kernel_w):
        checks.forbid_size(
            lambda size=size: size == 0,
            lambda: f"weight must have a kernel of at least 1x1, got shape {text(weight.shape)}",
        )

    def weight_text(expected):
        return lambda: f"weight must have shape {_WEIGHT} with {expected}, got {text(weight.shape)}"

    checks.require(
        group_channels != 0 and channels % group_channels == 0, weight_text(f"C/groups dividing C = {channels}")
    )
    groups = channels // group_channels
    checks.require(out_channels % groups == 0, weight_text(f"groups = {groups} dividing O"))

    padded = tuple(map(_checks.saturated, (height + 2 * pad_h, width + 2 * pad_w)))
    extent = tuple(map(_checks.saturated, (dilation_h * (kernel_h - 1) + 1, dilation_w * (kernel_w - 1) + 1)))
    for have, need in zip(padded, extent, strict=True):
        checks.forbid_size(
            lambda have=have, need=need: have < need,
            lambda: f"kernel must not be larger than the padded input, {text(padded)}, got {text(extent)}",
        )
    for size in padded:
        checks.forbid_size(
            lambda size=size: size >= 2**30,
            lambda: f"input is too large: H, W and their padded sizes must be below 2^30, got {text(padded)}",
        )
    out_h = (padded[0] - extent[0]) // stride_h + 1
    out_w = (padded[1] - extent[1]) // stride_w + 1

    taps = kernel_h * kernel_w
    offset_channels = offset.shape[1]
    if offset_channels == 0 or offset_channels % (2 * taps) != 0:
        offset_channels = 2 * taps
    checks.shape("offset", offset, _OFFSET, (batch, offset_channels, out_h, out_w))
    offset_groups = offset_channels // (2 * taps)
    checks.require(
        channels % offset_groups == 0,
        lambda: (
            f"offset must have shape {_OFFSET} with G = {offset_groups} dividing C = {channels}, "
            f"got {text(offset.shape)}"
        ),
    )
    checks.shape("mask", mask, _MASK, (batch, offset_groups * taps, out_h, out_w))
    checks.shape("bias", bias, "[O]", (out_channels,))
    return batch, out_channels, out_h, out_w


def _check_forward(input, offset, weight, bias, mask, *window):
    return _check_arguments("deform_conv2d", input, offset, weight, bias, mask, *window[:6])


def _check_backward(grad_output, input, offset, weight, mask, *window_and_flags):
    op = "deform_conv2d_backward"
    out_sizes = _check_arguments(op, input, offset, weight, None, mask, *window_and_flags[:6])
    checks = _checks.Checks(op)
    checks.same_dtype("grad_output", grad_output, "input", input)
    checks.same_device("grad_output", grad_output, "input", input)
    checks.shape("grad_output", grad_output, "[N, O, Ho, Wo]", out_sizes)
    return out_sizes


def _fake(input, *args):
    return _checks.empty_like_layout(input, _check_forward(input, *args))


def _backward_fake(grad_output, input, offset, weight, mask, *window_and_flags):
    out_sizes = _check_backward(grad_output, input, offset, weight, mask, *window_and_flags)
    need_input, need_offset, need_weight, need_bias, need_mask = window_and_flags[7:12]
    absent = (0,)
    return (
        _checks.empty_like_layout(input, input.shape) if need_input else input.new_empty(absent),
        offset.new_empty(offset.shape if need_offset else absent),
        weight.new_empty(weight.shape if need_weight else absent),
        input.new_empty(out_sizes[1:2] if need_bias else absent),
        mask.new_empty(mask.shape if need_mask else absent) if mask is not None else input.new_empty(absent),
    )


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


def _flops(input_shape, offset_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    """Those of the matrix product, the same as conv2d's. Sampling, about 8 for each column element, is not counted."""
    out_channels, group_channels, kernel_h, kernel_w = weight_shape
    pixels = offset_shape[0] * offset_shape[2] * offset_shape[3]
    return 2 * pixels * out_channels * group_channels * kernel_h * kernel_w


def _backward_flops(
    grad_output_shape, input_shape, offset_shape, weight_shape, mask_shape, *args, out_shape=None, **kwargs
) -> int:
    """One product for the columns' gradient, which input, offset and mask share, and one for the weight's."""
    need_input, need_offset, need_weight, _need_bias, need_mask = args[7:12]
    products = (need_input or need_offset or need_mask) + need_weight
    return products * _flops(input_shape, offset_shape, weight_shape)


if _library.loaded():
    torch.library.register_fake(_forward, _fake)
    torch.library.register_fake(_backward, _backward_fake)
    _autocast = Autocast(_forward, data=("input", "weight", "bias"))
    _autocast.register()
    _transforms.register(formulas.DeformConv2d(_forward, _backward), _autocast)
    register_flop_formula(_forward.overloadpacket)(_flops)
    register_flop_formula(_backward.overloadpacket)(_backward_flops)
    _library.explain_missing_kernels("deform_conv2d", _check_forward)
    _library.explain_missing_kernels("deform_conv2d_backward", _check_backward)
