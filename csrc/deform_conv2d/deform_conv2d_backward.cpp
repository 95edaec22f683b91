// deform_conv2d: the backward kernel of the CPU.
//
// The tiles of the forward direction; the columns are sampled again in the loop that forms the gradients. Work is shared out by channel blocks
// (and images), so each thread owns the part of grad_input that it adds to: no atomics, no copy for each thread, the same sums in every run.

#include <numeric>
#include <tuple>

#include "deform_conv2d/deform_conv2d_blocks.h"
#include "deform_conv2d/deform_conv2d_host.h"

namespace deformc {
namespace {

struct Needs {
  bool input, offset, weight, bias, mask;
  bool positions() const { return offset || mask; }
  bool columns() const { return input || positions(); }  // their gradient
  bool samples() const { return positions() || weight; }
};

// Output pixels between two reductions of the blocks' shares in the gradients of offset and mask.
constexpr int64_t CHUNK_PIXELS = 8192;
constexpr int64_t BACKWARD_BYTES = int64_t{64} << 20;
constexpr int64_t MIN_BLOCK_CHANNELS = 8;

// grad_columns[tap, c] (+)= weight[tap, c] * grad_output[c].
template <typename A>
DEFORMC_MULTIVERSION static void multiply_depthwise_transposed(int64_t taps, int64_t channels, int64_t count, bool add,
                                                               const A* DEFORMC_RESTRICT grad_output, const A* DEFORMC_RESTRICT weight,
                                                               A* DEFORMC_RESTRICT grad_columns) {
  for (int64_t i = 0; i < count; ++i, grad_output += channels, grad_columns += taps * channels)
    for (int64_t tap = 0; tap < taps; ++tap)
      for (int64_t c = 0; c < channels; ++c) {
        const A product = weight[tap * channels + c] * grad_output[c];
        grad_columns[tap * channels + c] = add ? grad_columns[tap * channels + c] + product : product;
      }
}

// grad_weight[tap, c] += sum over pixels of columns[tap, c] * grad_output[c].
template <typename A>
DEFORMC_MULTIVERSION static void add_depthwise_weight_gradient(int64_t taps, int64_t channels, int64_t count,
                                                               const A* DEFORMC_RESTRICT grad_output, const A* DEFORMC_RESTRICT columns,
                                                               A* DEFORMC_RESTRICT grad_weight) {
  for (int64_t i = 0; i < count; ++i, grad_output += channels, columns += taps * channels)
    for (int64_t tap = 0; tap < taps; ++tap)
      for (int64_t c = 0; c < channels; ++c) grad_weight[tap * channels + c] += columns[tap * channels + c] * grad_output[c];
}

template <typename A>
DEFORMC_MULTIVERSION static void add_to(int64_t count, const A* DEFORMC_RESTRICT values, A* DEFORMC_RESTRICT sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] += values[i];
}

template <typename T, typename C>
struct Backward {
  using A = accumulate_t<T>;

  const DeformConv2dParams& p;
  Needs needs;
  View4<const T> grad_output, input;
  View4<const C> offset, mask;
  View4<T> grad_input, grad_weight;
  A *grad_offset, *grad_mask;  // [N, 2*G*Kh*Kw, Ho*Wo] and [N, G*Kh*Kw, Ho*Wo], zero at first
  bool direct;

  int64_t taps = int64_t{p.kernel_h} * p.kernel_w;
  int64_t pixels = int64_t{p.out_h} * p.out_w, image_pixels = int64_t{p.in_h} * p.in_w;
  int64_t group_out = p.out_channels / p.groups;
  bool depthwise = is_depthwise(p);
  std::vector<ChannelBlock> blocks{};
  PackedWeight<A> weight{};
  int64_t subsets = 1, chunk = 0, tile = 0;
  // BLAS reads grad_output itself if it can; else its pixels of a chunk are converted once, for all blocks: [subsets, O, chunk].
  bool gradient_direct = false;
  Buffer<A> gradient_chunk{};

