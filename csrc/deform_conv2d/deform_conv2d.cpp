// deform_conv2d: schemas, and the forward kernel of the CPU.
//
// For each tile of output pixels, sample the columns [pixels, channels * taps] of a few channel blocks, and multiply them by the weight while
// they are in cache. The full column matrix never exists.

#include "deform_conv2d/deform_conv2d_blocks.h"
#include "deform_conv2d/deform_conv2d_host.h"

namespace deformc {
namespace {

// Images and rows that are worked on at a time: the output rows, and the input rows of which a copy is held.
struct Slab {
  int64_t first_image, images;
  int64_t first_out_row, end_out_row;
  int64_t first_row, end_row;
};

// Whole images where a copy of one fits, else bands of output rows with the input rows around them.
std::vector<Slab> cut_slabs(const DeformConv2dParams& p, int64_t row_bytes, bool direct) {
  std::vector<Slab> slabs;
  const int64_t image_bytes = row_bytes * p.in_h;
  if (direct || image_bytes <= IMAGE_COPY_BYTES) {
    const int64_t images = direct ? p.batch : std::max<int64_t>(1, IMAGE_COPY_BYTES / std::max<int64_t>(1, image_bytes));
    for (int64_t n = 0; n < p.batch; n += images) slabs.push_back({n, std::min(images, p.batch - n), 0, p.out_h, 0, p.in_h});
    return slabs;
  }
  const int64_t window = IMAGE_COPY_BYTES / row_bytes;
  const int64_t reach = int64_t{p.kernel_h - 1} * p.dilation_h + 2;  // rows below the first tap's, without offsets
  const int64_t margin = std::max<int64_t>(0, (window - reach) / 4);
  const int64_t out_rows = std::max<int64_t>(1, (window - reach - 2 * margin) / p.stride_h);
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t oy = 0; oy < p.out_h; oy += out_rows) {
      const int64_t end = std::min<int64_t>(oy + out_rows, p.out_h);
      const int64_t first = std::clamp<int64_t>(oy * p.stride_h - p.pad_h - margin, 0, p.in_h);
      slabs.push_back({n, 1, oy, end, first, std::clamp<int64_t>(first + window, first, p.in_h)});
    }
  }
  return slabs;
}

// out[c] = sum over taps of weight[tap, c] * columns[tap, c], plus bias.
template <typename A>
DEFORMC_MULTIVERSION static void multiply_depthwise(int64_t taps, int64_t channels, int64_t count, const A* columns,
                                                    const A* DEFORMC_RESTRICT weight, const A* DEFORMC_RESTRICT bias,
                                                    A* DEFORMC_RESTRICT out) {
  for (int64_t i = 0; i < count; ++i, out += channels, columns += taps * channels) {
    std::copy_n(bias, channels, out);
    for (int64_t tap = 0; tap < taps; ++tap)
      for (int64_t c = 0; c < channels; ++c) out[c] += weight[tap * channels + c] * columns[tap * channels + c];
  }
}

template <typename T, typename C>
struct Forward {
  using A = accumulate_t<T>;

  const DeformConv2dParams& p;
  View4<const T> input;
  View4<const C> offset, mask;
  const T* weight_bias;  // [O] or null
  int64_t bias_stride;
  View4<T> out;
  bool direct;

  int64_t taps = int64_t{p.kernel_h} * p.kernel_w;
  std::vector<ChannelBlock> blocks = cut_channels(p, taps, MAX_BLOCK_CHANNELS);
  PackedWeight<A> weight{};
  Buffer<A> bias{};    // [O]
  Buffer<A> images{};  // copies of a slab: [image, block, row, in_w, channels]
  Slab slab{};
  int64_t tile = 0;

