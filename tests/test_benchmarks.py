"""Every row of the benchmarks is right, and every column of it runs, at a small size."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from common import DEVICES

import deformc

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = Path(__file__).parents[1]
if Path(deformc.__file__).parents[1] != ROOT:
    pytest.skip("benchmarks are not part of the installed package", allow_module_level=True)
pytest.importorskip("rich")
MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "def cases(" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODULES)
def test_rows(name, device):
    module = importlib.import_module(f"benchmarks.{name}")
    for case in module.cases(True, device):
        assert case.device == device
        module.verify(case)
        for column in module.run(case):
            column.call()


def test_a_wrong_result_is_not_timed(monkeypatch):
    from benchmarks import runner, vmap

    (case, *_) = vmap.cases(quick=True)
    monkeypatch.setattr(vmap, "deform_conv2d", lambda *tensors: deform_conv2d(*tensors) + tensors[0].sum())
    results, failed = runner.measure([(vmap, case)], runner.QUICK)
    assert failed
    assert "differs from the reference" in results[0].error
    assert not results[0].seconds


def deform_conv2d(input, offset, weight, bias, mask):
    return deformc.deform_conv2d(input, offset, weight, bias, padding=1, mask=mask)
