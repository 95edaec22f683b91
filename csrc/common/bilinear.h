// Bilinear sampling along one axis, as deformable operators define it. Coordinate space: pixels, pixel centres at the integers.
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

}  // namespace deformc
