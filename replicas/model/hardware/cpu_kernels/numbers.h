// Number types of the kernels: float and bfloat16 in memory, float or vectors of 16 floats in registers.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway {

using c10::BFloat16;

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return bits_to_float(static_cast<uint32_t>(value.x) << 16); }

template <typename T>
inline T narrow(float value);
template <>
inline float narrow<float>(float value) {
  return value;
}
// Rounds to nearest, ties to even. The code has no branch, so loops over it become vector instructions.
template <>
inline BFloat16 narrow<BFloat16>(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return BFloat16(static_cast<uint16_t>(value == value ? rounded : 0x7fc0), BFloat16::from_bits());
}

// Returns e^x with a relative error of about 1e-7 for x <= 88, and 0 below -87. Like `narrow`, it has no branch and no
// call.
inline float exponential(float x) {
  const float bounded = x < -87.0f ? -87.0f : x;
  const float shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the addition rounds to an integer
  const float power = shifted - 12582912.0f;
  const float rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;
  float sum = 1.38888889e-3f;
  sum = sum * rest + 8.33333333e-3f;
  sum = sum * rest + 4.16666667e-2f;
  sum = sum * rest + 1.66666667e-1f;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  const float scale = bits_to_float((float_to_bits(shifted) - 0x4b400000u + 127u) << 23);
  return x < -87.0f ? 0.0f : sum * scale;
}

#define HEADWAY_INLINE __attribute__((always_inline))

// Calls f with the compile-time constants 0 to N - 1. In a loop, compilers keep arrays of sums in memory instead of
// registers.
template <int N, typename F>
HEADWAY_INLINE inline void repeat(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) HEADWAY_INLINE {
    (f(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, N>());
}

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int16_t ShortInts __attribute__((vector_size(32)));

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline float sum_of(Floats values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)values);
#else
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; lane++) sum += values[lane];
  return sum;
#endif
}

// Stores the sums of four vectors as four floats.
inline void store_sums(float* to, Floats a, Floats b, Floats c, Floats d) {
#if defined(__AVX512F__)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(quarters), 1));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), upper);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#else
  to[0] = sum_of(a), to[1] = sum_of(b), to[2] = sum_of(c), to[3] = sum_of(d);
#endif
}

}  // namespace headway
