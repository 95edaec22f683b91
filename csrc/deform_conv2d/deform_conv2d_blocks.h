// deform_conv2d on the CPU: how both directions divide the work. Channels are cut into blocks, output pixels into tiles; the weight is packed
// in the order of the blocks' columns.
#pragma once

#include <vector>

#include "common/matrix.h"
#include "deform_conv2d/deform_conv2d_cpu.h"

namespace deformc {

// Workspace for copies of images, at most, where that leaves a choice. Keeps the two sides of a 1x64x1080x1920 call within 64 MiB.
constexpr int64_t IMAGE_COPY_BYTES = int64_t{40} << 20;
// Columns of one tile stay near the second-level cache.
constexpr int64_t COLUMNS_BYTES = int64_t{2} << 20;
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

inline bool is_depthwise(const DeformConv2dParams& p) { return p.groups > 1 && p.groups == p.in_channels; }

inline std::vector<ChannelBlock> cut_channels(const DeformConv2dParams& p, int64_t taps, int64_t max_channels) {
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

// The weight in the order of the columns. Each block is a matrix [block's columns, O/groups] for the forward direction (BY_COLUMN), those
// of a group one below the other, and [O/groups, block's columns] for the backward one (BY_OUTPUT): the orders in which BLAS is fastest.
// For depthwise convolution it is [O/C, blocks' columns] in both.
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
    return {data.get() + (block.group * columns + block.column) * group_out, group_out, depth, depth, 1};
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
        A* const group = packed.data.get() + (block.group * packed.columns + block.column) * group_out + first * columns;
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t tap = 0; tap < taps; ++tap)
            convert(source + row * group_channels * taps + tap, taps, group + row * columns + tap * block.channels, 1, block.channels);
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

inline int64_t tile_pixels(const DeformConv2dParams& p, int64_t bytes_per_pixel, int64_t pixels, int64_t images) {
  const auto rounded_up = [](int64_t value) { return ceil_div(value, RECURRING_MULTIPLE) * RECURRING_MULTIPLE; };
  const int64_t limit = std::clamp<int64_t>(rounded_up(COLUMNS_BYTES / bytes_per_pixel), RECURRING_MULTIPLE, best_product_rows());
  // The same number of tiles for each thread.
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t tiles = ceil_div(ceil_div(pixels, limit) * images, threads) * threads;
  return std::clamp<int64_t>(rounded_up(ceil_div(pixels * images, tiles)), std::min<int64_t>(limit, 32), limit);
}

}  // namespace deformc
