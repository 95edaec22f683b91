"""A photograph through a deformable ResNet-50: eager, torch.compile, torch.export, AOTInductor, all with one result.

The 3x3 convolutions of the last three stages of a ResNet-50 of ``transformers`` become ``DeformConv2dPack``.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from shared import (
    OUTPUT,
    SEED,
    console,
    exported,
    measure,
    network_input,
    packaged,
    photograph,
    prepared,
    progress,
    show,
)
from torch import Tensor, nn
from transformers import ResNetBackbone, ResNetConfig

from deformc.nn import DeformConv2dPack

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

# Standard deviation of the offsets, in pixels of the layer's input.
OFFSET_SCALE = 1.0


# ---- the network -----------------------------------------------------------------------------------------------------


class FeatureMaps(nn.Module):
    """The backbone's feature maps as a plain tuple."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.backbone(images).feature_maps)


def deformable_resnet50() -> FeatureMaps:
    """A ResNet-50 whose 3x3 convolutions in stages 2 to 4 are deformable, giving the feature maps of these stages."""
    config = ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck", out_features=["stage2", "stage3", "stage4"])
    backbone = ResNetBackbone(config)
    for stage in backbone.encoder.stages[1:]:
        for parent in list(stage.modules()):
            for name, conv in list(parent.named_children()):
                if isinstance(conv, nn.Conv2d) and conv.kernel_size == (3, 3):
                    setattr(parent, name, DeformConv2dPack.from_conv2d(conv))
    return FeatureMaps(backbone)


