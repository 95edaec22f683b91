"""Times the rows of the benchmarks and prints them.

A benchmark module has ``cases(quick)``, the rows; ``verify(case)``, which raises ``Mismatch`` if a result differs from
the reference; and ``run(case)``, the columns of a row. The first column is what the others are compared with. It may
have ``details(case)``: more about a row than times, as texts by the names of their columns.
"""

import dataclasses
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table

import deformc

THREADS = 2


class Mismatch(Exception):
    """A result differs from the reference: the row must not be timed."""


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    call: Callable[[], object]
    threads: int = THREADS
    device: str = "cpu"


@dataclasses.dataclass(frozen=True)
class Effort:
    samples: int
    seconds: float  # of one sample, at least


THOROUGH = Effort(samples=9, seconds=0.05)
QUICK = Effort(samples=3, seconds=0.002)


@dataclasses.dataclass
class Result:
    kind: str
    name: str
    baseline: str
    seconds: dict[str, float]  # per call, median
    ratios: dict[str, float]  # to the baseline timed in turns with it
    error: str | None = None
    details: dict[str, str] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def machine() -> dict[str, str | int]:
    try:
        with open("/proc/cpuinfo") as file:
            processor = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    return {
        "processor": processor,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": THREADS,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deformc": deformc.__version__,
    }


def measure(rows: Iterable[tuple[ModuleType, object]], effort: Effort) -> tuple[list[Result], bool]:
    """Verify and time every row; print a table for each kind. Also whether a row could not be verified."""
    console = Console(width=None if Console().is_terminal else 140)
    console.print("  ".join(f"{key}: {value}" for key, value in machine().items()), highlight=False)
    torch.set_num_threads(THREADS)
    results = []
    for kind, group in itertools.groupby(rows, key=lambda row: row[1].kind):
        of_kind = []
        for module, case in group:
            console.print(f"[dim]{case}[/dim]", highlight=False)
            of_kind.append(_measure_row(module, case, effort))
        console.print(_table(kind, of_kind))
        results += of_kind
    failures = [result for result in results if result.error]
    for result in failures:
        console.print(f"FAILED {result.kind}: {result.name}: {result.error}", markup=False, highlight=False)
    return results, bool(failures)


def _measure_row(module: ModuleType, case, effort: Effort) -> Result:
    try:
        module.verify(case)
    except Mismatch as error:
        return Result(case.kind, case.name, "", {}, {}, str(error))
    except Exception as error:  # the other rows are still worth having
        return Result(case.kind, case.name, "", {}, {}, f"{type(error).__name__}: {error}".splitlines()[0])
    baseline, *others = module.run(case)
    seconds: dict[str, list[float]] = {}
    ratios = {}
    for other in others:
        pair = _interleaved(baseline, other, effort)
        medians = [statistics.median(samples) for samples in pair]
        ratios[other.name] = medians[1] / medians[0]
        seconds[other.name] = pair[1]
        seconds.setdefault(baseline.name, []).extend(pair[0])
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    details = module.details(case) if hasattr(module, "details") else {}
    return Result(case.kind, case.name, baseline.name, medians, ratios, details=details)


def _interleaved(first: Column, second: Column, effort: Effort) -> tuple[list[float], list[float]]:
    """Seconds per call of the two, sampled in turns so that both see the same state of the machine."""
    repeats = [_repeats(column, effort.seconds) for column in (first, second)]
    samples = ([], [])
    for _ in range(effort.samples):
        for column, count, of_column in zip((first, second), repeats, samples, strict=True):
            # The other's threads spin after its last call: OpenMP's for milliseconds, onnxruntime's for more than 20.
            time.sleep(min(0.05, effort.seconds))
            of_column.append(_sample(column, count))
    return samples


def _sample(column: Column, count: int) -> float:
    if torch.get_num_threads() != column.threads:
        torch.set_num_threads(column.threads)
        column.call()  # starts the threads
    call = column.call
    start = time.perf_counter()
    for _ in range(count):
        call()
    if column.device != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / count


def _repeats(column: Column, seconds: float) -> int:
    """How many calls fill a sample. Also the warm-up: two calls at least, and as many as take the time of a sample."""
    column.call()
    count = 1
    while (elapsed := _sample(column, count) * count) < seconds:
        count = max(2 * count, int(1.1 * count * seconds / max(elapsed, 1e-7))) if elapsed < seconds / 4 else 2 * count
    return count


def _table(kind: str, results: list[Result]) -> Table:
    table = Table(title=kind, title_justify="left")
    table.add_column("case")
    timed = [result for result in results if not result.error]
    names = list(dict.fromkeys(name for result in timed for name in result.seconds))
    baseline = timed[0].baseline if timed else ""
    names.sort(key=lambda name: name == baseline)  # the compared ones first, then what they are compared with
    ratios = [name for name in names if name != baseline]
    for name in names:
        table.add_column(name, justify="right")
    for name in ratios:
        table.add_column(f"{name} / {baseline}", justify="right")
    details = list(dict.fromkeys(name for result in timed for name in result.details))
    for name in details:
        table.add_column(name, justify="right")
    for result in results:
        if result.error:
            table.add_row(result.name, "FAILED")
            continue
        times = [_text(result.seconds[name]) if name in result.seconds else "" for name in names]
        quotients = [f"{result.ratios[name]:.2f}" if name in result.ratios else "" for name in ratios]
        table.add_row(result.name, *times, *quotients, *(result.details.get(name, "") for name in details))
    return table


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
