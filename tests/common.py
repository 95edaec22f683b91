"""What the generic tests share: their parameters, tolerances, and gradients as a dictionary."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from specs import DTYPES_OF_DEVICES, SPECS, Arguments, Dtypes, OpSpec, Sample
from torch import Tensor

# Simulated devices are tested in processes of their own, see conftest.py.
SIMULATED = os.environ.get("DEFORMC_SIMULATE")
DEVICES = tuple(os.environ.get("DEFORMC_TEST_DEVICES", "cpu").split(","))

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

FLOAT32 = Dtypes(torch.float32, torch.float32, torch.float32)
FLOAT64 = Dtypes(torch.float64, torch.float64, torch.float64)

# Largest error in units of the dtype's epsilon: of the expected value, and of the largest expected value of the tensor,
# since a sum has the rounding error of its largest terms. float64 and float32 results are sums of many products, added
# in another order than the reference's; half-precision results need no more than the rounding of columns and result.
TOLERANCE = {torch.float64: 32, torch.float32: 32, torch.float16: 2, torch.bfloat16: 2}


def assert_close(actual: Tensor, expected: Tensor, name: str = "result", factor: float = 1) -> None:
    """``actual`` is ``expected``, which may be wider, up to the rounding of the dtype of ``actual``."""
    info = torch.finfo(actual.dtype)
    epsilon = factor * TOLERANCE[actual.dtype] * info.eps
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    finite = expected[expected.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=epsilon,
        atol=epsilon * max(largest, info.tiny),  # numbers below tiny have the spacing of tiny
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def assert_same_layout(actual: Tensor, expected: Tensor, name: str = "result") -> None:
    """The same shape, dtype, device and strides; strides of dimensions of size 1 say nothing."""

    def layout(tensor: Tensor) -> tuple:
        strides = [stride if size > 1 else None for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        return tensor.shape, tensor.dtype, tensor.device, strides if tensor.numel() else None

    assert layout(actual) == layout(expected), name


def is_channels_last(tensor: Tensor) -> bool:
    """Contiguous in channels_last and not plainly contiguous: such an input makes such outputs and gradients."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def all_dtypes(spec: OpSpec, device: str, *, mixed: bool) -> Iterator[Dtypes]:
    """Each data dtype with coordinates and factors of its own, or also (``mixed``) of float32."""
    for data in spec.dtypes[torch.device(device).type]:
        yield Dtypes(data, data, data)
        if mixed and data != torch.float32:
            yield Dtypes(data, torch.float32, torch.float32)
            yield Dtypes(data, torch.float32, data)
            yield Dtypes(data, data, torch.float32)


def float32_only(spec: OpSpec, device: str, *, mixed: bool) -> Iterator[Dtypes]:
    yield FLOAT32


def float64_only(spec: OpSpec, device: str, *, mixed: bool) -> Iterator[Dtypes]:
    """Nothing, on a device without it."""
    if torch.float64 in spec.dtypes[torch.device(device).type]:
        yield FLOAT64


def widest(device: str) -> Dtypes:
    return FLOAT64 if torch.float64 in DTYPES_OF_DEVICES[torch.device(device).type] else FLOAT32


def widest_only(spec: OpSpec, device: str, *, mixed: bool) -> Iterator[Dtypes]:
    yield widest(device)


@contextlib.contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def every_dtype_of_core(spec: OpSpec, device: str, *, mixed: bool) -> Iterable[Dtypes]:
    """Every combination for core samples, float32 for the others."""
    return (all_dtypes if mixed else float32_only)(spec, device, mixed=mixed)


def parametrize_samples(
    select: Callable[[Sample], bool] = lambda sample: True,
    dtypes: Callable[..., Iterable[Dtypes]] = all_dtypes,
    specs: Iterable[OpSpec] = SPECS,
) -> pytest.MarkDecorator:
    """Over device, spec, sample and dtypes; core samples have mixed dtypes too."""
    parameters = []
    for device, spec in itertools.product(DEVICES, specs):
        for sample in filter(select, spec.samples):
            for chosen in dtypes(spec, device, mixed=sample.core):
                name = f"{spec.name}-{sample.name}-{device}-{chosen}"
                parameters.append(pytest.param(device, spec, sample, chosen, id=name))
    return pytest.mark.parametrize(("device", "spec", "sample", "dtypes"), parameters)


def tensors_of(spec: OpSpec, arguments: Arguments) -> tuple[str, ...]:
    return tuple(name for name in spec.differentiable if arguments[name] is not None)


def data_names(sample: Sample) -> tuple[str, ...]:
    """The arguments that share the dtype of the data, told by drawing them with other coordinates and factors."""
    arguments = sample.make("cpu", Dtypes(torch.float64, torch.float32, torch.float32), 0)
    return tuple(
        name for name, value in arguments.items() if isinstance(value, Tensor) and value.dtype == torch.float64
    )


def subsets(names: Iterable[str]) -> Iterator[frozenset[str]]:
    names = tuple(names)
    for count in range(len(names) + 1):
        yield from map(frozenset, itertools.combinations(names, count))


def widened(arguments: Arguments) -> Arguments:
    """The same values in float64 on the CPU, in no particular layout: what the reference computes with."""

    def wide(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return value.cpu().double() if value.is_floating_point() else value.cpu()

    return {name: wide(value) for name, value in arguments.items()}


def with_grad(arguments: Arguments, wanted: Iterable[str]) -> Arguments:
    """The same tensors as leaves, of which the wanted ones require a gradient."""
    wanted = set(wanted)
    return {
        name: value.detach().requires_grad_(name in wanted) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def gradients(
    function: Callable[..., Tensor], arguments: Arguments, wanted: Iterable[str], grad_output: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The function's output and the gradients of the wanted arguments, for ones or the given gradient of the output."""
    wanted = sorted(wanted)
    arguments = with_grad(arguments, wanted)
    output = function(**arguments)
    if grad_output is None:
        grad_output = torch.ones_like(output)
    results = torch.autograd.grad(output, [arguments[name] for name in wanted], grad_output.to(output))
    return output.detach(), dict(zip(wanted, results, strict=True))


def random_like(tensor: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return values.to(tensor.dtype).to(tensor.device)
