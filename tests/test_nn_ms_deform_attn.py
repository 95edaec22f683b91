"""The module and the compatible entry points against plain PyTorch, and against the layer of transformers."""

import pytest
import torch
import torch.nn.functional as F
from common import DEVICES, FLOAT64, assert_close, widest
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


def problem(device, dtype=None, reference=2, ratio=1.0):
    dtype = dtype or widest(device).data
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


def test_models_can_initialise_it_again():
    """Deformable DETR and DINOv3 draw all parameters of a model in their own way, and then call this."""
    torch.manual_seed(0)
    module, expected = deformc.nn.MSDeformAttn(32, 2, 4, 3), None
    for _ in range(2):
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        torch.manual_seed(1)
        module._reset_parameters()
        actual = [parameter.detach().clone() for parameter in module.parameters()]
        expected = expected or actual
        assert all(map(torch.equal, actual, expected))
    assert not module.sampling_offsets.weight.any()
    assert module.sampling_offsets.bias.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(1, 5, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("reference", [2, 4], ids=["points", "boxes"])
def test_reference_points_for_all(device, reference, sizes):
    """[1, Q, 1, 2] is what ViT-Adapter and DINOv3's adapter pass."""
    module, (query, _, pixels) = problem(device)
    points = torch.rand(*sizes, reference, dtype=query.dtype, device=device, requires_grad=True)
    tensors = (query, points, pixels)
    actual = results(lambda q, r, x: module(q, r, x, SHAPES), module, tensors)
    expected = results(lambda q, r, x: plain(module, q, r, x, SHAPES), module, tensors)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, factor=8)


