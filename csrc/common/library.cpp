// What this library was built with, for `python -m deformc doctor`: read through ctypes, so it needs no torch.

#if defined(_WIN32)
#define DEFORMC_EXPORT extern "C" __declspec(dllexport)
#else
#define DEFORMC_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#define DEFORMC_TEXT_OF(value) #value
#define DEFORMC_TEXT(value) DEFORMC_TEXT_OF(value)

#if defined(__clang__)
#define DEFORMC_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define DEFORMC_COMPILER "gcc " __VERSION__
#elif defined(_MSC_VER)
#define DEFORMC_COMPILER "msvc " DEFORMC_TEXT(_MSC_VER)
#else
#define DEFORMC_COMPILER "unknown"
#endif

#if defined(__SANITIZE_ADDRESS__)
#define DEFORMC_SANITIZER ";sanitizer=address,undefined"
#else
#define DEFORMC_SANITIZER ""
#endif

DEFORMC_EXPORT const char* deformc_build_info() {
  return "compiler=" DEFORMC_COMPILER ";torch_headers=" DEFORMC_TORCH_HEADERS ";torch_target=" DEFORMC_TORCH_TARGET DEFORMC_SANITIZER;
}
