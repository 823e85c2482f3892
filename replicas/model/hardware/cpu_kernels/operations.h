// The kernels' operations on tensors. Functions `add_...` add parallel loops to a queue, and the caller must keep their
// tensors until `WorkQueue::run`. The other functions run the operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "grouped.h"
#include "grouped_tiles.h"
#include "layer_math.h"
#include "linear.h"
#include "paged_attention.h"
#include "phases.h"
#include "quantization.h"
#include "text_attention.h"
#include "tile_linear.h"

namespace headway {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Calls f with a null pointer whose C++ type is that of the tensor's numbers.
template <typename F>
inline void for_type_of(const Tensor& tensor, const F& f) {
  if (tensor.scalar_type() == at::kFloat)
    f(static_cast<float*>(nullptr));
  else if (tensor.scalar_type() == at::kBFloat16)
    f(static_cast<BFloat16*>(nullptr));
  else
    TORCH_CHECK(false, "the kernels compute float32 and bfloat16, not ", tensor.scalar_type());
}

// Calls f with the pointer of a norm's weight: T or float32. It is null if `weight` is.
template <typename T, typename F>
inline void for_weights(const Tensor* weight, const F& f) {
  if (weight && weight->scalar_type() == at::kFloat)
    f(weight->const_data_ptr<float>());
  else
    f(weight ? weight->const_data_ptr<T>() : static_cast<const T*>(nullptr));
}

inline void check_rows(const Tensor& tensor, const Tensor& like) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.device().is_cpu(), "contiguous rows on CPU are needed");
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), "all tensors must have one dtype");
}

// Keys or values of a layer: numbers [num_blocks, block_size, num_kv_heads, size]. Numbers of 8 bits have a scale for
// each head of a token, [num_blocks, num_kv_heads, block_size] float32.
struct CachePart {
  Tensor numbers;
  OptionalTensor scales;
  const float* scale_pointer() const { return scales ? scales->const_data_ptr<float>() : nullptr; }
};

inline void check_cache(const CachePart& part, const Tensor& like) {
  const Tensor& numbers = part.numbers;
  check_rows(numbers, part.scales ? numbers : like);
  TORCH_CHECK(numbers.size(3) % kLanes == 0, "head sizes must be multiples of ", kLanes);
  if (!part.scales) return;
  const std::vector<int64_t> sizes{numbers.size(0), numbers.size(2), numbers.size(1)};
  TORCH_CHECK(part.scales->is_contiguous() && part.scales->scalar_type() == at::kFloat && part.scales->sizes() == sizes,
              "the scales do not fit the cache");
}

// Calls f with a null pointer whose C++ type is that of the cache's numbers: T, or a type of 8 bits.
template <typename T, typename F>
inline void for_cached_type(const CachePart& part, const F& f) {
  if (!part.scales)
    f(static_cast<T*>(nullptr));
  else if (part.numbers.scalar_type() == at::kChar)
    f(static_cast<int8_t*>(nullptr));
  else if (part.numbers.scalar_type() == at::kFloat8_e4m3fn)
    f(static_cast<Float8*>(nullptr));
  else
    TORCH_CHECK(false, "a cache with scales has int8 or float8_e4m3fn, not ", part.numbers.scalar_type());
}

// Adds the copy of heads [num_tokens, num_heads, size] to `slots` [num_tokens] of a cache.
inline void add_storing(WorkQueue& queue, const Tensor& from, const Tensor& slots, const CachePart& cache) {
  TORCH_CHECK(from.stride(2) == 1);
  for_type_of(from, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_cached_type<T>(cache, [&](auto* cached) {
      using C = std::remove_pointer_t<decltype(cached)>;
      const int64_t num_heads = from.size(1), size = from.size(2), block_size = cache.numbers.size(1);
      const int64_t row_stride = from.stride(0), head_stride = from.stride(1);
      const T* rows = from.const_data_ptr<T>();
      const int64_t* slot = slots.const_data_ptr<int64_t>();
      C* to = cache.numbers.mutable_data_ptr<C>();
      float* scales = cache.scales ? cache.scales->mutable_data_ptr<float>() : nullptr;
      queue.add_rows(from.size(0), 16, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++)
          for (int64_t head = 0; head < num_heads; head++) {
            const T* row = rows + token * row_stride + head * head_stride;
            C* numbers = to + (slot[token] * num_heads + head) * size;
            if constexpr (std::is_same_v<T, C>)
              std::memcpy(numbers, row, size * sizeof(T));
            else
              scales[(slot[token] / block_size * num_heads + head) * block_size + slot[token] % block_size] =
                  quantize(row, size, numbers);
          }
      });
    });
  });
}

