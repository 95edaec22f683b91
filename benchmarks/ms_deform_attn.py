"""ms_deform_attn against its form with grid_sample, and against torch-ms-deform-attn where it is installed."""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import deformc
from benchmarks._common import (
    BFLOAT16,
    FLOAT16,
    FORWARD,
    OVERHEAD,
    SPEEDUP,
    TRAINING,
    Case,
    expect_close,
    on_device,
    requires_grad,
)
from benchmarks.runner import THREADS, Column

try:
    import torch_ms_deform_attn
except (ImportError, RuntimeError):
    torch_ms_deform_attn = None

AGAINST_GRID_SAMPLE = f"ms_deform_attn, float32, {THREADS} threads"
NAMES = ("value", "sampling_locations", "attention_weights")


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    shapes: tuple[tuple[int, int], ...]
    queries: int | None = None  # one for each pixel if None
    realistic: bool = False  # points near the query's place, else anywhere
    heads: int = 8
    head_dim: int = 32
    points: int = 4

    @property
    def pixels(self) -> int:
        return sum(height * width for height, width in self.shapes)

    def __str__(self) -> str:
        count = self.queries or self.pixels
        return (
            f"{self.name} Q{count} S{self.pixels} M{self.heads} D{self.head_dim} L{len(self.shapes)} P{self.points}"
            + (", points near the query" if self.realistic else "")
        )


def cases(quick: bool, device: str = "cpu") -> list[Case]:
    shapes = ((10, 13), (5, 7)) if quick else ((100, 134), (50, 67), (25, 34), (13, 17))
    queries = 20 if quick else 300
    rows = [
        Problem(name, shapes, count, realistic)
        for name, count in (("encoder", None), ("decoder", queries))
        for realistic in (False, True)
    ]
    smallest = Problem("smallest", ((1, 1),), 1, heads=1, head_dim=1, points=1)
    directions = (FORWARD, TRAINING)
    if device != "cpu":
        return [
            Case(f"ms_deform_attn, {kind}, {device}", problem, direction, device=device)
            for kind in ("float32", FLOAT16)
            for problem in rows
            for direction in directions
        ]
    return [
        *(Case(AGAINST_GRID_SAMPLE, problem, direction) for direction in directions for problem in rows),
        *(Case(f"ms_deform_attn, {BFLOAT16}", problem, direction) for direction in directions for problem in rows),
        *(Case(f"ms_deform_attn, {SPEEDUP}", problem, direction) for direction in directions for problem in rows),
        Case(f"ms_deform_attn, {OVERHEAD}", smallest, FORWARD),
        Case(f"ms_deform_attn, {OVERHEAD}", smallest, FORWARD, grad=True),
        Case(f"ms_deform_attn, {OVERHEAD}", smallest, TRAINING),
    ]


def run(case: Case) -> list[Column]:
    def column(name: str, function: Callable[..., Tensor], dtype=torch.float32, threads=THREADS) -> Column:
        return Column(name, timed(function, case, dtype), threads, case.device)

    if FLOAT16 in case.kind:
        return [column("float32", ms_deform_attn), column("float16", ms_deform_attn, torch.float16)]
    if BFLOAT16 in case.kind:
        return [column("float32", ms_deform_attn), column("bfloat16", ms_deform_attn, torch.bfloat16)]
    if SPEEDUP in case.kind:
        return [column("2 threads", ms_deform_attn, threads=2), column("1 thread", ms_deform_attn, threads=1)]
    columns = [column("deformc", ms_deform_attn), column("grid_sample", grid_sample_attention)]
    if torch_ms_deform_attn is not None and case.device == "cpu":
        columns.append(column("torch-ms-deform-attn", other_ms_deform_attn))
    return columns


def verify(case: Case) -> None:
    others = [dtype for kind, dtype in ((BFLOAT16, torch.bfloat16), (FLOAT16, torch.float16)) if kind in case.kind]
    for dtype in (torch.float32, *others):
        actual = outputs(ms_deform_attn, case.problem, dtype, device=case.device)
        expect_close("deformc", actual, expected(case.problem, dtype), dtype)
    if case.device != "cpu":
        return
    if BFLOAT16 in case.kind or SPEEDUP in case.kind:
        return
    reference = expected(case.problem, torch.float32)
    expect_close("grid_sample", outputs(grid_sample_attention, case.problem), reference, torch.float32)
    if torch_ms_deform_attn is not None:
        expect_close("torch-ms-deform-attn", outputs(other_ms_deform_attn, case.problem), reference, torch.float32)


