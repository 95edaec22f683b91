"""The operators in plain PyTorch: slow, differentiable any number of times, what the kernels are tested against."""

from deformc.reference.deform_conv2d import deform_conv2d

__all__ = ["deform_conv2d"]
