// deform_conv2d: schemas, the argument check of all devices, and the CPU kernels.
//
// Forward: for each tile of output pixels, sample the columns [pixels, channels * taps] of a few channel blocks, and multiply them by the
// weight while they are in cache. The full column matrix never exists.
// Backward: the same tiles; the columns are sampled again in the loop that forms the gradients. Work is shared out by channel blocks (and
// images), so each thread owns the part of grad_input that it adds to: no atomics, no copy for each thread, the same sums in every run.

#include "deform_conv2d/deform_conv2d.h"

#include <numeric>
#include <tuple>
#include <vector>

#include "common/cpu.h"
#include "deform_conv2d/deform_conv2d_cpu.h"

namespace deformc {
namespace {

// ---- arguments ------------------------------------------------------------------------------------------------------------------------

struct Window2d {  // the integer arguments, in the order of the schema
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

constexpr int64_t SIZE_LIMIT = int64_t{1} << 30;

int64_t saturated(double value) { return value < 9e18 ? static_cast<int64_t>(value) : INT64_MAX; }

// The one check of every device and both directions. deformc/ops/deform_conv2d.py says the same of fake tensors, in the same words and order.
DeformConv2dParams check_arguments(const char* op, const Tensor& input, const Tensor& offset, const Tensor& weight, const OptionalTensor& bias,
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

  // In double: paddings and dilations may be anything that an int64 holds.
  const double padded_h = input.size(2) + 2.0 * a.pad_h, padded_w = input.size(3) + 2.0 * a.pad_w;
  const double extent_h = 1.0 * a.dilation_h * (kernel_h - 1) + 1, extent_w = 1.0 * a.dilation_w * (kernel_w - 1) + 1;
  check(extent_h <= padded_h && extent_w <= padded_w, op, "kernel must not be larger than the padded input, ",
        Pair{saturated(padded_h), saturated(padded_w)}, ", got ", Pair{saturated(extent_h), saturated(extent_w)});
  check(padded_h < SIZE_LIMIT && padded_w < SIZE_LIMIT, op, "input is too large: H, W and their padded sizes must be below 2^30, got ",
        Pair{saturated(padded_h), saturated(padded_w)});

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
  p.out_h = static_cast<int32_t>(static_cast<int64_t>(padded_h - extent_h) / p.stride_h + 1);
  p.out_w = static_cast<int32_t>(static_cast<int64_t>(padded_w - extent_w) / p.stride_w + 1);

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

// Offset and mask in one dtype: the wider of the two.
struct Coordinates {
  Tensor offset;
  OptionalTensor mask;
};

Coordinates widen_coordinates(const Tensor& offset, const OptionalTensor& mask) {
  if (!mask || offset.scalar_type() == mask->scalar_type()) return {offset, mask};
  // The dtypes are that of the data and float32.
  const ScalarType wide = offset.scalar_type() == ScalarType::Double || mask->scalar_type() == ScalarType::Double ? ScalarType::Double
                                                                                                                 : ScalarType::Float;
  return {torch::stable::to(offset, wide), torch::stable::to(*mask, wide)};
}

// Calls body with the type of the data and the type of the coordinates.
template <typename Body>
void dispatch_dtypes(const Tensor& input, const Tensor& offset, const Body& body) {
  dispatch_data_dtype(input.scalar_type(), [&](auto data) {
    if (offset.scalar_type() == input.scalar_type()) {
      body(data, data);
    } else {
      body(data, TypeTag<float>{});
    }
  });
}

// ---- what both directions share ---------------------------------------------------------------------------------------------------------

// Workspace for copies of images, at most, where that leaves a choice. Keeps the two sides of a 1x64x1080x1920 call within 64 MiB.
constexpr int64_t IMAGE_COPY_BYTES = int64_t{40} << 20;
// Columns of one tile stay in the second-level cache.
constexpr int64_t COLUMNS_BYTES = int64_t{768} << 10;
constexpr int64_t MAX_TILE_PIXELS = 128;
// Columns of one matrix product, aimed at where channel blocks are small.
constexpr int64_t MIN_PRODUCT_DEPTH = 512;
// Multiplications below which one thread does the whole call.
constexpr int64_t SMALL_WORK = 1 << 15;

// A run of channels that share offsets, and belong to one group of the convolution unless it is depthwise.
struct ChannelBlock {
  int64_t first, channels;
  int64_t group, offset_group;
  int64_t column;  // where its columns start in the group's row of the packed weight, [Kh*Kw, channels]
};

bool is_depthwise(const DeformConv2dParams& p) { return p.groups > 1 && p.groups == p.in_channels; }

std::vector<ChannelBlock> cut_channels(const DeformConv2dParams& p, int64_t taps, int64_t max_channels) {
  const int64_t group_channels = p.in_channels / p.groups, offset_channels = p.in_channels / p.offset_groups;
  const int64_t unbroken = is_depthwise(p) ? p.in_channels : group_channels;
  std::vector<ChannelBlock> blocks;
  for (int64_t first = 0; first < p.in_channels;) {
    const int64_t end = std::min((first / unbroken + 1) * unbroken, (first / offset_channels + 1) * offset_channels);
    const int64_t pieces = ceil_div(end - first, max_channels);
    const int64_t channels = ceil_div(end - first, pieces);
    blocks.push_back({first, channels, first / group_channels, first / offset_channels, first % unbroken * taps});
    first += channels;
  }
  return blocks;
}

// The weight in the order of the columns. Each group is a matrix [group's columns, O/groups] for the forward direction (BY_COLUMN), and
// [O/groups, group's columns] for the backward one (BY_OUTPUT): the orders in which BLAS is fastest. For depthwise convolution it is
// [O/C, blocks' columns] in both.
enum class WeightOrder { BY_COLUMN, BY_OUTPUT };

template <typename A>
struct PackedWeight {
  Buffer<A> data;
  int64_t columns = 0;    // of a group; of all groups for depthwise convolution
  int64_t group_out = 0;  // O/groups

  Matrix<const A> forward(const ChannelBlock& block, int64_t depth) const {
    return {data.get() + (block.group * columns + block.column) * group_out, depth, group_out, group_out, 1};
  }
  Matrix<const A> backward(const ChannelBlock& block, int64_t depth) const {
    return {data.get() + block.group * group_out * columns + block.column, group_out, depth, columns, 1};
  }
  const A* depthwise(const ChannelBlock& block, int64_t output) const { return data.get() + output * columns + block.column; }
};

template <typename T>
PackedWeight<accumulate_t<T>> pack_weight(const DeformConv2dParams& p, const T* weight, const std::vector<ChannelBlock>& blocks,
                                          WeightOrder order, bool small) {
  using A = accumulate_t<T>;
  constexpr int64_t ROWS = 16;  // outputs that are transposed at a time
  const int64_t taps = int64_t{p.kernel_h} * p.kernel_w, group_out = p.out_channels / p.groups;
  const int64_t group_channels = p.in_channels / p.groups, row_tiles = ceil_div(group_out, ROWS);
  const bool depthwise = is_depthwise(p);
  PackedWeight<A> packed{Buffer<A>(p.out_channels * group_channels * taps), taps * (depthwise ? p.in_channels : group_channels), group_out};
  parallel_ranges(static_cast<int64_t>(blocks.size()) * row_tiles, small, [&](int64_t begin, int64_t end) {
    Buffer<A> turned(ROWS * MAX_BLOCK_CHANNELS * taps);
    for (int64_t i = begin; i < end; ++i) {
      const ChannelBlock& block = blocks[i / row_tiles];
      const int64_t first = i % row_tiles * ROWS, rows = std::min(ROWS, group_out - first), columns = block.channels * taps;
      for (int64_t row = first; depthwise && row < first + rows; ++row) {
        for (int64_t tap = 0; tap < taps; ++tap)
          convert(weight + (block.first * group_out + row) * taps + tap, group_out * taps,
                  packed.data.get() + row * packed.columns + block.column + tap * block.channels, 1, block.channels);
      }
      if (depthwise) continue;
      const T* const source = weight + ((block.group * group_out + first) * group_channels + block.first % group_channels) * taps;
      if (order == WeightOrder::BY_COLUMN) {
        convert_matrix(source, group_channels * taps, 1, turned.get(), 1, ROWS, rows, columns);
        A* const group = packed.data.get() + (block.group * packed.columns + block.column) * group_out + first;
        for (int64_t j = 0; j < columns; ++j)
          std::copy_n(turned.get() + j * ROWS, rows, group + (j % taps * block.channels + j / taps) * group_out);
      } else {
        A* const group = packed.data.get() + (block.group * group_out + first) * packed.columns + block.column;
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t tap = 0; tap < taps; ++tap)
            convert(source + row * group_channels * taps + tap, taps, group + row * packed.columns + tap * block.channels, 1, block.channels);
      }
    }
  });
  return packed;
}

// The rows [first_row, end_row) of a block's channels, channels innermost.
template <typename T>
void copy_rows(const View4<const T>& input, int64_t n, const ChannelBlock& block, int64_t width, int64_t first_row, int64_t end_row,
               accumulate_t<T>* out) {
  for (int64_t y = first_row; y < end_row; ++y, out += width * block.channels)
    convert_matrix(input.at(n, block.first, y, 0), input.stride[1], input.stride[3], out, 1, block.channels, block.channels, width);
}

template <typename T>
BlockSource<accumulate_t<T>> block_source(const DeformConv2dParams& p, const View4<const T>& input, int64_t n, const ChannelBlock& block) {
  BlockSource<accumulate_t<T>> source{};
  source.channels = block.channels;
  source.height = p.in_h;
  source.width = p.in_w;
  source.tensor = input.at(n, block.first, 0, 0);
  source.channel_stride = input.stride[1];
  source.y_stride = input.stride[2];
  source.x_stride = input.stride[3];
  source.load = load_channels<T>;
  return source;
}

// Whether the sampling loops can read the tensor itself.
template <typename T>
bool reads_directly(const View4<const T>& input) {
  return std::is_same_v<T, accumulate_t<T>> && input.stride[1] == 1;
}

template <typename T>
ImageWindow<const accumulate_t<T>> direct_window(const DeformConv2dParams& p, const View4<const T>& input, int64_t n,
                                                 const ChannelBlock& block) {
  if constexpr (std::is_same_v<T, accumulate_t<T>>) {
    return {input.at(n, block.first, 0, 0), input.stride[2], input.stride[3], 0, p.in_h};
  } else {
    return {};
  }
}

int64_t tile_pixels(const DeformConv2dParams& p, int64_t bytes_per_pixel, int64_t pixels, int64_t images) {
  const int64_t limit = std::clamp<int64_t>(COLUMNS_BYTES / bytes_per_pixel, 16, MAX_TILE_PIXELS);
  // The same number of tiles for each thread.
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t tiles = ceil_div(ceil_div(pixels, limit) * images, threads) * threads;
  return std::clamp<int64_t>(ceil_div(pixels * images, tiles), std::min<int64_t>(limit, 32), limit);
}

// ---- forward --------------------------------------------------------------------------------------------------------------------------

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
    matrix_product<A>(sums, {scratch.columns.get(), count, depth, depth, 1}, weight.forward(block, depth), starts && !weight_bias ? 0 : 1);
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
  dispatch_dtypes(input, coordinates.offset, [&](auto data, auto coordinate) {
    using T = typename decltype(data)::type;
    using C = typename decltype(coordinate)::type;
    const View4<const T> input_view = view4<const T>(input);
    Forward<T, C>{p,
                  input_view,
                  view4<const C>(coordinates.offset),
                  coordinates.mask ? view4<const C>(*coordinates.mask) : View4<const C>{},
                  bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
                  bias ? bias->stride(0) : 0,
                  view4<T>(out),
                  reads_directly(input_view)}
        .run(static_cast<const T*>(packable.const_data_ptr()));
  });
  return out;
}

// ---- backward -------------------------------------------------------------------------------------------------------------------------

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
    const int64_t channel_bytes = std::max<int64_t>(1, image_pixels * sizeof(A) * ((needs.samples() && !direct) + needs.input));
    const int64_t budget = std::max<int64_t>(BACKWARD_BYTES, p.batch * p.in_channels * image_pixels * sizeof(T) / 4);
    const int64_t even = ceil_div(p.in_channels, ceil_div(ceil_div(p.in_channels, MAX_BLOCK_CHANNELS), share) * share);
    const int64_t affordable = std::max<int64_t>(1, budget / (channel_bytes * threads));
    const int64_t max_channels = std::min({std::max(even, MIN_BLOCK_CHANNELS), affordable, MAX_BLOCK_CHANNELS});
    blocks = cut_channels(p, taps, max_channels);
    const int64_t block_count = static_cast<int64_t>(blocks.size());
    const int64_t round = std::min(std::max<int64_t>(1, budget / (channel_bytes * max_channels * subsets * share)) * share, block_count);

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
                        {scratch.columns.get(), at.count, depth, depth, 1}, 1);
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
    Matrix<const A> gradient = output_gradient(at, block.group * group_out, group_out, unit.subset);
    std::swap(gradient.rows, gradient.columns);
    std::swap(gradient.row_stride, gradient.column_stride);
    matrix_product<A>({scratch.grad_columns.get(), at.count, depth, depth, 1}, gradient, weight.backward(block, depth), 0);
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
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_same_device(op, "grad_output", grad_output, "input", input);
  check_shape<4>(op, "grad_output", grad_output, "[N, O, Ho, Wo]", {p.batch, p.out_channels, p.out_h, p.out_w});
  const Needs needs{need_input, need_offset, need_weight, need_bias, need_mask && mask};

