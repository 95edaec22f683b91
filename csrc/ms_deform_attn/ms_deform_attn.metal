// ms_deform_attn on Apple GPUs. V is the type of the value and of the output, C that of locations and weights. VECTOR: four channels are read
// at once. Everything is computed and summed in float.

#include <metal_stdlib>

#include "common/metal_kernels.h"
#include "ms_deform_attn/ms_deform_attn.h"

using namespace metal;

namespace deformc {
namespace ms_deform_attn {

// What all kernels read.
template <typename V, typename C>
struct AttnInputs {
  device const V* value;         // [N, S, M, D]
  device const C* locations;     // [N, Q, M, T, 2]
  device const C* weights;       // [N, Q, M, T]
  constant AttnLevel* levels;    // [L]; the sizes are not set where they are in tensors
  device const int64_t* shapes;  // [L, 2], of the classic form
  device const int64_t* starts;  // [L]
};

// A level. If tensors do not describe one that lies inside the value, its height is 0.
template <typename V, typename C>
inline AttnLevel level_at(AttnInputs<V, C> in, constant MsDeformAttnDeviceParams& d, int32_t index) {
  AttnLevel level = in.levels[index];
  if (d.levels_in_tensors) {
    const int64_t height = in.shapes[index * d.strides.shapes_l], width = in.shapes[index * d.strides.shapes_l + d.strides.shapes_axis];
    const int64_t start = in.starts[index * d.strides.starts_l];
    const bool sizes = height >= 1 && width >= 1 && height <= DEFORMC_FAR_CELL && width <= DEFORMC_FAR_CELL;
    const bool inside = sizes && start >= 0 && start <= d.p.pixels && height * width <= d.p.pixels - start;
    level.height = inside ? static_cast<int32_t>(height) : 0;
    level.width = inside ? static_cast<int32_t>(width) : 0;
    level.start = inside ? start : 0;
  }
  return level;
}

struct AttnPoint {
  Sample<float> sample;
  float weight;
};

template <typename V, typename C>
inline AttnPoint point_at(AttnInputs<V, C> in, constant MsDeformAttnDeviceParams& d, AttnLevel level, int64_t n, int64_t q, int64_t m, int64_t t) {
  const MsDeformAttnStrides s = d.strides;
  const int64_t at = n * s.locations_n + q * s.locations_q + m * s.locations_m + t * s.locations_t;
  AttnPoint point;
  point.sample = locate_point(static_cast<float>(in.locations[at]), static_cast<float>(in.locations[at + s.locations_axis]), level, d.p.discrete);
  point.weight = static_cast<float>(in.weights[n * s.weights_n + q * s.weights_q + m * s.weights_m + t * s.weights_t]);
  return point;
}

// Four channels of a level, from channel c of head m.
template <typename V, typename C>
inline QuadImage<V> level_image(AttnInputs<V, C> in, constant MsDeformAttnDeviceParams& d, AttnLevel level, int64_t n, int64_t m, int64_t c) {
  const MsDeformAttnStrides s = d.strides;
  QuadImage<V> image;
  image.data = in.value + n * s.value_n + level.start * s.value_s + m * s.value_m + c * s.value_d;
  image.row_stride = level.width * s.value_s;
  image.column_stride = s.value_s;
  image.channel_stride = s.value_d;
  return image;
}

// ---- forward: a thread sums four channels over all points of a query and head ----------------------------------------------------------

template <typename V, typename C, bool VECTOR>
[[kernel]] void attend_points(device const V* value [[buffer(0)]], device const C* locations [[buffer(1)]], device const C* weights [[buffer(2)]],
                              constant AttnLevel* levels [[buffer(3)]], device const int64_t* shapes [[buffer(4)]],
                              device const int64_t* starts [[buffer(5)]], device V* out [[buffer(6)]],  // [N, Q, M*D]
                              constant MsDeformAttnDeviceParams& d [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
                              uint index [[thread_index_in_threadgroup]]) {
  const AttnInputs<V, C> in = {value, locations, weights, levels, shapes, starts};
  const int64_t quads = (d.p.head_dim + 3) / 4, i = static_cast<int64_t>(group.x) * DEFORMC_ATTN_THREADS + index;
  if (i >= d.p.queries * d.p.heads * quads) return;
  const int64_t n = group.y, q = i / quads / d.p.heads, m = i / quads % d.p.heads, c = i % quads * 4;
  const int32_t count = static_cast<int32_t>(min(static_cast<int64_t>(4), d.p.head_dim - c));
  float4 sum = float4(0.0f);
  for (int32_t l = 0; l < d.levels; ++l) {
    const AttnLevel level = level_at(in, d, l);
    const QuadImage<V> image = level_image(in, d, level, n, m, c);
    for (int64_t t = level.first_point; t < level.first_point + level.points; ++t) {
      const AttnPoint point = point_at(in, d, level, n, q, m, t);
      const QuadCorners quads = load_corners<V, VECTOR>(image, point.sample.y, point.sample.x, value_corners(point.sample), count);
      sum += point.weight * interpolate(quads, corner_weights(point.sample.fraction_y, point.sample.fraction_x));
    }
  }
  device V* const pixel = out + ((n * d.p.queries + q) * d.p.heads + m) * d.p.head_dim + c;
  for (int32_t j = 0; j < count; ++j) pixel[j] = static_cast<V>(sum[j]);
}

// ---- backward: `lanes` lanes of a simdgroup share the channels of a point --------------------------------------------------------------

template <typename V, typename C, bool VECTOR>
[[kernel]] void backpropagate_points(
    device const V* value [[buffer(0)]], device const C* locations [[buffer(1)]], device const C* weights [[buffer(2)]],
    constant AttnLevel* levels [[buffer(3)]], device const int64_t* shapes [[buffer(4)]], device const int64_t* starts [[buffer(5)]],
    device const V* grad_output [[buffer(6)]],    // [N, Q, M*D]
    device float* grad_value [[buffer(7)]],       // [N, S, M, D], zeros
    device C* grad_locations [[buffer(8)]],       // [N, Q, M, T, 2]
    device C* grad_weights [[buffer(9)]],         // [N, Q, M, T]
    constant MsDeformAttnDeviceParams& d [[buffer(10)]], uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const AttnInputs<V, C> in = {value, locations, weights, levels, shapes, starts};
  const uint lanes = static_cast<uint>(d.lanes);
  const int64_t head = static_cast<int64_t>(group.x) * (DEFORMC_ATTN_THREADS / SIMDGROUP) + simdgroup, n = group.y;
  const bool exists = head < d.p.queries * d.p.heads;  // no thread leaves: lanes exchange their sums
  const int64_t q = head / d.p.heads, m = head % d.p.heads, quads = (d.p.head_dim + 3) / 4;
  const int64_t at = (n * d.p.queries * d.p.heads + head) * d.p.points;
  for (int32_t l = 0; l < d.levels; ++l) {
    const AttnLevel level = level_at(in, d, l);
    for (int64_t first = 0; first < level.points; first += SIMDGROUP / lanes) {
      const int64_t t = level.first_point + first + lane / lanes;
      const bool active = exists && first + lane / lanes < level.points;
      AttnPoint point;
      CornerSums<float> sums = {0.0f, 0.0f, 0.0f, 0.0f};
      if (active) {
        point = point_at(in, d, level, n, q, m, t);
        const Sample<float> s = point.sample;
        const CornerWeights<float> w = corner_weights(s.fraction_y, s.fraction_x);
        for (int64_t quad = lane % lanes; quad < quads; quad += lanes) {
          const int64_t c = quad * 4;
          const int32_t count = static_cast<int32_t>(min(static_cast<int64_t>(4), d.p.head_dim - c));
          const float4 gradient = load_quad<V, VECTOR>(
              grad_output + n * d.strides.grad_n + q * d.strides.grad_q + (m * d.p.head_dim + c) * d.strides.grad_c, d.strides.grad_c, count);
          if (d.need_locations || d.need_weights) {
            const QuadImage<V> image = level_image(in, d, level, n, m, c);
            const CornerSums<float> more = corner_sums(load_corners<V, VECTOR>(image, s.y, s.x, s.corners, count), gradient);
            sums = {sums.s00 + more.s00, sums.s01 + more.s01, sums.s10 + more.s10, sums.s11 + more.s11};
          }
          if (d.need_value) {
            const int64_t pixel = d.p.heads * d.p.head_dim;
            const GradientImage image = {grad_value + (n * d.p.pixels + level.start) * pixel + m * d.p.head_dim + c, level.width * pixel, pixel, 1};
            scatter_atomically(image, s.y, s.x, value_corners(s), w, point.weight, gradient, count);
          }
        }
      }
      sums = sum_of_lanes(sums, lanes);
      if (active && lane % lanes == 0) {
        const SampleGradients<float> gradients = point_gradients(point.sample, sums, point.weight, level, d.p.discrete);
        if (d.need_locations) {
          grad_locations[2 * (at + t)] = static_cast<C>(gradients.x);
          grad_locations[2 * (at + t) + 1] = static_cast<C>(gradients.y);
        }
        if (d.need_weights) grad_weights[at + t] = static_cast<C>(gradients.factor);
      }
    }
  }
}

// ---- deterministic gradient of the value: a simdgroup owns a band of pixels of a head, and adds what reaches them in the order of the points.
// The lanes look at 32 points at a time; where one reaches the band, they add its channels together.

template <typename V, typename C>
[[kernel]] void gather_grad_value(
    device const V* value [[buffer(0)]], device const C* locations [[buffer(1)]], device const C* weights [[buffer(2)]],
    constant AttnLevel* levels [[buffer(3)]], device const int64_t* shapes [[buffer(4)]], device const int64_t* starts [[buffer(5)]],
    device const V* grad_output [[buffer(6)]],  // [N, Q, M*D]
    device float* grad_value [[buffer(7)]],     // [N, S, M, D], zeros
    constant MsDeformAttnDeviceParams& d [[buffer(8)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_threadgroup]]) {
  const AttnInputs<V, C> in = {value, locations, weights, levels, shapes, starts};
  const int64_t first_pixel = static_cast<int64_t>(group.x) * d.band_pixels, n = group.z, m = group.y;
  const int64_t end_pixel = min(first_pixel + d.band_pixels, d.p.pixels), pixel = d.p.heads * d.p.head_dim;
  for (int32_t l = 0; l < d.levels; ++l) {
    const AttnLevel level = level_at(in, d, l);
    const int64_t area = static_cast<int64_t>(level.height) * level.width;
    if (level.start >= end_pixel || level.start + area <= first_pixel) continue;
    const int64_t points = d.p.queries * level.points;
    for (int64_t first = 0; first < points; first += SIMDGROUP) {
      const int64_t i = first + lane;
      AttnPoint point;
      point.sample = locate_sample(0, 0, 0.0f, 0.0f, 0, 0);
      point.weight = 0.0f;
      if (i < points) point = point_at(in, d, level, n, i / level.points, m, level.first_point + i % level.points);
      const bool reaches =
          reaches_pixels(point.sample.y, point.sample.x, value_corners(point.sample), level.start, level.width, first_pixel, end_pixel);
      if (!simd_any(reaches)) continue;
      for (ushort other = 0; other < SIMDGROUP; ++other) {
        if (simd_broadcast(static_cast<uint>(reaches), other) == 0) continue;
        const int32_t y = simd_broadcast(point.sample.y, other), x = simd_broadcast(point.sample.x, other);
        const int32_t corners = simd_broadcast(point.sample.corners, other);
        const float fraction_y = simd_broadcast(point.sample.fraction_y, other), fraction_x = simd_broadcast(point.sample.fraction_x, other);
        const float weight = simd_broadcast(point.weight, other);
        const CornerWeights<float> w = corner_weights(fraction_y, fraction_x);
        const int64_t q = (first + other) / level.points;
        for (int64_t c = lane * 4; c < d.p.head_dim; c += SIMDGROUP * 4) {
          const int32_t count = static_cast<int32_t>(min(static_cast<int64_t>(4), d.p.head_dim - c));
          const float4 gradient = load_quad<V, false>(
              grad_output + n * d.strides.grad_n + q * d.strides.grad_q + (m * d.p.head_dim + c) * d.strides.grad_c, d.strides.grad_c, count);
          const GradientImage image = {grad_value + (n * d.p.pixels + level.start) * pixel + m * d.p.head_dim + c, level.width * pixel, pixel, 1};
          scatter_to_owned(image, y, x, corners, w, weight, gradient, count, level.start, level.width, first_pixel, end_pixel);
        }
      }
    }
  }
}

#define DEFORMC_ATTN_KERNELS(V, C)                                                                     \
  DEFORMC_KERNEL("attend_points_" #V "_" #C, attend_points<V, C, false>)                               \
  DEFORMC_KERNEL("attend_points_" #V "_" #C "_vector", attend_points<V, C, true>)                      \
  DEFORMC_KERNEL("backpropagate_points_" #V "_" #C, backpropagate_points<V, C, false>)                 \
  DEFORMC_KERNEL("backpropagate_points_" #V "_" #C "_vector", backpropagate_points<V, C, true>)        \
  DEFORMC_KERNEL("gather_grad_value_" #V "_" #C, gather_grad_value<V, C>)

DEFORMC_ATTN_KERNELS(float, float)
DEFORMC_ATTN_KERNELS(half, half)
DEFORMC_ATTN_KERNELS(half, float)
DEFORMC_ATTN_KERNELS(bfloat, bfloat)
DEFORMC_ATTN_KERNELS(bfloat, float)

}  // namespace ms_deform_attn
}  // namespace deformc
