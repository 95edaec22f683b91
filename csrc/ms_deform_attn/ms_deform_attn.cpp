// ms_deform_attn: schemas, and both directions on the CPU.

#include <tuple>

#include "ms_deform_attn/ms_deform_attn_cpu.h"
#include "ms_deform_attn/ms_deform_attn_host.h"

namespace deformc {
namespace {

// Points below which one thread does the whole call.
constexpr int64_t SMALL_POINTS = 512;
// Copies of the value, at most, where that leaves a choice.
constexpr int64_t VALUE_COPY_BYTES = int64_t{64} << 20;

// The levels of the classic form, read from its tensors. Any levels inside the value are right, also such as overlap.
std::vector<AttnLevel> read_levels(const char* op, const LevelTensors& tensors, const Sizes& num_points, int64_t pixels) {
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

// The value of single heads, [S, D] each. The heads of a pixel lie beside each other, so those of one head are far apart and share few places
// of the caches: where there are many points, the head is copied first.
template <typename V>
class HeadValues {
 public:
  HeadValues(const MsDeformAttnParams& p, const View4<const V>& value)
      : p_(p), value_(value), copied_(value.stride[3] != 1 || p.queries * p.points >= p.pixels) {}

  // Heads, counted over all images, that can be worked on at a time.
  int64_t round() const {
    const int64_t all = p_.batch * p_.heads, bytes = std::max<int64_t>(1, p_.pixels * p_.head_dim * sizeof(V));
    return copied_ ? std::clamp<int64_t>(VALUE_COPY_BYTES / bytes, 1, all) : all;
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
  const V* pixels(int64_t head) const {
    return copied_ ? copies_.get() + (head - first_) * p_.pixels * p_.head_dim : value_.at(head / p_.heads, 0, head % p_.heads, 0);
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

template <typename V, typename C>
struct Attention {
  using A = accumulate_t<V>;

  const MsDeformAttnParams& p;
  const std::vector<AttnLevel>& levels;
  View4<const V> value;
  View<const C, 5> locations;
  View<const C, 4> weights;

  bool small = p.batch * p.queries * p.heads * p.points < SMALL_POINTS;

  void forward(V* out) const {  // [N, Q, M, D]
    const PointTable table(levels.data(), static_cast<int64_t>(levels.size()), p.queries);
    const int64_t chunks = ceil_div(p.queries, table.queries()), heads = p.batch * p.heads;
    Buffer<V> zeros(p.head_dim);
    std::fill_n(zeros.get(), p.head_dim, V(0));
    HeadValues<V> values(p, value);
    for (int64_t round = values.round(), first_head = 0; first_head < heads; first_head += round) {
      const int64_t count_heads = std::min(round, heads - first_head);
      values.load(first_head, count_heads, small);
      parallel_ranges(count_heads * chunks, small, [&](int64_t begin, int64_t end) {
        PointPlan<A> plan(table.size());
        const Points<A>& s = plan.points;
        Buffer<A> sums(table.queries() * p.head_dim);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t head = first_head + i / chunks, n = head / p.heads, m = head % p.heads;
          const int64_t first = i % chunks * table.queries(), count = std::min(table.queries(), p.queries - first);
          plan_points(p, table, 0, locations, weights, n, m, first, count, s);
          find_addresses(count * p.points, table.width(), table.start(), s, POINT_COUNTS, values.pixels(head), values.pixel_bytes(),
                         zeros.get(), s.from);
          attend_points<A, V>(s, p.points, count, p.head_dim, sums.get());
          convert_rows(sums.get(), p.head_dim, out + ((n * p.queries + first) * p.heads + m) * p.head_dim, p.heads * p.head_dim, count,
                       p.head_dim);
        }
      });
    }
  }
};

Tensor attend(const MsDeformAttnArguments& a, const MsDeformAttnParams& p, const std::vector<AttnLevel>& levels) {
  Tensor out = torch::stable::new_empty(a.value, {p.batch, p.queries, p.heads * p.head_dim});
  if (out.numel() == 0) return out;
  const Coordinates points = widen_coordinates(a.sampling_locations, a.attention_weights);
  dispatch_dtypes(a.value.scalar_type(), points.positions.scalar_type(), [&](auto data, auto coordinate) {
    using V = typename decltype(data)::type;
    using C = typename decltype(coordinate)::type;
    Attention<V, C>{p, levels, view4<const V>(a.value), view_of<const C, 5>(points.positions), view_of<const C, 4>(*points.factors)}.forward(
        static_cast<V*>(out.mutable_data_ptr()));
  });
  return out;
}

Tensor ms_deform_attn_cpu(const Tensor& value, const Sizes& spatial_shapes, const Tensor& sampling_locations, const Tensor& attention_weights,
                          const Sizes& num_points, const std::string& mode) {
  const MsDeformAttnArguments a{"ms_deform_attn", value, sampling_locations, attention_weights, num_points, mode};
  const MsDeformAttnParams p = check_arguments(a, &spatial_shapes, nullptr);
  return attend(a, p, levels_of(spatial_shapes, num_points));
}

Tensor ms_deform_attn_tensor_shapes_cpu(const Tensor& value, const Tensor& spatial_shapes, const Tensor& level_start_index,
                                        const Tensor& sampling_locations, const Tensor& attention_weights, const Sizes& num_points,
                                        const std::string& mode) {
  const MsDeformAttnArguments a{"ms_deform_attn_tensor_shapes", value, sampling_locations, attention_weights, num_points, mode};
  const LevelTensors tensors{spatial_shapes, level_start_index};
  const MsDeformAttnParams p = check_arguments(a, nullptr, &tensors);
  return attend(a, p, read_levels(a.op, tensors, num_points, p.pixels));
}

}  // namespace
}  // namespace deformc

STABLE_TORCH_LIBRARY_FRAGMENT(deformc, m) {
  m.def(
      "ms_deform_attn(Tensor value, SymInt[] spatial_shapes, Tensor sampling_locations, Tensor attention_weights, int[] num_points, str mode) "
      "-> Tensor");
  m.def(
      "ms_deform_attn_tensor_shapes(Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor sampling_locations, "
      "Tensor attention_weights, int[] num_points, str mode) -> Tensor");
  m.def(
      "ms_deform_attn_backward(Tensor grad_output, Tensor value, SymInt[] spatial_shapes, Tensor sampling_locations, "
      "Tensor attention_weights, int[] num_points, str mode, bool need_value, bool need_locations, bool need_weights, bool deterministic) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "ms_deform_attn_tensor_shapes_backward(Tensor grad_output, Tensor value, Tensor spatial_shapes, Tensor level_start_index, "
      "Tensor sampling_locations, Tensor attention_weights, int[] num_points, str mode, bool need_value, bool need_locations, "
      "bool need_weights, bool deterministic) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(deformc, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&deformc::ms_deform_attn_cpu));
  m.impl("ms_deform_attn_tensor_shapes", TORCH_BOX(&deformc::ms_deform_attn_tensor_shapes_cpu));
}
