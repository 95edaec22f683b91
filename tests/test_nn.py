"""The modules: what they promise beyond the operator they call."""

import copy
import importlib.util
import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import fuse_conv_bn_eval, parametrizations

import deformc
from deformc.nn import DeformConv2d, DeformConv2dPack, upgrade_mmcv_state_dict

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="compares with torchvision, which is not installed"
)

# Differences that only rounding explains, in float64.
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

# Constructor arguments that make every pair asymmetric and every kind of group present.
ASYMMETRIC = {"kernel_size": (3, 2), "stride": (2, 1), "padding": (2, 1), "dilation": (1, 2), "groups": 2}


def deforming(module: DeformConv2dPack) -> DeformConv2dPack:
    """The same module with its points moved: up to about three pixels, in different directions for each tap."""
    with torch.no_grad():
        module.conv_offset.weight.normal_(std=0.1)
        module.conv_offset.bias.uniform_(-2, 2)
    return module


def mmcv_pack(input, weight, bias, offset_weight, offset_bias, deform_groups, window):
    """mmcv's ModulatedDeformConv2dPack and, without mask channels, DeformConv2dPack, point by point.

    An independent rendering: one tap after the other with ``grid_sample``, from the documented order of mmcv's
    channels.
    """
    kernel_h, kernel_w = weight.shape[2:]
    taps = kernel_h * kernel_w
    prediction = nn.functional.conv2d(input, offset_weight, offset_bias, *window)
    if prediction.size(1) == 3 * deform_groups * taps:
        first, second, mask = torch.chunk(prediction, 3, dim=1)
        offset, mask = torch.cat((first, second), dim=1), torch.sigmoid(mask)
    else:
        offset, mask = prediction, torch.ones_like(prediction[:, : deform_groups * taps])
    (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w) = window
    height, width = input.shape[2:]
    out_h, out_w = offset.shape[2:]
    group_size = input.size(1) // deform_groups
    groups = input.size(1) // weight.size(1)
    rows, columns = torch.meshgrid(
        torch.arange(out_h).double() * stride_h - pad_h,
        torch.arange(out_w).double() * stride_w - pad_w,
        indexing="ij",
    )
    output = 0.0
    for tap in range(taps):
        row, column = divmod(tap, kernel_w)
        sampled = []
        for group in range(deform_groups):
            channel = group * taps + tap
            y = rows + row * dilation_h + offset[:, 2 * channel]
            x = columns + column * dilation_w + offset[:, 2 * channel + 1]
            grid = torch.stack(((2 * x + 1) / width - 1, (2 * y + 1) / height - 1), dim=-1)
            image = input[:, group * group_size : (group + 1) * group_size]
            values = nn.functional.grid_sample(image, grid, align_corners=False)
            sampled.append(values * mask[:, channel].unsqueeze(1))
        output = output + nn.functional.conv2d(
            torch.cat(sampled, dim=1), weight[:, :, row, column, None, None], groups=groups
        )
    return output if bias is None else output + bias[:, None, None]


# ---- DeformConv2d ----------------------------------------------------------------------------------------------------


def test_signatures():
    """torchvision's constructor and call, with device and dtype after them as in torch.nn."""

    def names_and_defaults(function):
        return [
            (p.name, p.default, p.kind is p.KEYWORD_ONLY)
            for p in inspect.signature(function).parameters.values()
            if p.name != "self"
        ]

    empty = inspect.Parameter.empty
    torchvision_constructor = [
        ("in_channels", empty, False),
        ("out_channels", empty, False),
        ("kernel_size", empty, False),
        ("stride", 1, False),
        ("padding", 0, False),
        ("dilation", 1, False),
        ("groups", 1, False),
        ("bias", True, False),
    ]
    factory = [("device", None, True), ("dtype", None, True)]
    assert names_and_defaults(DeformConv2d.__init__) == torchvision_constructor + factory
    pack = [("offset_groups", 1, True), ("mask", True, True)]
    assert names_and_defaults(DeformConv2dPack.__init__) == torchvision_constructor + pack + factory
    assert names_and_defaults(DeformConv2d.forward) == [
        ("input", empty, False),
        ("offset", empty, False),
        ("mask", None, False),
    ]


