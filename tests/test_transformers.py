"""The models of ``transformers``, untouched against accelerated."""

from __future__ import annotations

import copy
import io
import os

import pytest
import torch
from common import DEVICES, SIMULATED, TORCH
from torch import Tensor, nn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers")

from families import FAMILIES, inputs_of  # noqa: E402

from deformc.integrations.transformers import accelerate  # noqa: E402

OPS = {torch.ops.deformc.ms_deform_attn.default}


def make(family: str) -> nn.Module:
    try:
        model = FAMILIES[family]().eval()
    except LookupError as error:
        pytest.skip(str(error))
    # At first, points lie exactly on pixels, where the derivative is that of either side.
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "sampling_offsets" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def tensors(value, prefix="") -> dict[str, Tensor]:
    """All floating point tensors of an output, by their names."""
    if isinstance(value, Tensor):
        return {prefix: value} if value.is_floating_point() else {}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    return {name: tensor for key, item in items for name, tensor in tensors(item, f"{prefix}.{key}").items()}


def run(model: nn.Module, family: str, **options) -> dict[str, Tensor]:
    parameter = next(model.parameters())
    inputs = {name: tensor.to(parameter.device) for name, tensor in inputs_of(family).items()}
    inputs["pixel_values"] = inputs["pixel_values"].to(parameter.dtype)
    return tensors(model(**inputs, **options))


def assert_outputs_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        finite = tensor[tensor.isfinite()]
        scale = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
        torch.testing.assert_close(
            actual[name], tensor, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=name
        )


def gradients(model: nn.Module, family: str) -> dict[str, Tensor]:
    model.zero_grad()
    outputs = [tensor for tensor in run(model, family).values() if tensor.requires_grad]
    sum(tensor[tensor.isfinite()].square().mean() for tensor in outputs).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    """Outputs, gradients, recorded attentions; undo; and no trace in another model of the class."""
    model = make(family).double()
    untouched = copy.deepcopy(model)

    @torch.no_grad()  # some models keep tensors of one call for the next
    def outputs(model):
        return run(model, family, output_attentions=True)

    expected = outputs(model)
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules() if list(module.children())]
    report = accelerate(model)
    assert report.replaced
    assert not report.already
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules() if list(module.children())] == classes

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        actual = outputs(model)
    calls = sum(event.count for event in profile.key_averages() if event.key == "deformc::ms_deform_attn")
    assert calls >= len(report.replaced)
    assert_outputs_close(actual, expected, 1e-9)
    assert_outputs_close(outputs(copy.deepcopy(model)), actual, 0)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outputs(untouched)
    assert not any(event.key == "deformc::ms_deform_attn" for event in profile.key_averages())

    again = accelerate(model)
    assert not again.replaced
    assert len(again.already) == len(report.replaced)
    report.undo()
    for name, tensor in outputs(model).items():
        assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family):
    expected = gradients(make(family).double(), family)
    model = make(family).double()
    accelerate(model)
    actual = gradients(model, family)
    assert expected.keys() <= actual.keys()
    for name in actual.keys() - expected.keys():
        assert not actual[name].any(), name  # of discrete locations
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(actual[name], gradient, rtol=1e-7, atol=1e-7 * scale + 1e-12, msg=name)


def test_a_model_without_deformable_attention():
    with pytest.raises(RuntimeError, match="accelerate: Linear has no multi-scale deformable attention to replace"):
        accelerate(nn.Linear(2, 2))


class OtherMultiscaleDeformableAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.output_proj = nn.Linear(2, 2)

    def forward(self, hidden_states):
        return self.output_proj(hidden_states)


def test_a_form_that_is_not_known():
    model = make("deformable_detr")
    model.other = OtherMultiscaleDeformableAttention()
    with pytest.raises(RuntimeError, match=r"not known, in other \(OtherMultiscaleDeformableAttention\)"):
        accelerate(model)
    del model.other
    assert not accelerate(model).already  # nothing had been replaced


def test_a_forward_of_other_code():
    """As the hooks of the package accelerate leave it: what it calls is not known."""
    model = make("rt_detr_v2")
    attention = model.model.decoder.layers[1].encoder_attn
    own = attention.forward
    attention.forward = lambda *arguments, **keywords: own(*arguments, **keywords)
    with pytest.raises(RuntimeError, match=r"not known, in model.decoder.layers.1.encoder_attn .*; nothing was repl"):
        accelerate(model)
    del attention.forward
    report = accelerate(model)
    assert not report.already
    attention.forward = own
    with pytest.raises(RuntimeError, match="undo: other code has replaced the forward of a RTDetrV2Multiscale"):
        report.undo()


