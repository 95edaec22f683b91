// ms_deform_attn: the backward kernel of the CPU.
//
// A thread works on one level of one head of one image: nothing else adds to that part of the value's gradient, and no two threads share a
// point. So there are no atomics, no copy for each thread, and the sums are the same in every run.

#include <tuple>

#include "ms_deform_attn/ms_deform_attn_cpu.h"
#include "ms_deform_attn/ms_deform_attn_host.h"

namespace deformc {
namespace {

// Levels that are worked on together, and the pixels [first, end) that hold them.
struct LevelGroup {
  int64_t first_point;
  int64_t first, end;
  PointTable table;
};

// Each level on its own, or if any two overlap (the classic form allows it) all of them together.
std::vector<LevelGroup> group_levels(const std::vector<AttnLevel>& levels, const MsDeformAttnParams& p) {
  const int64_t count = static_cast<int64_t>(levels.size());
  const auto end = [](const AttnLevel& level) { return level.start + int64_t{level.height} * level.width; };
  bool overlap = false;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < i; ++j) overlap |= levels[i].start < end(levels[j]) && levels[j].start < end(levels[i]);
  std::vector<LevelGroup> groups;
  if (overlap) {
    groups.push_back({0, 0, p.pixels, PointTable(levels.data(), count, p.queries)});
  } else {
    for (const AttnLevel& level : levels) groups.push_back({level.first_point, level.start, end(level), PointTable(&level, 1, p.queries)});
  }
  return groups;
}

template <typename V, typename C>
struct Backward {
  using A = accumulate_t<V>;

  const MsDeformAttnParams& p;
  std::vector<LevelGroup> groups;
  View<const V, 3> grad_output;
  View4<const V> value;
  View<const C, 5> locations;
  View<const C, 4> weights;
  // Contiguous, or null where not needed; the value's is zero at first.
  V* grad_value;      // [N, S, M, D]
  C* grad_locations;  // [N, Q, M, T, 2]
  C* grad_weights;    // [N, Q, M, T]

  bool small = p.batch * p.queries * p.heads * p.points < SMALL_POINTS;
  bool reads = grad_locations || grad_weights;

  struct Scratch {
    PointPlan<A> plan;
    Buffer<A> gradient;     // [queries, D]
    Buffer<A> points;       // [3, queries, points]
    Buffer<A> nowhere;      // [D]
    Buffer<A> grad_pixels;  // [pixels of a group, D]
  };

  void run() {
    int64_t plan_size = 0, queries = 0, pixels = 0;
    for (const LevelGroup& group : groups) {
      plan_size = std::max(plan_size, group.table.size());
      queries = std::max(queries, group.table.queries());
      pixels = std::max(pixels, group.end - group.first);
    }
    HeadValues<V> values(p, value);
    // The gradient's own memory serves where it has the type of the sums and its pixels need not be brought together.
    const bool direct = std::is_same_v<V, A> && !is_dense(p);
    Buffer<V> zeros(p.head_dim);
    std::fill_n(zeros.get(), p.head_dim, V(0));
    const int64_t heads = p.batch * p.heads, group_count = static_cast<int64_t>(groups.size());
    for (int64_t round = reads ? values.round() : heads, first_head = 0; first_head < heads; first_head += round) {
      const int64_t count = std::min(round, heads - first_head);
      if (reads) values.load(first_head, count, small);
      parallel_ranges(count * group_count, small, [&](int64_t begin, int64_t end) {
        Scratch scratch{PointPlan<A>(plan_size), Buffer<A>(queries * p.head_dim), Buffer<A>(3 * plan_size), Buffer<A>(p.head_dim),
                        Buffer<A>(grad_value && !direct ? pixels * p.head_dim : 0)};
        std::fill_n(scratch.nowhere.get(), p.head_dim, A(0));
        for (int64_t i = begin; i < end; ++i) run_group(groups[i % group_count], first_head + i / group_count, values, zeros.get(), scratch);
      });
    }
  }

