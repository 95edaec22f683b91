"""ms_deform_attn with tensors of shapes: the samples of the list form, and levels that only this form can have."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specs import Arguments, Dtypes, ErrorSample, OpSpec, Sample
from specs import ms_deform_attn as of_list


def op_arguments(arguments: Arguments) -> tuple:
    shapes = (arguments["spatial_shapes"], arguments["level_start_index"])
    return (arguments["value"], *shapes, *of_list.flat_points(arguments), arguments["mode"])


def backward_arguments(arguments: Arguments, grad_output: Tensor, needs: frozenset[str]) -> tuple:
    return (grad_output, *op_arguments(arguments), *(name in needs for name in of_list.TENSORS), False)


def with_tensors(make: of_list.Make, starts: list[int] | None = None, pixels: int | None = None) -> of_list.Make:
    """The same problem with its shapes in tensors; or with levels that start at ``starts`` in more or fewer pixels."""

    def make_with_tensors(device: str, dtypes: Dtypes, seed: int = 0) -> Arguments:
        arguments = make(device, dtypes, seed)
        shapes = torch.tensor(arguments["spatial_shapes"], device=device)
        areas = shapes.prod(1)
        arguments["spatial_shapes"] = shapes
        arguments["level_start_index"] = areas.cumsum(0) - areas
        if starts is not None:
            arguments["level_start_index"] = torch.tensor(starts, device=device)
            generator = torch.Generator().manual_seed(seed)
            shape = (arguments["value"].size(0), pixels, *arguments["value"].shape[2:])
            arguments["value"] = torch.rand(shape, generator=generator, dtype=torch.float64).to(arguments["value"])
        return arguments

    return make_with_tensors


def _samples() -> tuple[Sample, ...]:
    # Where the two forms have different code, and one sample of every other kind.
    names = {
        "plain", "uneven_points", "discrete", "levels_4", "channels_33", "smallest", "empty_batch", "no_queries",
        "no_points", "dense", "sparse", "onto_pixels", "bilinear_some_nan", "sliced_all", "transposed_dense",
    }  # fmt: skip
    samples = [
        dataclasses.replace(sample, make=with_tensors(sample.make), core=sample.name in ("plain", "uneven_points"))
        for sample in of_list.SPEC.samples
        if sample.name in names
    ]

    def add(name: str, starts: list[int], pixels: int, core=False, **parameters) -> None:
        samples.append(Sample(name, with_tensors(of_list.problem(**parameters), starts, pixels), core=core))

    shapes = {"shapes": ((4, 6), (2, 3))}
    add("gaps", [2, 29], 40, core=True, **shapes)
    add("reversed_levels", [6, 0], 30, **shapes)
    add("overlapping_levels", [0, 10], 30, core=True, **shapes)
    add("equal_levels", [3, 3, 3], 30, shapes=((4, 6), (4, 6), (2, 3)), points=(2, 3, 1))
    add("overlapping_levels_dense", [0, 20], 64, **of_list.DENSE)
    add("gaps_dense", [1, 70], 90, **of_list.DENSE)
    return tuple(samples)


def _errors() -> tuple[ErrorSample, ...]:
    def shapes(device: str) -> Arguments:
        # Not read by fake kernels, and no data on the meta device.
        return {
            "spatial_shapes": torch.tensor(of_list.SHAPES, device=device),
            "level_start_index": torch.tensor([0, 42, 54], device=device),
        }

    errors = of_list.Errors("ms_deform_attn_tensor_shapes", shapes)
    errors.common()
    both = errors.both
    for name, text, shape in (
        ("spatial_shapes", "2 dimensions [L, 2]", (6,)),
        ("level_start_index", "1 dimension [L]", (3, 1)),
    ):
        both(f"{name}_rank", f"{name} must have {text}, got shape {list(shape)}", **{name: shape})
        both(f"{name}_dtype", f"{name} must be int64, got int32", **{name: torch.int32})
        both(f"{name}_device", f"{name} must be on the device of value, {{device}}, got {{other}}", **{name: "other"})
    at_least = "spatial_shapes must have shape [L, 2] with at least one level, got [0, 2]"
    both("no_levels", at_least, spatial_shapes=(0, 2), level_start_index=(0,), num_points=[])
    both("triples", "spatial_shapes must have shape [L, 2] = [3, 2], got [3, 3]", spatial_shapes=(3, 3))
    both("other_levels", "level_start_index must have shape [L] = [3], got [4]", level_start_index=(4,))
    return tuple(errors.collected)


SPEC = OpSpec(
    name="ms_deform_attn_tensor_shapes",
    function=of_list.SPEC.function,
    reference=of_list.SPEC.reference,
    differentiable=of_list.TENSORS,
    dtypes=of_list.SPEC.dtypes,
    op_arguments=op_arguments,
    backward_arguments=backward_arguments,
    samples=_samples(),
    errors=_errors(),
    parallel=(
        Sample("dense", with_tensors(of_list.problem(**(of_list.DENSE | {"q": 700})))),
        Sample("overlapping_levels", with_tensors(of_list.problem(**(of_list.DENSE | {"q": 700})), [0, 20], 64)),
    ),
)
