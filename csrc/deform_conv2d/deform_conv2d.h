// deform_conv2d: the sizes. Dai et al. 2017 (offsets), Zhu et al. 2019 (mask); torchvision's semantics.
//
// Coordinate space: pixels of the input. Output pixel (oy, ox) samples, for each tap (ky, kx) of the kernel, the input at
//   (oy * stride_h - pad_h + ky * dilation_h + dy,  ox * stride_w - pad_w + kx * dilation_w + dx)
// with dy, dx from the offset tensor: bilinear, zero outside.
#pragma once

#include "common/bilinear.h"

namespace deformc {

struct DeformConv2dParams {
  int64_t batch;
  int64_t in_channels;    // C
  int64_t out_channels;   // O
  int64_t groups;         // of the convolution: weight is [O, C/groups, Kh, Kw]
  int64_t offset_groups;  // G: channels [g*C/G, (g+1)*C/G) share offset channels [g*2*Kh*Kw, (g+1)*2*Kh*Kw), ordered ky, kx, (dy, dx)
  int32_t in_h, in_w;     // below 2^30, padded or not
  int32_t out_h, out_w;
  int32_t kernel_h, kernel_w;
  int32_t stride_h, stride_w;
  int32_t pad_h, pad_w;
  int32_t dilation_h, dilation_w;
};

// ---- for GPUs -------------------------------------------------------------------------------------------------------------------------
//
// The product with the weight is a matrix product for each group of the convolution: [pixels, columns] x [columns, outputs]. A column is a
// (tap, channel). Four columns, a quad, share a tap and an offset group: the channels of a group are cut into segments that lie in one offset
// group each, and a segment is filled up to whole quads by columns without a channel.

struct DeformConv2dStrides {  // in elements
  int64_t n, c, y, x;
};

struct DeformConv2dDeviceParams {
  DeformConv2dParams p;
  DeformConv2dStrides input, offset, mask, output;  // output: of the output or of its gradient
  DeformConv2dStrides grad_input;                   // of a float tensor
  int64_t weight_o, weight_c, weight_y, weight_x;   // strides of the weight
  int64_t bias_o;
  int32_t segment, segment_columns;  // channels of a segment; columns that it takes
  int32_t columns;                   // of a group: taps * segments * segment_columns
  int32_t packed_columns, packed_outputs;  // of the packed weight [groups, packed_columns, packed_outputs], filled up with zeros
  int32_t first_tile, tiles;         // of pixels of an image, that a launch works on
  int32_t slices, slice_tiles;       // grad_weight: partial sums, and the tiles that each takes of all images
  int32_t band_pixels;               // of the input, whose gradient one simdgroup sums in the deterministic way
  bool has_bias, has_mask;
  bool need_input, need_offset, need_mask;
  bool store_columns;                // the gradient of the columns is kept for gather_grad_input
};

struct ColumnQuad {
  int32_t tap, count;  // count: of columns that have a channel, from the first
  int64_t channel, offset_group;
};

// The quad that starts at a column of a group, a multiple of four below params.columns.
DEFORMC_INLINE ColumnQuad quad_at(DeformConv2dParams p, int32_t segment, int32_t segment_columns, int64_t group, int32_t column) {
  const int64_t group_channels = p.in_channels / p.groups;
  const int32_t segments = static_cast<int32_t>(group_channels / segment), of_tap = segments * segment_columns;
  const int32_t within_tap = column % of_tap, first = within_tap % segment_columns;
  ColumnQuad quad;
  quad.tap = column / of_tap;
  quad.channel = group * group_channels + static_cast<int64_t>(within_tap / segment_columns) * segment + first;
  quad.offset_group = quad.channel / (p.in_channels / p.offset_groups);
  quad.count = segment - first < 4 ? segment - first : 4;
  return quad;
}

// The column of a channel of a group at a tap.
DEFORMC_INLINE int32_t column_of(DeformConv2dParams p, int32_t segment, int32_t segment_columns, int32_t tap, int64_t group_channel) {
  const int32_t segments = static_cast<int32_t>(p.in_channels / p.groups / segment), channel = static_cast<int32_t>(group_channel);
  return (tap * segments + channel / segment) * segment_columns + channel % segment;
}

// The sample of output pixel (oy, ox) at a tap.
DEFORMC_INLINE Sample<float> locate_tap(DeformConv2dParams p, int32_t oy, int32_t ox, int32_t tap, float dy, float dx) {
  const int32_t ky = tap / p.kernel_w, kx = tap % p.kernel_w;
  return locate_sample(oy * p.stride_h - p.pad_h + ky * p.dilation_h, ox * p.stride_w - p.pad_w + kx * p.dilation_w, dy, dx, p.in_h, p.in_w);
}

}  // namespace deformc
