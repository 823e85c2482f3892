// Multiplication by a weight as it lies in the model's file. Every result is one dot product, summed in the same order
// however many rows are computed with it: what a sequence gets does not depend on its neighbours.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace headway {

// How products of rows of X and weights of W are summed, a step of some numbers at a time.
template <typename X, typename W>
struct Products {
  static constexpr int64_t kStep = kLanes;
  using Row = Floats;
  using Weight = Floats;
  using Sum = Floats;
  static Row read_row(const X* from) { return load(from); }
  static Weight read_weight(const W* from) { return load(from); }
  static Sum add(Sum sum, Row row, Weight weight) { return sum + row * weight; }
  static Floats result(Sum sum) { return sum; }
};

#if defined(__AVX512BF16__)
template <>
struct Products<BFloat16, BFloat16> {
  static constexpr int64_t kStep = 2 * kLanes;
  using Row = __m512bh;
  using Weight = __m512bh;
  using Sum = Floats;
  static Row read_row(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Weight read_weight(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Sum add(Sum sum, Row row, Weight weight) { return (Floats)_mm512_dpbf16_ps((__m512)sum, row, weight); }
  static Floats result(Sum sum) { return sum; }
};
#endif

#if defined(__AVX512VNNI__)
template <>
struct Products<int16_t, int8_t> {
  static constexpr int64_t kStep = 2 * kLanes;
  using Row = __m512i;
  using Weight = __m512i;
  using Sum = Ints;
  static Row read_row(const int16_t* from) { return _mm512_loadu_si512(from); }
  static Weight read_weight(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
  }
  static Sum add(Sum sum, Row row, Weight weight) { return (Sum)_mm512_dpwssd_epi32((__m512i)sum, row, weight); }
  static Floats result(Sum sum) { return __builtin_convertvector(sum, Floats); }
};
#endif

template <typename X, typename W, typename O>
struct LinearInputs {
  const X* rows;     // [num_rows, num_inputs]
  const W* weights;  // [num_outputs, num_inputs]
  const O* bias;     // [num_outputs]; may be null
  int64_t num_rows, num_inputs, num_outputs;
  O* outputs;                            // [num_rows, num_outputs]
  const float* row_scales = nullptr;     // [num_rows]: what a row of whole numbers is multiplied by
  const float* output_scales = nullptr;  // [num_outputs]: the same of weights; both are given or none
};

constexpr int kRows = 6;           // rows computed together, at most: with the operands their sums fill the registers
constexpr int kColumns = 4;        // outputs computed together
constexpr int kGroupsAhead = 2;   // how far ahead weights are fetched, in kColumns outputs
constexpr int64_t kRowBlock = 96;  // rows that stay in the cache while the weights pass by

// Scales, biases and stores R rows of kColumns totals.
template <int R, typename X, typename W, typename O>
inline void write_outputs(const LinearInputs<X, W, O>& in, float* totals, int64_t row, int64_t column) {
  if (in.row_scales)
    for (int i = 0; i < R * kColumns; i++)
      totals[i] *= in.row_scales[row + i / kColumns] * in.output_scales[column + i % kColumns];
  if (in.bias)
    for (int i = 0; i < R * kColumns; i++) totals[i] += widen(in.bias[column + i % kColumns]);
  O narrowed[R * kColumns];
#pragma omp simd
  for (int i = 0; i < R * kColumns; i++) narrowed[i] = narrow<O>(totals[i]);
  for (int r = 0; r < R; r++)
    std::memcpy(in.outputs + (row + r) * in.num_outputs + column, narrowed + r * kColumns, kColumns * sizeof(O));
}

// R rows by kColumns outputs. In each step F lines of `coming` are fetched: weights of outputs to come, in the order in
// which they lie there. Asked for in the order in which they are used, or all at once, they came at half the speed.
template <int R, int F, typename X, typename W, typename O>
inline void multiply(const LinearInputs<X, W, O>& in, int64_t row, int64_t column, const W* coming) {
  using P = Products<X, W>;
  const int64_t size = in.num_inputs;
  const X* rows = in.rows + row * size;
  const W* weights = in.weights + column * size;
  typename P::Sum sums[R * kColumns] = {};
  for (int64_t k = 0; k < size; k += P::kStep) {
    typename P::Row values[R];
    repeat<R>([&](auto r) HEADWAY_INLINE { values[r] = P::read_row(rows + r * size + k); });
    repeat<kColumns>([&](auto c) HEADWAY_INLINE {
      const typename P::Weight weight = P::read_weight(weights + c * size + k);
      if (c < F) __builtin_prefetch(coming + c * P::kStep);
      repeat<R>([&](auto r) HEADWAY_INLINE {
        sums[r * kColumns + c] = P::add(sums[r * kColumns + c], values[r], weight);
      });
    });
    coming += F * P::kStep;
  }
  float totals[R * kColumns];
  repeat<R * kColumns / 4>([&](auto i) HEADWAY_INLINE {
    store_sums(totals + 4 * i, P::result(sums[4 * i]), P::result(sums[4 * i + 1]), P::result(sums[4 * i + 2]),
               P::result(sums[4 * i + 3]));
  });
  write_outputs<R>(in, totals, row, column);
}

// `num` rows, at most kRows of them.
template <int F, int R = kRows, typename X, typename W, typename O>
inline void multiply_rows(const LinearInputs<X, W, O>& in, int64_t row, int64_t num, int64_t column, const W* coming) {
  if (num == R)
    multiply<R, F>(in, row, column, coming);
  else if constexpr (R > 1)
    multiply_rows<F, R - 1>(in, row, num, column, coming);
}

// Outputs [first, end) of all rows; both are multiples of kColumns. The groups of rows that the same weights are
// multiplied with share in fetching the next ones.
template <typename X, typename W, typename O>
inline void multiply_columns(const LinearInputs<X, W, O>& in, int64_t first, int64_t end) {
  for (int64_t block = 0; block < in.num_rows; block += kRowBlock) {
    const int64_t last = std::min(block + kRowBlock, in.num_rows);
    const int64_t num_groups = (last - block + kRows - 1) / kRows;
    const int64_t num_lines = num_groups == 1 ? kColumns : num_groups < kColumns ? 2 : 1;
    for (int64_t column = first; column < end; column += kColumns) {
      const W* coming = in.weights + (column + kGroupsAhead * kColumns) * in.num_inputs;
      const W* fetched = coming + kColumns * in.num_inputs;
      for (int64_t group = 0, row = block; group < num_groups; group++, coming += num_lines * in.num_inputs) {
        const int64_t num = (last - row + num_groups - group - 1) / (num_groups - group);
        if (coming >= fetched)
          multiply_rows<0>(in, row, num, column, coming);
        else if (num_lines == 1)
          multiply_rows<1>(in, row, num, column, coming);
        else if (num_lines == 2)
          multiply_rows<2>(in, row, num, column, coming);
        else
          multiply_rows<kColumns>(in, row, num, column, coming);
        row += num;
      }
    }
  }
}

}  // namespace headway