// Adds the loops of `attend_paged`, which fill `output`. For `work` see `add_attention`. Values may be views of the keys,
// which alone are stored then.
inline void add_paged_attention(WorkQueue& queue, const Tensor& query, const Tensor& key, const Tensor& value,
                                const CachePart& keys, const CachePart& values, const Tensor& slots,
                                const Tensor& chunks, const Tensor& tables, double scale, int64_t window,
                                double softcap, const OptionalTensor& sinks, std::shared_ptr<AttentionWork>& work,
                                Tensor& output) {
  check_cache(keys, query);
  const bool are_in_keys = values.numbers.const_data_ptr() == keys.numbers.const_data_ptr();
  if (!are_in_keys) check_cache(values, query);
  TORCH_CHECK(values.numbers.size(3) % kLanes == 0, "head sizes must be multiples of ", kLanes);
  TORCH_CHECK(keys.numbers.scalar_type() == values.numbers.scalar_type(), "keys and values must have one dtype");
  TORCH_CHECK(slots.is_contiguous() && chunks.is_contiguous() && tables.is_contiguous() && query.stride(2) == 1);
  TORCH_CHECK(!sinks || (sinks->is_contiguous() && sinks->scalar_type() == at::kFloat), "sinks must be float32");
  add_storing(queue, key, slots, keys);
  if (!are_in_keys) add_storing(queue, value, slots, values);
  for_type_of(query, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t block_size = keys.numbers.size(1), num_kv_heads = keys.numbers.size(2);
    for_cached_type<T>(keys, [&](auto* cached) {
      using C = std::remove_pointer_t<decltype(cached)>;
      add_attention(queue, AttentionInputs<T, C>{
          query.const_data_ptr<T>(), query.stride(0), query.stride(1),
          keys.numbers.const_data_ptr<C>(), values.numbers.const_data_ptr<C>(), keys.scale_pointer(),
          values.scale_pointer(), reinterpret_cast<const Chunk*>(chunks.const_data_ptr<int64_t>()), chunks.size(0),
          tables.const_data_ptr<int64_t>(), block_size, num_kv_heads, query.size(1) / num_kv_heads,
          keys.numbers.size(3), values.numbers.size(3), values.numbers.stride(2), static_cast<float>(scale),
          static_cast<float>(softcap), window, sinks ? sinks->const_data_ptr<float>() : nullptr,
          output.mutable_data_ptr<T>()}, work);
    });
  });
}

// Stores key and value [num_tokens, num_kv_heads, size] in `slots` [num_tokens] of the cache (see `CachePart`), then
// returns the attention of query [num_tokens, num_query_heads, key_size]. Rows of `chunks` [num_chunks, 4] int64 are
// `Chunk`s. `tables` [any] int64 holds their block tables, concatenated. The output of tokens that are in no chunk is
// undefined.
inline Tensor attend_paged(const Tensor& query, const Tensor& key, const Tensor& value, Tensor keys, Tensor values,
                           OptionalTensor key_scales, OptionalTensor value_scales, const Tensor& slots,
                           const Tensor& chunks, const Tensor& tables, double scale, int64_t window, double softcap,
                           const OptionalTensor& sinks) {
  Tensor output = at::empty({query.size(0), query.size(1), values.size(3)}, query.options());
  WorkQueue queue;
  std::shared_ptr<AttentionWork> work;
  add_paged_attention(queue, query, key, value, {keys, key_scales}, {values, value_scales}, slots, chunks, tables,
                      scale, window, softcap, sinks, work, output);
  queue.run();
  return output;
}

