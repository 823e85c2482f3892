// Vectors of 16 numbers, in one register of 64 bytes or in several smaller ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace headway {

#define HEADWAY_INLINE __attribute__((always_inline))

// Calls f with the compile-time constants 0 to N - 1. In a loop, compilers keep arrays of sums in memory instead of
// registers.
template <int N, typename F>
HEADWAY_INLINE inline void repeat(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) HEADWAY_INLINE {
    (f(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, N>());
}

constexpr int kLanes = 16;  // numbers of a vector

// Registers of a vector of floats, and the vectors of sums that half of a processor's registers hold.
#if defined(__AVX512F__)
constexpr int kRegisters = 1, kSums = 16;
#elif defined(__AVX2__)
constexpr int kRegisters = 2, kSums = 4;
#elif defined(__aarch64__)
constexpr int kRegisters = 4, kSums = 4;
#else
constexpr int kRegisters = 4, kSums = 2;
#endif

#if defined(__AVX512F__)

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int16_t ShortInts __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

template <typename To, typename From>
HEADWAY_INLINE inline To convert(From from) {
  return __builtin_convertvector(from, To);
}

template <typename To>
HEADWAY_INLINE inline To read(const void* from) {
  To values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

#else

// Vector of numbers in kRegisters registers. GCC keeps a vector type that is wider than a register in memory, where a
// product takes 25 times as long.
template <typename N>
struct Vector {
  typedef N Part __attribute__((vector_size(kLanes / kRegisters * sizeof(N))));

  Vector() = default;
  // Takes the bits of a vector of other numbers of the same size.
  template <typename M>
  HEADWAY_INLINE explicit Vector(const Vector<M>& from) {
    repeat<kRegisters>([&](auto i) HEADWAY_INLINE { parts[i] = (Part)from.parts[i]; });
  }
  N& operator[](int lane) { return reinterpret_cast<N*>(parts)[lane]; }
  const N& operator[](int lane) const { return reinterpret_cast<const N*>(parts)[lane]; }

  Part parts[kRegisters];
};

using Floats = Vector<float>;
using Ints = Vector<int32_t>;
using Words = Vector<uint32_t>;
using Halves = Vector<uint16_t>;
using ShortInts = Vector<int16_t>;
using Bytes = Vector<uint8_t>;

// Returns the vector whose parts `f` computes.
template <typename To, typename F>
HEADWAY_INLINE inline To by_parts(const F& f) {
  To result;
  repeat<kRegisters>([&](auto i) HEADWAY_INLINE { result.parts[i] = f(i); });
  return result;
}

template <typename To, typename From>
HEADWAY_INLINE inline To convert(const From& from) {
  return by_parts<To>([&](auto i) HEADWAY_INLINE { return __builtin_convertvector(from.parts[i], typename To::Part); });
}

// A copy of all parts at once would stay in memory, too.
template <typename To>
HEADWAY_INLINE inline To read(const void* from) {
  return by_parts<To>([&](auto i) HEADWAY_INLINE {
    typename To::Part part;
    std::memcpy(&part, static_cast<const char*>(from) + i * sizeof part, sizeof part);
    return part;
  });
}

inline void store(float* to, const Floats& values) {
  repeat<kRegisters>([&](auto i) HEADWAY_INLINE {
    std::memcpy(to + i * (kLanes / kRegisters), &values.parts[i], sizeof values.parts[i]);
  });
}

#define HEADWAY_OPERATOR(op)                                                                     \
  template <typename N>                                                                          \
  HEADWAY_INLINE inline auto operator op(const Vector<N>& a, const Vector<N>& b) {               \
    return by_parts<Vector<N>>([&](auto i) HEADWAY_INLINE { return a.parts[i] op b.parts[i]; }); \
  }                                                                                              \
  template <typename N>                                                                          \
  HEADWAY_INLINE inline auto operator op(const Vector<N>& a, std::type_identity_t<N> b) {        \
    return by_parts<Vector<N>>([&](auto i) HEADWAY_INLINE { return a.parts[i] op b; });          \
  }                                                                                              \
  template <typename N>                                                                          \
  HEADWAY_INLINE inline auto operator op(std::type_identity_t<N> a, const Vector<N>& b) {        \
    return by_parts<Vector<N>>([&](auto i) HEADWAY_INLINE { return a op b.parts[i]; });          \
  }
HEADWAY_OPERATOR(+)
HEADWAY_OPERATOR(-)
HEADWAY_OPERATOR(*)
HEADWAY_OPERATOR(&)
HEADWAY_OPERATOR(<<)
HEADWAY_OPERATOR(>>)
HEADWAY_OPERATOR(|)
#undef HEADWAY_OPERATOR

template <typename N>
HEADWAY_INLINE inline Ints operator<(const Vector<N>& a, std::type_identity_t<N> b) {
  return by_parts<Ints>([&](auto i) HEADWAY_INLINE { return a.parts[i] < b; });
}

template <typename N>
HEADWAY_INLINE inline void operator+=(Vector<N>& sum, const Vector<N>& other) {
  sum = sum + other;
}

template <typename N>
HEADWAY_INLINE inline void operator-=(Vector<N>& sum, const Vector<N>& other) {
  sum = sum - other;
}

#endif

inline Floats load(const float* from) { return read<Floats>(from); }
inline Floats load(const BFloat16* from) { return (Floats)(convert<Words>(read<Halves>(from)) << 16); }

inline float sum_of(Floats values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)values);
#else
  Floats::Part part = values.parts[0];
  repeat<kRegisters - 1>([&](auto i) HEADWAY_INLINE { part += values.parts[i + 1]; });
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes / kRegisters; lane++) sum += part[lane];
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
#elif defined(__AVX2__)
  const auto half = [](Floats values) { return (__m256)(values.parts[0] + values.parts[1]); };
  const __m256 quarters = _mm256_hadd_ps(_mm256_hadd_ps(half(a), half(b)), _mm256_hadd_ps(half(c), half(d)));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1)));
#else
  to[0] = sum_of(a), to[1] = sum_of(b), to[2] = sum_of(c), to[3] = sum_of(d);
#endif
}

}  // namespace headway
