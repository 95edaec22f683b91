"""Deformable convolution as a module: with offsets given to it, and with offsets it predicts itself."""

from __future__ import annotations

import copy
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deformc.ops.deform_conv2d import Pair, deform_conv2d


class DeformConv2d(nn.Module):
    """Deformable convolution (version 1, and with a mask version 2) whose offsets are an argument of the call.

    It takes the place of :class:`torchvision.ops.DeformConv2d`: constructor, ``forward``, state dict (``weight``,
    ``bias``) and initialisation are the same. :func:`deformc.deform_conv2d` defines what it computes.

    Args:
        in_channels: C, channels of the input.
        out_channels: O, channels of the output.
        kernel_size: int or (Kh, Kw).
        stride: int or (vertical, horizontal).
        padding: int or (vertical, horizontal) of zeros, ``"valid"`` for none, or, with stride 1, ``"same"`` for an
            output of the size of the input.
        dilation: int or (vertical, horizontal).
        groups: blocks of channels convolved on their own; divides C and O.
        bias: whether to add a learned bias.
        device: where to create the parameters.
        dtype: dtype of the parameters: float64, float32, float16 or bfloat16.

    Attributes:
        weight: ``[O, C/groups, Kh, Kw]``, drawn from U(-b, b) with b = 1/sqrt(C/groups*Kh*Kw), as is ``bias``.
        bias: ``[O]``, or None.

    Raises:
        ValueError: the text names the argument, what was expected and what it got.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | Literal["same", "valid"] = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _require(in_channels >= 1, f"in_channels must be at least 1, got {in_channels}")
        _require(out_channels >= 0, f"out_channels must be at least 0, got {out_channels}")
        _require(groups >= 1, f"groups must be at least 1, got {groups}")
        _require(in_channels % groups == 0, f"in_channels must be divisible by groups = {groups}, got {in_channels}")
        _require(out_channels % groups == 0, f"out_channels must be divisible by groups = {groups}, got {out_channels}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = _pair("kernel_size", kernel_size, at_least=1)
        self.stride = _pair("stride", stride, at_least=1)
        self.padding = _padding(padding, self.stride)
        self.dilation = _pair("dilation", dilation, at_least=1)
        self.groups = groups

        weight_shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(weight_shape, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, in the order and from the distributions of ``nn.Conv2d``."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(self.weight.shape[1:]))
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        """Convolve ``input`` at the points that ``offset`` leads to.

        Args:
            input: ``[N, C, H, W]`` or ``[C, H, W]``, dtype of the weight.
            offset: ``[N, 2*G*Kh*Kw, Ho, Wo]``, in pixels of the input, channels ordered (offset group, ky, kx, (dy,
                dx)). dtype of ``input``, or float32. The number G of offset groups follows from the shape and divides
                C.
            mask: ``[N, G*Kh*Kw, Ho, Wo]``, factors of the sampled values, or None. dtype of ``input``, or float32.

        Returns:
            ``[N, O, Ho, Wo]``, dtype of ``input``. An ``input`` without N has an ``offset``, ``mask`` and result
            without.

        Raises:
            RuntimeError: for shapes, dtypes or devices that do not fit.
        """
        return deform_conv2d(input, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, mask)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        if self.padding != (0, 0):
            text += f", padding={self.padding!r}"
        if self.dilation != (1, 1):
            text += f", dilation={self.dilation}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        if self.bias is None:
            text += ", bias=False"
        return text


class DeformConv2dPack(DeformConv2d):
    """Deformable convolution that predicts its offsets and mask itself, and so takes the place of a convolution.

    An ordinary convolution, ``conv_offset``, with the kernel size, stride, padding and dilation of the module itself
    gives for each output pixel the offsets of its taps and, through a sigmoid, their mask. Its weights start at zero:
    every point lies where a convolution has it. **The mask then is sigmoid(0) = 0.5 everywhere**, which halves the
    response of the weight (the bias is added in full). That is what mmcv does and what its trained weights expect.

    It computes what ``ModulatedDeformConv2dPack`` of mmcv does or, with ``mask=False``, ``DeformConv2dPack`` of mmcv,
    and loads the state dicts of either (:func:`upgrade_mmcv_state_dict` for older files). Three things differ from
    their constructors: ``offset_groups`` is called ``deform_groups`` there, mmcv's ``DeformConv2dPack`` has no bias,
    and both initialise weight and bias a little differently.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as in :class:`DeformConv2d`.
        offset_groups: G, blocks of C/G consecutive channels of the input with points of their own; divides C.
        mask: whether to predict a mask too (version 2).
        device, dtype: as in :class:`DeformConv2d`.

    Attributes:
        weight, bias: as in :class:`DeformConv2d`.
        conv_offset: the ``nn.Conv2d`` from C channels to ``3*G*Kh*Kw`` (``2*G*Kh*Kw`` without mask): first the offsets,
            ordered (offset group, ky, kx, (dy, dx)) and in pixels of the input, then the mask, ordered (offset group,
            ky, kx), before the sigmoid.

    Under autocast ``conv_offset`` runs in the dtype of autocast like any other convolution, and offsets come out
    rounded to it: bfloat16 has steps of 1/64 pixel between 2 and 4 pixels. Positions are computed from them in float32.

    Raises:
        ValueError: the text names the argument, what was expected and what it got.

    Sources: Dai et al., "Deformable Convolutional Networks", ICCV 2017; Zhu et al., "Deformable ConvNets v2", CVPR
    2019; the two modules of mmcv named above.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | Literal["same", "valid"] = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        offset_groups: int = 1,
        mask: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, device=device, dtype=dtype
        )
        _require(offset_groups >= 1, f"offset_groups must be at least 1, got {offset_groups}")
        _require(
            in_channels % offset_groups == 0,
            f"in_channels must be divisible by offset_groups = {offset_groups}, got {in_channels}",
        )
        self.offset_groups = offset_groups
        self.mask = mask
        self.conv_offset = _ZeroConv2d(
            in_channels,
            (3 if mask else 2) * offset_groups * math.prod(self.kernel_size),
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            device=device,
            dtype=dtype,
        )

    @classmethod
    def from_conv2d(cls, conv: nn.Conv2d, *, offset_groups: int = 1, mask: bool = True) -> DeformConv2dPack:
        """The module that takes the place of ``conv``, with a copy of its weight and bias.

        Device, dtype, training mode and ``requires_grad`` are those of ``conv``. Without mask the result computes what
        ``conv`` does until its offsets are trained; with mask half of it (the bias in full), see the class.

        Raises:
            TypeError: ``conv`` is no ``nn.Conv2d``.
            ValueError: ``conv`` pads with something other than zeros, or its channels are not divisible by
                ``offset_groups``.
        """
        if not isinstance(conv, nn.Conv2d):
            raise TypeError(f"{cls.__name__}: conv must be an nn.Conv2d, got {type(conv).__name__}")
        if conv.padding_mode != "zeros":
            raise ValueError(f'{cls.__name__}: conv must have padding_mode "zeros", got "{conv.padding_mode}"')
        # Made without storage first: to draw weights that are then replaced would advance the random generator.
        pack = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            conv.bias is not None,
            offset_groups=offset_groups,
            mask=mask,
            device="meta",
            dtype=conv.weight.dtype,
        ).to_empty(device=conv.weight.device)
        pack.conv_offset.reset_parameters()
        with torch.no_grad():
            for parameter, original in ((pack.weight, conv.weight), (pack.bias, conv.bias)):
                if original is not None:
                    parameter.copy_(original).requires_grad_(original.requires_grad)
        return pack.train(conv.training)

    def offset_and_mask(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """The offsets and mask predicted for ``input``, as :func:`deformc.deform_conv2d` takes them.

        Returns:
            offset ``[N, 2*G*Kh*Kw, Ho, Wo]`` in pixels of ``input``, and mask ``[N, G*Kh*Kw, Ho, Wo]``, between 0 and
            1, or None. Without N for an ``input`` without.
        """
        prediction = self.conv_offset(input)
        if not self.mask:
            return prediction, None
        points = self.offset_groups * math.prod(self.kernel_size)
        offset, logits = prediction.split((2 * points, points), dim=-3)
        return offset, logits.sigmoid()

    def forward(self, input: Tensor) -> Tensor:
        """Convolve ``input`` at the points predicted from it.

        Args:
            input: ``[N, C, H, W]`` or ``[C, H, W]``, dtype of the weight.

        Returns:
            ``[N, O, Ho, Wo]`` or ``[O, Ho, Wo]``, dtype of ``input`` (of autocast, where it is on).
        """
        offset, mask = self.offset_and_mask(input)
        return super().forward(input, offset, mask)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.offset_groups != 1:
            text += f", offset_groups={self.offset_groups}"
        if not self.mask:
            text += ", mask=False"
        return text


class _ZeroConv2d(nn.Conv2d):
    """A convolution that starts at zero, also when something calls ``reset_parameters`` on every module of a model."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def upgrade_mmcv_state_dict(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the keys of today for every :class:`DeformConv2dPack` of ``model``.

    Models saved before mmcv's modules had version 2 keep the convolution that predicts the offsets beside the module:
    ``layer2.0.conv2_offset.weight`` for what is now ``layer2.0.conv2.conv_offset.weight``. ``load_state_dict`` shows a
    module only the keys below its own name, so the module cannot translate them itself. Other keys are left as they
    are, and a state dict without such keys comes back as an equal copy.

    Args:
        model: the model to be loaded, which gives the names of its packs.
        state_dict: keys and tensors of the file, not changed.
    """
    result = copy.copy(state_dict)  # with the versions of the modules, which dict() would drop
    for name, module in model.named_modules():
        if not isinstance(module, DeformConv2dPack):
            continue
        for parameter in ("weight", "bias"):
            old, new = f"{name}_offset.{parameter}", f"{name}.conv_offset.{parameter}".removeprefix(".")
            if old in result and new not in result:
                result[new] = result.pop(old)
    return result


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(f"DeformConv2d: {text}")


def _pair(name: str, value: Pair, *, at_least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else value
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(element, int) for element in pair)
    kinds = 'an int, a pair of ints, "same" or "valid"' if name == "padding" else "an int or a pair of ints"
    _require(is_pair, f"{name} must be {kinds}, got {value!r}")
    _require(min(pair) >= at_least, f"{name} must be at least {at_least}, got {value!r}")
    return tuple(pair)


def _padding(padding: Pair | str, stride: tuple[int, int]) -> tuple[int, int] | str:
    if padding not in ("same", "valid"):
        return _pair("padding", padding, at_least=0)
    _require(padding == "valid" or stride == (1, 1), f'padding="same" needs stride 1, got {stride}')
    return padding
