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

}  // namespace deformc
