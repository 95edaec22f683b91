// deform_conv2d: sizes, and the maths of one sample. Dai et al. 2017 (offsets), Zhu et al. 2019 (mask); torchvision's semantics.
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

// What has to be done for a sample.
enum SampleKind : int32_t {
  SAMPLE_ZERO,    // no corner in the image: value and gradients are 0
  SAMPLE_INSIDE,  // all four corners in the image
  SAMPLE_EDGE,    // some corners in the image
  SAMPLE_NAN,     // a coordinate is not a number: so are the value and the gradients of the coordinates and the mask
};

// Written without branches, for vectors.
DEFORMC_INLINE int32_t sample_kind(int32_t y, int32_t x, int32_t height, int32_t width, bool nan) {
  const int32_t touches = cell_touches(y, height) & cell_touches(x, width);
  const int32_t inside = cell_inside(y, height) & cell_inside(x, width);
  const int32_t kind = touches ? (inside ? SAMPLE_INSIDE : SAMPLE_EDGE) : SAMPLE_ZERO;
  return nan ? SAMPLE_NAN : kind;
}

// A position of exactly -1 on either axis has a derivative but neither a value nor a share in the gradient of the input.
template <typename A>
DEFORMC_INLINE bool sample_counts(int32_t y, int32_t x, A fraction_y, A fraction_x) {
  return !(y == -1 && fraction_y == static_cast<A>(0)) && !(x == -1 && fraction_x == static_cast<A>(0));
}

// Weights of the corners (y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1).
template <typename A>
struct CornerWeights {
  A w00, w01, w10, w11;
};

template <typename A>
DEFORMC_INLINE CornerWeights<A> corner_weights(A fraction_y, A fraction_x) {
  const A rest_y = static_cast<A>(1) - fraction_y;
  const A rest_x = static_cast<A>(1) - fraction_x;
  CornerWeights<A> weights;
  weights.w00 = rest_y * rest_x;
  weights.w01 = rest_y * fraction_x;
  weights.w10 = fraction_y * rest_x;
  weights.w11 = fraction_y * fraction_x;
  return weights;
}

// Sums over the channels of (gradient of the sampled value) * (value at a corner), one sum for each corner.
template <typename A>
struct CornerSums {
  A s00, s01, s10, s11;
};

// Gradients of a sample's mask and coordinates; both are linear in the corners, so the sums over the channels are enough.
template <typename A>
struct SampleGradients {
  A y, x, mask;
};

template <typename A>
DEFORMC_INLINE SampleGradients<A> sample_gradients(CornerSums<A> sums, A fraction_y, A fraction_x, A mask) {
  const CornerWeights<A> w = corner_weights(fraction_y, fraction_x);
  const A one = static_cast<A>(1);
  SampleGradients<A> gradients;
  gradients.mask = w.w00 * sums.s00 + w.w01 * sums.s01 + w.w10 * sums.s10 + w.w11 * sums.s11;
  gradients.y = mask * ((one - fraction_x) * (sums.s10 - sums.s00) + fraction_x * (sums.s11 - sums.s01));
  gradients.x = mask * ((one - fraction_y) * (sums.s01 - sums.s00) + fraction_y * (sums.s11 - sums.s10));
  return gradients;
}

}  // namespace deformc
