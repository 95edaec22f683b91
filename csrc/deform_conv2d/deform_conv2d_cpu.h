// deform_conv2d on the CPU: the loops over samples. A tile is a run of output pixels of one image, in row-major order; a block is a run of
// channels that share offsets. For a tile the positions of all samples are found first (SamplePlan), then channels are sampled block by block
// from an image whose channels are innermost, so that each corner is a run of consecutive numbers.
#pragma once

#include <limits>

#include "common/cpu.h"
#include "deform_conv2d/deform_conv2d.h"

namespace deformc {

constexpr int64_t MAX_BLOCK_CHANNELS = 64;

template <typename A>
inline constexpr A ZEROS[MAX_BLOCK_CHANNELS] = {};  // the channels of a pixel outside the image

// The channels of one block, rows [first_row, end_row) of one image. Rows that are not there are read from the tensor itself.
template <typename A>
struct ImageWindow {
  A* data;  // [end_row - first_row, in_w, channels]
  int64_t row_stride, column_stride;
  int32_t first_row, end_row;
  DEFORMC_INLINE A* at(int32_t y, int32_t x) const { return data + (y - first_row) * row_stride + x * column_stride; }
};

// The channels of a sample's corners (y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1).
template <typename A>
struct Corners {
  const A *p00, *p01, *p10, *p11;
};

template <typename A>
DEFORMC_INLINE Corners<A> corners_inside(const ImageWindow<const A>& window, int32_t y, int32_t x) {
  const A* const p00 = window.at(y, x);
  return {p00, p00 + window.column_stride, p00 + window.row_stride, p00 + window.row_stride + window.column_stride};
}

template <typename A>
DEFORMC_INLINE Corners<A> corners_outside() {
  return {ZEROS<A>, ZEROS<A>, ZEROS<A>, ZEROS<A>};
}

// Samples of one tile and one offset group, by tap and pixel: every array is [Kh*Kw, tile].
template <typename A>
struct Samples {
  int64_t tile;
  int32_t *y, *x;  // cell
  A *fraction_y, *fraction_x, *mask;
  int32_t* kind;  // SampleKind
};

template <typename A>
class SamplePlan {
 public:
  SamplePlan(int64_t taps, int64_t tile)
      : integers_((3 * taps + 2) * tile), reals_((3 * taps + 2) * tile), base_y(integers_.get()), base_x(base_y + tile), dy(reals_.get()),
        dx(dy + tile) {
    int32_t* const i = base_x + tile;
    A* const r = dx + tile;
    const int64_t size = taps * tile;
    samples = {tile, i, i + size, r, r + size, r + 2 * size, i + 2 * size};
  }

 private:
  Buffer<int32_t> integers_;
  Buffer<A> reals_;

