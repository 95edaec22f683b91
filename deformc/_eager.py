"""The short way into an op: skips the autograd formula where nothing can be differentiated.

It halves the overhead of a call.
"""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

_are_transforms_active = torch._C._are_functorch_transforms_active


def call(op: Callable, args: tuple, differentiable: tuple[torch.Tensor | None, ...]):
    """``op(*args)``, of which the tensors in ``differentiable`` may require a gradient.

    The short way is taken in plain eager mode only: tracing, torch.func transforms and forward-mode AD must see the
    whole op.
    """
    if torch.compiler.is_compiling() or _are_transforms_active() or forward_ad._current_level >= 0:
        return op(*args)
    if torch.is_grad_enabled():
        for tensor in differentiable:
            if tensor is not None and tensor.requires_grad:
                return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)
