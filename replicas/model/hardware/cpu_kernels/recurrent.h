// Recurrent layers over state slots: the causal convolution, and the rule that advances a state. Positions are cut into
// blocks from a sequence's start; state_torch.py has the equations. A token's numbers have one order of sums, whatever
// the chunk of which it is a part: its rows are computed by the same code for one token and for a whole block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "layer_math.h"
#include "phases.h"
#include "vectors.h"

namespace headway {

// Tokens of one sequence: rows [row, row + end - start) of the batch, positions [start, end). Slot `source` has the
// state before them, and `target` gets the state after them. Its snapshots are [first_snapshot, end_snapshot).
struct StateChunk {
  int64_t row, start, end, source, target, first_snapshot, end_snapshot;
};

// Slot that also gets the state at a boundary between blocks.
struct Snapshot {
  int64_t position, slot;
};

struct StatePlan {
  const StateChunk* chunks;
  const Snapshot* snapshots;
  int64_t num_chunks, block_size;
  // Returns true if the chunk only adds rows to the tail of its slot.
  bool is_in_place(const StateChunk& chunk) const {
    return chunk.start / block_size == chunk.end / block_size && chunk.start > 0 && chunk.source == chunk.target;
  }
};

// Calls f(N, column) for tiles of N vectors, then for smaller ones, until all columns are done.
template <int N, typename F>
HEADWAY_INLINE inline void for_columns(int64_t num_columns, const F& f, int64_t column = 0) {
  for (; num_columns - column >= N * kLanes; column += N * kLanes) f(std::integral_constant<int, N>(), column);
  if constexpr (N > 1) for_columns<N / 2>(num_columns, f, column);
}

// Depthwise causal convolution.
template <typename T>
struct Convolution {
  const T* inputs;     // [num_tokens, num_channels]
  int64_t row_stride;  // of `inputs`
  const T* weight;     // [num_channels, width]
  const T* bias;       // [num_channels]; may be null
  bool has_silu;
  T* stored;  // [num_slots + 1, width - 1 + block_size, num_channels], from the rows before the boundary
  int64_t num_channels, width;
  T* output;  // [num_tokens, num_channels]

