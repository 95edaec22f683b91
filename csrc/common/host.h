// Host side of every operator: tensors, error texts, dispatch on dtypes. Uses the libtorch stable ABI only.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace deformc {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The type in which values of type T are computed and accumulated.
template <typename T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <typename T>
using accumulate_t = typename AccumulateType<T>::type;

// ---- error texts: built only when a check fails ---------------------------------------------------------------------------------------

struct ShapeText {
  const Tensor& tensor;
};
inline std::ostream& operator<<(std::ostream& out, const ShapeText& text) {
  out << "[";
  for (int64_t dim = 0; dim < text.tensor.dim(); ++dim) out << (dim ? ", " : "") << text.tensor.size(dim);
  return out << "]";
}

template <size_t N>
std::ostream& operator<<(std::ostream& out, const std::array<int64_t, N>& values) {
  out << "[";
  for (size_t i = 0; i < N; ++i) out << (i ? ", " : "") << values[i];
  return out << "]";
}

inline std::ostream& operator<<(std::ostream& out, const std::vector<int64_t>& values) {
  out << "[";
  for (size_t i = 0; i < values.size(); ++i) out << (i ? ", " : "") << values[i];
  return out << "]";
}

struct DtypeText {
  ScalarType dtype;
};
inline std::ostream& operator<<(std::ostream& out, const DtypeText& text) {
  switch (text.dtype) {
    case ScalarType::Double: return out << "float64";
    case ScalarType::Float: return out << "float32";
    case ScalarType::Half: return out << "float16";
    case ScalarType::BFloat16: return out << "bfloat16";
    case ScalarType::Bool: return out << "bool";
    case ScalarType::Byte: return out << "uint8";
    case ScalarType::Char: return out << "int8";
    case ScalarType::Short: return out << "int16";
    case ScalarType::Int: return out << "int32";
    case ScalarType::Long: return out << "int64";
    case ScalarType::UInt16: return out << "uint16";
    case ScalarType::UInt32: return out << "uint32";
    case ScalarType::UInt64: return out << "uint64";
    case ScalarType::ComplexHalf: return out << "complex32";
    case ScalarType::ComplexFloat: return out << "complex64";
    case ScalarType::ComplexDouble: return out << "complex128";
    case ScalarType::Float8_e5m2: return out << "float8_e5m2";
    case ScalarType::Float8_e4m3fn: return out << "float8_e4m3fn";
    case ScalarType::Float8_e5m2fnuz: return out << "float8_e5m2fnuz";
    case ScalarType::Float8_e4m3fnuz: return out << "float8_e4m3fnuz";
    default: return out << "dtype number " << static_cast<int>(text.dtype);
  }
}

// Sums and products of numbers that are not negative; the largest integer where they would be larger.
inline int64_t saturating_add(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }
inline int64_t saturating_multiply(int64_t a, int64_t b) { return a != 0 && b > INT64_MAX / a ? INT64_MAX : a * b; }

inline int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

struct DeviceText {
  const Tensor& tensor;
};
inline std::ostream& operator<<(std::ostream& out, const DeviceText& text) {
  const int32_t type = device_type(text.tensor);
  if (type == aoti_torch_device_type_cpu()) return out << "cpu";
  if (type == aoti_torch_device_type_meta()) return out << "meta";
  if (type == aoti_torch_device_type_cuda()) {
    out << "cuda";
  } else if (type == aoti_torch_device_type_mps()) {
    out << "mps";
  } else {
    out << "device type " << type;
  }
  return out << ":" << text.tensor.get_device_index();
}

// Throws `<op>: <text>` as the RuntimeError that Python sees. (STD_TORCH_CHECK would put a source path in front.)
template <typename... Parts>
void check(bool condition, const char* op, const Parts&... parts) {
  if (condition) [[likely]] return;
  std::ostringstream text;
  text << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// ---- checks that every operator makes of its arguments --------------------------------------------------------------------------------

inline void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank, const char* shape) {
  check(tensor.dim() == rank, op, name, " must have ", rank, rank == 1 ? " dimension " : " dimensions ", shape, ", got shape ",
        ShapeText{tensor});
}

inline void check_data_dtype(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  check(dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16, op, name,
        " must be float64, float32, float16 or bfloat16, got ", DtypeText{dtype});
  check(dtype != ScalarType::Double || device_type(tensor) != aoti_torch_device_type_mps(), op, name,
        " must be float32, float16 or bfloat16 on mps, got float64");
}

inline void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const char* data_name, const Tensor& data) {
  check(tensor.scalar_type() == data.scalar_type(), op, name, " must have the dtype of ", data_name, ", ", DtypeText{data.scalar_type()},
        ", got ", DtypeText{tensor.scalar_type()});
}

// Coordinates and the weights that go with them may be float32 beside narrower (or wider) data.
inline void check_coordinate_dtype(const char* op, const char* name, const Tensor& tensor, const char* data_name, const Tensor& data) {
  check(tensor.scalar_type() == data.scalar_type() || tensor.scalar_type() == ScalarType::Float, op, name,
        " must be float32 or have the dtype of ", data_name, ", ", DtypeText{data.scalar_type()}, ", got ",
        DtypeText{tensor.scalar_type()});
}

inline void check_index_dtype(const char* op, const char* name, const Tensor& tensor) {
  check(tensor.scalar_type() == ScalarType::Long, op, name, " must be int64, got ", DtypeText{tensor.scalar_type()});
}