  // One block of channels over one subset of the images: what a thread owns while it works on them.
  struct Unit {
    const ChannelBlock* block;
    int64_t subset;
    Buffer<A> image;        // [in_h, in_w, channels]: copy of the input, unless it can be read directly
    Buffer<A> grad_image;   // [in_h, in_w, channels]
    Buffer<A> grad_weight;  // [O/groups, Kh*Kw, channels]
    Buffer<A> shares;       // [3 (y, x, mask), Kh*Kw, chunk]: of the gradients of offset and mask
  };

  void run(const T* unpacked_weight) {
    const bool small = p.batch * pixels * taps * p.in_channels * group_out < SMALL_WORK;
    const int64_t threads = small ? 1 : torch::stable::get_num_threads();
    subsets = std::gcd(p.batch, threads);
    // Enough blocks for every thread, the same number for each, and no more channels at a time than the workspace allows.
    const int64_t share = threads / subsets;
    // In double: the sizes of expanded tensors may be so large that their products do not fit an integer.
    const double channel_bytes = 1.0 * std::max<int64_t>(1, image_pixels) * sizeof(A) * std::max(1, (needs.samples() && !direct) + needs.input);
    const double budget = std::max(1.0 * BACKWARD_BYTES, 1.0 * p.batch * p.in_channels * image_pixels * sizeof(T) / 4);
    const auto affordable = [&](double bytes) { return static_cast<int64_t>(std::clamp(budget / bytes, 1.0, 1.0 * p.in_channels)); };
    const int64_t even = ceil_div(p.in_channels, ceil_div(ceil_div(p.in_channels, MAX_BLOCK_CHANNELS), share) * share);
    const int64_t max_channels = std::min({std::max(even, MIN_BLOCK_CHANNELS), affordable(channel_bytes * threads), MAX_BLOCK_CHANNELS});
    blocks = cut_channels(p, taps, max_channels);
    const int64_t block_count = static_cast<int64_t>(blocks.size());
    const int64_t round = std::min(affordable(channel_bytes * max_channels * subsets * share) * share, block_count);

    weight = pack_weight(p, unpacked_weight, blocks, WeightOrder::BY_OUTPUT, small);
    tile = tile_pixels(p, 2 * max_channels * taps * sizeof(A), pixels, 1);
    chunk = std::min(pixels, ceil_div(CHUNK_PIXELS, tile) * tile);
    const int64_t by_channel = grad_output.stride[1], by_pixel = grad_output.stride[3];
    gradient_direct = std::is_same_v<T, A> && grad_output.stride[2] == p.out_w * by_pixel &&
                      ((by_pixel == 1 && by_channel >= pixels) || (by_channel == 1 && by_pixel >= p.out_channels));
    if (!gradient_direct) gradient_chunk = Buffer<A>(subsets * p.out_channels * chunk);
    for (int64_t first = 0; first < block_count; first += round) run_round(first, std::min(round, block_count - first), small);
  }

  void run_round(int64_t first_block, int64_t count, bool small) {
    std::vector<Unit> units;
    for (int64_t subset = 0; subset < subsets; ++subset) {
      for (int64_t b = first_block; b < first_block + count; ++b) {
        const ChannelBlock& block = blocks[b];
        units.push_back({&block, subset, Buffer<A>(needs.samples() && !direct ? image_pixels * block.channels : 0),
                         Buffer<A>(needs.input ? image_pixels * block.channels : 0),
                         Buffer<A>(needs.weight ? group_out * taps * block.channels : 0),
                         Buffer<A>(needs.columns() && needs.samples() ? 3 * taps * chunk : 0)});
      }
    }
    const int64_t subset_images = p.batch / subsets;
    for (int64_t image = 0; image < subset_images; ++image) {
      for (int64_t first = 0; first < pixels; first += chunk) {
        const int64_t end = std::min(first + chunk, pixels);
        if (!gradient_direct) {
          parallel_ranges(subsets * p.out_channels, small, [&](int64_t begin, int64_t row_end) {
            for (int64_t row = begin; row < row_end; ++row)
              load_pixels(grad_output, row / p.out_channels * subset_images + image, row % p.out_channels, p.out_w, first, end - first,
                          gradient_chunk.get() + row * chunk);
          });
        }
        parallel_ranges(static_cast<int64_t>(units.size()), small, [&](int64_t unit_begin, int64_t unit_end) {
          Scratch scratch(*this);
          for (int64_t u = unit_begin; u < unit_end; ++u) run_unit(units[u], image, first, end, scratch);
        });
        if (needs.positions()) add_shares(units, image, first, end, small);
      }
    }
    if (needs.weight) store_weight_gradient(units, count, small);
  }

