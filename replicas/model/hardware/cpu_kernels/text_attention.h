// Attention in which a token sees those before and behind it. A text is whole in one step, so its keys and values are
// those of the step, and no cache is read.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "linear.h"
#include "phases.h"

namespace headway {

constexpr int64_t kTextRows = 24;  // queries for which a panel of keys is read once; a multiple of kManyRows

// View of [num_tokens, num_heads, size] numbers; those of a head are contiguous.
template <typename T>
struct HeadRows {
  T* at(int64_t token, int64_t head) const { return first + token * row_stride + head * head_stride; }
  T* first;
  int64_t row_stride, head_stride;
};

// Tokens [row, row + num_tokens) of the batch.
struct Text {
  int64_t num_panels() const { return (num_tokens + kPanel - 1) / kPanel; }
  int64_t row, num_tokens;
};

template <typename T>
struct TextInputs {
  int64_t num_value_panels() const { return (value_size + kPanel - 1) / kPanel; }
  // Returns the number of floats of a text's packed keys and values for one KV head.
  int64_t packed_size(const Text& text) const {
    return text.num_panels() * kPanel * (key_size + num_value_panels() * kPanel);
  }
  // Returns the number of floats of the queries and scores of kTextRows tokens.
  int64_t work_size(const Text& text) const { return kTextRows * (key_size + text.num_panels() * kPanel); }

