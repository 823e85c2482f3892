// Attention over a paged cache: decodes and prefill chunks of many sequences at once, over float or bfloat16.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_tasks.h"
#include "attention_tile.h"
#include "numbers.h"

namespace headway {

// Weighted values and softmax state of a task's rows, before division by the total.
struct AttentionState {
  std::vector<float> sums, maxima, totals;
  AttentionState(int64_t num_rows, int64_t value_size)
      : sums(num_rows * value_size, 0.0f),
        maxima(num_rows, -std::numeric_limits<float>::infinity()),
        totals(num_rows, 0.0f) {}
};

template <typename T>
struct Tile {
  const T* keys[kTile];
  const T* values[kTile];
  int num_keys;
};

// Finds the rows of keys [first, end) of the task's head, and has the processor fetch those of the next tile.
template <typename T>
inline void locate(const AttentionInputs<T>& in, const AttentionTask& task, int64_t first, Tile<T>* tile) {
  const int64_t* table = in.tables + task.chunk->table;
  const auto head_of = [&](int64_t position) {
    const int64_t slot = table[position / in.block_size] * in.block_size + position % in.block_size;
    return slot * in.num_kv_heads + task.head;
  };
  tile->num_keys = static_cast<int>(std::min<int64_t>(kTile, task.end_key - first));
  for (int key = 0; key < tile->num_keys; key++) {
    const int64_t head = head_of(first + key);
    tile->keys[key] = in.keys + head * in.key_size;
    tile->values[key] = in.values + head * in.value_size;
  }
  // Scores are computed for keys in fours.
  for (int key = tile->num_keys; key % 4 != 0; key++) tile->keys[key] = tile->keys[key - 1];
  for (int64_t next = first + kTile; next < std::min(first + 2 * kTile, task.end_key); next++) {
    const int64_t head = head_of(next);
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t d = 0; d < in.key_size; d += kLine) __builtin_prefetch(in.keys + head * in.key_size + d, 0, 2);
    for (int64_t d = 0; d < in.value_size; d += kLine) __builtin_prefetch(in.values + head * in.value_size + d, 0, 2);
  }
}

template <typename T>
inline void attend(const AttentionInputs<T>& in, const AttentionTask& task, AttentionState* state) {
  const int64_t num_rows = task.num_tokens * in.group_size;
  std::vector<float> query(num_rows * in.key_size), scores(num_rows * kTile);
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t token = task.chunk->row + task.first_token + row / in.group_size;
    const int64_t head = task.head * in.group_size + row % in.group_size;
    const T* from = in.query + token * in.query_row_stride + head * in.query_head_stride;
    for (int64_t d = 0; d < in.key_size; d++) query[row * in.key_size + d] = in.scale * widen(from[d]);
  }
  Tile<T> tile;
  for (int64_t first = task.first_key; first < task.end_key; first += kTile) {
    locate(in, task, first, &tile);
    for_row_groups(num_rows, [&](auto count, int64_t row) {
      score_rows<count()>(&query[row * in.key_size], in.key_size, tile.keys, tile.num_keys, &scores[row * kTile]);
    });
    for (int64_t row = 0; row < num_rows; row++) {
      const int64_t position = task.chunk->start + task.first_token + row / in.group_size;
      const int64_t low = in.window > 0 ? position - in.window + 1 - first : 0;
      const int64_t high = std::min<int64_t>(tile.num_keys, position + 1 - first);
      weigh(&scores[row * kTile], static_cast<int>(std::clamp<int64_t>(low, 0, kTile)), static_cast<int>(high),
            in.softcap,
            {&state->sums[row * in.value_size], in.value_size, &state->maxima[row], &state->totals[row]});
    }
    for_row_groups(num_rows, [&](auto count, int64_t row) {
      add_all_values<count()>(&scores[row * kTile], tile.values, tile.num_keys, &state->sums[row * in.value_size],
                              in.value_size);
    });
  }
}

template <typename T>
inline void finish(const AttentionInputs<T>& in, const AttentionTask& task, const AttentionState& state) {
  for (int64_t row = 0; row < task.num_tokens * in.group_size; row++) {
    const int64_t token = task.chunk->row + task.first_token + row / in.group_size;
    const int64_t head = task.head * in.group_size + row % in.group_size;
    float total = state.totals[row];
    if (in.sinks) total += std::exp(in.sinks[head] - state.maxima[row]);
    T* to = in.output + (token * in.num_kv_heads * in.group_size + head) * in.value_size;
    for (int64_t d = 0; d < in.value_size; d++) to[d] = narrow<T>(state.sums[row * in.value_size + d] / total);
  }
}

// Adds what another task found for the same rows.
inline void merge(AttentionState* into, const AttentionState& other, int64_t value_size) {
  for (size_t row = 0; row < into->totals.size(); row++) {
    if (other.totals[row] == 0.0f) continue;
    const float highest = std::max(into->maxima[row], other.maxima[row]);
    const float mine = std::exp(into->maxima[row] - highest), others = std::exp(other.maxima[row] - highest);
    for (int64_t d = 0; d < value_size; d++) {
      float& sum = into->sums[row * value_size + d];
      sum = sum * mine + other.sums[row * value_size + d] * others;
    }
    into->totals[row] = into->totals[row] * mine + other.totals[row] * others;
    into->maxima[row] = highest;
  }
}

template <typename T>
inline void paged_attention(const AttentionInputs<T>& in) {
  const int64_t num_threads = at::get_num_threads();
  int64_t num_parts;
  const std::vector<AttentionTask> tasks = plan(in, num_threads, &num_parts);
  std::vector<const AttentionTask*> part_tasks(num_parts);
  for (const AttentionTask& task : tasks)
    if (task.part >= 0) part_tasks[task.part] = &task;
  std::vector<AttentionState> parts(num_parts, AttentionState(0, 0));
  std::atomic<size_t> next{0};
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    for (size_t index; (index = next.fetch_add(1)) < tasks.size();) {
      const AttentionTask& task = tasks[index];
      AttentionState state(task.num_tokens * in.group_size, in.value_size);
      attend(in, task, &state);
      if (task.part < 0)
        finish(in, task, state);
      else
        parts[task.part] = std::move(state);
    }
  });
  // Parts of the same rows have consecutive numbers, and the first of them begins a new head, tile or chunk.
  for (int64_t part = 0; part < num_parts;) {
    const AttentionTask& task = *part_tasks[part];
    int64_t end = part + 1;
    for (; end < num_parts && part_tasks[end]->chunk == task.chunk && part_tasks[end]->head == task.head &&
           part_tasks[end]->first_token == task.first_token;
         end++)
      merge(&parts[part], parts[end], in.value_size);
    finish(in, task, parts[part]);
    part = end;
  }
}

}  // namespace headway
