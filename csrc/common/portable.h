// What the portable headers need to compile as C++ on the host, as CUDA and as the Metal Shading Language.
#pragma once

#if defined(__METAL_VERSION__)
#include <metal_stdlib>
using namespace metal;
#define DEFORMC_INLINE inline
#define DEFORMC_NAN NAN
#elif defined(__CUDACC__)
#include <math.h>
#include <stdint.h>
#define DEFORMC_NAN NAN
#define DEFORMC_INLINE __host__ __device__ __forceinline__
#else
#include <math.h>
#include <stdint.h>
#define DEFORMC_NAN NAN
#if defined(_MSC_VER)
#define DEFORMC_INLINE __forceinline
#else
// Inlined without exception, so that each clone of a multi-versioned kernel compiles it for its own instruction set.
#define DEFORMC_INLINE inline __attribute__((always_inline))
#endif
#endif
