"""``python -m deformc doctor``: its report and its exit code."""

import ctypes
import os
import re
import subprocess
import sys

import pytest
import torch

import deformc
from deformc import _doctor, _library


def doctor(library=None) -> subprocess.CompletedProcess:
    environment = os.environ | ({} if library is None else {"DEFORMC_LIBRARY": str(library)})
    command = [sys.executable, "-m", "deformc", "doctor"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def in_process() -> tuple[str, int]:
    lines = []
    code = _doctor.run(lines.append)
    return "\n".join(lines), code


def test_healthy_installation():
    result = doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    report = result.stdout
    for version in (deformc.__version__, torch.__version__, ".".join(map(str, sys.version_info[:3]))):
        assert version in report
    library = str(_library.library_file())
    assert f"{library}: loaded" in report
    for name, value in _doctor.build_info(library).items():
        assert re.search(rf"^ +{name} +{re.escape(value)}$", report, re.MULTILINE)
    for op in _library.OPS:
        assert re.search(rf"^ +{op} +yes ", report, re.MULTILINE)
    for device in _library.DEVICES:
        if reason := _library.kernel_status("deform_conv2d", device):
            assert f"{device}: {reason}" in report
    assert re.search(r"deform_conv2d forward +cpu +ok", report)
    assert re.search(r"deform_conv2d backward +cpu +ok", report)


def test_missing_library(tmp_path):
    result = doctor(tmp_path / "absent.so")
    assert result.returncode == 1
    assert result.stderr == ""
    assert "absent.so: could not be loaded: absent.so does not exist" in result.stdout
    assert re.search(r"^ +deform_conv2d +no +no +no$", result.stdout, re.MULTILINE)
    assert "self-check: not run" in result.stdout


def test_broken_library(tmp_path):
    library = tmp_path / "broken.so"
    library.write_bytes(b"not a library\n" * 100)
    with pytest.raises(OSError) as caught:
        ctypes.CDLL(str(library))
    result = doctor(library)
    assert result.returncode == 1
    assert result.stderr == ""
    assert f"{library}: could not be loaded: " in result.stdout
    assert str(caught.value) in result.stdout


@pytest.mark.parametrize("wrong", [lambda out: out + 1e-2, lambda out: out * torch.nan], ids=["off", "nan"])
def test_wrong_values_are_reported(monkeypatch, wrong):
    right = deformc.deform_conv2d
    monkeypatch.setattr(deformc, "deform_conv2d", lambda *args, **kwargs: wrong(right(*args, **kwargs)))
    report, code = in_process()
    assert code == 1
    assert re.search(r"deform_conv2d forward +cpu +FAILED", report)


def test_wrong_gradient_is_reported(monkeypatch):
    right = deformc.deform_conv2d

    def detached_half(*args, **kwargs):
        out = right(*args, **kwargs)
        return (out + out.detach()) / 2

    monkeypatch.setattr(deformc, "deform_conv2d", detached_half)
    report, code = in_process()
    assert code == 1
    assert re.search(r"deform_conv2d forward +cpu +ok", report)
    assert re.search(r"deform_conv2d backward +cpu +FAILED", report)


def test_error_in_self_check_is_reported(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("out of order")

    monkeypatch.setattr(deformc, "deform_conv2d", fail)
    report, code = in_process()
    assert code == 1
    assert re.search(r"deform_conv2d +cpu +FAILED +ValueError: out of order", report)


def test_command_is_required():
    result = subprocess.run([sys.executable, "-m", "deformc"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert "doctor" in result.stderr
