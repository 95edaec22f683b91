// ms_deform_attn: schemas, and the forward kernel of the CPU.

#include <tuple>

#include "ms_deform_attn/ms_deform_attn_cpu.h"
#include "ms_deform_attn/ms_deform_attn_host.h"

namespace deformc {
namespace {

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
