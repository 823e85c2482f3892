// Multiplication by a packed weight in 4 or 8 bits with scales by group of inputs. Its numbers are widened in
// registers. In 4 bits, 64 bytes hold four inputs of a panel: each 16-bit lane has two outputs of two pairs of inputs.
// A number from 0 to 15 stands for one of the values of its type. In 8 bits, 64 bytes hold two inputs of a panel. All
// numbers are exact in bfloat16.
#pragma once

#include "linear.h"

namespace headway {

// Inputs in 64 bytes of a panel.
template <typename W>
constexpr int64_t kGroupedInputs = 64 / kPanel * kHeld<W>;

// Scales of a weight, for each panel and group of inputs, and the sums of the input rows by group.
struct Groups {
  const float* scales;    // [num_panels, num_groups, kPanel]
  const float* offsets;   // like `scales`: scale times the zero point, which is subtracted; may be null
  const float* row_sums;  // [num_rows, num_groups]; null without offsets
  int64_t size;           // inputs of a group
};

// Scales and offsets of one group of a panel.
class GroupScale {
 public:
  GroupScale(const Groups& groups, int64_t panel, int64_t num_groups, int64_t group)
      : groups_(groups), num_groups_(num_groups), group_(group), first_((panel * num_groups + group) * kPanel) {}

  // Adds the group's sums of one row and one half of the panel to the totals.
  HEADWAY_INLINE void add(float* totals, Floats sums, int half, int64_t row) const {
    const int64_t first = first_ + half * kLanes;
    Floats total = load(totals) + load(groups_.scales + first) * sums;
    if (groups_.offsets) total -= load(groups_.offsets + first) * groups_.row_sums[row * num_groups_ + group_];
    store(totals, total);
  }

 private:
  const Groups& groups_;
  int64_t num_groups_, group_, first_;
};

// Values of 4-bit weights W.
template <typename W>
struct alignas(64) NibbleValues {
  constexpr NibbleValues() {
    for (int i = 0; i < 16; i++) values[i] = W::kValues[i];
  }
  float values[16] = {};
};

template <typename W>
inline Floats nibble_values(Words words, int shift) {
  static constexpr NibbleValues<W> table;
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, shift), _mm512_load_ps(table.values));
#else
  if constexpr (std::is_same_v<W, Nibbles>) {
    return convert<Floats>((Ints)((words >> shift) & 15u) - 8);
  } else {
    Floats found;
    for (int lane = 0; lane < kLanes; lane++) found[lane] = table.values[(words[lane] >> shift) & 15u];
    return found;
  }
#endif
}

// Sums of products of a pair of inputs and their weights. `weights<N>` widens the N-th part of 64 bytes, which has both
// inputs of kLanes outputs. A sum takes at most kSummed inputs.
template <typename X, typename W>
struct WidenedProducts {
  static constexpr int64_t kSummed = std::numeric_limits<int64_t>::max();
  using Sum = Floats;
  struct Row {
    float first, second;
  };
  struct Weight {
    Floats first, second;
  };
  static Row read_row(const X* from) { return {widen(from[0]), widen(from[1])}; }
  template <int N>
  static Weight weights(const W* from) {
    if constexpr (kIsNibbles<W>) {
      const Words words = read<Words>(from);
      return {nibble_values<W>(words, 4 * N), nibble_values<W>(words, 16 + 4 * N)};
    } else {
      const Ints wide = convert<Ints>(read<ShortInts>(from + N * sizeof(ShortInts)));
      return {convert<Floats>((wide << 24) >> 24), convert<Floats>(wide >> 8)};
    }
  }
  static Sum add(Sum sum, Row row, Weight weight) {
    return sum + row.first * weight.first + row.second * weight.second;
  }
  static Floats result(Sum sum) { return sum; }
};

template <typename X, typename W>
struct GroupedProducts : WidenedProducts<X, W> {};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Values of 4-bit weights W as bits of bfloat16, in which they are exact. A permutation reads the lowest five bits of
// each lane, so both halves are equal.
template <typename W>
struct alignas(64) NarrowNibbleValues {
  constexpr NarrowNibbleValues() {
    for (int i = 0; i < 32; i++) values[i] = __builtin_bit_cast(uint32_t, static_cast<float>(W::kValues[i % 16])) >> 16;
  }
  uint16_t values[32] = {};
};

