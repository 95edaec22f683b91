// deform_conv2d on Apple GPUs. T is the type of input, weight and output, C that of offset and mask. VECTOR: four channels are read at once.
// Everything is computed and summed in float.
//
// A threadgroup works on a tile of TILE_PIXELS output pixels of one image and multiplies 8x8 matrices of its simdgroups: sampled columns come
// from the threadgroup's memory, the weight, packed by pack_weight, from the device's. No column is ever in the device's memory but in the
// deterministic gradient of the input, a bounded number of them at a time.

#include <metal_stdlib>

#include "common/metal_kernels.h"
#include "deform_conv2d/deform_conv2d.h"

using namespace metal;

namespace deformc {
namespace deform_conv2d {

constant constexpr int TILE_PIXELS = 32;
constant constexpr int TILE_COLUMNS = 32;  // sampled at a time
constant constexpr int TILE_OUTPUTS = 128;  // 32 for each simdgroup
constant constexpr int THREADS = 128;
constant constexpr int BLOCKS = 4;           // a simdgroup's 32x32 results are 4x4 matrices
constant constexpr int COLUMN_STRIDE = 36;   // rows of the tiles in memory; not a multiple of 32, so that they lie in different banks
constant constexpr int WIDE_STRIDE = 132;

// What all kernels read.
template <typename T, typename C>
struct ConvInputs {
  device const T* input;   // [N, C, H, W]
  device const C* offset;  // [N, 2*G*Kh*Kw, Ho, Wo]
  device const C* mask;    // [N, G*Kh*Kw, Ho, Wo], or anything
};

struct TapSample {
  Sample<float> sample;
  float mask;
};

inline int64_t at(DeformConv2dStrides s, int64_t n, int64_t c, int64_t y, int64_t x) { return n * s.n + c * s.c + y * s.y + x * s.x; }

template <typename T, typename C>
inline TapSample tap_sample(ConvInputs<T, C> in, constant DeformConv2dDeviceParams& d, int64_t n, int32_t pixel, int32_t tap, int64_t offset_group) {
  const int32_t oy = pixel / d.p.out_w, ox = pixel % d.p.out_w;
  const int64_t channel = offset_group * d.p.kernel_h * d.p.kernel_w + tap;
  const float dy = static_cast<float>(in.offset[at(d.offset, n, 2 * channel, oy, ox)]);
  const float dx = static_cast<float>(in.offset[at(d.offset, n, 2 * channel + 1, oy, ox)]);
  TapSample tap_sample;
  tap_sample.sample = locate_tap(d.p, oy, ox, tap, dy, dx);
  tap_sample.mask = d.has_mask ? static_cast<float>(in.mask[at(d.mask, n, channel, oy, ox)]) : 1.0f;
  return tap_sample;
}

template <typename T, typename C>
inline QuadImage<T> image_at(ConvInputs<T, C> in, constant DeformConv2dDeviceParams& d, int64_t n, int64_t channel) {
  QuadImage<T> image;
  image.data = in.input + at(d.input, n, channel, 0, 0);
  image.row_stride = d.input.y;
  image.column_stride = d.input.x;
  image.channel_stride = d.input.c;
  return image;
}

// Which pixel and quad of a tile the threads take in turn: neighbours read neighbouring channels where these lie beside each other in memory,
// else neighbouring pixels.
template <bool VECTOR>
inline int pixel_of_unit(int unit, int quads) {
  return VECTOR ? unit / quads : unit % TILE_PIXELS;
}
template <bool VECTOR>
inline int quad_of_unit(int unit, int quads) {
  return VECTOR ? unit % quads : unit / TILE_PIXELS;
}

// Samples columns [first_column, first_column + TILE_COLUMNS) of a group for the tile's pixels, into [TILE_PIXELS][COLUMN_STRIDE].
template <typename T, typename C, bool VECTOR>
inline void sample_columns(ConvInputs<T, C> in, constant DeformConv2dDeviceParams& d, int64_t n, int64_t group, int32_t first_pixel,
                           int32_t first_column, uint index, threadgroup float* columns) {
  const int quads = TILE_COLUMNS / 4;
  for (int unit = static_cast<int>(index); unit < TILE_PIXELS * quads; unit += THREADS) {
    const int row = pixel_of_unit<VECTOR>(unit, quads), quad = quad_of_unit<VECTOR>(unit, quads);
    const int32_t pixel = first_pixel + row, column = first_column + 4 * quad;
    float4 value = float4(0.0f);
    if (pixel < d.p.out_h * d.p.out_w && column < d.columns) {
      const ColumnQuad q = quad_at(d.p, d.segment, d.segment_columns, group, column);
      const TapSample t = tap_sample(in, d, n, pixel, q.tap, q.offset_group);
      const Sample<float> s = t.sample;
      const QuadCorners corners = load_corners<T, VECTOR>(image_at(in, d, n, q.channel), s.y, s.x, value_corners(s), q.count);
      value = t.mask * interpolate(corners, corner_weights(s.fraction_y, s.fraction_x));
    }
    for (int j = 0; j < 4; ++j) columns[row * COLUMN_STRIDE + 4 * quad + j] = value[j];
  }
}

// Copies outputs [first_output, first_output + outputs) of the gradient, of a group and the tile's pixels, into [TILE_PIXELS][stride].
template <typename T>
inline void load_gradients(device const T* grad_output, constant DeformConv2dDeviceParams& d, int64_t n, int64_t group, int32_t first_pixel,
                           int32_t first_output, int outputs, uint index, threadgroup float* gradients, int stride) {
  const int32_t group_outputs = static_cast<int32_t>(d.p.out_channels / d.p.groups);
  for (int unit = static_cast<int>(index); unit < TILE_PIXELS * outputs; unit += THREADS) {
    const int row = unit % TILE_PIXELS, o = unit / TILE_PIXELS;
    const int32_t pixel = first_pixel + row, output = first_output + o;
    const bool exists = pixel < d.p.out_h * d.p.out_w && output < group_outputs;
    gradients[row * stride + o] =
        exists ? static_cast<float>(grad_output[at(d.output, n, group * group_outputs + output, pixel / d.p.out_w, pixel % d.p.out_w)]) : 0.0f;
  }
}

// ---- the weight as a matrix of floats for each group, [packed_columns, packed_outputs] -------------------------------------------------

template <typename T>
[[kernel]] void pack_weight(device const T* weight [[buffer(0)]],  // [O, C/groups, Kh, Kw]
                            device float* packed [[buffer(1)]], constant DeformConv2dDeviceParams& d [[buffer(2)]],
                            uint3 position [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
  const int64_t element = static_cast<int64_t>(position.x) * THREADS + index;
  if (element >= static_cast<int64_t>(d.packed_columns) * d.packed_outputs) return;
  const int32_t column = static_cast<int32_t>(element / d.packed_outputs), output = static_cast<int32_t>(element % d.packed_outputs);
  const int64_t group = position.y, group_outputs = d.p.out_channels / d.p.groups;
  float value = 0.0f;
  if (column < d.columns && output < group_outputs) {
    const ColumnQuad q = quad_at(d.p, d.segment, d.segment_columns, group, column - column % 4);
    const int64_t channel = q.channel - group * (d.p.in_channels / d.p.groups) + column % 4;
    if (column % 4 < q.count)
      value = static_cast<float>(weight[(group * group_outputs + output) * d.weight_o + channel * d.weight_c + q.tap / d.p.kernel_w * d.weight_y +
                                        q.tap % d.p.kernel_w * d.weight_x]);
  }
  packed[group * d.packed_columns * d.packed_outputs + element] = value;
}

// ---- forward --------------------------------------------------------------------------------------------------------------------------

template <typename T, typename C, bool VECTOR>
[[kernel]] void convolve_tile(device const T* input [[buffer(0)]], device const C* offset [[buffer(1)]], device const C* mask [[buffer(2)]],
                              device const float* packed [[buffer(3)]], device const T* bias [[buffer(4)]],  // [O], or anything
                              device T* out [[buffer(5)]],                                                   // [N, O, Ho, Wo]
                              constant DeformConv2dDeviceParams& d [[buffer(6)]], uint3 position [[threadgroup_position_in_grid]],
                              uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float columns[TILE_PIXELS * COLUMN_STRIDE];
  const ConvInputs<T, C> in = {input, offset, mask};
  const int32_t group_outputs = static_cast<int32_t>(d.p.out_channels / d.p.groups);
  const int32_t output_tiles = (group_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, first_pixel = static_cast<int32_t>(position.x) * TILE_PIXELS;
  const int64_t n = position.z, group = position.y / output_tiles;
  const int32_t first_output = static_cast<int32_t>(position.y % output_tiles) * TILE_OUTPUTS + static_cast<int32_t>(simdgroup) * 32;
  const device float* const weights = packed + group * d.packed_columns * d.packed_outputs + first_output;

  simdgroup_float8x8 sums[BLOCKS][BLOCKS];  // [pixels][outputs]
  for (int i = 0; i < BLOCKS; ++i)
    for (int j = 0; j < BLOCKS; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int32_t first = 0; first < d.columns; first += TILE_COLUMNS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sample_columns<T, C, VECTOR>(in, d, n, group, first_pixel, first, index, columns);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < TILE_COLUMNS && first + k < d.columns; k += 8) {
      if (first_output >= d.packed_outputs) break;
      simdgroup_float8x8 left[BLOCKS], right;
      for (int i = 0; i < BLOCKS; ++i) simdgroup_load(left[i], columns + i * 8 * COLUMN_STRIDE + k, COLUMN_STRIDE);
      for (int j = 0; j < BLOCKS; ++j) {
        if (first_output + 8 * j >= d.packed_outputs) break;
        simdgroup_load(right, weights + static_cast<int64_t>(first + k) * d.packed_outputs + 8 * j, d.packed_outputs);
        for (int i = 0; i < BLOCKS; ++i) simdgroup_multiply_accumulate(sums[i][j], left[i], right, sums[i][j]);
      }
    }
  }

  // Each simdgroup writes its results eight outputs at a time, through a part of the memory of its own: a lane has a pixel.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* const strip = columns + simdgroup * TILE_PIXELS * 8;
  const int32_t pixel = first_pixel + static_cast<int32_t>(lane);
  for (int j = 0; j < BLOCKS; ++j) {
    for (int i = 0; i < BLOCKS; ++i) simdgroup_store(sums[i][j], strip + i * 64, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < 8; ++k) {
      const int32_t output = first_output + 8 * j + k;
      if (pixel < d.p.out_h * d.p.out_w && output < group_outputs) {
        const int64_t channel = group * group_outputs + output;
        const float start = d.has_bias ? static_cast<float>(bias[channel * d.bias_o]) : 0.0f;
        out[at(d.output, n, channel, pixel / d.p.out_w, pixel % d.p.out_w)] = static_cast<T>(strip[lane * 8 + k] + start);
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// ---- backward: input, offset and mask -------------------------------------------------------------------------------------------------

// A threadgroup has all columns of its pixels, 128 at a time, so it alone adds to their offsets and masks.
template <typename T, typename C, bool VECTOR>
[[kernel]] void backpropagate_tile(
    device const T* input [[buffer(0)]], device const C* offset [[buffer(1)]], device const C* mask [[buffer(2)]],
    device const float* packed [[buffer(3)]], device const T* grad_output [[buffer(4)]],  // [N, O, Ho, Wo]
    device float* grad_input [[buffer(5)]],    // [N, C, H, W], zeros
    device float* grad_offset [[buffer(6)]],   // [N, 2*G*Kh*Kw, Ho, Wo], zeros
    device float* grad_mask [[buffer(7)]],     // [N, G*Kh*Kw, Ho, Wo], zeros
    device float* grad_columns [[buffer(8)]],  // [N, tiles*TILE_PIXELS, groups*packed_columns]
    constant DeformConv2dDeviceParams& d [[buffer(9)]], uint3 position [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float gradients[TILE_PIXELS * COLUMN_STRIDE];  // of the output, 32 channels at a time
  threadgroup float columns[TILE_PIXELS * WIDE_STRIDE];      // gradients of 128 columns, then of the samples' positions and masks
  const ConvInputs<T, C> in = {input, offset, mask};
  const int32_t group_outputs = static_cast<int32_t>(d.p.out_channels / d.p.groups), pixels = d.p.out_h * d.p.out_w;
  const int32_t tile = static_cast<int32_t>(position.x), first_pixel = (d.first_tile + tile) * TILE_PIXELS;
  const int64_t n = position.z, taps = d.p.kernel_h * d.p.kernel_w;
  const int wide = 128, quads = wide / 4;
  for (int64_t group = 0; group < d.p.groups; ++group) {
    for (int32_t first = 0; first < d.columns; first += wide) {
      const int32_t own_column = first + static_cast<int32_t>(simdgroup) * 32;
      simdgroup_float8x8 sums[BLOCKS][BLOCKS];  // [pixels][columns]
      for (int i = 0; i < BLOCKS; ++i)
        for (int j = 0; j < BLOCKS; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      for (int32_t o = 0; o < group_outputs; o += 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        load_gradients(grad_output, d, n, group, first_pixel, o, 32, index, gradients, COLUMN_STRIDE);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < 32 && o + k < d.packed_outputs && own_column < d.columns; k += 8) {
          simdgroup_float8x8 left[BLOCKS], right;
          for (int i = 0; i < BLOCKS; ++i) simdgroup_load(left[i], gradients + i * 8 * COLUMN_STRIDE + k, COLUMN_STRIDE);
          for (int j = 0; j < BLOCKS; ++j) {
            if (own_column + 8 * j >= d.columns) break;
            const device float* const weights =
                packed + (group * d.packed_columns + own_column + 8 * j) * static_cast<int64_t>(d.packed_outputs) + o + k;
            simdgroup_load(right, weights, d.packed_outputs, ulong2(0, 0), true);
            for (int i = 0; i < BLOCKS; ++i) simdgroup_multiply_accumulate(sums[i][j], left[i], right, sums[i][j]);
          }
        }
      }
      for (int i = 0; i < BLOCKS; ++i)
        for (int j = 0; j < BLOCKS; ++j)
          simdgroup_store(sums[i][j], columns + i * 8 * WIDE_STRIDE + static_cast<int>(simdgroup) * 32 + j * 8, WIDE_STRIDE);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      for (int unit = static_cast<int>(index); unit < TILE_PIXELS * quads; unit += THREADS) {
        const int row = pixel_of_unit<VECTOR>(unit, quads), quad = quad_of_unit<VECTOR>(unit, quads);
        const int32_t pixel = first_pixel + row, column = first + 4 * quad;
        threadgroup float* const own = columns + row * WIDE_STRIDE + 4 * quad;
        if (pixel >= pixels || column >= d.columns) continue;
        const float4 gradient = float4(own[0], own[1], own[2], own[3]);
        const ColumnQuad q = quad_at(d.p, d.segment, d.segment_columns, group, column);
        if (d.store_columns) {
          const int64_t all_columns = d.p.groups * d.packed_columns;
          device float* const stored = grad_columns + ((n * d.tiles + tile) * TILE_PIXELS + row) * all_columns + group * d.packed_columns + column;
          for (int j = 0; j < 4; ++j) stored[j] = gradient[j];
        }
        const TapSample t = tap_sample(in, d, n, pixel, q.tap, q.offset_group);
        const Sample<float> s = t.sample;
        if (d.need_input) {
          const GradientImage image = {grad_input + at(d.grad_input, n, q.channel, 0, 0), d.grad_input.y, d.grad_input.x, d.grad_input.c};
          scatter_atomically(image, s.y, s.x, value_corners(s), corner_weights(s.fraction_y, s.fraction_x), t.mask, gradient, q.count);
        }
        if (d.need_offset || d.need_mask) {
          const QuadCorners corners = load_corners<T, VECTOR>(image_at(in, d, n, q.channel), s.y, s.x, s.corners, q.count);
          const SampleGradients<float> moved = gradients_of(s, corner_sums(corners, gradient), t.mask);
          own[0] = moved.y;
          own[1] = moved.x;
          own[2] = moved.factor;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);

      // A thread adds up the quads of a pixel that share a sample, in their order.
      const int32_t pixel = first_pixel + static_cast<int32_t>(index);
      if ((d.need_offset || d.need_mask) && index < TILE_PIXELS && pixel < pixels) {
        float y = 0.0f, x = 0.0f, factor = 0.0f;
        for (int quad = 0; quad < quads && first + 4 * quad < d.columns; ++quad) {
          const threadgroup float* const share = columns + index * WIDE_STRIDE + 4 * quad;
          y += share[0];
          x += share[1];
          factor += share[2];
          const int32_t column = first + 4 * quad;
          const ColumnQuad q = quad_at(d.p, d.segment, d.segment_columns, group, column);
          const bool last = quad + 1 == quads || column + 4 >= d.columns;
          const ColumnQuad following = quad_at(d.p, d.segment, d.segment_columns, group, last ? column : column + 4);
          if (last || following.tap != q.tap || following.offset_group != q.offset_group) {
            const int64_t sample = (n * d.p.offset_groups + q.offset_group) * taps + q.tap;
            if (d.need_offset) {
              grad_offset[2 * sample * pixels + pixel] += y;
              grad_offset[(2 * sample + 1) * pixels + pixel] += x;
            }
            if (d.need_mask) grad_mask[sample * pixels + pixel] += factor;
            y = x = factor = 0.0f;
          }
        }
      }
    }
  }
}

// ---- deterministic gradient of the input: a simdgroup owns a band of pixels of an image and up to 128 channels of an offset group, and adds
// what reaches them in the order of the output pixels and taps. The lanes look at 32 samples at a time; where one reaches the band, they add
// its channels together.

template <typename C>
[[kernel]] void gather_grad_input(device const C* offset [[buffer(0)]], device const C* mask [[buffer(1)]],
                                  device const float* grad_columns [[buffer(2)]],  // as in backpropagate_tile
                                  device float* grad_input [[buffer(3)]],          // [N, C, H, W]
                                  constant DeformConv2dDeviceParams& d [[buffer(4)]], uint3 position [[threadgroup_position_in_grid]],
                                  uint lane [[thread_index_in_threadgroup]]) {
  const ConvInputs<float, C> in = {grad_columns, offset, mask};  // the input is not read
  const int64_t offset_channels = d.p.in_channels / d.p.offset_groups, group_channels = d.p.in_channels / d.p.groups;
  const int64_t blocks = (offset_channels + 127) / 128, all_columns = d.p.groups * d.packed_columns;
  const int64_t n = position.z, offset_group = position.y / blocks, first_channel = position.y % blocks * 128;
  const int64_t first_pixel = static_cast<int64_t>(position.x) * d.band_pixels, end_pixel = first_pixel + d.band_pixels;
  const int32_t taps = d.p.kernel_h * d.p.kernel_w, pixels = d.p.out_h * d.p.out_w;
  const int32_t first_output = d.first_tile * TILE_PIXELS, outputs = min(d.tiles * TILE_PIXELS, pixels - first_output);
  const int64_t samples = static_cast<int64_t>(outputs) * taps;
  for (int64_t first = 0; first < samples; first += SIMDGROUP) {
    const int64_t i = first + lane;
    TapSample t;
    t.sample = locate_sample(0, 0, 0.0f, 0.0f, 0, 0);
    t.mask = 0.0f;
    if (i < samples) t = tap_sample(in, d, n, first_output + static_cast<int32_t>(i / taps), static_cast<int32_t>(i % taps), offset_group);
    const bool reaches = reaches_pixels(t.sample.y, t.sample.x, value_corners(t.sample), 0, d.p.in_w, first_pixel, end_pixel);
    if (!simd_any(reaches)) continue;
    for (ushort other = 0; other < SIMDGROUP; ++other) {
      if (simd_broadcast(static_cast<uint>(reaches), other) == 0) continue;
      const int32_t y = simd_broadcast(t.sample.y, other), x = simd_broadcast(t.sample.x, other);
      const int32_t corners = simd_broadcast(t.sample.corners, other);
      const float fraction_y = simd_broadcast(t.sample.fraction_y, other), fraction_x = simd_broadcast(t.sample.fraction_x, other);
      const float factor = simd_broadcast(t.mask, other);
      const CornerWeights<float> w = corner_weights(fraction_y, fraction_x);
      const int64_t sample = first + other, stored = (n * d.tiles * TILE_PIXELS + sample / taps) * all_columns;
      for (int64_t c = first_channel + lane; c < min(first_channel + 128, offset_channels); c += SIMDGROUP) {
        const int64_t channel = offset_group * offset_channels + c, group = channel / group_channels;
        const int32_t column =
            column_of(d.p, d.segment, d.segment_columns, static_cast<int32_t>(sample % taps), channel - group * group_channels);
        const float4 gradient = float4(grad_columns[stored + group * d.packed_columns + column], 0.0f, 0.0f, 0.0f);
        const GradientImage image = {grad_input + at(d.grad_input, n, channel, 0, 0), d.grad_input.y, d.grad_input.x, d.grad_input.c};
        scatter_to_owned(image, y, x, corners, w, factor, gradient, 1, 0, d.p.in_w, first_pixel, end_pixel);
      }
    }
  }
}

// ---- backward: weight -----------------------------------------------------------------------------------------------------------------

// A threadgroup samples 32 columns again for every tile of its slice, and multiplies them with the gradients of 128 outputs.
template <typename T, typename C, bool VECTOR>
[[kernel]] void sum_grad_weight(device const T* input [[buffer(0)]], device const C* offset [[buffer(1)]], device const C* mask [[buffer(2)]],
                                device const T* grad_output [[buffer(3)]],  // [N, O, Ho, Wo]
                                device float* partial [[buffer(4)]],        // [slices, groups, packed_outputs, packed_columns]
                                constant DeformConv2dDeviceParams& d [[buffer(5)]], uint3 position [[threadgroup_position_in_grid]],
                                uint index [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float columns[TILE_PIXELS * COLUMN_STRIDE];
  threadgroup float gradients[TILE_PIXELS * WIDE_STRIDE];
  const ConvInputs<T, C> in = {input, offset, mask};
  const int32_t group_outputs = static_cast<int32_t>(d.p.out_channels / d.p.groups);
  const int32_t output_tiles = (group_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS, first_column = static_cast<int32_t>(position.x) * TILE_COLUMNS;
  const int64_t group = position.y / output_tiles, slice = position.z;
  const int32_t first_output = static_cast<int32_t>(position.y % output_tiles) * TILE_OUTPUTS, own = static_cast<int32_t>(simdgroup) * 32;

  simdgroup_float8x8 sums[BLOCKS][BLOCKS];  // [outputs][columns]
  for (int i = 0; i < BLOCKS; ++i)
    for (int j = 0; j < BLOCKS; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  const int64_t end_tile = min((slice + 1) * d.slice_tiles, d.p.batch * d.tiles);
  for (int64_t tile = slice * d.slice_tiles; tile < end_tile; ++tile) {
    const int64_t n = tile / d.tiles;
    const int32_t first_pixel = static_cast<int32_t>(tile % d.tiles) * TILE_PIXELS;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sample_columns<T, C, VECTOR>(in, d, n, group, first_pixel, first_column, index, columns);
    load_gradients(grad_output, d, n, group, first_pixel, first_output, min(TILE_OUTPUTS, d.packed_outputs - first_output), index, gradients,
                   WIDE_STRIDE);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < TILE_PIXELS; k += 8) {
      simdgroup_float8x8 left, right[BLOCKS];
      if (first_output + own >= d.packed_outputs) break;
      for (int j = 0; j < BLOCKS; ++j) simdgroup_load(right[j], columns + k * COLUMN_STRIDE + j * 8, COLUMN_STRIDE);
      for (int i = 0; i < BLOCKS; ++i) {
        if (first_output + own + 8 * i >= d.packed_outputs) break;
        simdgroup_load(left, gradients + k * WIDE_STRIDE + own + i * 8, WIDE_STRIDE, ulong2(0, 0), true);
        for (int j = 0; j < BLOCKS; ++j) simdgroup_multiply_accumulate(sums[i][j], left, right[j], sums[i][j]);
      }
    }
  }
  device float* const target = partial + ((slice * d.p.groups + group) * d.packed_outputs + first_output + own) * static_cast<int64_t>(d.packed_columns) + first_column;
  for (int i = 0; i < BLOCKS; ++i) {
    if (first_output + own + 8 * i >= d.packed_outputs) break;
    for (int j = 0; j < BLOCKS; ++j) simdgroup_store(sums[i][j], target + i * 8 * static_cast<int64_t>(d.packed_columns) + j * 8, d.packed_columns);
  }
}

template <typename T>
[[kernel]] void add_slices(device const float* partial [[buffer(0)]], device T* grad_weight [[buffer(1)]],  // [O, C/groups, Kh, Kw]
                           constant DeformConv2dDeviceParams& d [[buffer(2)]], uint3 position [[threadgroup_position_in_grid]],
                           uint index [[thread_index_in_threadgroup]]) {
  const int64_t element = static_cast<int64_t>(position.x) * THREADS + index, taps = d.p.kernel_h * d.p.kernel_w;
  const int64_t group_channels = d.p.in_channels / d.p.groups, group_outputs = d.p.out_channels / d.p.groups;
  if (element >= d.p.out_channels * group_channels * taps) return;
  const int64_t output = element / taps / group_channels, group = output / group_outputs;
  const int32_t column =
      column_of(d.p, d.segment, d.segment_columns, static_cast<int32_t>(element % taps), element / taps % group_channels);
  float sum = 0.0f;
  for (int64_t slice = 0; slice < d.slices; ++slice)
    sum += partial[((slice * d.p.groups + group) * d.packed_outputs + output % group_outputs) * d.packed_columns + column];
  grad_weight[element] = static_cast<T>(sum);
}

#define DEFORMC_CONV_KERNELS(T, C)                                                               \
  DEFORMC_KERNEL("convolve_tile_" #T "_" #C, convolve_tile<T, C, false>)                         \
  DEFORMC_KERNEL("convolve_tile_" #T "_" #C "_vector", convolve_tile<T, C, true>)                \
  DEFORMC_KERNEL("backpropagate_tile_" #T "_" #C, backpropagate_tile<T, C, false>)               \
  DEFORMC_KERNEL("backpropagate_tile_" #T "_" #C "_vector", backpropagate_tile<T, C, true>)      \
  DEFORMC_KERNEL("sum_grad_weight_" #T "_" #C, sum_grad_weight<T, C, false>)                     \
  DEFORMC_KERNEL("sum_grad_weight_" #T "_" #C "_vector", sum_grad_weight<T, C, true>)

DEFORMC_CONV_KERNELS(float, float)
DEFORMC_CONV_KERNELS(half, half)
DEFORMC_CONV_KERNELS(half, float)
DEFORMC_CONV_KERNELS(bfloat, bfloat)
DEFORMC_CONV_KERNELS(bfloat, float)

#define DEFORMC_CONV_KERNELS_OF_ONE_TYPE(T)                      \
  DEFORMC_KERNEL("pack_weight_" #T, pack_weight<T>)              \
  DEFORMC_KERNEL("gather_grad_input_" #T, gather_grad_input<T>)  \
  DEFORMC_KERNEL("add_slices_" #T, add_slices<T>)

DEFORMC_CONV_KERNELS_OF_ONE_TYPE(float)
DEFORMC_CONV_KERNELS_OF_ONE_TYPE(half)
DEFORMC_CONV_KERNELS_OF_ONE_TYPE(bfloat)

}  // namespace deform_conv2d
}  // namespace deformc