# ---- what is compared ------------------------------------------------------------------------------------------------


def ms_deform_attn(problem: Problem, *tensors: Tensor) -> Tensor:
    value, locations, weights = tensors
    return deformc.ms_deform_attn(value, problem.shapes, locations, weights)


def reference_ms_deform_attn(problem: Problem, *tensors: Tensor) -> Tensor:
    value, locations, weights = tensors
    return deformc.reference.ms_deform_attn(value, problem.shapes, locations, weights)


def grid_sample_attention(problem: Problem, *tensors: Tensor) -> Tensor:
    """The operators that models run where they have no kernel of their own: grid_sample for each level, then a sum."""
    value, locations, weights = tensors
    batch, _, heads, head_dim = value.shape
    queries, levels, points = locations.shape[1], locations.shape[3], locations.shape[4]
    grids = 2 * locations - 1
    sampled = []
    images = value.split([height * width for height, width in problem.shapes], dim=1)
    for level, ((height, width), image) in enumerate(zip(problem.shapes, images, strict=True)):
        image = image.flatten(2).transpose(1, 2).reshape(batch * heads, head_dim, height, width)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        sampled.append(F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False))
    weights = weights.transpose(1, 2).reshape(batch * heads, 1, queries, levels * points)
    output = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)
    return output.view(batch, heads * head_dim, queries).transpose(1, 2).contiguous()


@functools.cache
def shape_tensors(problem: Problem) -> tuple[Tensor, Tensor]:
    shapes = torch.tensor(problem.shapes)
    areas = shapes.prod(1)
    return shapes, areas.cumsum(0) - areas


def other_ms_deform_attn(problem: Problem, *tensors: Tensor) -> Tensor:
    value, locations, weights = tensors
    return torch_ms_deform_attn.ms_deform_attn(value, *shape_tensors(problem), locations, weights, 64)


# ---- tensors and calls -----------------------------------------------------------------------------------------------


def make_tensors(problem: Problem, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Locations and weights stay float32. Points are kept off the borders of cells, where the derivative has a jump."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[width, height] for height, width in problem.shapes], dtype=torch.float32)
    if problem.queries is None:
        centers = torch.cat([pixel_centers(*shape) for shape in problem.shapes])
    else:
        centers = torch.rand(problem.queries, 2, generator=generator)
    shape = (1, len(centers), problem.heads, len(problem.shapes), problem.points)
    if problem.realistic:
        locations = centers[:, None, None, None] + 2 * torch.randn(*shape, 2, generator=generator) / sizes[:, None]
    else:
        locations = torch.rand(*shape, 2, generator=generator)
    positions = locations * sizes[:, None] - 0.5
    fractions = (positions - positions.floor()).clamp(0.01, 0.99)
    return {
        "value": torch.randn(1, problem.pixels, problem.heads, problem.head_dim, generator=generator).to(dtype),
        "sampling_locations": (positions.floor() + fractions + 0.5) / sizes[:, None],
        "attention_weights": torch.randn(shape, generator=generator).flatten(3).softmax(-1).view(shape),
    }


def pixel_centers(height: int, width: int) -> Tensor:
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1)


def make_grad_output(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)


def timed(function: Callable[..., Tensor], case: Case, dtype: torch.dtype) -> Callable[[], object]:
    tensors = on_device(make_tensors(case.problem, dtype), case.device)
    call = functools.partial(function, case.problem, *tensors.values())
    if case.direction == FORWARD:
        if case.grad:
            requires_grad(tensors)
        return call
    leaves = list(requires_grad(tensors).values())
    grad_output = make_grad_output(call().detach())
    return lambda: torch.autograd.grad(call(), leaves, grad_output)


def outputs(function, problem: Problem, dtype=torch.float32, compute_dtype=None, device="cpu") -> dict[str, Tensor]:
    """The output and the gradients of all tensors. The value is rounded to ``dtype``."""
    tensors = on_device(make_tensors(problem, dtype), device)
    tensors["value"] = tensors["value"].to(compute_dtype or dtype)
    leaves = requires_grad(tensors)
    output = function(problem, *tensors.values())
    gradients = torch.autograd.grad(output, list(leaves.values()), make_grad_output(output.detach()))
    return {"output": output.detach()} | {f"grad_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}


@functools.cache
def expected(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    return outputs(reference_ms_deform_attn, problem, dtype, compute_dtype=torch.float32)
