"""Autocast rule of the ops: data narrows to the dtype in force, coordinates stay as they are.

``torch.library.register_autocast`` would narrow every tensor. This works in eager mode and inside and outside
``torch.compile``.
"""

from collections.abc import Callable, Sequence

import torch

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "mps": "AutocastMPS"}
_libraries = []


def register_autocast(name: str, op: Callable, data: Sequence[str]) -> None:
    """Narrow the arguments named in ``data`` on every device, except float64 ones."""
    positions = [i for i, argument in enumerate(op._schema.arguments) if argument.name in data]
    for device, key in _KEYS.items():
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def rule(*args, device=device, keys=keys):
            dtype = torch.get_autocast_dtype(device)
            args = list(args)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                for i in positions:
                    tensor = args[i]
                    if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64:
                        args[i] = tensor.to(dtype)
                return op(*args)

        library = torch.library.Library("deformc", "IMPL")
        library.impl(name, rule, key)
        _libraries.append(library)