  T* stored_row(int64_t slot, int64_t index, int64_t block_size) const {
    return stored + (slot * (width - 1 + block_size) + index) * num_channels;
  }
};

constexpr int64_t kChannels = 32 * kLanes;  // most channels of one task of a convolution

// Convolves channels [first, first + num) of one chunk, and stores the inputs that later steps need.
template <typename T>
inline void convolve(const StatePlan& plan, const Convolution<T>& in, const StateChunk& chunk, int64_t first,
                     int64_t num) {
  const int64_t before = in.width - 1, size = plan.block_size;
  const std::vector<T> zeros(num);
  const auto row_at = [&](int64_t position) -> const T* {
    if (position >= chunk.start) return in.inputs + (chunk.row + position - chunk.start) * in.row_stride + first;
    if (chunk.start == 0) return zeros.data();
    return in.stored_row(chunk.source, before + position - chunk.start / size * size, size) + first;
  };
  std::vector<float> taps(in.width * num);
  for (int64_t c = 0; c < num; c++)
    for (int64_t tap = 0; tap < in.width; tap++) taps[tap * num + c] = widen(in.weight[(first + c) * in.width + tap]);
  float sums[kChannels];
  for (int64_t position = chunk.start; position < chunk.end; position++) {
    for (int64_t c = 0; c < num; c += kLanes) store(sums + c, in.bias ? load(in.bias + first + c) : Floats{});
    for (int64_t tap = 0; tap < in.width; tap++) {
      const T* row = row_at(position - before + tap);
      for (int64_t c = 0; c < num; c += kLanes)
        store(sums + c, load(sums + c) + load(row + c) * load(&taps[tap * num + c]));
    }
    T* to = in.output + (chunk.row + position - chunk.start) * in.num_channels + first;
    if (in.has_silu) {
#pragma omp simd
      for (int64_t c = 0; c < num; c++) to[c] = narrow<T>(sums[c] * sigmoid(sums[c]));
    } else {
#pragma omp simd
      for (int64_t c = 0; c < num; c++) to[c] = narrow<T>(sums[c]);
    }
  }
  const auto keep = [&](int64_t slot, int64_t boundary, int64_t start, int64_t end) {
    for (int64_t position = start; position < end; position++)
      std::memcpy(in.stored_row(slot, before + position - boundary, size) + first, row_at(position), num * sizeof(T));
  };
  const int64_t boundary = chunk.end / size * size;
  keep(chunk.target, boundary, plan.is_in_place(chunk) ? chunk.start : boundary - before, chunk.end);
  for (int64_t index = chunk.first_snapshot; index < chunk.end_snapshot; index++) {
    const Snapshot& snapshot = plan.snapshots[index];
    keep(snapshot.slot, snapshot.position, snapshot.position - before, snapshot.position);
  }
}

template <typename T>
inline void add_convolution(WorkQueue& queue, const StatePlan& plan, const Convolution<T>& in) {
  const int64_t num_parts = (in.num_channels + kChannels - 1) / kChannels;
  queue.add({plan.num_chunks * num_parts, [=](int64_t task, void*) {
    const int64_t first = task % num_parts * kChannels;
    convolve(plan, in, plan.chunks[task / num_parts], first, std::min(kChannels, in.num_channels - first));
  }});
}

// Numbers from which the gates of the gated delta rule follow: decay = rate * softplus(a + bias), beta = scale *
// sigmoid(b).
template <typename T>
struct Gates {
  const T *a, *b;               // [num_tokens, num_heads]
  int64_t row_stride;           // of both
  const float *rates, *biases;  // [num_heads]
  float beta_scale;
};

// Advance of a state. Query, key and value have adjacent heads in each row.
template <typename T>
struct Rule {
  const T *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;          // between rows
  int64_t num_key_heads, num_heads, key_size, value_size;  // sizes are multiples of kLanes
  const float *decay, *beta;                // [num_tokens, num_heads]; no beta: no correction
  Gates<T> gates;                           // if not null, decay and beta follow from it
  bool normalizes;                          // queries and keys to length 1, then queries by 1 / sqrt(key_size)
  float *states, *keys, *updates, *decays;  // of the slots, as in `LayerStates`
  const T* gate;                            // of the outputs' norm, with heads as `value`; null: no norm
  int64_t gate_stride;
  const T* norm;  // [value_size], weight of the norm
  float epsilon;
  T* output;  // [num_tokens, num_heads, value_size]