  struct Scratch {
    SamplePlan<A> plan;
    Buffer<A> columns, grad_columns;  // [tile, Kh*Kw, channels]
    Buffer<A> grad_output;            // [tile, channels], for depthwise convolution
    explicit Scratch(const Backward& f)
        : plan(f.taps, f.tile), columns(f.tile * f.taps * MAX_BLOCK_CHANNELS), grad_columns(f.tile * f.taps * MAX_BLOCK_CHANNELS),
          grad_output(f.tile * MAX_BLOCK_CHANNELS) {}
  };

  // Output pixels [first, end) of the subset's image number `image`.
  void run_unit(const Unit& unit, int64_t image, int64_t first, int64_t end, const Scratch& scratch) const {
    const ChannelBlock& block = *unit.block;
    const int64_t n = unit.subset * (p.batch / subsets) + image;
    if (first == 0) {
      if (unit.image.get()) copy_rows(input, n, block, p.in_w, 0, p.in_h, unit.image.get());
      if (needs.input) std::fill_n(unit.grad_image.get(), image_pixels * block.channels, A(0));
      if (needs.weight && image == 0) std::fill_n(unit.grad_weight.get(), group_out * taps * block.channels, A(0));
    }
    BlockSource<A> source = block_source(p, input, n, block);
    source.window = direct ? direct_window(p, input, n, block)
                           : ImageWindow<const A>{unit.image.get(), p.in_w * block.channels, block.channels, 0, p.in_h};
    for (int64_t pixel = first; pixel < end; pixel += tile)
      run_tile(unit, {n, pixel, std::min(tile, end - pixel), pixel - first}, source, scratch);
    if (needs.input && end == pixels) {
      for (int64_t y = 0; y < p.in_h; ++y)
        convert_matrix(unit.grad_image.get() + y * p.in_w * block.channels, block.channels, 1, grad_input.at(n, block.first, y, 0),
                       grad_input.stride[3], grad_input.stride[1], p.in_w, block.channels);
    }
  }

  struct TilePixels {
    int64_t n, first, count;  // of image n
    int64_t chunk_first;      // `first` counted from the chunk's first pixel
  };

  void run_tile(const Unit& unit, const TilePixels& at, const BlockSource<A>& source, const Scratch& scratch) const {
    const ChannelBlock& block = *unit.block;
    const int64_t depth = taps * block.channels;
    plan_samples(p, offset, mask, at.n, block.offset_group, at.first, at.count, scratch.plan);
    if (needs.columns()) {
      multiply_transposed(unit, at, scratch);
      BackwardTile<A> work{};
      work.grad_columns = scratch.grad_columns.get();
      work.grad_image = {unit.grad_image.get(), p.in_w * block.channels, block.channels, 0, p.in_h};
      if (needs.samples()) {
        work.columns = scratch.columns.get();
        work.grad_y = unit.shares.get() + at.chunk_first;
        work.grad_x = work.grad_y + taps * chunk;
        work.grad_mask = work.grad_x + taps * chunk;
        work.grad_stride = chunk;
      }
      const auto backpropagate = !needs.samples() ? backpropagate_block<A, false, true>
                                                  : (needs.input ? backpropagate_block<A, true, true> : backpropagate_block<A, true, false>);
      backpropagate(scratch.plan.samples, taps, at.count, source, work);
    } else {
      sample_block(scratch.plan.samples, taps, at.count, source, scratch.columns.get(), depth);
    }
    if (!needs.weight) return;
    if (depthwise) {
      for (int64_t j = 0; j < group_out; ++j)
        add_depthwise_weight_gradient(taps, block.channels, at.count, depthwise_gradient(at, unit, j, scratch), scratch.columns.get(),
                                      unit.grad_weight.get() + j * depth);
    } else {
      matrix_product<A>({unit.grad_weight.get(), group_out, depth, depth, 1},
                        output_gradient(at, block.group * group_out, group_out, unit.subset),
                        {scratch.columns.get(), at.count, depth, depth, 1}, 1, at.count);
    }
  }

