// ms_deform_attn, host side of every device: the argument check, and what the kernels are chosen by.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "common/host.h"
#include "ms_deform_attn/ms_deform_attn.h"

namespace deformc {

using Sizes = std::vector<int64_t>;

constexpr int64_t LEVEL_SIZE_LIMIT = int64_t{1} << 30;

struct PairsText {  // [H0, W0, H1, W1, ...] as [[H0, W0], [H1, W1], ...]
  const Sizes& values;
};
inline std::ostream& operator<<(std::ostream& out, const PairsText& text) {
  out << "[";
  for (size_t i = 0; i + 1 < text.values.size(); i += 2) out << (i ? ", [" : "[") << text.values[i] << ", " << text.values[i + 1] << "]";
  return out << "]";
}

// The shapes of the levels as they were given: as a list, or as the tensors of the classic form.
struct LevelTensors {
  Tensor spatial_shapes;     // [L, 2], (H, W)
  Tensor level_start_index;  // [L]
};

struct MsDeformAttnArguments {
  const char* op;
  const Tensor &value, &sampling_locations, &attention_weights;
  const Sizes& num_points;
  const std::string& mode;
};

// The one check of every device and both directions, but for the sizes of the levels. deformc/ops/ms_deform_attn.py says the same of fake
// tensors, in the same words and order. `list` is null for the classic form.
inline MsDeformAttnParams check_arguments(const MsDeformAttnArguments& a, const Sizes* list, const LevelTensors* tensors) {
  const char* const op = a.op;
  check_rank(op, "value", a.value, 4, "[N, S, M, D]");
  check_rank(op, "sampling_locations", a.sampling_locations, 5, "[N, Q, M, T, 2]");
  check_rank(op, "attention_weights", a.attention_weights, 4, "[N, Q, M, T]");
  if (tensors) {
    check_rank(op, "spatial_shapes", tensors->spatial_shapes, 2, "[L, 2]");
    check_rank(op, "level_start_index", tensors->level_start_index, 1, "[L]");
  }

  check_data_dtype(op, "value", a.value);
  check_coordinate_dtype(op, "sampling_locations", a.sampling_locations, "value", a.value);
  check_coordinate_dtype(op, "attention_weights", a.attention_weights, "value", a.value);
  if (tensors) {
    check_index_dtype(op, "spatial_shapes", tensors->spatial_shapes);
    check_index_dtype(op, "level_start_index", tensors->level_start_index);
  }

  check_same_device(op, "sampling_locations", a.sampling_locations, "value", a.value);
  check_same_device(op, "attention_weights", a.attention_weights, "value", a.value);
  if (tensors) {
    check_same_device(op, "spatial_shapes", tensors->spatial_shapes, "value", a.value);
    check_same_device(op, "level_start_index", tensors->level_start_index, "value", a.value);
  }

  check(a.mode == "bilinear" || a.mode == "discrete", op, "mode must be \"bilinear\" or \"discrete\", got \"", a.mode, "\"");

  int64_t levels = 0;
  if (list) {
    check(!list->empty(), op, "spatial_shapes must have H and W of at least one level, got []");
    check(list->size() % 2 == 0, op, "spatial_shapes must have H and W of each level, got ", list->size(), " numbers");
    levels = static_cast<int64_t>(list->size() / 2);
  } else {
    levels = tensors->spatial_shapes.size(0);
    check(levels > 0, op, "spatial_shapes must have shape [L, 2] with at least one level, got ", ShapeText{tensors->spatial_shapes});
    check_shape<2>(op, "spatial_shapes", tensors->spatial_shapes, "[L, 2]", {levels, 2});
    check_shape<1>(op, "level_start_index", tensors->level_start_index, "[L]", {levels});
  }
  check(static_cast<int64_t>(a.num_points.size()) == levels, op, "num_points must have one count for each of the L = ", levels,
        " levels, got ", a.num_points);
  int64_t points = 0;
  for (const int64_t count : a.num_points) {
    check(count >= 0, op, "num_points must be at least 0, got ", a.num_points);
    points += count;
  }
  if (list) {
    for (const int64_t size : *list) check(size >= 1, op, "spatial_shapes must be at least 1, got ", PairsText{*list});
    for (const int64_t size : *list) check(size < LEVEL_SIZE_LIMIT, op, "spatial_shapes must be below 2^30, got ", PairsText{*list});
  }

  MsDeformAttnParams p;
  p.batch = a.value.size(0);
  p.pixels = a.value.size(1);
  p.heads = a.value.size(2);
  p.head_dim = a.value.size(3);
  p.queries = a.sampling_locations.size(1);
  p.points = points;
  p.discrete = a.mode == "discrete";
  check(p.heads > 0 && p.head_dim > 0, op, "value must have at least one head and one channel, got shape ", ShapeText{a.value});
  check_shape<5>(op, "sampling_locations", a.sampling_locations, "[N, Q, M, T, 2]", {p.batch, p.queries, p.heads, points, 2});
  check_shape<4>(op, "attention_weights", a.attention_weights, "[N, Q, M, T]", {p.batch, p.queries, p.heads, points});
  if (list) {
    int64_t sum = 0;
    for (size_t i = 0; i < list->size(); i += 2) {
      const int64_t area = (*list)[i] * (*list)[i + 1];  // below 2^60
      sum = sum > INT64_MAX - area ? INT64_MAX : sum + area;
    }
    check(sum == p.pixels, op, "value must have shape [N, S, M, D] with S = ", sum, ", the sum of H*W over spatial_shapes, got ",
          ShapeText{a.value});
  }
  return p;
}

inline void check_grad_output(const MsDeformAttnArguments& a, const MsDeformAttnParams& p, const Tensor& grad_output) {
  check_same_dtype(a.op, "grad_output", grad_output, "value", a.value);
  check_same_device(a.op, "grad_output", grad_output, "value", a.value);
  check_shape<3>(a.op, "grad_output", grad_output, "[N, Q, M*D]", {p.batch, p.queries, p.heads * p.head_dim});
}

// Levels that follow each other, of checked shapes.
inline std::vector<AttnLevel> levels_of(const Sizes& shapes, const Sizes& num_points) {
  std::vector<AttnLevel> levels;
  int64_t start = 0, first_point = 0;
  for (size_t i = 0; i < num_points.size(); ++i) {
    const int64_t height = shapes[2 * i], width = shapes[2 * i + 1];
    levels.push_back({start, static_cast<int32_t>(height), static_cast<int32_t>(width), first_point, num_points[i]});
    start += height * width;
    first_point += num_points[i];
  }
  return levels;
}

// The levels of the classic form, read from its tensors, which must be in the host's memory. Any levels inside the value are right, also such as overlap.
inline std::vector<AttnLevel> read_levels(const char* op, const LevelTensors& tensors, const Sizes& num_points, int64_t pixels) {
  Sizes shapes, starts;
  const int64_t* const sizes = static_cast<const int64_t*>(tensors.spatial_shapes.const_data_ptr());
  const int64_t* const start = static_cast<const int64_t*>(tensors.level_start_index.const_data_ptr());
  for (size_t i = 0; i < num_points.size(); ++i) {
    const int64_t level = static_cast<int64_t>(i);
    for (const int64_t axis : {0, 1})
      shapes.push_back(sizes[level * tensors.spatial_shapes.stride(0) + axis * tensors.spatial_shapes.stride(1)]);
    starts.push_back(start[level * tensors.level_start_index.stride(0)]);
  }
  for (const int64_t size : shapes) check(size >= 1, op, "spatial_shapes must be at least 1, got ", PairsText{shapes});
  for (const int64_t size : shapes) check(size < LEVEL_SIZE_LIMIT, op, "spatial_shapes must be below 2^30, got ", PairsText{shapes});
  std::vector<AttnLevel> levels = levels_of(shapes, num_points);
  for (size_t i = 0; i < levels.size(); ++i) {
    // Sizes are below 2^30, so their product fits.
    const int64_t area = int64_t{levels[i].height} * levels[i].width;
    check(starts[i] >= 0 && starts[i] <= pixels - area, op, "level_start_index must keep every level inside the S = ", pixels,
          " pixels of value, got ", starts, " with spatial_shapes ", PairsText{shapes});
    levels[i].start = starts[i];
  }
  return levels;
}

}  // namespace deformc
