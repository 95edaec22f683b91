"""The operators: one module each, with everything about an op that lives in Python."""

from deformc.ops.deform_conv2d import deform_conv2d
from deformc.ops.ms_deform_attn import ms_deform_attn

__all__ = ["deform_conv2d", "ms_deform_attn"]
