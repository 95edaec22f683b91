"""What the benchmarks of the ops share: kinds of rows, cases, and the comparison with the reference."""

import dataclasses

import torch
from torch import Tensor

from benchmarks.runner import THREADS, Mismatch

FORWARD, TRAINING = "forward", "forward+backward"
BFLOAT16 = f"bfloat16 against float32, {THREADS} threads"
FLOAT16 = "float16 against float32"
SPEEDUP = "time of 1 thread over 2 threads, float32"
OVERHEAD = "overhead of the smallest call"
# Largest difference to the reference in the data's dtype, relative to the largest value of each tensor.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    problem: object  # its text names the row
    direction: str
    grad: bool = False  # of a forward call: whether the tensors require gradients
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.problem} {self.direction}" + (" with grad" if self.grad else "")

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def on_device(tensors: dict[str, Tensor | None], device: str) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}


def requires_grad(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor.requires_grad_() for name, tensor in tensors.items() if tensor is not None}


def expect_close(name: str, actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    for result, value in actual.items():
        reference = expected[result].float().cpu()
        difference = ((value.float().cpu() - reference).abs().max() / reference.abs().max()).item()
        if not difference <= TOLERANCE[dtype]:  # NaN is a mismatch too
            raise Mismatch(f"{name}: {result} differs from the reference by {difference:.1e} of its largest value")
