// Inputs of attention over a paged cache, and the division of its work into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_tile.h"

namespace headway {

constexpr int kMaxRows = 32;  // query rows (tokens times heads of a group) of one task

// Keys of a part. Parts, like tiles, begin at multiples of their size. A part has sums of its own, which are added to
// those of the parts before it. So the order of a row's sums depends on the positions of its keys alone, not on the
// tasks or the rest of the batch.
constexpr int64_t kPart = 4 * kTile;

// Tokens of one sequence: rows [row, row + end - start) of the batch, positions [start, end). Its block table begins at
// index `table` of `tables`.
struct Chunk {
  int64_t row, start, end, table;
};

// Attention of numbers T over a cache of numbers C: T, or numbers of 8 bits, which have scales.
template <typename T, typename C>
struct AttentionInputs {
  const T* query;  // rows of num_kv_heads * group_size heads
  int64_t query_row_stride, query_head_stride;
  const C* keys;    // blocks of block_size slots of num_kv_heads heads, contiguous
  const C* values;  // as keys, but a head of value_size numbers begins every value_stride numbers: they may be in the keys
  const float* key_scales;  // blocks of num_kv_heads heads of block_size slots; null if C is T
  const float* value_scales;
  const Chunk* chunks;
  int64_t num_chunks;
  const int64_t* tables;
  int64_t block_size, num_kv_heads, group_size, key_size, value_size, value_stride;  // sizes are multiples of kLanes
  float scale, softcap;                                                              // softcap 0: none
  int64_t window;                                                                    // 0: none
  const float* sinks;                                                                // may be null
  T* output;  // rows of heads of value_size, contiguous
};

// Attention of some tokens of a chunk, for the query heads of some KV heads, over keys [first_key, end_key).
struct AttentionTask {
  const Chunk* chunk;
  int64_t first_head, num_heads, first_token, num_tokens, first_key, end_key;
  int64_t part;  // index of the partial result if each part of the keys is a task, else -1
};

// Returns the tasks for all threads, longest first. If there would be too few tasks, each part of the keys is a task.
// If there are enough decodes, each decode is one task for all its heads, whose keys are adjacent in memory.
template <typename T, typename C>
inline std::vector<AttentionTask> plan(const AttentionInputs<T, C>& in, int64_t num_threads, int64_t* num_parts) {
  const int64_t tile_tokens = std::max<int64_t>(1, kMaxRows / in.group_size);
  int64_t num_whole = 0, num_decodes = 0;
  for (int64_t c = 0; c < in.num_chunks; c++) {
    const int64_t num_tokens = in.chunks[c].end - in.chunks[c].start;
    num_decodes += num_tokens == 1;
    num_whole += in.num_kv_heads * ((num_tokens + tile_tokens - 1) / tile_tokens);
  }
  num_whole = std::max<int64_t>(1, num_whole);
  const bool are_few = num_threads > 1 && num_whole < 2 * num_threads;
  const int64_t decode_heads = !are_few && num_decodes >= 2 * num_threads ? in.num_kv_heads : 1;
  std::vector<AttentionTask> tasks;
  *num_parts = 0;
  for (int64_t c = 0; c < in.num_chunks; c++) {
    const Chunk& chunk = in.chunks[c];
    const int64_t num_heads = chunk.end - chunk.start == 1 ? decode_heads : 1;
    for (int64_t token = 0; token < chunk.end - chunk.start; token += tile_tokens) {
      const int64_t num_tokens = std::min(tile_tokens, chunk.end - chunk.start - token);
      const int64_t end = chunk.start + token + num_tokens;
      const int64_t first = in.window > 0 ? std::max<int64_t>(0, chunk.start + token - in.window + 1) : 0;
      const bool is_split = are_few && first / kPart < (end - 1) / kPart;
      const int64_t length = is_split ? kPart : end;
      for (int64_t head = 0; head < in.num_kv_heads; head += num_heads)
        for (int64_t key = first, stop; key < end; key = stop) {
          stop = std::min(end, (key / length + 1) * length);
          tasks.push_back({&chunk, head, num_heads, token, num_tokens, key, stop, is_split ? (*num_parts)++ : -1});
        }
    }
  }
  const auto size = [](const AttentionTask& t) { return t.num_heads * t.num_tokens * (t.end_key - t.first_key); };
  std::stable_sort(tasks.begin(), tasks.end(),
                   [&](const AttentionTask& a, const AttentionTask& b) { return size(a) > size(b); });
  return tasks;
}

}  // namespace headway