  // grad_columns = weight^T @ grad_output.
  void multiply_transposed(const Unit& unit, const TilePixels& at, const Scratch& scratch) const {
    const ChannelBlock& block = *unit.block;
    const int64_t depth = taps * block.channels;
    if (depthwise) {
      for (int64_t j = 0; j < group_out; ++j)
        multiply_depthwise_transposed(taps, block.channels, at.count, j > 0, depthwise_gradient(at, unit, j, scratch),
                                      weight.depthwise(block, j), scratch.grad_columns.get());
      return;
    }
    const Matrix<const A> gradient = output_gradient(at, block.group * group_out, group_out, unit.subset);
    matrix_product<A>({scratch.grad_columns.get(), at.count, depth, depth, 1}, gradient.transposed(), weight.backward(block, depth), 0,
                      at.count);
  }

  // grad_output of some output channels at the pixels of a tile.
  Matrix<const A> output_gradient(const TilePixels& at, int64_t first_out, int64_t channels, int64_t subset) const {
    if constexpr (std::is_same_v<T, A>) {
      if (gradient_direct)
        return {grad_output.at(at.n, first_out, 0, 0) + at.first * grad_output.stride[3], channels, at.count, grad_output.stride[1],
                grad_output.stride[3]};
    }
    return {gradient_chunk.get() + (subset * p.out_channels + first_out) * chunk + at.chunk_first, channels, at.count, chunk, 1};
  }

  // grad_output of output channel j of each channel of a depthwise block, [count, channels].
  const A* depthwise_gradient(const TilePixels& at, const Unit& unit, int64_t j, const Scratch& scratch) const {
    const ChannelBlock& block = *unit.block;
    const Matrix<const A> gradient = output_gradient(at, block.first * group_out + j, block.channels, unit.subset);
    convert_matrix(gradient.data, gradient.row_stride * group_out, gradient.column_stride, scratch.grad_output.get(), 1, block.channels,
                   block.channels, at.count);
    return scratch.grad_output.get();
  }

  // Adds the blocks' shares, block by block, so that the sums do not depend on which thread came first.
  void add_shares(const std::vector<Unit>& units, int64_t image, int64_t first, int64_t end, bool small) const {
    const int64_t block_count = static_cast<int64_t>(units.size()) / subsets;
    const int64_t first_group = units.front().block->offset_group, groups = units.back().block->offset_group - first_group + 1;
    parallel_ranges(subsets * groups * taps, small, [&](int64_t begin, int64_t item_end) {
      for (int64_t item = begin; item < item_end; ++item) {
        const int64_t subset = item / (groups * taps), group = first_group + item / taps % groups, tap = item % taps;
        const int64_t n = subset * (p.batch / subsets) + image;
        const int64_t channel = (n * p.offset_groups + group) * taps + tap;
        for (int64_t b = 0; b < block_count; ++b) {
          const Unit& unit = units[subset * block_count + b];
          if (unit.block->offset_group != group) continue;
          const A* const shares = unit.shares.get() + tap * chunk;
          if (needs.offset) {
            add_to(end - first, shares, grad_offset + 2 * channel * pixels + first);
            add_to(end - first, shares + taps * chunk, grad_offset + (2 * channel + 1) * pixels + first);
          }
          if (needs.mask) add_to(end - first, shares + 2 * taps * chunk, grad_mask + channel * pixels + first);
        }
      }
    });
  }

