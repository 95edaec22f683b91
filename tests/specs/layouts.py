"""The same values in other places of memory."""

from collections.abc import Callable

import torch
from torch import Tensor


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def sliced(tensor: Tensor) -> Tensor:
    """The middle of a larger tensor: gaps between the rows, and a storage offset."""
    larger = tensor.new_full([size + 3 for size in tensor.shape], 7.0)
    middle = larger[tuple(slice(1, size + 1) for size in tensor.shape)]
    return middle.copy_(tensor)


def stepped(tensor: Tensor) -> Tensor:
    """Every second element of a larger tensor along every dimension."""
    larger = tensor.new_full([2 * size for size in tensor.shape], 7.0)
    return larger[tuple(slice(1, None, 2) for _ in tensor.shape)].copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """Dimensions in memory in the reverse order."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def expanded(tensor: Tensor) -> Tensor:
    """The first index repeated with stride 0 along the first dimension: other values, no other memory."""
    return tensor[:1].expand(tensor.shape)


def broadcast_pixels(tensor: Tensor) -> Tensor:
    """One pixel repeated with stride 0 along the last two dimensions (along the only one of a vector)."""
    corner = tensor[..., :1, :1] if tensor.dim() > 1 else tensor[:1]
    return corner.expand(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced": sliced,
    "stepped": stepped,
    "transposed": transposed,
    "expanded": expanded,
    "broadcast_pixels": broadcast_pixels,
}
