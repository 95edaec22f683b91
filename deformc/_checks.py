"""Argument checks of the fake kernels: the sentences of csrc/common/host.h, for sizes that may be symbolic.

Equalities go through ``torch._check`` and become guards, as the shapes of a native op do. An inequality raises where
it is known to be false and otherwise adds no guard: for real tensors the kernel's own check decides.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

DATA_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Text = Callable[[], str]  # built only when a check fails


def shape_text(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def saturated(size: int) -> int:
    """What the kernels' integers make of a size that does not fit them."""
    return min(size, 2**63 - 1) if isinstance(size, int) else size


class Checks:
    """The checks of one op; its name starts every text. Tensors that are None are left out."""

    def __init__(self, op: str) -> None:
        self.op = op

    def fail(self, text: str) -> NoReturn:
        raise RuntimeError(f"{self.op}: {text}")

    def require(self, condition: bool, text: Text) -> None:
        if not condition:
            self.fail(text())

    def forbid_size(self, size_is_wrong: Callable[[], bool], text: Text) -> None:
        """An inequality between sizes, given as its opposite: no guard if it depends on symbols."""
        if statically_known_true(size_is_wrong()):
            self.fail(text())

    def at_least(self, name: str, least: int, *values: int) -> None:
        for value in values:
            self.forbid_size(
                lambda value=value: value < least, lambda: f"{name} must be at least {least}, got {shape_text(values)}"
            )

    def rank(self, name: str, tensor: Tensor | None, rank: int, shape: str) -> None:
        if tensor is not None and tensor.dim() != rank:
            dimensions = "dimension" if rank == 1 else "dimensions"
            self.fail(f"{name} must have {rank} {dimensions} {shape}, got shape {shape_text(tensor.shape)}")

    def data_dtype(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in DATA_DTYPES:
            self.fail(f"{name} must be float64, float32, float16 or bfloat16, got {dtype_text(tensor.dtype)}")
        if tensor.dtype == torch.float64 and tensor.device.type == "mps":
            self.fail(f"{name} must be float32, float16 or bfloat16 on mps, got float64")

    def same_dtype(self, name: str, tensor: Tensor | None, data_name: str, data: Tensor) -> None:
        if tensor is not None and tensor.dtype != data.dtype:
            expected, got = dtype_text(data.dtype), dtype_text(tensor.dtype)
            self.fail(f"{name} must have the dtype of {data_name}, {expected}, got {got}")

    def coordinate_dtype(self, name: str, tensor: Tensor | None, data_name: str, data: Tensor) -> None:
        if tensor is not None and tensor.dtype not in (data.dtype, torch.float32):
            expected, got = dtype_text(data.dtype), dtype_text(tensor.dtype)
            self.fail(f"{name} must be float32 or have the dtype of {data_name}, {expected}, got {got}")

    def index_dtype(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype != torch.int64:
            self.fail(f"{name} must be int64, got {dtype_text(tensor.dtype)}")

    def same_device(self, name: str, tensor: Tensor | None, data_name: str, data: Tensor) -> None:
        if tensor is not None and tensor.device != data.device:
            self.fail(f"{name} must be on the device of {data_name}, {data.device}, got {tensor.device}")

    def shape(self, name: str, tensor: Tensor | None, shape: str, expected: Sequence[int]) -> None:
        if tensor is None:
            return

        def text() -> str:
            return f"{name} must have shape {shape} = {shape_text(expected)}, got {shape_text(tensor.shape)}"

        self.require(tensor.dim() == len(expected), text)
        for got, wanted in zip(tensor.shape, expected, strict=True):
            self.equal_sizes(got, wanted, text)

    def equal_sizes(self, got: int, wanted: int, text: Text) -> None:
        if isinstance(got, int) and isinstance(wanted, int):
            self.require(got == wanted, text)
        else:
            torch._check(got == wanted, lambda: f"{self.op}: {text()}")


def is_channels_last(tensor: Tensor) -> bool:
    """Dense in the order N, H, W, C and not also in N, C, H, W."""
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def empty_like_layout(like: Tensor, sizes: Sequence[int]) -> Tensor:
    layout = torch.channels_last if is_channels_last(like) else torch.contiguous_format
    return torch.empty(sizes, dtype=like.dtype, device=like.device, memory_format=layout)
