"""The simulated device itself: that it is faithful enough for a fault in a kernel, or a missing one, to be noticed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import DEVICES, FLOAT32, SIMULATED, gradients, tensors_of
from sim import build, metal_text
from specs import SPECS

import deformc
from deformc import _doctor
from deformc.testing import opcheck

pytestmark = pytest.mark.skipif(build.reason_not_to() is not None, reason=str(build.reason_not_to()))
on_the_device = pytest.mark.skipif(SIMULATED != "mps", reason="runs where DEFORMC_SIMULATE=mps")
once = pytest.mark.skipif(SIMULATED is not None, reason="runs where no device is simulated: it starts other processes")


# ---- what Metal refuses ----------------------------------------------------------------------------------------------


def test_the_kernels_are_accepted():
    assert metal_text.refused(build.flattened()) == []


REFUSED = {
    "double": "inline float f(float x) { double y = x; return y; }",
    "double_literal": "inline float f(float x) { return x * 0.5; }",
    "std": "inline float f(float x) { return std::floor(x); }",
    "pointer_without_address_space": "inline float f(const float* x) { return x[0]; }",
    "reference_without_address_space": "struct P { int n; };\ninline int f(P& p) { return p.n; }",
    "pointer_of_a_template": "template <typename T>\ninline T f(device const T* a, T* b) { return a[0] + b[0]; }",
    "local_pointer": "inline float f(device float* x) { float* y = x; return y[0]; }",
    "recursion": "inline int f(int n) { return n < 2 ? n : f(n - 1); }",
    "mutual_recursion": "inline int f(int n) { return g(n); }\ninline int g(int n) { return f(n); }",
    "lambda": "inline float f(float x) { const auto g = [](float y) { return y; }; return g(x); }",
    "if_constexpr": "template <bool B>\ninline int f() { if constexpr (B) { return 1; } return 0; }",
    "exception": "inline void f() { throw 1; }",
    "allocation": "inline device float* f() { return new float[3]; }",
    "buffers_out_of_order": "[[kernel]] void f(device float* a [[buffer(1)]], device float* b [[buffer(0)]]) {}",
    "parameter_without_attribute": "[[kernel]] void f(device float* a [[buffer(0)]], uint3 position) {}",
    "other_index": "[[kernel]] void f(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) {}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    assert metal_text.refused(REFUSED[name])


def test_accepted():
    """What looks like it, and is not."""
    source = """
    struct Pair { device const float* data; int n; };
    template <typename T>
    inline T product(thread const T& a, T b) { return a * b; }
    inline float half_of(Pair pair, threadgroup float* out) {
      return static_cast<float>(pair.n) * 0.5f * pair.data[0] + out[0];
    }
    inline float other(float half_of_it, int n) {
      const int size = n * 2;
      return half_of_it * static_cast<float>(size & 3);
    }
    // double and std::floor in a comment
    """
    assert metal_text.refused(source) == []


# ---- missing and wrong kernels ---------------------------------------------------------------------------------------


@on_the_device
def test_an_operator_without_a_kernel_does_not_run_on_the_cpu():
    with torch.library._scoped_library("deformc_test_missing", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        op = torch.ops.deformc_test_missing.twice.default
        assert torch.equal(op(torch.ones(3)), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="deformc_test_missing::twice has no kernel for the simulated device"):
            op(torch.ones(3, device="mps"))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def registered(library, kernel_key, kernel, autograd):
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", kernel, kernel_key)
    op = torch.ops.deformc_test_registration.scale.default
    torch.library.register_fake("deformc_test_registration::scale", torch.empty_like, lib=library)
    if autograd:
        torch.library.register_autograd("deformc_test_registration::scale", autograd, lib=library)
    return op


@pytest.fixture
def library():
    with torch.library._scoped_library("deformc_test_registration", "FRAGMENT") as library:
        yield library


@on_the_device
class TestOpcheck:
    """torch's test of the registration does not know these tensors; ours must find what torch's finds for the CPU's."""

    def check(self, op):
        x = torch.randn(3, device="mps", requires_grad=True)
        return opcheck(op, (x,), test_utils=("test_autograd_registration",))

    def test_right(self, library):
        op = registered(library, "MPS", lambda x: x * 3, lambda ctx, gradient: gradient * 3)
        assert self.check(op) == {"test_autograd_registration": "SUCCESS"}
        x = torch.randn(3, device="mps", requires_grad=True)
        assert set(opcheck(op, (x,)).values()) == {"SUCCESS"}

    def test_not_differentiable(self, library):
        def kernel(x):
            with torch._C._AutoDispatchBelowAutograd():
                return x * 3

        assert self.check(registered(library, "MPS", kernel, None)) == {"test_autograd_registration": "SUCCESS"}

    def test_autograd_in_the_kernel_of_the_device(self, library):
        op = registered(library, "MPS", Scale.apply, None)
        with pytest.raises(AssertionError, match="has no kernel for AutogradMPS"):
            self.check(op)

    def test_results_without_gradient(self, library):
        op = registered(library, "MPS", lambda x: x * 3, None)
        library.impl("scale", lambda x: (x * 3).detach(), "AutogradMPS")
        with pytest.raises(AssertionError, match="no result does for mps tensors"):
            self.check(op)

    def test_gradient_on_another_device(self, library):
        op = registered(library, "MPS", lambda x: x * 3, lambda ctx, gradient: gradient.cpu() * 3)
        with pytest.raises((AssertionError, RuntimeError), match="device"):
            self.check(op)


