// Scores, softmax weights and weighted sums of some query rows over one tile of keys, in registers.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "quantization.h"
#include "vectors.h"

namespace headway {

constexpr int kTile = 64;  // keys of a tile

// Computes scores[row][key] for R query rows, four keys at a time. `keys` has valid pointers up to the next multiple of
// four.
template <int R, typename T>
inline void score_rows(const float* query, int64_t size, const T* const* keys, int num_keys, float* scores) {
  for (int key = 0; key < num_keys; key += 4) {
    Floats sums[R * 4] = {};
    for (int64_t d = 0; d < size; d += kLanes) {
      Floats key_part[4];
      repeat<4>([&](auto i) HEADWAY_INLINE { key_part[i] = load(keys[key + i] + d); });
      repeat<R>([&](auto r) HEADWAY_INLINE {
        const Floats query_part = load(query + r * size + d);
        repeat<4>([&](auto i) HEADWAY_INLINE { sums[r * 4 + i] += query_part * key_part[i]; });
      });
    }
    repeat<R>([&](auto r) HEADWAY_INLINE {
      store_sums(scores + r * kTile + key, sums[r * 4], sums[r * 4 + 1], sums[r * 4 + 2], sums[r * 4 + 3]);
    });
  }
}

// Computes sums[row][d] += weight[row][key] * value[key][d] for R rows and W vectors of d.
template <int R, int W, typename T>
inline void add_values(const float* weights, const T* const* values, int64_t d, int num_keys, float* sums,
                       int64_t size) {
  Floats parts[R * W];
  repeat<R * W>([&](auto i) HEADWAY_INLINE { parts[i] = load(sums + i / W * size + d + i % W * kLanes); });
  for (int key = 0; key < num_keys; key++) {
    Floats value[W];
    repeat<W>([&](auto w) HEADWAY_INLINE { value[w] = load(values[key] + d + w * kLanes); });
    repeat<R * W>([&](auto i) HEADWAY_INLINE { parts[i] += weights[i / W * kTile + key] * value[i % W]; });
  }
  repeat<R * W>([&](auto i) HEADWAY_INLINE { store(sums + i / W * size + d + i % W * kLanes, parts[i]); });
}

template <int R, typename T>
inline void add_all_values(const float* weights, const T* const* values, int num_keys, float* sums, int64_t size) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= size; d += 4 * kLanes) add_values<R, 4>(weights, values, d, num_keys, sums, size);
  for (; d < size; d += kLanes) add_values<R, 1>(weights, values, d, num_keys, sums, size);
}

// Calls f for the most rows whose sums fit the registers at a time, then for the rest. The number of rows is a
// compile-time constant in each call.
template <int R = std::max(kSums / 4, 1), typename F>
inline void for_row_groups(int64_t num_rows, const F& f, int64_t row = 0) {
  for (; row + R <= num_rows; row += R) f(std::integral_constant<int, R>(), row);
  if constexpr (R > 1) for_row_groups<R - 1>(num_rows, f, row);
}

// Softmax state of a row: the sum of weighted values [size], the highest score so far, and the sum of weights. Weights
// are relative to the highest score.
struct RowState {
  float* sums;
  int64_t size;
  float* maximum;
  float* total;
};

// Replaces one row's scores of a tile by softmax weights, and updates and rescales the row's state. Keys outside
// [low, high) get weight 0.
inline void weigh(float* scores, int low, int high, float softcap, const RowState& row) {
  if (high <= low) {
    std::fill(scores, scores + kTile, 0.0f);
    return;
  }
  if (softcap > 0.0f)
    for (int key = low; key < high; key++) scores[key] = softcap * std::tanh(scores[key] / softcap);
  std::fill(scores, scores + low, -std::numeric_limits<float>::infinity());
  std::fill(scores + high, scores + kTile, -std::numeric_limits<float>::infinity());
  float highest = *row.maximum;
#pragma omp simd reduction(max : highest)
  for (int key = 0; key < kTile; key++) highest = scores[key] > highest ? scores[key] : highest;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int key = 0; key < kTile; key++) {
    scores[key] = exponential(scores[key] - highest);
    sum += scores[key];
  }
  const float shrink = *row.maximum == highest ? 1.0f : exponential(*row.maximum - highest);
  if (shrink != 1.0f)
    for (int64_t d = 0; d < row.size; d++) row.sums[d] *= shrink;
  *row.total = *row.total * shrink + sum;
  *row.maximum = highest;
}

}  // namespace headway