// Returns the attention of query [num_tokens, num_query_heads, key_size] over key and value [num_tokens, num_kv_heads,
// size] in which tokens see those before and behind them, in `window` if it is not 0. Rows of `texts` [num_texts, 2]
// int64 are `Text`s. The output of tokens that are in no text is undefined.
inline Tensor attend_texts(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& texts,
                           double scale, int64_t window) {
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1 && texts.is_contiguous());
  TORCH_CHECK(key.scalar_type() == query.scalar_type() && value.scalar_type() == query.scalar_type());
  Tensor output = at::empty({query.size(0), query.size(1), value.size(2)}, query.options());
  const Text* first = reinterpret_cast<const Text*>(texts.const_data_ptr<int64_t>());
  WorkQueue queue;
  for_type_of(query, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto rows_of = [](const Tensor& heads) {
      return HeadRows<const T>{heads.const_data_ptr<T>(), heads.stride(0), heads.stride(1)};
    };
    add_text_attention(queue, TextInputs<T>{rows_of(query), rows_of(key), rows_of(value), query.size(1), key.size(1),
                                            key.size(2), value.size(2), static_cast<float>(scale), window,
                                            output.mutable_data_ptr<T>()},
                       std::vector<Text>(first, first + texts.size(0)));
  });
  queue.run();
  return output;
}

// Adds the loop of residual [num_tokens, size] += update (if not null), output = normalised residual. Weights of norms
// may be float32 for any residual.
inline void add_normalizing(WorkQueue& queue, Tensor& residual, const Tensor* update, const Tensor& weight,
                            double epsilon, Tensor& output) {
  check_rows(residual, residual);
  check_rows(weight, weight);
  if (update) check_rows(*update, residual);
  for_type_of(residual, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t size = residual.size(-1);
    T* rows = residual.mutable_data_ptr<T>();
    const T* updates = update ? update->const_data_ptr<T>() : nullptr;
    T* outputs = output.mutable_data_ptr<T>();
    for_weights<T>(&weight, [&](const auto* weights) {
      queue.add_rows(residual.numel() / size, 8, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
          if (updates) add(rows + row * size, updates + row * size, size);
          normalize(rows + row * size, weights, size, static_cast<float>(epsilon), outputs + row * size);
        }
      });
    });
  });
}

inline Tensor add_and_normalize(Tensor residual, const OptionalTensor& update, const Tensor& weight, double epsilon) {
  Tensor output = at::empty_like(residual);
  WorkQueue queue;
  add_normalizing(queue, residual, update ? &*update : nullptr, weight, epsilon, output);
  queue.run();
  return output;
}

// Heads of a batch, [num_tokens, num_heads, size]. Numbers of a head are contiguous. A norm may be null.
template <typename T, typename W>
struct Heads {
  Heads(const Tensor& heads, const OptionalTensor& norm)
      : first(heads.mutable_data_ptr<T>()), num(heads.size(1)), size(heads.size(2)), row_stride(heads.stride(0)),
        head_stride(heads.stride(1)), norm(norm ? norm->const_data_ptr<W>() : nullptr) {
    TORCH_CHECK(heads.stride(2) == 1);
  }
  // Normalises the heads of a row, and rotates their first `num_rotated` numbers.
  void rotate_row(int64_t row, const T* cos, const T* sin, int64_t num_rotated, float epsilon) const {
    for (int64_t index = 0; index < num; index++) {
      T* head = first + row * row_stride + index * head_stride;
      if (norm) normalize(head, norm, size, epsilon, head);
      rotate(head, cos, sin, num_rotated);
    }
  }
  T* first;
  int64_t num, size, row_stride, head_stride;
  const W* norm;
};

