// Quantization of rows to 16-bit integers and a scale, for multiplication by 8-bit weights.
#pragma once

#include <cmath>

#include "numbers.h"

namespace headway {

// With weights up to 127, the sum of 2,048 products of such numbers fits 32 bits.
constexpr float kLargestNumber = 8191.0f;

// Quantizes a row and returns its scale: from = scale * to, up to rounding. The scale is not finite if a number of the
// row is not.
template <typename T>
inline float quantize(const T* from, int64_t size, int16_t* to) {
  float largest = 0.0f, zero = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : zero)
  for (int64_t i = 0; i < size; i++) {
    const float magnitude = std::fabs(widen(from[i]));
    largest = magnitude > largest ? magnitude : largest;
    zero += magnitude * 0.0f;  // NaN for NaN and infinity
  }
  const float factor = largest > 0.0f ? kLargestNumber / largest : 0.0f;
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const float scaled = widen(from[i]) * factor;
    to[i] = static_cast<int16_t>(static_cast<int32_t>(scaled + (scaled < 0.0f ? -0.5f : 0.5f)));
  }
  return largest / kLargestNumber + zero;
}

}  // namespace headway
