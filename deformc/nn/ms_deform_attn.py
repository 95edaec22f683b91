"""Multi-scale deformable attention as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deformc._checks import Checks, dtype_text, shape_text
from deformc.ops.ms_deform_attn import ms_deform_attn

_CHECKS = Checks("MSDeformAttn")


class MSDeformAttn(nn.Module):
    """Multi-scale deformable attention: each query looks at a few points of several feature maps.

    From each query, one linear layer predicts where to look, as offsets from reference points, and another one the
    weights; a softmax over all points of a head makes them sum to 1. :func:`deformc.ms_deform_attn` samples between a
    projection of the values and one of the output.

    It takes the place of ``MSDeformAttn`` of Deformable DETR and of the many copies of it (DINO, Mask DINO, ViT-Adapter
    and DINOv3 with their ``ratio``): constructor, ``forward``, names in the state dict and initialisation are the same.
    Arguments that single copies add, as ``use_4D_normalizer``, are not supported. State dicts of mmcv's
    ``MultiScaleDeformableAttention`` and of the layers of ``transformers`` have the same names too and load as they
    are. mmcv's module has N in the second dimension by default, adds the positional encoding to the query, and a
    dropout and the identity to the output; here that is left to the caller.

    Args:
        d_model: channels of queries, values and output.
        n_levels: L, feature maps.
        n_heads: M; divides the channels of the projected values.
        n_points: P, points of each head and level.
        ratio: channels of the projected values, relative to ``d_model``.
        device: where to create the parameters.
        dtype: dtype of the parameters: float64, float32, float16 or bfloat16.

    Attributes:
        sampling_offsets: linear, to ``M*L*P*2`` offsets (x, y), in pixels of their level (see ``forward``). At first a
            ring of directions, one for each head, with point p at distance p + 1.
        attention_weights: linear, to ``M*L*P`` weights before the softmax. Zero at first.
        value_proj, output_proj: linear.

    Raises:
        ValueError: the text names the argument, what was expected and what it got.

    Source: Zhu et al., "Deformable DETR", ICLR 2021.
    """

    def __init__(
        self,
        d_model: int = 256,
        n_levels: int = 4,
        n_heads: int = 8,
        n_points: int = 4,
        ratio: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("d_model", d_model), ("n_levels", n_levels), ("n_heads", n_heads), ("n_points", n_points)):
            _require(value >= 1, f"{name} must be at least 1, got {value}")
        channels = int(d_model * ratio)
        _require(channels >= 1, f"ratio must leave at least one channel of d_model = {d_model}, got {ratio}")
        _require(
            channels % n_heads == 0, f"int(d_model * ratio) must be divisible by n_heads = {n_heads}, got {channels}"
        )
        self.d_model = d_model
        self.n_levels = n_levels
        self.n_heads = n_heads
        self.n_points = n_points
        self.ratio = ratio
        points = n_heads * n_levels * n_points
        factory = {"device": device, "dtype": dtype}
        self.sampling_offsets = nn.Linear(d_model, points * 2, **factory)
        self.attention_weights = nn.Linear(d_model, points, **factory)
        self.value_proj = nn.Linear(d_model, channels, **factory)
        self.output_proj = nn.Linear(channels, d_model, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew, as Deformable DETR does."""
        nn.init.zeros_(self.sampling_offsets.weight)
        angles = torch.arange(self.n_heads, dtype=torch.float32) * (2.0 * math.pi / self.n_heads)
        directions = torch.stack([angles.cos(), angles.sin()], -1)
        directions = directions / directions.abs().max(-1, keepdim=True).values  # onto a square
        distances = torch.arange(1, self.n_points + 1, dtype=torch.float32)
        ring = directions[:, None, None] * distances[:, None]
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(ring.expand(-1, self.n_levels, -1, -1).flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def _reset_parameters(self) -> None:
        """The name by which models call it on every ``MSDeformAttn`` they hold."""
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Sequence[tuple[int, int]] | Tensor,
        input_level_start_index: Tensor | None = None,
        input_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to the feature maps.

        Args:
            query: ``[N, Q, d_model]``.
            reference_points: ``[N, Q, L, 2]``, (x, y) normalised to [0, 1] in each level; offsets are then in pixels of
                the level. Or ``[N, Q, L, 4]``, boxes (x, y, width, height); offsets are then in units of half the box's
                width and height, divided by P. N, Q and L may each be 1, as ViT-Adapter has it: the same for all.
            input_flatten: ``[N, S, d_model]``, the pixels of all levels, one level after the other, row by row.
            input_spatial_shapes: the levels' (H, W): best a list of pairs of ints; or an int64 tensor ``[L, 2]``.
            input_level_start_index: int64 tensor ``[L]``, where each level starts in S; needed with a tensor of shapes
                only if levels do not follow each other.
            input_padding_mask: bool ``[N, S]`` or ``[1, S]``, True for pixels that count as 0.

        Returns:
            ``[N, Q, d_model]``.

        Positions and weights are computed in float32 (float64 if the projected values are), whatever the dtypes.

        Raises:
            RuntimeError: for shapes, dtypes or devices that do not fit.
        """
        self._check(query, reference_points, input_flatten, input_spatial_shapes, input_padding_mask)
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0.0)
        value = value.unflatten(2, (self.n_heads, value.shape[2] // self.n_heads))

        points = (self.n_heads, self.n_levels, self.n_points)
        wide = torch.promote_types(value.dtype, torch.float32)
        offsets = self.sampling_offsets(query).to(wide).unflatten(2, (*points, 2))
        weights = self.attention_weights(query).unflatten(2, (self.n_heads, -1))
        weights = F.softmax(weights, -1, dtype=wide).unflatten(3, points[1:])
        reference = reference_points[:, :, None, :, None].to(wide)
        if reference.shape[-1] == 2:
            locations = reference + offsets / _sizes(input_spatial_shapes, offsets)[:, None, :]
        else:
            locations = reference[..., :2] + offsets * reference[..., 2:] * (0.5 / self.n_points)
        attended = ms_deform_attn(
            value, input_spatial_shapes, locations, weights, level_start_index=input_level_start_index
        )
        return self.output_proj(attended)

    def _check(self, query, reference_points, input_flatten, input_spatial_shapes, input_padding_mask) -> None:
        """What the layers would say in other words, or not at all. The rest is left to the operator."""
        _check_shape("query", query, "[N, Q, d_model]", None, None, self.d_model)
        batch, queries = query.shape[:2]
        _check_shape("input_flatten", input_flatten, "[N, S, d_model]", batch, None, self.d_model)
        levels = self.n_levels
        _check_shape(
            "reference_points", reference_points, "[N, Q, L, 2 or 4]", (batch, 1), (queries, 1), (levels, 1), (2, 4)
        )
        if isinstance(input_spatial_shapes, Tensor):
            _check_shape("input_spatial_shapes", input_spatial_shapes, "[L, 2]", levels, 2)
        elif not _is_list_of_pairs(input_spatial_shapes, levels):
            expected = f"a list of L = {levels} pairs (H, W) or an int64 tensor [L, 2]"
            _CHECKS.fail(f"input_spatial_shapes must be {expected}, got {input_spatial_shapes!r}")
        if input_padding_mask is not None:
            if input_padding_mask.dtype != torch.bool:
                _CHECKS.fail(f"input_padding_mask must be bool, got {dtype_text(input_padding_mask.dtype)}")
            _check_shape("input_padding_mask", input_padding_mask, "[N, S]", (batch, 1), input_flatten.shape[1])

    def extra_repr(self) -> str:
        text = f"{self.d_model}, n_levels={self.n_levels}, n_heads={self.n_heads}, n_points={self.n_points}"
        return text if self.ratio == 1.0 else f"{text}, ratio={self.ratio}"


def _sizes(spatial_shapes: Sequence[tuple[int, int]] | Tensor, like: Tensor) -> Tensor:
    """(W, H) of each level, [L, 2], with the dtype and device of ``like``."""
    if isinstance(spatial_shapes, Tensor):
        return spatial_shapes.flip(1).to(like)
    return torch.tensor([[width, height] for height, width in spatial_shapes], dtype=like.dtype, device=like.device)


def _is_list_of_pairs(shapes: Sequence[tuple[int, int]], levels: int) -> bool:
    is_list = isinstance(shapes, (list, tuple)) and len(shapes) == levels
    return is_list and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in shapes)


def _check_shape(name: str, tensor: Tensor, dimensions: str, *expected: int | tuple[int, int] | None) -> None:
    """Each of ``expected`` is the size of a dimension, two of which either will do, or None for any."""
    allowed = [size if isinstance(size, tuple) else (size, size) for size in expected]
    fits = tensor.dim() == len(allowed)
    if fits:
        for got, (one, other) in zip(tensor.shape, allowed, strict=True):
            fits = fits and (one is None or got in (one, other))
    if not fits:
        names = dimensions[1:-1].split(", ")
        sizes = [
            symbol if one is None else str(one) if one == other else f"{one} or {other}"
            for symbol, (one, other) in zip(names, allowed, strict=True)
        ]
        _CHECKS.fail(f"{name} must have shape {dimensions} = {shape_text(sizes)}, got {shape_text(tensor.shape)}")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(f"MSDeformAttn: {text}")