# ---- memory, launches, libraries -------------------------------------------------------------------------------------


@on_the_device
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_block_of_commands_for_a_call(spec):
    arguments = spec.samples[0].make("mps", FLOAT32, 0)
    simulator = build.library()
    wanted = tensors_of(spec, arguments)
    gradients(spec.function, arguments, wanted)  # kernels exist from here on
    before = simulator.sim_metal_blocks(), simulator.sim_metal_launches()
    gradients(spec.function, arguments, wanted)
    assert simulator.sim_metal_blocks() - before[0] == 2  # forward and backward
    assert simulator.sim_metal_launches() - before[1] <= 6


@on_the_device
def test_save_and_load(tmp_path):
    module = deformc.nn.DeformConv2dPack(3, 4, 3, padding=1).to("mps")
    torch.save(module.state_dict(), tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt")
    assert {tensor.device.type for tensor in loaded.values()} == {"mps"}
    other = deformc.nn.DeformConv2dPack(3, 4, 3, padding=1).to("mps")
    other.load_state_dict(loaded)
    input = torch.randn(2, 3, 5, 6, device="mps")
    assert torch.equal(other(input), module(input))
    loaded = torch.load(tmp_path / "module.pt", map_location="cpu")
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


@on_the_device
def test_float64():
    """Metal has none; the sentence is that of the fake kernel."""
    image = torch.zeros(1, 2, 4, 4, device="mps", dtype=torch.float64)
    offset = torch.zeros(1, 2, 4, 4, device="mps")
    with pytest.raises(RuntimeError) as raised:
        deformc.deform_conv2d(image, offset, image[:, :, :1, :1])
    assert str(raised.value) == "deform_conv2d: input must be float32, float16 or bfloat16 on mps, got float64"
    value = torch.zeros(1, 4, 1, 4, device="mps", dtype=torch.float64)
    locations, weights = torch.zeros(1, 3, 1, 1, 2, 2, device="mps"), torch.zeros(1, 3, 1, 1, 2, device="mps")
    with pytest.raises(RuntimeError) as raised:
        deformc.ms_deform_attn(value, [(2, 2)], locations, weights)
    assert str(raised.value) == "ms_deform_attn: value must be float32, float16 or bfloat16 on mps, got float64"


@on_the_device
@pytest.mark.parametrize(
    ("shapes", "starts"),
    [
        ([[4, 6], [2, 3]], [0, -1]),
        ([[4, 6], [2, 3]], [0, 25]),
        ([[4, 6], [2, 2**40]], [0, 24]),
        ([[4, 6], [-2, 3]], [0, 24]),
        ([[2**20, 2**20], [2, 3]], [0, 24]),
        ([[4, 6], [2, 3]], [0, 2**62]),
    ],
    ids=str,
)
def test_levels_in_tensors_that_do_not_lie_in_the_value(shapes, starts):
    """Nothing waits for the device to say that they are wrong: such a level gives NaN, never another's memory."""
    spec = next(spec for spec in SPECS if spec.name == "ms_deform_attn_tensor_shapes")
    arguments = spec.samples[0].make("mps", FLOAT32, 0)
    wanted = tensors_of(spec, arguments)
    _, right = gradients(spec.function, arguments, wanted)
    arguments["spatial_shapes"] = torch.tensor(shapes, device="mps")
    arguments["level_start_index"] = torch.tensor(starts, device="mps")
    for enabled in (False, True):
        torch.use_deterministic_algorithms(enabled)
        try:
            output, actual = gradients(spec.function, arguments, wanted)
        finally:
            torch.use_deterministic_algorithms(False)
        assert output.isnan().all()
        wrong = [
            size[0] * size[1] <= 0 or start < 0 or start + size[0] * size[1] > 30
            for size, start in zip(shapes, starts, strict=True)
        ]
        for level, is_wrong in enumerate(wrong):
            for name in ("sampling_locations", "attention_weights"):
                part = actual[name][:, :, :, level]
                assert part.isnan().all() if is_wrong else torch.equal(part, right[name][:, :, :, level]), name
        assert actual["value"].isfinite().all()


# ---- other builds, in other processes --------------------------------------------------------------------------------


def run_tests(file, *arguments, edits=None, compiled=""):
    environment = os.environ | {
        "DEFORMC_SIMULATE": "mps",
        "DEFORMC_TEST_DEVICES": "mps",
        "DEFORMC_SIMULATE_EDITS": json.dumps(edits or {}),
        "DEFORMC_SIMULATE_COMPILED": compiled,
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        str(build.ROOT / "tests" / file),
        *arguments,
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


# A fault of each kind, and the tests that must notice it.
FAULTS = {
    "wrong_corner": (
        "common/metal_kernels.h",
        "quads.v01 = corners & CORNER_01 ? load_quad<T, VECTOR>(image.data + first + image.column_stride",
        "quads.v01 = corners & CORNER_01 ? load_quad<T, VECTOR>(image.data + first + image.row_stride",
        ("test_values.py", "-k", "plain"),
    ),
    "missing_barrier": (
        "deform_conv2d/deform_conv2d.metal",
        "    sample_columns<T, C, VECTOR>(in, d, n, group, first_pixel, first, index, columns);\n"
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n",
        "    sample_columns<T, C, VECTOR>(in, d, n, group, first_pixel, first, index, columns);\n",
        ("test_values.py", "-k", "deform_conv2d"),
    ),
    "missing_barrier_before_memory_is_used_again": (
        "deform_conv2d/deform_conv2d.metal",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "    sample_columns<T, C, VECTOR>(in, d, n, group, first_pixel, first, index, columns);\n",
        "    sample_columns<T, C, VECTOR>(in, d, n, group, first_pixel, first, index, columns);\n",
        ("test_values.py", "-k", "deform_conv2d"),
    ),
    "off_by_one_bound": (
        "ms_deform_attn/ms_deform_attn.metal",
        "if (i >= d.p.queries * d.p.heads * quads) return;",
        "if (i > d.p.queries * d.p.heads * quads) return;",
        ("test_values.py", "-k", "ms_deform_attn"),
    ),
    "off_by_one_channel": (
        "common/metal_kernels.h",
        "for (int32_t j = 0; j < count; ++j) quad[j]",
        "for (int32_t j = 0; j < count - 1; ++j) quad[j]",
        ("test_values.py", "-k", "channels_33"),
    ),
    "missing_registration": (
        "deform_conv2d/deform_conv2d_mps.cpp",
        '  m.impl("deform_conv2d_backward", TORCH_BOX(&deformc::deform_conv2d_backward_mps));\n',
        "",
        ("test_gradients.py", "-k", "deform_conv2d"),
    ),
}


@once
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name):
    file, old, new, tests = FAULTS[name]
    result = run_tests(*tests, edits={file: (old, new)})
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed" in result.stdout, result.stdout


@once
@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "road"), [("compiled", "compiled"), ("of a newer Metal", "source"), ("", "source")]
)
def test_compiled_library(compiled, road):
    """Where the build embedded one that this system's Metal takes, it is used; else the source."""
    program = f"""
import sys; sys.path.insert(0, {str(build.ROOT / "tests")!r})
from sim import build
build.simulate("mps", compiled={compiled.encode()!r})
import deformc, torch
value = torch.ones(1, 4, 1, 4, device="mps")
locations, weights = torch.full((1, 3, 1, 1, 2, 2), 0.5, device="mps"), torch.ones(1, 3, 1, 1, 2, device="mps")
out = deformc.ms_deform_attn(value, [(2, 2)], locations, weights)
assert out.cpu().eq(2).all(), out
print(build.library().sim_metal_compiled_libraries(), build.library().sim_metal_source_libraries())
import os; sys.stdout.flush(); os._exit(0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert result.stdout.split() == (["1", "0"] if road == "compiled" else ["0", "1"]), result.stdout + result.stderr


@on_the_device
def test_doctor():
    lines = []
    assert _doctor.run(lines.append) == 0
    report = "\n".join(lines)
    assert re.search(r"^ *mps: tested on a simulated device only", report, re.MULTILINE)
    for op in ("deform_conv2d", "ms_deform_attn"):
        for direction in ("forward", "backward"):
            assert re.search(rf"{op} {direction} +mps +ok", report)


XCRUN = """#!/usr/bin/env python3
import pathlib, sys
arguments = sys.argv[1:]
pathlib.Path({log!r}).open("a").write(" ".join(arguments) + "\\n")
if "-o" in arguments:
    pathlib.Path(arguments[arguments.index("-o") + 1]).write_bytes(bytes([0, 255, 7]))
