// Attention over a paged cache, for decodes and prefill chunks of many sequences at once, in float or bfloat16. The
// cache may hold numbers of 8 bits.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention_tasks.h"
#include "attention_tile.h"
#include "numbers.h"
#include "phases.h"
#include "quantization.h"

namespace headway {

// Softmax state of a task's rows: sums of weighted values before the division by the totals. Rows are in order of KV
// head, token, and query head of the group.
struct AttentionState {
  static int64_t num_floats(int64_t num_rows, int64_t value_size) { return num_rows * (value_size + 2); }
  AttentionState(float* memory, int64_t num_rows, int64_t value_size)
      : num_rows(num_rows), sums(memory), maxima(sums + num_rows * value_size), totals(maxima + num_rows) {}
  void clear(int64_t value_size) const {
    std::fill_n(sums, num_rows * value_size, 0.0f);
    std::fill_n(maxima, num_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(totals, num_rows, 0.0f);
  }
  int64_t num_rows;
  float *sums, *maxima, *totals;
};

template <typename T, typename C>
inline int64_t num_rows_of(const AttentionInputs<T, C>& in, const AttentionTask& task) {
  return task.num_heads * task.num_tokens * in.group_size;
}

// Returns the number of keys between two prefetches. Prompts are bound by arithmetic, decodes by memory.
inline int step_of(const AttentionTask& task) { return task.num_tokens == 1 ? 8 : kTile; }

// Slots of consecutive keys of a sequence.
struct Tile {
  int64_t slots[kTile];
  int64_t scales[kTile];  // indices of the scales of KV head 0; those of the next head follow `block_size` later
  int num_keys = 0;
};

// Returns the tile of a task's keys that begins at position `first`. Where the task begins later, as with a window, its
// first key takes the places before it; no row gives them weight.
template <typename T, typename C>
inline Tile locate(const AttentionInputs<T, C>& in, const AttentionTask& task, int64_t first) {
  Tile tile;
  const int64_t* table = in.tables + task.chunk->table;
  const int64_t end = std::min(first + kTile, task.end_key);
  const auto add = [&](int64_t block, int64_t offset) {
    tile.slots[tile.num_keys] = table[block] * in.block_size + offset;
    tile.scales[tile.num_keys++] = table[block] * in.num_kv_heads * in.block_size + offset;
  };
  int64_t position = std::max(first, task.first_key);
  int64_t block = position / in.block_size, offset = position % in.block_size;
  for (int64_t missing = first; missing < position; missing++) add(block, offset);
  for (; position < end; block++, offset = 0)
    for (; offset < in.block_size && position < end; offset++, position++) add(block, offset);
  return tile;
}

// Returns the beginning of a task's first tile.
inline int64_t first_tile(const AttentionTask& task) { return task.first_key / kTile * kTile; }

// Prefetcher of a tile during the computation of another tile, a few cache lines at a time: a processor drops most of
// many prefetches at once.
template <typename T, typename C>
class Fetcher {
 public:
  // Prefetches the keys and values of `tile` for the heads of `task`, in `num_steps` steps.
  Fetcher(const AttentionInputs<T, C>& in, const AttentionTask& task, const Tile& tile, int num_steps)
      : in_(in), tile_(tile), first_head_(task.first_head), key_numbers_(task.num_heads * in.key_size),
        value_numbers_(in.values == in.keys ? 0 : task.num_heads * in.value_size), num_steps_(num_steps) {}

