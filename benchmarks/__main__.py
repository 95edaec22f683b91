"""``python -m benchmarks``: one table per kind of comparison; a row is verified before it is timed."""

import argparse
import fnmatch
import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path

import benchmarks

# glibc returns large blocks to the system when they are freed and gets them back page by page, which makes the time of
# the same convolution jump by a factor of two. It reads its settings when the process starts.
PINNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small problems and few samples: whether it runs, not how fast"
    )
    parser.add_argument(
        "--rows", metavar="PATTERN", default="*", help="only rows whose 'kind: name' matches, e.g. '*128x128*'"
    )
    parser.add_argument("--device", default="cpu", help="where the tensors are: cpu (default) or mps")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()

    if sys.platform == "linux" and any(os.environ.get(name) != value for name, value in PINNED.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], os.environ | PINNED)

    from benchmarks import runner

    # A module of this package that has cases is the benchmark of the op it is named after.
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    rows = [
        (module, case)
        for module in modules
        if hasattr(module, "cases")
        for case in module.cases(arguments.quick, arguments.device)
        if fnmatch.fnmatch(str(case), arguments.rows) or arguments.rows in str(case)
    ]
    if arguments.list:
        print("\n".join(str(case) for _, case in rows))
        return 0
    if not rows:
        parser.error(f"no row matches {arguments.rows!r}")
    results, failed = runner.measure(rows, runner.QUICK if arguments.quick else runner.THOROUGH)
    if arguments.json:
        report = {"machine": runner.machine(), "rows": [result.as_dict() for result in results]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