"""


def test_build_on_macos(tmp_path, monkeypatch):
    """What setup.py embeds, with something in the place of Xcode, and without it."""
    sources = build.metal_sources()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match="will be compiled at their first use"):
        text = Path(sources.embed(tmp_path / "without")).read_text()
    assert "COMPILED_BYTES = 0;" in text
    monkeypatch.undo()
    log = tmp_path / "log"
    (tmp_path / "xcrun").write_text(XCRUN.format(log=str(log)))
    (tmp_path / "xcrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    text = Path(sources.embed(tmp_path / "with")).read_text()
    assert "COMPILED[] = {0,255,7};" in text
    assert "COMPILED_BYTES = 3;" in text
    _, compile, link = log.read_text().splitlines()
    assert " -Wall -Wextra -Werror -c " in compile
    assert "metallib" in link
    # The text is what was compiled, and what Metal compiles at the first use where nothing is.
    literals = re.findall(r'R"deformc\((.*?)\)deformc"', text, re.DOTALL)
    assert "".join(literals) == (tmp_path / "with" / "deformc.metal").read_text() == build.flattened()


MANGLED = """
{std}
namespace at::native::mps {{
struct PrecompiledMetalShaderLibrary {{
  explicit PrecompiledMetalShaderLibrary(std::vector<unsigned char>);
}};
PrecompiledMetalShaderLibrary::PrecompiledMetalShaderLibrary(std::vector<unsigned char>) {{}}
}}
"""
STD_OF_LINUX = "#include <vector>"
STD_OF_MACOS = """
namespace std { inline namespace __1 {
template <typename T> class allocator {};
template <typename T, typename = allocator<T>> class vector {};
} }
"""


@once
@pytest.mark.parametrize("std", [STD_OF_LINUX, STD_OF_MACOS], ids=["linux", "macos"])
def test_name_of_the_class_for_compiled_libraries(std, tmp_path):
    """Where it is not found, kernels are compiled at the first call, and nobody notices."""
    source = tmp_path / "mangled.cpp"
    source.write_text(MANGLED.format(std=std))
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-S", "-o", "-", str(source)]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"^(_ZN\w+C1\w+)", assembly + "\n", re.M)) | set(
        re.findall(r"\.globl\s+(_ZN\w+C1\w+)", assembly)
    )
    (name,) = names
    assert f'"{name}"' in (build.CSRC / "common" / "metal_mps.cpp").read_text()


def test_devices_are_simulated_in_the_test_run():
    """Nothing here is skipped without a reason: the device is there where it was asked for."""
    assert SIMULATED is None or DEVICES == (SIMULATED,)
    assert torch.backends.mps.is_available() == (SIMULATED == "mps")
    assert deformc.backends()["mps"].available == (SIMULATED == "mps")
