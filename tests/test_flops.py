"""FlopCounterMode counts the matrix products, as it does for conv2d; sampling is not counted."""

import pytest
import torch
from common import subsets, tensors_of, with_grad
from specs import SPECS
from specs.deform_conv2d import ASYMMETRIC, problem
from test_compile import FLOAT32
from torch.utils.flop_counter import FlopCounterMode

import deformc

(SPEC,) = (spec for spec in SPECS if spec.name == "deform_conv2d")

PROBLEMS = {
    "plain": {"n": 2, "c": 16, "o": 8, "size": (10, 12)},
    "grouped": ASYMMETRIC,
    "depthwise": {"c": 6, "o": 12, "groups": 6, "offset_groups": 3, "stride": 2, "size": (9, 8)},
    "no_mask": {"mask": False, "kernel": 1, "padding": 0},
    "empty": {"n": 0},
}


def flops(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


def conv2d_flops(arguments):
    groups = arguments["input"].size(1) // arguments["weight"].size(1)
    names = ("input", "weight", "bias", "stride", "padding", "dilation")
    shared = {name: arguments[name] for name in names}
    return flops(lambda: torch.nn.functional.conv2d(**shared, groups=groups))[0]


@pytest.mark.parametrize("name", PROBLEMS)
def test_forward(name):
    arguments = problem(**PROBLEMS[name])("cpu", FLOAT32, 0)
    counted, _ = flops(lambda: deformc.deform_conv2d(**arguments))
    assert counted == conv2d_flops(arguments)
    assert (counted > 0) == (name != "empty")


@pytest.mark.parametrize("name", PROBLEMS)
def test_backward(name):
    """One product for the gradient of the sampled values, which input, offset and mask share, and one for weight's."""
    arguments = problem(**PROBLEMS[name])("cpu", FLOAT32, 0)
    names = tensors_of(SPEC, arguments)
    for wanted in filter(None, subsets(names)):
        leaves = with_grad(arguments, wanted)
        output = deformc.deform_conv2d(**leaves)
        counted, _ = flops(lambda output=output: output.backward(torch.ones_like(output)))
        products = bool({"input", "offset", "mask"} & set(wanted)) + ("weight" in wanted)
        assert counted == products * conv2d_flops(arguments), wanted
