"""The operators as modules that own their weights."""

from deformc.nn.deform_conv2d import DeformConv2d, DeformConv2dPack, upgrade_mmcv_state_dict

__all__ = ["DeformConv2d", "DeformConv2dPack", "upgrade_mmcv_state_dict"]
