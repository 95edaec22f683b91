"""torch.func.vmap of the operators against the same calls batched by hand, forward and with gradients of each."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, func

import deformc
from benchmarks._common import FORWARD, TRAINING, Case, expect_close
from benchmarks.runner import THREADS, Column

VMAP = f"torch.func.vmap against a call batched by hand, float32, {THREADS} threads"
Function = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    quick: bool

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Pair:
    """One call for a single element, and one for all of them; results of both have the mapped dimension first."""

    tensors: tuple[Tensor, ...]
    in_dims: tuple[int | None, ...]
    single: Function
    batched: Function


def cases(quick: bool, device: str = "cpu") -> list[Case]:
    if device != "cpu":
        return []
    return [Case(VMAP, Problem(name, quick), direction) for name in PAIRS for direction in (FORWARD, TRAINING)]


def run(case: Case) -> list[Column]:
    by_hand, mapped = calls(case)
    return [Column("by hand", by_hand), Column("vmap", mapped)]


def verify(case: Case) -> None:
    by_hand, mapped = (torch.utils._pytree.tree_leaves(call()) for call in calls(case))
    names = [str(i) for i in range(len(by_hand))]
    actual, expected = (dict(zip(names, results, strict=True)) for results in (mapped, by_hand))
    expect_close("vmap", actual, expected, torch.float32)


def calls(case: Case) -> tuple[Callable, Callable]:
    pair = PAIRS[case.problem.name](case.problem.quick)
    mapped = func.vmap(pair.single, pair.in_dims)
    if case.direction == FORWARD:
        return functools.partial(pair.batched, *pair.tensors), functools.partial(mapped, *pair.tensors)
    # Of what is mapped: by hand, there is no gradient of each for what all share.
    argnums = tuple(i for i, dim in enumerate(pair.in_dims) if dim is not None)

    def gradients(function: Function) -> Callable:
        return func.grad(lambda *tensors: function(*tensors).square().sum(), argnums=argnums)

    mapped = func.vmap(gradients(pair.single), pair.in_dims)
    return functools.partial(gradients(pair.batched), *pair.tensors), functools.partial(mapped, *pair.tensors)


# ---- the pairs -------------------------------------------------------------------------------------------------------


def convolution(quick: bool) -> tuple[Tensor, ...]:
    """Of eight images: input, offset, weight, bias and mask, each of its own."""
    count, channels, size = (3, 4, 9) if quick else (8, 64, 56)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return (
        normal(count, channels, size, size),
        normal(count, 18, size, size),
        normal(count, channels, channels, 3, 3) / channels,
        normal(count, channels),
        normal(count, 9, size, size).sigmoid(),
    )


def deform_conv2d(input, offset, weight, bias, mask) -> Tensor:
    return deformc.deform_conv2d(input, offset, weight, bias, padding=1, mask=mask)


def images(quick: bool) -> Pair:
    input, offset, weight, bias, mask = convolution(quick)
    return Pair((input, offset, weight[0], bias[0], mask), (0, 0, None, None, 0), deform_conv2d, deform_conv2d)


def images_with_weights(quick: bool) -> Pair:
    def in_groups(input, offset, weight, bias, mask):
        tensors = (input.flatten(0, 1)[None], offset.flatten(0, 1)[None], weight.flatten(0, 1), bias.flatten())
        return deform_conv2d(*tensors, mask.flatten(0, 1)[None]).unflatten(1, (len(input), -1)).transpose(0, 1)[:, 0]

    return Pair(convolution(quick), (0, 0, 0, 0, 0), deform_conv2d, in_groups)


def weights_on_one_image(quick: bool) -> Pair:
    def in_channels(input, offset, weight, bias, mask):
        output = deform_conv2d(input, offset, weight.flatten(0, 1), bias.flatten(), mask)
        return output.unflatten(0, (len(weight), -1))

    input, offset, weight, bias, mask = convolution(quick)
    return Pair((input[0], offset[0], weight, bias, mask[0]), (None, None, 0, 0, None), deform_conv2d, in_channels)


def attention(quick: bool, queries: int) -> tuple[tuple, tuple[Tensor, ...]]:
    shapes = ((5, 6), (3, 3)) if quick else ((100, 134), (50, 67), (25, 34), (13, 17))
    pixels = sum(height * width for height, width in shapes)
    generator = torch.Generator().manual_seed(0)
    points = (4, queries, 8, len(shapes), 4)
    value = torch.randn(4, pixels, 8, 32, generator=generator)
    return shapes, (value, torch.rand(*points, 2, generator=generator), torch.rand(points, generator=generator))


def attention_in_images(quick: bool) -> Pair:
    shapes, tensors = attention(quick, 7 if quick else 2000)

    def single(value, locations, weights):
        return deformc.ms_deform_attn(value[None], shapes, locations[None], weights[None])[0]

    return Pair(tensors, (0, 0, 0), single, lambda value, *points: deformc.ms_deform_attn(value, shapes, *points))


def attention_to_one_image(quick: bool) -> Pair:
    shapes, (value, locations, weights) = attention(quick, 7 if quick else 2000)

    def single(value, locations, weights):
        return deformc.ms_deform_attn(value, shapes, locations[None], weights[None])[0]

    def in_queries(value, locations, weights):
        output = deformc.ms_deform_attn(value, shapes, locations.flatten(0, 1)[None], weights.flatten(0, 1)[None])
        return output[0].unflatten(0, (len(locations), -1))

    return Pair((value[:1], locations, weights), (None, 0, 0), single, in_queries)


PAIRS: dict[str, Callable[[bool], Pair]] = {
    "deform_conv2d, 8 images C64 56x56, one weight": images,
    "deform_conv2d, 8 images C64 56x56, a weight each": images_with_weights,
    "deform_conv2d, one image C64 56x56, 8 weights": weights_on_one_image,
    "ms_deform_attn, 4 images Q2000 S17821": attention_in_images,
    "ms_deform_attn, 4 sets of Q2000, one image": attention_to_one_image,
}