@pytest.mark.parametrize("device", DEVICES)
def test_float64_module_computes_float64_positions_from_narrow_points(device):
    if widest(device) != FLOAT64:
        pytest.skip(f"no float64 on {device}")
    module, (query, reference, pixels) = problem(device)
    narrow = reference.detach().float()
    assert_close(module(query, narrow, pixels, SHAPES), plain(module, query, narrow.double(), pixels, SHAPES), factor=8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_first", [False, True])
def test_module_of_mmcv(device, batch_first):
    """The lines of docs/nn.md, and what mmcv's module computes."""
    module, tensors = problem(device)
    generator = torch.Generator().manual_seed(2)
    query_pos, identity = (torch.randn(2, 5, 24, generator=generator).to(tensors[0]) for _ in "pi")
    padding = torch.rand(2, PIXELS, device=device) < 0.3
    dropout = nn.Dropout(0.0)

    def batched(tensor):
        return tensor if batch_first else tensor.transpose(0, 1)

    def documented(query, reference, value):
        query, value, pos, skip = map(batched, (query, value, query_pos, identity))  # as the caller of mmcv has them
        output = module(batched(query + pos), reference, batched(value), SHAPES, None, padding)
        return dropout(batched(output)) + skip

    def mmcv(query, reference, value):
        output = plain(module, query + query_pos, reference, value, SHAPES, padding)
        return batched(output + identity)

    expected = results(mmcv, module, tensors)
    for one, other in zip(results(documented, module, tensors), expected, strict=True):
        assert_close(one, other, factor=8)


@pytest.mark.parametrize("device", DEVICES)
def test_layer_of_transformers(device):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deformable_detr import modeling_deformable_detr

    config = transformers.DeformableDetrConfig(d_model=24, encoder_attention_heads=4, num_feature_levels=3)
    layer = modeling_deformable_detr.DeformableDetrMultiscaleDeformableAttention(config, num_heads=4, n_points=2)
    module, (query, reference, pixels) = problem(device)
    layer = layer.to(query)
    layer.load_state_dict(module.state_dict())
    padding = torch.rand(2, PIXELS, device=device) < 0.3
    shapes, starts = torch.tensor(SHAPES, device=device), torch.tensor([0, 42, 54], device=device)

    def untouched(query, reference, pixels):
        return layer(
            query,
            attention_mask=~padding,
            encoder_hidden_states=pixels,
            reference_points=reference,
            spatial_shapes=shapes,
            spatial_shapes_list=SHAPES,
            level_start_index=starts,
        )[0]

    module.load_state_dict(layer.state_dict())
    assert [name for name, _ in layer.named_parameters()] == [name for name, _ in module.named_parameters()]
    tensors = (query, reference, pixels)
    actual = results(lambda q, r, x: module(q, r, x, SHAPES, None, padding), module, tensors)
    for one, other in zip(actual, results(untouched, layer, tensors), strict=True):
        assert_close(one, other, factor=8)


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


@pytest.mark.parametrize("autocast", [False, True], ids=["narrow", "autocast"])
@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_positions_have_the_rounding_of_the_linear_layer_only(monkeypatch, boxes, autocast):
    """In a level so wide that bfloat16 could not tell pixels apart."""
    module = deformc.nn.MSDeformAttn(16, 1, 2, 3)
    nn.init.normal_(module.sampling_offsets.weight)
    query, pixels = torch.randn(1, 9, 16), torch.randn(1, 2 * 4096, 16)
    reference = torch.rand(1, 9, 1, 4 if boxes else 2)
    if not autocast:
        module, query, pixels = module.bfloat16(), query.bfloat16(), pixels.bfloat16()
    seen = []

    def spy(value, shapes, locations, weights, **rest):
        seen.extend((locations, weights))
        return deformc.ms_deform_attn(value, shapes, locations, weights, **rest)

    monkeypatch.setattr("deformc.nn.ms_deform_attn.ms_deform_attn", spy)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module(query, reference, pixels, [(2, 4096)])
        offsets = module.sampling_offsets(query)
        logits = module.attention_weights(query)
    assert offsets.dtype == logits.dtype == torch.bfloat16
    offsets = offsets.double().view(1, 9, 2, 1, 3, 2)
    reference = reference.double()[:, :, None, :, None]
    size = torch.tensor([4096.0, 2.0], dtype=torch.float64)
    scale = reference[..., 2:] / 6 if boxes else 1 / size
    locations, weights = seen
    assert locations.dtype == weights.dtype == torch.float32
    assert_close(locations, reference[..., :2] + offsets * scale)
    assert_close(weights.flatten(3), logits.double().view(1, 9, 2, 3).softmax(-1))


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


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("reference", [2, 4], ids=["points", "boxes"])
def test_compiles_with_tensor_shapes_and_padding(fresh_compiler, reference, autocast):
    module, tensors = problem("cpu", torch.float32, reference)
    shapes, starts = torch.tensor(SHAPES), torch.tensor([0, 42, 54])
    padding = torch.rand(2, PIXELS) < 0.3

    def call(*tensors):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return module(*tensors, shapes, starts, padding)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    # Under autocast the query's gradient is the sum of two in bfloat16, which compilation rounds elsewhere.
    dtype = torch.bfloat16 if autocast else torch.float32
    for one, other in zip(results(compiled, module, tensors), results(call, module, tensors), strict=True):
        assert_close(one.to(dtype), other)


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": torch.ones(5, 24)}, "query must have shape [N, Q, d_model] = [N, Q, 24], got [5, 24]"),
        (
            {"input_flatten": torch.ones(2, PIXELS, 20)},
            f"input_flatten must have shape [N, S, d_model] = [2, S, 24], got [2, {PIXELS}, 20]",
        ),
        (
            {"reference_points": torch.ones(2, 5, 2, 2)},
            "reference_points must have shape [N, Q, L, 2 or 4] = [2 or 1, 5 or 1, 3 or 1, 2 or 4], got [2, 5, 2, 2]",
        ),
        (
            {"input_spatial_shapes": SHAPES[:2]},
            "input_spatial_shapes must be a list of L = 3 pairs (H, W) or an int64 tensor [L, 2], got [(6, 7), (3, 4)]",
        ),
        (
            {"input_spatial_shapes": torch.tensor(SHAPES[:2])},
            "input_spatial_shapes must have shape [L, 2] = [3, 2], got [2, 2]",
        ),
        ({"input_padding_mask": torch.zeros(2, PIXELS)}, "input_padding_mask must be bool, got float32"),
        (
            {"input_padding_mask": torch.zeros(2, 1, dtype=torch.bool)},
            f"input_padding_mask must have shape [N, S] = [2 or 1, {PIXELS}], got [2, 1]",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors(changes, text):
    module, (query, reference, pixels) = problem("cpu", torch.float32)
    arguments = {
        "query": query,
        "reference_points": reference,
        "input_flatten": pixels,
        "input_spatial_shapes": SHAPES,
        **changes,
    }
    with pytest.raises(RuntimeError) as raised:
        module(**arguments)
    assert str(raised.value) == f"MSDeformAttn: {text}"


# ---- compatible entry points -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_compatible_entry_points(device):
    torch.manual_seed(0)
    options = {"dtype": widest(device).data, "device": device, "requires_grad": True}
    value, locations = torch.randn(2, PIXELS, 4, 8, **options), torch.rand(2, 5, 4, 3, 2, 2, **options)
    weights = torch.rand(2, 5, 4, 3, 2, **options)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("data", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("points", [torch.float64, torch.float32, torch.bfloat16])
def test_compatible_entry_points_convert_dtypes(device, data, points):
    if points == torch.float64 and widest(device) != FLOAT64:
        pytest.skip(f"no float64 on {device}")
    value = torch.randn(2, PIXELS, 4, 8, device=device).to(data)
    locations = torch.rand(2, 5, 4, 3, 2, 2, device=device).to(points).requires_grad_()
    weights = torch.rand(2, 5, 4, 3, 2, device=device).to(points).requires_grad_()
    shapes, starts = torch.tensor(SHAPES, device=device), torch.tensor([0, 42, 54], device=device)
    kept = points == torch.float32
    expected = deformc.ms_deform_attn(value, SHAPES, *(t if kept else t.to(data) for t in (locations, weights)))
    outputs = (
        compat.MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, 64),
        compat.multi_scale_deformable_attn(value, shapes, locations, weights),
    )
    for output in outputs:
        assert_close(output, expected)
        gradients = torch.autograd.grad(output.float().sum(), (locations, weights))
        assert [gradient.dtype for gradient in gradients] == [points, points]


@pytest.mark.parametrize("tensor_shapes", [False, True])
def test_compatible_entry_points_divide_flat_points(tensor_shapes):
    value, locations, weights = torch.randn(2, PIXELS, 4, 8), torch.rand(2, 5, 4, 3, 2, 2), torch.rand(2, 5, 4, 3, 2)
    shapes = torch.tensor(SHAPES) if tensor_shapes else SHAPES
    actual = compat.multi_scale_deformable_attn_pytorch(value, shapes, locations.flatten(3, 4), weights.flatten(3))
    assert_close(actual, deformc.ms_deform_attn(value, SHAPES, locations, weights))
    with pytest.raises(RuntimeError, match="ms_deform_attn"):
        compat.multi_scale_deformable_attn_pytorch(value, shapes, locations.flatten(3, 4)[:, :, :, 1:], weights)
