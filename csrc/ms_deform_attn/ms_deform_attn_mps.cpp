// ms_deform_attn on Apple GPUs, host side. The kernels are in ms_deform_attn.metal.

#include <tuple>

#include "common/metal.h"
#include "ms_deform_attn/ms_deform_attn_host.h"

namespace deformc {
namespace {

static_assert(sizeof(AttnLevel) * DEFORMC_MAX_LEVELS <= 4096);

// Pixels of a band, see gather_grad_value: few enough for many simdgroups, as each looks at all points of its levels.
constexpr int32_t BAND_PIXELS = 128;

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

struct Needs {
  bool value, locations, weights;
};

// A call, prepared for launches.
struct MetalAttention {
  MsDeformAttnArguments a;
  MsDeformAttnParams p;
  Coordinates points;
  std::vector<AttnLevel> levels;
  Tensor shapes, starts;  // any tensors where the levels came as a list
  MsDeformAttnDeviceParams d;

  // `list` or `tensors` is null, as in check_arguments.
  MetalAttention(const MsDeformAttnArguments& arguments, const Sizes* list, const LevelTensors* tensors)
      : a(arguments), p(check_arguments(a, list, tensors)), points(widen_coordinates(a.sampling_locations, a.attention_weights)),
        levels(levels_of(list ? *list : Sizes(2 * a.num_points.size(), 0), a.num_points)),
        shapes(tensors ? tensors->spatial_shapes : a.value), starts(tensors ? tensors->level_start_index : a.value), d{} {
    check(levels.size() <= DEFORMC_MAX_LEVELS, a.op, "spatial_shapes must have at most ", DEFORMC_MAX_LEVELS, " levels on mps, got ", levels.size());
    const Tensor &value = a.value, &locations = points.positions, &weights = *points.factors;
    d.p = p;
    d.strides = {value.stride(0), value.stride(1), value.stride(2), value.stride(3),
                 locations.stride(0), locations.stride(1), locations.stride(2), locations.stride(3), locations.stride(4),
                 weights.stride(0), weights.stride(1), weights.stride(2), weights.stride(3),
                 0, 0, 0,
                 tensors ? shapes.stride(0) : 0, tensors ? shapes.stride(1) : 0, tensors ? starts.stride(0) : 0};
    d.levels = static_cast<int32_t>(levels.size());
    d.levels_in_tensors = tensors != nullptr;
    d.band_pixels = BAND_PIXELS;
    d.lanes = 1;
    while (d.lanes < 32 && d.lanes * 4 < p.head_dim) d.lanes *= 2;
  }

  bool has_vectors() const { return p.head_dim % 4 == 0 && metal::has_vectors(a.value, 3); }

  std::string kernel(const char* name, bool vector) const {
    return std::string(name) + "_" + metal::type_name(a.value.scalar_type()) + "_" + metal::type_name(points.positions.scalar_type()) +
           (vector ? "_vector" : "");
  }

