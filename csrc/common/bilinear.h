// Bilinear sampling as deformable operators define it. Coordinate space: pixels, pixel centres at the integers.
//
// A position is split into the cell (the pixel at or before it) and the fraction within that cell. The position comes as an integer
// base and a real offset, and only the offset is split: base + offset in float32 would lose bits of the fraction as the base grows.
#pragma once

#include "common/portable.h"

namespace deformc {

// Cells are clamped to this distance from the base: beyond every image (sizes are below 2^30), and base + cell fits an int.
#define DEFORMC_FAR_CELL 1073741823

// floor(offset) as an integer. Not a number gives some cell: the caller asks for it with is_nan.
template <typename A>
DEFORMC_INLINE int32_t cell_of(A offset_floor) {
  const A far_cell = static_cast<A>(DEFORMC_FAR_CELL - 127);  // representable in float32
  const A above = offset_floor > -far_cell ? offset_floor : -far_cell;
  return static_cast<int32_t>(above < far_cell ? above : far_cell);
}

// Fraction within the cell; 0 for infinite offsets, whose difference would be NaN.
template <typename A>
DEFORMC_INLINE A fraction_of(A offset, A offset_floor) {
  const A fraction = offset - offset_floor;
  return fraction >= static_cast<A>(0) ? fraction : static_cast<A>(0);
}

template <typename A>
DEFORMC_INLINE bool is_nan(A value) {
  return value != value;
}

// Whether a corner of the cell lies in [0, size): the sample can have a value or a derivative. A position of exactly -1 is included: its
// value is 0, but its derivative is taken in the cell [-1, 0] (torchvision's choice).
DEFORMC_INLINE bool cell_touches(int32_t cell, int32_t size) { return (cell >= -1) & (cell < size); }

// Whether both corners of the cell lie in [0, size).
DEFORMC_INLINE bool cell_inside(int32_t cell, int32_t size) { return (cell >= 0) & (cell < size - 1); }

// What has to be done for a sample.
enum SampleKind : int32_t {
  SAMPLE_ZERO,    // no corner in the image: value and gradients are 0
  SAMPLE_INSIDE,  // all four corners in the image
  SAMPLE_EDGE,    // some corners in the image
  SAMPLE_NAN,     // a coordinate is not a number: so are the value and the gradients of the coordinates and the factor
};

// Written without branches, for vectors.
DEFORMC_INLINE int32_t sample_kind(int32_t y, int32_t x, int32_t height, int32_t width, bool nan) {
  const int32_t touches = cell_touches(y, height) & cell_touches(x, width);
  const int32_t inside = cell_inside(y, height) & cell_inside(x, width);
  const int32_t kind = touches ? (inside ? SAMPLE_INSIDE : SAMPLE_EDGE) : SAMPLE_ZERO;
  return nan ? SAMPLE_NAN : kind;
}

// Which corners of the cell lie in the image, as bits in the order of CornerWeights.
enum CornerBits : int32_t { CORNER_00 = 1, CORNER_01 = 2, CORNER_10 = 4, CORNER_11 = 8 };

// Written without branches, for vectors.
DEFORMC_INLINE int32_t corners_in_image(int32_t y, int32_t x, int32_t height, int32_t width) {
  const int32_t top = (y >= 0) & (y < height), bottom = (y >= -1) & (y < height - 1);
  const int32_t left = (x >= 0) & (x < width), right = (x >= -1) & (x < width - 1);
  return (top & left) * CORNER_00 | (top & right) * CORNER_01 | (bottom & left) * CORNER_10 | (bottom & right) * CORNER_11;
}

// A position of exactly -1 on either axis has a derivative but neither a value nor a share in the gradient of the input.
template <typename A>
DEFORMC_INLINE bool sample_counts(int32_t y, int32_t x, A fraction_y, A fraction_x) {
  return !(((y == -1) & (fraction_y == static_cast<A>(0))) | ((x == -1) & (fraction_x == static_cast<A>(0))));
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

// Gradients of a sample's coordinates and of the factor (mask, attention weight) that multiplies it; both are linear in the corners, so the
// sums over the channels are enough.
template <typename A>
struct SampleGradients {
  A y, x, factor;
};

template <typename A>
DEFORMC_INLINE SampleGradients<A> sample_gradients(CornerSums<A> sums, A fraction_y, A fraction_x, A factor) {
  const CornerWeights<A> w = corner_weights(fraction_y, fraction_x);
  const A one = static_cast<A>(1);
  SampleGradients<A> gradients;
  gradients.factor = w.w00 * sums.s00 + w.w01 * sums.s01 + w.w10 * sums.s10 + w.w11 * sums.s11;
  gradients.y = factor * ((one - fraction_x) * (sums.s10 - sums.s00) + fraction_x * (sums.s11 - sums.s01));
  gradients.x = factor * ((one - fraction_y) * (sums.s01 - sums.s00) + fraction_y * (sums.s11 - sums.s10));
  return gradients;
}

// ---- one sample at a time, as the kernels of GPUs work --------------------------------------------------------------------------------

// A position of exactly -1 on either axis has corners but does not count, see sample_counts.
template <typename A>
struct Sample {
  int32_t y, x;  // cell
  A fraction_y, fraction_x;
  int32_t corners;  // CornerBits of those in the image
  bool counts;      // has a value, and a share in the gradient of the image
  bool nan;         // a coordinate is not a number; then no corner is in the image, and the fractions are not numbers
};

// The sample at (base_y + dy, base_x + dx).
template <typename A>
DEFORMC_INLINE Sample<A> locate_sample(int32_t base_y, int32_t base_x, A dy, A dx, int32_t height, int32_t width) {
  const A floor_y = floor(dy), floor_x = floor(dx);
  Sample<A> s;
  s.nan = is_nan(dy) | is_nan(dx);
  s.y = base_y + cell_of(floor_y);
  s.x = base_x + cell_of(floor_x);
  s.fraction_y = s.nan ? dy + dx : fraction_of(dy, floor_y);
  s.fraction_x = s.nan ? dy + dx : fraction_of(dx, floor_x);
  s.corners = s.nan ? 0 : corners_in_image(s.y, s.x, height, width);
  s.counts = !s.nan & (s.corners != 0) & sample_counts(s.y, s.x, s.fraction_y, s.fraction_x);
  return s;
}

// The corners from which the value comes, and to which the gradient of the image goes.
template <typename A>
DEFORMC_INLINE int32_t value_corners(Sample<A> s) {
  return s.counts ? s.corners : 0;
}

// Where no corner is in the image they are 0, even if the factor is infinite.
template <typename A>
DEFORMC_INLINE SampleGradients<A> gradients_of(Sample<A> s, CornerSums<A> sums, A factor) {
  SampleGradients<A> gradients = sample_gradients(sums, s.fraction_y, s.fraction_x, factor);
  const A otherwise = s.nan ? s.fraction_y : static_cast<A>(0);
  gradients.y = s.corners != 0 ? gradients.y : otherwise;
  gradients.x = s.corners != 0 ? gradients.x : otherwise;
  gradients.factor = s.counts ? gradients.factor : otherwise;
  return gradients;
}

}  // namespace deformc