@needs_torchvision
@pytest.mark.parametrize("arguments", [{"kernel_size": 3, "padding": 1}, {**ASYMMETRIC, "bias": False}])
def test_takes_the_place_of_torchvisions(arguments):
    from torchvision.ops import DeformConv2d as Theirs

    def parameters(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(DeformConv2d)[:-2] == parameters(Theirs)
    assert parameters(DeformConv2d.forward) == parameters(Theirs.forward)

    torch.manual_seed(1)
    ours = DeformConv2d(4, 6, **arguments)
    torch.manual_seed(1)
    theirs = Theirs(4, 6, **arguments)
    assert repr(ours) == repr(theirs)
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert ours.state_dict()[key].equal(value), key
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())

    input = torch.randn(2, 4, 7, 8)
    pack = deforming(DeformConv2dPack(4, 6, **arguments))
    offset, mask = pack.offset_and_mask(input)
    for factors in (None, mask):
        torch.testing.assert_close(ours(input, offset, factors), theirs(input, offset, factors))


@pytest.mark.parametrize("bias", [True, False])
def test_initialisation_is_that_of_conv2d(bias):
    arguments = (8, 6, (3, 2), 2, 1, 1, 2, bias)
    torch.manual_seed(1)
    module = DeformConv2d(*arguments)
    torch.manual_seed(1)
    conv = nn.Conv2d(*arguments)
    assert list(module.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    for key, value in conv.state_dict().items():
        assert module.state_dict()[key].equal(value), key
    assert (module.bias is None) == (not bias)


@pytest.mark.parametrize("batch", [(2,), ()])
@pytest.mark.parametrize("mask", [True, False])
def test_values(batch, mask):
    module = DeformConv2d(4, 6, **ASYMMETRIC, dtype=torch.float64)
    input = torch.randn(*batch, 4, 9, 8, dtype=torch.float64)
    # (9 + 2*2 - 3) // 2 + 1 rows and (8 + 2*1 - 3) // 1 + 1 columns, two offset groups of 6 taps
    offset = 2 * torch.randn(*batch, 24, 6, 8, dtype=torch.float64)
    factors = torch.rand(*batch, 12, 6, 8, dtype=torch.float64) if mask else None
    window = [ASYMMETRIC[name] for name in ("stride", "padding", "dilation")]
    expected = deformc.reference.deform_conv2d(input, offset, module.weight, module.bias, *window, factors)
    close(module(input, offset, factors), expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"in_channels": 0}, "in_channels must be at least 1, got 0"),
        ({"out_channels": -1}, "out_channels must be at least 0, got -1"),
        ({"groups": 0}, "groups must be at least 1, got 0"),
        ({"groups": 3}, "in_channels must be divisible by groups = 3, got 4"),
        ({"groups": 4}, "out_channels must be divisible by groups = 4, got 6"),
        ({"kernel_size": (3, 0)}, "kernel_size must be at least 1, got (3, 0)"),
        ({"kernel_size": 3.0}, "kernel_size must be an int or a pair of ints, got 3.0"),
        ({"stride": 0}, "stride must be at least 1, got 0"),
        ({"stride": (1, 1, 1)}, "stride must be an int or a pair of ints, got (1, 1, 1)"),
        ({"dilation": (1, 0)}, "dilation must be at least 1, got (1, 0)"),
        ({"padding": (-1, 0)}, "padding must be at least 0, got (-1, 0)"),
        ({"padding": "reflect"}, 'padding must be an int, a pair of ints, "same" or "valid", got \'reflect\''),
        ({"padding": "same", "stride": (1, 2)}, 'padding="same" needs stride 1, got (1, 2)'),
    ],
)
@pytest.mark.parametrize("module", [DeformConv2d, DeformConv2dPack])
def test_constructor_errors(module, arguments, text):
    with pytest.raises(ValueError) as raised:
        module(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **arguments})
    assert str(raised.value) == f"DeformConv2d: {text}"


