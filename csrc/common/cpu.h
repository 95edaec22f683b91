// CPU helpers: threads, element conversion and the channels-innermost copies that the sampling loops read.
#pragma once

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <limits>
#include <memory>
#include <new>

#include "common/host.h"
#include "common/portable.h"
#include "common/vector.h"

// Compiles a function once for each instruction set and chooses when the library is loaded. Lambdas inside would keep the baseline.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__)
#define DEFORMC_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DEFORMC_MULTIVERSION
#endif
#if defined(_MSC_VER)
#define DEFORMC_RESTRICT __restrict
#else
#define DEFORMC_RESTRICT __restrict__
#endif

namespace deformc {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs body(index) for every index in [0, count): on this thread where the work is small, else on torch's threads in contiguous ranges.
template <typename Body>
void parallel_ranges(int64_t count, bool small, const Body& body) {
  if (small || count <= 1) {
    if (count > 0) body(int64_t{0}, count);
  } else {
    torch::stable::parallel_for(0, count, 1, body);
  }
}

[[noreturn]] inline void fail_allocation(double bytes) {
  std::ostringstream text;
  text << "deformc: could not allocate " << std::fixed << std::setprecision(0) << bytes << " bytes of workspace";
  throw std::runtime_error(text.str());
}

// Uninitialised memory, aligned to cache lines.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) {
    if (size <= 0) return;
    const bool fits = size <= std::numeric_limits<int64_t>::max() / static_cast<int64_t>(sizeof(T));
    if (fits) data_.reset(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t{64}, std::nothrow)));
    if (!data_) fail_allocation(static_cast<double>(size) * sizeof(T));
  }
  T* get() const { return data_.get(); }
  T& operator[](int64_t index) const { return data_.get()[index]; }

 private:
  struct Free {
    void operator()(T* pointer) const { ::operator delete(pointer, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> data_;
};

// ---- element conversion ---------------------------------------------------------------------------------------------------------------

// destination[i * to_stride] = source[i * from_stride], rounded once. The unit-stride loops are the ones that vectorise.
template <typename From, typename To>
DEFORMC_MULTIVERSION static void convert(const From* DEFORMC_RESTRICT source, int64_t from_stride, To* DEFORMC_RESTRICT destination,
                                  int64_t to_stride, int64_t count) {
  if (from_stride == 1 && to_stride == 1) {
    for (int64_t i = 0; i < count; ++i) destination[i] = static_cast<To>(source[i]);
  } else if (from_stride == 1) {
    for (int64_t i = 0; i < count; ++i) destination[i * to_stride] = static_cast<To>(source[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) destination[i * to_stride] = static_cast<To>(source[i * from_stride]);
  }
}

// Rows of `count` numbers.
template <typename From, typename To>
DEFORMC_MULTIVERSION static void convert_rows(const From* source, int64_t source_row, To* destination, int64_t destination_row, int64_t rows,
                                              int64_t count) {
  for (int64_t row = 0; row < rows; ++row, source += source_row, destination += destination_row)
    for (int64_t i = 0; i < count; ++i) destination[i] = static_cast<To>(source[i]);
}

// LANES<A> numbers of a narrower type, widened.
template <typename A, typename T>
DEFORMC_INLINE Vector<A> load_as(const T* values) {
#if DEFORMC_HAS_VECTORS
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>) {
    typedef uint16_t Narrow __attribute__((vector_size(32)));
    typedef uint32_t Wide __attribute__((vector_size(64)));
    Narrow narrow;
    memcpy(&narrow, values, sizeof(narrow));
    Wide bits = __builtin_convertvector(narrow, Wide);
    Vector<A> vector;
    if constexpr (std::is_same_v<T, BFloat16>) {
      bits <<= 16;
      memcpy(&vector, &bits, sizeof(vector));
    } else {
      // The exponent's bias is put right by a multiplication, which is exact for subnormal numbers too.
      const Wide magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
      const Wide special = Wide(magnitude >= (0x7c00u << 13)) & 0x7f800000u;  // infinity and not a number
      memcpy(&vector, &magnitude, sizeof(vector));
      vector = vector * 0x1p112f;
      memcpy(&bits, &vector, sizeof(bits));
      bits |= special | sign;
      memcpy(&vector, &bits, sizeof(vector));
    }
    return vector;
  }
#endif
  if constexpr (std::is_same_v<T, A>) {
    return load(values);
  } else {
    A wide[LANES<A>];
    for (int64_t i = 0; i < LANES<A>; ++i) wide[i] = static_cast<A>(values[i]);
    return load(wide);
  }
}

// Copies rows of `count` numbers. A call of memcpy for each would take longer than the short copies meant here.
template <typename T>
DEFORMC_MULTIVERSION static void copy_short_rows(const T* source, int64_t source_row, T* destination, int64_t destination_row, int64_t rows,
                                                 int64_t count) {
  for (int64_t row = 0; row < rows; ++row, source += source_row, destination += destination_row) {
    const char* const from = reinterpret_cast<const char*>(source);
    char* const to = reinterpret_cast<char*>(destination);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
      Vector<float> line;
      memcpy(&line, from + i, 64);
      memcpy(to + i, &line, 64);
    }
    for (i /= sizeof(T); i < count; ++i) destination[i] = source[i];
  }
}

// One tile of convert_matrix, of any size.
template <typename From, typename To>
DEFORMC_INLINE void convert_tile(const From* from, int64_t from_row, int64_t from_column, To* to, int64_t to_row, int64_t to_column,
                                 int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) to[i * to_row + j * to_column] = static_cast<To>(from[i * from_row + j * from_column]);
}