// Adds the loop that normalises (where there is a norm) and rotates queries and keys [num_tokens, num_heads, size] by
// cos and sin [num_tokens, number of rotated dimensions].
inline void add_rotating(WorkQueue& queue, const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin,
                         const OptionalTensor& query_norm, const OptionalTensor& key_norm, double epsilon) {
  check_rows(cos, query);
  check_rows(sin, cos);
  TORCH_CHECK(query.size(0) == cos.size(0) && key.size(0) == cos.size(0) && cos.size(1) <= query.size(2));
  for_type_of(query, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_weights<T>(query_norm ? &*query_norm : nullptr, [&](const auto* weights) {
      using W = std::remove_const_t<std::remove_pointer_t<decltype(weights)>>;
      const Heads<T, W> queries(query, query_norm), keys(key, key_norm);
      const T *cosines = cos.const_data_ptr<T>(), *sines = sin.const_data_ptr<T>();
      const int64_t num_rotated = cos.size(1);
      queue.add_rows(query.size(0), 4, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
          for (const Heads<T, W>& heads : {queries, keys})
            heads.rotate_row(row, cosines + row * num_rotated, sines + row * num_rotated, num_rotated,
                             static_cast<float>(epsilon));
      });
    });
  });
}

// Normalises and rotates the queries and keys of each row [(num_query_heads + 2 * num_kv_heads) * size].
inline void rotate_heads(Tensor rows, const Tensor& cos, const Tensor& sin, int64_t num_query_heads,
                         int64_t num_kv_heads, const OptionalTensor& query_norm, const OptionalTensor& key_norm,
                         double epsilon) {
  const int64_t size = cos.size(1);
  check_rows(rows, cos);
  TORCH_CHECK(rows.size(1) == (num_query_heads + 2 * num_kv_heads) * size);
  const Tensor heads = rows.unflatten(1, {-1, size});
  WorkQueue queue;
  add_rotating(queue, heads.narrow(1, 0, num_query_heads), heads.narrow(1, num_query_heads, num_kv_heads), cos, sin,
               query_norm, key_norm, epsilon);
  queue.run();
}

// Adds the loop of to = silu(gate) * up, all [num_tokens, size]; numbers of a row are contiguous.
inline void add_gating(WorkQueue& queue, const Tensor& gates, const Tensor& ups, Tensor& output) {
  check_rows(output, gates);
  for_type_of(gates, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t size = output.size(1), gate_stride = gates.stride(0), up_stride = ups.stride(0);
    const T *first_gate = gates.const_data_ptr<T>(), *first_up = ups.const_data_ptr<T>();
    T* to = output.mutable_data_ptr<T>();
    queue.add_rows(output.size(0), 4, [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        gate(first_gate + row * gate_stride, first_up + row * up_stride, size, to + row * size);
    });
  });
}

// Returns silu(first half) * second half of each row.
inline Tensor gate_rows(const Tensor& gate_up) {
  const int64_t size = gate_up.size(1) / 2;
  check_rows(gate_up, gate_up);
  Tensor output = at::empty({gate_up.size(0), size}, gate_up.options());
  WorkQueue queue;
  add_gating(queue, gate_up.narrow(1, 0, size), gate_up.narrow(1, size, size), output);
  queue.run();
  return output;
}

// Adds the multiplication by all panels, in chunks. `multiply(in, first, end)` multiplies by panels [first, end).
template <typename X, typename W, typename O, typename F>
inline void add_panels(WorkQueue& queue, const LinearInputs<X, W, O>& in, const F& multiply) {
  if (in.num_rows == 0) return;
  const int64_t column_bytes = kPanel * in.num_rows * sizeof(O);
  const int64_t panel_bytes = kPanel * in.num_inputs * sizeof(W) / kHeld<W>;
  const bool can_repeat = queue.num_threads() > 1 && column_bytes <= kMaxResultBytes;
  int64_t each = queue.rows_per_chunk(in.num_panels(), 1);
  if (can_repeat)
    each = std::clamp<int64_t>(std::min(kMaxResultBytes / column_bytes, kMaxChunkBytes / panel_bytes), 1, each);
  const int64_t num_chunks = (in.num_panels() + each - 1) / each;
  const auto end_of = [=](int64_t chunk) { return std::min((chunk + 1) * each, in.num_panels()); };
  if (!can_repeat) {
    queue.add({num_chunks, [=](int64_t chunk, void*) { multiply(in, chunk * each, end_of(chunk)); }});
    return;
  }
  queue.add({num_chunks,
              [=](int64_t chunk, void* result) {
                const int64_t first = chunk * each * kPanel, end = std::min(end_of(chunk) * kPanel, in.num_outputs);
                const O* from = static_cast<const O*>(result);
                for (int64_t row = 0; row < in.num_rows; row++, from += (end_of(chunk) - chunk * each) * kPanel)
                  std::memcpy(in.outputs + row * in.num_outputs + first, from, (end - first) * sizeof(O));
              },
              [=](int64_t chunk, void* result) {
                const int64_t first = chunk * each, end = end_of(chunk);
                multiply(in.only(first, end, static_cast<O*>(result)), first, end);
              },
              each * column_bytes});
}