def test_pairs_become_tuples():
    """From lists as from configuration files, as torchvision has them."""
    module = DeformConv2d(4, 6, [3, 3], stride=[1, 1], padding=[1, 1], dilation=2)
    assert (module.kernel_size, module.stride, module.padding, module.dilation) == ((3, 3), (1, 1), (1, 1), (2, 2))
    assert repr(module) == "DeformConv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(2, 2))"


# ---- DeformConv2dPack ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [True, False])
def test_pack_state_dict(mask):
    """Names and shapes of mmcv's modules, which differ only in that theirs without mask has no bias."""
    module = DeformConv2dPack(8, 6, (3, 2), groups=2, offset_groups=4, mask=mask)
    channels = (3 if mask else 2) * 4 * 6
    assert {key: tuple(value.shape) for key, value in module.state_dict().items()} == {
        "weight": (6, 4, 3, 2),
        "bias": (6,),
        "conv_offset.weight": (channels, 8, 3, 2),
        "conv_offset.bias": (channels,),
    }


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("deform_groups", [1, 2])
def test_mmcv_state_dict_and_values(mask, deform_groups):
    channels = (3 if mask else 2) * deform_groups * 6
    state_dict = {
        "weight": torch.randn(6, 2, 3, 2, dtype=torch.float64),
        "conv_offset.weight": 0.1 * torch.randn(channels, 4, 3, 2, dtype=torch.float64),
        "conv_offset.bias": 4 * torch.rand(channels, dtype=torch.float64) - 2,
    }
    if mask:
        state_dict["bias"] = torch.randn(6, dtype=torch.float64)
    module = DeformConv2dPack(
        4, 6, **ASYMMETRIC, bias=mask, offset_groups=deform_groups, mask=mask, dtype=torch.float64
    )
    module.load_state_dict(state_dict)
    assert sorted(module.state_dict()) == sorted(state_dict)

    input = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    expected = mmcv_pack(
        input,
        state_dict["weight"],
        state_dict.get("bias"),
        state_dict["conv_offset.weight"],
        state_dict["conv_offset.bias"],
        deform_groups,
        [ASYMMETRIC[name] for name in ("stride", "padding", "dilation")],
    )
    close(module(input), expected)
    close(module(input[0]), expected[0])

    offset, factors = module.offset_and_mask(input)
    assert offset.shape == (2, 12 * deform_groups, 6, 8)
    assert (factors is None) == (not mask)
    if mask:
        assert factors.shape == (2, 6 * deform_groups, 6, 8)
        assert (factors > 0).all()
        assert (factors < 1).all()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv2 = DeformConv2dPack(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)

    def forward(self, input):
        return self.bn2(self.conv2(input)).relu()


def test_old_mmcv_keys():
    model = nn.Sequential(Block(), Block())
    for block in model:
        deforming(block.conv2)
    current = model.state_dict()
    old = copy.copy(current)
    for key in current:
        old[key.replace("conv2.conv_offset", "conv2_offset")] = old.pop(key)
    assert "0.conv2_offset.weight" in old
    keys = list(old)

    fresh = nn.Sequential(Block(), Block())
    upgraded = upgrade_mmcv_state_dict(fresh, old)
    assert upgraded._metadata == current._metadata
    fresh.load_state_dict(upgraded, strict=True)
    for key, value in current.items():
        assert fresh.state_dict()[key].equal(value), key
    assert list(old) == keys
    assert upgrade_mmcv_state_dict(fresh, current) == current


def test_pack_starts_as_half_a_convolution():
    """sigmoid(0) = 0.5, as in mmcv; the whole convolution without mask."""
    conv = nn.Conv2d(4, 6, (3, 2), (2, 1), (2, 1), (1, 2), groups=2, dtype=torch.float64)
    input = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    without_bias = conv(input) - conv.bias[:, None, None]
    close(DeformConv2dPack.from_conv2d(conv, mask=False)(input), conv(input))
    close(DeformConv2dPack.from_conv2d(conv)(input), 0.5 * without_bias + conv.bias[:, None, None])


