"""torch.export with dynamic sizes, its graph, and AOTInductor packages made of it."""

import pytest
import torch
from common import DEVICES, assert_close, assert_same_layout
from expecttest import TestCase
from torch.export import Dim

import deformc


class Layer(torch.nn.Module):
    """A convolution that predicts offsets and masks, and the deformable convolution that uses them."""

    def __init__(self, mask=True, bias=True, stride=1):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape):
            return torch.nn.Parameter(torch.randn(shape, generator=generator) / 4)

        self.weight = parameter(6, 4, 3, 3)
        self.bias = parameter(6) if bias else None
        self.points = parameter(27, 4, 3, 3)
        self.mask = mask
        self.stride = stride

    def forward(self, input):
        offset, mask = torch.nn.functional.conv2d(input, self.points, None, self.stride, 1).split([18, 9], dim=1)
        mask = mask.sigmoid() if self.mask else None
        return deformc.deform_conv2d(input, offset, self.weight, self.bias, self.stride, 1, 1, mask)


def images(*shape, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def dynamic():
    return ({0: Dim("batch", min=1, max=64), 2: Dim("height", min=4, max=512), 3: Dim("width", min=4, max=512)},)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optional", [True, False], ids=["mask_and_bias", "neither"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_export_with_dynamic_sizes(device, strict, stride, optional):
    layer = Layer(optional, optional, stride).to(device).eval()
    program = torch.export.export(
        layer, (images(2, 4, 17, 23, device=device),), dynamic_shapes=dynamic(), strict=strict
    )
    exported = program.module()
    for shape in ((2, 4, 17, 23), (1, 4, 4, 4), (3, 4, 18, 20), (5, 4, 33, 8)):
        input = images(*shape, device=device)
        assert_close(exported(input), layer(input))
        assert_same_layout(exported(input), layer(input))


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_export_of_the_operator_alone(strict):
    """Sizes of three arguments that must fit: the equalities hold, and no size becomes a constant."""

    class Operator(torch.nn.Module):
        def forward(self, input, offset, weight, mask):
            return deformc.deform_conv2d(input, offset, weight, mask=mask, padding=1)

    batch, height, width = Dim("batch", min=1), Dim("height", min=2), Dim("width", min=2)
    sizes = {0: batch, 2: height, 3: width}

    def arguments(n, h, w):
        return images(n, 4, h, w), images(n, 18, h, w), images(6, 4, 3, 3), images(n, 9, h, w)

    dynamic_shapes = {"input": sizes, "offset": sizes, "weight": None, "mask": sizes}
    program = torch.export.export(Operator(), arguments(2, 17, 23), dynamic_shapes=dynamic_shapes, strict=strict)
    for n, h, w in ((2, 17, 23), (1, 3, 5), (7, 12, 9)):
        assert_close(program.module()(*arguments(n, h, w)), Operator()(*arguments(n, h, w)))


def test_decompositions_keep_the_operator():
    program = torch.export.export(Layer(), (images(2, 4, 17, 23),), dynamic_shapes=dynamic()).run_decompositions()
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("deformc.deform_conv2d.default") == 1


def test_saved_program(tmp_path):
    layer = Layer().eval()
    program = torch.export.export(layer, (images(2, 4, 17, 23),), dynamic_shapes=dynamic())
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    input = images(3, 4, 9, 11)
    assert_close(loaded(input), layer(input))


class TestGraph(TestCase):
    def test_exported_graph(self):
        class Operator(torch.nn.Module):
            def forward(self, input, offset, weight, bias, mask):
                return deformc.deform_conv2d(input, offset, weight, bias, (1, 2), (1, 0), 1, mask)

        arguments = images(1, 2, 4, 5), images(1, 18, 4, 2), images(3, 2, 3, 3), images(3), images(1, 9, 4, 2)
        program = torch.export.export(Operator(), arguments)
        self.assertExpectedInline(
            str(program.graph).strip(),
            """\
graph():
    %input : [num_users=1] = placeholder[target=input]
    %offset : [num_users=1] = placeholder[target=offset]
    %weight : [num_users=1] = placeholder[target=weight]
    %bias : [num_users=1] = placeholder[target=bias]
    %mask : [num_users=1] = placeholder[target=mask]
    %deform_conv2d : [num_users=1] = call_function[target=torch.ops.deformc.deform_conv2d.default](args = (%input, %offset, %weight, %bias, %mask, 1, 2, 1, 0, 1, 1, False), kwargs = {})
    return (deform_conv2d,)""",  # noqa: E501
        )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optional", [True, False], ids=["mask_and_bias", "neither"])
def test_aotinductor_package(device, optional, tmp_path):
    layer = Layer(optional, optional).to(device).eval()
    with torch.no_grad():
        program = torch.export.export(layer, (images(2, 4, 17, 23, device=device),), dynamic_shapes=dynamic())
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for shape in ((2, 4, 17, 23), (1, 4, 8, 8), (5, 4, 33, 8)):
            input = images(*shape, device=device)
            assert_close(compiled(input), layer(input), factor=4)
