"""deform_conv2d against conv2d of the same shape, and against torchvision and onnxruntime where they are installed."""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import deformc
from benchmarks._common import (
    BFLOAT16,
    FLOAT16,
    FORWARD,
    OVERHEAD,
    SPEEDUP,
    TRAINING,
    Case,
    expect_close,
    on_device,
    requires_grad,
)
from benchmarks.runner import THREADS, Column

try:
    import torchvision
except (ImportError, RuntimeError):  # RuntimeError: built for another torch
    torchvision = None
try:
    import onnx
    import onnxruntime
except ImportError:
    onnx = onnxruntime = None


@dataclasses.dataclass(frozen=True)
class Problem:
    batch: int
    channels: int
    height: int
    width: int
    groups: int = 1
    offset_groups: int = 1
    channels_last: bool = False
    kernel: int = 3
    padding: int = 1
    with_mask: bool = True

    def __str__(self) -> str:
        text = f"N{self.batch} C{self.channels} {self.height}x{self.width}"
        if self.groups > 1:
            text += " depthwise" if self.groups == self.channels else f" groups={self.groups}"
        if self.offset_groups > 1:
            text += f" offset_groups={self.offset_groups}"
        return text + (" channels_last" if self.channels_last else "")


AGAINST_CONV2D = f"float32, {THREADS} threads"


def cases(quick: bool, device: str = "cpu") -> list[Case]:
    if quick:
        main = [Problem(1, 8, 12, 10), Problem(2, 8, 9, 7, offset_groups=4)]
        variants = [
            Problem(1, 8, 12, 10, groups=4),
            Problem(1, 8, 12, 10, groups=8),
            Problem(1, 8, 12, 10, channels_last=True),
        ]
    else:
        main = [
            Problem(1, 64, 128, 128),
            Problem(2, 256, 32, 32),
            Problem(8, 64, 56, 56, offset_groups=4),
            Problem(1, 256, 100, 152),
        ]
        variants = [
            Problem(1, 256, 64, 64, groups=4),
            Problem(1, 256, 64, 64, groups=256),
            Problem(1, 64, 128, 128, channels_last=True),
        ]
    directions = (FORWARD, TRAINING)
    if device != "cpu":
        kinds = {f"float32, {device}": [*main, *variants], f"{FLOAT16}, {device}": main}
        return [
            Case(kind, problem, direction, device=device)
            for kind, problems in kinds.items()
            for problem in problems
            for direction in directions
        ]
    tiny = Problem(1, 1, 3, 3, padding=0, with_mask=False)
    return [
        *(Case(AGAINST_CONV2D, problem, direction) for direction in directions for problem in main),
        *(Case(AGAINST_CONV2D, problem, direction) for problem in variants for direction in directions),
        *(Case(BFLOAT16, problem, direction) for direction in directions for problem in main),
        *(Case(SPEEDUP, problem, direction) for direction in directions for problem in main),
        Case(OVERHEAD, tiny, FORWARD),
        Case(OVERHEAD, tiny, FORWARD, grad=True),
        Case(OVERHEAD, tiny, TRAINING),
    ]


def run(case: Case) -> list[Column]:
    def column(name: str, function: Callable[..., Tensor], dtype=torch.float32, threads=THREADS) -> Column:
        return Column(name, timed(function, case, dtype), threads, case.device)

    if FLOAT16 in case.kind:
        return [column("float32", deform_conv2d), column("float16", deform_conv2d, torch.float16)]
    if case.kind == BFLOAT16:
        return [column("float32", deform_conv2d), column("bfloat16", deform_conv2d, torch.bfloat16)]
    if case.kind == SPEEDUP:
        return [column("2 threads", deform_conv2d, threads=2), column("1 thread", deform_conv2d, threads=1)]
    columns = [column("conv2d", conv2d), column("deformc", deform_conv2d)]
    if case.device != "cpu":
        return columns
    if torchvision is not None:
        columns.append(column("torchvision", torchvision_deform_conv2d))
    if onnxruntime is not None and case.direction == FORWARD and not case.grad:
        columns.append(Column("onnxruntime", OnnxDeformConv(case.problem)))
    return columns


def verify(case: Case) -> None:
    other = {BFLOAT16: [torch.bfloat16], f"{FLOAT16}, {case.device}": [torch.float16]}
    for dtype in (torch.float32, *other.get(case.kind, ())):
        actual = outputs(deform_conv2d, case.problem, dtype, device=case.device)
        expect_close("deformc", actual, expected(case.problem, dtype), dtype)
    if case.kind in (AGAINST_CONV2D, OVERHEAD):
        reference = expected(case.problem, torch.float32)
        if torchvision is not None:
            expect_close("torchvision", outputs(torchvision_deform_conv2d, case.problem), reference, torch.float32)
        if onnxruntime is not None:
            expect_close("onnxruntime", {"output": OnnxDeformConv(case.problem)()}, reference, torch.float32)


# ---- what is compared ------------------------------------------------------------------------------------------------


