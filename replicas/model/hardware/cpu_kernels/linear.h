// Multiplication by a packed weight: panels of kPanel outputs. A panel holds its weights input by input, kPair adjacent
// inputs per output. A panel is read sequentially, which is the fastest order for memory.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace headway {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int kRows = 3 * kSums / 4;            // rows whose sums of a panel fill the registers
constexpr int kManyRows = kRegisters == 1 ? kRows : 2 * kRows;  // rows whose sums of half a panel do
constexpr int64_t kFewRows = 8 * kManyRows;     // below it, weights come from memory, and are read a panel at a time
constexpr int64_t kRowBlockBytes = 256 * 1024;  // a block of input rows, which stays in the cache for all panels
constexpr int64_t kMaxChunkBytes = 256 * 1024;  // weights of one chunk of a parallel multiplication
constexpr int64_t kBytesAhead = 4096;           // prefetch distance of weights that are used once

// Sums of products of rows of X and weights of W, kPair inputs per step, for kMostRows rows at most together. After
// kMostSteps steps a sum may overflow.
template <typename X, typename W>
struct Products;

template <>
struct Products<float, float> {
  static constexpr int kMostRows = kManyRows;
  static constexpr int64_t kPair = 1, kMostSteps = std::numeric_limits<int64_t>::max();
  using Row = float;
  using Weight = Floats;
  using Sum = Floats;
  static Row read_row(const float* from) { return *from; }
  static Weight read_weight(const float* from) { return load(from); }
  static Sum add(Sum sum, Row row, Weight weight) { return sum + row * weight; }
  static Floats result(Sum sum) { return sum; }
};

