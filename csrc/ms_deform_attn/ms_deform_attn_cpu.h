// ms_deform_attn on the CPU: the loops over points. They work on one head and a chunk of queries at a time. First everything about the points
// is computed in loops that vectorise (PointPlan): positions, corner weights, and the addresses of the corners, where a corner outside its
// image has the address of a row of zeros. So the loops that read the values have no branches that depend on the data.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "common/cpu.h"
#include "ms_deform_attn/ms_deform_attn.h"

namespace deformc {

constexpr int64_t CHUNK_POINTS = 96;

// A position of exactly -1, see sample_counts, has its corners but does not count.
constexpr int32_t POINT_COUNTS = 16;
constexpr int32_t EVERY_CORNER = CORNER_00 | CORNER_01 | CORNER_10 | CORNER_11;

// The shapes of the levels for every point of a chunk, so that one loop serves points of all levels.
class PointTable {
 public:
  PointTable(const AttnLevel* levels, int64_t count, int64_t most_queries) {
    for (int64_t i = 0; i < count; ++i) points_ += levels[i].points;
    queries_ = std::min(most_queries, std::max<int64_t>(1, CHUNK_POINTS / std::max<int64_t>(1, points_)));
    shapes_ = Buffer<int32_t>(2 * size());
    starts_ = Buffer<int64_t>(size());
    for (int64_t q = 0, i = 0; q < queries_; ++q) {
      for (const AttnLevel* level = levels; level < levels + count; ++level) {
        for (int64_t t = 0; t < level->points; ++t, ++i) {
          shapes_[i] = level->height;
          shapes_[size() + i] = level->width;
          starts_[i] = level->start;
        }
      }
    }
  }
  int64_t points() const { return points_; }    // of a query
  int64_t queries() const { return queries_; }  // of a chunk
  int64_t size() const { return queries_ * points_; }
  const int32_t* height() const { return shapes_.get(); }
  const int32_t* width() const { return shapes_.get() + size(); }
  const int64_t* start() const { return starts_.get(); }

 private:
  int64_t points_ = 0, queries_ = 0;
  Buffer<int32_t> shapes_;
  Buffer<int64_t> starts_;
};

// Where the corners of the points are in an array of pixels: addresses, since those of outside corners lead to another array.
struct CornerAddresses {
  uintptr_t *a00, *a01, *a10, *a11;
};

// Points of a chunk: every array is [queries, points].
template <typename A>
struct Points {
  A *location_x, *location_y, *weight;
  int32_t *y, *x;              // cell
  A *fraction_y, *fraction_x;  // not a number where the location is not
  int32_t* corners;            // CornerBits and POINT_COUNTS
  A *w00, *w01, *w10, *w11;
  CornerAddresses from, into;  // in the value, and in its gradient
};

template <typename A>
class PointPlan {
 public:
  explicit PointPlan(int64_t size) : reals_(9 * size), integers_(3 * size), addresses_(8 * size) {
    const auto real = [&](int64_t i) { return reals_.get() + i * size; };
    const auto integer = [&](int64_t i) { return integers_.get() + i * size; };
    const auto address = [&](int64_t i) { return addresses_.get() + i * size; };
    points = {real(0),    real(1), real(2), integer(0), integer(1), real(3),
              real(4),    integer(2), real(5), real(6), real(7), real(8),
              {address(0), address(1), address(2), address(3)}, {address(4), address(5), address(6), address(7)}};
  }

 private:
  Buffer<A> reals_;
  Buffer<int32_t> integers_;
  Buffer<uintptr_t> addresses_;

 public:
  Points<A> points;
};

template <typename C, typename A>
DEFORMC_MULTIVERSION static void load_locations(const C* DEFORMC_RESTRICT pairs, int64_t count, A* DEFORMC_RESTRICT x, A* DEFORMC_RESTRICT y) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = static_cast<A>(pairs[2 * i]);
    y[i] = static_cast<A>(pairs[2 * i + 1]);
  }
}

