// Metal, seen from the host in plain C++: kernels by name, their arguments, and one command encoder for all launches of a call. Nothing here
// commits or waits: the work is queued behind that of other operators.
#pragma once

#include <array>
#include <initializer_list>
#include <string>
#include <variant>
#include <vector>

#include "common/host.h"

namespace deformc::metal {

// Plain data handed over by value, at most 4 KiB.
using Bytes = std::string;
template <typename T>
Bytes bytes_of(const T* values, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(values), count * sizeof(T)};
}
template <typename T>
Bytes bytes_of(const T& value) {
  static_assert(sizeof(T) <= 4096);
  return bytes_of(&value, 1);
}

// One launch of a kernel. Arguments are bound to buffers 0, 1, 2, ... A tensor is bound at its first element.
struct Launch {
  std::string kernel;
  std::vector<std::variant<Tensor, Bytes>> arguments;
  std::array<int64_t, 3> groups;
  int64_t threads;  // of a group
};

// Queues the launches, in this order, each after the writes of those before it. Those without groups are left out.
void run(const char* op, const std::vector<Launch>& launches);

// The name of a type in Metal.
inline const char* type_name(ScalarType dtype) {
  return dtype == ScalarType::Half ? "half" : dtype == ScalarType::BFloat16 ? "bfloat" : "float";
}

inline bool is_metal(const Tensor& tensor) { return device_type(tensor) == aoti_torch_device_type_mps(); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether every group of four elements along the dimension `innermost` is aligned as a vector, if the first of them is a multiple of four.
inline bool has_vectors(const Tensor& tensor, int64_t innermost) {
  if (tensor.stride(innermost) != 1) return false;
  bool aligned = tensor.storage_offset() % 4 == 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) aligned = aligned && (dim == innermost || tensor.size(dim) == 1 || tensor.stride(dim) % 4 == 0);
  return aligned;
}

}  // namespace deformc::metal
