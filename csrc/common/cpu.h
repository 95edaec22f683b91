// CPU helpers: threads, matrix products, element conversion and the channels-innermost copies that the sampling loops read.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <cstring>
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

// Uninitialised memory, aligned to cache lines.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size)
      : data_(size > 0 ? static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t{64})) : nullptr) {}
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

// Copies a rows x columns matrix with any strides into one with any strides, in tiles that keep both sides in cache. The case that counts is
// the transpose: contiguous rows become contiguous columns. It is computed in float (or double) between narrow types too.
template <typename From, typename To>
DEFORMC_MULTIVERSION static void convert_matrix(const From* source, int64_t from_row, int64_t from_column, To* destination, int64_t to_row,
                                                int64_t to_column, int64_t rows, int64_t columns) {
  using A = accumulate_t<From>;
  constexpr int64_t TILE = 16;
  const bool transposes = from_column == 1 && to_row == 1;
  A wide[TILE * TILE], turned[TILE * TILE];
  for (int64_t row = 0; row < rows; row += TILE) {
    const int64_t tile_rows = std::min(TILE, rows - row);
    for (int64_t column = 0; column < columns; column += TILE) {
      const int64_t tile_columns = std::min(TILE, columns - column);
      const From* const from = source + row * from_row + column * from_column;
      To* const to = destination + row * to_row + column * to_column;
      if (transposes && tile_rows == TILE && tile_columns == TILE) {
        const A* in = wide;
        A* out = turned;
        int64_t in_row = TILE, out_row = TILE;
        if constexpr (std::is_same_v<From, A>) {
          in = from, in_row = from_row;
        } else {
          for (int64_t i = 0; i < TILE; ++i)
            for (int64_t j = 0; j < TILE; ++j) wide[i * TILE + j] = static_cast<A>(from[i * from_row + j]);
        }
        if constexpr (std::is_same_v<To, A>) out = to, out_row = to_column;
        for (int64_t i = 0; i < TILE; i += 4)
          for (int64_t j = 0; j < TILE; j += 4) transpose4(in + i * in_row + j, in_row, out + j * out_row + i, out_row);
        if constexpr (!std::is_same_v<To, A>) {
          for (int64_t j = 0; j < TILE; ++j)
            for (int64_t i = 0; i < TILE; ++i) to[j * to_column + i] = static_cast<To>(turned[j * TILE + i]);
        }
      } else {
        for (int64_t i = 0; i < tile_rows; ++i)
          for (int64_t j = 0; j < tile_columns; ++j)
            to[i * to_row + j * to_column] = static_cast<To>(from[i * from_row + j * from_column]);
      }
    }
  }
}

// ---- matrix products ------------------------------------------------------------------------------------------------------------------

template <typename A>
struct Matrix {
  A* data;
  int64_t rows, columns;
  int64_t row_stride, column_stride;
};

// out = left @ right + beta * out, with beta 0 (out may hold anything) or 1. BLAS through torch; below a few thousand multiplications its call
// costs more than the product. Safe inside parallel_for: the product then runs on the calling thread.
template <typename A>
void matrix_product(const Matrix<A>& out, const Matrix<const A>& left, const Matrix<const A>& right, int beta) {
  const int64_t depth = left.columns;
  if (out.rows * out.columns * depth <= 4096) {
    for (int64_t i = 0; i < out.rows; ++i) {
      for (int64_t j = 0; j < out.columns; ++j) {
        A* const element = out.data + i * out.row_stride + j * out.column_stride;
        A sum = beta ? *element : A(0);
        for (int64_t k = 0; k < depth; ++k)
          sum += left.data[i * left.row_stride + k * left.column_stride] * right.data[k * right.row_stride + j * right.column_stride];
        *element = sum;
      }
    }
    return;
  }
  const auto wrap = [](const auto& matrix) {
    return torch::stable::from_blob(const_cast<A*>(matrix.data), {matrix.rows, matrix.columns}, {matrix.row_stride, matrix.column_stride},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU), scalar_type_of<A>);
  };
  const Tensor result = wrap(out);
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_addmm_out(result.get(), result.get(), wrap(left).get(), wrap(right).get(), beta, 1.0));
}

}  // namespace deformc