  void step() {
    const int end = tile_.num_keys * ++step_ / num_steps_;
    for (; key_ < end; key_++) {
      const int64_t head = tile_.slots[key_] * in_.num_kv_heads + first_head_;
      for (int64_t d = 0; d < key_numbers_; d += kLine) __builtin_prefetch(in_.keys + head * in_.key_size + d);
      for (int64_t d = 0; d < value_numbers_; d += kLine) __builtin_prefetch(in_.values + head * in_.value_stride + d);
    }
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(C);
  const AttentionInputs<T, C>& in_;
  const Tile& tile_;
  const int64_t first_head_, key_numbers_, value_numbers_;
  const int num_steps_;
  int step_ = 0, key_ = 0;
};

// Returns the scaled queries of a task in float, [num_heads * num_tokens * group_size, key_size].
template <typename T, typename C>
inline std::vector<float> read_queries(const AttentionInputs<T, C>& in, const AttentionTask& task) {
  std::vector<float> queries(task.num_heads * task.num_tokens * in.group_size * in.key_size);
  float* to = queries.data();
  for (int64_t head = task.first_head; head < task.first_head + task.num_heads; head++)
    for (int64_t row = 0; row < task.num_tokens * in.group_size; row++, to += in.key_size) {
      const int64_t token = task.chunk->row + task.first_token + row / in.group_size;
      const T* from = in.query + token * in.query_row_stride +
                      (head * in.group_size + row % in.group_size) * in.query_head_stride;
      for (int64_t d = 0; d < in.key_size; d++) to[d] = in.scale * widen(from[d]);
    }
  return queries;
}

// Multiplies each row's scores or weights of a tile by the scales of its keys or values, divided by `loaded`.
inline void scale_keys(float* scores, int64_t num_rows, const float* scales, const Tile& tile, float loaded) {
  float factors[kTile];
  for (int key = 0; key < tile.num_keys; key++) factors[key] = scales[tile.scales[key]] / loaded;
  for (int64_t row = 0; row < num_rows; row++)
    for (int key = 0; key < tile.num_keys; key++) scores[row * kTile + key] *= factors[key];
}

// Computes the rows of the task's KV head number `index` over a tile that begins at position `first`.
template <typename T, typename C>
inline void attend_tile(const AttentionInputs<T, C>& in, const AttentionTask& task, int64_t index, const Tile& tile,
                        int64_t first, const float* queries, float* scores, const AttentionState& state,
                        Fetcher<T, C>* fetcher) {
  const int64_t num_rows = task.num_tokens * in.group_size, first_row = index * num_rows;
  const C *keys[kTile], *values[kTile];
  for (int key = 0; key < tile.num_keys; key++) {
    const int64_t head = tile.slots[key] * in.num_kv_heads + task.first_head + index;
    keys[key] = in.keys + head * in.key_size;
    values[key] = in.values + head * in.value_stride;
  }
  // Fill up to a multiple of four keys, which `score_rows` needs.
  for (int key = tile.num_keys; key % 4 != 0; key++) keys[key] = keys[key - 1];
  const int step = step_of(task);
  for (int key = 0; key < tile.num_keys; key += step) {
    fetcher->step();
    for_row_groups(num_rows, [&](auto count, int64_t row) {
      score_rows<count()>(queries + (first_row + row) * in.key_size, in.key_size, keys + key,
                          std::min(step, tile.num_keys - key), scores + row * kTile + key);
    });
  }
  if constexpr (!std::is_same_v<T, C>)
    scale_keys(scores, num_rows, in.key_scales + (task.first_head + index) * in.block_size, tile, kLoaded<C>);
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t position = task.chunk->start + task.first_token + row / in.group_size;
    const int64_t low = in.window > 0 ? position - in.window + 1 - first : 0;
    const int64_t high = std::min<int64_t>(tile.num_keys, position + 1 - first);
    weigh(scores + row * kTile, static_cast<int>(std::clamp<int64_t>(low, 0, kTile)), static_cast<int>(high),
          in.softcap,
          {&state.sums[(first_row + row) * in.value_size], in.value_size, &state.maxima[first_row + row],
           &state.totals[first_row + row]});
  }
  if constexpr (!std::is_same_v<T, C>)
    scale_keys(scores, num_rows, in.value_scales + (task.first_head + index) * in.block_size, tile, kLoaded<C>);
  for (int key = 0; key < tile.num_keys; key += step) {
    fetcher->step();
    for_row_groups(num_rows, [&](auto count, int64_t row) {
      add_all_values<count()>(scores + row * kTile + key, values + key, std::min(step, tile.num_keys - key),
                              &state.sums[(first_row + row) * in.value_size], in.value_size);
    });
  }
}

// Adds the state of a later part of the same rows' keys. It is compiled once, so that its sums are rounded in one way.
[[gnu::noinline]] inline void merge(const AttentionState& into, const AttentionState& other, int64_t value_size) {
  for (int64_t row = 0; row < into.num_rows; row++) {
    if (other.totals[row] == 0.0f) continue;
    const float highest = std::max(into.maxima[row], other.maxima[row]);
    const float mine = std::exp(into.maxima[row] - highest), others = std::exp(other.maxima[row] - highest);
    for (int64_t d = 0; d < value_size; d++) {
      float& sum = into.sums[row * value_size + d];
      sum = sum * mine + other.sums[row * value_size + d] * others;
    }
    into.totals[row] = into.totals[row] * mine + other.totals[row] * others;
    into.maxima[row] = highest;
  }
}

// Computes `state`, part after part. During each tile the next tile is prefetched; during the last tile, the first tile
// of task `next`.
template <typename T, typename C>
inline void attend(const AttentionInputs<T, C>& in, const AttentionTask& task, const AttentionTask& next,
                   const AttentionState& state) {
  const std::vector<float> queries = read_queries(in, task);
  std::vector<float> scores(task.num_tokens * in.group_size * kTile);  // for one KV head's rows and one tile
  std::vector<float> later_part;
  AttentionState part = state;
  part.clear(in.value_size);
  Tile tile = locate(in, task, first_tile(task));
  for (int64_t first = first_tile(task); first < task.end_key; first += kTile) {
    if (first % kPart == 0 && first > task.first_key) {
      if (later_part.empty()) {
        later_part.resize(AttentionState::num_floats(state.num_rows, in.value_size));
        part = AttentionState(later_part.data(), state.num_rows, in.value_size);
      } else {
        merge(state, part, in.value_size);
      }
      part.clear(in.value_size);
    }
    const bool is_last = first + kTile >= task.end_key;
    const AttentionTask& coming = is_last ? next : task;
    const Tile coming_tile = locate(in, coming, is_last ? first_tile(next) : first + kTile);
    const int step = step_of(task);
    const int num_steps = static_cast<int>(task.num_heads) * 2 * ((tile.num_keys + step - 1) / step);
    Fetcher<T, C> fetcher(in, coming, coming_tile, num_steps);
    for (int64_t index = 0; index < task.num_heads; index++)
      attend_tile(in, task, index, tile, first, queries.data(), scores.data(), part, &fetcher);
    tile = coming_tile;
  }
  if (!later_part.empty()) merge(state, part, in.value_size);
}

template <typename T, typename C>
inline void finish(const AttentionInputs<T, C>& in, const AttentionTask& task, const AttentionState& state) {
  const int64_t head_rows = task.num_tokens * in.group_size;
  for (int64_t row = 0; row < state.num_rows; row++) {
    const int64_t token = task.chunk->row + task.first_token + row % head_rows / in.group_size;
    const int64_t head = (task.first_head + row / head_rows) * in.group_size + row % in.group_size;
    float total = state.totals[row];
    if (in.sinks) total += std::exp(in.sinks[head] - state.maxima[row]);
    T* to = in.output + (token * in.num_kv_heads * in.group_size + head) * in.value_size;
    for (int64_t d = 0; d < in.value_size; d++) to[d] = narrow<T>(state.sums[row * in.value_size + d] / total);
  }
}

// Tasks of attention over a batch, and memory for the partial results of tasks that share rows.
struct AttentionWork {
  int64_t window;
  std::vector<AttentionTask> tasks;
  std::vector<std::vector<const AttentionTask*>> shared;  // tasks of the same rows, in the order of their keys
  int64_t most_floats = 0;                                // largest state of a task
  std::vector<float> parts;                               // states, `most_floats` for each
};

template <typename T, typename C>
inline std::shared_ptr<AttentionWork> attention_work(const AttentionInputs<T, C>& in, int64_t num_threads) {
  auto work = std::make_shared<AttentionWork>();
  work->window = in.window;
  int64_t num_parts;
  work->tasks = plan(in, num_threads, &num_parts);
  std::vector<const AttentionTask*> part_tasks(num_parts);
  for (const AttentionTask& task : work->tasks) {
    if (task.part >= 0) part_tasks[task.part] = &task;
    work->most_floats =
        std::max(work->most_floats, AttentionState::num_floats(num_rows_of(in, task), in.value_size));
  }
  work->parts.resize(num_parts * work->most_floats);
  // Parts of the same rows have consecutive numbers. A part with another head, tile or chunk begins a new group.
  for (const AttentionTask* task : part_tasks) {
    const AttentionTask* first = work->shared.empty() ? nullptr : work->shared.back().front();
    if (!first || first->chunk != task->chunk || first->first_head != task->first_head ||
        first->first_token != task->first_token)
      work->shared.emplace_back();
    work->shared.back().push_back(task);
  }
  return work;
}

// Adds the loops of attention. `work` is the previous layer's, or null. It is used again if it has the same window, and
// replaced otherwise.
template <typename T, typename C>
inline void add_attention(WorkQueue& queue, const AttentionInputs<T, C>& in, std::shared_ptr<AttentionWork>& work) {
  const int64_t num_threads = queue.num_threads();
  if (!work || work->window != in.window) work = attention_work(in, num_threads);
  const int64_t num_tasks = work->tasks.size();
  const auto state_of = [=](const AttentionTask& task, void* memory) {
    return AttentionState(static_cast<float*>(memory), num_rows_of(in, task), in.value_size);
  };
  const auto part_of = [=, work = work](const AttentionTask& task) {
    return state_of(task, &work->parts[task.part * work->most_floats]);
  };
  queue.add({num_tasks,
              [=, work = work](int64_t index, void* result) {
                const AttentionTask& task = work->tasks[index];
                if (task.part < 0)
                  finish(in, task, state_of(task, result));
                else
                  std::copy_n(static_cast<float*>(result),
                              AttentionState::num_floats(num_rows_of(in, task), in.value_size), part_of(task).sums);
              },
              [=, work = work](int64_t index, void* result) {
                const AttentionTask& task = work->tasks[index];
                // Neighbouring tasks take about as long, so threads take tasks in turn. Prefetch the thread's likely
                // next task.
                const AttentionTask& next = work->tasks[std::min(index + num_threads, num_tasks - 1)];
                attend(in, task, next, state_of(task, result));
              },
              work->most_floats * static_cast<int64_t>(sizeof(float))});
  queue.add({static_cast<int64_t>(work->shared.size()), [=, work = work](int64_t index, void*) {
    const std::vector<const AttentionTask*>& tasks = work->shared[index];
    const AttentionState state = part_of(*tasks.front());
    for (size_t i = 1; i < tasks.size(); i++) merge(state, part_of(*tasks[i]), in.value_size);
    finish(in, *tasks.front(), state);
  }});
}

}  // namespace headway