template <>
struct Products<BFloat16, BFloat16> {
  static constexpr int kMostRows = kRows;  // Weights of two registers leave none for more.
  static constexpr int64_t kPair = 2, kMostSteps = std::numeric_limits<int64_t>::max();
  using Sum = Floats;
#if defined(__AVX512BF16__)
  using Row = __m512bh;
  using Weight = __m512bh;
  static Row read_row(const BFloat16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Weight read_weight(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Sum add(Sum sum, Row row, Weight weight) { return (Floats)_mm512_dpbf16_ps((__m512)sum, row, weight); }
#else
  struct Row {
    float first, second;
  };
  struct Weight {
    Floats first, second;
  };
  static Row read_row(const BFloat16* from) { return {widen(from[0]), widen(from[1])}; }
  static Weight read_weight(const BFloat16* from) {
    const Words pairs = read<Words>(from);
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
  }
  static Sum add(Sum sum, Row row, Weight weight) {
    return sum + row.first * weight.first + row.second * weight.second;
  }
#endif
  static Floats result(Sum sum) { return sum; }
};

template <>
struct Products<int16_t, int8_t> {
  static constexpr int kMostRows = kManyRows;
  static constexpr int64_t kPair = 2, kMostSteps = 1024;
  using Sum = Ints;
#if defined(__AVX512VNNI__)
  using Row = __m512i;
  using Weight = __m512i;
  static Row read_row(const int16_t* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static Weight read_weight(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
  }
  static Sum add(Sum sum, Row row, Weight weight) { return (Sum)_mm512_dpwssd_epi32((__m512i)sum, row, weight); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
  using Row = __m256i;
  struct Weight {
    __m256i parts[2];
  };
  static Row read_row(const int16_t* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return _mm256_set1_epi32(pair);
  }
  static Weight read_weight(const int8_t* from) {
    const auto part = [&](int index) {
      return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + index));
    };
    return {part(0), part(1)};
  }
  static Sum add(Sum sum, Row row, const Weight& weight) {
    return by_parts<Sum>([&](auto i) HEADWAY_INLINE {
      return (Sum::Part)_mm256_add_epi32((__m256i)sum.parts[i], _mm256_madd_epi16(row, weight.parts[i]));
    });
  }
#else
  struct Row {
    int32_t first, second;
  };
  struct Weight {
    Ints first, second;
  };
  static Row read_row(const int16_t* from) { return {from[0], from[1]}; }
  static Weight read_weight(const int8_t* from) {
    const Ints wide = convert<Ints>(read<ShortInts>(from));
    return {(wide << 24) >> 24, wide >> 8};
  }
  static Sum add(Sum sum, Row row, Weight weight) {
    return sum + row.first * weight.first + row.second * weight.second;
  }
#endif
  static Floats result(Sum sum) { return convert<Floats>(sum); }
};

// Two 4-bit weights, of the values -8 to 7.
struct Nibbles {
  static constexpr int8_t kValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  uint8_t bits;
};

// Two 4-bit weights, of the values of GGUF's IQ4_NL and IQ4_XS.
struct TableNibbles {
  static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  uint8_t bits;
};

template <typename W>
constexpr bool kIsNibbles = std::is_same_v<W, Nibbles> || std::is_same_v<W, TableNibbles>;

// Weights that one W holds.
template <typename W>
constexpr int64_t kHeld = kIsNibbles<W> ? 2 : 1;

template <typename X, typename W, typename O>
struct LinearInputs {
  const X* rows;     // [num_rows, num_inputs]
  const W* weights;  // [num_panels, num_inputs / kPair, kPanel, kPair]; outputs from num_outputs on are unused
  const O* bias;     // [num_outputs]; may be null
  int64_t num_rows, num_inputs, num_outputs;
  O* outputs;                            // [num_rows, num_outputs], or a part of it; see `only`
  const float* row_scales = nullptr;     // [num_rows]: scales of quantized rows; may be null
  const float* output_scales = nullptr;  // [num_outputs]: scales of quantized weights; both scales are given or none
  int64_t output_stride = num_outputs;   // between the rows of `outputs`
  int64_t first_output = 0;              // output number of the first column of `outputs`
  int64_t num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }
  // Returns the inputs of the panels [first, end) alone, with contiguous outputs in `to`.
  LinearInputs only(int64_t first, int64_t end, O* to) const {
    LinearInputs part = *this;
    part.outputs = to;
    part.output_stride = (end - first) * kPanel;
    part.first_output = first * kPanel;
    return part;
  }
  O* output(int64_t row, int64_t panel) const {
    return outputs + row * output_stride + panel * kPanel - first_output;
  }
  const W* panel(int64_t index) const { return weights + index * kPanel * num_inputs / kHeld<W>; }
};

// Stores `num` rows of a panel's totals [num, kPanel], after applying scales and bias.
template <typename X, typename W, typename O>
inline void write_outputs(const LinearInputs<X, W, O>& in, const float* totals, int64_t row, int64_t num,
                          int64_t panel) {
  const int64_t first = panel * kPanel, width = std::min(kPanel, in.num_outputs - first);
  for (int64_t r = 0; r < num; r++, totals += kPanel) {
    O* to = in.output(row + r, panel);
    if (in.row_scales || in.bias) {
      const float scale = in.row_scales ? in.row_scales[row + r] : 1.0f;
      for (int64_t i = 0; i < width; i++)
        to[i] = narrow<O>(totals[i] * (in.output_scales ? scale * in.output_scales[first + i] : 1.0f) +
                          (in.bias ? widen(in.bias[first + i]) : 0.0f));
    } else if (width == kPanel) {
#pragma omp simd
      for (int64_t i = 0; i < kPanel; i++) to[i] = narrow<O>(totals[i]);
    } else {
      for (int64_t i = 0; i < width; i++) to[i] = narrow<O>(totals[i]);
    }
  }
}

// Cache lines to prefetch during other computation, a few at a time: a processor drops most of many prefetches at once.
struct Ahead {
  const char* next;
  int64_t num_lines;
  template <int N>
  HEADWAY_INLINE void fetch() {
    if (num_lines < N) return;
    repeat<N>([&](auto i) HEADWAY_INLINE { __builtin_prefetch(next + i * 64); });
    next += N * 64;
    num_lines -= N;
  }
};

// Returns the lines to prefetch during the multiplication by a panel: if the panel is used once, the lines kBytesAhead
// further on; otherwise the next panel.
template <typename X, typename W, typename O>
inline Ahead ahead_of(const LinearInputs<X, W, O>& in, int64_t panel, bool is_used_once) {
  const int64_t num_lines = kPanel * in.num_inputs * static_cast<int64_t>(sizeof(W)) / kHeld<W> / 64;
  if (is_used_once) return {reinterpret_cast<const char*>(in.panel(panel)) + kBytesAhead, num_lines};
  return {reinterpret_cast<const char*>(in.panel(panel + 1)), num_lines};
}

// Multiplies R rows by one panel, or by its halves one after the other if all sums would take too many registers.
template <int R, typename X, typename W, typename O>
inline void multiply(const LinearInputs<X, W, O>& in, int64_t row, int64_t panel, Ahead* ahead) {
  using P = Products<X, W>;
  constexpr int64_t kVector = kLanes * P::kPair;
  constexpr int kTogether = R > kRows ? 1 : 2;  // vectors of outputs
  const int64_t size = in.num_inputs, num_steps = size / P::kPair;
  const X* rows = in.rows + row * size;
  alignas(64) float memory[R * kPanel];
  float* totals = memory;
  int64_t stride = kPanel;
  bool are_outputs = false;
  if constexpr (std::is_same_v<O, float>) {
    are_outputs = !in.row_scales && !in.bias && (panel + 1) * kPanel <= in.num_outputs;
    if (are_outputs) totals = in.output(row, panel), stride = in.output_stride;
  }
  Ahead coming = *ahead;
  for (int done = 0; done < 2; done += kTogether) {
    const W* weights = in.panel(panel) + done * kVector;
    for (int64_t first = 0; first < num_steps; first += std::min(P::kMostSteps, num_steps)) {
      const int64_t end = num_steps - first < P::kMostSteps ? num_steps : first + P::kMostSteps;
      typename P::Sum sums[R * kTogether] = {};
      for (int64_t k = first; k < end; k++, weights += 2 * kVector) {
        typename P::Weight parts[kTogether];
        repeat<kTogether>([&](auto i) HEADWAY_INLINE { parts[i] = P::read_weight(weights + i * kVector); });
        coming.template fetch<kTogether * kVector * sizeof(W) / 64>();
        repeat<R>([&](auto r) HEADWAY_INLINE {
          const typename P::Row value = P::read_row(rows + r * size + k * P::kPair);
          repeat<kTogether>([&](auto i) HEADWAY_INLINE {
            sums[r * kTogether + i] = P::add(sums[r * kTogether + i], value, parts[i]);
          });
        });
      }
      repeat<R * kTogether>([&](auto i) HEADWAY_INLINE {
        float* total = totals + i / kTogether * stride + (done + i % kTogether) * kLanes;
        store(total, first > 0 ? load(total) + P::result(sums[i]) : P::result(sums[i]));
      });
    }
  }
  *ahead = coming;
  if (!are_outputs) write_outputs(in, totals, row, R, panel);
}

// Calls `multiply` with the compile-time constant `num`, which is at most R.
template <int R, typename F>
inline void with_rows(int64_t num, const F& multiply) {
  if (num == R)
    multiply(std::integral_constant<int, R>());
  else if constexpr (R > 1)
    with_rows<R - 1>(num, multiply);
}

// Multiplies all rows by panels [first, end). `multiply(num, row, panel, ahead)` multiplies `num` rows by one panel; R is
// the most.
template <int R, typename X, typename W, typename O, typename F>
inline void multiply_panels(const LinearInputs<X, W, O>& in, int64_t first, int64_t end, const F& multiply) {
  const int64_t block_rows = std::max<int64_t>(R, kRowBlockBytes / (in.num_inputs * sizeof(X)) / R * R);
  for (int64_t block = 0; block < in.num_rows; block += block_rows) {
    const int64_t last = std::min(block + block_rows, in.num_rows);
    const int64_t num_groups = (last - block + R - 1) / R;
    for (int64_t panel = first; panel < end; panel++) {
      Ahead ahead = ahead_of(in, panel, num_groups == 1);
      for (int64_t group = 0, row = block; group < num_groups; group++) {
        const int64_t num = (last - row + num_groups - group - 1) / (num_groups - group);
        with_rows<R>(num, [&](auto constant) { multiply(constant, row, panel, &ahead); });
        row += num;
      }
    }
  }
}

// Multiplies all rows, R at most together, by panels [first, end) of weights that are used as they are.
template <int R, typename X, typename W, typename O>
inline void multiply_panels(const LinearInputs<X, W, O>& in, int64_t first, int64_t end) {
  multiply_panels<R>(in, first, end, [&](auto num, int64_t row, int64_t panel, Ahead* ahead) {
    multiply<num>(in, row, panel, ahead);
  });
}

// The same with the number of rows together that is fastest.
template <typename X, typename W, typename O>
inline void multiply_panels(const LinearInputs<X, W, O>& in, int64_t first, int64_t end) {
  if (in.num_rows < kFewRows)
    multiply_panels<kRows>(in, first, end);
  else
    multiply_panels<Products<X, W>::kMostRows>(in, first, end);
}

}  // namespace headway