constexpr int64_t TRANSPOSE_TILE = 16;

// A full tile whose rows become contiguous columns; computed in float (or double) between narrow types too. Each column is written at once:
// where the stride of the columns is a power of two, they share a few places of the cache and would be evicted half written.
template <typename From, typename To>
DEFORMC_INLINE void transpose_tile(const From* from, int64_t from_row, To* to, int64_t to_column) {
  using A = accumulate_t<From>;
  constexpr int64_t TILE = TRANSPOSE_TILE;
  A wide[TILE * TILE], turned[TILE * TILE];
  const A* in = wide;
  int64_t in_row = TILE;
  if constexpr (std::is_same_v<From, A>) {
    in = from, in_row = from_row;
  } else {
    for (int64_t i = 0; i < TILE; ++i)
      for (int64_t j = 0; j < TILE; ++j) wide[i * TILE + j] = static_cast<A>(from[i * from_row + j]);
  }
  for (int64_t i = 0; i < TILE; i += 4)
    for (int64_t j = 0; j < TILE; j += 4) transpose4(in + i * in_row + j, in_row, turned + j * TILE + i, TILE);
  for (int64_t j = 0; j < TILE; ++j)
    for (int64_t i = 0; i < TILE; ++i) to[j * to_column + i] = static_cast<To>(turned[j * TILE + i]);
}

// Copies a rows x columns matrix with any strides into one with any strides, in tiles that keep both sides in cache. The case that counts is
// the transpose: contiguous rows become contiguous columns. Tiles then follow each other along the side whose lines lie farther apart.
template <typename From, typename To>
DEFORMC_MULTIVERSION static void convert_matrix(const From* source, int64_t from_row, int64_t from_column, To* destination, int64_t to_row,
                                                int64_t to_column, int64_t rows, int64_t columns) {
  constexpr int64_t TILE = TRANSPOSE_TILE;
  const bool transposes = from_column == 1 && to_row == 1, along_rows = transposes && to_column > from_row;
  const int64_t row_tiles = ceil_div(rows, TILE), column_tiles = ceil_div(columns, TILE);
  for (int64_t tile = 0; tile < row_tiles * column_tiles; ++tile) {
    const int64_t row = (along_rows ? tile % row_tiles : tile / column_tiles) * TILE;
    const int64_t column = (along_rows ? tile / row_tiles : tile % column_tiles) * TILE;
    const int64_t tile_rows = std::min(TILE, rows - row), tile_columns = std::min(TILE, columns - column);
    const From* const from = source + row * from_row + column * from_column;
    To* const to = destination + row * to_row + column * to_column;
    if (transposes && tile_rows == TILE && tile_columns == TILE) {
      transpose_tile(from, from_row, to, to_column);
    } else {
      convert_tile(from, from_row, from_column, to, to_row, to_column, tile_rows, tile_columns);
    }
  }
}

}  // namespace deformc
