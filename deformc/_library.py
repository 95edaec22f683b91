"""Finds and loads the kernel libraries, and knows which op has a kernel on which device.

Importing deformc never fails for want of a library. What the loader said is kept and shown when an op is called.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

NAMESPACE = "deformc"
# Device type: its dispatch key.
DEVICES = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS"}

_NOT_BUILT = {
    "cuda": "this build of deformc holds no CUDA kernels",
    "mps": "this build of deformc holds no Metal kernels",
}
# Devices on which nobody has run the kernels yet: the tests run them on a simulated one.
SIMULATED_ONLY = ("mps",)
_REMEDY = "Install a wheel for this platform, or build the library from the sources with `pip install .`."


@dataclasses.dataclass(frozen=True)
class Backend:
    """One kind of device: whether its kernels are there, from which library file, and if not, why."""

    device: str
    available: bool
    library: str | None
    reason: str | None


def library_file() -> Path:
    """The library with the schemas and the CPU kernels; ``DEFORMC_LIBRARY`` names another file."""
    named = os.environ.get("DEFORMC_LIBRARY")
    if named:
        return Path(named)
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return Path(__file__).parent / f"lib{NAMESPACE}{suffix}"


def _load(path: Path) -> str | None:
    """Load a library; the loader's words if that fails."""
    if not path.exists():
        return f"{path.name} does not exist in {path.parent}"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return str(error.__cause__ or error)  # torch puts its own words around the loader's
    return None


_cpu_load_error = _load(library_file())

# Names of the ops that deformc's modules asked for.
OPS: tuple[str, ...] = ()


def loaded() -> bool:
    return _cpu_load_error is None


def op(name: str) -> Callable:
    """The op's overload, or where the library is missing a function that raises and says why."""
    global OPS
    OPS = (*OPS, name)
    if loaded():
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    def missing(*args, **kwargs):
        raise RuntimeError(f"deformc: the kernel library could not be loaded: {_cpu_load_error}. {_REMEDY}")

    return missing


def kernel_status(name: str, device: str) -> str | None:
    """None if the op has a kernel on this device, else the reason why not."""
    if not loaded():
        return _cpu_load_error
    key = DEVICES[device]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key)
    return None if has_kernel and (name, key) not in _explanations else _NOT_BUILT.get(device, "not registered")


_explanations: dict[tuple[str, str], torch.library.Library] = {}


def explain_missing_kernels(name: str, check: Callable) -> None:
    """Register, for each device without a kernel, one that checks the arguments and then says that there is none."""
    for device, key in DEVICES.items():
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key):
            continue

        def explain(*args, device=device):
            check(*args)
            raise RuntimeError(f"{name}: no kernel for {device} tensors: {_NOT_BUILT.get(device, 'not registered')}")

        _explanations[name, key] = torch.library.Library(NAMESPACE, "IMPL")
        _explanations[name, key].impl(name, explain, key)


def backends() -> dict[str, Backend]:
    """The kinds of device deformc knows, by ``torch.device.type``: which have kernels and, where not, why."""
    result = {}
    for device in DEVICES:
        reasons = [status for name in OPS if (status := kernel_status(name, device)) is not None]
        library = str(library_file()) if not reasons else None
        result[device] = Backend(device, not reasons, library, reasons[0] if reasons else None)
    return result