inline void check_same_device(const char* op, const char* name, const Tensor& tensor, const char* data_name, const Tensor& data) {
  check(device_type(tensor) == device_type(data) && tensor.get_device_index() == data.get_device_index(), op, name,
        " must be on the device of ", data_name, ", ", DeviceText{data}, ", got ", DeviceText{tensor});
}

template <size_t N>
void check_shape(const char* op, const char* name, const Tensor& tensor, const char* shape, const std::array<int64_t, N>& expected) {
  bool equal = tensor.dim() == static_cast<int64_t>(N);
  for (size_t dim = 0; equal && dim < N; ++dim) equal = tensor.size(dim) == expected[dim];
  check(equal, op, name, " must have shape ", shape, " = ", expected, ", got ", ShapeText{tensor});
}

// ---- dtypes ---------------------------------------------------------------------------------------------------------------------------

template <typename T>
inline constexpr ScalarType scalar_type_of = ScalarType::Undefined;
template <>
inline constexpr ScalarType scalar_type_of<double> = ScalarType::Double;
template <>
inline constexpr ScalarType scalar_type_of<float> = ScalarType::Float;
template <>
inline constexpr ScalarType scalar_type_of<Half> = ScalarType::Half;
template <>
inline constexpr ScalarType scalar_type_of<BFloat16> = ScalarType::BFloat16;

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls body with the TypeTag of a checked data dtype.
template <typename Body>
auto dispatch_data_dtype(ScalarType dtype, const Body& body) {
  switch (dtype) {
    case ScalarType::Double: return body(TypeTag<double>{});
    case ScalarType::Half: return body(TypeTag<Half>{});
    case ScalarType::BFloat16: return body(TypeTag<BFloat16>{});
    default: return body(TypeTag<float>{});
  }
}

// Calls body with the types of the data and of the coordinates, which are float where they are not that of the data.
template <typename Body>
void dispatch_dtypes(ScalarType data_dtype, ScalarType coordinate_dtype, const Body& body) {
  dispatch_data_dtype(data_dtype, [&](auto data) {
    if (coordinate_dtype == data_dtype) {
      body(data, data);
    } else {
      body(data, TypeTag<float>{});
    }
  });
}

// Coordinates and the factors (mask, attention weights) that go with them in one dtype: the wider of the two.
struct Coordinates {
  Tensor positions;
  OptionalTensor factors;
};

inline Coordinates widen_coordinates(const Tensor& positions, const OptionalTensor& factors) {
  if (!factors || positions.scalar_type() == factors->scalar_type()) return {positions, factors};
  // The dtypes are that of the data and float32.
  const bool has_double = positions.scalar_type() == ScalarType::Double || factors->scalar_type() == ScalarType::Double;
  const ScalarType wide = has_double ? ScalarType::Double : ScalarType::Float;
  return {torch::stable::to(positions, wide), torch::stable::to(*factors, wide)};
}

// ---- layouts --------------------------------------------------------------------------------------------------------------------------

// Whether a 4-dimensional tensor is dense in the order N, H, W, C (strides of dimensions of size 1 do not matter) and not also in N, C, H, W.
inline bool is_channels_last(const Tensor& tensor) {
  if (tensor.is_contiguous()) return false;
  int64_t expected = 1;
  for (const int64_t dim : {1, 3, 2, 0}) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != expected) return false;
    expected *= tensor.size(dim);
  }
  return true;
}

// A gradient that was summed in a wider type, in the type of its tensor.
inline Tensor narrowed(const Tensor& sums, const Tensor& like) {
  return sums.scalar_type() == like.scalar_type() ? sums : torch::stable::to(sums, like.scalar_type());
}

inline Tensor empty_like_layout(const Tensor& like, const std::array<int64_t, 4>& sizes, bool channels_last,
                                std::optional<ScalarType> dtype = std::nullopt) {
  const auto format = channels_last ? torch::headeronly::MemoryFormat::ChannelsLast : torch::headeronly::MemoryFormat::Contiguous;
  return torch::stable::empty({sizes.data(), sizes.size()}, dtype.value_or(like.scalar_type()), std::nullopt, like.device(), std::nullopt, format);
}

// Pointer and strides of a tensor of rank R; a 4-dimensional one is indexed as [n][c][y][x] by its kernels.
template <typename T, int R>
struct View {
  T* data = nullptr;
  int64_t stride[R] = {};
  template <typename... Indices>
  T* at(Indices... indices) const {
    static_assert(sizeof...(Indices) == R);
    const int64_t index[R] = {indices...};
    T* pointer = data;
    for (int dim = 0; dim < R; ++dim) pointer += index[dim] * stride[dim];
    return pointer;
  }
};
template <typename T>
using View4 = View<T, 4>;

template <typename T, int R>
View<T, R> view_of(const Tensor& tensor) {
  View<T, R> view;
  if constexpr (std::is_const_v<T>) {
    view.data = static_cast<T*>(tensor.const_data_ptr());
  } else {
    view.data = static_cast<T*>(tensor.mutable_data_ptr());
  }
  for (int dim = 0; dim < R; ++dim) view.stride[dim] = tensor.stride(dim);
  return view;
}

template <typename T>
View4<T> view4(const Tensor& tensor) {
  return view_of<T, 4>(tensor);
}

}  // namespace deformc
