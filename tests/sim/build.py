"""Builds and loads the simulated devices: this process then has a device "mps" on which the library's own Metal host
code and kernels run, compiled for the host.

``simulate("mps")`` has to come before anything asks torch whether the device is there, and before deformc is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils import cpp_extension

from sim import metal_text

SIM = Path(__file__).resolve().parent
ROOT = SIM.parent.parent
CSRC = ROOT / "csrc"

FLAGS = ["-std=c++20", "-O1", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-attributes", "-Wno-psabi"]
# As setup.py has it for torch 2.10: the host code must not need more.
STABLE = "#define TORCH_TARGET_VERSION 0x020a000000000000\n#define TORCH_STABLE_ONLY\n"


def reason_not_to() -> str | None:
    """Why no device can be simulated here, or None."""
    if platform.system() != "Linux":
        return "devices are simulated on Linux only"
    if torch.version.cuda or torch.version.hip:
        return f"devices are simulated with a CPU-only torch, and this is {torch.__version__}"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler"
    return None


def simulate(device: str, edits: Mapping[str, tuple[str, str]] | None = None, compiled: bytes = b"") -> None:
    """``edits``: for a file in csrc, a text that it has once and what to put there instead. ``compiled``: stands for
    what Xcode's compiler would have made of the kernels."""
    assert device == "mps"
    _load("sim_device", [SIM / "device.cpp", SIM / "fibers.cpp", SIM / "metal" / "runtime.cpp"])

    def moved(storage: torch.UntypedStorage, non_blocking: bool = False) -> torch.UntypedStorage:
        to = torch.empty(storage.size(), dtype=torch.uint8, device=device).untyped_storage()
        return to.copy_(storage, non_blocking)

    # torch.load calls it, and torch's own makes storages of the devices that torch was built for.
    setattr(torch.UntypedStorage, device, moved)
    _load("sim_kernels", _generated(dict(edits or {}), compiled))


def simulate_as_asked() -> None:
    """The device that the environment variable DEFORMC_SIMULATE names, with the edits of DEFORMC_SIMULATE_EDITS."""
    device = os.environ.get("DEFORMC_SIMULATE")
    if device:
        edits = json.loads(os.environ.get("DEFORMC_SIMULATE_EDITS", "{}"))
        simulate(device, edits, os.environ.get("DEFORMC_SIMULATE_COMPILED", "").encode())


def library() -> ctypes.CDLL:
    """The simulator's own functions, for tests."""
    return ctypes.CDLL(str(_folder("sim_device") / "sim_device.so"))


def flattened(csrc: Path = CSRC) -> str:
    return metal_sources().flatten(csrc)


def metal_sources():
    spec = importlib.util.spec_from_file_location("metal_sources", CSRC / "common" / "metal_sources.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder(name: str) -> Path:
    folder = ROOT / "build" / "sim" / f"torch-{torch.__version__}" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _load(name: str, sources: list[Path]) -> None:
    folder = sources[0].parent if name == "sim_kernels" else _folder(name)
    compiler = {} if "CXX" in os.environ else {"CXX": "c++"}
    # ninja may be in this Python's environment only, whose programs need not be in PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with _environment(MAX_JOBS="2", PATH=path, **compiler):
        cpp_extension.load(
            name=name,
            sources=[str(path) for path in sources],
            extra_cflags=FLAGS,
            extra_include_paths=[str(path) for path in (CSRC, SIM, SIM / "metal")],
            build_directory=str(folder),
            is_python_module=False,
        )
    # Its functions are found by those that look them up by name, as torch's own are.
    ctypes.CDLL(str(folder / f"{name}.so"), ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def _environment(**values: str):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _generated(edits: dict[str, tuple[str, str]], compiled: bytes) -> list[Path]:
    """The library's Metal host code and kernels, as files to compile."""
    csrc = CSRC
    variant = hashlib.sha256(repr((sorted(edits.items()), compiled)).encode()).hexdigest()[:12]
    folder = _folder(f"kernels-{variant}")
    if edits:
        csrc = folder / "csrc"
        shutil.copytree(CSRC, csrc, dirs_exist_ok=True)
        for name, (old, new) in edits.items():
            text = (CSRC / name).read_text()
            assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
            (csrc / name).write_text(text.replace(old, new))
    source = flattened(csrc)
    complaints = metal_text.refused(source)
    if complaints:
        raise RuntimeError("Metal would refuse the kernels:\n" + "\n".join(complaints))
    texts = {
        # Warnings that are errors of Metal, which has no double.
        "kernels.cpp": '#pragma GCC diagnostic error "-Wdouble-promotion"\n#include <metal_stdlib>\n'
        + metal_text.for_host(source),
        "embedded.cpp": metal_sources().as_cpp(source, compiled),
    }
    for path in sorted(csrc.glob("*/*_mps.cpp")):
        texts[path.name] = f'{STABLE}#include "{path}"\n'
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [folder / name for name in texts]
