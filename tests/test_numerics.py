"""Values known from elsewhere: conv2d, exact positions in wide images, large problems, repeated runs."""

import math

import pytest
import torch
from common import DEVICES, FLOAT32, assert_close, deterministic, gradients, random_like, widest, with_grad
from specs.deform_conv2d import TENSORS, integers, problem

import deformc
import deformc.reference

WINDOWS = {
    "plain": {"padding": 1},
    "no_padding": {"padding": 0},
    "strided": {"stride": (2, 1), "padding": (2, 0), "size": (9, 8)},
    "dilated": {"dilation": (1, 2), "padding": 2, "size": (7, 9)},
    "grouped": {"groups": 2, "offset_groups": 2, "kernel": (3, 2)},
    "kernel_1x1": {"kernel": 1, "padding": 0},
    "depthwise": {"c": 6, "o": 6, "groups": 6, "offset_groups": 3},
}


def conv2d(arguments):
    groups = arguments["input"].size(1) // arguments["weight"].size(1)
    names = ("input", "weight", "bias", "stride", "padding", "dilation")
    return torch.nn.functional.conv2d(**{name: arguments[name] for name in names}, groups=groups)


def without_offsets(arguments, *, ones):
    offset, mask = torch.zeros_like(arguments["offset"]), torch.ones_like(arguments["mask"])
    return arguments | {"offset": offset, "mask": mask if ones else None}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ones", [True, False], ids=["mask_of_ones", "no_mask"])
@pytest.mark.parametrize("name", WINDOWS)
def test_without_offsets_it_is_conv2d(device, name, ones):
    arguments = without_offsets(problem(**WINDOWS[name])(device, widest(device), 0), ones=ones)
    wanted = ("input", "weight", "bias")
    output, actual = gradients(deformc.deform_conv2d, arguments, wanted)
    leaves = with_grad(arguments, wanted)
    expected = conv2d(leaves)
    assert_close(output, expected)
    expected.sum().backward()
    for argument in wanted:
        assert_close(actual[argument], leaves[argument].grad, argument)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, (2, 5)])