// Weights of `WidenedProducts` in bfloat16.
template <typename W>
struct NarrowWeights {
  template <int N>
  static __m512bh weights(const W* from) {
    if constexpr (kIsNibbles<W>) {
      static constexpr NarrowNibbleValues<W> table;
      return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(from), 4 * N),
                                                _mm512_load_si512(table.values));
    } else {
      const auto widened = [&](int part) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + N * 32 + part * 16))));
      };
      return _mm512_cvtne2ps_pbh(widened(1), widened(0));
    }
  }
};

#if defined(__AMX_BF16__)
// The sums have the order of the matrix unit, which multiplies more rows: it sums the first and the second inputs of
// the pairs of a tile apart.
template <typename W>
struct GroupedProducts<BFloat16, W> : WidenedProducts<BFloat16, W> {
  using typename WidenedProducts<BFloat16, W>::Row, typename WidenedProducts<BFloat16, W>::Weight;
  static constexpr int64_t kSummed = 32;
  struct Sum {
    Floats first, second;
  };
  static Sum add(Sum sum, Row row, Weight weight) {
    return {sum.first + row.first * weight.first, sum.second + row.second * weight.second};
  }
  static Floats result(Sum sum) { return sum.first + sum.second; }
};
#else
template <typename W>
struct GroupedProducts<BFloat16, W> : Products<BFloat16, BFloat16>, NarrowWeights<W> {
  static constexpr int64_t kSummed = std::numeric_limits<int64_t>::max();
};
#endif
#endif

// Multiplies R rows by one panel. Each row's sums have one order, whatever R is.
template <int R, typename X, typename W>
inline void multiply_grouped(const LinearInputs<X, W, X>& in, const Groups& groups, int64_t row, int64_t panel,
                             Ahead* ahead) {
  using P = GroupedProducts<X, W>;
  const int64_t size = in.num_inputs, num_groups = size / groups.size;
  const X* rows = in.rows + row * size;
  const W* weights = in.panel(panel);
  alignas(64) float totals[R * kPanel] = {};
  Ahead coming = *ahead;
  for (int64_t group = 0; group < num_groups; group++) {
    Floats sums[R * 2] = {};
    const int64_t end = (group + 1) * groups.size;
    for (int64_t first = group * groups.size, last; first < end; first = last) {
      last = first + std::min(P::kSummed, end - first);
      typename P::Sum parts[R * 2] = {};
      for (int64_t k = first; k < last; k += kGroupedInputs<W>, weights += 64) {
        coming.template fetch<1>();
        repeat<kGroupedInputs<W> / 2>([&](auto pair) HEADWAY_INLINE {
          const auto low = P::template weights<2 * pair>(weights), high = P::template weights<2 * pair + 1>(weights);
          repeat<R>([&](auto r) HEADWAY_INLINE {
            const auto value = P::read_row(rows + r * size + k + 2 * pair);
            parts[2 * r] = P::add(parts[2 * r], value, low);
            parts[2 * r + 1] = P::add(parts[2 * r + 1], value, high);
          });
        });
      }
      repeat<R * 2>([&](auto i) HEADWAY_INLINE { sums[i] += P::result(parts[i]); });
    }
    const GroupScale scale(groups, panel, num_groups, group);
    repeat<R * 2>([&](auto i) HEADWAY_INLINE { scale.add(totals + i * kLanes, sums[i], i % 2, row + i / 2); });
  }
  *ahead = coming;
  write_outputs(in, totals, row, R, panel);
}

// Fills `sums` [num_groups] with the sums of a row by group.
template <typename X>
inline void sum_groups(const X* row, int64_t size, int64_t group_size, float* sums) {
  for (int64_t first = 0; first < size; first += group_size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < group_size; i++) sum += widen(row[first + i]);
    *sums++ = sum;
  }
}

}  // namespace headway