// One axis: cell and fraction.
template <typename A>
DEFORMC_MULTIVERSION static void split_locations(int64_t count, const int32_t* DEFORMC_RESTRICT size, const A* DEFORMC_RESTRICT location,
                                                 int32_t* DEFORMC_RESTRICT cell, A* DEFORMC_RESTRICT fraction) {
  for (int64_t i = 0; i < count; ++i) {
    const A position = position_of(location[i], size[i]), position_floor = floor(position);
    cell[i] = cell_of(position_floor);
    fraction[i] = is_nan(position) ? position : fraction_of(position, position_floor);
  }
}

template <typename A>
DEFORMC_MULTIVERSION static void find_pixels(int64_t count, const int32_t* DEFORMC_RESTRICT size, const A* DEFORMC_RESTRICT location,
                                             int32_t* DEFORMC_RESTRICT cell, A* DEFORMC_RESTRICT fraction) {
  for (int64_t i = 0; i < count; ++i) {
    cell[i] = pixel_of(location[i], size[i]);
    fraction[i] = is_nan(location[i]) ? location[i] : A(0);
  }
}

// Which corners of the points there are. `every_corner`: all of CornerBits, or the one of a discrete point.
template <typename A>
DEFORMC_MULTIVERSION static void find_corners(int64_t count, int32_t every_corner, const int32_t* DEFORMC_RESTRICT height,
                                              const int32_t* DEFORMC_RESTRICT width, const int32_t* DEFORMC_RESTRICT y,
                                              const int32_t* DEFORMC_RESTRICT x, const A* DEFORMC_RESTRICT fraction_y,
                                              const A* DEFORMC_RESTRICT fraction_x, int32_t* DEFORMC_RESTRICT corners) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t counts = sample_counts(y[i], x[i], fraction_y[i], fraction_x[i]) ? POINT_COUNTS : 0;
    const int32_t bits = (corners_in_image(y[i], x[i], height[i], width[i]) & every_corner) | counts;
    corners[i] = is_nan(fraction_y[i]) | is_nan(fraction_x[i]) ? 0 : bits;
  }
}

template <typename A>
DEFORMC_MULTIVERSION static void weigh_corners(int64_t count, const A* DEFORMC_RESTRICT fraction_y, const A* DEFORMC_RESTRICT fraction_x,
                                               A* DEFORMC_RESTRICT w00, A* DEFORMC_RESTRICT w01, A* DEFORMC_RESTRICT w10,
                                               A* DEFORMC_RESTRICT w11) {
  for (int64_t i = 0; i < count; ++i) {
    const CornerWeights<A> w = corner_weights(fraction_y[i], fraction_x[i]);
    w00[i] = w.w00;
    w01[i] = w.w01;
    w10[i] = w.w10;
    w11[i] = w.w11;
  }
}

// Addresses of corners in an array of pixels that are pixel_bytes apart; `outside` for those that are outside, and for all of a point whose
// `corners` lack one of the bits of `needed`.
template <typename A>
DEFORMC_MULTIVERSION static void find_addresses(int64_t count, const int32_t* DEFORMC_RESTRICT width, const int64_t* DEFORMC_RESTRICT start,
                                                Points<A> s, int32_t needed, uintptr_t pixels, int64_t pixel_bytes, const void* outside,
                                                CornerAddresses to) {
  const int32_t* DEFORMC_RESTRICT y = s.y;
  const int32_t* DEFORMC_RESTRICT x = s.x;
  const int32_t* DEFORMC_RESTRICT corners = s.corners;
  uintptr_t* DEFORMC_RESTRICT a00 = to.a00;
  uintptr_t* DEFORMC_RESTRICT a01 = to.a01;
  uintptr_t* DEFORMC_RESTRICT a10 = to.a10;
  uintptr_t* DEFORMC_RESTRICT a11 = to.a11;
  const uintptr_t nowhere = reinterpret_cast<uintptr_t>(outside);
  for (int64_t i = 0; i < count; ++i) {
    // Wraps around for corners that are not there.
    const uintptr_t row_bytes = static_cast<uintptr_t>(width[i]) * pixel_bytes;
    const uintptr_t first = pixels + static_cast<uintptr_t>(start[i] + x[i]) * pixel_bytes + static_cast<uintptr_t>(int64_t{y[i]}) * row_bytes;
    const int32_t bits = (corners[i] & needed) == needed ? corners[i] : 0;
    a00[i] = bits & CORNER_00 ? first : nowhere;
    a01[i] = bits & CORNER_01 ? first + pixel_bytes : nowhere;
    a10[i] = bits & CORNER_10 ? first + row_bytes : nowhere;
    a11[i] = bits & CORNER_11 ? first + row_bytes + pixel_bytes : nowhere;
  }
}