@torch.no_grad()
def stand_in_for_training(model: nn.Module, images: Tensor) -> None:
    """Random weights that behave like trained ones.

    Offsets move the points, activations have unit scale, and blocks add little to their input, as at the start of
    common training recipes. Without the last a random network is chaotic: deformable or not, it makes rounding errors
    grow from layer to layer, and float32 and float64 disagree in the second digit.
    """
    for pack in deformable_layers(model).values():
        fan_in = pack.conv_offset.weight[0].numel()
        # The rectified activations before it have a mean square of about 1/2.
        pack.conv_offset.weight.normal_(std=OFFSET_SCALE * (2 / fan_in) ** 0.5)
    for stage in model.backbone.encoder.stages:
        for block in stage.layers:
            nn.init.constant_(block.layer[-1].normalization.weight, 0.1)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # running statistics are those of this batch
    model.train()(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def deformable_layers(model: nn.Module) -> dict[str, DeformConv2dPack]:
    return {name: module for name, module in model.named_modules() if isinstance(module, DeformConv2dPack)}


# ---- the four ways to run it -----------------------------------------------------------------------------------------


def compiled(model: nn.Module, images: Tensor) -> Callable:
    function = torch.compile(model, fullgraph=True)
    function(images)  # compiles
    return function


# ---- the picture -----------------------------------------------------------------------------------------------------


@dataclass
class SamplingPoints:
    """Where a layer samples the first image of a batch, in pixels of its input, each [Ho, Wo, Kh*Kw, (y, x)]."""

    regular: Tensor  # of a convolution without offsets
    deformed: Tensor
    mask: Tensor  # [Ho, Wo, Kh*Kw]


def sampling_points(pack: DeformConv2dPack, input: Tensor) -> SamplingPoints:
    offset, mask = pack.offset_and_mask(input)
    (kernel_h, kernel_w), (out_h, out_w) = pack.kernel_size, offset.shape[2:]
    y, x, ky, kx = torch.meshgrid(*map(torch.arange, (out_h, out_w, kernel_h, kernel_w)), indexing="ij")
    regular = torch.stack(
        (
            y * pack.stride[0] - pack.padding[0] + ky * pack.dilation[0],
            x * pack.stride[1] - pack.padding[1] + kx * pack.dilation[1],
        ),
        dim=-1,
    ).flatten(2, 3)
    moved = offset[0].unflatten(0, (-1, 2)).permute(2, 3, 0, 1)  # [Kh*Kw, (dy, dx), Ho, Wo] before
    return SamplingPoints(regular, regular + moved, mask[0].permute(1, 2, 0))


def last_layer_of_each_stage(model: nn.Module, images: Tensor) -> dict[int, SamplingPoints]:
    """Sampling points by stride of the feature map, for the last deformable layer of stages 2 to 4."""
    points = {}

    def hook(stride: int, pack: DeformConv2dPack, arguments: tuple[Tensor, ...]) -> None:
        points[stride] = sampling_points(pack, arguments[0])

    handles = []
    for stride, stage in zip((8, 16, 32), model.backbone.encoder.stages[1:], strict=True):
        pack = list(deformable_layers(stage).values())[-1]
        handles.append(pack.register_forward_pre_hook(functools.partial(hook, stride)))
    model(images)
    for handle in handles:
        handle.remove()
    return points


def draw_points(
    axis: plt.Axes, layer: SamplingPoints, stride: int, row: int, column: int, colour: str, size: float
) -> None:
    """The points of one output pixel on the photograph; ``size`` is the diameter of one of mask 1, in pt.

    Every convolution and pooling of the network that has stride 2 pads so that pixel i of its output is centred on
    pixel 2*i of its input. A position in a feature map of stride s is therefore s times that in the photograph.
    """
    regular, deformed = layer.regular[row, column] * stride, layer.deformed[row, column] * stride
    outline = [withStroke(linewidth=0.22 * size, foreground="black")]
    for (y0, x0), (y1, x1) in zip(regular.tolist(), deformed.tolist(), strict=True):
        axis.plot((x0, x1), (y0, y1), color=colour, linewidth=0.11 * size, path_effects=outline)
    axis.scatter(
        regular[:, 1],
        regular[:, 0],
        s=(size / 3) ** 2,
        color="black",
        edgecolors="white",
        linewidths=size / 16,
        zorder=3,
    )
    axis.scatter(
        deformed[:, 1],
        deformed[:, 0],
        s=size**2 * layer.mask[row, column],
        color=colour,
        edgecolors="black",
        linewidths=size / 16,
        zorder=4,
    )
    axis.scatter(column * stride, row * stride, s=size**2, marker="+", color="white", linewidths=size / 8, zorder=5)


def draw(photo: Tensor, points: dict[int, SamplingPoints], path: Path) -> None:
    """The sampling points of three output pixels of each layer on the photograph, and one of them magnified."""
    height, width = photo.shape[1:]
    targets = {"#ffd166": (0.28, 0.24), "#ff5d8f": (0.76, 0.45), "#4cc9f0": (0.40, 0.70)}  # (down, right)
    magnified = "#4cc9f0"
    shaded = 0.18 + 0.6 * photo.permute(1, 2, 0)
    figure, axes = plt.subplots(2, len(points), figsize=(18, 9.1), layout="constrained", facecolor="#14171c")
    for stage, (above, below, (stride, layer)) in enumerate(zip(*axes, points.items(), strict=True), start=2):
        pixels = {
            colour: (round(down * height / stride), round(right * width / stride))
            for colour, (down, right) in targets.items()
        }
        for colour, pixel in pixels.items():
            draw_points(above, layer, stride, *pixel, colour, size=4 + stride / 4)
        row, column = pixels[magnified]
        draw_points(below, layer, stride, row, column, magnified, size=20)

        window_height, window_width = 7 * stride, 7 * stride * width / height
        top, left = row * stride - window_height / 2, column * stride - window_width / 2
        frame = {"fill": False, "edgecolor": magnified, "linewidth": 1.6}
        above.add_patch(Rectangle((left, top), window_width, window_height, **frame))
        below.add_patch(Rectangle((0, 0), 1, 1, transform=below.transAxes, **frame))
        above.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
        below.set(xlim=(left, left + window_width), ylim=(top + window_height, top))
        for axis in (above, below):
            axis.imshow(shaded, interpolation="bicubic", extent=(-0.5, width - 0.5, height - 0.5, -0.5), aspect="equal")
            axis.set_axis_off()
        above.set_title(f"stage {stage}: a pixel is {stride} pixels of the photograph", color="white", fontsize=14)
    marker = functools.partial(Line2D, [], [], linestyle="none")
    legend = [
        marker(marker="+", color="white", markersize=14, markeredgewidth=2, label="output pixel"),
        marker(marker="o", color="black", markeredgecolor="white", markersize=6, label="tap of a plain convolution"),
    ]
    for mask in (0.25, 0.5, 1):
        size = 20 * mask**0.5
        label = f"sampling point with mask {mask}"
        legend.append(marker(marker="o", color=magnified, markeredgecolor="black", markersize=size, label=label))
    figure.legend(handles=legend, loc="outside lower center", ncols=5, frameon=False, labelcolor="white", fontsize=13)
    title = "Sampling points of the last deformable convolution of each stage; below, the blue pixel magnified"
    figure.suptitle(title, color="white", fontsize=18)
    figure.savefig(path, dpi=110)
    plt.close(figure)


@torch.no_grad()
def main() -> bool:
    """Whether every result is eager's."""
    torch.manual_seed(SEED)
    OUTPUT.mkdir(exist_ok=True)
    photo = photograph()
    first = network_input([photo, photo.flip(-1)], (256, 384))
    second = network_input([photo, photo.flip(-1), photo.flip(-2)], (211, 317))

    progress("eager: building the network")
    model, prepare = prepared(deformable_resnet50)
    stand_in_for_training(model, first)
    progress(f"eager: running it, with {len(deformable_layers(model))} deformable convolutions")
    expected = [list(model(images)) for images in (first, second)]
    rows = [measure("eager", prepare, model, first, expected[0]), measure("eager", None, model, second, expected[1])]
    progress("eager: the same in float64")
    rows.append(measure("eager in float64", None, copy.deepcopy(model).double(), first.double(), expected[0]))

    progress("picture: drawing the sampling points")
    picture = OUTPUT / "sampling_points.png"
    draw(photo, last_layer_of_each_stage(model, network_input([photo], photo.shape[1:])), picture)

    progress("torch.compile(fullgraph=True): Inductor compiles, about a minute")
    function, prepare = prepared(lambda: compiled(model, first))
    rows.append(measure("torch.compile", prepare, function, first, expected[0]))

    progress("torch.export: tracing with dynamic batch, height and width")
    program, prepare = prepared(lambda: exported(model, first, (0, 2, 3)))
    module = program.module()
    rows.append(measure("torch.export", prepare, module, first, expected[0]))
    rows.append(measure("torch.export", None, module, second, expected[1]))

    progress("AOTInductor: compiling the exported program, about a minute")
    package = OUTPUT / "deformable_resnet50.pt2"
    function, prepare = prepared(lambda: packaged(program, package))
    progress(f"AOTInductor: running the package of {package.stat().st_size / 2**20:.0f} MiB, loaded back")
    rows.append(measure("AOTInductor", prepare, function, first, expected[0]))
    rows.append(measure("AOTInductor", None, function, second, expected[1]))

    progress("done")
    show("Deformable ResNet-50", rows, "the feature maps of stages 2 to 4")
    for path in (picture, package):
        console.print(f"written: {path.relative_to(OUTPUT.parent)}")
    return all(row.passed for row in rows)
