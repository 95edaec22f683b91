"""Samples and errors of ms_deform_attn with a list of shapes; those with tensors of shapes are made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import deformc
import deformc.reference
from specs import DTYPES_OF_DEVICES, Arguments, Dtypes, ErrorSample, OpSpec, Sample
from specs.layouts import LAYOUTS

INF, NAN = math.inf, math.nan
TENSORS = ("value", "sampling_locations", "attention_weights")
Sizes = Sequence[tuple[int, int]]
Make = Callable[[str, Dtypes, int], Arguments]


def flat_points(arguments: Arguments) -> tuple[Tensor, Tensor, list[int]]:
    """Locations, weights and counts as the operators take them."""
    locations, weights = arguments["sampling_locations"], arguments["attention_weights"]
    if locations.dim() == 6:
        counts = [locations.size(4)] * locations.size(3)
        return locations.flatten(3, 4), weights.flatten(3), counts
    return locations, weights, list(arguments["num_points"])


def op_arguments(arguments: Arguments) -> tuple:
    sizes = [size for pair in arguments["spatial_shapes"] for size in pair]
    return (arguments["value"], sizes, *flat_points(arguments), arguments["mode"])


def backward_arguments(arguments: Arguments, grad_output: Tensor, needs: frozenset[str]) -> tuple:
    return (grad_output, *op_arguments(arguments), *(name in needs for name in TENSORS), False)


# --- Samples ----------------------------------------------------------------------------------------------------------

# Positions in pixels, [N, Q, M, points, 2] as (x, y), of the points in a level of size (W, H).
Positions = Callable[[tuple[int, ...], Tensor, torch.Generator], Tensor]


def away_from_integers(shape: tuple[int, ...], size: Tensor, generator: torch.Generator) -> Tensor:
    """From a pixel outside the image on one side to one outside on the other, with fractions between 0.15 and 0.85."""
    cells = (torch.rand(shape, generator=generator, dtype=torch.float64) * (size + 3)).floor() - 2
    return cells + 0.15 + 0.7 * torch.rand(shape, generator=generator, dtype=torch.float64)


def far(shape: tuple[int, ...], size: Tensor, generator: torch.Generator) -> Tensor:
    return 40 * torch.rand(shape, generator=generator, dtype=torch.float64) - 20


def anything_of(*values: float, share: float = 0.3) -> Positions:
    """Ordinary positions of which a share is replaced by the values."""

    def draw(shape: tuple[int, ...], size: Tensor, generator: torch.Generator) -> Tensor:
        result = away_from_integers(shape, size, generator)
        chosen = torch.rand(shape, generator=generator) < share
        drawn = torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), shape, generator=generator)]
        return torch.where(chosen, drawn, result)

    return draw


def all_of(value: float) -> Positions:
    return lambda shape, size, generator: torch.full(shape, value, dtype=torch.float64)


def onto(*positions: float) -> Positions:
    """Exactly these positions; exact in the dtypes only if the sizes of the levels are powers of two."""
    return anything_of(*positions, share=1.0)


def problem(
    *,
    n: int = 2,
    q: int = 5,
    m: int = 2,
    d: int = 4,
    shapes: Sizes = ((4, 6), (2, 3)),
    points: int | Sequence[int] = 2,
    mode: str = "bilinear",
    positions: Positions = away_from_integers,
    layouts: dict[str, Callable[[Tensor], Tensor]] | None = None,
    edit: Callable[[Arguments], None] | None = None,
) -> Make:
    counts = [points] * len(shapes) if isinstance(points, int) else list(points)

    def make(device: str, dtypes: Dtypes, seed: int = 0) -> Arguments:
        generator = torch.Generator().manual_seed(seed)
        pixels = sum(height * width for height, width in shapes)
        locations = []
        for (height, width), count in zip(shapes, counts, strict=True):
            size = torch.tensor([width, height], dtype=torch.float64)
            locations.append((positions((n, q, m, count, 2), size, generator) + 0.5) / size)
        arguments: Arguments = {
            "value": 2 * torch.rand(n, pixels, m, d, generator=generator, dtype=torch.float64) - 1,
            "spatial_shapes": list(shapes),
            "sampling_locations": torch.cat(locations, dim=3),
            "attention_weights": 0.1 + 0.9 * torch.rand(n, q, m, sum(counts), generator=generator, dtype=torch.float64),
            "num_points": counts,
            "mode": mode,
        }
        if isinstance(points, int):
            arguments["sampling_locations"] = arguments["sampling_locations"].unflatten(3, (len(shapes), points))
            arguments["attention_weights"] = arguments["attention_weights"].unflatten(3, (len(shapes), points))
            arguments["num_points"] = None
        if edit is not None:
            edit(arguments)
        own = {"sampling_locations": dtypes.coordinates, "attention_weights": dtypes.factors, "value": dtypes.data}
        for name, dtype in own.items():
            tensor = arguments[name].to(dtype).to(device)
            if layouts is not None and name in layouts:
                tensor = layouts[name](tensor)
            arguments[name] = tensor
        return arguments

    return make


def infinite_pixels(arguments: Arguments) -> None:
    """Pixels that are not finite where an index clamped into a level, or past its end, would find them."""
    start = 0
    for height, width in arguments["spatial_shapes"]:
        arguments["value"][:, start] = INF
        arguments["value"][:, start + height * width - 1] = NAN
        start += height * width


NAN_LOCATION = ("nan_offset", "nan_result")
POWERS_OF_TWO = {"shapes": ((4, 8), (2, 4)), "q": 8}
# What the kernels of the CPU cut into several pieces: chunks of queries, more points than pixels and fewer.
DENSE = {"n": 2, "q": 150, "m": 3, "d": 32, "shapes": ((7, 9), (3, 5)), "points": 4}
SPARSE = {"n": 1, "q": 20, "m": 4, "d": 16, "shapes": ((40, 30), (20, 15)), "points": 4}


def _samples() -> tuple[Sample, ...]:
    samples = []

    def add(name: str, *, core=False, smooth=False, op_level=True, tags=(), **parameters):
        samples.append(Sample(name, problem(**parameters), core, smooth, op_level, frozenset(tags)))

    add("plain", core=True, smooth=True, n=2, q=3)
    add("uneven_points", core=True, smooth=True, points=(3, 6, 3), shapes=((4, 6), (2, 3), (1, 2)), q=3, m=1, d=3)
    add("level_without_points", points=(2, 0, 1), shapes=((3, 4), (2, 2), (2, 1)))
    add("no_points", points=(0, 0), tags=("empty",))
    add("discrete", core=True, smooth=True, mode="discrete", q=4)
    add("discrete_uneven_points", mode="discrete", points=(1, 3), positions=far)
    for levels in (1, 3, 4, 5, 6):
        shapes = tuple((max(1, 8 >> level), max(1, 11 >> level)) for level in range(levels))
        add(f"levels_{levels}", shapes=shapes, points=1 + levels % 3)
    for count in (1, 3, 4, 5, 6, 7, 8, 9):
        add(f"points_{count}", points=count, q=3, n=1)
    for channels in (1, 3, 7, 16, 30, 32, 33, 64, 96, 128, 256):
        add(f"channels_{channels}", d=channels, q=4, m=3 if channels < 64 else 1, n=1)
    for heads in (1, 3, 8):
        add(f"heads_{heads}", m=heads, q=7, d=8)
    for batch in (1, 31, 33):
        add(f"batch_{batch}", n=batch, q=2, m=1, d=2)
    add("smallest", n=1, q=1, m=1, d=1, shapes=((1, 1),), points=1)
    add("one_pixel_levels", shapes=((1, 1), (1, 3), (3, 1)), points=3, smooth=True, q=3, m=1, d=2)
    add("empty_batch", n=0, tags=("empty",))
    add("no_queries", q=0, tags=("empty",))
    add("dense", core=True, **DENSE)
    add("dense_discrete", mode="discrete", **DENSE)
    add("dense_odd_channels", **(DENSE | {"d": 19, "points": (5, 2)}))
    add("sparse", core=True, **SPARSE)
    add("sparse_wide", **(SPARSE | {"d": 80, "m": 2}))
    add("many_points", q=3, points=150, n=1, shapes=((9, 12),))

    # Positions.
    add("far_locations", positions=far)
    add("onto_pixels", positions=onto(-1.0, 0.0, 1.0, 2.0, 3.0), core=True, **POWERS_OF_TWO)
    add("onto_borders", positions=onto(-1.5, -1.0, -0.5, 0.0, 1.0, 3.0, 3.5, 4.0, 7.0, 7.5, 8.0), **POWERS_OF_TWO)
    add("discrete_onto_borders", positions=onto(-1.25, -0.75, 0.25, 3.25, 3.75, 7.75), mode="discrete", **POWERS_OF_TWO)
    for mode in ("bilinear", "discrete"):
        add(f"{mode}_some_nan", positions=anything_of(NAN, share=0.05), tags=NAN_LOCATION, mode=mode, core=True)
        add(f"{mode}_all_nan", positions=all_of(NAN), tags=NAN_LOCATION, mode=mode)
        add(f"{mode}_infinite", positions=anything_of(INF, -INF, 1e30, -1e30, 3e9, -3e9), mode=mode)
    add("nan_outside", positions=anything_of(NAN, 1e30, -50.0), tags=NAN_LOCATION)
    add("infinite_pixels_not_sampled", positions=all_of(-77.0), edit=infinite_pixels)
    add("infinite_pixels_beside_border", positions=onto(-1.5, 16.0), edit=infinite_pixels, **POWERS_OF_TWO)
    nan_result = ("nan_result",)
    add("nan_value", edit=lambda arguments: arguments["value"][0, 3].fill_(NAN), tags=nan_result)
    add("nan_weight", edit=lambda arguments: arguments["attention_weights"][0, 1].fill_(NAN), tags=nan_result)
    add("negative_weights", edit=lambda arguments: arguments["attention_weights"].neg_())

    # Layouts.
    for layout, function in LAYOUTS.items():
        for name in TENSORS:
            add(f"{layout}_{name}", layouts={name: function}, tags=("layout",))
        everything = dict.fromkeys(TENSORS, function)
        add(f"{layout}_all", layouts=everything, core=layout == "sliced", tags=("layout",))
    add("transposed_dense", layouts=dict.fromkeys(TENSORS, LAYOUTS["transposed"]), tags=("layout",), **DENSE)
    return tuple(samples)


# --- Errors -----------------------------------------------------------------------------------------------------------

SHAPES = ((6, 7), (3, 4), (2, 2))


def valid(device: str) -> Arguments:
    """Arguments of the operators that would be accepted, by name."""
    shapes = {"value": (2, 58, 3, 4), "sampling_locations": (2, 9, 3, 12, 2), "attention_weights": (2, 9, 3, 12)}
    tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    return tensors | {"num_points": [4, 4, 4], "mode": "bilinear"}


class Errors:
    """Collects errors of one operator and its backward operator."""

    def __init__(self, op: str, shapes: Callable[[str], Arguments]) -> None:
        self.op, self.shapes = op, shapes
        self.collected: list[ErrorSample] = []

    def arguments(self, device: str, other: str, changes: dict[str, Any], backward: bool) -> Arguments:
        arguments = valid(device) | self.shapes(device)
        if backward:
            arguments["grad_output"] = torch.zeros(2, 9, 12, device=device)
            arguments |= {f"need_{argument}": True for argument in ("value", "locations", "weights")}
            arguments["deterministic"] = False
        for name, value in changes.items():
            if isinstance(value, torch.dtype):
                arguments[name] = arguments[name].to(value)
            elif value == "other":
                arguments[name] = torch.zeros(arguments[name].shape, dtype=arguments[name].dtype, device=other)
            elif isinstance(value, tuple):
                arguments[name] = torch.zeros((), dtype=arguments[name].dtype, device=device).expand(value)
            else:
                arguments[name] = value
        return arguments

    def _add(self, level: str, op: str, name: str, message: str, changes: dict[str, Any]) -> None:
        def make(device: str, other: str) -> Arguments:
            return self.arguments(device, other, changes, level == "backward")

        two_devices = "other" in changes.values()
        self.collected.append(ErrorSample(name, level, make, f"{op}: {message}", two_devices))

    def both(self, name: str, message: str, **changes: Any) -> None:
        self._add("forward", self.op, name, message, changes)
        self.backward(name, message, **changes)

    def backward(self, name: str, message: str, **changes: Any) -> None:
        self._add("backward", f"{self.op}_backward", name, message, changes)

    def common(self) -> None:
        """Those that do not depend on how shapes are given."""
        ranks = {"value": "4 dimensions [N, S, M, D]", "sampling_locations": "5 dimensions [N, Q, M, T, 2]"}
        ranks["attention_weights"] = "4 dimensions [N, Q, M, T]"
        for name, text in ranks.items():
            for shape in ((2, 58, 3), (2, 9, 3, 3, 4, 2), ()):
                self.both(
                    f"{name}_rank_{len(shape)}", f"{name} must have {text}, got shape {list(shape)}", **{name: shape}
                )
        for dtype in (torch.int64, torch.complex64, torch.bool):
            got = str(dtype).removeprefix("torch.")
            text = f"value must be float64, float32, float16 or bfloat16, got {got}"
            self.both(f"value_{got}", text, value=dtype)
        for name in TENSORS[1:]:
            text = f"{name} must be float32 or have the dtype of value, float32, got"
            self.both(f"{name}_dtype", f"{text} float64", **{name: torch.float64})
            self.both(f"{name}_dtype_int", f"{text} int64", **{name: torch.int64})
            device = f"{name} must be on the device of value, {{device}}, got {{other}}"
            self.both(f"{name}_device", device, **{name: "other"})
        self.both("mode", 'mode must be "bilinear" or "discrete", got "nearest"', mode="nearest")
        counts = "num_points must have one count for each of the L = 3 levels, got"
        self.both("counts_few", f"{counts} [6, 6]", num_points=[6, 6])
        self.both("counts_none", f"{counts} []", num_points=[])
        self.both("counts_negative", "num_points must be at least 0, got [13, -2, 1]", num_points=[13, -2, 1])
        one = "value must have at least one head and one channel, got shape"
        self.both("no_heads", f"{one} [2, 58, 0, 4]", value=(2, 58, 0, 4))
        self.both("no_channels", f"{one} [2, 58, 3, 0]", value=(2, 58, 3, 0))
        locations = "sampling_locations must have shape [N, Q, M, T, 2] = [2, 9, 3, 12, 2], got"
        for label, shape in {"batch": (1, 9, 3, 12, 2), "heads": (2, 9, 2, 12, 2), "points": (2, 9, 3, 9, 2)}.items():
            self.both(f"locations_{label}", f"{locations} {list(shape)}", sampling_locations=shape)
        self.both("locations_3d", f"{locations} [2, 9, 3, 12, 3]", sampling_locations=(2, 9, 3, 12, 3))
        weights = "attention_weights must have shape [N, Q, M, T] = [2, 9, 3, 12], got"
        for label, shape in {"queries": (2, 8, 3, 12), "points": (2, 9, 3, 16), "batch": (1, 9, 3, 12)}.items():
            self.both(f"weights_{label}", f"{weights} {list(shape)}", attention_weights=shape)
        self.backward(
            "grad_output_dtype",
            "grad_output must have the dtype of value, float32, got float64",
            grad_output=torch.float64,
        )
        self.backward(
            "grad_output_device",
            "grad_output must be on the device of value, {device}, got {other}",
            grad_output="other",
        )
        grad = "grad_output must have shape [N, Q, M*D] = [2, 9, 12], got"
        for label, shape in {"channels": (2, 9, 11), "rank": (2, 9, 3, 4), "queries": (2, 1, 12)}.items():
            self.backward(f"grad_output_{label}", f"{grad} {list(shape)}", grad_output=shape)
        # The order of the checks: the first wrong thing is named.
        self.both(
            "rank_before_dtype", "attention_weights must have 4 dimensions [N, Q, M, T], got shape [2]",
            value=torch.int64, attention_weights=(2,),
        )  # fmt: skip
        self.both(
            "dtype_before_device", "attention_weights must be float32 or have the dtype of value, float32, got float64",
            sampling_locations="other", attention_weights=torch.float64,
        )  # fmt: skip
        self.both(
            "device_before_mode", "sampling_locations must be on the device of value, {device}, got {other}",
            sampling_locations="other", mode="",
        )  # fmt: skip
        self.both("mode_before_counts", 'mode must be "bilinear" or "discrete", got ""', mode="", num_points=[])
        self.both("locations_before_weights", f"{locations} [2, 9, 3, 9, 2]",
                  sampling_locations=(2, 9, 3, 9, 2), attention_weights=(2, 9, 3, 9))  # fmt: skip


def _errors() -> tuple[ErrorSample, ...]:
    def flat(shapes: Sizes) -> list[int]:
        return [size for pair in shapes for size in pair]

    errors = Errors("ms_deform_attn", lambda device: {"spatial_shapes": flat(SHAPES)})
    errors.common()
    both = errors.both
    both("no_levels", "spatial_shapes must have H and W of at least one level, got []", spatial_shapes=[])
    both(
        "half_a_level", "spatial_shapes must have H and W of each level, got 5 numbers", spatial_shapes=[6, 7, 3, 4, 2]
    )
    at_least = "spatial_shapes must be at least 1, got"
    both("size_0", f"{at_least} [[6, 7], [0, 4], [2, 2]]", spatial_shapes=[6, 7, 0, 4, 2, 2])
    both("size_negative", f"{at_least} [[6, 7], [3, 4], [2, -2]]", spatial_shapes=[6, 7, 3, 4, 2, -2])
    both(
        "size_too_large",
        f"spatial_shapes must be below 2^30, got [[6, 7], [3, 4], [{2**30}, 2]]",
        spatial_shapes=[6, 7, 3, 4, 2**30, 2],
    )
    pixels = "value must have shape [N, S, M, D] with S = {}, the sum of H*W over spatial_shapes, got"
    both("pixels_more", f"{pixels.format(58)} [2, 59, 3, 4]", value=(2, 59, 3, 4))
    both("pixels_doubled", f"{pixels.format(232)} [2, 58, 3, 4]", spatial_shapes=flat([(12, 14), (6, 8), (4, 4)]))
    huge = 3 * (2**30 - 1) ** 2
    both("pixels_huge", f"{pixels.format(huge)} [2, 58, 3, 4]", spatial_shapes=[2**30 - 1] * 6)
    both("sizes_before_locations", f"{at_least} [[6, 7], [3, 4], [0, 2]]", spatial_shapes=[6, 7, 3, 4, 0, 2],
         sampling_locations=(2, 9, 3, 9, 2))  # fmt: skip

    def public(name: str, message: str, **changes: Any) -> None:
        def make(device: str, other: str) -> Arguments:
            base = {
                "value": torch.zeros(2, 58, 3, 4, device=device),
                "spatial_shapes": list(SHAPES),
                "sampling_locations": torch.zeros(2, 9, 3, 3, 4, 2, device=device),
                "attention_weights": torch.zeros(2, 9, 3, 3, 4, device=device),
            }
            made = {
                key: torch.zeros(value, device=device) if key in TENSORS else value for key, value in changes.items()
            }
            return base | made

        errors.collected.append(ErrorSample(name, "public", make, f"ms_deform_attn: {message}"))

    levels = "sampling_locations must have shape [N, Q, M, L, P, 2] with L = 3, got"
    public("levels", f"{levels} [2, 9, 3, 2, 4, 2]", sampling_locations=(2, 9, 3, 2, 4, 2))
    public(
        "locations_rank_4",
        "sampling_locations must have shape [N, Q, M, L, P, 2] or [N, Q, M, T, 2], got [2, 9, 12, 2]",
        sampling_locations=(2, 9, 12, 2),
    )
    public(
        "other_points", "attention_weights must have shape [N, Q, M, L, P] = [2, 9, 3, 3, 4], got [2, 9, 3, 3, 5]",
        attention_weights=(2, 9, 3, 3, 5),
    )  # fmt: skip
    public(
        "counts_and_levels",
        "num_points must be P = 4 for every level where sampling_locations has L and P, got [4, 4, 3]",
        num_points=[4, 4, 3],
    )
    public(
        "counts_needed", "num_points must be given where the L = 3 levels do not have T/L points each, got T = 11",
        sampling_locations=(2, 9, 3, 11, 2), attention_weights=(2, 9, 3, 11),
    )  # fmt: skip
    kinds = "spatial_shapes must be a list of (H, W) or an int64 tensor [L, 2], got"
    for label, value in {"flat": [6, 7, 3, 4], "floats": [(6.0, 7)], "number": 3, "triples": [(1, 2, 3)]}.items():
        public(f"shapes_{label}", f"{kinds} {value!r}", spatial_shapes=value)
    return tuple(errors.collected)


SPEC = OpSpec(
    name="ms_deform_attn",
    function=deformc.ms_deform_attn,
    reference=deformc.reference.ms_deform_attn,
    differentiable=TENSORS,
    dtypes=DTYPES_OF_DEVICES,
    op_arguments=op_arguments,
    backward_arguments=backward_arguments,
    samples=_samples(),
    errors=_errors(),
    parallel=(
        Sample("dense", problem(**(DENSE | {"q": 700}))),
        Sample("sparse", problem(**(SPARSE | {"q": 300}))),
        Sample("more_images_than_threads", problem(**(SPARSE | {"n": 7, "m": 1}))),
        Sample("smaller_than_threads", problem(n=1, q=1, m=1, d=1, shapes=((1, 1),), points=1)),
    ),
)
