"""The kernel library and the wheel: one binary for every Python and every torch from the oldest supported one on.

``DEFORMC_WHEEL`` names the wheel that the tested package was installed from; without it, a wheel is built here.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import deformc
from deformc import _library
from deformc._doctor import build_info

ROOT = Path(__file__).parents[1]
PACKAGE = Path(deformc.__file__).parent
INSTALLED_WHEEL = os.environ.get("DEFORMC_WHEEL")
LIBRARY = _library.library_file()

# Symbols of these C++ namespaces change from release to release: functions and data whose name starts with one, and
# those of another namespace that mention one in their signature.
UNSTABLE_CXX = re.compile(r"(?:^_?_Z[A-Z]*|N[VK]*)(?:2at|3c10|5torch|6caffe2)(?=[\dA-Z])")
PYTHON_API = re.compile(r"^_*Py[A-Z_]")


def undefined_symbols(library: Path) -> set[str]:
    if sys.platform == "darwin":
        listing = subprocess.run(["nm", "-u", library], check=True, capture_output=True, text=True).stdout
        return set(listing.split())
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        return {symbol.name for symbol in table.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF"} - {""}


def needed_libraries(library: Path) -> set[str]:
    if sys.platform == "darwin":
        listing = subprocess.run(["otool", "-L", library], check=True, capture_output=True, text=True).stdout
        return {Path(line.split()[0]).name for line in listing.splitlines()[1:]}
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        return {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}


def exported_symbols(library: Path) -> set[str]:
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        return {symbol.name for symbol in table.iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"} - {""}


def in_child(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if INSTALLED_WHEEL:
        return Path(INSTALLED_WHEEL)
    folder = tmp_path_factory.mktemp("wheel")
    # The object files are shared with other builds, the folder that the wheel is packed from is not: what an earlier
    # build left there would get into the wheel.
    configuration = folder / "build.cfg"
    configuration.write_text(f"[build]\nbuild_lib = {folder / 'lib'}\n[bdist_wheel]\nbdist_dir = {folder / 'bdist'}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT],
        check=True,
        env=os.environ | {"DIST_EXTRA_CONFIG": str(configuration)},
    )
    (path,) = folder.glob("*.whl")
    return path


# ---- the library -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("symbol", "unstable"),
    [
        ("_ZN3c106detail14torchCheckFailEPKcS2_jS2_", True),
        ("_ZNK2at10TensorBase8data_ptrEv", True),
        ("_ZTIN3c105ErrorE", True),
        ("_ZN5torch7LibraryC1ENS0_4KindENSt7__cxx1112basic_stringIcEE", True),
        ("_ZNSt6vectorIN2at6TensorESaIS1_EED1Ev", True),
        ("__ZN2at4_ops5addmm4callERKNS_6TensorES4_", True),
        ("aoti_torch_empty_strided", False),
        ("torch_call_dispatcher", False),
        ("_ZNSt13runtime_errorC1EPKc", False),
        ("_Znwm", False),
    ],
)
def test_unstable_symbols_are_recognised(symbol, unstable):
    assert bool(UNSTABLE_CXX.search(symbol)) == unstable


@pytest.mark.skipif(sys.platform == "win32", reason="reads ELF and Mach-O files")
class TestLibrary:
    def test_reading_works(self):
        """The reader sees the C functions of torch's stable ABI, so that an empty result below means something."""
        assert any(symbol.lstrip("_").startswith(("aoti_torch_", "torch_")) for symbol in undefined_symbols(LIBRARY))

    def test_no_unstable_symbol_of_torch(self):
        assert [symbol for symbol in sorted(undefined_symbols(LIBRARY)) if UNSTABLE_CXX.search(symbol)] == []

    def test_no_symbol_of_python(self):
        assert [symbol for symbol in sorted(undefined_symbols(LIBRARY)) if PYTHON_API.search(symbol)] == []

    def test_needs_neither_python_nor_the_python_part_of_torch(self):
        needed = needed_libraries(LIBRARY)
        assert needed
        assert [name for name in sorted(needed) if "python" in name.lower()] == []

    @pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
    def test_no_search_path_of_the_build_machine(self):
        from elftools.elf.elffile import ELFFile

        with LIBRARY.open("rb") as file:
            tags = list(ELFFile(file).get_section_by_name(".dynamic").iter_tags())
        assert [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")] == []

    @pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
    def test_exports_no_symbol_of_torch_or_python(self):
        """A definition of torch's, exported, could take the place of torch's own in another library."""
        exported = sorted(exported_symbols(LIBRARY))
        assert "deformc_build_info" in exported
        assert [symbol for symbol in exported if UNSTABLE_CXX.search(symbol) or PYTHON_API.search(symbol)] == []
        assert [symbol for symbol in exported if "PyInit" in symbol] == []


def test_library_serves_a_range_of_torch_releases():
    info = build_info(str(LIBRARY))
    running = tuple(map(int, torch.__version__.split(".")[:2]))
    target, headers = (tuple(map(int, info[key].split(".")[:2])) for key in ("torch_target", "torch_headers"))
    assert target <= running
    assert target <= headers
    for op in ("deform_conv2d", "deform_conv2d_backward"):
        assert _library.kernel_status(op, "cpu") is None
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"deformc::{op}", "CPU")