// Fills the plan, but for the addresses, for points [first_point, first_point + table.points()) of queries [first, first + count) in one head.
// Locations are [N, Q, M, T, 2], weights [N, Q, M, T].
template <typename A, typename C>
void plan_points(const MsDeformAttnParams& p, const PointTable& table, int64_t first_point, const View<const C, 5>& locations,
                 const View<const C, 4>& weights, int64_t n, int64_t head, int64_t first, int64_t count, const Points<A>& s) {
  const int64_t points = table.points();
  for (int64_t q = 0; q < count; ++q) {
    const C* const x = locations.at(n, first + q, head, first_point, 0);
    if (locations.stride[4] == 1 && locations.stride[3] == 2) {
      load_locations(x, points, s.location_x + q * points, s.location_y + q * points);
    } else {
      convert(x, locations.stride[3], s.location_x + q * points, 1, points);
      convert(x + locations.stride[4], locations.stride[3], s.location_y + q * points, 1, points);
    }
    convert(weights.at(n, first + q, head, first_point), weights.stride[3], s.weight + q * points, 1, points);
  }
  const auto locate = p.discrete ? find_pixels<A> : split_locations<A>;
  locate(count * points, table.height(), s.location_y, s.y, s.fraction_y);
  locate(count * points, table.width(), s.location_x, s.x, s.fraction_x);
  const int32_t every_corner = p.discrete ? CORNER_00 : EVERY_CORNER;
  find_corners(count * points, every_corner, table.height(), table.width(), s.y, s.x, s.fraction_y, s.fraction_x, s.corners);
  weigh_corners(count * points, s.fraction_y, s.fraction_x, s.w00, s.w01, s.w10, s.w11);
}

// Points below which one thread does the whole call.
constexpr int64_t SMALL_POINTS = 512;
// Copies of the value that are held at a time, if they are not of single heads: few enough to stay in the caches.
constexpr int64_t VALUE_COPY_BYTES_PER_THREAD = int64_t{5} << 19;
constexpr int64_t VALUE_COPY_BYTES = int64_t{64} << 20;

// Whether there are enough points for the pixels of a head to be brought together.
inline bool is_dense(const MsDeformAttnParams& p) { return p.queries * p.points >= p.pixels; }

// The value of single heads, [S, D] each. The heads of a pixel lie beside each other, so those of one head are far apart and share few places
// of the caches: where there are many points, the head is copied first.
template <typename V>
class HeadValues {
 public:
  HeadValues(const MsDeformAttnParams& p, const View4<const V>& value)
      : p_(p), value_(value), copied_(value.stride[3] != 1 || is_dense(p)) {}

