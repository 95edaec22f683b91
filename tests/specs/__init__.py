"""What the generic tests run over: one module per operator, each with an ``OpSpec`` named ``SPEC``.

A module in this folder is found by itself; there is no list to add it to.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

Arguments = dict[str, Any]  # keyword arguments of the operator's public function


class Dtypes(NamedTuple):
    data: torch.dtype
    coordinates: torch.dtype
    factors: torch.dtype  # what multiplies a sampled value: masks and attention weights

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in self]
        return names[0] if len(set(names)) == 1 else "-".join(names)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# By device type. Metal has no float64.
DTYPES_OF_DEVICES = {"cpu": DTYPES, "mps": DTYPES[1:]}


@dataclass(frozen=True)
class Sample:
    """Inputs of one call. ``make(device, dtypes, seed)`` draws them, the same on every device."""

    name: str
    make: Callable[[str, Dtypes, int], Arguments]
    core: bool = False  # part of the subset that runs with every dtype and requires_grad mask
    smooth: bool = False  # small, and sampled away from integer coordinates: fit for gradcheck
    op_level: bool = True  # can be given to the operator itself, not only to its public function
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ErrorSample:
    """A call that must raise RuntimeError with exactly this text.

    ``make(device, other)`` gives the arguments: of the forward operator, of the backward operator or of the public
    function. ``{device}`` and ``{other}`` in the text stand for the two devices' names.
    """

    name: str
    level: Literal["forward", "backward", "public"]
    make: Callable[[str, str], Arguments]
    message: str
    two_devices: bool = False


@dataclass(frozen=True)
class OpSpec:
    name: str
    function: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    differentiable: tuple[str, ...]  # the tensor arguments, in the order of the backward operator's results
    dtypes: Mapping[str, tuple[torch.dtype, ...]]  # by device type
    op_arguments: Callable[[Arguments], tuple]  # of the forward operator
    backward_arguments: Callable[[Arguments, torch.Tensor, frozenset[str]], tuple]  # grad_output, gradients wanted
    samples: tuple[Sample, ...]
    errors: tuple[ErrorSample, ...] = field(default=())
    parallel: tuple[Sample, ...] = field(default=())  # such as several threads share, and such as they cannot

    @property
    def op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.deformc, self.name).default

    @property
    def backward_op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.deformc, self.name + "_backward").default

    def __str__(self) -> str:
        return self.name


def _specs() -> tuple[OpSpec, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(module.SPEC for module in modules if hasattr(module, "SPEC"))


SPECS = _specs()