 public:
  int32_t *const base_y, *const base_x;  // [tile]: position of tap (0, 0) without its offset
  A *const dy, *const dx;                // [tile]: offsets of the tap at hand
  Samples<A> samples;
};

// out[i] = view[n, channel, pixel first + i] of a tensor [N, *, out_h, out_w] with any strides.
template <typename C, typename A>
void load_pixels(const View4<const C>& view, int64_t n, int64_t channel, int64_t width, int64_t first, int64_t count, A* out) {
  if (view.stride[2] == width * view.stride[3]) {
    convert(view.at(n, channel, 0, 0) + first * view.stride[3], view.stride[3], out, 1, count);
    return;
  }
  for (int64_t done = 0; done < count;) {
    const int64_t row = (first + done) / width, column = (first + done) % width;
    const int64_t run = std::min(count - done, width - column);
    convert(view.at(n, channel, row, column), view.stride[3], out + done, 1, run);
    done += run;
  }
}

// Cell and fraction along one axis. Kept apart from the kinds so that both loops vectorise.
template <typename A>
DEFORMC_MULTIVERSION static void split_positions(int64_t count, int32_t tap, const int32_t* DEFORMC_RESTRICT base,
                                                 const A* DEFORMC_RESTRICT offset, int32_t* DEFORMC_RESTRICT cell,
                                                 A* DEFORMC_RESTRICT fraction) {
  for (int64_t i = 0; i < count; ++i) {
    const A offset_floor = floor(offset[i]);
    cell[i] = base[i] + tap + cell_of(offset_floor);
    fraction[i] = fraction_of(offset[i], offset_floor);
  }
}

template <typename A>
DEFORMC_MULTIVERSION static void classify_samples(int64_t count, int32_t height, int32_t width, const int32_t* DEFORMC_RESTRICT y,
                                                  const int32_t* DEFORMC_RESTRICT x, const A* DEFORMC_RESTRICT dy,
                                                  const A* DEFORMC_RESTRICT dx, int32_t* DEFORMC_RESTRICT kind) {
  for (int64_t i = 0; i < count; ++i) kind[i] = sample_kind(y[i], x[i], height, width, is_nan(dy[i] + dx[i]));
}

// Fills the plan for output pixels [first, first + count) of image n. mask.data may be null.
template <typename A, typename C>
void plan_samples(const DeformConv2dParams& p, const View4<const C>& offset, const View4<const C>& mask, int64_t n, int64_t offset_group,
                  int64_t first, int64_t count, const SamplePlan<A>& plan) {
  const Samples<A>& s = plan.samples;
  for (int64_t i = 0, oy = first / p.out_w, ox = first % p.out_w; i < count; ++i) {
    plan.base_y[i] = static_cast<int32_t>(oy * p.stride_h - p.pad_h);
    plan.base_x[i] = static_cast<int32_t>(ox * p.stride_w - p.pad_w);
    if (++ox == p.out_w) ox = 0, ++oy;
  }
  const int64_t taps = int64_t{p.kernel_h} * p.kernel_w;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const int64_t channel = offset_group * taps + tap, at = tap * s.tile;
    load_pixels(offset, n, 2 * channel, p.out_w, first, count, plan.dy);
    load_pixels(offset, n, 2 * channel + 1, p.out_w, first, count, plan.dx);
    if (mask.data) {
      load_pixels(mask, n, channel, p.out_w, first, count, s.mask + at);
    } else {
      std::fill_n(s.mask + at, count, A(1));
    }
    split_positions(count, static_cast<int32_t>(tap / p.kernel_w * p.dilation_h), plan.base_y, plan.dy, s.y + at, s.fraction_y + at);
    split_positions(count, static_cast<int32_t>(tap % p.kernel_w * p.dilation_w), plan.base_x, plan.dx, s.x + at, s.fraction_x + at);
    classify_samples(count, p.in_h, p.in_w, s.y + at, s.x + at, plan.dy, plan.dx, s.kind + at);
  }
}

// Where the channels of one block come from: the window, and behind it the tensor.
template <typename A>
struct BlockSource {
  ImageWindow<const A> window;
  int64_t channels;
  int32_t height, width;
  const void* tensor;  // at (n, first channel of the block, 0, 0)
  int64_t channel_stride, y_stride, x_stride;
  void (*load)(const BlockSource& source, int32_t y, int32_t x, A* out);

  // The channels at a pixel; copied to `copy` if the window does not hold its row.
  const A* pixel(int32_t y, int32_t x, A* copy) const {
    if (y < 0 || y >= height || x < 0 || x >= width) return ZEROS<A>;
    if (y >= window.first_row && y < window.end_row) return window.at(y, x);
    load(*this, y, x, copy);
    return copy;
  }
  Corners<A> corners_at_edge(int32_t y, int32_t x, A (*copies)[MAX_BLOCK_CHANNELS]) const {
    return {pixel(y, x, copies[0]), pixel(y, x + 1, copies[1]), pixel(y + 1, x, copies[2]), pixel(y + 1, x + 1, copies[3])};
  }
  DEFORMC_INLINE bool holds_rows(int32_t y) const { return y >= window.first_row && y + 1 < window.end_row; }
};