  // Heads, counted over all images, that can be worked on at a time.
  int64_t round() const {
    const int64_t all = p_.batch * p_.heads, bytes = std::max<int64_t>(1, p_.pixels * p_.head_dim * sizeof(V));
    const int64_t held = std::min(VALUE_COPY_BYTES, VALUE_COPY_BYTES_PER_THREAD * torch::stable::get_num_threads());
    return copied_ ? std::clamp<int64_t>(held / bytes, 1, all) : all;
  }
  void load(int64_t first, int64_t count, bool small) {
    if (!copied_) return;
    first_ = first;
    if (!copies_.get()) copies_ = Buffer<V>(round() * p_.pixels * p_.head_dim);
    const int64_t rows = ceil_div(p_.pixels, COPIED_PIXELS);
    parallel_ranges(count * rows, small, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i % count, pixel = i / count * COPIED_PIXELS, pixels = std::min(COPIED_PIXELS, p_.pixels - pixel);
        const V* const from = value_.at((first + head) / p_.heads, pixel, (first + head) % p_.heads, 0);
        V* const to = copies_.get() + (head * p_.pixels + pixel) * p_.head_dim;
        if (value_.stride[3] == 1) {
          copy_short_rows(from, value_.stride[1], to, p_.head_dim, pixels, p_.head_dim);
        } else {
          convert_matrix(from, value_.stride[3], value_.stride[1], to, 1, p_.head_dim, p_.head_dim, pixels);
        }
      }
    });
  }
  uintptr_t pixels(int64_t head) const {
    return reinterpret_cast<uintptr_t>(copied_ ? copies_.get() + (head - first_) * p_.pixels * p_.head_dim
                                               : value_.at(head / p_.heads, 0, head % p_.heads, 0));
  }
  int64_t pixel_bytes() const { return (copied_ ? p_.head_dim : value_.stride[1]) * static_cast<int64_t>(sizeof(V)); }

 private:
  static constexpr int64_t COPIED_PIXELS = 64;
  const MsDeformAttnParams& p_;
  const View4<const V> value_;
  const bool copied_;
  Buffer<V> copies_;
  int64_t first_ = 0;
};

// ---- forward --------------------------------------------------------------------------------------------------------------------------

// out[c] += sum over points [first, end) of weight * value, for COUNT vectors of channels that start at `channel`.
template <typename A, typename V, int COUNT>
DEFORMC_INLINE void attend_vectors(const Points<A>& s, int64_t first, int64_t end, int64_t channel, A* out) {
  const auto at = [&](uintptr_t address) { return reinterpret_cast<const V*>(address) + channel; };
  Vector<A> sums[COUNT];
  for (int v = 0; v < COUNT; ++v) sums[v] = load(out + v * LANES<A>);
  for (int64_t i = first; i < end; ++i) {
    const V *const p00 = at(s.from.a00[i]), *const p01 = at(s.from.a01[i]), *const p10 = at(s.from.a10[i]), *const p11 = at(s.from.a11[i]);
    const A w00 = s.w00[i], w01 = s.w01[i], w10 = s.w10[i], w11 = s.w11[i], weight = s.weight[i];
    for (int v = 0; v < COUNT; ++v) {
      const int64_t c = v * LANES<A>;
      sums[v] = sums[v] + weight * (w00 * load_as<A>(p00 + c) + w01 * load_as<A>(p01 + c) + w10 * load_as<A>(p10 + c) + w11 * load_as<A>(p11 + c));
    }
  }
  for (int v = 0; v < COUNT; ++v) store(out + v * LANES<A>, sums[v]);
}

#if DEFORMC_HAS_VECTORS