  int64_t state_size() const { return key_size * value_size; }
  float* state(int64_t slot, int64_t head) const { return states + (slot * num_heads + head) * state_size(); }
};

inline float dot(const float* a, const float* b, int64_t size) {
  Floats sum = {};
  for (int64_t i = 0; i < size; i += kLanes) sum = sum + load(a + i) * load(b + i);
  return sum_of(sum);
}

// Computes to [num, width] = rows [num, size] times matrix [size, width].
template <int R = kSums / 2>
inline void multiply_rows(const float* rows, int64_t num, const float* matrix, int64_t size, int64_t width, float* to) {
  for (; num >= R; num -= R, rows += R * size, to += R * width)
    for_columns<R < 2 ? kSums / 2 : kSums / R>(width, [&](auto n, int64_t column) HEADWAY_INLINE {
      constexpr int N = n;
      Floats sums[R * N] = {};
      const float* from = matrix + column;
      for (int64_t k = 0; k < size; k++, from += width) {
        Floats numbers[N];
        repeat<N>([&](auto i) HEADWAY_INLINE { numbers[i] = load(from + i * kLanes); });
        repeat<R>([&](auto r) HEADWAY_INLINE {
          const float factor = rows[r * size + k];
          repeat<N>([&](auto i) HEADWAY_INLINE { sums[r * N + i] = sums[r * N + i] + factor * numbers[i]; });
        });
      }
      repeat<R * N>([&](auto i) HEADWAY_INLINE { store(to + i / N * width + column + i % N * kLanes, sums[i]); });
    });
  if constexpr (R > 1) multiply_rows<R / 2>(rows, num, matrix, size, width, to);
}

// Computes to [size, width] = since * state + the sum of keys[j]^T updates[j] over `num` tokens. `to` may be `state`.
[[gnu::noinline]] inline void fold(const float* state, float since, const float* keys, const float* updates,
                                   int64_t num, int64_t size, int64_t width, float* to) {
  constexpr int R = 4;
  for (int64_t k = 0; k < size; k += R)
    for_columns<std::max(kSums / 4, 1)>(width, [&](auto n, int64_t column) HEADWAY_INLINE {
      constexpr int N = n;
      Floats sums[R * N];
      repeat<R * N>([&](auto i) HEADWAY_INLINE {
        sums[i] = since * load(state + (k + i / N) * width + column + i % N * kLanes);
      });
      for (int64_t j = 0; j < num; j++) {
        Floats update[N];
        repeat<N>([&](auto i) HEADWAY_INLINE { update[i] = load(updates + j * width + column + i * kLanes); });
        repeat<R>([&](auto r) HEADWAY_INLINE {
          const float key = keys[j * size + k + r];
          repeat<N>([&](auto i) HEADWAY_INLINE { sums[r * N + i] = sums[r * N + i] + key * update[i]; });
        });
      }
      repeat<R * N>([&](auto i) HEADWAY_INLINE {
        store(to + (k + i / N) * width + column + i % N * kLanes, sums[i]);
      });
    });
}

// Tokens of one block of a sequence, for one head.
template <typename T>
class HeadBlock {
 public:
  HeadBlock(const StatePlan& plan, const Rule<T>& in, const StateChunk& chunk, int64_t head)
      : plan_(plan), in_(in), chunk_(chunk), head_(head), key_head_(head * in.num_key_heads / in.num_heads),
        memory_(plan.block_size * (2 * in.key_size + 3 * in.value_size + 6)) {
    float* next = memory_.data();
    const auto take = [&](int64_t num) { return std::exchange(next, next + plan.block_size * num); };
    keys_ = take(2 * in.key_size);
    updates_ = take(in.value_size);
    products_ = take(2 * in.value_size);
    decays_ = take(1), sums_ = take(1), betas_ = take(1), factors_ = take(1), key_weights_ = take(1),
    query_weights_ = take(1);
  }

  // Computes all blocks of the chunk and stores the state.
  void run() {
    const int64_t size = plan_.block_size;
    float* target = in_.state(chunk_.target, head_);
    const float* state = in_.state(chunk_.source, head_);
    if (chunk_.start == 0) {
      std::fill_n(target, in_.state_size(), 0.0f);
      state = target;
    }
    for (int64_t boundary = chunk_.start / size * size; boundary < chunk_.end; boundary += size) {
      const int64_t low = std::max<int64_t>(chunk_.start - boundary, 0);
      const int64_t high = std::min(chunk_.end - boundary, size);
      if (low > 0) read_tail(low);
      compute(state, boundary, low, high);
      if (high < size) {
        write_tail(plan_.is_in_place(chunk_) ? low : 0, high);
        break;
      }
      // The last row's factors lead from each token to the boundary.
      for (int64_t j = 0; j < size; j++)
        for (int64_t k = 0; k < in_.key_size; k++) keys_[j * in_.key_size + k] *= factors_[j];
      fold(state, since_, keys_, updates_, size, in_.key_size, in_.value_size, target);
      state = target;
      for (int64_t index = chunk_.first_snapshot; index < chunk_.end_snapshot; index++)
        if (plan_.snapshots[index].position == boundary + size)
          std::copy_n(target, in_.state_size(), in_.state(plan_.snapshots[index].slot, head_));
    }
    if (state != target) std::copy_n(state, in_.state_size(), target);
  }