  HeadRows<const T> query, key, value;
  int64_t num_heads, num_kv_heads, key_size, value_size;
  float scale;
  int64_t window;  // a token sees those at a distance below it; 0: all
  T* output;       // [num_tokens, num_heads, value_size], contiguous
};

// Packs a text's keys and values of one KV head, like weights of linear layers: keys [num_panels, key_size, kPanel],
// then values [num_value_panels, num_panels * kPanel, kPanel]. Places without a token keep their zeros.
template <typename T>
inline void pack_text(const TextInputs<T>& in, const Text& text, int64_t head, float* to) {
  const int64_t num_keys = text.num_panels() * kPanel;
  float* values = to + num_keys * in.key_size;
  for (int64_t first = 0; first < text.num_tokens; first += kPanel, to += kPanel * in.key_size)
    for (int64_t token = first; token < std::min(first + kPanel, text.num_tokens); token++) {
      const T *key = in.key.at(text.row + token, head), *value = in.value.at(text.row + token, head);
      for (int64_t d = 0; d < in.key_size; d++) to[d * kPanel + token - first] = widen(key[d]);
      for (int64_t d = 0; d < in.value_size; d += kPanel)
        for (int64_t i = 0; i < std::min(kPanel, in.value_size - d); i++)
          values[d * num_keys + token * kPanel + i] = widen(value[d + i]);
    }
}

// Replaces scores [size] by the exponentials of those in [low, high), relative to the highest; the others become 0.
// Returns the sum.
inline float exponentiate(float* scores, int64_t size, int64_t low, int64_t high) {
  float highest = scores[low], sum = 0.0f;
#pragma omp simd reduction(max : highest)
  for (int64_t key = low; key < high; key++) highest = scores[key] > highest ? scores[key] : highest;
#pragma omp simd reduction(+ : sum)
  for (int64_t key = low; key < high; key++) {
    scores[key] = exponential(scores[key] - highest);
    sum += scores[key];
  }
  std::fill(scores, scores + low, 0.0f);
  std::fill(scores + high, scores + size, 0.0f);
  return sum;
}

// Computes the output of the text's tokens from `first` on, at most kTextRows, for one query head. `packed` is what
// `pack_text` wrote for its KV head; `memory` has `work_size` floats.
template <typename T>
inline void attend_text(const TextInputs<T>& in, const Text& text, int64_t head, int64_t first, const float* packed,
                        float* memory) {
  const int64_t num = std::min(kTextRows, text.num_tokens - first);
  const int64_t reach = in.window > 0 ? in.window : text.num_tokens;
  const auto begin_of = [&](int64_t token) { return std::max<int64_t>(0, token - reach + 1); };
  const auto end_of = [&](int64_t token) { return std::min(text.num_tokens, token + reach); };
  const int64_t first_panel = begin_of(first) / kPanel;
  const int64_t end_panel = (end_of(first + num - 1) + kPanel - 1) / kPanel;
  const int64_t begin = first_panel * kPanel, size = end_panel * kPanel - begin, all = text.num_panels() * kPanel;
  float *queries = memory, *scores = queries + num * in.key_size, totals[kTextRows];
  for (int64_t row = 0; row < num; row++) {
    const T* query = in.query.at(text.row + first + row, head);
    for (int64_t d = 0; d < in.key_size; d++) queries[row * in.key_size + d] = in.scale * widen(query[d]);
  }
  const LinearInputs<float, float, float> products{queries, packed, nullptr, num, in.key_size, all, scores};
  multiply_panels<kManyRows>(products.only(first_panel, end_panel, scores), first_panel, end_panel);
  for (int64_t row = 0; row < num; row++)
    totals[row] = exponentiate(scores + row * size, size, begin_of(first + row) - begin, end_of(first + row) - begin);
  const float* values = packed + all * in.key_size + begin * kPanel;
  T* output = in.output + ((text.row + first) * in.num_heads + head) * in.value_size;
  for (int64_t d = 0; d < in.value_size; d += kPanel, values += all * kPanel) {
    float sums[kTextRows * kPanel];
    const LinearInputs<float, float, float> weighted{scores, values, nullptr, num, size, kPanel, sums};
    multiply_panels<kManyRows>(weighted, 0, 1);
    for (int64_t row = 0; row < num; row++)
      for (int64_t i = 0; i < std::min(kPanel, in.value_size - d); i++)
        output[row * in.num_heads * in.value_size + d + i] = narrow<T>(sums[row * kPanel + i] / totals[row]);
  }
}

// Tokens [first, end) of a text, for the query heads of a KV head.
struct TextTask {
  Text text;
  int64_t kv_head, first, end;
};

// Adds the loop of attention over `texts`. A task packs the keys and values that it needs, which stay in a near cache.
// If texts and heads are few for the threads, several tasks share a text, and each packs it.
template <typename T>
inline void add_text_attention(WorkQueue& queue, const TextInputs<T>& in, const std::vector<Text>& texts) {
  const int64_t num_whole = static_cast<int64_t>(texts.size()) * in.num_kv_heads, num_threads = queue.num_threads();
  const int64_t most_parts = num_threads == 1 ? 1 : 4 * num_threads / std::max<int64_t>(1, num_whole) + 1;
  std::vector<TextTask> tasks;
  for (const Text& text : texts) {
    const int64_t num_blocks = (text.num_tokens + kTextRows - 1) / kTextRows;
    const int64_t part = (num_blocks + most_parts - 1) / most_parts * kTextRows;
    for (int64_t kv_head = 0; kv_head < in.num_kv_heads; kv_head++)
      for (int64_t first = 0; first < text.num_tokens; first += part)
        tasks.push_back({text, kv_head, first, std::min(first + part, text.num_tokens)});
  }
  const int64_t num_tasks = tasks.size(), group = in.num_heads / in.num_kv_heads;
  queue.add({num_tasks, [=, tasks = std::move(tasks)](int64_t index, void*) {
    const TextTask& task = tasks[index];
    std::vector<float> packed(in.packed_size(task.text));
    const std::unique_ptr<float[]> memory(new float[in.work_size(task.text)]);
    pack_text(in, task.text, task.kv_head, packed.data());
    for (int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; head++)
      for (int64_t first = task.first; first < task.end; first += kTextRows)
        attend_text(in, task.text, head, first, packed.data(), memory.get());
  }});
}

}  // namespace headway
