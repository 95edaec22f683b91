"""The module and the compatible entry points against plain PyTorch, and against the layer of transformers."""

import pytest
import torch
import torch.nn.functional as F
from common import DEVICES, assert_close
from torch import nn

import deformc
from deformc import compat

SHAPES = [(6, 7), (3, 4), (2, 2)]
PIXELS = 58


def grid_sample_attention(value, shapes, locations, weights):
    """The attention as sums over grid_sample, level by level."""
    n, _, m, d = value.shape
    q, levels, p = locations.shape[1], locations.shape[3], locations.shape[4]
    output = 0
    start = 0
    for level, (height, width) in enumerate(shapes):
        image = value[:, start : start + height * width].permute(0, 2, 3, 1).reshape(n * m, d, height, width)
        grid = (2 * locations[:, :, :, level] - 1).transpose(1, 2).reshape(n * m, q, p, 2)
        sampled = F.grid_sample(image, grid, align_corners=False).reshape(n, m, d, q, p)
        output = output + (sampled * weights[:, :, :, level].transpose(1, 2)[:, :, None]).sum(-1)
        start += height * width
    assert level + 1 == levels
    return output.permute(0, 3, 1, 2).reshape(n, q, m * d)


def plain(module, query, reference, pixels, shapes, padding=None):
    """What the module computes, from its parameters."""
    n, q, _ = query.shape
    m, levels, p = module.n_heads, module.n_levels, module.n_points
    value = module.value_proj(pixels)
    if padding is not None:
        value = value * ~padding[..., None]
    value = value.view(n, -1, m, value.size(2) // m)
    offsets = module.sampling_offsets(query).view(n, q, m, levels, p, 2)
    weights = module.attention_weights(query).view(n, q, m, levels * p).softmax(-1).view(n, q, m, levels, p)
    if reference.size(-1) == 2:
        size = torch.tensor([[width, height] for height, width in shapes]).to(query)
        locations = reference[:, :, None, :, None] + offsets / size[None, None, None, :, None]
    else:
        box = reference[:, :, None, :, None]
        locations = box[..., :2] + offsets / p * box[..., 2:] / 2
    return module.output_proj(grid_sample_attention(value, shapes, locations, weights))


def problem(device, dtype=torch.float64, reference=2, ratio=1.0):
    torch.manual_seed(0)
    module = deformc.nn.MSDeformAttn(24, 3, 4, 2, ratio, device=device, dtype=dtype)
    for name in ("sampling_offsets", "attention_weights"):
        nn.init.normal_(getattr(module, name).weight, std=0.3)
    query, pixels = torch.randn(2, 5, 24, dtype=dtype), torch.randn(2, PIXELS, 24, dtype=dtype)
    points = torch.rand(2, 5, 3, reference, dtype=dtype)
    return module, [tensor.to(device).requires_grad_() for tensor in (query, points, pixels)]


def results(function, module, tensors):
    output = function(*tensors)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    return [output.detach(), *torch.autograd.grad(output, [*tensors, *module.parameters()], grad)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("shapes_in_tensor", [False, True], ids=["list", "tensor"])
@pytest.mark.parametrize("reference", [2, 4], ids=["points", "boxes"])
def test_module(device, reference, shapes_in_tensor, padded, ratio):
    module, tensors = problem(device, reference=reference, ratio=ratio)
    padding = torch.rand(2, PIXELS, device=device) < 0.3 if padded else None
    shapes = torch.tensor(SHAPES, device=device) if shapes_in_tensor else SHAPES
    starts = torch.tensor([0, 42, 54], device=device) if shapes_in_tensor else None
    actual = results(lambda q, r, x: module(q, r, x, shapes, starts, padding), module, tensors)
    expected = results(lambda q, r, x: plain(module, q, r, x, SHAPES, padding), module, tensors)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, factor=8)


def test_initial_offsets_are_a_ring():
    module = deformc.nn.MSDeformAttn(32, 2, 4, 3)
    offsets = module.sampling_offsets(torch.randn(1, 32)).view(4, 2, 3, 2)
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    for point in range(3):
        for level in range(2):
            torch.testing.assert_close(offsets[:, level, point], (point + 1) * directions, atol=1e-6, rtol=0)
    assert not module.attention_weights(torch.randn(1, 32)).any()


@pytest.mark.parametrize("device", DEVICES)
def test_layer_of_transformers(device):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deformable_detr import modeling_deformable_detr

    config = transformers.DeformableDetrConfig(d_model=24, encoder_attention_heads=4, num_feature_levels=3)
    layer = modeling_deformable_detr.DeformableDetrMultiscaleDeformableAttention(config, num_heads=4, n_points=2)
    layer = layer.to(device).double()
    module, (query, reference, pixels) = problem(device)
    layer.load_state_dict(module.state_dict())
    padding = torch.rand(2, PIXELS, device=device) < 0.3
    expected = layer(
        query,
        attention_mask=~padding,
        encoder_hidden_states=pixels,
        reference_points=reference,
        spatial_shapes=torch.tensor(SHAPES, device=device),
        spatial_shapes_list=SHAPES,
        level_start_index=torch.tensor([0, 42, 54], device=device),
    )[0]
    module.load_state_dict(layer.state_dict())
    assert_close(module(query, reference, pixels, SHAPES, None, padding), expected, factor=8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_module_keeps_float32_positions(device, dtype):
    module, tensors = problem(device, torch.float32)
    expected = module(*tensors, SHAPES)
    query, reference, pixels = tensors
    actual = module.to(dtype)(query.to(dtype), reference, pixels.to(dtype), SHAPES)
    assert actual.dtype == dtype
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    module, tensors = problem(device, torch.float32)
    expected = module(*tensors, SHAPES)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = module(*tensors, SHAPES)
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


class Encoder(nn.Module):
    """Feature maps of any size, flattened inside."""

    def __init__(self):
        super().__init__()
        self.attention = deformc.nn.MSDeformAttn(8, 2, 2, 3)

    def forward(self, query, reference, *maps):
        shapes = [tuple(features.shape[2:]) for features in maps]
        pixels = torch.cat([features.flatten(2).transpose(1, 2) for features in maps], 1)
        return self.attention(query, reference, pixels, shapes)


def encoder_inputs(n, q, height, width):
    maps = torch.randn(n, 8, height, width), torch.randn(n, 8, height // 2, width // 2)
    return torch.randn(n, q, 8), torch.rand(n, q, 2, 2), *maps


@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_compilation_for_all_sizes(fresh_compiler):
    encoder = Encoder()
    compiled = torch.compile(encoder, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ((3, 19, 37, 53), (7, 11, 38, 40), (5, 30, 62, 44)):
        inputs = encoder_inputs(*sizes)
        assert_close(compiled(*inputs), encoder(*inputs))


def test_export_with_dynamic_sizes():
    encoder = Encoder()
    auto = torch.export.Dim.AUTO
    maps = ({0: auto, 2: auto, 3: auto},) * 2
    program = torch.export.export(
        encoder, encoder_inputs(3, 19, 36, 52), dynamic_shapes=({0: auto, 1: auto}, {0: auto, 1: auto}, maps)
    )
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.deformc.ms_deform_attn.default) == 1
    inputs = encoder_inputs(5, 7, 24, 38)
    assert_close(program.module()(*inputs), encoder(*inputs))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"n_heads": 0}, "n_heads must be at least 1, got 0"),
        ({"d_model": 30, "n_heads": 8}, "int(d_model * ratio) must be divisible by n_heads = 8, got 30"),
        ({"ratio": 0.0}, "ratio must leave at least one channel of d_model = 256, got 0.0"),
    ],
)
def test_constructor_errors(arguments, text):
    with pytest.raises(ValueError, match="MSDeformAttn") as raised:
        deformc.nn.MSDeformAttn(**arguments)
    assert str(raised.value) == f"MSDeformAttn: {text}"