def deform_conv2d(problem: Problem, input, offset, weight, bias, mask) -> Tensor:
    return deformc.deform_conv2d(input, offset, weight, bias, padding=problem.padding, mask=mask)


def reference_deform_conv2d(problem: Problem, input, offset, weight, bias, mask) -> Tensor:
    return deformc.reference.deform_conv2d(input, offset, weight, bias, padding=problem.padding, mask=mask)


def torchvision_deform_conv2d(problem: Problem, input, offset, weight, bias, mask) -> Tensor:
    return torchvision.ops.deform_conv2d(input, offset, weight, bias, padding=problem.padding, mask=mask)


def conv2d(problem: Problem, input, offset, weight, bias, mask) -> Tensor:
    return F.conv2d(input, weight, bias, padding=problem.padding, groups=problem.groups)


class OnnxDeformConv:
    """onnxruntime's DeformConv on the CPU with the tensors of a problem."""

    def __init__(self, problem: Problem):
        names = {"input": "X", "weight": "W", "offset": "offset", "bias": "B", "mask": "mask"}
        tensors = make_tensors(problem)
        self.feeds = {
            onnx_name: tensors[name].contiguous().numpy()
            for name, onnx_name in names.items()
            if tensors[name] is not None
        }
        float32 = onnx.TensorProto.FLOAT
        node = onnx.helper.make_node(
            "DeformConv",
            [onnx_name if onnx_name in self.feeds else "" for onnx_name in names.values()],
            ["Y"],
            kernel_shape=[problem.kernel] * 2,
            pads=[problem.padding] * 4,
            group=problem.groups,
            offset_group=problem.offset_groups,
        )
        inputs = [onnx.helper.make_tensor_value_info(name, float32, array.shape) for name, array in self.feeds.items()]
        output = onnx.helper.make_tensor_value_info("Y", float32, None)
        opset = onnx.helper.make_opsetid("", 19)
        # An IR version of that opset's time: a newer one than onnxruntime knows is refused.
        model = onnx.helper.make_model(
            onnx.helper.make_graph([node], "deform_conv", inputs, [output]), opset_imports=[opset], ir_version=9
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self) -> Tensor:
        return torch.from_numpy(self.session.run(None, self.feeds)[0])


# ---- tensors and calls -----------------------------------------------------------------------------------------------


def output_size(problem: Problem) -> tuple[int, int]:
    shrink = 2 * problem.padding - problem.kernel + 1
    return problem.height + shrink, problem.width + shrink


def make_tensors(problem: Problem, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    taps = problem.kernel**2
    channels, offset_groups = problem.channels, problem.offset_groups
    size = output_size(problem)
    fan_in = channels // problem.groups * taps
    tensors = {
        "input": normal(problem.batch, channels, problem.height, problem.width),
        # Multiples of 2^-10, so that base + offset is exact: torchvision rounds it, and where that leads into the next
        # cell, the derivative with respect to the position is another one.
        "offset": (normal(problem.batch, 2 * offset_groups * taps, *size) * 1024).round() / 1024,
        "weight": normal(channels, channels // problem.groups, problem.kernel, problem.kernel) * fan_in**-0.5,
        "bias": normal(channels),
        "mask": normal(problem.batch, offset_groups * taps, *size).sigmoid() if problem.with_mask else None,
    }
    if problem.channels_last:
        tensors["input"] = tensors["input"].contiguous(memory_format=torch.channels_last)
    return {name: None if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()}


def make_grad_output(problem: Problem, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(problem.batch, problem.channels, *output_size(problem), generator=generator).to(dtype)
    return grad_output.contiguous(memory_format=torch.channels_last) if problem.channels_last else grad_output


def timed(function: Callable[..., Tensor], case: Case, dtype: torch.dtype) -> Callable[[], object]:
    problem = case.problem
    tensors = on_device(make_tensors(problem, dtype), case.device)
    call = functools.partial(function, problem, *tensors.values())
    if case.direction == FORWARD:
        if case.grad:
            requires_grad(tensors)
        return call
    # conv2d has no gradient for offset and mask.
    used = ("input", "weight", "bias") if function is conv2d else tuple(tensors)
    leaves = list(requires_grad({name: tensors[name] for name in used}).values())
    grad_output = make_grad_output(problem, dtype).to(case.device)
    return lambda: torch.autograd.grad(call(), leaves, grad_output)


def outputs(function, problem: Problem, dtype=torch.float32, compute_dtype=None, device="cpu") -> dict[str, Tensor]:
    """The output and the gradients of all tensors. The tensors' values are rounded to ``dtype``."""
    compute_dtype = compute_dtype or dtype
    tensors = on_device(make_tensors(problem, dtype), device)
    tensors = {name: None if tensor is None else tensor.to(compute_dtype) for name, tensor in tensors.items()}
    leaves = requires_grad(tensors)
    output = function(problem, *tensors.values())
    grad_output = make_grad_output(problem, dtype).to(compute_dtype).to(device)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_output)
    return {"output": output.detach()} | {f"grad_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}


@functools.cache
def expected(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    return outputs(reference_deform_conv2d, problem, dtype, compute_dtype=torch.float32)
