"""Builds the kernel libraries. Sources are globbed: a new op is a new folder in csrc/ and needs no line here.

On macOS the library holds the Metal kernels too: compiled, where Xcode has a Metal compiler, and as source text.

Environment: DEFORMC_SANITIZE=1 builds with AddressSanitizer and UndefinedBehaviorSanitizer, DEBUG=1 without
optimisation.
"""

import os
import sys
from pathlib import Path

import torch
from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).parent
# The oldest torch whose stable ABI the libraries use; every later release loads the same binary.
OLDEST_TORCH = (2, 10)


def library_suffix() -> str:
    return {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


def target_version_flag() -> str:
    # One byte each for major and minor: 2.10 is 0x020A.
    major, minor = OLDEST_TORCH
    return f"0x{major << 56 | minor << 48:016x}"


def compile_args() -> list[str]:
    defines = {
        "TORCH_TARGET_VERSION": target_version_flag(),
        "TORCH_STABLE_ONLY": "1",
        "DEFORMC_TORCH_TARGET": f'"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"',
        "DEFORMC_TORCH_HEADERS": f'"{torch.__version__.split("+")[0]}"',
    }
    if sys.platform == "win32":
        quoted = {name: value.replace('"', r"\"") for name, value in defines.items()}
        return ["/O2", "/std:c++20", *(f"/D{name}={value}" for name, value in quoted.items())]
    args = [f"-D{name}={value}" for name, value in defines.items()]
    # No path of the build machine in the library, nor in the texts of errors.
    places = {ROOT: ".", **dict.fromkeys(include_paths(), "torch")}
    args += [f"-ffile-prefix-map={place}={name}" for place, name in places.items()]
    args += ["-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-psabi"]
    if os.environ.get("DEFORMC_SANITIZE") == "1":
        return [
            *args,
            "-O1",
            "-g",
            "-fno-omit-frame-pointer",
            "-fsanitize=address,undefined,float-cast-overflow",
            "-fno-sanitize-recover",
        ]
    if os.environ.get("DEBUG") == "1":
        return [*args, "-O0", "-g"]
    # Neither flag changes a value: they let the compiler ignore errno and floating-point traps.
    return [*args, "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math"]


def link_args() -> list[str]:
    return ["-fsanitize=address,undefined"] if os.environ.get("DEFORMC_SANITIZE") == "1" else []


class BuildLibraries(BuildExtension):
    """Names the products libdeformc.so rather than as Python modules: they hold no Python symbol."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + library_suffix()

    def build_extensions(self) -> None:
        if sys.platform == "darwin":
            sys.path.insert(0, str(ROOT / "csrc" / "common"))
            import metal_sources

            for extension in self.extensions:
                extension.sources.append(metal_sources.embed(Path(self.build_temp)))
        super().build_extensions()

    def get_export_symbols(self, ext) -> list[str]:
        return []  # MSVC would otherwise be told to export PyInit_<name>


class PlatformWheel(bdist_wheel):
    """One wheel per platform, for every Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def libraries() -> list[CppExtension]:
    csrc = ROOT / "csrc"
    sources = [path for path in csrc.glob("*/*.cpp") if sys.platform == "darwin" or not path.stem.endswith("_mps")]
    return [
        CppExtension(
            "deformc.libdeformc",
            sources=sorted(str(path.relative_to(ROOT)) for path in sources),
            depends=sorted(str(path.relative_to(ROOT)) for path in csrc.glob("*/*.[hm]*")),
            include_dirs=[str(csrc)],
            extra_compile_args={"cxx": compile_args()},
            extra_link_args=link_args(),
            py_limited_api=True,  # leaves libtorch_python out of the link
        )
    ]


setup(
    ext_modules=libraries(),
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