  void run(const T* unpacked_weight) {
    const int64_t work = p.batch * p.out_h * p.out_w * taps * p.in_channels * (p.out_channels / p.groups);
    const bool small = work < SMALL_WORK;
    weight = pack_weight(p, unpacked_weight, blocks, WeightOrder::BY_COLUMN, small);
    bias = Buffer<A>(p.out_channels);
    if (weight_bias) {
      convert(weight_bias, bias_stride, bias.get(), 1, p.out_channels);
    } else {
      std::fill_n(bias.get(), p.out_channels, A(0));
    }
    const std::vector<Slab> slabs = cut_slabs(p, p.in_channels * p.in_w * sizeof(A), direct);
    if (!direct) {
      int64_t largest = 0;
      for (const Slab& s : slabs) largest = std::max(largest, s.images * (s.end_row - s.first_row));
      images = Buffer<A>(largest * p.in_w * p.in_channels);
    }
    for (const Slab& next : slabs) {
      slab = next;
      const int64_t rows = slab.end_row - slab.first_row, block_count = static_cast<int64_t>(blocks.size());
      if (!direct) {
        parallel_ranges(slab.images * block_count * rows, small, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const ChannelBlock& block = blocks[i / rows % block_count];
            const int64_t image = i / (rows * block_count), row = i % rows;
            copy_rows(input, slab.first_image + image, block, p.in_w, slab.first_row + row, slab.first_row + row + 1,
                      copy_of(image, block) + row * p.in_w * block.channels);
          }
        });
      }
      const int64_t pixels = (slab.end_out_row - slab.first_out_row) * p.out_w;
      tile = tile_pixels(p, product_depth() * sizeof(A), pixels, slab.images);
      const int64_t image_tiles = ceil_div(pixels, tile);
      parallel_ranges(slab.images * image_tiles, small, [&](int64_t begin, int64_t end) {
        Scratch scratch(*this);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t first = i % image_tiles * tile;
          compute_tile(i / image_tiles, slab.first_out_row * p.out_w + first, std::min(tile, pixels - first), scratch);
        }
      });
    }
  }

  A* copy_of(int64_t image, const ChannelBlock& block) const {
    const int64_t row_pixels = (slab.end_row - slab.first_row) * p.in_w;
    return images.get() + (image * p.in_channels + block.first) * row_pixels;
  }

  // Most columns of one matrix product.
  int64_t product_depth() const {
    int64_t largest = 0;
    for (const ChannelBlock& block : blocks) largest = std::max(largest, block.channels * taps);
    return std::max(largest, std::min(MIN_PRODUCT_DEPTH + largest, weight.columns));
  }

  struct Scratch {
    SamplePlan<A> plan;
    Buffer<A> columns;  // [tile, product_depth]
    Buffer<A> result;   // [tile, O/groups], or for depthwise convolution [tile, channels]
    explicit Scratch(const Forward& f)
        : plan(f.taps, f.tile), columns(f.tile * f.product_depth()),
          result(f.tile * std::max(f.p.out_channels / f.p.groups, MAX_BLOCK_CHANNELS)) {}
  };

  void compute_tile(int64_t image, int64_t first, int64_t count, const Scratch& scratch) const {
    const int64_t n = slab.first_image + image;
    int64_t planned = -1;
    for (size_t b = 0; b < blocks.size();) {
      // As many blocks of one group as make a product worth its call.
      size_t end = b;
      int64_t depth = 0;
      do {
        depth += blocks[end++].channels * taps;
      } while (!is_depthwise(p) && depth < MIN_PRODUCT_DEPTH && end < blocks.size() && blocks[end].group == blocks[b].group);
      for (size_t i = b; i < end; ++i) {
        const ChannelBlock& block = blocks[i];
        if (block.offset_group != planned) plan_samples(p, offset, mask, n, block.offset_group, first, count, scratch.plan);
        planned = block.offset_group;
        BlockSource<A> source = block_source(p, input, n, block);
        source.window = direct ? direct_window(p, input, n, block)
                               : ImageWindow<const A>{copy_of(image, block), p.in_w * block.channels, block.channels,
                                                      static_cast<int32_t>(slab.first_row), static_cast<int32_t>(slab.end_row)};
        sample_block(scratch.plan.samples, taps, count, source, scratch.columns.get() + block.column - blocks[b].column, depth);
      }
      if (is_depthwise(p)) {
        finish_depthwise(n, first, count, blocks[b], scratch);
      } else {
        multiply(n, first, count, blocks[b], depth, scratch);
      }
      b = end;
    }
  }

  // Adds one product to the outputs of a group; the first product starts them, the last one writes them.
  void multiply(int64_t n, int64_t first, int64_t count, const ChannelBlock& block, int64_t depth, const Scratch& scratch) const {
    const int64_t group_out = weight.group_out, first_out = block.group * group_out;
    T* const target = out.at(n, first_out, 0, 0) + first * out.stride[3];
    Matrix<A> sums{scratch.result.get(), count, group_out, group_out, 1};
    bool in_place = false;
    if constexpr (std::is_same_v<T, A>) {
      in_place = out.stride[1] == 1;
      if (in_place) sums = {target, count, group_out, out.stride[3], 1};
    }
    const bool starts = block.column == 0;
    if (starts && weight_bias)
      for (int64_t i = 0; i < count; ++i) std::copy_n(bias.get() + first_out, group_out, sums.data + i * sums.row_stride);
    matrix_product<A>(sums, {scratch.columns.get(), count, depth, depth, 1}, weight.forward(block, depth), starts && !weight_bias ? 0 : 1,
                      count);
    if (!in_place && block.column + depth == weight.columns)
      convert_matrix(sums.data, group_out, 1, target, out.stride[3], out.stride[1], count, group_out);
  }

  void finish_depthwise(int64_t n, int64_t first, int64_t count, const ChannelBlock& block, const Scratch& scratch) const {
    const int64_t multiplier = p.out_channels / p.groups;
    A block_bias[MAX_BLOCK_CHANNELS];
    for (int64_t j = 0; j < multiplier; ++j) {
      convert(bias.get() + block.first * multiplier + j, multiplier, block_bias, 1, block.channels);
      multiply_depthwise(taps, block.channels, count, scratch.columns.get(), weight.depthwise(block, j), block_bias, scratch.result.get());
      convert_matrix(scratch.result.get(), block.channels, 1, out.at(n, block.first * multiplier + j, 0, 0) + first * out.stride[3],
                     out.stride[3], multiplier * out.stride[1], count, block.channels);
    }
  }
};