  metal::Launch launch(std::string kernel, const std::vector<Tensor>& others, std::array<int64_t, 3> groups, int64_t threads) const {
    metal::Launch launch{std::move(kernel), {a.value, points.positions, *points.factors}, groups, threads};
    launch.arguments.push_back(metal::bytes_of(levels.data(), levels.size()));
    launch.arguments.insert(launch.arguments.end(), {shapes, starts});
    launch.arguments.insert(launch.arguments.end(), others.begin(), others.end());
    launch.arguments.push_back(metal::bytes_of(d));
    return launch;
  }
};

Tensor attend(const MetalAttention& call) {
  const MsDeformAttnParams& p = call.p;
  Tensor out = torch::stable::new_empty(call.a.value, {p.batch, p.queries, p.heads * p.head_dim});
  if (out.numel() == 0) return out;
  if (p.points == 0 || p.pixels == 0) return torch::stable::zero_(out);
  const int64_t threads = p.queries * p.heads * metal::ceil_div(p.head_dim, 4);
  metal::run(call.a.op, {call.launch(call.kernel("attend_points", call.has_vectors()), {out},
                                     {metal::ceil_div(threads, DEFORMC_ATTN_THREADS), p.batch, 1}, DEFORMC_ATTN_THREADS)});
  return out;
}

Gradients backpropagate(MetalAttention&& call, const Tensor& grad_output, const Needs& needs, bool deterministic) {
  const MsDeformAttnArguments& a = call.a;
  const MsDeformAttnParams& p = call.p;
  check_grad_output(a, p, grad_output);
  const auto gradient = [](bool needed, const Tensor& like, ScalarType dtype) {
    return needed ? torch::stable::new_zeros(like, like.sizes(), dtype) : torch::stable::new_empty(like, {0});
  };
  // What several threads add to is float; the others write each number once.
  Tensor grad_value = gradient(needs.value, a.value, ScalarType::Float),
         grad_locations = gradient(needs.locations, call.points.positions, call.points.positions.scalar_type()),
         grad_weights = gradient(needs.weights, *call.points.factors, call.points.factors->scalar_type());
  if (grad_output.numel() > 0 && p.points > 0 && p.pixels > 0) {
    call.d.strides.grad_n = grad_output.stride(0);
    call.d.strides.grad_q = grad_output.stride(1);
    call.d.strides.grad_c = grad_output.stride(2);
    call.d.need_value = needs.value && !deterministic;
    call.d.need_locations = needs.locations;
    call.d.need_weights = needs.weights;
    // A gradient that is not asked for has no memory to bind.
    const auto bound = [&](const Tensor& tensor) { return tensor.numel() > 0 ? tensor : grad_output; };
    std::vector<metal::Launch> launches;
    if (call.d.need_value || needs.locations || needs.weights) {
      const int64_t heads_of_group = DEFORMC_ATTN_THREADS / 32;
      const bool vector = call.has_vectors() && metal::has_vectors(grad_output, 2);
      launches.push_back(call.launch(call.kernel("backpropagate_points", vector),
                                     {grad_output, bound(grad_value), bound(grad_locations), bound(grad_weights)},
                                     {metal::ceil_div(p.queries * p.heads, heads_of_group), p.batch, 1}, DEFORMC_ATTN_THREADS));
    }
    if (needs.value && deterministic)
      launches.push_back(call.launch(call.kernel("gather_grad_value", false), {grad_output, grad_value},
                                     {metal::ceil_div(p.pixels, BAND_PIXELS), p.heads, p.batch}, 32));
    metal::run(a.op, launches);
  }
  return {narrowed(grad_value, a.value), narrowed(grad_locations, a.sampling_locations), narrowed(grad_weights, a.attention_weights)};
}

Tensor ms_deform_attn_mps(const Tensor& value, const Sizes& spatial_shapes, const Tensor& sampling_locations, const Tensor& attention_weights,
                          const Sizes& num_points, const std::string& mode) {
  return attend({{"ms_deform_attn", value, sampling_locations, attention_weights, num_points, mode}, &spatial_shapes, nullptr});
}

Tensor ms_deform_attn_tensor_shapes_mps(const Tensor& value, const Tensor& spatial_shapes, const Tensor& level_start_index,
                                        const Tensor& sampling_locations, const Tensor& attention_weights, const Sizes& num_points,
                                        const std::string& mode) {
  const LevelTensors tensors{spatial_shapes, level_start_index};
  return attend({{"ms_deform_attn_tensor_shapes", value, sampling_locations, attention_weights, num_points, mode}, nullptr, &tensors});
}

Gradients ms_deform_attn_backward_mps(const Tensor& grad_output, const Tensor& value, const Sizes& spatial_shapes,
                                      const Tensor& sampling_locations, const Tensor& attention_weights, const Sizes& num_points,
                                      const std::string& mode, bool need_value, bool need_locations, bool need_weights, bool deterministic) {
  return backpropagate({{"ms_deform_attn_backward", value, sampling_locations, attention_weights, num_points, mode}, &spatial_shapes, nullptr},
                       grad_output, {need_value, need_locations, need_weights}, deterministic);
}

Gradients ms_deform_attn_tensor_shapes_backward_mps(const Tensor& grad_output, const Tensor& value, const Tensor& spatial_shapes,
                                                    const Tensor& level_start_index, const Tensor& sampling_locations,
                                                    const Tensor& attention_weights, const Sizes& num_points, const std::string& mode,
                                                    bool need_value, bool need_locations, bool need_weights, bool deterministic) {
  const LevelTensors tensors{spatial_shapes, level_start_index};
  return backpropagate({{"ms_deform_attn_tensor_shapes_backward", value, sampling_locations, attention_weights, num_points, mode}, nullptr, &tensors},
                       grad_output, {need_value, need_locations, need_weights}, deterministic);
}

}  // namespace
}  // namespace deformc

STABLE_TORCH_LIBRARY_IMPL(deformc, MPS, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&deformc::ms_deform_attn_mps));
  m.impl("ms_deform_attn_tensor_shapes", TORCH_BOX(&deformc::ms_deform_attn_tensor_shapes_mps));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&deformc::ms_deform_attn_backward_mps));
  m.impl("ms_deform_attn_tensor_shapes_backward", TORCH_BOX(&deformc::ms_deform_attn_tensor_shapes_backward_mps));
}
