"""ms_deform_attn: everything about the op that lives in Python. Its schemas and kernels are in csrc/ms_deform_attn.

There are two forms of it: sizes of the levels as a list of ints, or in tensors as Deformable DETR has them. They are
ops of their own, each with its backward op.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula

from deformc import _checks, _eager, _library, _transforms
from deformc._autocast import Autocast
from deformc.formulas import ms_deform_attn as formulas

_NAMES = ("ms_deform_attn", "ms_deform_attn_tensor_shapes")
_list_op, _tensor_op = (_library.op(name) for name in _NAMES)
_list_backward, _tensor_backward = (_library.op(f"{name}_backward") for name in _NAMES)


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Sequence[tuple[int, int]] | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    level_start_index: Tensor | None = None,
    num_points: Sequence[int] | None = None,
    mode: Literal["bilinear", "discrete"] = "bilinear",
) -> Tensor:
    r"""Multi-scale deformable attention: weighted sums of values that are sampled from several feature maps.

    For each query and head, the output is the sum over levels and points of the attention weight times the value
    sampled at the point's location, for each of the head's D channels.

    Args:
        value: ``[N, S, M, D]``; float64, float32, float16 or bfloat16. S counts the pixels of all levels, one level
            after the other, each row by row. M heads.
        spatial_shapes: the L levels' (H, W), finest first by custom. Best a list of pairs of ints: it is checked
            exactly, read without waiting for a device, and under ``torch.compile`` and ``torch.export`` one program
            serves all sizes. Or an int64 tensor ``[L, 2]`` on the device of ``value``.
        sampling_locations: ``[N, Q, M, L, P, 2]``, or ``[N, Q, M, T, 2]`` with ``num_points``: (x, y), normalised: 0
            and 1 are the outer edges of the level's image, and its pixel centres lie at ``(i + 0.5) / size``. dtype of
            ``value``, or float32.
        attention_weights: ``[N, Q, M, L, P]`` or ``[N, Q, M, T]``; dtype of ``value``, or float32. They need not sum
            to 1.
        level_start_index: int64 tensor ``[L]`` with each level's first pixel in S, for ``spatial_shapes`` that is a
            tensor; by default one level after the other. With a list of shapes it says nothing new and is not read.
        num_points: how many of the T points belong to each level, in the order of the levels. By default P each.
        mode: ``"bilinear"``, zero outside the image; or RT-DETRv2's ``"discrete"``, the pixel under the location,
            and outside the image the one at the edge nearest to it.

    Returns:
        ``[N, Q, M*D]`` in the dtype of ``value``.

    With ``"bilinear"``, location (x, y) is the point ``(x*W - 0.5, y*H - 0.5)`` in pixels, as in ``grid_sample`` with
    ``align_corners=False``. With ``"discrete"`` it is pixel ``(trunc(x*W + 0.5), trunc(y*H + 0.5))``, clamped to the
    image; locations then have a gradient of 0.

    Positions are computed in float32 (float64 for float64 ``value``) whatever the dtypes, sums likewise, and rounded
    once. A NaN location makes the outputs of its query and head NaN; infinite locations lie outside.

    Sources: Zhu et al., "Deformable DETR" (ICLR 2021); Lv et al., "RT-DETRv2" (2024) for ``"discrete"``; uneven
    ``num_points`` are D-FINE's.

    Raises:
        RuntimeError: for shapes, dtypes or devices that do not fit; the text names the argument, what was expected and
            what it got. The contents of shape tensors are checked on the CPU only.

    Differentiable any number of times, in reverse and forward mode, with respect to ``value``, ``sampling_locations``
    and ``attention_weights``.
    """
    tensors = (value, spatial_shapes, sampling_locations, attention_weights, level_start_index)
    if has_torch_function(tensors):
        options = {"level_start_index": level_start_index, "num_points": num_points, "mode": mode}
        return handle_torch_function(ms_deform_attn, tensors, *tensors[:4], **options)
    shapes_in_tensor = isinstance(spatial_shapes, Tensor)
    if shapes_in_tensor:
        levels = spatial_shapes.shape[0] if spatial_shapes.dim() else 0
    else:
        sizes = _flat_sizes(spatial_shapes)
        levels = len(sizes) // 2
    if num_points is None:
        num_points = (_points_per_level(sampling_locations, levels),) * levels
    if sampling_locations.dim() == 6:
        sampling_locations, attention_weights = _flat_points(sampling_locations, attention_weights, levels, num_points)
    rest = (sampling_locations, attention_weights, num_points, mode)
    differentiable = (value, sampling_locations, attention_weights)
    if not shapes_in_tensor:
        return _eager.call(_list_op, (value, sizes, *rest), differentiable)
    if level_start_index is None:
        areas = spatial_shapes.prod(1)
        level_start_index = areas.cumsum(0) - areas
    return _eager.call(_tensor_op, (value, spatial_shapes, level_start_index, *rest), differentiable)


def _fail(text: str):
    raise RuntimeError(f"ms_deform_attn: {text}")


def _flat_sizes(spatial_shapes) -> list[int]:
    """[H0, W0, H1, W1, ...]."""
    try:
        sizes = []
        for height, width in spatial_shapes:
            sizes += (height, width)
    except (TypeError, ValueError):
        sizes = [None]
    if not all(type(size) is int or isinstance(size, (int, torch.SymInt)) for size in sizes):
        _fail(f"spatial_shapes must be a list of (H, W) or an int64 tensor [L, 2], got {spatial_shapes!r}")
    return sizes


def _points_per_level(sampling_locations: Tensor, levels: int) -> int:
    if sampling_locations.dim() == 6:
        return sampling_locations.shape[4]
    if sampling_locations.dim() != 5:
        got = _checks.shape_text(sampling_locations.shape)
        _fail(f"sampling_locations must have shape [N, Q, M, L, P, 2] or [N, Q, M, T, 2], got {got}")
    points = sampling_locations.shape[3]
    if levels and points % levels:
        _fail(f"num_points must be given where the L = {levels} levels do not have T/L points each, got T = {points}")
    return points // max(levels, 1)


def _flat_points(sampling_locations, attention_weights, levels, num_points) -> tuple[Tensor, Tensor]:
    """[N, Q, M, L, P, 2] and [N, Q, M, L, P] as [N, Q, M, T, 2] and [N, Q, M, T]."""
    text = _checks.shape_text
    count = sampling_locations.shape[4]
    if levels and sampling_locations.shape[3] != levels:
        got = text(sampling_locations.shape)
        _fail(f"sampling_locations must have shape [N, Q, M, L, P, 2] with L = {levels}, got {got}")
    if any(points != count for points in num_points):
        _fail(f"num_points must be P = {count} for every level where sampling_locations has L and P, got {num_points}")
    if attention_weights.dim() == 5:
        if attention_weights.shape != sampling_locations.shape[:5]:
            expected, got = text(sampling_locations.shape[:5]), text(attention_weights.shape)
            _fail(f"attention_weights must have shape [N, Q, M, L, P] = {expected}, got {got}")
        attention_weights = attention_weights.flatten(3)
    return sampling_locations.flatten(3, 4), attention_weights


# ---- fake kernels ----------------------------------------------------------------------------------------------------

_VALUE, _LOCATIONS, _WEIGHTS = "[N, S, M, D]", "[N, Q, M, T, 2]", "[N, Q, M, T]"


def _check_arguments(op, value, shapes, sampling_locations, attention_weights, num_points, mode):
    """check_arguments of csrc/ms_deform_attn/ms_deform_attn_host.h, in the same order; the size of the output.

    ``shapes`` is a list of sizes, or the tensors spatial_shapes and level_start_index. Those are not read, which
    would wait for the device.
    """
    checks = _checks.Checks(op)
    text = _checks.shape_text
    points = (("sampling_locations", sampling_locations), ("attention_weights", attention_weights))
    indices = (("spatial_shapes", shapes[0]), ("level_start_index", shapes[1])) if isinstance(shapes, tuple) else ()
    checks.rank("value", value, 4, _VALUE)
    checks.rank("sampling_locations", sampling_locations, 5, _LOCATIONS)
    checks.rank("attention_weights", attention_weights, 4, _WEIGHTS)
    for (name, tensor), rank, shape in zip(indices, (2, 1), ("[L, 2]", "[L]"), strict=False):
        checks.rank(name, tensor, rank, shape)

    checks.data_dtype("value", value)
    for name, tensor in points:
        checks.coordinate_dtype(name, tensor, "value", value)
    for name, tensor in indices:
        checks.index_dtype(name, tensor)
    for name, tensor in (*points, *indices):
        checks.same_device(name, tensor, "value", value)
    checks.require(mode in ("bilinear", "discrete"), lambda: f'mode must be "bilinear" or "discrete", got "{mode}"')

    if indices:
        spatial_shapes, level_start_index = shapes
        levels = spatial_shapes.shape[0]
        checks.require(
            levels > 0,
            lambda: f"spatial_shapes must have shape [L, 2] with at least one level, got {text(spatial_shapes.shape)}",
        )
        checks.shape("spatial_shapes", spatial_shapes, "[L, 2]", (levels, 2))
        checks.shape("level_start_index", level_start_index, "[L]", (levels,))
    else:
        checks.require(len(shapes) > 0, lambda: "spatial_shapes must have H and W of at least one level, got []")
        checks.require(
            len(shapes) % 2 == 0, lambda: f"spatial_shapes must have H and W of each level, got {len(shapes)} numbers"
        )
        levels = len(shapes) // 2
    counts = list(num_points)
    checks.require(
        len(counts) == levels,
        lambda: f"num_points must have one count for each of the L = {levels} levels, got {text(counts)}",
    )
    checks.require(all(count >= 0 for count in counts), lambda: f"num_points must be at least 0, got {text(counts)}")
    if not indices:
        pairs = "[" + ", ".join(text(pair) for pair in zip(shapes[::2], shapes[1::2], strict=True)) + "]"
        for size in shapes:
            checks.forbid_size(lambda size=size: size < 1, lambda: f"spatial_shapes must be at least 1, got {pairs}")
        for size in shapes:
            checks.forbid_size(
                lambda size=size: size >= 2**30, lambda: f"spatial_shapes must be below 2^30, got {pairs}"
            )

    batch, pixels, heads, channels = value.shape
    queries, total = sampling_locations.shape[1], sum(counts)
    for size in (heads, channels):
        checks.forbid_size(
            lambda size=size: size == 0,
            lambda: f"value must have at least one head and one channel, got shape {text(value.shape)}",
        )
    checks.shape("sampling_locations", sampling_locations, _LOCATIONS, (batch, queries, heads, total, 2))
    checks.shape("attention_weights", attention_weights, _WEIGHTS, (batch, queries, heads, total))
    if not indices:
        area = sum(height * width for height, width in zip(shapes[::2], shapes[1::2], strict=True))
        checks.equal_sizes(
            pixels,
            area,
            lambda: (
                f"value must have shape {_VALUE} with S = {area}, the sum of H*W over spatial_shapes, "
                f"got {text(value.shape)}"
            ),
        )
    return batch, queries, heads * channels


def _check_backward(op, grad_output, value, *args):
    out_sizes = _check_arguments(op, value, *args)
    checks = _checks.Checks(op)
    checks.same_dtype("grad_output", grad_output, "value", value)
    checks.same_device("grad_output", grad_output, "value", value)
    checks.shape("grad_output", grad_output, "[N, Q, M*D]", out_sizes)


def _gradients_like(value, locations, weights, need_value, need_locations, need_weights):
    pairs = ((value, need_value), (locations, need_locations), (weights, need_weights))
    return tuple(tensor.new_empty(tensor.shape if need else (0,)) for tensor, need in pairs)


class _Form:
    """One of the two forms: where the shapes are among the arguments (``value, *shapes, locations, weights, ...``)."""

    def __init__(self, name: str, op, backward, shapes: int) -> None:
        self.name, self.op, self.backward_op, self.shapes = name, op, backward, shapes

    def split(self, args):
        """Shapes as the check takes them, and what follows them."""
        shapes, rest = args[: self.shapes], args[self.shapes :]
        return (list(shapes[0]) if self.shapes == 1 else tuple(shapes)), rest

    def check(self, value, *args):
        shapes, rest = self.split(args)
        return _check_arguments(self.name, value, shapes, *rest)

    def check_backward(self, grad_output, value, *args):
        shapes, rest = self.split(args)
        _check_backward(f"{self.name}_backward", grad_output, value, shapes, *rest[:4])

    def fake(self, value, *args):
        return value.new_empty(self.check(value, *args))

    def backward_fake(self, grad_output, value, *args):
        self.check_backward(grad_output, value, *args)
        locations, weights, *_, need_value, need_locations, need_weights, _ = self.split(args)[1]
        return _gradients_like(value, locations, weights, need_value, need_locations, need_weights)

    # Of each point and channel: a multiplication and an addition for every pixel read and for the weight.
    def flops(self, value_shape, *args, out_shape=None, **kwargs) -> int:
        _, (_, weights_shape, _, mode) = self.split(args)
        return _point_flops(mode) * math.prod(weights_shape) * value_shape[3]

    def backward_flops(self, grad_output_shape, value_shape, *args, out_shape=None, **kwargs) -> int:
        """Each of the two parts, the value's gradient and the points', costs as much as the forward direction."""
        _, (_, weights_shape, _, mode, need_value, need_locations, need_weights, _) = self.split(args)
        parts = need_value + (need_locations or need_weights)
        return parts * _point_flops(mode) * math.prod(weights_shape) * value_shape[3]

    def register(self) -> None:
        torch.library.register_fake(self.op, self.fake)
        torch.library.register_fake(self.backward_op, self.backward_fake)
        autocast = Autocast(self.op, data=("value",))
        autocast.register()
        _transforms.register(formulas.MSDeformAttn(self.op, self.backward_op, self.shapes), autocast)
        register_flop_formula(self.op.overloadpacket)(self.flops)
        register_flop_formula(self.backward_op.overloadpacket)(self.backward_flops)
        _library.explain_missing_kernels(self.name, self.check)
        _library.explain_missing_kernels(f"{self.name}_backward", self.check_backward)


def _point_flops(mode: str) -> int:
    return 4 if mode == "discrete" else 10


if _library.loaded():
    _Form("ms_deform_attn", _list_op, _list_backward, shapes=1).register()
    _Form("ms_deform_attn_tensor_shapes", _tensor_op, _tensor_backward, shapes=2).register()
