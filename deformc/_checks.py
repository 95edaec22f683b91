"""Argument checks of the fake kernels: the sentences of csrc/common/host.h, for sizes that may be symbolic.

Equalities go through ``torch._check`` and become guards, as the shapes of a native op do. An inequality raises where
it is known to be false and otherwise adds no guard: for real tensors the kernel's own check decides.
"""

from collections.abc import Callable, Sequence

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

DATA_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def shape_text(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require(condition: bool, op: str, text: Callable[[], str]) -> None:
    if not condition:
        raise RuntimeError(f"{op}: {text()}")


def require_size(size_is_wrong: Callable[[], bool], op: str, text: Callable[[], str]) -> None:
    """An inequality between sizes, given as its opposite: no guard if it depends on symbols."""
    if statically_known_true(size_is_wrong()):
        raise RuntimeError(f"{op}: {text()}")


def check_rank(op: str, name: str, tensor: torch.Tensor, rank: int, shape: str) -> None:
    if tensor.dim() != rank:
        dimensions = "dimension" if rank == 1 else "dimensions"
        raise RuntimeError(f"{op}: {name} must have {rank} {dimensions} {shape}, got shape {shape_text(tensor.shape)}")


def check_data_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DATA_DTYPES:
        raise RuntimeError(
            f"{op}: {name} must be float64, float32, float16 or bfloat16, got {dtype_text(tensor.dtype)}"
        )


def check_same_dtype(op: str, name: str, tensor: torch.Tensor, data_name: str, data: torch.Tensor) -> None:
    if tensor.dtype != data.dtype:
        expected, got = dtype_text(data.dtype), dtype_text(tensor.dtype)
        raise RuntimeError(f"{op}: {name} must have the dtype of {data_name}, {expected}, got {got}")


def check_coordinate_dtype(op: str, name: str, tensor: torch.Tensor, data_name: str, data: torch.Tensor) -> None:
    if tensor.dtype not in (data.dtype, torch.float32):
        expected, got = dtype_text(data.dtype), dtype_text(tensor.dtype)
        raise RuntimeError(f"{op}: {name} must be float32 or have the dtype of {data_name}, {expected}, got {got}")


def check_same_device(op: str, name: str, tensor: torch.Tensor, data_name: str, data: torch.Tensor) -> None:
    if tensor.device != data.device:
        raise RuntimeError(f"{op}: {name} must be on the device of {data_name}, {data.device}, got {tensor.device}")


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: str, expected: Sequence[int]) -> None:
    def text() -> str:
        return f"{name} must have shape {shape} = {shape_text(expected)}, got {shape_text(tensor.shape)}"

    require(tensor.dim() == len(expected), op, text)
    for got, wanted in zip(tensor.shape, expected, strict=True):
        if isinstance(got, int) and isinstance(wanted, int):
            require(got == wanted, op, text)
        else:
            torch._check(got == wanted, lambda: f"{op}: {text()}")


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Dense in the order N, H, W, C and not also in N, C, H, W."""
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def empty_like_layout(like: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    layout = torch.channels_last if is_channels_last(like) else torch.contiguous_format
    return torch.empty(sizes, dtype=like.dtype, device=like.device, memory_format=layout)
