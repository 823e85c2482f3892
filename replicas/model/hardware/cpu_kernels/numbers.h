// Number types of the kernels: float and bfloat16 in memory, float in registers.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

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

}  // namespace headway
