"""What is special about ms_deform_attn: shapes in tensors, known values, compilation with sizes of feature maps."""

import math

import pytest
import torch
from common import DEVICES, FLOAT32, FLOAT64, assert_close, gradients, random_like, widest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs.ms_deform_attn import DENSE, SPARSE, TENSORS, problem
from test_nn_ms_deform_attn import grid_sample_attention

import deformc


def with_levels(arguments):
    """Locations and weights with L and P, of samples that have as many points in each level."""
    return [arguments[name] for name in ("value", "spatial_shapes", "sampling_locations", "attention_weights")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parameters", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_grid_sample(device, parameters):
    arguments = problem(**parameters)(device, widest(device), 0)
    grad_output = random_like(deformc.ms_deform_attn(**arguments))
    actual = gradients(deformc.ms_deform_attn, arguments, TENSORS, grad_output)

    def plain(**arguments):
        return grid_sample_attention(*with_levels(arguments))

    expected = gradients(plain, arguments, TENSORS, grad_output)
    assert_close(actual[0], expected[0], factor=8)
    for name in TENSORS:
        assert_close(actual[1][name], expected[1][name], name, factor=64)


@pytest.mark.parametrize("device", DEVICES)
def test_discrete_is_the_pixel_under_the_location(device):
    height, width = 5, 7
    value = torch.arange(float(height * width), device=device).reshape(1, -1, 1, 1)
    x = torch.linspace(-0.4, 1.4, 61, device=device)
    y = torch.linspace(1.3, -0.3, 61, device=device)
    locations = torch.stack([x, y], -1).reshape(1, 61, 1, 1, 1, 2)
    output = deformc.ms_deform_attn(
        value, [(height, width)], locations, torch.ones(1, 61, 1, 1, 1, device=device), mode="discrete"
    )
    column = (x * width + 0.5).to(torch.int64).clamp(0, width - 1)
    row = (y * height + 0.5).to(torch.int64).clamp(0, height - 1)
    assert torch.equal(output.flatten(), (row * width + column).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("data", [torch.bfloat16, torch.float16])
def test_narrow_values_of_a_large_map_keep_float32_locations(device, data):
    """Only the rounding of the values shows: in half precision, neighbouring pixels could not be told apart."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1, 256 * 256, 1, 4, generator=generator).to(data).to(device)
    locations = torch.rand(1, 500, 1, 1, 4, 2, generator=generator).to(device)
    weights = torch.rand(1, 500, 1, 1, 4, generator=generator).to(device)
    actual = deformc.ms_deform_attn(value, [(256, 256)], locations, weights)
    expected = deformc.reference.ms_deform_attn(value.double(), [(256, 256)], locations.double(), weights.double())
    assert_close(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_point_at_minus_one_beside_an_infinite_pixel(device):
    """Exactly at -1 a point does not count, so it is 0 and not 0 times infinity; nor does one outside."""
    value = torch.full((1, 16, 1, 3), math.inf, device=device)
    positions = torch.tensor([[-1.0, 0.0], [0.0, -1.0], [-1.0, -1.0], [4.0, 1.5], [2.0, 9.0], [math.inf, 0.0]])
    locations = ((positions + 0.5) / 4).reshape(1, 1, 1, 1, 6, 2).to(device)
    output = deformc.ms_deform_attn(value, [(4, 4)], locations, torch.ones(1, 1, 1, 1, 6, device=device))
    assert torch.equal(output, torch.zeros_like(output))


@pytest.mark.usefixtures("deterministic_algorithms")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_repeated_runs_are_bitwise_equal(device, threads):
    """All points fall onto few pixels, so that many sums meet in each pixel of the gradient."""
    arguments = problem(n=1, q=200, m=3, d=33, shapes=((9, 8), (3, 3)), points=4)(device, FLOAT32, 0)
    arguments["sampling_locations"] = arguments["sampling_locations"] * 0.1 + 0.4
    grad_output = random_like(deformc.ms_deform_attn(**arguments))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = [gradients(deformc.ms_deform_attn, arguments, TENSORS, grad_output) for _ in range(10)]
    finally:
        torch.set_num_threads(before)
    for output, actual in runs[1:]:
        assert torch.equal(output, runs[0][0])
        for name in TENSORS:
            assert torch.equal(actual[name], runs[0][1][name]), name


# ---- shapes in tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "starts", "text"),
    [
        ([(4, 6), (2, 0)], [0, 24], "spatial_shapes must be at least 1, got [[4, 6], [2, 0]]"),
        ([(4, 6), (-2, 3)], [0, 24], "spatial_shapes must be at least 1, got [[4, 6], [-2, 3]]"),
        ([(4, 6), (2**30, 3)], [0, 24], f"spatial_shapes must be below 2^30, got [[4, 6], [{2**30}, 3]]"),
        *(
            (
                shapes,
                starts,
                "level_start_index must keep every level inside the S = 30 pixels of value, got "
                f"{starts} with spatial_shapes {[list(pair) for pair in shapes]}",
            )
            for shapes, starts in (
                ([(4, 6), (2, 3)], [0, 25]),
                ([(4, 6), (2, 3)], [-1, 24]),
                ([(4, 6), (2, 3)], [0, 2**62]),
                ([(8, 12), (4, 6)], [0, 24]),
            )
        ),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_contents_of_shape_tensors(shapes, starts, text, backward):
    arguments = problem()("cpu", FLOAT32, 0)
    locations, weights = arguments["sampling_locations"].flatten(3, 4), arguments["attention_weights"].flatten(3)
    rest = (arguments["value"], torch.tensor(shapes), torch.tensor(starts), locations, weights, [2, 2], "bilinear")
    name = "ms_deform_attn_tensor_shapes"
    if backward:
        name, rest = f"{name}_backward", (torch.zeros(2, 5, 8), *rest, True, True, True, False)
    with pytest.raises(RuntimeError) as raised:
        getattr(torch.ops.deformc, name)(*rest)
    assert str(raised.value) == f"{name}: {text}"


NUMBERS = st.one_of(st.integers(-3, 12), st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=300, deadline=None)
@given(
    shapes=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=2),
    starts=st.lists(NUMBERS, min_size=2, max_size=2),
)
def test_any_contents_of_shape_tensors_stay_inside(shapes, starts):
    """An error, or the right result: never a read or a write outside of value. The sanitizer build runs this."""
    arguments = problem(n=1, d=3)("cpu", FLOAT64, 0)
    arguments["spatial_shapes"], arguments["level_start_index"] = torch.tensor(shapes), torch.tensor(starts)
    inside = all(
        min(height, width) >= 1 and start >= 0 and start + height * width <= 30
        for (height, width), start in zip(shapes, starts, strict=True)
    )
    if not inside:
        with pytest.raises(RuntimeError, match="must"):
            deformc.ms_deform_attn(**arguments)
        return
    output, actual = gradients(deformc.ms_deform_attn, arguments, TENSORS)
    expected_output, expected = gradients(deformc.reference.ms_deform_attn, arguments, TENSORS)
    assert_close(output, expected_output)
    assert_close(actual["value"], expected["value"])


def test_level_start_index_by_default():
    arguments = problem()("cpu", FLOAT64, 0)
    expected = deformc.ms_deform_attn(**arguments)
    shapes = torch.tensor(arguments["spatial_shapes"])
    assert torch.equal(deformc.ms_deform_attn(**arguments | {"spatial_shapes": shapes}), expected)


# ---- compilation and export ------------------------------------------------------------------------------------------


def attend(locations, weights, *maps):
    """A list of feature maps becomes value and shapes inside."""
    value = torch.cat([features.flatten(2).transpose(1, 2) for features in maps], 1).unflatten(2, (2, 4))
    return deformc.ms_deform_attn(value, [features.shape[2:] for features in maps], locations, weights)


def attend_inputs(n, q, height, width):
    maps = [torch.randn(n, 8, height // scale, width // scale) for scale in (1, 2, 4)]
    return torch.rand(n, q, 2, 3, 5, 2), torch.rand(n, q, 2, 3, 5), *maps


SIZES = ((7, 19, 37 * 4, 53 * 4), (11, 23, 40, 64), (6, 30, 62, 44), (31, 29, 20, 36))


@pytest.mark.parametrize("with_gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_compilation_for_all_sizes(fresh_compiler, backend, with_gradients):
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for sizes in SIZES:
        inputs = [tensor.requires_grad_(with_gradients) for tensor in attend_inputs(*sizes)]
        actual, expected = compiled(*inputs), attend(*inputs)
        assert_close(actual, expected)
        if with_gradients:
            for one, other in zip(
                torch.autograd.grad(actual.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
            ):
                assert_close(one, other)


class Attend(torch.nn.Module):
    def forward(self, *inputs):
        return attend(*inputs)


def test_export_with_dynamic_sizes():
    auto = torch.export.Dim.AUTO
    sizes = ({0: auto, 1: auto}, {0: auto, 1: auto}, *({0: auto, 2: auto, 3: auto},) * 3)
    program = torch.export.export(Attend(), attend_inputs(*SIZES[0]), dynamic_shapes=(sizes,))
    assert [node.target for node in program.graph.nodes].count(torch.ops.deformc.ms_deform_attn.default) == 1
    for sizes in SIZES[1:]:
        inputs = attend_inputs(*sizes)
        assert_close(program.module()(*inputs), attend(*inputs))
    (node,) = (node for node in program.graph.nodes if node.target is torch.ops.deformc.ms_deform_attn.default)
    assert len(node.args[1]) == 6
    assert not any(isinstance(size, int) for size in node.args[1]), "a size became a constant"


@pytest.mark.slow
def test_aotinductor_with_dynamic_sizes(tmp_path):
    auto = torch.export.Dim.AUTO
    sizes = ({0: auto, 1: auto}, {0: auto, 1: auto}, *({0: auto, 2: auto, 3: auto},) * 3)
    with torch.no_grad():
        program = torch.export.export(Attend(), attend_inputs(*SIZES[0]), dynamic_shapes=(sizes,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
        package = torch._inductor.aoti_load_package(path)
        for sizes in SIZES[1:]:
            inputs = attend_inputs(*sizes)
            assert_close(package(*inputs), attend(*inputs))
