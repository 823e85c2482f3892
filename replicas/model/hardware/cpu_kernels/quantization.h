// Quantization of rows to integers or float8, with a scale for each row: for multiplication by 8-bit weights, and for
// keys and values in 8 bits.
#pragma once

#include <c10/util/Float8_e4m3fn.h>

#include <cmath>

#include "vectors.h"

namespace headway {

using Float8 = c10::Float8_e4m3fn;

// Largest magnitude of the quantized numbers of a type.
template <typename N>
constexpr float kLargest = 0.0f;
template <>
constexpr float kLargest<int16_t> = 8191.0f;  // with weights up to 127, the sum of 2,048 products fits 32 bits
template <>
constexpr float kLargest<int8_t> = 127.0f;
template <>
constexpr float kLargest<Float8> = 448.0f;

// A row without a larger number becomes zeros: the factor of a smaller one would be infinite.
constexpr float kLeastMagnitude = 1e-30f;

// Rounds to nearest, ties to even. |value| is at most `kLargest`. Like `narrow`, it has no branch and no call.
template <typename N>
inline N round_to(float value) {
  return static_cast<N>(static_cast<int32_t>((value + 12582912.0f) - 12582912.0f));  // 1.5 * 2^23
}
template <>
inline Float8 round_to<Float8>(float value) {
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffff;
  const uint32_t rounded = (magnitude + 0x7ffff + ((magnitude >> 20) & 1) - (120u << 23)) >> 20;
  // Below 2^-6 numbers are multiples of 2^-9, the last bit of floats between 2^14 and 2^15.
  const uint32_t small = float_to_bits(bits_to_float(magnitude) + 16384.0f) - float_to_bits(16384.0f);
  const uint32_t number = magnitude < (121u << 23) ? small : rounded;
  return Float8(static_cast<uint8_t>(((bits >> 24) & 0x80) | number), Float8::from_bits());
}

// Quantizes a row and returns its scale: from = scale * to, up to rounding. The scale is not finite if a number of the
// row is not.
template <typename T, typename N>
inline float quantize(const T* from, int64_t size, N* to) {
  float largest = 0.0f, zero = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : zero)
  for (int64_t i = 0; i < size; i++) {
    const float magnitude = std::fabs(widen(from[i]));
    largest = magnitude > largest ? magnitude : largest;
    zero += magnitude * 0.0f;  // NaN for NaN and infinity
  }
  const float factor = largest > kLeastMagnitude ? kLargest<N> / largest : 0.0f;
#pragma omp simd
  for (int64_t i = 0; i < size; i++) to[i] = round_to<N>(widen(from[i]) * factor);
  return largest / kLargest<N> + zero;
}

// GCC converts vectors of bytes one by one, so there are instructions for them.
inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return by_parts<Floats>([&](auto half) HEADWAY_INLINE {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + half * 8));
    return (Floats::Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  });
#else
  Floats values;
  for (int lane = 0; lane < kLanes; lane++) values[lane] = from[lane];
  return values;
#endif
}

// Returns the numbers times `kLoaded<Float8>`, with which they are half-precision numbers of the same bits.
inline Floats load(const Float8* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  // The extension of the sign sets bits 15 and 14. Bit 14 is not part of the number.
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  return (Floats)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
#else
#if defined(__AVX2__)
  const Words words = by_parts<Words>([&](auto half) HEADWAY_INLINE {
    const void* bytes = from + half * 8;
    return (Words::Part)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(bytes)));
  });
#else
  const Words words = convert<Words>(read<Bytes>(from));
#endif
  const Words magnitude = words & 0x7f;
  // A number with the exponent 0 has no leading one. It gets one, which is subtracted again.
  const Words is_small = (Words)(magnitude < 8);
  const Words bits = (magnitude << 20) + (112u << 23) + (is_small & (1u << 23));
  const Floats positive = (Floats)bits - (Floats)(is_small & (113u << 23));
  return (Floats)((Words)positive | ((words & 0x80) << 24));
#endif
}

// Factor of the vectors that `load` returns.
template <typename N>
constexpr float kLoaded = 1.0f;
template <>
constexpr float kLoaded<Float8> = 1.0f / 256.0f;

}  // namespace headway
