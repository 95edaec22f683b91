"""The operators as modules that own their weights."""

from deformc.nn.deform_conv2d import DeformConv2d, DeformConv2dPack, upgrade_mmcv_state_dict
from deformc.nn.ms_deform_attn import MSDeformAttn

__all__ = ["DeformConv2d", "DeformConv2dPack", "MSDeformAttn", "upgrade_mmcv_state_dict"]
