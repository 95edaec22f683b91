// The functions of torch that the Metal host code calls, for kernels that are compiled into the process: every launch runs at once.

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <bit>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "fibers.h"
#include "metal/registry.h"

namespace sim {

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}

bool register_kernel(const char* name, Kernel kernel) { return kernels().emplace(name, std::move(kernel)).second; }

namespace {

// A kernel, and what is bound to its buffers.
struct Function {
  std::string name;
  Kernel kernel;
  bool encoding = false;
  std::vector<void*> buffers;
  std::vector<std::unique_ptr<char[]>> copies;
  std::vector<at::Tensor> tensors;

  void bind(unsigned index, void* buffer) {
    TORCH_CHECK(encoding, name, ": an argument is set before start_encoding");
    TORCH_CHECK(index < 31, name, ": Metal has 31 buffers");
    if (buffers.size() <= index) buffers.resize(index + 1, nullptr);
    buffers[index] = buffer;
  }
};

struct Library {
  std::map<std::string, std::unique_ptr<Function>> functions;
};

// Whether a number has an odd number of ones.
bool is_odd(int64_t number) { return std::popcount(static_cast<uint64_t>(number)) % 2 == 1; }

int in_block = 0;
int64_t blocks = 0, launches = 0, compiled_libraries = 0, source_libraries = 0, group_count = 0;

void launch(Function& function, const uint64_t* threads, const uint64_t* group) {
  TORCH_CHECK(in_block > 0, function.name, ": launched outside of a command block");
  TORCH_CHECK(function.encoding, function.name, ": launched before start_encoding");
  TORCH_CHECK(group[1] == 1 && group[2] == 1 && threads[0] % group[0] == 0, function.name, ": incomplete groups");
  ++launches;
  Call call{function.buffers.data(), {0, 0, 0}, 0};
  struct Context {
    const Kernel& kernel;
    const Call& call;
  } context{function.kernel, call};
  const auto body = [](void* context, uint32_t thread) {
    const auto& [kernel, shared] = *static_cast<Context*>(context);
    Call call = shared;
    call.thread = thread;
    kernel(call);
  };
  // Groups may run in any order: here in that of their positions or in the opposite one, changing from launch to launch without a period. So may
  // the threads of a group.
  const uint64_t sizes[3] = {threads[0] / group[0], threads[1], threads[2]}, groups = sizes[0] * sizes[1] * sizes[2];
  for (uint64_t i = 0; i < groups; ++i) {
    const uint64_t position = is_odd(launches) ? groups - 1 - i : i;
    call.group[0] = static_cast<uint32_t>(position % sizes[0]);
    call.group[1] = static_cast<uint32_t>(position / sizes[0] % sizes[1]);
    call.group[2] = static_cast<uint32_t>(position / sizes[0] / sizes[1]);
    poison_group_memory();
    try {
      run_group(static_cast<uint32_t>(group[0]), is_odd(group_count++), body, &context);
    } catch (const std::runtime_error& error) {
      TORCH_CHECK(false, function.name, ": ", error.what());
    }
  }
  for (const at::Tensor& tensor : function.tensors)
    TORCH_CHECK(red_zones_are_intact(tensor.storage().data()), function.name, ": wrote outside of a buffer of ", tensor.sizes());
  function.encoding = false;
  function.buffers.clear();
  function.copies.clear();
  function.tensors.clear();
}

Function& function_of(AOTIMetalKernelFunctionHandle handle) { return *reinterpret_cast<Function*>(handle); }

}  // namespace

// What the tests ask for.
extern "C" int64_t sim_metal_blocks() { return blocks; }
extern "C" int64_t sim_metal_launches() { return launches; }
extern "C" int64_t sim_metal_compiled_libraries() { return compiled_libraries; }
extern "C" int64_t sim_metal_source_libraries() { return source_libraries; }

}  // namespace sim

// torch's class for libraries that Xcode compiled. A handle is a pointer to one, or to a library made of source text.
namespace at::native::mps {
class PrecompiledMetalShaderLibrary {
 public:
  explicit PrecompiledMetalShaderLibrary(std::vector<uint8_t> data);
  sim::Library library;
};
PrecompiledMetalShaderLibrary::PrecompiledMetalShaderLibrary(std::vector<uint8_t> data) {
  TORCH_CHECK(std::string(data.begin(), data.end()) == "compiled", "not a library of this Metal");
  ++sim::compiled_libraries;
}
}  // namespace at::native::mps

using sim::function_of;

AOTITorchError aoti_torch_mps_create_shader_library(const char* source, AOTIMetalShaderLibraryHandle* handle) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    TORCH_CHECK(std::string(source).find("#include <metal_stdlib>") != std::string::npos, "not a source in Metal's language");
    ++sim::source_libraries;
    *handle = reinterpret_cast<AOTIMetalShaderLibraryHandle>(new sim::Library);
  });
}
AOTITorchError aoti_torch_mps_get_kernel_function(AOTIMetalShaderLibraryHandle handle, const char* name, AOTIMetalKernelFunctionHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const auto found = sim::kernels().find(name);
    TORCH_CHECK(found != sim::kernels().end(), "Metal has no function ", name);
    auto& function = reinterpret_cast<sim::Library*>(handle)->functions[name];
    if (!function) function = std::make_unique<sim::Function>(sim::Function{name, found->second, false, {}, {}, {}});
    *result = reinterpret_cast<AOTIMetalKernelFunctionHandle>(function.get());
  });
}
AOTITorchError aoti_torch_mps_start_encoding(AOTIMetalKernelFunctionHandle handle) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    TORCH_CHECK(sim::in_block > 0, "start_encoding outside of a command block");
    function_of(handle).encoding = true;
  });
}
AOTITorchError aoti_torch_mps_set_arg_tensor(AOTIMetalKernelFunctionHandle handle, unsigned index, AtenTensorHandle tensor_handle) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const at::Tensor& tensor = *torch::aot_inductor::tensor_handle_to_tensor_pointer(tensor_handle);
    TORCH_CHECK(tensor.device().type() == at::kMPS, function_of(handle).name, ": argument ", index, " is on ", tensor.device());
    TORCH_CHECK(tensor.storage().nbytes() > 0, function_of(handle).name, ": argument ", index, " has no memory");
    function_of(handle).bind(index, tensor.data_ptr());
    function_of(handle).tensors.push_back(tensor);
  });
}
extern "C" AOTITorchError torch_mps_set_arg_bytes(AOTIMetalKernelFunctionHandle handle, unsigned index, const void* data, uint64_t size) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    TORCH_CHECK(data != nullptr && size > 0 && size <= 4096, "Metal takes 1 to 4096 bytes, got ", size);
    auto& copies = function_of(handle).copies;
    copies.push_back(std::make_unique<char[]>(size));
    memcpy(copies.back().get(), data, size);
    function_of(handle).bind(index, copies.back().get());
  });
}
AOTITorchError aoti_torch_mps_dispatch_array_with_group_size(AOTIMetalKernelFunctionHandle handle, const uint64_t* threads, size_t dimensions,
                                                             const uint64_t* group, size_t group_dimensions) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    TORCH_CHECK(dimensions == 3 && group_dimensions == 3);
    sim::launch(function_of(handle), threads, group);
  });
}
AOTITorchError aoti_torch_mps_run_command_block(AOTIMetalKernelFunctionHandle handle, aoti_torch_mps_command_block_callback_t callback, void* data) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    struct Block {
      Block() { ++sim::in_block; }
      ~Block() { --sim::in_block; }
    } block;
    ++sim::blocks;
    callback(handle, data);
  });
}