#if defined(__AMX_BF16__)
// Adds the loop that copies the input rows into tiles in `memory`.
template <typename W>
inline TiledRows add_arranging(WorkQueue& queue, const LinearInputs<BFloat16, W, BFloat16>& in, void* memory) {
  const TiledRows rows(in.rows, in.num_rows, in.num_inputs, memory);
  queue.add_rows(rows.num_tiles(), 4, [=](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; tile++) rows.arrange(tile);
  });
  return rows;
}
#endif

template <typename X, typename W, typename O>
inline void add_product(WorkQueue& queue, const LinearInputs<X, W, O>& in) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<X, BFloat16> && std::is_same_v<O, BFloat16>)
    if (has_tiles()) {
      const TiledRows rows = add_arranging(queue, in, queue.scratch(tiled_bytes(in.num_rows, in.num_inputs)));
      add_panels(queue, in, [=](const LinearInputs<X, W, O>& chunk, int64_t first, int64_t end) {
        multiply_panels_in_tiles(chunk, rows, first, end);
      });
      return;
    }
#endif
  add_panels(queue, in, [](const LinearInputs<X, W, O>& chunk, int64_t first, int64_t end) {
    multiply_panels(chunk, first, end);
  });
}

// Checks a packed weight [num_panels, num_inputs / kPair, kPanel, kPair] for inputs [..., num_inputs].
template <typename X, typename W>
inline void check_packed(const Tensor& weight, const Tensor& inputs, int64_t num_outputs, const OptionalTensor& bias) {
  constexpr int64_t kPair = Products<X, W>::kPair;
  const int64_t num_inputs = inputs.size(-1);
  check_rows(inputs, inputs);
  check_rows(weight, weight);
  TORCH_CHECK(weight.dim() == 4 && weight.size(1) * kPair == num_inputs && weight.size(2) == kPanel &&
                  weight.size(3) == kPair && weight.size(0) == (num_outputs + kPanel - 1) / kPanel,
              "the weight is not packed for ", num_inputs, " inputs and ", num_outputs, " outputs");
  TORCH_CHECK(num_inputs % 32 == 0, "the number of inputs must be a multiple of 32");
  TORCH_CHECK(!bias || bias->size(0) == num_outputs);
}

