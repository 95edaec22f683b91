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

}  // namespace deformc