 private:
  float* tail(float* tails, int64_t slot, int64_t heads, int64_t head, int64_t size) const {
    return tails + (slot * heads + head) * plan_.block_size * size;
  }

  // Calls f(tail in the slot, rows in this block, numbers of a row) for all parts of a tail.
  template <typename F>
  void for_parts(int64_t slot, const F& f) const {
    f(tail(in_.keys, slot, in_.num_key_heads, key_head_, in_.key_size), keys_, in_.key_size);
    f(tail(in_.updates, slot, in_.num_heads, head_, in_.value_size), updates_, in_.value_size);
    f(tail(in_.decays, slot, in_.num_heads, head_, 1), decays_, 1);
  }

  void read_tail(int64_t num) {
    for_parts(chunk_.source, [&](const float* from, float* to, int64_t size) { std::copy_n(from, num * size, to); });
    for (int64_t i = 0; i < num; i++) sum_decays(i);
  }

  void write_tail(int64_t low, int64_t high) const {
    for_parts(chunk_.target, [&](float* to, const float* from, int64_t size) {
      // All heads of a group have the same keys, and the first one stores them.
      if (from == keys_ && head_ * in_.num_key_heads % in_.num_heads != 0) return;
      std::copy(from + low * size, from + high * size, to + low * size);
    });
  }

  void sum_decays(int64_t i) { sums_[i] = i ? sums_[i - 1] + decays_[i] : decays_[i]; }

  // Computes the tokens [low, high) of the block at `boundary`; the rows before them are those of the tail.
  void compute(const float* state, int64_t boundary, int64_t low, int64_t high) {
    const int64_t num = high - low, row = chunk_.row + boundary + low - chunk_.start;
    // New keys, and behind them their queries: rows of one product with the state.
    float *keys = keys_ + low * in_.key_size, *queries = keys + num * in_.key_size;
    for (int64_t i = 0; i < num; i++) {
      read_gates(row + i, low + i);
      sum_decays(low + i);
      read_head(in_.key + (row + i) * in_.key_stride, 1.0f, keys + i * in_.key_size);
      read_head(in_.query + (row + i) * in_.query_stride, 1.0f / std::sqrt(static_cast<float>(in_.key_size)),
                queries + i * in_.key_size);
    }
    float *of_keys = products_, *of_queries = products_ + num * in_.value_size;
    if (has_correction())
      multiply_rows(keys, 2 * num, state, in_.key_size, in_.value_size, of_keys);
    else
      multiply_rows(queries, num, state, in_.key_size, in_.value_size, of_queries);
    for (int64_t i = 0; i < num; i++) {
      float* output = of_queries + i * in_.value_size;
      const T* value = read_value(row + i);
      finish(low + i, queries + i * in_.key_size, of_keys + i * in_.value_size, value, output);
      write(row + i, output);
    }
  }

  bool has_correction() const { return in_.gates.a || in_.beta; }

  void read_gates(int64_t row, int64_t i) {
    const int64_t index = row * in_.num_heads + head_;
    if (!in_.gates.a) {
      decays_[i] = in_.decay[index];
      betas_[i] = in_.beta ? in_.beta[index] : 0.0f;
      return;
    }
    const Gates<T>& gates = in_.gates;
    const float a = widen(gates.a[row * gates.row_stride + head_]) + gates.biases[head_];
    const float b = widen(gates.b[row * gates.row_stride + head_]);
    decays_[i] = gates.rates[head_] * (a > 20.0f ? a : std::log1p(std::exp(a)));
    betas_[i] = gates.beta_scale / (1.0f + std::exp(-b));
  }

