"""``python -m deformc doctor``."""

import argparse
import sys

from deformc import _doctor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deformc")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="what is installed, which op has a kernel on which device, and a quick self-check"
    )
    parser.parse_args()
    return _doctor.run()


if __name__ == "__main__":
    sys.exit(main())
