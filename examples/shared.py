"""What the demonstrations share: the photograph, timing and comparison of runs, the table."""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Its checks of tensors' contents: with them Inductor fails on RT-DETRv2 in one graph (torch 2.13), with deformc or not.
os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from skimage import data
from torch import Tensor, nn

OUTPUT = Path(__file__).parent / "output"
SEED = 0
RUNS = 5
# Largest difference to eager allowed, relative to the largest value of the tensor.
TOLERANCE = 1e-4

console = Console(highlight=False, width=max(96, Console().width))  # the tables need that much
started = time.perf_counter()


def progress(text: str) -> None:
    console.print(f"[dim]{time.perf_counter() - started:6.1f} s[/dim]  {text}")


def photograph() -> Tensor:
    """A cup of coffee, [3, 400, 600], values between 0 and 1. It comes with scikit-image."""
    return torch.from_numpy(data.coffee()).permute(2, 0, 1) / 255


def network_input(images: list[Tensor], size: tuple[int, int]) -> Tensor:
    """The images as a batch of this size, normalised as ImageNet's."""
    batch = nn.functional.interpolate(torch.stack(images), size=size, mode="bilinear", antialias=True)
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    return (batch - mean) / std


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A line of the table: one way to run the network on one batch."""

    step: str
    prepare: float | None
    run: float
    difference: float
    relative: float
    images: Tensor
    nodes: int | None = None  # of deformc's operators, in the graph

    @property
    def passed(self) -> bool:
        return self.relative <= TOLERANCE  # false for NaN


def prepared(make: Callable[[], Callable]) -> tuple[Callable, float]:
    before = time.perf_counter()
    function = make()
    return function, time.perf_counter() - before


@torch.no_grad()
def measure(
    step: str,
    prepare: float | None,
    function: Callable,
    images: Tensor,
    expected: list[Tensor],
    nodes: int | None = None,
    runs: int = RUNS,
) -> Row:
    outputs = list(function(images))
    assert [output.shape for output in outputs] == [wanted.shape for wanted in expected], step
    differences = torch.stack([(output - wanted).abs().max() for output, wanted in zip(outputs, expected, strict=True)])
    relative = differences / torch.stack([wanted.abs().max() for wanted in expected])
    times = []
    for _ in range(runs):
        before = time.perf_counter()
        function(images)
        times.append(time.perf_counter() - before)
    return Row(step, prepare, statistics.median(times), differences.max().item(), relative.max().item(), images, nodes)


def packaged(program: torch.export.ExportedProgram, path: Path) -> Callable:
    with warnings.catch_warnings():
        # torch's own use of a deprecated name of torch
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return torch._inductor.aoti_load_package(str(path))


def exported(
    model: nn.Module, images: Tensor, dynamic_dims: Sequence[int], strict: bool = False
) -> torch.export.ExportedProgram:
    """With these dimensions of the images dynamic; an error if anything in the model fixes one of them."""
    dynamic = dict.fromkeys(dynamic_dims, torch.export.Dim.DYNAMIC)
    return torch.export.export(model, (images,), dynamic_shapes=(dynamic,), strict=strict)


def operator_nodes(graph: torch.fx.Graph) -> int:
    return sum(str(node.target).startswith("deformc.") for node in graph.nodes)


def show(name: str, rows: list[Row], what: str) -> None:
    """Print the table; ``what`` says which tensors were compared."""
    title = f"{name} in float32, torch {torch.__version__}, {torch.get_num_threads()} threads"
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("step", no_wrap=True)
    columns = ["input", "prepare", "run", "difference", "relative"]
    with_nodes = any(row.nodes is not None for row in rows)
    for column in columns + ["nodes"] * with_nodes:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    previous = None
    for row in rows:
        table.add_row(
            row.step if row.step != previous else "",
            "x".join(map(str, row.images.shape)),
            f"{row.prepare:.1f} s" if row.prepare is not None else "",
            f"{1000 * row.run:.0f} ms",
            *(f"{value:.1e}" if value else "0" for value in (row.difference, row.relative)),
            *([str(row.nodes) if row.nodes is not None else ""] if with_nodes else []),
            "[green]ok[/green]" if row.passed else "[red]differs[/red]",
        )
        previous = row.step
    console.print(table)
    text = f"run: the median of several. difference: the largest to eager, over {what}; relative to the largest value, "
    text += f"where {TOLERANCE:.0e} is allowed."
    console.print(text + " nodes: deformc's operators in the graph." * with_nodes)