@pytest.mark.parametrize(("family", "name"), [("rt_detr", "attn"), ("d_fine", "ms_deformable_attn_core")])
def test_undo_leaves_what_other_code_has_set(family, name):
    model = make(family)
    report = accelerate(model)
    attention = model.get_submodule(report.replaced[0].module)
    ours = getattr(attention, name)
    setattr(attention, name, nn.Identity() if isinstance(ours, nn.Module) else torch.nn.functional.grid_sample)
    with pytest.raises(RuntimeError, match=f"undo: other code has replaced the {name} of a "):
        report.undo()
    setattr(attention, name, ours)
    report.undo()
    assert len(accelerate(model).replaced) == 2


@pytest.mark.parametrize("family", ["rt_detr", "d_fine", "rt_detr_v2"])
@torch.no_grad()
def test_a_saved_model(family):
    """Each kind of replacement is still there in a model that was saved whole and loaded."""
    model = make(family)
    count = len(accelerate(model).replaced)
    file = io.BytesIO()
    torch.save(model, file)
    expected = run(model, family)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    again = accelerate(loaded)
    assert not again.replaced
    assert len(again.already) == count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert_outputs_close(run(loaded, family), expected, 0)
    assert any(event.key == "deformc::ms_deform_attn" for event in profile.key_averages())


def test_report_names_what_was_replaced():
    text = str(accelerate(make("rt_detr_v2")))
    assert "RTDetrV2ForObjectDetection: 2 calls of deformable attention replaced" in text
    assert "function multi_scale_deformable_attention_v2" in text
    assert "model.decoder.layers.1.encoder_attn" in text


@pytest.mark.skipif(SIMULATED is not None, reason="a simulated device does not have all operators of these models")
@pytest.mark.parametrize("family", ["deformable_detr", "rt_detr", "rt_detr_v2", "d_fine"])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(family, device):
    """float32 locations meet narrow values."""
    model = make(family).to(device)
    expected = run(model, family)[".logits"]
    accelerate(model)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = run(model, family)[".logits"]
    assert actual.shape == expected.shape
    assert actual.isfinite().all()


@pytest.mark.parametrize("family", ["deformable_detr", "rt_detr"])
def test_bfloat16_model(family):
    model = make(family)
    accelerate(model)
    output = run(model.bfloat16(), family)[".logits"]
    assert output.dtype == torch.bfloat16
    assert output.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deformable_detr", "rt_detr", "rt_detr_v2", "mask2former"])
def test_compile(fresh_compiler, family):
    model = make(family)
    accelerate(model)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    with torch.no_grad():
        expected = run(model, family)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert_outputs_close(tensors(compiled(**inputs_of(family))), expected)
    calls = [node for graph in graphs for node in graph.graph.nodes if node.target in OPS]
    assert len(calls) == len(accelerate(model).already), "the compiled model does not call the operator"


DYNAMIC = torch.export.Dim.DYNAMIC


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "rt_detr",
        *(
            pytest.param(
                family, marks=pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.10 cannot, untouched either")
            )
            for family in ("rt_detr_v2", "rt_detr_v2_discrete", "d_fine", "deimv2")
        ),
    ],
)
@torch.no_grad()
def test_export_with_dynamic_batch_and_size(family):
    model = make(family)
    attentions = len(accelerate(model).replaced)
    inputs = inputs_of(family, 2, (96, 128))
    program = torch.export.export(
        model, (), inputs, dynamic_shapes={"pixel_values": {0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC}}, strict=True
    )
    assert sum(node.target in OPS for node in program.graph.nodes) == attentions
    inputs = inputs_of(family, 3, (160, 192))
    assert_outputs_close(tensors(program.module()(**inputs)), tensors(model(**inputs)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deformable_detr", "lw_detr", "rf_detr", "mask2former"])
@torch.no_grad()
def test_export_with_dynamic_batch(family):
    """Their sizes become constants, untouched too."""
    model = make(family)
    attentions = len(accelerate(model).replaced)
    shapes = {"pixel_values": {0: DYNAMIC}}
    program = torch.export.export(model, (), inputs_of(family, 2), dynamic_shapes=shapes, strict=True)
    assert sum(node.target in OPS for node in program.graph.nodes) == attentions
    inputs = inputs_of(family, 3)
    assert_outputs_close(tensors(program.module()(**inputs)), tensors(model(**inputs)))