  const Coordinates coordinates = widen_coordinates(offset, mask);
  const Tensor packable = torch::stable::contiguous(weight);
  const ScalarType accumulate = input.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const auto absent = [](const Tensor& like) { return torch::stable::new_empty(like, {0}); };
  Tensor grad_input = needs.input ? empty_like_layout(input, {p.batch, p.in_channels, p.in_h, p.in_w}, is_channels_last(input)) : absent(input);
  Tensor grad_weight = needs.weight ? torch::stable::new_empty(weight, weight.sizes()) : absent(weight);
  Tensor grad_offset = needs.offset ? torch::stable::new_zeros(offset, offset.sizes(), accumulate) : absent(offset);
  Tensor grad_mask = needs.mask ? torch::stable::new_zeros(*mask, mask->sizes(), accumulate) : absent(mask ? *mask : input);
  Tensor grad_bias = absent(input);
  if (needs.bias) {
    const std::array<int64_t, 3> all_but_channels{0, 2, 3};
    grad_bias = torch::stable::sum(grad_output, torch::headeronly::IntHeaderOnlyArrayRef{all_but_channels.data(), 3});
  }
  if (grad_output.numel() == 0) {
    torch::stable::zero_(grad_input);
    torch::stable::zero_(grad_weight);
  } else if (needs.columns() || needs.weight) {
    dispatch_dtypes(input, coordinates.offset, [&](auto data, auto coordinate) {
      using T = typename decltype(data)::type;
      using C = typename decltype(coordinate)::type;
      using A = accumulate_t<T>;
      const View4<const T> input_view = view4<const T>(input);
      Backward<T, C>{p,
                     needs,
                     view4<const T>(grad_output),
                     input_view,
                     view4<const C>(coordinates.offset),
                     coordinates.mask ? view4<const C>(*coordinates.mask) : View4<const C>{},
                     needs.input ? view4<T>(grad_input) : View4<T>{},
                     needs.weight ? view4<T>(grad_weight) : View4<T>{},
                     static_cast<A*>(grad_offset.mutable_data_ptr()),
                     static_cast<A*>(grad_mask.mutable_data_ptr()),
                     reads_directly(input_view)}
          .run(static_cast<const T*>(packable.const_data_ptr()));
    });
  }
  // Offset and mask may be narrower than what their gradients were summed in.
  if (needs.offset) grad_offset = torch::stable::to(grad_offset, offset.scalar_type());
  if (needs.mask) grad_mask = torch::stable::to(grad_mask, mask->scalar_type());
  return {grad_input, grad_offset, grad_weight, grad_bias, grad_mask};
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

STABLE_TORCH_LIBRARY_IMPL(deformc, CPU, m) {
  m.impl("deform_conv2d", TORCH_BOX(&deformc::deform_conv2d_cpu));
  m.impl("deform_conv2d_backward", TORCH_BOX(&deformc::deform_conv2d_backward_cpu));
}