// The same for bfloat16, whose numbers are the upper halves of float's: of every 32-bit word of a line, one shift and one mask give the
// even and the odd channel, and only the sums are put in order. `out` is 0 before.
template <int COUNT>
DEFORMC_INLINE void attend_words(const Points<float>& s, int64_t first, int64_t end, int64_t channel, float* out) {
  const auto at = [&](uintptr_t address) { return reinterpret_cast<const BFloat16*>(address) + channel; };
  Vector<float> even[COUNT] = {}, odd[COUNT] = {};
  for (int64_t i = first; i < end; ++i) {
    const BFloat16 *const p00 = at(s.from.a00[i]), *const p01 = at(s.from.a01[i]), *const p10 = at(s.from.a10[i]), *const p11 = at(s.from.a11[i]);
    const float w00 = s.w00[i], w01 = s.w01[i], w10 = s.w10[i], w11 = s.w11[i], weight = s.weight[i];
    for (int v = 0; v < COUNT; ++v) {
      const int64_t c = 2 * v * LANES<float>;
      const Words b00 = load_words(p00 + c), b01 = load_words(p01 + c), b10 = load_words(p10 + c), b11 = load_words(p11 + c);
      even[v] = even[v] + weight * (w00 * even_of(b00) + w01 * even_of(b01) + w10 * even_of(b10) + w11 * even_of(b11));
      odd[v] = odd[v] + weight * (w00 * odd_of(b00) + w01 * odd_of(b01) + w10 * odd_of(b10) + w11 * odd_of(b11));
    }
  }
  for (int v = 0; v < COUNT; ++v) store_interleaved(out + 2 * v * LANES<float>, even[v], odd[v]);
}

#endif

