"""The operators in plain PyTorch: slow, differentiable any number of times, what the kernels are tested against."""

from deformc.reference.deform_conv2d import deform_conv2d
from deformc.reference.ms_deform_attn import ms_deform_attn

__all__ = ["deform_conv2d", "ms_deform_attn"]
