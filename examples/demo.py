"""A photograph through networks with deformable operators, each run in several ways that must agree.

- a ResNet-50 with deformable convolutions (resnet.py)
- Deformable DETR and RT-DETRv2 of ``transformers`` at their published sizes (detection.py)

Eager, ``torch.compile``, ``torch.export`` and AOTInductor. Weights are random with a fixed seed, nothing is downloaded.
Pictures of the points that the networks sample, and the compiled packages, are written to examples/output. Run it with
``make demo``, or with

    pip install ".[demo]"
    python examples/demo.py             # all of it
    python examples/demo.py resnet      # or one part: resnet, deformable_detr, rt_detr_v2

It exits with an error if a result differs from eager's by more than rounding explains.
"""

import sys

import detection
import resnet

PARTS = {"resnet": resnet.main, "deformable_detr": detection.deformable_detr, "rt_detr_v2": detection.rt_detr_v2}


def main() -> int:
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    results = [PARTS[name]() for name in names]  # all of them, also after one that differs
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