// out [queries, channels] = the attended values.
template <typename A, typename V>
DEFORMC_MULTIVERSION static void attend_points(Points<A> s, int64_t points, int64_t queries, int64_t channels, A* out) {
  std::fill_n(out, queries * channels, A(0));
  for (int64_t q = 0; q < queries; ++q, out += channels) {
    const int64_t first = q * points, end = first + points;
    int64_t c = 0;
#if DEFORMC_HAS_VECTORS
    if constexpr (std::is_same_v<V, BFloat16>) {
      for (; c + 4 * LANES<A> <= channels; c += 4 * LANES<A>) attend_words<2>(s, first, end, c, out + c);
      for (; c + 2 * LANES<A> <= channels; c += 2 * LANES<A>) attend_words<1>(s, first, end, c, out + c);
    }
#endif
    for (; c + 4 * LANES<A> <= channels; c += 4 * LANES<A>) attend_vectors<A, V, 4>(s, first, end, c, out + c);
    for (; c + 2 * LANES<A> <= channels; c += 2 * LANES<A>) attend_vectors<A, V, 2>(s, first, end, c, out + c);
    for (; c + LANES<A> <= channels; c += LANES<A>) attend_vectors<A, V, 1>(s, first, end, c, out + c);
    if (c == channels) continue;
    for (int64_t i = first; i < end; ++i) {
      const auto at = [&](uintptr_t address) { return reinterpret_cast<const V*>(address); };
      const V *const p00 = at(s.from.a00[i]), *const p01 = at(s.from.a01[i]), *const p10 = at(s.from.a10[i]), *const p11 = at(s.from.a11[i]);
      for (int64_t k = c; k < channels; ++k)
        out[k] += s.weight[i] * (s.w00[i] * static_cast<A>(p00[k]) + s.w01[i] * static_cast<A>(p01[k]) + s.w10[i] * static_cast<A>(p10[k]) +
                                 s.w11[i] * static_cast<A>(p11[k]));
    }
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

// Gradients of the points of a chunk, [queries, points].
template <typename A>
struct PointGradients {
  A *location_x, *location_y, *weight;
};

// gradient: [queries, channels]. READ: fills `out`, from the values. SCATTER: adds to the gradient of the value.
template <typename A, typename V, bool READ, bool SCATTER>
DEFORMC_MULTIVERSION static void backpropagate_points(Points<A> s, const int32_t* height, const int32_t* width, bool discrete, int64_t points,
                                                      int64_t queries, int64_t channels, const A* gradient, PointGradients<A> out) {
  for (int64_t i = 0; i < queries * points; ++i) {
    const A* const g = gradient + i / points * channels;
    const auto from = [&](uintptr_t address) { return reinterpret_cast<const V*>(address); };
    const auto into = [&](uintptr_t address) { return reinterpret_cast<A*>(address); };
    const V *p00 = nullptr, *p01 = nullptr, *p10 = nullptr, *p11 = nullptr;
    A *g00 = nullptr, *g01 = nullptr, *g10 = nullptr, *g11 = nullptr;
    if constexpr (READ) p00 = from(s.from.a00[i]), p01 = from(s.from.a01[i]), p10 = from(s.from.a10[i]), p11 = from(s.from.a11[i]);
    if constexpr (SCATTER) g00 = into(s.into.a00[i]), g01 = into(s.into.a01[i]), g10 = into(s.into.a10[i]), g11 = into(s.into.a11[i]);
    const A weight = s.weight[i], w00 = weight * s.w00[i], w01 = weight * s.w01[i], w10 = weight * s.w10[i], w11 = weight * s.w11[i];
    Vector<A> s00 = {}, s01 = {}, s10 = {}, s11 = {};
    int64_t c = 0;
    for (; c + LANES<A> <= channels; c += LANES<A>) {
      const Vector<A> vector = load(g + c);
      if constexpr (READ) {
        s00 = s00 + vector * load_as<A>(p00 + c);
        s01 = s01 + vector * load_as<A>(p01 + c);
        s10 = s10 + vector * load_as<A>(p10 + c);
        s11 = s11 + vector * load_as<A>(p11 + c);
      }
      if constexpr (SCATTER) {
        store(g00 + c, load(g00 + c) + w00 * vector);
        store(g01 + c, load(g01 + c) + w01 * vector);
        store(g10 + c, load(g10 + c) + w10 * vector);
        store(g11 + c, load(g11 + c) + w11 * vector);
      }
    }
    CornerSums<A> sums = {0, 0, 0, 0};
    if (READ && c > 0) {
      A lanes[4];
      sum_lanes(s00, s01, s10, s11, lanes);
      sums = {lanes[0], lanes[1], lanes[2], lanes[3]};
    }
    for (; c < channels; ++c) {
      if constexpr (READ) {
        sums.s00 += g[c] * static_cast<A>(p00[c]);
        sums.s01 += g[c] * static_cast<A>(p01[c]);
        sums.s10 += g[c] * static_cast<A>(p10[c]);
        sums.s11 += g[c] * static_cast<A>(p11[c]);
      }
      if constexpr (SCATTER) {
        g00[c] += w00 * g[c];
        g01[c] += w01 * g[c];
        g10[c] += w10 * g[c];
        g11[c] += w11 * g[c];
      }
    }
    if constexpr (READ) {
      const SampleGradients<A> gradients = sample_gradients(sums, s.fraction_y[i], s.fraction_x[i], weight);
      const bool nan = is_nan(s.fraction_y[i]) | is_nan(s.fraction_x[i]);
      // Where nothing is read, 0 even if the weight is infinite.
      const A constant = nan ? std::numeric_limits<A>::quiet_NaN() : A(0);
      const bool moves = !nan && !discrete && (s.corners[i] & EVERY_CORNER);
      out.location_x[i] = moves ? gradients.x * static_cast<A>(width[i]) : constant;
      out.location_y[i] = moves ? gradients.y * static_cast<A>(height[i]) : constant;
      out.weight[i] = !nan && (s.corners[i] & POINT_COUNTS) ? gradients.factor : constant;
    }
  }
}

// Writes [queries, points] pairs (x, y) and weights where they belong; either may be absent.
template <typename A, typename C>
void store_gradients(const PointGradients<A>& gradients, int64_t points, int64_t queries, int64_t query_stride, C* locations, C* weights) {
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t at = q * points;
    if (locations) {
      convert(gradients.location_x + at, 1, locations + 2 * q * query_stride, 2, points);
      convert(gradients.location_y + at, 1, locations + 2 * q * query_stride + 1, 2, points);
    }
    if (weights) convert(gradients.weight + at, 1, weights + q * query_stride, 1, points);
  }
}

}  // namespace deformc
