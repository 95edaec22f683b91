"""What is installed, which op has a kernel on which device and why not, and whether the kernels compute what they must.

Needs nothing but torch, and never raises for a broken installation: describing one is its purpose.
"""

import ctypes
import itertools
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import deformc
from deformc import _library

# Largest difference allowed to the reference computed in float64, relative to the largest value of the tensor.
TOLERANCE = 1e-4


def run(write: Callable[[str], object] = print) -> int:
    """Write the report line by line; the exit code is 0 if the library loads and every self-check passes."""
    for line in _versions():
        write(line)
    write("\nlibraries")
    for line in _libraries():
        write(f"  {line}")
    write("\nkernels")
    for line in _kernels():
        write(f"  {line}")
    if not _library.loaded():
        write("\nself-check: not run, the kernel library could not be loaded")
        return 1
    write("\nself-check: largest difference to deformc.reference, relative to the largest value")
    rows, healthy = _self_check()
    for line in _table(rows):
        write(f"  {line}")
    return 0 if healthy else 1


def build_info(path: str) -> dict[str, str]:
    """What a kernel library says about its own build: compiler, headers of torch, oldest torch it runs with."""
    function = ctypes.CDLL(path).deformc_build_info
    function.restype = ctypes.c_char_p
    return dict(entry.split("=", 1) for entry in function().decode().split(";"))


def _versions() -> list[str]:
    return _table(
        [
            ("deformc", deformc.__version__),
            ("python", f"{platform.python_version()} ({sys.executable})"),
            ("torch", torch.__version__),
            ("platform", f"{platform.platform()} ({platform.machine()})"),
        ]
    )


def _libraries() -> Iterator[str]:
    backends = deformc.backends()
    if not _library.loaded():
        yield f"{_library.library_file()}: could not be loaded: {backends['cpu'].reason}"
    # One library may serve several devices.
    for path in dict.fromkeys(backend.library for backend in backends.values() if backend.library is not None):
        yield f"{path}: loaded"
        try:
            yield from (f"  {line}" for line in _table(list(build_info(path).items())))
        except (OSError, AttributeError, ValueError) as error:
            yield f"  says nothing about its build: {error}"


def _kernels() -> Iterator[str]:
    status = {(op, device): _library.kernel_status(op, device) for op in _library.OPS for device in _library.DEVICES}
    rows = [("op", *_library.DEVICES)]
    rows += [(op, *("no" if status[op, device] else "yes" for device in _library.DEVICES)) for op in _library.OPS]
    rows += [("device is here", *("yes" if _is_here(device) else "no" for device in _library.DEVICES))]
    yield from _table(rows)
    if not _library.loaded():
        return  # the one reason is above
    # The same reason often holds for every op of a device.
    for device in _library.DEVICES:
        reasons: dict[str, list[str]] = {}
        for op in _library.OPS:
            if status[op, device]:
                reasons.setdefault(status[op, device], []).append(op)
        for reason, ops in reasons.items():
            yield f"{device}: {'' if len(ops) == len(_library.OPS) else ', '.join(ops) + ': '}{reason}"
        if device in _library.SIMULATED_ONLY and any(status[op, device] is None for op in _library.OPS):
            yield f"{device}: tested on a simulated device only; run the tests before you rely on it"


def _is_here(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.is_available()
    if device == "mps":
        return torch.backends.mps.is_available()
    return True


# A small problem for each function: the shapes of its tensors, and what else it takes.
_CHECKED = {
    "deform_conv2d": (
        {"input": (2, 4, 7, 9), "offset": (2, 36, 7, 9), "weight": (6, 2, 3, 3), "bias": (6,), "mask": (2, 18, 7, 9)},
        {"padding": 1},
    ),
    "ms_deform_attn": (
        {
            "value": (2, 54, 2, 17),
            "sampling_locations": (2, 5, 2, 2, 3, 2),
            "attention_weights": (2, 5, 2, 2, 3),
        },
        {"spatial_shapes": [(6, 7), (3, 4)]},
    ),
}


def _self_check() -> tuple[list[tuple[str, ...]], bool]:
    rows = []
    healthy = True
    here = [device for device, backend in deformc.backends().items() if backend.available and _is_here(device)]
    for op, device in itertools.product(_CHECKED, here):
        try:
            differences = _differences(op, device)
        except Exception as error:
            rows.append((op, device, "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]))
            healthy = False
            continue
        for direction, difference in differences.items():
            passed = difference <= TOLERANCE  # false for NaN
            rows.append((f"{op} {direction}", device, "ok" if passed else "FAILED", f"{difference:.1e}"))
            healthy = healthy and passed
    return rows, healthy


def _differences(op: str, device: str) -> dict[str, float]:
    shapes, others = _CHECKED[op]
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def evaluate(function: Callable[..., Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
        arguments = {name: tensor.to(device=device, dtype=dtype).requires_grad_() for name, tensor in tensors.items()}
        output = function(**arguments, **others)
        grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(output, list(arguments.values()), grad_output.to(output))
        return [output.detach(), *gradients]

    with torch.backends.cudnn.flags(allow_tf32=False):
        actual = evaluate(getattr(deformc, op), device, torch.float32)
    expected = evaluate(getattr(deformc.reference, op), "cpu", torch.float64)

    def difference(actual: Tensor, expected: Tensor) -> float:
        return ((actual.cpu().double() - expected).abs().max() / expected.abs().max()).item()

    per_tensor = [difference(*pair) for pair in zip(actual, expected, strict=True)]
    # torch's max keeps a NaN; Python's may lose it.
    return {"forward": per_tensor[0], "backward": torch.tensor(per_tensor[1:]).max().item()}


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