// Adds the loops of `multiply_by_groups`.
template <typename T, typename W>
inline void add_grouped(WorkQueue& queue, LinearInputs<T, W, T> in, const Tensor& scales) {
  TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == at::kFloat && scales.dim() == 4 &&
                  (scales.size(0) == 1 || scales.size(0) == 2) && scales.size(1) == in.num_panels() &&
                  scales.size(3) == kPanel && in.num_inputs % (kGroupedInputs<W> * scales.size(2)) == 0,
              "the scales do not fit the weight");
  const int64_t num_groups = scales.size(2);
  Groups groups{scales.const_data_ptr<float>(), nullptr, nullptr, in.num_inputs / num_groups};
  // The sums by group and the rows in tiles are needed together, so they are one piece of scratch memory.
  const bool has_offsets = scales.size(0) == 2, in_tiles = can_fill_tiles<T>(in.num_rows, in.num_inputs, groups.size);
  const int64_t sum_lines = has_offsets ? (in.num_rows * num_groups * sizeof(float) + 63) / 64 : 0;
  const int64_t tile_bytes = in_tiles ? tiled_bytes(in.num_rows, in.num_inputs) : 0;
  std::byte* scratch = static_cast<std::byte*>(queue.scratch(64 * sum_lines + tile_bytes));
  if (has_offsets) {
    float* sums = reinterpret_cast<float*>(scratch);
    groups.offsets = groups.scales + scales.stride(0);
    groups.row_sums = sums;
    queue.add_rows(in.num_rows, 8, [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        sum_groups(in.rows + row * in.num_inputs, in.num_inputs, groups.size, sums + row * num_groups);
    });
  }
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, BFloat16>)
    if (in_tiles) {
      const TiledRows rows = add_arranging(queue, in, scratch + 64 * sum_lines);
      add_panels(queue, in, [=](const LinearInputs<T, W, T>& chunk, int64_t first, int64_t end) {
        multiply_grouped_in_tiles(chunk, rows, groups, first, end);
      });
      return;
    }
#endif
  add_panels(queue, in, [=](const LinearInputs<T, W, T>& chunk, int64_t first, int64_t end) {
    multiply_panels<kRows>(chunk, first, end, [&](auto num, int64_t row, int64_t panel, Ahead* ahead) {
      multiply_grouped<num>(chunk, groups, row, panel, ahead);
    });
  });
}

// Checks a packed weight with groups, [num_panels, num_inputs / inputs of 64 bytes, kPanel, 2], or with 1 in the place
// of 2 if it has 16-bit words.
template <typename W>
inline void check_grouped(const Tensor& weight, const Tensor& inputs, int64_t num_outputs, const OptionalTensor& bias) {
  check_rows(inputs, inputs);
  check_rows(weight, weight);
  TORCH_CHECK(weight.dim() == 4 && weight.size(1) * kGroupedInputs<W> == inputs.size(-1) &&
                  weight.size(2) == kPanel && weight.size(3) * weight.element_size() == 2 &&
                  weight.size(0) == (num_outputs + kPanel - 1) / kPanel,
              "the weight is not packed for ", inputs.size(-1), " inputs and ", num_outputs, " outputs");
  TORCH_CHECK(!bias || bias->size(0) == num_outputs);
}

// Adds the loops of `multiply_by_weight` or, with `scales`, of `multiply_by_int8` or `multiply_by_groups`.
inline void add_multiplying(WorkQueue& queue, const Tensor& inputs, const Tensor& weight, const OptionalTensor& scales,
                            const OptionalTensor& bias, Tensor& output) {
  const int64_t num_inputs = inputs.size(-1), num_outputs = output.size(-1), num_rows = inputs.numel() / num_inputs;
  for_type_of(inputs, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = inputs.const_data_ptr<T>();
    const T* biases = bias ? bias->const_data_ptr<T>() : nullptr;
    T* to = output.mutable_data_ptr<T>();
    if (!scales) {
      check_rows(weight, inputs);
      check_packed<T, T>(weight, inputs, num_outputs, bias);
      add_product(queue, LinearInputs<T, T, T>{from, weight.const_data_ptr<T>(), biases, num_rows, num_inputs,
                                                num_outputs, to});
      return;
    }
    const auto add_groups = [&](auto* numbers) {
      using W = std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>;
      check_grouped<W>(weight, inputs, num_outputs, bias);
      add_grouped(queue, LinearInputs<T, W, T>{from, numbers, biases, num_rows, num_inputs, num_outputs, to}, *scales);
    };
    if (weight.scalar_type() == at::kByte)
      return add_groups(reinterpret_cast<const Nibbles*>(weight.const_data_ptr<uint8_t>()));
    if (weight.scalar_type() == at::kShort)
      return add_groups(reinterpret_cast<const TableNibbles*>(weight.const_data_ptr<int16_t>()));
    if (scales->dim() > 1) return add_groups(weight.const_data_ptr<int8_t>());
    check_packed<int16_t, int8_t>(weight, inputs, num_outputs, bias);
    const int64_t scale_bytes = num_rows * sizeof(float);
    float* row_scales = static_cast<float*>(queue.scratch(scale_bytes + num_rows * num_inputs * sizeof(int16_t)));
    int16_t* rows = reinterpret_cast<int16_t*>(row_scales + num_rows);
    queue.add_rows(num_rows, 8, [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        row_scales[row] = quantize(from + row * num_inputs, num_inputs, rows + row * num_inputs);
    });
    add_product(queue, LinearInputs<int16_t, int8_t, T>{rows, weight.const_data_ptr<int8_t>(), biases, num_rows,
                                                         num_inputs, num_outputs, to, row_scales,
                                                         scales->const_data_ptr<float>()});
  });
}

