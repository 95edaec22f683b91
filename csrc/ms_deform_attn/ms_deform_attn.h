// ms_deform_attn: sizes, and the position of one point. Zhu et al. 2021 (Deformable DETR); "discrete" is RT-DETRv2's.
//
// Coordinate spaces: sampling locations are (x, y) in [0, 1] of a level's image, whose outer edges are 0 and 1; positions are pixels of that
// level, pixel centres at the integers. So position = location * size - 0.5.
#pragma once

#include "common/bilinear.h"

namespace deformc {

struct MsDeformAttnParams {
  int64_t batch;
  int64_t pixels;    // S, of all levels
  int64_t heads;     // M
  int64_t head_dim;  // D
  int64_t queries;   // Q
  int64_t points;    // T, of all levels
  bool discrete;
};

struct AttnLevel {
  int64_t start;          // its first pixel among the S
  int32_t height, width;  // 1 to 2^30 - 1
  int64_t first_point, points;
};

template <typename A>
DEFORMC_INLINE A position_of(A location, int32_t size) {
  return location * static_cast<A>(size) - static_cast<A>(0.5);
}

// Discrete mode: the pixel under the location, or at the edge nearest to it. Clamped before it becomes an integer; not a number gives 0.
template <typename A>
DEFORMC_INLINE int32_t pixel_of(A location, int32_t size) {
  const A position = location * static_cast<A>(size) + static_cast<A>(0.5);
  const A last = static_cast<A>(size - 1);
  const A above = position > static_cast<A>(0) ? position : static_cast<A>(0);
  return static_cast<int32_t>(above < last ? above : last);
}

// ---- for GPUs -------------------------------------------------------------------------------------------------------------------------

// Strides in elements; the last dimension of sampling_locations, (x, y), is `axis`.
struct MsDeformAttnStrides {
  int64_t value_n, value_s, value_m, value_d;
  int64_t locations_n, locations_q, locations_m, locations_t, locations_axis;
  int64_t weights_n, weights_q, weights_m, weights_t;
  int64_t grad_n, grad_q, grad_c;  // of grad_output [N, Q, M*D]
  int64_t shapes_l, shapes_axis, starts_l;
};

struct MsDeformAttnDeviceParams {
  MsDeformAttnParams p;
  MsDeformAttnStrides strides;
  int32_t levels;
  bool levels_in_tensors;  // spatial_shapes and level_start_index are read by the kernel
  bool need_value, need_locations, need_weights;
  int32_t lanes;        // of a point: a power of two
  int32_t band_pixels;  // of value, whose gradient one simdgroup sums in the deterministic way
};

#define DEFORMC_MAX_LEVELS 120  // 4 KiB of them are given to a kernel at once

#define DEFORMC_ATTN_THREADS 128

// One point of a level. A level without pixels stands for one that could not be read: its points are not numbers.
DEFORMC_INLINE Sample<float> locate_point(float location_x, float location_y, AttnLevel level, bool discrete) {
  if (!discrete || level.height == 0) {
    const float unreadable = level.height == 0 ? DEFORMC_NAN : 0.0f;
    return locate_sample(0, 0, position_of(location_y, level.height) + unreadable, position_of(location_x, level.width) + unreadable, level.height,
                         level.width);
  }
  const bool nan = is_nan(location_y) | is_nan(location_x);
  Sample<float> s = locate_sample(pixel_of(location_y, level.height), pixel_of(location_x, level.width), nan ? DEFORMC_NAN : 0.0f, 0.0f,
                                  level.height, level.width);
  s.corners = s.corners & CORNER_00;
  return s;
}

// In locations and weight: a step of 1 in a location is one of `size` pixels.
DEFORMC_INLINE SampleGradients<float> point_gradients(Sample<float> s, CornerSums<float> sums, float weight, AttnLevel level, bool discrete) {
  SampleGradients<float> gradients = gradients_of(s, sums, weight);
  const bool moves = !discrete & (s.corners != 0);
  gradients.y = moves ? gradients.y * static_cast<float>(level.height) : (s.nan ? s.fraction_y : 0.0f);
  gradients.x = moves ? gradients.x * static_cast<float>(level.width) : (s.nan ? s.fraction_x : 0.0f);
  return gradients;
}

}  // namespace deformc