template <typename T>
void load_channels(const BlockSource<accumulate_t<T>>& source, int32_t y, int32_t x, accumulate_t<T>* out) {
  const T* const pixel = static_cast<const T*>(source.tensor) + y * source.y_stride + x * source.x_stride;
  for (int64_t c = 0; c < source.channels; ++c) out[c] = static_cast<accumulate_t<T>>(pixel[c * source.channel_stride]);
}

template <typename A>
DEFORMC_INLINE void interpolate_channels(int64_t channels, const Corners<A>& corners, CornerWeights<A> w, A mask, A* DEFORMC_RESTRICT out) {
  const A* DEFORMC_RESTRICT p00 = corners.p00;
  const A* DEFORMC_RESTRICT p01 = corners.p01;
  const A* DEFORMC_RESTRICT p10 = corners.p10;
  const A* DEFORMC_RESTRICT p11 = corners.p11;
  for (int64_t c = 0; c < channels; ++c) out[c] = mask * (w.w00 * p00[c] + w.w01 * p01[c] + w.w10 * p10[c] + w.w11 * p11[c]);
}

// columns[i * column_stride + tap * channels + c] = mask * sampled value of channel c of the block, for pixels i of the tile.
template <typename A>
DEFORMC_MULTIVERSION static void sample_block(Samples<A> s, int64_t taps, int64_t count, BlockSource<A> source, A* columns,
                                              int64_t column_stride) {
  A copies[4][MAX_BLOCK_CHANNELS];
  const int64_t channels = source.channels;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t at = tap * s.tile + i;
      const int32_t y = s.y[at], x = s.x[at];
      A fraction_y = s.fraction_y[at], fraction_x = s.fraction_x[at];
      Corners<A> corners = corners_outside<A>();
      if (s.kind[at] == SAMPLE_INSIDE && source.holds_rows(y)) [[likely]] {
        corners = corners_inside(source.window, y, x);
      } else if (s.kind[at] == SAMPLE_NAN) {
        fraction_y = std::numeric_limits<A>::quiet_NaN();
      } else if (s.kind[at] != SAMPLE_ZERO && sample_counts(y, x, fraction_y, fraction_x)) {
        corners = source.corners_at_edge(y, x, copies);
      }
      interpolate_channels(channels, corners, corner_weights(fraction_y, fraction_x), s.mask[at],
                           columns + i * column_stride + tap * channels);
    }
  }
}

// Sums that keep LANES partial sums, so that the compiler may use vectors without reordering what was written.
constexpr int LANES = 16;

template <typename A>
DEFORMC_INLINE CornerSums<A> multiply_and_sum(int64_t channels, const A* DEFORMC_RESTRICT gradient, const Corners<A>& corners) {
  A s00[LANES] = {}, s01[LANES] = {}, s10[LANES] = {}, s11[LANES] = {};
  int64_t c = 0;
  for (; c + LANES <= channels; c += LANES) {
    for (int lane = 0; lane < LANES; ++lane) s00[lane] += gradient[c + lane] * corners.p00[c + lane];
    for (int lane = 0; lane < LANES; ++lane) s01[lane] += gradient[c + lane] * corners.p01[c + lane];
    for (int lane = 0; lane < LANES; ++lane) s10[lane] += gradient[c + lane] * corners.p10[c + lane];
    for (int lane = 0; lane < LANES; ++lane) s11[lane] += gradient[c + lane] * corners.p11[c + lane];
  }
  for (; c < channels; ++c) {
    s00[0] += gradient[c] * corners.p00[c];
    s01[0] += gradient[c] * corners.p01[c];
    s10[0] += gradient[c] * corners.p10[c];
    s11[0] += gradient[c] * corners.p11[c];
  }
  for (int half = LANES / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      s00[lane] += s00[lane + half];
      s01[lane] += s01[lane + half];
      s10[lane] += s10[lane + half];
      s11[lane] += s11[lane + half];
    }
  }
  return {s00[0], s01[0], s10[0], s11[0]};
}