Tensor deform_conv2d_cpu(const Tensor& input, const Tensor& offset, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& mask,
                         int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w, int64_t dilation_h, int64_t dilation_w,
                         bool allow_tf32) {
  const DeformConv2dParams p = check_arguments("deform_conv2d", input, offset, weight, bias, mask,
                                               {stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w});
  const Tensor out = empty_like_layout(input, {p.batch, p.out_channels, p.out_h, p.out_w}, is_channels_last(input));
  if (out.numel() == 0) return out;
  const Coordinates coordinates = widen_coordinates(offset, mask);
  const Tensor packable = torch::stable::contiguous(weight);
  dispatch_dtypes(input.scalar_type(), coordinates.positions.scalar_type(), [&](auto data, auto coordinate) {
    using T = typename decltype(data)::type;
    using C = typename decltype(coordinate)::type;
    const View4<const T> input_view = view4<const T>(input);
    Forward<T, C>{p,
                  input_view,
                  view4<const C>(coordinates.positions),
                  coordinates.factors ? view4<const C>(*coordinates.factors) : View4<const C>{},
                  bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
                  bias ? bias->stride(0) : 0,
                  view4<T>(out),
                  reads_directly(input_view)}
        .run(static_cast<const T*>(packable.const_data_ptr()));
  });
  return out;
}

}  // namespace
}  // namespace deformc

STABLE_TORCH_LIBRARY_FRAGMENT(deformc, m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, SymInt stride_h, SymInt stride_w, SymInt pad_h, "
      "SymInt pad_w, SymInt dilation_h, SymInt dilation_w, bool allow_tf32) -> Tensor");
  m.def(
      "deform_conv2d_backward(Tensor grad_output, Tensor input, Tensor offset, Tensor weight, Tensor? mask, SymInt stride_h, SymInt stride_w, "
      "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, bool allow_tf32, bool need_input, bool need_offset, "
      "bool need_weight, bool need_bias, bool need_mask, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(deformc, CPU, m) { m.impl("deform_conv2d", TORCH_BOX(&deformc::deform_conv2d_cpu)); }
