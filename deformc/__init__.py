"""deformc: deformable vision operators for PyTorch 2."""

from deformc import nn, ops, reference
from deformc._library import Backend, backends
from deformc.ops.deform_conv2d import deform_conv2d

__version__ = "0.1.0"

__all__ = ["Backend", "__version__", "backends", "deform_conv2d", "nn", "ops", "reference"]