  void run_group(const LevelGroup& group, int64_t head, const HeadValues<V>& values, const V* zeros, const Scratch& scratch) const {
    const PointTable& table = group.table;
    const Points<A>& s = scratch.plan.points;
    const int64_t n = head / p.heads, m = head % p.heads, points = table.points(), pixels = group.end - group.first;
    const int64_t own_stride = p.heads * p.head_dim;  // between pixels of grad_value
    V* const own_gradient = grad_value ? grad_value + (n * p.pixels * p.heads + m) * p.head_dim : nullptr;
    const bool direct = !scratch.grad_pixels.get();
    uintptr_t into = reinterpret_cast<uintptr_t>(own_gradient);
    int64_t into_bytes = own_stride * sizeof(V);
    if (!direct) {
      std::fill_n(scratch.grad_pixels.get(), pixels * p.head_dim, A(0));
      into_bytes = p.head_dim * sizeof(A);
      into = reinterpret_cast<uintptr_t>(scratch.grad_pixels.get()) - static_cast<uintptr_t>(group.first) * into_bytes;
    }
    const auto backpropagate = !reads ? backpropagate_points<A, V, false, true>
                                      : (grad_value ? backpropagate_points<A, V, true, true> : backpropagate_points<A, V, true, false>);
    const PointGradients<A> gradients = {scratch.points.get(), scratch.points.get() + table.size(), scratch.points.get() + 2 * table.size()};
    for (int64_t first = 0; points > 0 && first < p.queries; first += table.queries()) {
      const int64_t count = std::min(table.queries(), p.queries - first);
      const V* const gradient = grad_output.at(n, first, m * p.head_dim);
      if (grad_output.stride[2] == 1) {
        convert_rows(gradient, grad_output.stride[1], scratch.gradient.get(), p.head_dim, count, p.head_dim);
      } else {
        for (int64_t q = 0; q < count; ++q)
          convert(gradient + q * grad_output.stride[1], grad_output.stride[2], scratch.gradient.get() + q * p.head_dim, 1, p.head_dim);
      }
      plan_points(p, table, group.first_point, locations, weights, n, m, first, count, s);
      if (reads) find_addresses(count * points, table.width(), table.start(), s, 0, values.pixels(head), values.pixel_bytes(), zeros, s.from);
      if (grad_value)
        find_addresses(count * points, table.width(), table.start(), s, POINT_COUNTS, into, into_bytes, scratch.nowhere.get(), s.into);
      backpropagate(s, table.height(), table.width(), p.discrete, points, count, p.head_dim, scratch.gradient.get(), gradients);
      const int64_t at = ((n * p.queries + first) * p.heads + m) * p.points + group.first_point;
      store_gradients(gradients, points, count, p.heads * p.points, grad_locations ? grad_locations + 2 * at : nullptr,
                      grad_weights ? grad_weights + at : nullptr);
    }
    if (!direct)
      convert_rows(scratch.grad_pixels.get(), p.head_dim, own_gradient + group.first * own_stride, own_stride, pixels, p.head_dim);
  }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

struct Needs {
  bool value, locations, weights;
};

Gradients backpropagate(const MsDeformAttnArguments& a, const MsDeformAttnParams& p, const std::vector<AttnLevel>& levels,
                        const Tensor& grad_output, const Needs& needs) {
  check_grad_output(a, p, grad_output);
  const Coordinates points = widen_coordinates(a.sampling_locations, a.attention_weights);
  const auto gradient = [](bool needed, const Tensor& like) {
    return needed ? torch::stable::new_zeros(like, like.sizes()) : torch::stable::new_empty(like, {0});
  };
  Tensor grad_value = gradient(needs.value, a.value), grad_locations = gradient(needs.locations, points.positions),
         grad_weights = gradient(needs.weights, *points.factors);
  if (grad_output.numel() > 0 && p.points > 0 && (needs.value || needs.locations || needs.weights)) {
    dispatch_dtypes(a.value.scalar_type(), points.positions.scalar_type(), [&](auto data, auto coordinate) {
      using V = typename decltype(data)::type;
      using C = typename decltype(coordinate)::type;
      Backward<V, C>{p,
                     group_levels(levels, p),
                     view_of<const V, 3>(grad_output),
                     view4<const V>(a.value),
                     view_of<const C, 5>(points.positions),
                     view_of<const C, 4>(*points.factors),
                     needs.value ? static_cast<V*>(grad_value.mutable_data_ptr()) : nullptr,
                     needs.locations ? static_cast<C*>(grad_locations.mutable_data_ptr()) : nullptr,
                     needs.weights ? static_cast<C*>(grad_weights.mutable_data_ptr()) : nullptr}
          .run();
    });
  }
  return {grad_value, narrowed(grad_locations, a.sampling_locations), narrowed(grad_weights, a.attention_weights)};
}

Gradients ms_deform_attn_backward_cpu(const Tensor& grad_output, const Tensor& value, const Sizes& spatial_shapes,
                                      const Tensor& sampling_locations, const Tensor& attention_weights, const Sizes& num_points,
                                      const std::string& mode, bool need_value, bool need_locations, bool need_weights, bool deterministic) {
  const MsDeformAttnArguments a{"ms_deform_attn_backward", value, sampling_locations, attention_weights, num_points, mode};
  const MsDeformAttnParams p = check_arguments(a, &spatial_shapes, nullptr);
  return backpropagate(a, p, levels_of(spatial_shapes, num_points), grad_output, {need_value, need_locations, need_weights});
}

Gradients ms_deform_attn_tensor_shapes_backward_cpu(const Tensor& grad_output, const Tensor& value, const Tensor& spatial_shapes,
                                                    const Tensor& level_start_index, const Tensor& sampling_locations,
                                                    const Tensor& attention_weights, const Sizes& num_points, const std::string& mode,
                                                    bool need_value, bool need_locations, bool need_weights, bool deterministic) {
  const MsDeformAttnArguments a{"ms_deform_attn_tensor_shapes_backward", value, sampling_locations, attention_weights, num_points, mode};
  const LevelTensors tensors{spatial_shapes, level_start_index};
  const MsDeformAttnParams p = check_arguments(a, nullptr, &tensors);
  return backpropagate(a, p, read_levels(a.op, tensors, num_points, p.pixels), grad_output, {need_value, need_locations, need_weights});
}

}  // namespace
}  // namespace deformc

STABLE_TORCH_LIBRARY_IMPL(deformc, CPU, m) {
  m.impl("ms_deform_attn_backward", TORCH_BOX(&deformc::ms_deform_attn_backward_cpu));
  m.impl("ms_deform_attn_tensor_shapes_backward", TORCH_BOX(&deformc::ms_deform_attn_tensor_shapes_backward_cpu));
}
