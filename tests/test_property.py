"""Drawn shapes, parameters, layouts, dtypes and offsets, NaN and huge ones among them, against the reference."""

import math

import pytest
import torch
from common import DEVICES, assert_close, gradients, random_like, tensors_of, widened
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from specs import DTYPES, Dtypes
from specs.deform_conv2d import LAYOUTS, SPEC, TENSORS, channels_last, pair, problem

SPECIAL = (math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9, -3e9, 2.0**31, -(2.0**31), 1e-30, -1e-30, 0.0, 1.0, -1.0)


def pairs(low, high):
    return st.one_of(st.integers(low, high), st.tuples(st.integers(low, high), st.integers(low, high)))


@st.composite
def calls(draw):
    groups, offset_groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels = math.lcm(groups, offset_groups) * draw(st.integers(1, 3))
    kernel, dilation, padding = draw(pairs(1, 3)), draw(pairs(1, 2)), draw(pairs(0, 3))
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(pair(kernel), pair(dilation), pair(padding), strict=True)
    ]
    size = tuple(draw(st.integers(low, low + 7)) for low in least)
    layouts = {}
    for name in TENSORS:
        choices = [*LAYOUTS, "contiguous", "contiguous", *(["channels_last"] if name not in ("bias",) else [])]
        layout = draw(st.sampled_from(choices))
        if layout != "contiguous":
            layouts[name] = channels_last if layout == "channels_last" else LAYOUTS[layout]

    data = draw(st.sampled_from(DTYPES))
    coordinates, factors = (draw(st.sampled_from((data, torch.float32))) for _ in range(2))
    scale, special = draw(st.sampled_from((0.0, 0.3, 2.0, 40.0))), draw(st.sampled_from((0.0, 0.0, 0.05, 0.5)))
    integral = draw(st.booleans())

    def offsets(offset, generator):
        values = scale * torch.randn(offset.shape, generator=generator, dtype=torch.float64)
        # Multiples of 1/8 have no rounding in any dtype: integers, borders and cells' insides are hit exactly.
        values = values.round() if integral else (values * 8).round() / 8
        chosen = torch.rand(offset.shape, generator=generator) < special
        which = torch.randint(len(SPECIAL), offset.shape, generator=generator)
        return torch.where(chosen, torch.tensor(SPECIAL, dtype=torch.float64)[which], values)

    make = problem(
        n=draw(st.integers(0, 3)),
        c=channels,
        size=size,
        o=groups * draw(st.integers(0, 3)),
        kernel=kernel,
        stride=draw(pairs(1, 3)),
        padding=padding,
        dilation=dilation,
        groups=groups,
        offset_groups=offset_groups,
        bias=draw(st.booleans()),
        mask=draw(st.booleans()),
        offsets=offsets,
        layouts=layouts,
    )
    return make, Dtypes(data, coordinates, factors), draw(st.integers(0, 2**16))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls())
def test_forward_and_gradients(device, call):
    make, dtypes, seed = call
    assume(dtypes.data in SPEC.dtypes[torch.device(device).type])
    arguments = make(device, dtypes, seed)
    output = SPEC.function(**arguments)
    grad_output = random_like(output)
    wanted = tensors_of(SPEC, arguments)
    # float32 offsets of float64 data are exact in float64; half-precision results need only their own rounding.
    expected_output, expected = gradients(SPEC.reference, widened(arguments), wanted, grad_output)
    output, actual = gradients(SPEC.function, arguments, wanted, grad_output)
    assert output.dtype == arguments["input"].dtype
    assert_close(output, expected_output)
    for name in wanted:
        assert actual[name].dtype == arguments[name].dtype
        assert_close(actual[name], expected[name], name)
