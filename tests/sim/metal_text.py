"""Metal's source text made ready for g++, and what Metal would refuse but g++ accepts."""

from __future__ import annotations

import re
from collections import defaultdict

# In the order in which they follow the buffers: tests/sim/metal/registry.h binds them by their types.
INDICES = (
    "threadgroup_position_in_grid",
    "thread_index_in_threadgroup",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_simdgroup",
)
SPACES = {"device", "constant", "threadgroup", "thread"}
WORDS = {
    "double": "Metal has no double",
    "std": "Metal has no standard library of C++",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "new": "Metal allocates no memory",
    "delete": "Metal allocates no memory",
    "virtual": "Metal has no virtual functions",
    "goto": "Metal has no goto",
    "dynamic_cast": "Metal has no dynamic_cast",
    "typeid": "Metal has no typeid",
    "thread_local": "Metal has no thread_local",
    "asm": "Metal has no asm",
}
TYPES = {"void", "bool", "char", "short", "int", "long", "float", "half", "bfloat", "uint", "ulong", "ushort", "uchar"}
TYPES |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"size_t", "atomic_float", "auto"}
TYPES |= {f"{name}{n}" for name in ("float", "half", "bfloat", "uint", "int", "ulong") for n in (2, 3, 4)}


def without_comments(text: str) -> str:
    """The same lines without comments and without the branches of conditions that hold elsewhere than in Metal."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    lines, skipping, depth = [], [], 0
    for line in text.split("\n"):
        directive = re.match(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)", line)
        if directive:
            word, condition = directive[1], directive[2]
            if word in ("if", "ifdef", "ifndef"):
                depth += 1
                skipping.append(None)
                if "__METAL_VERSION__" in condition:
                    skipping[-1] = False
            elif word in ("elif", "else") and skipping and skipping[-1] is not None:
                skipping[-1] = True
            elif word == "endif" and skipping:
                skipping.pop()
            lines.append("")
        else:
            lines.append("" if True in skipping else line)
    return "\n".join(lines)


def _functions(text: str) -> dict[str, list[str]]:
    """The bodies of the functions with each name."""
    bodies = defaultdict(list)
    for found in re.finditer(r"\b(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?\{", text):
        if found[1] in ("if", "for", "while", "switch"):
            continue
        depth, end = 1, found.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        bodies[found[1]].append(text[found.end() : end])
    return bodies


def refused(source: str) -> list[str]:
    """What Metal would not compile, one sentence each, as far as the text shows it."""
    text = without_comments(source)
    code = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    found: list[str] = []

    def line_of(position: int) -> int:
        return code.count("\n", 0, position) + 1

    for word, sentence in WORDS.items():
        found += [f"line {line_of(hit.start())}: {sentence}" for hit in re.finditer(rf"(?<![\w.]){word}\b", code)]
    found += [f"line {line_of(hit.start())}: if constexpr" for hit in re.finditer(r"\bif\s+constexpr\b", code)]
    found += [
        f"line {line_of(hit.start())}: Metal has no lambdas before 3.2"
        for hit in re.finditer(r"(?:[=(,]|\breturn)\s*\[[^\[\]]*\]\s*\(", code)
    ]
    found += [
        f"line {line_of(hit.start())}: a number without f is a double in C++"
        for hit in re.finditer(r"(?<![\w.])(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?(?![\w.])", code)
        if not re.search(r"static_cast<\w+>\($", code[: hit.start()])
    ]

    types = TYPES | set(re.findall(r"\b(?:struct|class|typename|using)\s+(\w+)", code))
    for hit in re.finditer(
        r"\b(\w+)(?:<[^<>;(){}]*>)?\s*(?:\bconst\b\s*)?([*&])(?!&)\s*(?:const\b\s*)?(\w+|[>),])", code
    ):
        name = hit[1]
        if name not in types:
            continue
        start = max(code.rfind(mark, 0, hit.start()) for mark in "(,;{}<")
        before = set(re.findall(r"\w+", code[start + 1 : hit.start()]))
        if not before & SPACES:
            found.append(f"line {line_of(hit.start())}: no address space: {hit[0].strip()}")

    functions = _functions(code)
    calls = {
        name: {called for body in bodies for called in re.findall(r"\b(\w+)\s*(?:<[^<>;(){}]*>)?\s*\(", body)}
        & set(functions)
        for name, bodies in functions.items()
    }
    for name in functions:
        reached, wave = set(), set(calls[name])
        while wave:
            reached |= wave
            wave = set().union(*(calls[one] for one in wave)) - reached
        if name in reached and len(functions[name]) == 1:
            found.append(f"{name} calls itself: Metal has no recursion")

    for kernel in re.finditer(r"\[\[kernel\]\]\s*void\s+(\w+)\s*\(((?:[^()]|\([^()]*\))*)\)", code):
        attributes = re.findall(r"\[\[(\w+)(?:\((\d+)\))?\]\]", kernel[2])
        buffers = [int(number) for name, number in attributes if name == "buffer"]
        indices = [name for name, _ in attributes if name != "buffer"]
        parameters = kernel[2].count(",") - sum(inner.count(",") for inner in re.findall(r"<[^<>]*>", kernel[2])) + 1
        if buffers != list(range(len(buffers))) or len(attributes) != parameters:
            found.append(f"{kernel[1]}: buffers must be numbered from 0, and every parameter have an attribute")
        names = [name for name in indices if name in INDICES]
        if len(names) != len(indices) or tuple(names) != INDICES[: len(names)]:
            found.append(f"{kernel[1]}: the simulator binds {', '.join(INDICES)} in this order")
    return found


def for_host(source: str) -> str:
    """C++ for g++, after tests/sim/metal: a threadgroup's memory becomes static and is filled before each group."""
    lines = []
    for number, line in enumerate(source.split("\n"), 1):
        declared = re.match(r"^(\s+)threadgroup\s+([\w:<>, ]+?)\s+(\w+)((?:\[[^\]]+\])+);(.*)$", line)
        if declared:
            indent, element, name, sizes, rest = declared.groups()
            line = f"{indent}auto& {name} = ::sim::threadgroup_memory<{element}{sizes}, {number}>();{rest}"
        lines.append(line)
    return "#define __METAL_VERSION__ 310\n" + "\n".join(lines)
