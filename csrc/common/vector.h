// Vectors of LANES numbers for the CPU's hot loops. GCC and Clang translate their vector types to whatever the function's instruction set
// has, so a multi-versioned function needs no intrinsics; other compilers get plain loops. No sum is reordered beyond what is written here.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/portable.h"

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define DEFORMC_HAS_VECTORS 1
#endif
#endif

namespace deformc {

// A cache line.
template <typename A>
inline constexpr int64_t LANES = 64 / sizeof(A);

#if DEFORMC_HAS_VECTORS

template <typename A>
struct VectorType {
  typedef A type __attribute__((vector_size(64)));
};
template <typename A>
using Vector = typename VectorType<A>::type;
typedef float Vector4 __attribute__((vector_size(16)));

template <typename A>
DEFORMC_INLINE Vector<A> load(const A* values) {
  Vector<A> vector;
  memcpy(&vector, values, sizeof(vector));
  return vector;
}

template <typename A>
DEFORMC_INLINE void store(A* values, Vector<A> vector) {
  memcpy(values, &vector, sizeof(vector));
}

// Pairs of bfloat16 numbers, and the float numbers of which those are the upper halves.
typedef uint32_t Words __attribute__((vector_size(64)));

DEFORMC_INLINE Words load_words(const void* pairs) {
  Words words;
  memcpy(&words, pairs, sizeof(words));
  return words;
}

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
DEFORMC_INLINE Vector<float> even_of(Words words) { return (Vector<float>)(words << 16); }
DEFORMC_INLINE Vector<float> odd_of(Words words) { return (Vector<float>)(words & 0xffff0000u); }
#else
DEFORMC_INLINE Vector<float> even_of(Words words) { return (Vector<float>)(words & 0xffff0000u); }
DEFORMC_INLINE Vector<float> odd_of(Words words) { return (Vector<float>)(words << 16); }
#endif

DEFORMC_INLINE void store_interleaved(float* values, Vector<float> even, Vector<float> odd) {
  store(values, __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  store(values + LANES<float>, __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}

DEFORMC_INLINE Vector4 fold(Vector<float> v) {
  typedef float Vector8 __attribute__((vector_size(32)));
  const Vector8 half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}

// sums = the sums over the lanes of a, b, c and d.
DEFORMC_INLINE void sum_lanes(Vector<float> a, Vector<float> b, Vector<float> c, Vector<float> d, float* sums) {
  const Vector4 a4 = fold(a), b4 = fold(b), c4 = fold(c), d4 = fold(d);
  const Vector4 ab = __builtin_shufflevector(a4, b4, 0, 4, 1, 5) + __builtin_shufflevector(a4, b4, 2, 6, 3, 7);
  const Vector4 cd = __builtin_shufflevector(c4, d4, 0, 4, 1, 5) + __builtin_shufflevector(c4, d4, 2, 6, 3, 7);
  const Vector4 abcd = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  memcpy(sums, &abcd, sizeof(abcd));
}

// Transposes 4 x 4 numbers.
DEFORMC_INLINE void transpose4(const float* source, int64_t source_row, float* destination, int64_t destination_row) {
  Vector4 a, b, c, d;
  memcpy(&a, source, sizeof(a));
  memcpy(&b, source + source_row, sizeof(b));
  memcpy(&c, source + 2 * source_row, sizeof(c));
  memcpy(&d, source + 3 * source_row, sizeof(d));
  const Vector4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Vector4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  a = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  b = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
  memcpy(destination, &a, sizeof(a));
  memcpy(destination + destination_row, &b, sizeof(b));
  memcpy(destination + 2 * destination_row, &c, sizeof(c));
  memcpy(destination + 3 * destination_row, &d, sizeof(d));
}

#else

template <typename A>
struct Vector {
  A lane[LANES<A>];
  Vector() = default;
  Vector(A value) {
    for (A& element : lane) element = value;
  }
  friend Vector operator+(Vector a, Vector b) {
    for (int64_t i = 0; i < LANES<A>; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  friend Vector operator*(Vector a, Vector b) {
    for (int64_t i = 0; i < LANES<A>; ++i) a.lane[i] *= b.lane[i];
    return a;
  }
  friend Vector operator*(A a, Vector b) { return Vector(a) * b; }
  A operator[](int64_t i) const { return lane[i]; }
};

template <typename A>
DEFORMC_INLINE Vector<A> load(const A* values) {
  Vector<A> vector;
  memcpy(vector.lane, values, sizeof(vector.lane));
  return vector;
}

template <typename A>
DEFORMC_INLINE void store(A* values, Vector<A> vector) {
  memcpy(values, vector.lane, sizeof(vector.lane));
}

#endif

template <typename A>
DEFORMC_INLINE void sum_lanes(Vector<A> a, Vector<A> b, Vector<A> c, Vector<A> d, A* sums) {
  sums[0] = sums[1] = sums[2] = sums[3] = 0;
  for (int64_t i = 0; i < LANES<A>; ++i) {
    sums[0] += a[i];
    sums[1] += b[i];
    sums[2] += c[i];
    sums[3] += d[i];
  }
}

template <typename A>
DEFORMC_INLINE void transpose4(const A* source, int64_t source_row, A* destination, int64_t destination_row) {
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 4; ++j) destination[j * destination_row + i] = source[i * source_row + j];
}

}  // namespace deformc
