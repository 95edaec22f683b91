"""deformc: deformable vision operators for PyTorch 2."""

from deformc import compat, nn, ops, reference
from deformc._library import Backend, backends
from deformc.ops.deform_conv2d import deform_conv2d
from deformc.ops.ms_deform_attn import ms_deform_attn

__version__ = "0.1.0"

__all__ = ["Backend", "__version__", "backends", "compat", "deform_conv2d", "ms_deform_attn", "nn", "ops", "reference"]
