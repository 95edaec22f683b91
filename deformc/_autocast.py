"""Autocast rule of the ops: data narrows to the dtype in force, coordinates keep at least the precision they have.

``torch.library.register_autocast`` would narrow every tensor. This works in eager mode and inside and outside
``torch.compile``.
"""

from collections.abc import Callable, Sequence

import torch

from deformc import _library
from deformc._schema import Arguments

_libraries = []


class Autocast:
    """The rule of one op.

    ``data`` names the arguments that narrow, unless one of them is float64. The other floating point tensors,
    coordinates and what multiplies samples, stay as they are; in a half precision that is not the one in force they
    widen to float32, for the op takes no two half precisions.
    """

    def __init__(self, op: Callable, data: Sequence[str]) -> None:
        self.op = op
        arguments = Arguments(op)
        self.data = [i for i in arguments.tensor_positions if arguments.names[i] in data]
        self.others = [i for i in arguments.tensor_positions if i not in self.data]

    def of(self, args: Sequence, device: str | None = None) -> Sequence:
        """The arguments as the op gets them, which are the same outside of autocast."""
        if device is None:
            device = args[self.data[0]].device.type
            if device not in _library.DEVICES or not torch.is_autocast_enabled(device):
                return args
        dtype = torch.get_autocast_dtype(device)
        data = [args[i] for i in self.data if args[i] is not None]
        if any(tensor.dtype == torch.float64 or not tensor.is_floating_point() for tensor in data):
            return args
        args = list(args)
        for i in self.data:
            if args[i] is not None:
                args[i] = args[i].to(dtype)
        for i in self.others:
            if args[i] is not None and args[i].dtype in (torch.float16, torch.bfloat16) and args[i].dtype != dtype:
                args[i] = args[i].float()
        return args

    def register(self) -> None:
        library = torch.library.Library(_library.NAMESPACE, "IMPL")
        for device, key in _library.DEVICES.items():
            key = f"Autocast{key}"
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

            def rule(*args, device=device, keys=keys):
                with torch._C._ExcludeDispatchKeyGuard(keys):
                    return self.op(*self.of(args, device))

            library.impl(self.op._opname, rule, key)
        _libraries.append(library)
