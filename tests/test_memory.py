"""Peak memory of a call beyond its inputs and output, measured in a process of its own."""

import subprocess
import sys

import pytest

resource = pytest.importorskip("resource", reason="peak memory is read with getrusage, which Windows does not have")

PROGRAM = """
import resource, sys
import torch
import deformc

def peak():  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def call(height, width, channels_last):
    input = torch.rand(1, 64, height, width)
    if channels_last:
        input = input.to(memory_format=torch.channels_last)
    offset, weight = torch.rand(1, 18, height, width), torch.rand(64, 64, 3, 3)
    mask, bias = torch.rand(1, 9, height, width), torch.rand(64)
    before = peak()
    output = deformc.deform_conv2d(input, offset, weight, bias, padding=1, mask=mask)
    return peak() - before - output.numel() * output.element_size()

with torch.no_grad():
    call(64, 64, False)  # what a first call allocates and keeps: thread pools, BLAS buffers
    print(call(1080, 1920, {channels_last}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
def test_large_call_needs_little_more_than_inputs_and_output(channels_last):
    program = PROGRAM.replace("{channels_last}", str(channels_last))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    extra = int(result.stdout)
    assert extra < 64 * 2**20, f"{extra / 2**20:.1f} MiB"


def test_workspace_that_cannot_be_had_is_an_error():
    """Not a crash: sizes of an expanded tensor whose products do not fit an integer."""
    program = """
import torch
import deformc

torch.set_num_threads(8)
input = torch.zeros(1, dtype=torch.float64).expand(1, 1, 2**29, 2**29)
offset = torch.zeros(1, 2, 1, 1, dtype=torch.float64, requires_grad=True)
weight = torch.ones(2**15, 1, 1, 1, dtype=torch.float64)
try:
    deformc.deform_conv2d(input, offset, weight, stride=2**29).sum().backward()
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"deformc: could not allocate {2**61} bytes of workspace\n"