@pytest.mark.parametrize("dilation", [1, 2, (3, 1)])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.filterwarnings("ignore:Using padding='same'")  # conv2d says that it copies its input
def test_named_padding_is_that_of_conv2d(device, padding, dilation, kernel):
    make = problem(kernel=kernel, dilation=dilation, padding=0, size=(10, 11), mask=False)
    arguments = make(device, widest(device), 0) | {"padding": padding}
    expected = conv2d(arguments)
    points = arguments["offset"].size(1)
    arguments["offset"] = arguments["offset"].new_zeros(2, points, *expected.shape[2:])
    assert_close(deformc.deform_conv2d(**arguments), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_integer_offsets_move_pixels(device):
    """One tap moved by (dy, dx) reads the pixel there: the image shifted, and zeros where it has no pixel."""
    dtype = widest(device).data
    input = torch.arange(1.0, 31.0, dtype=dtype, device=device).reshape(1, 1, 5, 6)
    padded = torch.nn.functional.pad(input, (9, 9, 9, 9))
    weight = torch.ones(1, 1, 1, 1, dtype=dtype, device=device)
    for dy in range(-7, 8):
        for dx in range(-7, 8):
            offset = torch.tensor([dy, dx], dtype=dtype, device=device)[None, :, None, None].expand(1, 2, 5, 6)
            shifted = padded[:, :, 9 + dy : 14 + dy, 9 + dx : 15 + dx]
            assert torch.equal(deformc.deform_conv2d(input, offset, weight), shifted), (dy, dx)


@pytest.mark.parametrize("device", DEVICES)
def test_point_at_minus_one_beside_an_infinite_pixel(device):
    """Exactly at -1 a point does not count, so it is 0 and not 0 times infinity."""
    input = torch.full((1, 1, 4, 4), math.inf, device=device)
    for y, x in ((-1.0, 0.0), (0.0, -1.0), (-1.0, -1.0), (-1.0, 1.5), (4.0, 0.5), (2.5, 4.0)):
        offset = torch.tensor([y, x], device=device).reshape(1, 2, 1, 1)
        offset = offset - torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).to(device)[None]
        output = deformc.deform_conv2d(input, offset, torch.ones(1, 1, 1, 1, device=device))
        assert torch.equal(output, torch.zeros_like(output)), (y, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_offsets_in_a_wide_image(device, dtype):
    """A position is an integer and a displacement: neither loses bits to the other, at any width."""
    width = 3000
    input = torch.arange(width, dtype=torch.float32).remainder(64).to(dtype).expand(1, 1, 1, width).to(device)
    offset = torch.zeros(1, 2, 1, width)
    offset[:, 1] = torch.tensor([0.25, 0.5, 0.75]).repeat(width // 3)
    output = deformc.deform_conv2d(
        input, offset.to(dtype).to(device), torch.ones(1, 1, 1, 1, dtype=dtype, device=device)
    )
    left = input.cpu().double()
    expected = torch.lerp(left, torch.nn.functional.pad(left, (0, 1))[..., 1:], offset[:, 1:].double())
    assert torch.equal(output.cpu(), expected.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_data_keeps_float32_offsets(device):
    """Rounding float32 offsets to bfloat16 would change the result by far more than the data's own rounding does."""
    exact = problem(c=1, o=1, kernel=1, padding=0, size=(40, 40), bias=False, mask=False)(device, FLOAT32, 0)
    exact["input"] = (
        torch.arange(1600, dtype=torch.float32, device=device).remainder(97).reshape(1, 1, 40, 40).expand(2, -1, -1, -1)
    )
    exact["weight"] = torch.ones(1, 1, 1, 1, device=device)
    narrow = exact | {name: exact[name].bfloat16() for name in ("input", "weight")}
    assert torch.equal(deformc.deform_conv2d(**narrow), deformc.deform_conv2d(**exact).bfloat16())
    narrow["offset"] = exact["offset"].bfloat16()
    assert not torch.equal(deformc.deform_conv2d(**narrow), deformc.deform_conv2d(**exact).bfloat16())


@pytest.mark.parametrize("device", DEVICES)
def test_repeated_runs_are_bitwise_equal(device):
    """All points fall onto few pixels, so that many sums meet in each pixel of the gradient."""
    make = problem(n=3, c=12, o=8, size=(31, 29), groups=2, offset_groups=2)
    arguments = make(device, FLOAT32, 0)
    arguments["offset"] = arguments["offset"] * 0.1 - arguments["offset"].new_tensor([9.0])
    grad_output = random_like(deformc.deform_conv2d(**arguments))
    with deterministic():
        runs = [gradients(deformc.deform_conv2d, arguments, TENSORS, grad_output) for _ in range(10)]
    for output, actual in runs[1:]:
        assert torch.equal(output, runs[0][0])
        for name in TENSORS:
            assert torch.equal(actual[name], runs[0][1][name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_result_of_an_image_does_not_depend_on_the_batch(device):
    """NaN and infinity of one image stay out of the others."""
    arguments = problem(n=3, size=(9, 8), c=6, o=5, offsets=integers)(device, FLOAT32, 0)
    arguments["input"][1] = math.nan
    arguments["offset"][1] = math.nan
    arguments["mask"][1] = math.inf
    output, actual = gradients(deformc.deform_conv2d, arguments, ("input", "offset", "mask"))
    assert output[1].isnan().all()
    for result in (output, *actual.values()):
        assert result[[0, 2]].isfinite().all()


# --- Large problems ---------------------------------------------------------------------------------------------------


def random_window_check(arguments, output, count, size=12):
    """Compare pixels with the float64 reference on windows around them; points are within two pixels of their tap.

    All at once: what rounding leaves is relative to the terms of a sum, which the sum of one pixel may be far below.
    """
    pixels, references = [], []
    (height, width), generator = arguments["input"].shape[2:], torch.Generator().manual_seed(2)
    size_h, size_w = min(size, height), min(size, width)
    corners = [(0, 0), (height - 1, width - 1), (0, width - 1), (height - 1, 0)]
    random = [torch.randint(limit, (count,), generator=generator).tolist() for limit in (height, width)]
    for y, x in [*corners, *zip(*random, strict=True)]:
        top, left = min(max(y - size_h // 2, 0), height - size_h), min(max(x - size_w // 2, 0), width - size_w)
        window = (slice(None), slice(None), slice(top, top + size_h), slice(left, left + size_w))
        cut = {
            name: value[window] if name in ("input", "offset", "mask") and value is not None else value
            for name, value in arguments.items()
        }
        cut = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in cut.items()}
        references.append(deformc.reference.deform_conv2d(**cut)[:, :, y - top, x - left])
        pixels.append(output[:, :, y, x])
    assert_close(torch.stack(pixels), torch.stack(references), "pixels")


def large_problem(channels, height, width, out_channels, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)

    def uniform(*shape):
        return torch.empty(shape, dtype=dtype).uniform_(-1, 1, generator=generator)

    return {
        "input": uniform(1, channels, height, width),
        "offset": uniform(1, 18, height, width).mul_(1.9),
        "weight": uniform(out_channels, channels, 3, 3),
        "padding": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "height", "width"), [(240, 1024, 1024), (512, 160, 160), (8, 4096, 4096)], ids=str
)
def test_large_forward(channels, height, width):
    """Column elements past 2^31, and images past 1024x1024."""
    arguments = large_problem(channels, height, width, out_channels=2)
    output = deformc.deform_conv2d(**arguments)
    random_window_check(arguments, output, count=40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "height", "width", "corners"),
    [(8, 2100, 2048, [(0, 0), (2084, 2032), (1033, 777)]), (240, 1024, 1024, [(1008, 777)])],
    ids=["large_image", "column_elements_past_2^31"],
)
def test_large_backward(channels, height, width, corners):
    """The gradient of an output that is 0 but for one window is that of the window alone."""
    arguments = large_problem(channels, height, width, out_channels=2)
    wanted = ("input", "offset", "weight")
    size = 16
    for top, left in corners:
        window = (slice(None), slice(None), slice(top, top + size), slice(left, left + size))
        leaves = with_grad(arguments, wanted)
        output = deformc.deform_conv2d(**leaves)
        inner = (*window[:2], slice(top + 4, top + size - 4), slice(left + 4, left + size - 4))
        actual = dict(
            zip(wanted, torch.autograd.grad(output[inner].sum(), [leaves[name] for name in wanted]), strict=True)
        )
        cut = arguments | {name: arguments[name][window] for name in ("input", "offset")}
        cut = with_grad(cut, wanted)
        part = deformc.reference.deform_conv2d(**cut)[:, :, 4:-4, 4:-4].sum()
        expected = dict(zip(wanted, torch.autograd.grad(part, [cut[name] for name in wanted]), strict=True))
        for name in ("input", "offset"):
            assert_close(actual[name][window], expected[name], name)
            actual[name][window] = 0
            assert not actual[name].any(), name
        assert_close(actual["weight"], expected["weight"], "weight")
