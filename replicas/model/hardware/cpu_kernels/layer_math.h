// Small operations of a decoder layer, on one row: norm, addition, rotary embedding and SwiGLU gating.
#pragma once

#include <cmath>
#include <vector>

#include "numbers.h"

namespace headway {

// Computes to = from / root mean square of from * weight. `to` may be `from`.
template <typename T, typename W>
inline void normalize(const T* from, const W* weight, int64_t size, float epsilon, T* to) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; i++) squares += widen(from[i]) * widen(from[i]);
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
#pragma omp simd
  for (int64_t i = 0; i < size; i++) to[i] = narrow<T>(widen(from[i]) * factor * widen(weight[i]));
}

template <typename T>
inline void add(T* to, const T* from, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) to[i] = narrow<T>(widen(to[i]) + widen(from[i]));
}

// Rotates each pair (head[i], head[i + size / 2]) of the head's first `size` numbers by its angle, in place.
template <typename T>
inline void rotate(T* head, const T* cos, const T* sin, int64_t size) {
  const int64_t half = size / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    const float first = widen(head[i]), second = widen(head[i + half]);
    head[i] = narrow<T>(first * widen(cos[i]) - second * widen(sin[i]));
    head[i + half] = narrow<T>(second * widen(cos[i + half]) + first * widen(sin[i + half]));
  }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(x > -87.0f ? -x : 87.0f)); }

// Computes to = silu(gate) * up.
template <typename T>
inline void gate(const T* gate, const T* up, int64_t size, T* to) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const float x = widen(gate[i]);
    to[i] = narrow<T>(x / (1.0f + exponential(x > -87.0f ? -x : 87.0f)) * widen(up[i]));
  }
}

}  // namespace headway