# ---- the wheel -------------------------------------------------------------------------------------------------------


def test_wheel_is_for_one_platform_and_every_python(wheel):
    assert re.fullmatch(rf"deformc-{re.escape(deformc.__version__)}-py3-none-(?!any)\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"deformc-{deformc.__version__}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in metadata
    assert re.findall(r"^Tag: (\S+)$", metadata, re.MULTILINE) == [wheel.stem.split("-", 2)[2]]


def test_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    dist_info = f"deformc-{deformc.__version__}.dist-info/"
    package = {name for name in names if not name.startswith(dist_info)}
    assert f"{dist_info}licenses/LICENSE" in names
    expected = {f"deformc/{LIBRARY.name}"}
    expected |= {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")}
    assert package == expected


@pytest.mark.skipif(not INSTALLED_WHEEL, reason="the package was not installed from a wheel")
def test_package_is_the_installed_wheel(wheel):
    """The tests did not import the source tree, and the library was not built again for this torch."""
    assert ROOT not in PACKAGE.parents or "site-packages" in PACKAGE.parts
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read(f"deformc/{LIBRARY.name}")
    assert hashlib.sha256(packed).digest() == hashlib.sha256(LIBRARY.read_bytes()).digest()
    child = in_child("import deformc; print(deformc.__file__)").strip()
    assert Path(child) == Path(deformc.__file__)


# ---- a library that cannot be loaded ---------------------------------------------------------------------------------

CALLS = """
import torch, deformc
input, offset, weight = torch.zeros(1, 1, 3, 3), torch.zeros(1, 18, 1, 1), torch.zeros(1, 1, 3, 3)
calls = [
    lambda: deformc.deform_conv2d(input, offset, weight),
    lambda: deformc.nn.DeformConv2d(1, 1, 3)(input, offset),
]
for call in calls:
    try:
        call()
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("no error")
assert not any(backend.available for backend in deformc.backends().values())
print(deformc.backends()["cpu"].reason)
"""


def test_missing_library_is_reported_when_an_op_is_called(tmp_path):
    *errors, reason = in_child(CALLS, DEFORMC_LIBRARY=str(tmp_path / "absent.so")).splitlines()
    for error in errors:
        assert error.startswith("deformc: the kernel library could not be loaded: absent.so does not exist in ")
        assert "pip install" in error
    assert "absent.so does not exist" in reason


def test_unloadable_library_is_reported_when_an_op_is_called(tmp_path):
    library = tmp_path / "broken.so"
    library.write_bytes(b"not a library\n" * 100)
    with pytest.raises(OSError) as caught:
        ctypes.CDLL(str(library))
    loaders_words = str(caught.value)
    *errors, reason = in_child(CALLS, DEFORMC_LIBRARY=str(library)).splitlines()
    for error in errors:
        assert error.startswith("deformc: the kernel library could not be loaded: ")
        assert loaders_words in error
        assert "pip install" in error
    assert loaders_words in reason
