// Matrix products on the CPU: BLAS through torch, or oneDNN through torch where that is the faster one.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <type_traits>

#include "common/cpu.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#define DEFORMC_HAS_LINEAR 1
// x @ weight^T in a new tensor, computed by oneDNN. Weak: a torch that was built without oneDNN does not have it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, const char* attr, const double** scalars, int64_t scalars_len,
    const char** algorithm, AtenTensorHandle* result);
// The same, with another tensor added.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise_binary(AtenTensorHandle x, AtenTensorHandle other,
                                                                                         AtenTensorHandle weight, AtenTensorHandle* bias,
                                                                                         const char* attr, AtenTensorHandle* result);
#endif

namespace deformc {

template <typename A>
struct Matrix {
  A* data;
  int64_t rows, columns;
  int64_t row_stride, column_stride;

  Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }
  // Rows, or else columns, that follow each other without gaps.
  bool is_dense() const { return (column_stride == 1 && row_stride == columns) || (row_stride == 1 && column_stride == rows); }
  Tensor tensor() const {
    using Element = std::remove_const_t<A>;
    return torch::stable::from_blob(const_cast<Element*>(data), {rows, columns}, {row_stride, column_stride},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU), scalar_type_of<Element>);
  }
};

// MKL chooses its kernels by the maker of the processor and leaves AVX-512 alone on any but Intel's; oneDNN asks the processor what it can.
inline bool prefers_onednn() {
#if DEFORMC_HAS_LINEAR
  // These functions are not part of the stable ABI: only in the releases whose signatures are known to be those above.
  const uint64_t version = aoti_torch_abi_version() >> 48;
  static const bool preferred = version >= 0x020a && version <= 0x020e && aoti_torch_cpu__linear_pointwise &&
                                aoti_torch_cpu__linear_pointwise_binary && !__builtin_cpu_is("intel") && __builtin_cpu_supports("avx512f");
  return preferred;
#else
  return false;
#endif
}

// oneDNN compiles a kernel for each new shape, which takes as long as several products. So it gets only counts of pixels that come again: those
// of full tiles, and not what is left at the end of an image.
constexpr int64_t RECURRING_MULTIPLE = 16;

// A call of oneDNN costs about 10 microseconds, which the larger products of more rows hide; MKL is fastest while the operands stay in cache.
inline int64_t best_product_rows() { return prefers_onednn() ? 512 : 128; }

inline void multiply_onednn(const Matrix<float>& out, const Matrix<const float>& left, const Matrix<const float>& right, int beta) {
#if DEFORMC_HAS_LINEAR
  // For matrices that are not dense it has only a slow kernel that nobody tuned.
  Buffer<float> copies[2];
  const auto dense = [](const Matrix<const float>& matrix, Buffer<float>& copy) -> Matrix<const float> {
    if (matrix.is_dense()) return matrix;
    copy = Buffer<float>(matrix.rows * matrix.columns);
    convert_matrix(matrix.data, matrix.row_stride, matrix.column_stride, copy.get(), matrix.columns, 1, matrix.rows, matrix.columns);
    return {copy.get(), matrix.rows, matrix.columns, matrix.columns, 1};
  };
  const Tensor x = dense(left, copies[0]).tensor(), weight = dense(right, copies[1]).transposed().tensor();
  AtenTensorHandle handle = nullptr;
  if (beta) {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_cpu__linear_pointwise_binary(x.get(), out.tensor().get(), weight.get(), nullptr, "add", &handle));
  } else {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_cpu__linear_pointwise(x.get(), weight.get(), nullptr, "none", nullptr, 0, nullptr, &handle));
  }
  const Tensor result(handle);
  const float* from = static_cast<const float*>(result.const_data_ptr());
  for (int64_t i = 0; i < out.rows; ++i, from += out.columns) std::copy_n(from, out.columns, out.data + i * out.row_stride);
#endif
}

// out = left @ right + beta * out, with beta 0 (out may hold anything) or 1. `pixels` is the one of the three sizes that varies from call to
// call. Below a few thousand multiplications the call of a library costs more than the product. Safe inside parallel_for: the product then
// runs on the calling thread.
template <typename A>
void matrix_product(const Matrix<A>& out, const Matrix<const A>& left, const Matrix<const A>& right, int beta, int64_t pixels) {
  const int64_t depth = left.columns, work = out.rows * out.columns * depth;
  if (work <= 4096) {
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
  if constexpr (std::is_same_v<A, float>) {
    if (pixels % RECURRING_MULTIPLE == 0 && work >= (1 << 20) && out.column_stride == 1 && prefers_onednn())
      return multiply_onednn(out, left, right, beta);
  }
  const Tensor result = out.tensor();
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_addmm_out(result.get(), result.get(), left.tensor().get(), right.tensor().get(), beta, 1.0));
}

}  // namespace deformc
