// deform_conv2d, host side of every device: the argument check, and what the kernels are chosen by.
#pragma once

#include <algorithm>

#include "common/host.h"
#include "deform_conv2d/deform_conv2d.h"

namespace deformc {

struct Window2d {  // the integer arguments, in the order of the schema
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

constexpr int64_t SIZE_LIMIT = int64_t{1} << 30;

// The one check of every device and both directions. deformc/ops/deform_conv2d.py says the same of fake tensors, in the same words and order.
inline DeformConv2dParams check_arguments(const char* op, const Tensor& input, const Tensor& offset, const Tensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& mask, const Window2d& a) {
  check_rank(op, "input", input, 4, "[N, C, H, W]");
  check_rank(op, "weight", weight, 4, "[O, C/groups, Kh, Kw]");
  check_rank(op, "offset", offset, 4, "[N, 2*G*Kh*Kw, Ho, Wo]");
  if (mask) check_rank(op, "mask", *mask, 4, "[N, G*Kh*Kw, Ho, Wo]");
  if (bias) check_rank(op, "bias", *bias, 1, "[O]");

  check_data_dtype(op, "input", input);
  check_same_dtype(op, "weight", weight, "input", input);
  check_coordinate_dtype(op, "offset", offset, "input", input);
  if (mask) check_coordinate_dtype(op, "mask", *mask, "input", input);
  if (bias) check_same_dtype(op, "bias", *bias, "input", input);

  check_same_device(op, "weight", weight, "input", input);
  check_same_device(op, "offset", offset, "input", input);
  if (mask) check_same_device(op, "mask", *mask, "input", input);
  if (bias) check_same_device(op, "bias", *bias, "input", input);

  using Pair = std::array<int64_t, 2>;
  check(a.stride_h >= 1 && a.stride_w >= 1, op, "stride must be at least 1, got ", Pair{a.stride_h, a.stride_w});
  check(a.pad_h >= 0 && a.pad_w >= 0, op, "padding must be at least 0, got ", Pair{a.pad_h, a.pad_w});
  check(a.dilation_h >= 1 && a.dilation_w >= 1, op, "dilation must be at least 1, got ", Pair{a.dilation_h, a.dilation_w});

  const int64_t channels = input.size(1), kernel_h = weight.size(2), kernel_w = weight.size(3), group_channels = weight.size(1);
  check(channels > 0, op, "input must have at least one channel, got shape ", ShapeText{input});
  check(kernel_h > 0 && kernel_w > 0, op, "weight must have a kernel of at least 1x1, got shape ", ShapeText{weight});
  check(group_channels > 0 && channels % group_channels == 0, op, "weight must have shape [O, C/groups, Kh, Kw] with C/groups dividing C = ",
        channels, ", got ", ShapeText{weight});
  const int64_t groups = channels / group_channels;
  check(weight.size(0) % groups == 0, op, "weight must have shape [O, C/groups, Kh, Kw] with groups = ", groups, " dividing O, got ",
        ShapeText{weight});

  // Paddings and dilations may be anything that an integer holds.
  const auto padded = [](int64_t size, int64_t pad) { return saturating_add(size, saturating_multiply(2, pad)); };
  const auto extent = [](int64_t kernel, int64_t dilation) { return saturating_add(saturating_multiply(dilation, kernel - 1), 1); };
  const int64_t padded_h = padded(input.size(2), a.pad_h), padded_w = padded(input.size(3), a.pad_w);
  const int64_t extent_h = extent(kernel_h, a.dilation_h), extent_w = extent(kernel_w, a.dilation_w);
  check(extent_h <= padded_h && extent_w <= padded_w, op, "kernel must not be larger than the padded input, ", Pair{padded_h, padded_w},
        ", got ", Pair{extent_h, extent_w});
  check(padded_h < SIZE_LIMIT && padded_w < SIZE_LIMIT, op, "input is too large: H, W and their padded sizes must be below 2^30, got ",
        Pair{padded_h, padded_w});

  DeformConv2dParams p;
  p.batch = input.size(0);
  p.in_channels = channels;
  p.out_channels = weight.size(0);
  p.groups = groups;
  p.in_h = static_cast<int32_t>(input.size(2));
  p.in_w = static_cast<int32_t>(input.size(3));
  p.kernel_h = static_cast<int32_t>(kernel_h);
  p.kernel_w = static_cast<int32_t>(kernel_w);
  p.pad_h = static_cast<int32_t>(a.pad_h);
  p.pad_w = static_cast<int32_t>(a.pad_w);
  // A stride beyond the image or the dilation of a single tap changes nothing, and need not fit.
  p.stride_h = static_cast<int32_t>(std::min(a.stride_h, SIZE_LIMIT));
  p.stride_w = static_cast<int32_t>(std::min(a.stride_w, SIZE_LIMIT));
  p.dilation_h = kernel_h == 1 ? 1 : static_cast<int32_t>(a.dilation_h);
  p.dilation_w = kernel_w == 1 ? 1 : static_cast<int32_t>(a.dilation_w);
  p.out_h = static_cast<int32_t>((padded_h - extent_h) / p.stride_h + 1);
  p.out_w = static_cast<int32_t>((padded_w - extent_w) / p.stride_w + 1);

  const int64_t taps = kernel_h * kernel_w;
  const int64_t offset_channels = offset.size(1) > 0 && offset.size(1) % (2 * taps) == 0 ? offset.size(1) : 2 * taps;
  check_shape<4>(op, "offset", offset, "[N, 2*G*Kh*Kw, Ho, Wo]", {p.batch, offset_channels, p.out_h, p.out_w});
  p.offset_groups = offset_channels / (2 * taps);
  check(channels % p.offset_groups == 0, op, "offset must have shape [N, 2*G*Kh*Kw, Ho, Wo] with G = ", p.offset_groups, " dividing C = ",
        channels, ", got ", ShapeText{offset});
  if (mask) check_shape<4>(op, "mask", *mask, "[N, G*Kh*Kw, Ho, Wo]", {p.batch, p.offset_groups * taps, p.out_h, p.out_w});
  if (bias) check_shape<1>(op, "bias", *bias, "[O]", {p.out_channels});
  return p;
}

inline void check_grad_output(const char* op, const DeformConv2dParams& p, const Tensor& input, const Tensor& grad_output) {
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_shape<4>(op, "grad_output", grad_output, "[N, O, Ho, Wo]", {p.batch, p.out_channels, p.out_h, p.out_w});
}

// The gradient of the bias.
inline Tensor sum_of_channels(const Tensor& grad_output) {
  const std::array<int64_t, 3> all_but_channels{0, 2, 3};
  return torch::stable::sum(grad_output, torch::headeronly::IntHeaderOnlyArrayRef{all_but_channels.data(), 3});
}

}  // namespace deformc
