"""Samples and errors of deform_conv2d."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import deformc
import deformc.reference
from specs import DTYPES_OF_DEVICES, Arguments, Dtypes, ErrorSample, OpSpec, Sample
from specs.layouts import LAYOUTS, channels_last

INF, NAN = math.inf, math.nan
TENSORS = ("input", "offset", "weight", "bias", "mask")


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def output_size(arguments: Arguments) -> tuple[int, int]:
    """Ho and Wo of padding given as numbers."""
    sizes = []
    for i, (size, kernel) in enumerate(zip(arguments["input"].shape[-2:], arguments["weight"].shape[-2:], strict=True)):
        stride, padding, dilation = (pair(arguments[name])[i] for name in ("stride", "padding", "dilation"))
        sizes.append((size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)
    return sizes[0], sizes[1]


def flat_arguments(arguments: Arguments) -> tuple[int, ...]:
    return tuple(pair(arguments[name])[i] for name in ("stride", "padding", "dilation") for i in (0, 1))


def op_arguments(arguments: Arguments) -> tuple:
    return (*(arguments[name] for name in TENSORS), *flat_arguments(arguments), False)


def backward_arguments(arguments: Arguments, grad_output: Tensor, needs: frozenset[str]) -> tuple:
    tensors = (arguments[name] for name in ("input", "offset", "weight", "mask"))
    return (grad_output, *tensors, *flat_arguments(arguments), False, *(name in needs for name in TENSORS), False)


# --- Samples ----------------------------------------------------------------------------------------------------------

Offsets = Callable[[Tensor, torch.Generator], Tensor]


def away_from_integers(offset: Tensor, generator: torch.Generator) -> Tensor:
    """Up to two pixels away, with fractions between 0.15 and 0.85."""
    cells = torch.randint(-2, 2, offset.shape, generator=generator)
    return cells + 0.15 + 0.7 * torch.rand(offset.shape, generator=generator, dtype=torch.float64)


def integers(offset: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, offset.shape, generator=generator).double()


def zeros(offset: Tensor, generator: torch.Generator) -> Tensor:
    return torch.zeros_like(offset)


def far(offset: Tensor, generator: torch.Generator) -> Tensor:
    """Most points outside of a small image."""
    return 30 * torch.rand(offset.shape, generator=generator, dtype=torch.float64) - 15


def anything_of(values: Sequence[float], share: float = 0.3) -> Offsets:
    """Ordinary offsets of which a share is replaced by the values, in turn."""

    def draw(offset: Tensor, generator: torch.Generator) -> Tensor:
        result = away_from_integers(offset, generator).flatten()
        chosen = torch.rand(result.shape, generator=generator) < share
        count = int(chosen.sum())
        result[chosen] = torch.tensor(values, dtype=torch.float64).repeat(count // len(values) + 1)[:count]
        return result.reshape(offset.shape)

    return draw


def one_of(value: float, index: tuple[int, ...]) -> Offsets:
    def draw(offset: Tensor, generator: torch.Generator) -> Tensor:
        result = away_from_integers(offset, generator)
        result[index] = value
        return result

    return draw


def all_of(value: float) -> Offsets:
    return lambda offset, generator: torch.full_like(offset, value)


def onto(*positions: float, stride: int = 1, padding: int = 1, dilation: int = 1) -> Offsets:
    """Offsets that put the points exactly onto these coordinates, in turn: image borders, integers."""

    def draw(offset: Tensor, generator: torch.Generator) -> Tensor:
        n, _, out_h, out_w = offset.shape
        points = offset.reshape(n, -1, 3, 3, 2, out_h, out_w)
        taps = (torch.arange(3) * dilation).double()
        base_y = (torch.arange(out_h) * stride - padding)[:, None] + taps[:, None, None, None]
        base_x = torch.arange(out_w) * stride - padding + taps[:, None, None]
        chosen = torch.tensor(positions, dtype=torch.float64)
        wanted = chosen[torch.randint(len(positions), points.shape, generator=generator)]
        dy, dx = wanted[:, :, :, :, 0] - base_y, wanted[:, :, :, :, 1] - base_x
        return torch.stack([dy, dx], dim=4).reshape(offset.shape)

    return draw


def problem(
    *,
    n: int = 2,
    c: int = 4,
    size: tuple[int, int] = (5, 6),
    o: int = 4,
    kernel: int | tuple[int, int] = 3,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    offset_groups: int = 1,
    bias: bool = True,
    mask: bool = True,
    offsets: Offsets = away_from_integers,
    layouts: dict[str, Callable[[Tensor], Tensor]] | None = None,
    edit: Callable[[Arguments], None] | None = None,
) -> Callable[[str, Dtypes, int], Arguments]:
    kernel_h, kernel_w = pair(kernel)

    def make(device: str, dtypes: Dtypes, seed: int = 0) -> Arguments:
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
            return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

        fan_in = max(c // groups * kernel_h * kernel_w, 1)
        arguments: Arguments = {
            "input": uniform(n, c, *size),
            "offset": None,
            "weight": uniform(o, c // groups, kernel_h, kernel_w) * (3 / fan_in) ** 0.5,
            "bias": uniform(o) if bias else None,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "mask": None,
        }
        out_h, out_w = output_size(arguments)
        points = offset_groups * kernel_h * kernel_w
        arguments["offset"] = offsets(torch.zeros(n, 2 * points, out_h, out_w, dtype=torch.float64), generator)
        if mask:
            arguments["mask"] = uniform(n, points, out_h, out_w, low=0.1, high=1.0)
        if edit is not None:
            edit(arguments)
        for name in TENSORS:
            if arguments[name] is None:
                continue
            dtype = {"offset": dtypes.coordinates, "mask": dtypes.factors}.get(name, dtypes.data)
            tensor = arguments[name].to(dtype).to(device)
            if layouts is not None and name in layouts:
                tensor = layouts[name](tensor)
            arguments[name] = tensor
        return arguments

    return make


def unbatched(make: Callable[[str, Dtypes, int], Arguments]) -> Callable[[str, Dtypes, int], Arguments]:
    def make_unbatched(device: str, dtypes: Dtypes, seed: int = 0) -> Arguments:
        arguments = make(device, dtypes, seed)
        for name in ("input", "offset", "mask"):
            if arguments[name] is not None:
                arguments[name] = arguments[name][0]
        return arguments

    return make_unbatched


def named_padding(padding: str, **parameters: Any) -> Callable[[str, Dtypes, int], Arguments]:
    """A problem with padding="same" or "valid"; "same" has stride 1, so that offset and mask have the size of input."""
    kernel_h, kernel_w = pair(parameters.get("kernel", 3))
    n, (height, width) = parameters.get("n", 2), parameters.get("size", (5, 6))
    points = parameters.get("offset_groups", 1) * kernel_h * kernel_w

    def edit(arguments: Arguments) -> None:
        arguments["padding"] = padding
        if padding == "valid":
            return
        generator = torch.Generator().manual_seed(1)
        arguments["offset"] = away_from_integers(torch.zeros(n, 2 * points, height, width), generator)
        if arguments["mask"] is not None:
            arguments["mask"] = torch.rand(n, points, height, width, generator=generator, dtype=torch.float64)

    if padding == "same":
        # Any padding that makes the problem valid: the edit above replaces what was made for it.
        dilation_h, dilation_w = pair(parameters.get("dilation", 1))
        return problem(padding=(dilation_h * kernel_h, dilation_w * kernel_w), edit=edit, **parameters)
    return problem(padding=0, edit=edit, **parameters)


def infinite_pixels(arguments: Arguments) -> None:
    """Pixels that are not finite where an index clamped into the image would find them."""
    arguments["input"][:, :, 0, 0] = INF
    arguments["input"][:, :, -1, -1] = NAN
    arguments["input"][:, :, 0, -1] = -INF


ASYMMETRIC = {
    "c": 4,
    "size": (9, 7),
    "o": 6,
    "kernel": (5, 1),
    "stride": (2, 1),
    "padding": (2, 0),
    "dilation": (1, 2),
    "groups": 2,
    "offset_groups": 2,
}
NAN_OFFSET = ("nan_offset", "nan_result")
NAN_CASE = {"n": 1, "c": 2, "size": (4, 4), "o": 2}


def _samples() -> tuple[Sample, ...]:
    samples = []

    def add(name: str, make: Callable | None = None, *, core=False, smooth=False, op_level=True, tags=(), **parameters):
        samples.append(Sample(name, make or problem(**parameters), core, smooth, op_level, frozenset(tags)))

    # Parameters.
    add("mask_and_bias", core=True, smooth=True, size=(4, 5), c=3, o=2)
    add("no_mask", mask=False, smooth=True, size=(4, 5), c=2, o=3)
    add("no_bias", bias=False, smooth=True, size=(4, 5), c=2, o=3)
    add("no_mask_no_bias", core=True, mask=False, bias=False, size=(4, 5), c=3, o=2)
    add("asymmetric_grouped", core=True, smooth=True, **ASYMMETRIC)
    add("groups", groups=2, c=6, o=4)
    add("offset_groups", offset_groups=3, c=6, o=4)
    add("groups_cross_offset_groups", groups=3, offset_groups=2, c=6, o=9)
    add("depthwise", core=True, groups=6, c=6, o=6, offset_groups=3)
    add("depthwise_multiplier", groups=3, c=3, o=6, offset_groups=1)
    add("depthwise_many_channels", groups=64, c=64, o=64, size=(7, 6), n=1)
    add("kernel_1x1", kernel=1, padding=0, smooth=True, size=(4, 3), c=2, o=2)
    add("kernel_1x1_padded", kernel=1, padding=2)
    add("kernel_2x2", kernel=2, padding=1)
    add("kernel_7x7", kernel=7, padding=3, size=(6, 8), n=1)
    add("kernel_1x4", kernel=(1, 4), padding=(0, 3), dilation=(2, 1))
    add("stride_3", stride=3, size=(10, 12))
    add("dilation_3", dilation=3, padding=3, size=(7, 8))
    add("padding_beyond_kernel", padding=4, n=1)
    add("many_padding_one_pixel", size=(1, 1), padding=3, kernel=2, n=1)
    for channels in (1, 3, 5, 17, 64, 67):
        add(f"channels_{channels}", c=channels, o=3, n=1)
    for channels in (1, 5, 17, 65):
        add(f"out_channels_{channels}", c=3, o=channels, n=1)

    # Sizes.
    add("one_pixel", size=(1, 1), c=2, o=2)
    add("one_pixel_no_padding", size=(1, 1), kernel=1, padding=0, n=1, c=1, o=1)
    add("one_output", n=1, c=1, o=1, size=(3, 3), padding=0)
    add("one_row", size=(1, 9), kernel=(1, 3), padding=(0, 1))
    add("one_column", size=(9, 1), kernel=(3, 1), padding=(1, 0))
    add("output_1x8", size=(3, 10), padding=0)
    add("empty_batch", n=0, tags=("empty",))
    add("no_outputs", o=0, tags=("empty",))
    add("no_outputs_no_bias", o=0, bias=False, mask=False, tags=("empty",))
    add("empty_image", size=(0, 4), kernel=1, padding=1, tags=("empty",))
    add("many_images", n=9, size=(3, 3), c=2, o=2)
    add("many_tiles", n=1, c=130, o=70, size=(33, 37))
    add("many_tiles_grouped", n=2, c=48, o=36, size=(29, 31), groups=2, offset_groups=3, mask=False)
    add("many_tiles_channels_last", n=2, c=72, o=40, size=(23, 31), layouts={"input": channels_last})
    add("wide", n=1, c=8, size=(4, 3000), o=2, offsets=lambda o, g: torch.rand(o.shape, generator=g).double())
    add("tall", n=1, c=3, size=(3000, 4), o=2, offsets=lambda o, g: torch.rand(o.shape, generator=g).double())

    # Coordinates.
    add("zero_offsets", offsets=zeros)
    add("integer_offsets", core=True, offsets=integers, size=(5, 4), c=3, o=2)
    add("far_offsets", offsets=far)
    add("border_offsets", offsets=onto(-1.0, -0.5, 0.0, 3.0, 3.5, 4.0, 4.5), size=(4, 4), padding=1)
    add("just_inside_borders", offsets=onto(-0.9990234375, -1.0009765625, 3.9990234375, 4.001953125), size=(4, 4))
    add("tiny_negative_offsets", offsets=anything_of((-1e-7, -1e-30, -0.0, 1e-30)), size=(4, 4))
    add("border_offsets_rectangular", offsets=onto(-1.0, 0.0, 2.0, 3.0, 6.0, 7.0), size=(3, 7))
    add("one_nan", offsets=one_of(NAN, (0, 1, 1, 1)), core=True, tags=NAN_OFFSET, **NAN_CASE)
    add("nan_outside", offsets=anything_of((NAN, 1e30, -50.0)), tags=NAN_OFFSET, **NAN_CASE)
    add("all_nan", offsets=all_of(NAN), tags=NAN_OFFSET, **NAN_CASE)
    add("all_inf", offsets=all_of(INF), **NAN_CASE)
    add("all_minus_inf", offsets=all_of(-INF), **NAN_CASE)
    for value in (1e30, -1e30, 3e9, -3e9, 2.0**31, 2.0**63):
        add(f"all_{value:g}", offsets=all_of(value), **NAN_CASE)
    add(
        "not_finite_mixed",
        offsets=anything_of((INF, -INF, NAN, 1e30, -1e30, 3e9, -3e9)),
        tags=NAN_OFFSET,
    )
    add("opposite_infinities", offsets=anything_of((INF, -INF), share=0.8))
    add("infinite_pixels_not_sampled", offsets=all_of(-77.0), edit=infinite_pixels)
    add("infinite_pixels_far_offsets", offsets=all_of(INF), edit=infinite_pixels)
    add(
        "infinite_pixels_nan_offset",
        offsets=one_of(NAN, (0, 0, 2, 2)),
        edit=infinite_pixels,
        tags=NAN_OFFSET,
    )
    add("infinite_pixels_beside_border", offsets=onto(-1.5, 4.0, 9.0), size=(4, 4), edit=infinite_pixels)
    add("negative_mask", edit=lambda arguments: arguments["mask"].sub_(0.5))
    nan_result = ("nan_result",)
    add("nan_mask", edit=lambda arguments: arguments["mask"][0, 0, :2].fill_(NAN), tags=nan_result)
    add("nan_input", edit=lambda arguments: arguments["input"][0, 0, 2, 2].fill_(NAN), tags=nan_result)

    # Layouts.
    add("channels_last", core=True, layouts={"input": channels_last}, size=(4, 5), c=3, o=2, tags=("layout",))
    add("channels_last_one_channel", layouts={"input": channels_last}, c=1, tags=("layout",))
    add("channels_last_one_image", layouts={"input": channels_last}, n=1, c=6, groups=2, o=2, tags=("layout",))
    add("channels_last_one_pixel", layouts={"input": channels_last}, size=(1, 1), tags=("layout",))
    add("channels_last_empty", layouts={"input": channels_last}, n=0, tags=("layout", "empty"))
    add(
        "channels_last_all",
        layouts=dict.fromkeys(("input", "offset", "weight", "mask"), channels_last),
        tags=("layout",),
    )
    add("channels_last_offset", layouts={"offset": channels_last, "mask": channels_last}, tags=("layout",))
    for layout, function in LAYOUTS.items():
        for name in TENSORS:
            add(f"{layout}_{name}", layouts={name: function}, size=(4, 5), c=3, o=2, tags=("layout",))
        everything = dict.fromkeys(TENSORS, function)
        add(f"{layout}_all", layouts=everything, core=layout == "sliced", tags=("layout",), groups=2, offset_groups=2)

    # The public function's own conveniences.
    add("unbatched", unbatched(problem(n=1)), op_level=False, smooth=True)
    add("unbatched_no_mask", unbatched(problem(n=1, mask=False)), op_level=False)
    add("valid", named_padding("valid"), op_level=False)
    add("same", named_padding("same"), op_level=False)
    add("same_dilated", named_padding("same", dilation=2), op_level=False, smooth=True)
    add("same_even_kernel", named_padding("same", kernel=(2, 4), dilation=(3, 1)), op_level=False, smooth=True)
    add(
        "same_even_kernel_channels_last",
        named_padding("same", kernel=2, layouts={"input": channels_last}),
        op_level=False,
    )
    add("same_unbatched", unbatched(named_padding("same", n=1, kernel=(3, 2))), op_level=False)
    return tuple(samples)


# --- Errors -----------------------------------------------------------------------------------------------------------


def _errors() -> tuple[ErrorSample, ...]:
    errors = []

    def valid(device: str) -> Arguments:
        """Arguments that would be accepted: two groups, two offset groups."""
        shapes = {
            "input": (2, 4, 6, 7),
            "offset": (2, 36, 6, 7),
            "weight": (4, 2, 3, 3),
            "bias": (4,),
            "mask": (2, 18, 6, 7),
        }
        tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        return tensors | {"stride": 1, "padding": 1, "dilation": 1}

    def change(arguments: Arguments, changes: dict[str, Any], other: str) -> None:
        for name, value in changes.items():
            if isinstance(value, torch.dtype):
                arguments[name] = arguments[name].to(value)
            elif value == "other":
                # Made anew: nothing can be copied from a tensor that has no data.
                arguments[name] = torch.zeros(arguments[name].shape, device=other)
            elif name in (*TENSORS, "grad_output"):
                arguments[name] = torch.zeros((), device=arguments[name].device).expand(value)
            else:
                arguments[name] = value

    def forward(name: str, message: str, **changes: Any) -> None:
        def make(device: str, other: str) -> Arguments:
            arguments = valid(device)
            change(arguments, changes, other)
            return flat(arguments) | {"allow_tf32": False}

        two_devices = "other" in changes.values()
        errors.append(ErrorSample(name, "forward", make, f"deform_conv2d: {message}", two_devices))

    def both(name: str, message: str, **changes: Any) -> None:
        """An error that the two operators share."""
        forward(name, message, **changes)
        changes.pop("bias", None)  # the backward operator has none
        backward(name, message, **changes)

    def backward(name: str, message: str, **changes: Any) -> None:
        def make(device: str, other: str) -> Arguments:
            arguments = valid(device)
            arguments["grad_output"] = torch.zeros(2, 4, 6, 7, device=device)
            change(arguments, changes, other)
            arguments = flat(arguments) | {"allow_tf32": False, "deterministic": False}
            del arguments["bias"]
            return arguments | {f"need_{argument}": True for argument in TENSORS}

        two_devices = "other" in changes.values()
        errors.append(ErrorSample(name, "backward", make, f"deform_conv2d_backward: {message}", two_devices))

    def public(name: str, message: str, **changes: Any) -> None:
        def make(device: str, other: str) -> Arguments:
            arguments = valid(device)
            change(arguments, changes, other)
            return arguments

        errors.append(ErrorSample(name, "public", make, f"deform_conv2d: {message}"))

    def flat(arguments: Arguments) -> Arguments:
        names = ("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w")
        others = {name: value for name, value in arguments.items() if name not in ("stride", "padding", "dilation")}
        return others | dict(zip(names, flat_arguments(arguments), strict=True))

    # Ranks.
    ranks = "[N, C, H, W]", "[O, C/groups, Kh, Kw]", "[N, 2*G*Kh*Kw, Ho, Wo]", "[N, G*Kh*Kw, Ho, Wo]"
    for name, symbols in zip(("input", "weight", "offset", "mask"), ranks, strict=True):
        shapes = {"rank_3": (2, 4, 4), "rank_5": (1, 2, 4, 4, 4), "rank_0": ()}
        for label, shape in shapes.items():
            both(
                f"{name}_{label}", f"{name} must have 4 dimensions {symbols}, got shape {list(shape)}", **{name: shape}
            )
    forward("bias_rank_2", "bias must have 1 dimension [O], got shape [4, 1]", bias=(4, 1))
    forward("bias_rank_0", "bias must have 1 dimension [O], got shape []", bias=())

    # Dtypes.
    for dtype in (torch.int64, torch.complex64, torch.bool):
        text = f"input must be float64, float32, float16 or bfloat16, got {str(dtype).removeprefix('torch.')}"
        both(f"input_{dtype}", text, input=dtype)
    both("weight_dtype", "weight must have the dtype of input, float32, got float64", weight=torch.float64)
    both(
        "weight_dtype_of_narrow_input",
        "weight must have the dtype of input, bfloat16, got float32",
        input=torch.bfloat16,
    )
    forward("bias_dtype", "bias must have the dtype of input, float32, got bfloat16", bias=torch.bfloat16)
    narrow = dict.fromkeys(("input", "weight", "bias"), torch.bfloat16)
    for name in ("offset", "mask"):
        text = f"{name} must be float32 or have the dtype of input"
        both(f"{name}_dtype", f"{text}, float32, got float64", **{name: torch.float64})
        both(f"{name}_dtype_of_narrow_input", f"{text}, bfloat16, got float16", **narrow, **{name: torch.float16})
    both("offset_int32", "offset must be float32 or have the dtype of input, float32, got int32", offset=torch.int32)

    # Devices.
    for name in ("weight", "offset", "mask", "bias"):
        add = forward if name == "bias" else both
        text = f"{name} must be on the device of input, {{device}}, got {{other}}"
        add(f"{name}_device", text, **{name: "other"})

    # Numbers.
    both("stride_0", "stride must be at least 1, got [0, 1]", stride=(0, 1))
    both("stride_negative", "stride must be at least 1, got [1, -2]", stride=(1, -2))
    both("padding_negative", "padding must be at least 0, got [-1, 0]", padding=(-1, 0))
    both("padding_negative_w", "padding must be at least 0, got [0, -1]", padding=(0, -1))
    both("dilation_0", "dilation must be at least 1, got [0, 1]", dilation=(0, 1))
    both("dilation_negative", "dilation must be at least 1, got [1, -1]", dilation=(1, -1))

    # Shapes.
    both("no_channels", "input must have at least one channel, got shape [2, 0, 4, 4]", input=(2, 0, 4, 4))
    both("no_kernel_rows", "weight must have a kernel of at least 1x1, got shape [2, 2, 0, 3]", weight=(2, 2, 0, 3))
    both("no_kernel_columns", "weight must have a kernel of at least 1x1, got shape [2, 2, 3, 0]", weight=(2, 2, 3, 0))
    dividing = "weight must have shape [O, C/groups, Kh, Kw] with C/groups dividing C ="
    both("weight_channels", f"{dividing} 6, got [8, 4, 3, 3]", input=(2, 6, 6, 7), weight=(8, 4, 3, 3))
    both("weight_more_channels", f"{dividing} 4, got [4, 8, 3, 3]", weight=(4, 8, 3, 3))
    both("weight_no_channels", f"{dividing} 4, got [4, 0, 3, 3]", weight=(4, 0, 3, 3))
    both(
        "weight_out_channels",
        "weight must have shape [O, C/groups, Kh, Kw] with groups = 3 dividing O, got [8, 2, 3, 3]",
        input=(2, 6, 6, 7),
        weight=(8, 2, 3, 3),
    )
    larger = "kernel must not be larger than the padded input"
    both("kernel_too_large", f"{larger}, [6, 6], got [7, 7]", input=(2, 4, 4, 4), weight=(4, 2, 7, 7))
    both("kernel_too_wide", f"{larger}, [8, 9], got [3, 17]", dilation=(1, 8))
    both("kernel_larger_than_empty_image", f"{larger}, [2, 9], got [3, 3]", input=(2, 4, 0, 7))
    limit = "input is too large: H, W and their padded sizes must be below 2^30, got"
    both("too_high", f"{limit} [{2**30 + 2}, 3]", input=(2, 4, 2**30, 1))
    both("too_wide", f"{limit} [8, {2**30}]", input=(2, 4, 6, 2**30 - 2))
    both("padding_huge", f"{limit} [{2**53 + 8}, {2**53 + 9}]", padding=2**52 + 1)
    both("padding_saturated", f"{limit} [{2**63 - 1}, {2**63 - 1}]", padding=2**62)
    both("dilation_huge", f"{larger}, [8, 9], got [{2**53 + 3}, {2**53 + 3}]", dilation=2**52 + 1)
    both("padding_too_large", f"{limit} [8, {2**30 + 7}]", padding=(1, 2**29))
    expected_offset = "offset must have shape [N, 2*G*Kh*Kw, Ho, Wo] ="
    both("offset_of_another_size", f"{expected_offset} [2, 36, 6, 7], got [2, 36, 12, 14]", offset=(2, 36, 12, 14))
    both("offset_transposed", f"{expected_offset} [2, 36, 6, 7], got [2, 36, 7, 6]", offset=(2, 36, 7, 6))
    both("offset_half_the_channels", f"{expected_offset} [2, 18, 6, 7], got [2, 9, 6, 7]", offset=(2, 9, 6, 7))
    both("offset_no_channels", f"{expected_offset} [2, 18, 6, 7], got [2, 0, 6, 7]", offset=(2, 0, 6, 7))
    both("offset_batch", f"{expected_offset} [2, 36, 6, 7], got [1, 36, 6, 7]", offset=(1, 36, 6, 7))
    both("offset_larger_than_stride_2", f"{expected_offset} [2, 36, 3, 4], got [2, 36, 6, 7]", stride=2)
    both(
        "offset_groups",
        "offset must have shape [N, 2*G*Kh*Kw, Ho, Wo] with G = 3 dividing C = 4, got [2, 54, 6, 7]",
        offset=(2, 54, 6, 7),
        mask=(2, 27, 6, 7),
    )
    expected_mask = "mask must have shape [N, G*Kh*Kw, Ho, Wo] = [2, 18, 6, 7], got"
    for label, shape in {"channels": (2, 9, 6, 7), "batch": (1, 18, 6, 7), "size": (2, 18, 6, 6)}.items():
        both(f"mask_{label}", f"{expected_mask} {list(shape)}", mask=shape)
    forward("bias_shape", "bias must have shape [O] = [4], got [5]", bias=(5,))
    forward("bias_of_one", "bias must have shape [O] = [4], got [1]", bias=(1,))

    # The order of the checks: the first wrong thing is named.
    both(
        "rank_before_dtype",
        "mask must have 4 dimensions [N, G*Kh*Kw, Ho, Wo], got shape [2]",
        input=torch.int64,
        mask=(2,),
    )
    both(
        "dtype_before_device",
        "offset must be float32 or have the dtype of input, float32, got float64",
        weight="other",
        offset=torch.float64,
    )
    both(
        "device_before_stride", "offset must be on the device of input, {device}, got {other}", offset="other", stride=0
    )
    both("stride_before_padding", "stride must be at least 1, got [0, 0]", stride=0, padding=-1, dilation=0)
    both("padding_before_dilation", "padding must be at least 0, got [-1, -1]", padding=-1, dilation=0)
    both("weight_before_kernel", f"{dividing} 4, got [4, 3, 9, 9]", weight=(4, 3, 9, 9))
    both(
        "offset_before_mask",
        f"{expected_offset} [2, 36, 6, 7], got [2, 36, 6, 6]",
        offset=(2, 36, 6, 6),
        mask=(2, 1, 1, 1),
    )

    # grad_output.
    backward(
        "grad_output_dtype", "grad_output must have the dtype of input, float32, got float64", grad_output=torch.float64
    )
    backward(
        "grad_output_device", "grad_output must be on the device of input, {device}, got {other}", grad_output="other"
    )
    expected_grad = "grad_output must have shape [N, O, Ho, Wo] = [2, 4, 6, 7], got"
    for label, shape in {"channels": (2, 3, 6, 7), "size": (2, 4, 6, 8), "rank": (4, 6, 7)}.items():
        backward(f"grad_output_{label}", f"{expected_grad} {list(shape)}", grad_output=shape)

    # The public function.
    public("input_rank_2", "input must have shape [N, C, H, W] or [C, H, W], got [6, 7]", input=(6, 7))
    public(
        "input_rank_5", "input must have shape [N, C, H, W] or [C, H, W], got [1, 2, 4, 6, 7]", input=(1, 2, 4, 6, 7)
    )
    unbatched_shape = "when input has shape [C, H, W], got"
    public(
        "unbatched_offset",
        f"offset must have shape [2*G*Kh*Kw, Ho, Wo] {unbatched_shape} [2, 36, 6, 7]",
        input=(4, 6, 7),
    )
    public(
        "unbatched_mask",
        f"mask must have shape [G*Kh*Kw, Ho, Wo] {unbatched_shape} [2, 18, 6, 7]",
        input=(4, 6, 7),
        offset=(36, 6, 7),
    )
    public(
        "batched_input_unbatched_offset",
        "offset must have 4 dimensions [N, 2*G*Kh*Kw, Ho, Wo], got shape [36, 6, 7]",
        offset=(36, 6, 7),
    )
    for name in ("stride", "dilation"):
        for value in ((1, 2, 3), 1.5, (), "same", (1, 1.5)):
            public(f"{name}_{value}", f"{name} must be an int or a pair of ints, got {value!r}", **{name: value})
    for value in ((1, 2, 3), 1.5, "full", (1, "same")):
        text = f'padding must be an int, a pair of ints, "same" or "valid", got {value!r}'
        public(f"padding_{value}", text, padding=value)
    public("same_with_stride", 'padding="same" needs stride 1, got [2, 1]', padding="same", stride=(2, 1))
    public(
        "same_weight_rank",
        "weight must have 4 dimensions [O, C/groups, Kh, Kw], got shape [4, 2, 3]",
        padding="same",
        weight=(4, 2, 3),
    )
    public("same_dilation", "dilation must be at least 1, got [-1, -1]", padding="same", dilation=-1)
    public("stride_0", "stride must be at least 1, got [0, 0]", stride=0)
    public("dilation_0", "dilation must be at least 1, got [0, 0]", dilation=0)
    public("padding_negative", "padding must be at least 0, got [-1, -1]", padding=-1)
    return tuple(errors)


SPEC = OpSpec(
    name="deform_conv2d",
    function=deformc.deform_conv2d,
    reference=deformc.reference.deform_conv2d,
    differentiable=TENSORS,
    dtypes=DTYPES_OF_DEVICES,
    op_arguments=op_arguments,
    backward_arguments=backward_arguments,
    samples=_samples(),
    errors=_errors(),
    parallel=(
        Sample("one_image", problem(n=1, c=34, o=20, size=(37, 41))),
        Sample("more_images_than_threads", problem(n=7, c=6, o=5, size=(9, 8), groups=1, offset_groups=3)),
        Sample("grouped", problem(n=2, c=24, o=12, size=(23, 19), groups=4, offset_groups=2, mask=False)),
        Sample("smaller_than_threads", problem(n=1, c=1, o=1, size=(1, 1))),
    ),
)
