// deform_conv2d on Apple GPUs, host side. The kernels are in deform_conv2d.metal.

#include <numeric>
#include <tuple>

#include "common/metal.h"
#include "deform_conv2d/deform_conv2d_host.h"

namespace deformc {
namespace {

// As in the kernels.
constexpr int64_t TILE_PIXELS = 32, TILE_COLUMNS = 32, TILE_OUTPUTS = 128, THREADS = 128, SIMDGROUP = 32, BAND_CHANNELS = 128;
// Pixels of a band, see gather_grad_input: few enough for many simdgroups, as each looks at all samples of its channels.
constexpr int32_t BAND_PIXELS = 128;
// Workspace: partial sums of the weight's gradient, and the columns that the deterministic gradient of the input keeps at a time.
constexpr int64_t WORKSPACE_BYTES = int64_t{64} << 20;
// Threadgroups that keep a large GPU busy.
constexpr int64_t ENOUGH_GROUPS = 512;

DeformConv2dStrides strides_of(const Tensor& tensor) { return {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)}; }

int32_t round_up(int64_t value, int64_t multiple) { return static_cast<int32_t>(metal::ceil_div(value, multiple) * multiple); }

// A call, prepared for launches.
struct MetalConvolution {
  const char* op;
  const Tensor &input, &weight;
  DeformConv2dParams p;
  Coordinates coordinates;
  DeformConv2dDeviceParams d{};
  Tensor packed;  // the weight; made by the first launch
  std::vector<metal::Launch> launches;

  MetalConvolution(const char* op, const DeformConv2dParams& params, const Tensor& input, const Tensor& offset, const Tensor& weight,
                   const OptionalTensor& mask)
      : op(op), input(input), weight(weight), p(params), coordinates(widen_coordinates(offset, mask)) {
    const int64_t pixels = int64_t{p.out_h} * p.out_w, taps = int64_t{p.kernel_h} * p.kernel_w, group_channels = p.in_channels / p.groups;
    const int64_t segment = std::gcd(group_channels, p.in_channels / p.offset_groups);
    const int64_t columns = taps * (group_channels / segment) * round_up(segment, 4);
    check(pixels < SIZE_LIMIT && columns < SIZE_LIMIT && p.out_channels < SIZE_LIMIT, op,
          "Ho*Wo, C/groups*Kh*Kw and O must be below 2^30 on mps, got ", std::array<int64_t, 3>{pixels, columns, p.out_channels});
    d.p = p;
    d.input = strides_of(input);
    d.offset = strides_of(coordinates.positions);
    d.has_mask = coordinates.factors.has_value();
    if (d.has_mask) d.mask = strides_of(*coordinates.factors);
    d.weight_o = weight.stride(0), d.weight_c = weight.stride(1), d.weight_y = weight.stride(2), d.weight_x = weight.stride(3);
    d.segment = static_cast<int32_t>(segment);
    d.segment_columns = round_up(segment, 4);
    d.columns = static_cast<int32_t>(columns);
    d.packed_columns = round_up(columns, TILE_COLUMNS);
    d.packed_outputs = round_up(p.out_channels / p.groups, 8);
    d.tiles = static_cast<int32_t>(metal::ceil_div(pixels, TILE_PIXELS));
    d.band_pixels = BAND_PIXELS;
  }

  // An input without pixels has no memory to bind; it is not read then.
  const Tensor& bound_input() const { return input.numel() > 0 ? input : packed; }
  const Tensor& bound_mask() const { return coordinates.factors ? *coordinates.factors : coordinates.positions; }

  std::string name(const char* kernel) const { return std::string(kernel) + "_" + metal::type_name(input.scalar_type()); }
  std::string name_of_both(const char* kernel) const {
    const bool vector = d.segment % 4 == 0 && metal::has_vectors(input, 1);
    return name(kernel) + "_" + metal::type_name(coordinates.positions.scalar_type()) + (vector ? "_vector" : "");
  }