  void read_head(const T* row, float scale, float* to) const {
    const T* from = row + key_head_ * in_.key_size;
    for (int64_t k = 0; k < in_.key_size; k += kLanes) store(to + k, load(from + k));
    if (!in_.normalizes) return;
    const float factor = scale / std::sqrt(dot(to, to, in_.key_size) + 1e-6f);
    for (int64_t k = 0; k < in_.key_size; k += kLanes) store(to + k, load(to + k) * factor);
  }

  const T* read_value(int64_t row) const { return in_.value + row * in_.value_stride + head_ * in_.value_size; }

  // Computes the update and the output of token `i`. `output` has the query's product with the state.
  [[gnu::noinline]] void finish(int64_t i, const float* query, const float* of_key, const T* value, float* output) {
    const int64_t size = in_.key_size, width = in_.value_size;
    since_ = exponential(sums_[i]);
    for (int64_t j = 0; j <= i; j++) factors_[j] = exponential(sums_[i] - sums_[j]);
    for (int64_t j = 0; j <= i; j++) {
      if (has_correction()) key_weights_[j] = factors_[j] * dot(keys_at(i), keys_at(j), size);
      query_weights_[j] = factors_[j] * dot(query, keys_at(j), size);
    }
    for_columns<4>(width, [&](auto n, int64_t column) HEADWAY_INLINE {
      constexpr int N = n;
      const auto add_earlier = [&](Floats* sums, const float* weights, int64_t end) HEADWAY_INLINE {
        for (int64_t j = 0; j < end; j++)
          repeat<N>([&](auto v) HEADWAY_INLINE {
            sums[v] = sums[v] + weights[j] * load(updates_ + j * width + column + v * kLanes);
          });
      };
      Floats sums[N];
      if (has_correction()) {
        repeat<N>([&](auto v) HEADWAY_INLINE { sums[v] = since_ * load(of_key + column + v * kLanes); });
        add_earlier(sums, key_weights_, i);
      }
      repeat<N>([&](auto v) HEADWAY_INLINE {
        const Floats numbers = load(value + column + v * kLanes);
        const Floats update = has_correction() ? betas_[i] * (numbers - sums[v]) : numbers;
        store(updates_ + i * width + column + v * kLanes, update);
        sums[v] = since_ * load(output + column + v * kLanes);
      });
      add_earlier(sums, query_weights_, i + 1);
      repeat<N>([&](auto v) HEADWAY_INLINE { store(output + column + v * kLanes, sums[v]); });
    });
  }

  const float* keys_at(int64_t i) const { return keys_ + i * in_.key_size; }

  void write(int64_t row, const float* from) const {
    const int64_t width = in_.value_size;
    T* to = in_.output + (row * in_.num_heads + head_) * width;
    if (!in_.gate) {
      for (int64_t v = 0; v < width; v++) to[v] = narrow<T>(from[v]);
      return;
    }
    const T* gate = in_.gate + row * in_.gate_stride + head_ * width;
    const float factor = 1.0f / std::sqrt(dot(from, from, width) / static_cast<float>(width) + in_.epsilon);
#pragma omp simd
    for (int64_t v = 0; v < width; v++)
      to[v] = narrow<T>(from[v] * factor * widen(in_.norm[v]) * widen(gate[v]) * sigmoid(widen(gate[v])));
  }

  const StatePlan& plan_;
  const Rule<T>& in_;
  const StateChunk& chunk_;
  const int64_t head_, key_head_;
  std::vector<float> memory_;
  float *keys_, *updates_, *products_, *decays_, *sums_, *betas_, *factors_, *key_weights_, *query_weights_;
  float since_ = 1.0f;
};

// Adds the loop over all heads of all chunks.
template <typename T>
inline void add_rule(WorkQueue& queue, const StatePlan& plan, const Rule<T>& in) {
  queue.add({plan.num_chunks * in.num_heads, [=](int64_t task, void*) {
    HeadBlock<T>(plan, in, plan.chunks[task / in.num_heads], task % in.num_heads).run();
  }});
}

}  // namespace headway