  void store_weight_gradient(const std::vector<Unit>& units, int64_t block_count, bool small) const {
    parallel_ranges(block_count * group_out, small, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Unit& unit = units[i / group_out];
        const ChannelBlock& block = *unit.block;
        const int64_t row = i % group_out, depth = taps * block.channels;
        A* const sums = unit.grad_weight.get() + row * depth;
        for (int64_t subset = 1; subset < subsets; ++subset)
          add_to(depth, units[subset * block_count + i / group_out].grad_weight.get() + row * depth, sums);
        for (int64_t tap = 0; tap < taps; ++tap) {
          const int64_t ky = tap / p.kernel_w, kx = tap % p.kernel_w;
          if (depthwise) {
            convert(sums + tap * block.channels, 1, grad_weight.at(block.first * group_out + row, 0, ky, kx),
                    group_out * grad_weight.stride[0], block.channels);
          } else {
            convert(sums + tap * block.channels, 1,
                    grad_weight.at(block.group * group_out + row, block.first % (p.in_channels / p.groups), ky, kx), grad_weight.stride[1],
                    block.channels);
          }
        }
      }
    });
  }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients deform_conv2d_backward_cpu(const Tensor& grad_output, const Tensor& input, const Tensor& offset, const Tensor& weight,
                                     const OptionalTensor& mask, int64_t stride_h, int64_t stride_w, int64_t pad_h, int64_t pad_w,
                                     int64_t dilation_h, int64_t dilation_w, bool allow_tf32, bool need_input, bool need_offset,
                                     bool need_weight, bool need_bias, bool need_mask, bool deterministic) {
  const char* const op = "deform_conv2d_backward";
  const DeformConv2dParams p = check_arguments(op, input, offset, weight, std::nullopt, mask,
                                               {stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w});
  check_grad_output(op, p, input, grad_output);
  const Needs needs{need_input, need_offset, need_weight, need_bias, need_mask && mask};

  const Coordinates coordinates = widen_coordinates(offset, mask);
  const Tensor packable = torch::stable::contiguous(weight);
  const ScalarType accumulate = input.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const auto absent = [](const Tensor& like) { return torch::stable::new_empty(like, {0}); };
  Tensor grad_input = needs.input ? empty_like_layout(input, {p.batch, p.in_channels, p.in_h, p.in_w}, is_channels_last(input)) : absent(input);
  Tensor grad_weight = needs.weight ? torch::stable::new_empty(weight, weight.sizes()) : absent(weight);
  Tensor grad_offset = needs.offset ? torch::stable::new_zeros(offset, offset.sizes(), accumulate) : absent(offset);
  Tensor grad_mask = needs.mask ? torch::stable::new_zeros(*mask, mask->sizes(), accumulate) : absent(mask ? *mask : input);
  const Tensor grad_bias = needs.bias ? sum_of_channels(grad_output) : absent(input);
  if (grad_output.numel() == 0) {
    torch::stable::zero_(grad_input);
    torch::stable::zero_(grad_weight);
  } else if (needs.columns() || needs.weight) {
    dispatch_dtypes(input.scalar_type(), coordinates.positions.scalar_type(), [&](auto data, auto coordinate) {
      using T = typename decltype(data)::type;
      using C = typename decltype(coordinate)::type;
      using A = accumulate_t<T>;
      const View4<const T> input_view = view4<const T>(input);
      Backward<T, C>{p,
                     needs,
                     view4<const T>(grad_output),
                     input_view,
                     view4<const C>(coordinates.positions),
                     coordinates.factors ? view4<const C>(*coordinates.factors) : View4<const C>{},
                     needs.input ? view4<T>(grad_input) : View4<T>{},
                     needs.weight ? view4<T>(grad_weight) : View4<T>{},
                     static_cast<A*>(grad_offset.mutable_data_ptr()),
                     static_cast<A*>(grad_mask.mutable_data_ptr()),
                     reads_directly(input_view)}
          .run(static_cast<const T*>(packable.const_data_ptr()));
    });
  }
  // Offset and mask may be narrower than what their gradients were summed in.
  return {grad_input, narrowed(grad_offset, offset), grad_weight, grad_bias, narrowed(grad_mask, mask ? *mask : input)};
}

}  // namespace
}  // namespace deformc

STABLE_TORCH_LIBRARY_IMPL(deformc, CPU, m) { m.impl("deform_conv2d_backward", TORCH_BOX(&deformc::deform_conv2d_backward_cpu)); }
