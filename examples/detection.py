"""Detection models of ``transformers``, untouched and with deformc's attention: eager, compiled, exported, packaged."""

from __future__ import annotations

import math
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
    operator_nodes,
    packaged,
    photograph,
    prepared,
    progress,
    show,
)
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from transformers import (
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    ResNetConfig,
    RTDetrV2Config,
    RTDetrV2ForObjectDetection,
)

from deformc.integrations import transformers as integration
from deformc.integrations.transformers import accelerate

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RUNS = 3
STRONGEST = 5  # queries that are drawn


class Detections(nn.Module):
    """Logits and boxes as a plain tuple."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(pixel_values=images)
        return output.logits, output.pred_boxes


def deformable_detr() -> bool:
    backbone = ResNetConfig(depths=[3, 4, 6, 3], layer_type="bottleneck", out_features=["stage2", "stage3", "stage4"])
    torch.manual_seed(SEED)
    model = DeformableDetrForObjectDetection(DeformableDetrConfig(backbone_config=backbone))
    # Its get_reference_points calls torch.linspace(0.5, height - 0.5, height), which makes the size a constant of the
    # graph, with deformc or without. So only the batch is dynamic.
    return run("Deformable DETR", model, (480, 720), dynamic_dims=(0,), second=(2, 480, 720))


def rt_detr_v2() -> bool:
    torch.manual_seed(SEED)
    model = RTDetrV2ForObjectDetection(RTDetrV2Config())
    return run("RT-DETRv2", model, (640, 640), dynamic_dims=(0, 2, 3), second=(2, 512, 768))


@torch.no_grad()
def run(
    name: str, model: nn.Module, size: tuple[int, int], dynamic_dims: tuple[int, ...], second: tuple[int, int, int]
) -> bool:
    """Whether every way of running the model gives what the untouched one gives in eager mode."""
    OUTPUT.mkdir(exist_ok=True)
    file_name = name.lower().replace(" ", "_").replace("-", "_")
    photo = photograph()
    first = network_input([photo], size)
    other = network_input([photo, photo.flip(-1)][: second[0]], second[1:])
    stand_in_for_training(model)
    model = Detections(model.eval())

    progress(f"{name}: running it untouched")
    expected = [list(model(images)) for images in (first, other)]
    rows = [measure("eager, untouched", None, model, first, expected[0], runs=RUNS)]
    report = accelerate(model)
    progress(f"{name}: accelerated, {len(report.replaced)} calls of deformable attention replaced")
    rows += [
        measure("eager, accelerated", None, model, images, wanted, runs=RUNS)
        for images, wanted in zip((first, other), expected, strict=True)
    ]
    progress(f"{name}: picture of where the strongest queries look")
    picture = OUTPUT / f"{file_name}_attention.png"
    draw(photo, model, first, picture, f"{name}: points of the last cross-attention, random weights")

    progress(f"{name}: torch.compile(fullgraph=True), a minute or two")
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph.graph)
        return compile_fx(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    _, prepare = prepared(lambda: compiled(first))
    nodes = sum(operator_nodes(graph) for graph in graphs)
    rows.append(measure("torch.compile", prepare, compiled, first, expected[0], nodes, RUNS))

    what = {(0,): "batch", (0, 2, 3): "batch, height and width"}[dynamic_dims]
    progress(f"{name}: torch.export with dynamic {what}")
    program, prepare = prepared(lambda: exported(model, other, dynamic_dims, strict=True))
    nodes = operator_nodes(program.graph)
    module = program.module()
    rows.append(measure("torch.export", prepare, module, first, expected[0], nodes, RUNS))
    rows.append(measure("torch.export", None, module, other, expected[1], nodes, RUNS))

    progress(f"{name}: AOTInductor compiles the exported program, a minute or two")
    package = OUTPUT / f"{file_name}.pt2"
    function, prepare = prepared(lambda: packaged(program, package))
    rows.append(measure("AOTInductor", prepare, function, first, expected[0], nodes, RUNS))
    rows.append(measure("AOTInductor", None, function, other, expected[1], nodes, RUNS))
    show(name, rows, "logits and boxes")
    for path in (picture, package):
        console.print(f"written: {path.relative_to(OUTPUT.parent)}")
    return all(row.passed for row in rows)


def stand_in_for_training(model: nn.Module) -> None:
    """Offsets that depend on the query, and statistics of the normalisation that keep activations near unit scale."""
    generator = torch.Generator().manual_seed(SEED)
    for _, attention in integration.attention_modules(model):
        weight = attention.sampling_offsets.weight
        weight.data = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1])


# ---- the picture -----------------------------------------------------------------------------------------------------


def last_attention(model: nn.Module, images: Tensor) -> tuple[list, Tensor, Tensor]:
    """Shapes, locations and weights of the last call of the operator, taken where it is dispatched."""
    calls = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if function is torch.ops.deformc.ms_deform_attn.default:
                calls.append(arguments)
            return function(*arguments, **(keywords or {}))

    with Record():
        logits = model(images)[0]
    _, sizes, locations, weights = calls[-1][:4]
    strongest = logits[0].max(-1).values.topk(STRONGEST).indices
    return sizes, locations[0, strongest], weights[0, strongest]


def draw(photo: Tensor, model: nn.Module, images: Tensor, path: Path, title: str) -> None:
    _, locations, weights = last_attention(model, images)
    height, width = photo.shape[1:]
    figure, axis = plt.subplots(figsize=(12, 8.4), layout="constrained", facecolor="#14171c")
    axis.imshow(0.18 + 0.6 * photo.permute(1, 2, 0), extent=(0, width, height, 0))
    colours = ("#ffd166", "#ff5d8f", "#4cc9f0", "#80ed99", "#f4a261")
    for query, colour in enumerate(colours[: len(locations)]):
        x, y = (locations[query].flatten(0, 1) * torch.tensor([width, height])).unbind(-1)
        sizes = 20 + 600 * weights[query].flatten()
        axis.scatter(
            x, y, s=sizes, color=colour, edgecolors="black", linewidths=0.8, alpha=0.85, label=f"query {query + 1}"
        )
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_axis_off()
    axis.set_title(title, color="white", fontsize=15)
    legend = axis.legend(loc="lower right", facecolor="#14171c", labelcolor="white")
    for handle in legend.legend_handles:
        handle.set_sizes([80])
    figure.savefig(path, dpi=100)
    plt.close(figure)
