// Multiplication of many rows by a packed weight with scales by group, in the processor's matrix unit (Intel AMX). The
// numbers of a panel are widened to bfloat16 once for all rows. Sums have the order of `multiply_grouped`.
#pragma once

#include <vector>

#include "grouped.h"
#include "tile_linear.h"

namespace headway {

constexpr int64_t kFewestGroupedRows = 4;  // with fewer rows the vector unit is faster

// Returns true if rows of T are to be multiplied in tiles: the inputs, in groups of `size`, fill them.
template <typename T>
inline bool can_fill_tiles(int64_t num_rows, int64_t num_inputs, int64_t size) {
#if defined(__AMX_BF16__)
  return std::is_same_v<T, BFloat16> && num_rows >= kFewestGroupedRows && num_inputs % kTileInputs == 0 &&
         (size % kTileInputs == 0 || size == kTileInputs / 2) && has_tiles();
#else
  return false;
#endif
}

#if defined(__AMX_BF16__)

// Returns the numbers of a panel in bfloat16, in the order of `multiply_tiles`. The next call of a thread overwrites
// them.
template <typename W>
inline const BFloat16* widen_panel(const LinearInputs<BFloat16, W, BFloat16>& in, int64_t panel) {
  struct alignas(64) Line {
    BFloat16 numbers[kTileInputs];
  };
  static thread_local std::vector<Line> lines;
  lines.resize(in.num_inputs);
  Ahead ahead = ahead_of(in, panel, true);
  const W* from = in.panel(panel);
  Line* to = lines.data();
  for (int64_t k = 0; k < in.num_inputs; k += kGroupedInputs<W>, from += 64, to += kGroupedInputs<W>) {
    ahead.fetch<1>();
    repeat<kGroupedInputs<W>>([&](auto part) HEADWAY_INLINE {
      _mm512_store_si512(to + part, (__m512i)NarrowWeights<W>::template weights<part>(from));
    });
  }
  return lines.data()->numbers;
}

// Multiplies T tiles of rows (1 or 2) by one panel.
template <int T, typename W>
inline void multiply_grouped_tiles(const LinearInputs<BFloat16, W, BFloat16>& in, const TiledRows& rows, int64_t index,
                                   const Groups& groups, int64_t panel, const BFloat16* weights, float* totals) {
  const int64_t num_groups = in.num_inputs / groups.size, row = index * kTileRows;
  const int64_t num = std::min(T * kTileRows, in.num_rows - row), step = std::min(groups.size, kTileInputs);
  const BFloat16 *first = rows.tile(index), *second = rows.tile(index + T - 1);
  constexpr int64_t kRowBytes = kTileInputs * sizeof(BFloat16), kPanelBytes = 2 * kPanel * sizeof(BFloat16);
  constexpr int64_t kTotalBytes = kPanel * sizeof(float);
  alignas(64) float sums[T * kTileRows * kPanel];
  std::fill(totals, totals + num * kPanel, 0.0f);
  for (int64_t group = 0; group < num_groups; group++) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (T == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = group * groups.size; k < (group + 1) * groups.size; k += step) {
      // Rows are in lines of kTileInputs inputs; a smaller group is a part of a line.
      const int64_t from = k / kTileInputs * kTileInputs * kTileRows + k % kTileInputs;
      _tile_loadd(6, weights + k * kPanel, kPanelBytes);
      _tile_loadd(4, first + from, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + (k + 1) * kPanel, kPanelBytes);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (T == 2) {
        _tile_loadd(5, second + from, kRowBytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, kTotalBytes);
    _tile_stored(1, sums + kLanes, kTotalBytes);
    if constexpr (T == 2) {
      _tile_stored(2, sums + kTileRows * kPanel, kTotalBytes);
      _tile_stored(3, sums + kTileRows * kPanel + kLanes, kTotalBytes);
    }
    const GroupScale scale(groups, panel, num_groups, group);
    for (int64_t r = 0; r < num; r++)
      for (int half = 0; half < 2; half++)
        scale.add(totals + r * kPanel + half * kLanes, load(sums + r * kPanel + half * kLanes), half, row + r);
  }
}

// Multiplies all rows by panels [first, end).
template <typename W>
inline void multiply_grouped_in_tiles(const LinearInputs<BFloat16, W, BFloat16>& in, const TiledRows& rows,
                                      const Groups& groups, int64_t first, int64_t end) {
  const TileShapes shapes(std::min(groups.size, kTileInputs));
  alignas(64) float totals[2 * kTileRows * kPanel];
  for (int64_t panel = first; panel < end; panel++) {
    const BFloat16* weights = widen_panel(in, panel);
    for (int64_t tile = 0; tile < rows.num_tiles(); tile += 2) {
      const int64_t row = tile * kTileRows, num = std::min(2 * kTileRows, in.num_rows - row);
      if (rows.num_tiles() - tile == 1)
        multiply_grouped_tiles<1>(in, rows, tile, groups, panel, weights, totals);
      else
        multiply_grouped_tiles<2>(in, rows, tile, groups, panel, weights, totals);
      write_outputs(in, totals, row, num, panel);
    }
  }
}

#endif

}  // namespace headway
