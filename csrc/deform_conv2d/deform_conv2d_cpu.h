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
static constexpr A ZEROS[MAX_BLOCK_CHANNELS] = {};  // the channels of a pixel outside the image

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

// The same, read in place where that is possible.
template <typename C, typename A>
const A* pixels_of(const View4<const C>& view, int64_t n, int64_t channel, int64_t width, int64_t first, int64_t count, A* buffer) {
  if constexpr (std::is_same_v<C, A>) {
    if (view.stride[3] == 1 && view.stride[2] == width) return view.at(n, channel, 0, 0) + first;
  }
  load_pixels(view, n, channel, width, first, count, buffer);
  return buffer;
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
  for (int64_t i = 0; i < count; ++i) kind[i] = sample_kind(y[i], x[i], height, width, is_nan(dy[i]) | is_nan(dx[i]));
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
    const A* const dy = pixels_of(offset, n, 2 * channel, p.out_w, first, count, plan.dy);
    const A* const dx = pixels_of(offset, n, 2 * channel + 1, p.out_w, first, count, plan.dx);
    if (mask.data) {
      load_pixels(mask, n, channel, p.out_w, first, count, s.mask + at);
    } else {
      std::fill_n(s.mask + at, count, A(1));
    }
    split_positions(count, static_cast<int32_t>(tap / p.kernel_w * p.dilation_h), plan.base_y, dy, s.y + at, s.fraction_y + at);
    split_positions(count, static_cast<int32_t>(tap % p.kernel_w * p.dilation_w), plan.base_x, dx, s.x + at, s.fraction_x + at);
    classify_samples(count, p.in_h, p.in_w, s.y + at, s.x + at, dy, dx, s.kind + at);
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
DEFORMC_INLINE void interpolate_channels(int64_t channels, Corners<A> corners, CornerWeights<A> w, A mask, A* out) {
  int64_t c = 0;
  for (; c + LANES<A> <= channels; c += LANES<A>) {
    store(out + c, mask * (w.w00 * load(corners.p00 + c) + w.w01 * load(corners.p01 + c) + w.w10 * load(corners.p10 + c) +
                           w.w11 * load(corners.p11 + c)));
  }
  for (; c < channels; ++c)
    out[c] = mask * (w.w00 * corners.p00[c] + w.w01 * corners.p01[c] + w.w10 * corners.p10[c] + w.w11 * corners.p11[c]);
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

// The corners of the gradient's image that a sample adds to; those outside the image go nowhere.
template <typename A>
struct GradientCorners {
  A *p00, *p01, *p10, *p11;
};

// For one sample and all channels, with the gradient of the sampled values given. SAMPLE: computes the values again and returns the sums for the
// gradients of its position and mask. SCATTER: adds to the gradient of the image.
template <typename A, bool SAMPLE, bool SCATTER>
DEFORMC_INLINE CornerSums<A> backpropagate_channels(int64_t channels, const A* gradient, Corners<A> corners, CornerWeights<A> w, A mask, A* out,
                                                    GradientCorners<A> into) {
  Vector<A> s00 = {}, s01 = {}, s10 = {}, s11 = {};
  const CornerWeights<A> masked = {mask * w.w00, mask * w.w01, mask * w.w10, mask * w.w11};
  int64_t c = 0;
  for (; c + LANES<A> <= channels; c += LANES<A>) {
    const Vector<A> g = load(gradient + c);
    if constexpr (SAMPLE) {
      const Vector<A> v00 = load(corners.p00 + c), v01 = load(corners.p01 + c), v10 = load(corners.p10 + c), v11 = load(corners.p11 + c);
      s00 = s00 + g * v00;
      s01 = s01 + g * v01;
      s10 = s10 + g * v10;
      s11 = s11 + g * v11;
      store(out + c, mask * (w.w00 * v00 + w.w01 * v01 + w.w10 * v10 + w.w11 * v11));
    }
    if constexpr (SCATTER) {
      store(into.p00 + c, load(into.p00 + c) + masked.w00 * g);
      store(into.p01 + c, load(into.p01 + c) + masked.w01 * g);
      store(into.p10 + c, load(into.p10 + c) + masked.w10 * g);
      store(into.p11 + c, load(into.p11 + c) + masked.w11 * g);
    }
  }
  CornerSums<A> sums = {0, 0, 0, 0};
  if (SAMPLE && c > 0) {
    A lanes[4];
    sum_lanes(s00, s01, s10, s11, lanes);
    sums = {lanes[0], lanes[1], lanes[2], lanes[3]};
  }
  for (; c < channels; ++c) {
    const A g = gradient[c];
    if constexpr (SAMPLE) {
      sums.s00 += g * corners.p00[c];
      sums.s01 += g * corners.p01[c];
      sums.s10 += g * corners.p10[c];
      sums.s11 += g * corners.p11[c];
      out[c] = mask * (w.w00 * corners.p00[c] + w.w01 * corners.p01[c] + w.w10 * corners.p10[c] + w.w11 * corners.p11[c]);
    }
    if constexpr (SCATTER) {
      into.p00[c] += masked.w00 * g;
      into.p01[c] += masked.w01 * g;
      into.p10[c] += masked.w10 * g;
      into.p11[c] += masked.w11 * g;
    }
  }
  return sums;
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
  A nowhere[MAX_BLOCK_CHANNELS] = {};
  const int64_t channels = source.channels, row = tile.grad_image.row_stride, column = tile.grad_image.column_stride;
  const A nan = std::numeric_limits<A>::quiet_NaN();
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t at = tap * s.tile + i;
      const A* const gradient = tile.grad_columns + (i * taps + tap) * channels;
      A* const out = tile.columns + (i * taps + tap) * channels;
      const int32_t kind = s.kind[at], y = s.y[at], x = s.x[at];
      const A fraction_y = s.fraction_y[at], fraction_x = s.fraction_x[at], mask = s.mask[at];
      const CornerWeights<A> w = corner_weights(fraction_y, fraction_x);
      SampleGradients<A> gradients = {0, 0, 0};
      if (kind == SAMPLE_INSIDE) [[likely]] {
        Corners<A> corners = corners_outside<A>();
        if constexpr (SAMPLE) corners = corners_inside(source.window, y, x);
        GradientCorners<A> into = {nowhere, nowhere, nowhere, nowhere};
        if constexpr (SCATTER) {
          A* const p00 = tile.grad_image.at(y, x);
          into = {p00, p00 + column, p00 + row, p00 + row + column};
        }
        const CornerSums<A> sums = backpropagate_channels<A, SAMPLE, SCATTER>(channels, gradient, corners, w, mask, out, into);
        gradients = sample_gradients(sums, fraction_y, fraction_x, mask);
      } else if (kind == SAMPLE_EDGE) {
        Corners<A> corners = corners_outside<A>();
        if constexpr (SAMPLE) corners = source.corners_at_edge(y, x, copies);
        const bool counts = sample_counts(y, x, fraction_y, fraction_x);
        const auto into = [&](int32_t cy, int32_t cx) {
          const bool inside = SCATTER && counts && cy >= 0 && cy < source.height && cx >= 0 && cx < source.width;
          return inside ? tile.grad_image.at(cy, cx) : nowhere;
        };
        const CornerSums<A> sums = backpropagate_channels<A, SAMPLE, SCATTER>(
            channels, gradient, corners, w, mask, out, {into(y, x), into(y, x + 1), into(y + 1, x), into(y + 1, x + 1)});
        gradients = sample_gradients(sums, fraction_y, fraction_x, mask);
        if (!counts) {
          gradients.factor = 0;
          if constexpr (SAMPLE) interpolate_channels(channels, corners_outside<A>(), w, mask, out);
        }
      } else {
        const A value = kind == SAMPLE_NAN ? nan : A(0);
        gradients = {value, value, value};
        if constexpr (SAMPLE) interpolate_channels(channels, corners_outside<A>(), CornerWeights<A>{value, value, value, value}, mask, out);
      }
      if constexpr (SAMPLE) {
        tile.grad_y[tap * tile.grad_stride + i] = gradients.y;
        tile.grad_x[tap * tile.grad_stride + i] = gradients.x;
        tile.grad_mask[tap * tile.grad_stride + i] = gradients.factor;
      }
    }
  }
}

}  // namespace deformc
