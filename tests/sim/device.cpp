// A simulated device for a torch that was built without it: allocator, device guard, hooks and the few aten kernels that make its tensors real.
// They live in the host's memory; any other operator of aten runs on the CPU. An operator of another library has the kernels that it registers
// and no others. SIM_DEVICE names the device: MPS.

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#ifndef SIM_DEVICE
#define SIM_DEVICE MPS
#endif

namespace sim {
namespace {

constexpr auto DEVICE = at::DeviceType::SIM_DEVICE;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::SIM_DEVICE);
constexpr size_t RED_ZONE = 256;
constexpr unsigned char POISON = 0xff;

std::mutex mutex;
std::map<const void*, size_t>& sizes() {
  static auto& sizes = *new std::map<const void*, size_t>;  // outlives the tensors that are destroyed at exit
  return sizes;
}

bool is_poison(const char* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    if (static_cast<unsigned char>(data[i]) != POISON) return false;
  return true;
}

void release(void* data) {
  if (!data) return;
  size_t size = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    size = sizes().at(data);
    sizes().erase(data);
  }
  memset(data, POISON, size);
  std::free(static_cast<char*>(data) - RED_ZONE);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, at::Device(DEVICE, 0)};
    const size_t all = (bytes + 2 * RED_ZONE + 63) / 64 * 64;
    char* const memory = static_cast<char*>(std::aligned_alloc(64, all));
    TORCH_CHECK(memory, "the simulated device is out of memory");
    memset(memory, POISON, all);
    void* const data = memory + RED_ZONE;
    const std::lock_guard<std::mutex> lock(mutex);
    sizes()[data] = bytes;
    return {data, data, &release, at::Device(DEVICE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
Allocator allocator;
const int allocator_registered = (c10::SetAllocator(DEVICE, &allocator), 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return DEVICE; }
  at::Device exchangeDevice(at::Device) const override { return at::Device(DEVICE, 0); }
  at::Device getDevice() const override { return at::Device(DEVICE, 0); }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  c10::Stream getStream(at::Device) const override { return c10::Stream(c10::Stream::DEFAULT, at::Device(DEVICE, 0)); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream({DEVICE, 0}); }
  at::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const at::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const at::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(SIM_DEVICE, Guard);

// ---- kernels of aten ------------------------------------------------------------------------------------------------------------------

using at::IntArrayRef;
using at::Tensor;
using std::optional;

// The same memory as a tensor of the CPU.
Tensor as_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}
Tensor empty(c10::SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>, optional<bool>,
             optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, KEYS, at::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
                     optional<at::Device>, optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, KEYS,
                                           at::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  as_cpu(to).copy_(as_cpu(self));
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());  // keeps the strides otherwise
  return copy_from(self, to, false);
}
Tensor& copy_(Tensor& self, const Tensor& from, bool) {
  copy_from(from, self, false);
  return self;
}
at::Scalar local_scalar(const Tensor& tensor) { return as_cpu(tensor).item(); }
Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, at::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return sim::as_strided(self, size, stride, self.storage_offset());
}
Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  const auto host = as_cpu(self).unfold(dimension, size, step);
  return sim::as_strided(self, host.sizes(), host.strides(), self.storage_offset());
}
Tensor view(const Tensor& self, IntArrayRef size) {
  const auto host = as_cpu(self).view(size);
  return sim::as_strided(self, host.sizes(), host.strides(), std::nullopt);
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat>) {
  int64_t need = self.itemsize();
  for (const int64_t one : size) need *= one;
  auto* const storage = self.storage().unsafeGetStorageImpl();
  if (static_cast<int64_t>(storage->nbytes()) < need) {
    auto grown = allocator.allocate(need);
    if (storage->nbytes() > 0) memcpy(grown.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(grown));
    storage->set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor& set_(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
Tensor& set_all(Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return sim::set_(self, std::move(source), 0, {count}, {1});
}
Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  const optional<Tensor> host_bias = bias && bias->defined() ? optional<Tensor>(as_cpu(*bias)) : std::nullopt;
  return at::convolution(as_cpu(input), as_cpu(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride,
                                                        IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                                                        int64_t groups, std::array<bool, 3> mask) {
  const int64_t outputs = gradient.size(1);
  auto [to_input, to_weight, to_bias] = at::convolution_backward(as_cpu(gradient), as_cpu(input), as_cpu(weight), IntArrayRef(outputs), stride,
                                                                 padding, dilation, transposed, output_padding, groups, mask);
  const auto moved = [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {moved(to_input), moved(to_weight), moved(to_bias)};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.operator_name().name;
  TORCH_CHECK_NOT_IMPLEMENTED(name.rfind("aten::", 0) == 0 || name.rfind("prims::", 0) == 0, name,
                              " has no kernel for the simulated device");
  at::native::cpu_fallback(op, stack);
}

}  // namespace

bool red_zones_are_intact(const void* data) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = sizes().find(data);
  if (found == sizes().end()) return true;  // memory that came from elsewhere
  const char* const bytes = static_cast<const char*>(data);
  return is_poison(bytes - RED_ZONE, RED_ZONE) && is_poison(bytes + found->second, RED_ZONE);
}

// In torch's namespace, where its macro looks for the registry, which knows the hooks by the name of their class.
}  // namespace sim
namespace at {
struct MPSHooks final : MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Allocator* getMPSDeviceAllocator() const override { return &sim::allocator; }
  void deviceSynchronize() const override {}
  void commitStream() const override {}
};
REGISTER_MPS_HOOKS(MPSHooks);
}  // namespace at
namespace sim {

TORCH_LIBRARY_IMPL(_, SIM_DEVICE, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, SIM_DEVICE, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("copy_", sim::copy_);
  m.impl("_local_scalar_dense", sim::local_scalar);
  m.impl("as_strided", sim::as_strided);
  m.impl("view", sim::view);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("unfold", sim::unfold);
  m.impl("resize_", sim::resize_);
  m.impl("set_.source_Storage", sim::set_all);
  m.impl("set_.source_Storage_storage_offset", sim::set_);
  m.impl("convolution_overrideable", sim::convolution);
  m.impl("convolution_backward_overrideable", sim::convolution_backward);
}

}  // namespace sim