@pytest.mark.parametrize("kernel_size", [3, (2, 4)])
def test_pack_with_same_padding(kernel_size):
    conv = nn.Conv2d(4, 6, kernel_size, padding="same", dilation=2, dtype=torch.float64)
    module = DeformConv2dPack.from_conv2d(conv, mask=False)
    assert "padding='same'" in repr(module)
    input = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    close(module(input), conv(input))
    assert deforming(module)(input).shape == (2, 6, 9, 8)


def test_from_conv2d():
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, dtype=torch.float64).eval()
    conv.weight.requires_grad_(False)
    state = torch.get_rng_state()
    module = DeformConv2dPack.from_conv2d(conv, offset_groups=2)
    assert torch.get_rng_state().equal(state)
    assert not module.training
    assert not module.weight.requires_grad
    assert module.bias.requires_grad
    assert module.conv_offset.weight.requires_grad
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}
    assert module.weight.equal(conv.weight)
    assert module.weight.data_ptr() != conv.weight.data_ptr()
    assert not module.conv_offset.weight.any()
    assert not module.conv_offset.bias.any()
    for name in ("stride", "padding", "dilation"):
        assert getattr(module, name) == getattr(module.conv_offset, name) == getattr(conv, name)
    assert repr(module).startswith("DeformConv2dPack(\n  4, 6, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1)")

    meta = DeformConv2dPack.from_conv2d(nn.Conv2d(4, 6, 3, bias=False, device="meta"))
    assert {parameter.device.type for parameter in meta.parameters()} == {"meta"}
    assert meta.bias is None

    with pytest.raises(TypeError, match=r"conv must be an nn\.Conv2d, got Linear"):
        DeformConv2dPack.from_conv2d(nn.Linear(2, 2))
    with pytest.raises(ValueError, match='conv must have padding_mode "zeros", got "reflect"'):
        DeformConv2dPack.from_conv2d(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(ValueError, match="in_channels must be divisible by offset_groups = 3, got 4"):
        DeformConv2dPack.from_conv2d(nn.Conv2d(4, 6, 3), offset_groups=3)
    with pytest.raises(ValueError, match="offset_groups must be at least 1, got 0"):
        DeformConv2dPack(4, 6, 3, offset_groups=0)


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_factory_arguments(dtype):
    for module in (
        DeformConv2d(4, 6, 3, device="meta", dtype=dtype),
        DeformConv2dPack(4, 6, 3, device="meta", dtype=dtype),
    ):
        assert {(parameter.device.type, parameter.dtype) for parameter in module.parameters()} == {("meta", dtype)}
    output = DeformConv2dPack(4, 6, 3, device="meta", dtype=dtype)(torch.empty(2, 4, 9, 8, device="meta", dtype=dtype))
    assert (output.shape, output.dtype, output.device.type) == ((2, 6, 7, 6), dtype, "meta")


def test_reset_parameters_of_every_module():
    """The way deferred initialisation makes a model real: offsets are to start at zero then too."""
    with torch.device("meta"):
        model = DeformConv2dPack(4, 6, 3)
    model.to_empty(device="cpu")
    for module in model.modules():
        module.reset_parameters()
    assert not model.conv_offset.weight.any()
    assert not model.conv_offset.bias.any()
    assert 0 < model.weight.abs().max() <= 1 / 6


def test_gradients_reach_every_parameter():
    module = deforming(DeformConv2dPack(4, 6, 3, padding=1, offset_groups=2, dtype=torch.float64))
    input = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    tensors = dict(module.named_parameters())

    def by_reference(input, weight, bias, offset_weight, offset_bias):
        prediction = nn.functional.conv2d(input, offset_weight, offset_bias, padding=1)
        offset, mask = prediction[:, :36], prediction[:, 36:].sigmoid()
        return deformc.reference.deform_conv2d(input, offset, weight, bias, padding=1, mask=mask)

    wanted = [input, *tensors.values()]
    output = module(input)
    grad_output = torch.randn_like(output)
    expected = torch.autograd.grad(by_reference(*wanted), wanted, grad_output)
    for name, actual, value in zip(
        ["input", *tensors], torch.autograd.grad(output, wanted, grad_output), expected, strict=True
    ):
        torch.testing.assert_close(actual, value, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_channels_last():
    module = deforming(DeformConv2dPack(4, 6, 3, padding=1))
    input = torch.randn(2, 4, 9, 8)
    expected = module(input)
    assert expected.is_contiguous()
    module = module.to(memory_format=torch.channels_last)
    output = module(input.to(memory_format=torch.channels_last))
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(dtype, compiled, fresh_compiler):
    """Data is narrowed, and a float32 offset is not, which would move points by half a pixel."""
    module = deforming(DeformConv2dPack(4, 6, 3, padding=1))
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    input = torch.randn(2, 4, 9, 8)
    with torch.autocast("cpu", dtype):
        output = run(input)
        offset, mask = module.offset_and_mask(input)
    assert output.dtype == offset.dtype == mask.dtype == dtype
    narrowed = [tensor.to(dtype).double() for tensor in (input, module.weight, module.bias)]
    expected = deformc.reference.deform_conv2d(
        narrowed[0], offset.double(), narrowed[1], narrowed[2], padding=1, mask=mask.double()
    )
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=2 * eps, atol=2 * eps * expected.abs().max().item())
    output.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())

    wide = torch.randn(1, 4, 3, 1500)
    fine = torch.rand(1, 18, 3, 1500) + 100  # half precision would round it to multiples of 1/2 or 1/16
    given = DeformConv2d(4, 6, 3, padding=1)
    with torch.autocast("cpu", dtype):
        output = given(wide, fine)
    assert output.dtype == dtype
    narrowed = [tensor.to(dtype).double() for tensor in (wide, given.weight, given.bias)]
    expected = deformc.reference.deform_conv2d(narrowed[0], fine.double(), *narrowed[1:], padding=1)
    torch.testing.assert_close(output.double(), expected, rtol=2 * eps, atol=2 * eps * expected.abs().max().item())