  void launch(std::string kernel, const std::vector<Tensor>& tensors, std::array<int64_t, 3> groups, int64_t threads = THREADS) {
    metal::Launch& made = launches.emplace_back(metal::Launch{std::move(kernel), {}, groups, threads});
    made.arguments.insert(made.arguments.end(), tensors.begin(), tensors.end());
    made.arguments.push_back(metal::bytes_of(d));
  }
  void launch_packing() {
    packed = torch::stable::new_empty(weight, {p.groups, d.packed_columns, d.packed_outputs}, ScalarType::Float);
    launch(name("pack_weight"), {weight, packed}, {metal::ceil_div(int64_t{d.packed_columns} * d.packed_outputs, THREADS), p.groups, 1});
  }
  int64_t output_tiles() const { return p.groups * metal::ceil_div(p.out_channels / p.groups, TILE_OUTPUTS); }
};

Tensor deform_conv2d_mps(const Tensor& input, const Tensor& offset, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& mask,
                         int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
                         bool allow_tf32) {
  const char* const op = "deform_conv2d";
  const DeformConv2dParams p = check_arguments(op, input, offset, weight, bias, mask, {stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w});
  const Tensor out = empty_like_layout(input, {p.batch, p.out_channels, p.out_h, p.out_w}, is_channels_last(input));
  if (out.numel() == 0) return out;
  MetalConvolution call(op, p, input, offset, weight, mask);
  call.d.output = strides_of(out);
  call.d.has_bias = bias.has_value();
  if (bias) call.d.bias_o = bias->stride(0);
  call.launch_packing();
  call.launch(call.name_of_both("convolve_tile"),
              {call.bound_input(), call.coordinates.positions, call.bound_mask(), call.packed, bias ? *bias : weight, out},
              {call.d.tiles, call.output_tiles(), p.batch});
  metal::run(op, call.launches);
  return out;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients deform_conv2d_backward_mps(const Tensor& grad_output, const Tensor& input, const Tensor& offset, const Tensor& weight,
                                     const OptionalTensor& mask, int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w,
                                     int64_t dilation_h, int64_t dilation_w, bool allow_tf32, bool need_input, bool need_offset,
                                     bool need_weight, bool need_bias, bool need_mask, bool deterministic) {
  const char* const op = "deform_conv2d_backward";
  const DeformConv2dParams p =
      check_arguments(op, input, offset, weight, std::nullopt, mask, {stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w});
  check_grad_output(op, p, input, grad_output);
  need_mask = need_mask && mask;

  const auto absent = [](const Tensor& like) { return torch::stable::new_empty(like, {0}); };
  const auto zeros = [&](bool needed, const Tensor& like) {
    return needed ? torch::stable::new_zeros(like, like.sizes(), ScalarType::Float) : absent(like);
  };
  // What several threads add to is float.
  Tensor grad_input = need_input ? empty_like_layout(input, {p.batch, p.in_channels, p.in_h, p.in_w}, is_channels_last(input), ScalarType::Float)
                                 : absent(input);
  if (need_input) torch::stable::zero_(grad_input);
  Tensor grad_offset = zeros(need_offset, offset), grad_mask = zeros(need_mask, mask ? *mask : offset);
  Tensor grad_weight = need_weight ? torch::stable::new_empty(weight, weight.sizes()) : absent(weight);
  const Tensor grad_bias = need_bias ? sum_of_channels(grad_output) : absent(input);

  if (grad_output.numel() == 0) {
    torch::stable::zero_(grad_weight);
  } else if (need_input || need_offset || need_mask || need_weight) {
    MetalConvolution call(op, p, input, offset, weight, mask);
    DeformConv2dDeviceParams& d = call.d;
    d.output = strides_of(grad_output);
    const Tensor &positions = call.coordinates.positions, &factors = call.bound_mask();
    const auto bound = [&](const Tensor& tensor) -> const Tensor& { return tensor.numel() > 0 ? tensor : grad_output; };
    call.launch_packing();

    if (need_input || need_offset || need_mask) {
      const int32_t tiles = d.tiles;
      const bool gather = need_input && deterministic && grad_input.numel() > 0;
      const int64_t tile_bytes = p.batch * TILE_PIXELS * p.groups * d.packed_columns * int64_t{sizeof(float)};
      if (need_input) d.grad_input = strides_of(grad_input);
      d.need_input = need_input && !deterministic;
      d.need_offset = need_offset;
      d.need_mask = need_mask;
      d.store_columns = gather;
      // All at once, or as many tiles as their columns have room for.
      d.tiles = gather ? static_cast<int32_t>(std::clamp<int64_t>(WORKSPACE_BYTES / tile_bytes, 1, tiles)) : tiles;
      const Tensor columns = gather ? torch::stable::new_empty(input, {d.tiles * tile_bytes / int64_t{sizeof(float)}}, ScalarType::Float) : grad_output;
      for (const int32_t step = d.tiles; d.first_tile < tiles; d.first_tile += step) {
        d.tiles = std::min(step, tiles - d.first_tile);
        call.launch(call.name_of_both("backpropagate_tile"),
                    {call.bound_input(), positions, factors, call.packed, grad_output, bound(grad_input), bound(grad_offset), bound(grad_mask), columns},
                    {d.tiles, 1, p.batch});
        if (!gather) continue;
        const int64_t blocks = p.offset_groups * metal::ceil_div(p.in_channels / p.offset_groups, BAND_CHANNELS);
        call.launch(std::string("gather_grad_input_") + metal::type_name(positions.scalar_type()), {positions, factors, columns, grad_input},
                    {metal::ceil_div(int64_t{p.in_h} * p.in_w, BAND_PIXELS), blocks, p.batch}, SIMDGROUP);
      }
      d.first_tile = 0;
      d.tiles = tiles;
    }

    if (need_weight) {
      const int64_t column_tiles = d.packed_columns / TILE_COLUMNS, all_tiles = p.batch * d.tiles;
      const int64_t slice_size = p.groups * d.packed_columns * d.packed_outputs;
      const int64_t most = std::max<int64_t>(1, WORKSPACE_BYTES / (slice_size * int64_t{sizeof(float)}));
      const int64_t wanted = std::min(most, metal::ceil_div(ENOUGH_GROUPS, column_tiles * call.output_tiles()));
      const int64_t slice_tiles = metal::ceil_div(all_tiles, std::min(wanted, all_tiles));
      check(slice_tiles < SIZE_LIMIT, op, "N*Ho*Wo is too large for mps");
      d.slice_tiles = static_cast<int32_t>(slice_tiles);
      d.slices = static_cast<int32_t>(metal::ceil_div(all_tiles, slice_tiles));
      const Tensor partial = torch::stable::new_empty(input, {d.slices * slice_size}, ScalarType::Float);
      call.launch(call.name_of_both("sum_grad_weight"), {call.bound_input(), positions, factors, grad_output, partial},
                  {column_tiles, call.output_tiles(), d.slices});
      call.launch(call.name("add_slices"), {partial, grad_weight}, {metal::ceil_div(weight.numel(), THREADS), 1, 1});
    }
    metal::run(op, call.launches);
  }
  return {narrowed(grad_input, input), narrowed(grad_offset, offset), grad_weight, grad_bias, narrowed(grad_mask, mask ? *mask : input)};
}

}  // namespace
}  // namespace deformc

STABLE_TORCH_LIBRARY_IMPL(deformc, MPS, m) {
  m.impl("deform_conv2d", TORCH_BOX(&deformc::deform_conv2d_mps));
  m.impl("deform_conv2d_backward", TORCH_BOX(&deformc::deform_conv2d_backward_mps));
}