inline Tensor multiply(const Tensor& inputs, const Tensor& weight, const OptionalTensor& scales, int64_t num_outputs,
                       const OptionalTensor& bias) {
  std::vector<int64_t> shape(inputs.sizes().begin(), inputs.sizes().end());
  shape.back() = num_outputs;
  Tensor output = at::empty(shape, inputs.options());
  WorkQueue queue;
  add_multiplying(queue, inputs, weight, scales, bias, output);
  queue.run();
  return output;
}

// Returns inputs [..., num_inputs] times the packed weight [num_outputs, num_inputs], plus bias [num_outputs].
inline Tensor multiply_by_weight(const Tensor& inputs, const Tensor& weight, int64_t num_outputs,
                                 const OptionalTensor& bias) {
  return multiply(inputs, weight, std::nullopt, num_outputs, bias);
}

// Returns inputs [num_heads, num_rows, num_inputs] times the packed weight [num_outputs, num_inputs] of each head. A
// product has one order of sums for any number of rows, so it does not use tiles.
inline Tensor multiply_heads(const Tensor& inputs, const Tensor& weights, int64_t num_outputs) {
  const int64_t num_heads = inputs.size(0), num_rows = inputs.size(1), num_inputs = inputs.size(2);
  TORCH_CHECK(weights.dim() == 5 && weights.size(0) == num_heads, "each head needs a packed weight");
  Tensor output = at::empty({num_heads, num_rows, num_outputs}, inputs.options());
  WorkQueue queue;
  for_type_of(inputs, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    check_rows(weights, inputs);
    check_packed<T, T>(weights.select(0, 0), inputs, num_outputs, std::nullopt);
    const T *rows = inputs.const_data_ptr<T>(), *packed = weights.const_data_ptr<T>();
    T* to = output.mutable_data_ptr<T>();
    const int64_t num_panels = weights.size(1), weight_size = weights.stride(0);
    queue.add_rows(num_heads * num_panels, 4, [=](int64_t begin, int64_t end) {
      for (int64_t panel = begin, last; panel < end; panel = last) {
        const int64_t head = panel / num_panels, first = head * num_panels;
        last = std::min(end, first + num_panels);
        const LinearInputs<T, T, T> in{rows + head * num_rows * num_inputs, packed + head * weight_size, nullptr,
                                       num_rows, num_inputs, num_outputs, to + head * num_rows * num_outputs};
        multiply_panels(in, panel - first, last - first);
      }
    });
  });
  queue.run();
  return output;
}

// Returns inputs [..., num_inputs] times a packed weight in 4 or 8 bits, plus bias [num_outputs]. Scales are [1,
// num_panels, num_groups, kPanel], or [2, ...] with the offsets that `Groups` describes.
inline Tensor multiply_by_groups(const Tensor& inputs, const Tensor& weight, const Tensor& scales, int64_t num_outputs,
                                 const OptionalTensor& bias) {
  return multiply(inputs, weight, scales, num_outputs, bias);
}

// Returns inputs [..., num_inputs] times a packed int8 weight, times the scales [num_outputs], plus bias [num_outputs].
inline Tensor multiply_by_int8(const Tensor& inputs, const Tensor& weight, const Tensor& scales,
                               const OptionalTensor& bias) {
  return multiply(inputs, weight, scales, scales.size(0), bias);
}

}  // namespace headway