def test_compile(fresh_compiler):
    """One graph for all sizes, forward and backward."""
    counter = CompileCounterWithBackend("aot_eager")
    module = deforming(DeformConv2dPack(4, 4, 3, padding=1, offset_groups=2))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
    for batch, height, width in ((2, 17, 23), (3, 18, 20), (5, 32, 24)):
        input = torch.randn(batch, 4, height, width)
        expected = module(input)
        actual = compiled(input)
        torch.testing.assert_close(actual, expected)
        parameters = list(module.parameters())
        for got, wanted in zip(
            torch.autograd.grad(actual.sum(), parameters), torch.autograd.grad(expected.sum(), parameters), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_export():
    module = nn.Sequential(
        deforming(DeformConv2dPack(4, 6, 3, stride=2, padding=1)), deforming(DeformConv2dPack(6, 4, 3, padding="same"))
    )
    module.eval()
    dynamic = torch.export.Dim.DYNAMIC
    exported = torch.export.export(
        module, (torch.randn(2, 4, 17, 23),), dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},)
    )
    targets = [node.target for node in exported.graph.nodes]
    assert targets.count(torch.ops.deformc.deform_conv2d.default) == 2
    for batch, height, width in ((2, 17, 23), (3, 40, 8), (1, 9, 31)):
        input = torch.randn(batch, 4, height, width)
        torch.testing.assert_close(exported.module()(input), module(input))


def test_torch_nn_utils():
    block = Block().train()
    deforming(block.conv2)
    for _ in range(3):
        block(torch.randn(4, 4, 9, 8))
    block.eval()
    input = torch.randn(2, 4, 9, 8)
    fused = fuse_conv_bn_eval(block.conv2, block.bn2)
    assert isinstance(fused, DeformConv2dPack)
    torch.testing.assert_close(fused(input).relu(), block(input))

    expected = block.conv2(input)
    parametrizations.weight_norm(block.conv2)
    assert "parametrizations.weight.original0" in dict(block.conv2.named_parameters())
    torch.testing.assert_close(block.conv2(input), expected)
    vector = nn.utils.parameters_to_vector(block.parameters())
    nn.utils.vector_to_parameters(vector, block.parameters())
    torch.testing.assert_close(block.conv2(input), expected)
