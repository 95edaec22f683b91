// What the Metal kernels share: reading and adding to four channels of an image at a time. In Metal Shading Language.
#pragma once

#include "common/bilinear.h"

// Makes a kernel of a template's instance, by the name that the host asks for. tests/sim has its own.
#if !defined(DEFORMC_KERNEL)
#define DEFORMC_KERNEL(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#endif

namespace deformc {

constant constexpr uint SIMDGROUP = 32;

// Channels of an image in memory, first of four: strides are in elements.
template <typename T>
struct QuadImage {
  device const T* data;
  int64_t row_stride, column_stride, channel_stride;
};

// The corners (y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1) of four channels; 0 where there is none.
struct QuadCorners {
  float4 v00, v01, v10, v11;
};

// The first `count` of four channels. VECTOR: all four at once, beside each other and aligned.
template <typename T, bool VECTOR>
inline float4 load_quad(device const T* pixel, int64_t channel_stride, int32_t count) {
  float4 quad = float4(0.0f);
  if (VECTOR) {
    quad = float4(*reinterpret_cast<device const vec<T, 4>*>(pixel));
  } else {
    for (int32_t j = 0; j < count; ++j) quad[j] = static_cast<float>(pixel[j * channel_stride]);
  }
  return quad;
}

template <typename T, bool VECTOR>
inline QuadCorners load_corners(QuadImage<T> image, int32_t y, int32_t x, int32_t corners, int32_t count) {
  const float4 zero = float4(0.0f);
  const int64_t stride = image.channel_stride, first = y * image.row_stride + x * image.column_stride;
  QuadCorners quads;
  quads.v00 = corners & CORNER_00 ? load_quad<T, VECTOR>(image.data + first, stride, count) : zero;
  quads.v01 = corners & CORNER_01 ? load_quad<T, VECTOR>(image.data + first + image.column_stride, stride, count) : zero;
  quads.v10 = corners & CORNER_10 ? load_quad<T, VECTOR>(image.data + first + image.row_stride, stride, count) : zero;
  quads.v11 = corners & CORNER_11 ? load_quad<T, VECTOR>(image.data + first + image.row_stride + image.column_stride, stride, count) : zero;
  return quads;
}

inline float4 interpolate(QuadCorners quads, CornerWeights<float> w) {
  return w.w00 * quads.v00 + w.w01 * quads.v01 + w.w10 * quads.v10 + w.w11 * quads.v11;
}

inline CornerSums<float> corner_sums(QuadCorners quads, float4 gradient) {
  CornerSums<float> sums;
  sums.s00 = dot(gradient, quads.v00);
  sums.s01 = dot(gradient, quads.v01);
  sums.s10 = dot(gradient, quads.v10);
  sums.s11 = dot(gradient, quads.v11);
  return sums;
}

// Adds up `lanes` neighbouring lanes, a power of two; each has the sum.
inline float sum_of_lanes(float value, uint lanes) {
  for (uint step = lanes / 2; step > 0; step /= 2) value += simd_shuffle_xor(value, static_cast<ushort>(step));
  return value;
}

inline CornerSums<float> sum_of_lanes(CornerSums<float> sums, uint lanes) {
  sums.s00 = sum_of_lanes(sums.s00, lanes);
  sums.s01 = sum_of_lanes(sums.s01, lanes);
  sums.s10 = sum_of_lanes(sums.s10, lanes);
  sums.s11 = sum_of_lanes(sums.s11, lanes);
  return sums;
}

// ---- the gradient of an image, in float: first of four channels ------------------------------------------------------------------------

struct GradientImage {
  device float* data;
  int64_t row_stride, column_stride, channel_stride;
};

inline void add_atomically(device float* pixel, int64_t channel_stride, int32_t count, float4 quad) {
  for (int32_t j = 0; j < count; ++j)
    atomic_fetch_add_explicit(reinterpret_cast<device atomic_float*>(pixel + j * channel_stride), quad[j], memory_order_relaxed);
}

// Adds the gradient of a sampled value to its corners; other threads may do so at the same time.
inline void scatter_atomically(GradientImage image, int32_t y, int32_t x, int32_t corners, CornerWeights<float> w, float factor, float4 gradient,
                               int32_t count) {
  const int64_t stride = image.channel_stride, first = y * image.row_stride + x * image.column_stride;
  if (corners & CORNER_00) add_atomically(image.data + first, stride, count, factor * w.w00 * gradient);
  if (corners & CORNER_01) add_atomically(image.data + first + image.column_stride, stride, count, factor * w.w01 * gradient);
  if (corners & CORNER_10) add_atomically(image.data + first + image.row_stride, stride, count, factor * w.w10 * gradient);
  if (corners & CORNER_11)
    add_atomically(image.data + first + image.row_stride + image.column_stride, stride, count, factor * w.w11 * gradient);
}

inline void add_to_pixel(device float* pixel, int64_t channel_stride, int32_t count, float4 quad) {
  for (int32_t j = 0; j < count; ++j) pixel[j * channel_stride] += quad[j];
}

// The same for the pixels [first_pixel, end_pixel), counted along the rows from `start` at (0, 0), that nobody else adds to.
inline void scatter_to_owned(GradientImage image, int32_t y, int32_t x, int32_t corners, CornerWeights<float> w, float factor, float4 gradient,
                             int32_t count, int64_t start, int32_t width, int64_t first_pixel, int64_t end_pixel) {
  const int64_t pixel = start + static_cast<int64_t>(y) * width + x, stride = image.channel_stride;
  const int64_t first = y * image.row_stride + x * image.column_stride;
  const int64_t below = pixel + width;
  if ((corners & CORNER_00) && pixel >= first_pixel && pixel < end_pixel)
    add_to_pixel(image.data + first, stride, count, factor * w.w00 * gradient);
  if ((corners & CORNER_01) && pixel + 1 >= first_pixel && pixel + 1 < end_pixel)
    add_to_pixel(image.data + first + image.column_stride, stride, count, factor * w.w01 * gradient);
  if ((corners & CORNER_10) && below >= first_pixel && below < end_pixel)
    add_to_pixel(image.data + first + image.row_stride, stride, count, factor * w.w10 * gradient);
  if ((corners & CORNER_11) && below + 1 >= first_pixel && below + 1 < end_pixel)
    add_to_pixel(image.data + first + image.row_stride + image.column_stride, stride, count, factor * w.w11 * gradient);
}

// Whether a sample adds to one of those pixels.
inline bool reaches_pixels(int32_t y, int32_t x, int32_t corners, int64_t start, int32_t width, int64_t first_pixel, int64_t end_pixel) {
  const int64_t pixel = start + static_cast<int64_t>(y) * width + x, below = pixel + width;
  return ((corners & CORNER_00) && pixel >= first_pixel && pixel < end_pixel) ||
         ((corners & CORNER_01) && pixel + 1 >= first_pixel && pixel + 1 < end_pixel) ||
         ((corners & CORNER_10) && below >= first_pixel && below < end_pixel) ||
         ((corners & CORNER_11) && below + 1 >= first_pixel && below + 1 < end_pixel);
}

}  // namespace deformc
