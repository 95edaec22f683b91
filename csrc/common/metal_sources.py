"""The Metal kernels of all operators as one source text, and that text as C++: what setup.py embeds in the library."""

import re
import subprocess
import warnings
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent


def flatten(csrc: Path = CSRC) -> str:
    """Every ``<op>/<op>.metal``, each local header in front of its first use. Metal's own headers stay included."""
    lines: list[str] = []
    seen: set[str] = set()

    def add(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for line in (csrc / name).read_text().splitlines():
            included = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if included:
                add(included[1])
            elif line.strip() != "#pragma once":
                lines.append(line)

    for path in sorted(csrc.glob("*/*.metal")):
        add(path.relative_to(csrc).as_posix())
    return "\n".join(lines) + "\n"


def as_cpp(source: str, compiled: bytes = b"") -> str:
    """The definitions that common/metal_mps.cpp declares. ``compiled``: what Xcode's compiler made of the source."""
    # Compilers limit the length of one literal; neighbours are joined.
    pieces = [source[i : i + 8000] for i in range(0, len(source), 8000)]
    literals = "\n".join(f'R"deformc({piece})deformc"' for piece in pieces)
    numbers = ",".join(map(str, compiled or b"\0"))
    return f"""#include <cstddef>
namespace deformc::metal {{
extern const char* const SOURCE;
extern const unsigned char COMPILED[];
extern const std::size_t COMPILED_BYTES;
const char* const SOURCE =
{literals};
const unsigned char COMPILED[] = {{{numbers}}};
const std::size_t COMPILED_BYTES = {len(compiled)};
}}  // namespace deformc::metal
"""


def embed(folder: Path) -> str:
    """Write the file for the build to compile, with the kernels as source text and, if Xcode is there, compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    source, compiled = folder / "deformc.metal", folder / "deformc.metallib"
    source.write_text(flatten())
    if not compile_with_xcode(source, compiled):
        warnings.warn("no Metal compiler (xcrun metal): the kernels will be compiled at their first use", stacklevel=2)
    embedded = folder / "metal_embedded.cpp"
    embedded.write_text(as_cpp(source.read_text(), compiled.read_bytes() if compiled.exists() else b""))
    return str(embedded)


def compile_with_xcode(source: Path, compiled: Path) -> bool:
    """Compile to a library for macOS 14 and later, whose Metal 3.1 has bfloat; False if there is no compiler."""
    compiled.unlink(missing_ok=True)
    metal = ["xcrun", "-sdk", "macosx", "metal", "-std=metal3.1", "-mmacosx-version-min=14.0", "-fno-fast-math"]
    try:
        subprocess.run(["xcrun", "-sdk", "macosx", "--find", "metal"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    intermediate = source.with_suffix(".air")
    subprocess.run([*metal, "-Wall", "-Wextra", "-Werror", "-c", str(source), "-o", str(intermediate)], check=True)
    subprocess.run(["xcrun", "-sdk", "macosx", "metallib", str(intermediate), "-o", str(compiled)], check=True)
    return True