def test_reference_points_error():
    module, (query, reference, pixels) = problem("cpu")
    with pytest.raises(RuntimeError) as raised:
        module(query, reference[:, :, :2], pixels, SHAPES)
    expected = "reference_points must have shape [N, Q, L, 2 or 4] = [2, 5, 3, 2 or 4], got [2, 5, 2, 2]"
    assert str(raised.value) == f"MSDeformAttn: {expected}"


# ---- compatible entry points -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_compatible_entry_points(device):
    torch.manual_seed(0)
    value = torch.randn(2, PIXELS, 4, 8, dtype=torch.float64, device=device, requires_grad=True)
    locations = torch.rand(2, 5, 4, 3, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.rand(2, 5, 4, 3, 2, dtype=torch.float64, device=device, requires_grad=True)
    shapes, starts = torch.tensor(SHAPES, device=device), torch.tensor([0, 42, 54], device=device)
    leaves = (value, locations, weights)
    expected = grid_sample_attention(value, SHAPES, locations, weights)
    gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    outputs = {
        "MSDeformAttnFunction": compat.MSDeformAttnFunction.apply(value, shapes, starts, locations, weights, 64),
        "mmcv": compat.MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, 3),
        "no step": compat.MSDeformAttnFunction.apply(value, shapes, starts, locations, weights),
        "function": compat.multi_scale_deformable_attn(value, shapes, locations, weights),
        "list": compat.multi_scale_deformable_attn_pytorch(value, SHAPES, locations, weights),
        "core": compat.ms_deform_attn_core_pytorch(value, shapes, locations, weights),
    }
    for name, output in outputs.items():
        assert_close(output, expected, name, factor=8)
        for one, other in zip(torch.autograd.grad(output.sin().sum(), leaves), gradients, strict=True):
            assert_close(one, other, name, factor=8)


def test_compatible_entry_point_compiles(fresh_compiler):
    compiled = torch.compile(compat.MSDeformAttnFunction.apply, fullgraph=True, backend="aot_eager")
    shapes, starts = torch.tensor(SHAPES), torch.tensor([0, 42, 54])
    inputs = torch.randn(2, PIXELS, 4, 8), shapes, starts, torch.rand(2, 5, 4, 3, 2, 2), torch.rand(2, 5, 4, 3, 2)
    assert_close(compiled(*inputs, 64), compat.MSDeformAttnFunction.apply(*inputs, 64))