template <typename A>
DEFORMC_INLINE void add_scaled(int64_t channels, A scale, const A* DEFORMC_RESTRICT values, A* DEFORMC_RESTRICT out) {
  for (int64_t c = 0; c < channels; ++c) out[c] += scale * values[c];
}

// What the backward loop over samples reads and writes for one tile and one block; rows of columns are [Kh*Kw, channels].
template <typename A>
struct BackwardTile {
  const A* grad_columns;       // gradient of the columns
  A* columns;                  // [out] the columns again, for the gradient of the weight
  A *grad_y, *grad_x, *grad_mask;  // [out] [Kh*Kw, grad_stride]: this block's share
  int64_t grad_stride;
  ImageWindow<A> grad_image;  // [in, out] gradient of the input, the whole image
};

// SAMPLE: fill columns, grad_y, grad_x and grad_mask. SCATTER: add to grad_image.
template <typename A, bool SAMPLE, bool SCATTER>
DEFORMC_MULTIVERSION static void backpropagate_block(Samples<A> s, int64_t taps, int64_t count, BlockSource<A> source,
                                                     BackwardTile<A> tile) {
  A copies[4][MAX_BLOCK_CHANNELS];
  A nowhere[MAX_BLOCK_CHANNELS] = {};  // takes what would be added outside the image
  const int64_t channels = source.channels, row = tile.grad_image.row_stride, column = tile.grad_image.column_stride;
  const A nan = std::numeric_limits<A>::quiet_NaN();
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t at = tap * s.tile + i;
      const A* const gradient = tile.grad_columns + (i * taps + tap) * channels;
      const int32_t kind = s.kind[at], y = s.y[at], x = s.x[at];
      const A fraction_y = s.fraction_y[at], fraction_x = s.fraction_x[at], mask = s.mask[at];
      const CornerWeights<A> w = corner_weights(fraction_y, fraction_x);
      const bool counts = kind == SAMPLE_INSIDE || (kind == SAMPLE_EDGE && sample_counts(y, x, fraction_y, fraction_x));
      if constexpr (SAMPLE) {
        Corners<A> corners = corners_outside<A>();
        SampleGradients<A> gradients = {0, 0, 0};
        if (kind == SAMPLE_INSIDE || kind == SAMPLE_EDGE) [[likely]] {
          corners = kind == SAMPLE_INSIDE ? corners_inside(source.window, y, x) : source.corners_at_edge(y, x, copies);
          gradients = sample_gradients(multiply_and_sum(channels, gradient, corners), fraction_y, fraction_x, mask);
        } else if (kind == SAMPLE_NAN) {
          gradients = {nan, nan, nan};
        }
        if (!counts) corners = corners_outside<A>();
        tile.grad_y[tap * tile.grad_stride + i] = gradients.y;
        tile.grad_x[tap * tile.grad_stride + i] = gradients.x;
        tile.grad_mask[tap * tile.grad_stride + i] = counts || kind == SAMPLE_NAN ? gradients.mask : A(0);
        interpolate_channels(channels, corners, kind == SAMPLE_NAN ? CornerWeights<A>{nan, nan, nan, nan} : w, mask,
                             tile.columns + (i * taps + tap) * channels);
      }
      if constexpr (SCATTER) {
        if (!counts) continue;
        const bool inside = kind == SAMPLE_INSIDE;
        const bool top = inside || y >= 0, bottom = inside || y + 1 < source.height;
        const bool left = inside || x >= 0, right = inside || x + 1 < source.width;
        A* const p00 = tile.grad_image.at(y, x);
        add_scaled(channels, mask * w.w00, gradient, top && left ? p00 : nowhere);
        add_scaled(channels, mask * w.w01, gradient, top && right ? p00 + column : nowhere);
        add_scaled(channels, mask * w.w10, gradient, bottom && left ? p00 + row : nowhere);
        add_scaled(channels, mask * w.w11, gradient, bottom && right ? p00 + row + column : nowhere);
      }
    }
  }
}

}  // namespace deformc
