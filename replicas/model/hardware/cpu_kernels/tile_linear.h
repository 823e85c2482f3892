// Multiplication by a packed bfloat16 weight in the processor's matrix unit (Intel AMX): tiles of 16 rows by 32 inputs,
// times tiles of 32 inputs by 16 outputs. A panel has the layout that the unit loads. All rows go there, single ones
// too: the unit's sums have another order than those of `multiply`.
#pragma once

#include "linear.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headway {

constexpr int64_t kTileRows = 16, kTileInputs = 32;

// Returns the bytes of input rows in tiles.
inline int64_t tiled_bytes(int64_t num_rows, int64_t size) {
  return (num_rows + kTileRows - 1) / kTileRows * kTileRows * size * sizeof(BFloat16);
}

#if defined(__AMX_BF16__)

constexpr int64_t kFewTiles = 4;  // with more tiles the unit is the bottleneck, and prefetching slows it down

// Returns true if this process may use the unit. Linux grants its registers on request.
inline bool has_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

// Configuration of the thread's eight tile registers: 16 rows of 64 bytes each, or less for tiles of fewer inputs. The
// destructor releases the registers.
class TileShapes {
 public:
  explicit TileShapes(int64_t num_inputs = kTileInputs) {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t num_rows[16] = {};
    } shapes;
    std::fill(shapes.row_bytes, shapes.row_bytes + 8, 64);
    std::fill(shapes.num_rows, shapes.num_rows + 8, kTileRows);
    std::fill(shapes.row_bytes + 4, shapes.row_bytes + 6, num_inputs * sizeof(BFloat16));  // rows
    std::fill(shapes.num_rows + 6, shapes.num_rows + 8, num_inputs / 2);                   // weights
    _tile_loadconfig(&shapes);
  }
  ~TileShapes() { _tile_release(); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
};

// Copy of the input rows in the order in which tiles are loaded, [num_tiles, num_inputs / kTileInputs, kTileRows,
// kTileInputs]; each row of a tile is one cache line. Loads from the original rows are slower than the unit multiplies.
class TiledRows {
 public:
  // `memory` has `tiled_bytes` bytes and is aligned to a cache line.
  TiledRows(const BFloat16* rows, int64_t num_rows, int64_t size, void* memory)
      : rows_(rows), num_rows_(num_rows), size_(size), lines_(static_cast<Line*>(memory)) {}
  int64_t num_tiles() const { return (num_rows_ + kTileRows - 1) / kTileRows; }
  const BFloat16* tile(int64_t index) const { return lines_[index * kTileRows * size_ / kTileInputs].numbers; }

  // Copies a tile. Rows after the last input row are zeros.
  void arrange(int64_t index) const {
    const int64_t num_parts = size_ / kTileInputs;
    Line* lines = &lines_[index * kTileRows * num_parts];
    for (int64_t r = 0; r < kTileRows; r++) {
      const int64_t row = index * kTileRows + r;
      for (int64_t part = 0; part < num_parts; part++) {
        Line& line = lines[part * kTileRows + r];
        if (row < num_rows_)
          std::memcpy(&line, rows_ + row * size_ + part * kTileInputs, sizeof line);
        else
          std::memset(&line, 0, sizeof line);
      }
    }
  }

 private:
  struct alignas(64) Line {
    BFloat16 numbers[kTileInputs];
  };
  const BFloat16* rows_;
  int64_t num_rows_, size_;
  Line* lines_;
};

// Multiplies T tiles of rows (1 or 2) by one panel. Tile registers 0-3 hold sums, 4 and 5 rows, 6 and 7 weights.
template <int T>
inline void multiply_tiles(const TiledRows& rows, int64_t index, int64_t size, const BFloat16* panel, Ahead* ahead,
                           float* totals) {
  const BFloat16 *first = rows.tile(index), *second = rows.tile(index + T - 1);
  constexpr int64_t kRowBytes = kTileInputs * sizeof(BFloat16), kPanelBytes = 2 * kPanel * sizeof(BFloat16);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (T == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < size; k += kTileInputs, panel += kTileInputs * kPanel) {
    ahead->fetch<kTileInputs>();  // as many lines as a step reads
    _tile_loadd(6, panel, kPanelBytes);
    _tile_loadd(4, first + k * kTileRows, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kPanel, kPanelBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (T == 2) {
      _tile_loadd(5, second + k * kTileRows, kRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int64_t kTotalBytes = kPanel * sizeof(float);
  _tile_stored(0, totals, kTotalBytes);
  _tile_stored(1, totals + kLanes, kTotalBytes);
  if constexpr (T == 2) {
    _tile_stored(2, totals + kTileRows * kPanel, kTotalBytes);
    _tile_stored(3, totals + kTileRows * kPanel + kLanes, kTotalBytes);
  }
}

// Multiplies all rows by panels [first, end).
inline void multiply_panels_in_tiles(const LinearInputs<BFloat16, BFloat16, BFloat16>& in, const TiledRows& rows,
                                     int64_t first, int64_t end) {
  const TileShapes shapes;
  const int64_t size = in.num_inputs;
  const int64_t block_tiles = std::max<int64_t>(2, kRowBlockBytes / (size * sizeof(BFloat16)) / kTileRows / 2 * 2);
  alignas(64) float totals[2 * kTileRows * kPanel];
  for (int64_t block = 0; block < rows.num_tiles(); block += block_tiles) {
    const int64_t last = std::min(block + block_tiles, rows.num_tiles());
    for (int64_t panel = first; panel < end; panel++) {
      Ahead ahead = last - block <= kFewTiles ? ahead_of(in, panel, last - block <= 2) : Ahead{nullptr, 0};
      for (int64_t tile = block; tile < last; tile += 2) {
        const int64_t row = tile * kTileRows;
        const int64_t num = std::min(2 * kTileRows, std::min(last * kTileRows, in.num_rows) - row);
        for (int64_t r = 0; r < num; r++)
          __builtin_prefetch(in.outputs + (row + r) * in.output_stride + panel * kPanel - in.first_output, 1);
        if (last - tile == 1)
          multiply_tiles<1>(rows, tile, size, in.panel(panel), &ahead, totals);
        else
          multiply_tiles<2>(rows, tile, size, in.panel(panel), &ahead, totals);
        write_outputs(in, totals, row, num, panel);
      }
    }
  }
}

#endif

}  // namespace headway
