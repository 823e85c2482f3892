// The kernels over tensors.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <atomic>
#include <optional>
#include <type_traits>
#include <vector>

#include "layer_math.h"
#include "linear.h"
#include "paged_attention.h"
#include "quantization.h"
#include "tile_linear.h"

namespace headway {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Calls f with a null pointer to the C++ type of the tensor's numbers.
template <typename F>
inline void for_type_of(const Tensor& tensor, const F& f) {
  if (tensor.scalar_type() == at::kFloat)
    f(static_cast<float*>(nullptr));
  else if (tensor.scalar_type() == at::kBFloat16)
    f(static_cast<BFloat16*>(nullptr));
  else
    TORCH_CHECK(false, "the kernels compute float32 and bfloat16, not ", tensor.scalar_type());
}

inline void check_rows(const Tensor& tensor, const Tensor& like) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.device().is_cpu(), "contiguous rows on CPU are needed");
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), "all tensors must have one dtype");
}

template <typename T>
inline void store_heads(const Tensor& from, const Tensor& slots, Tensor& cache) {
  TORCH_CHECK(from.stride(2) == 1 && from.scalar_type() == cache.scalar_type());
  const int64_t num_heads = from.size(1), size = from.size(2);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  T* to = cache.mutable_data_ptr<T>();
  for (int64_t token = 0; token < from.size(0); token++)
    for (int64_t head = 0; head < num_heads; head++)
      std::memcpy(to + (slot[token] * num_heads + head) * size,
                  from.const_data_ptr<T>() + token * from.stride(0) + head * from.stride(1), size * sizeof(T));
}

// Stores key and value [num_tokens, num_kv_heads, size] in `slots` [num_tokens] of the cache [num_blocks, block_size,
// num_kv_heads, size], then gives the attention of query [num_tokens, num_query_heads, key_size]. Rows of `chunks`
// [num_chunks, 4] int64 are `Chunk`s; `tables` [any] int64 holds their block tables. Attention of tokens that no chunk
// names is left undefined.
inline Tensor attend_paged(const Tensor& query, const Tensor& key, const Tensor& value, Tensor keys, Tensor values,
                           const Tensor& slots, const Tensor& chunks, const Tensor& tables, double scale,
                           int64_t window, double softcap, const OptionalTensor& sinks) {
  check_rows(keys, query);
  check_rows(values, query);
  TORCH_CHECK(slots.is_contiguous() && chunks.is_contiguous() && tables.is_contiguous() && query.stride(2) == 1);
  TORCH_CHECK(keys.size(3) % kLanes == 0 && values.size(3) % kLanes == 0, "head sizes must be multiples of ", kLanes);
  TORCH_CHECK(!sinks || (sinks->is_contiguous() && sinks->scalar_type() == at::kFloat), "sinks must be float32");
  const int64_t num_tokens = query.size(0), num_heads = query.size(1), num_kv_heads = keys.size(2);
  Tensor output = at::empty({num_tokens, num_heads, values.size(3)}, query.options());
  for_type_of(query, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    store_heads<T>(key, slots, keys);
    store_heads<T>(value, slots, values);
    paged_attention(AttentionInputs<T>{
        query.const_data_ptr<T>(), query.stride(0), query.stride(1),
        keys.const_data_ptr<T>(), values.const_data_ptr<T>(),
        reinterpret_cast<const Chunk*>(chunks.const_data_ptr<int64_t>()), chunks.size(0),
        tables.const_data_ptr<int64_t>(), keys.size(1), num_kv_heads, num_heads / num_kv_heads, keys.size(3),
        values.size(3), static_cast<float>(scale), static_cast<float>(softcap), window,
        sinks ? sinks->const_data_ptr<float>() : nullptr,
        output.mutable_data_ptr<T>()});
  });
  return output;
}

// residual [num_tokens, size] += update, if there is one; gives the result normalised.
inline Tensor add_and_normalize(Tensor residual, const OptionalTensor& update, const Tensor& weight, double epsilon) {
  check_rows(residual, weight);
  if (update) check_rows(*update, residual);
  Tensor output = at::empty_like(residual);
  for_type_of(residual, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t size = residual.size(-1);
    T* rows = residual.mutable_data_ptr<T>();
    const T* updates = update ? update->const_data_ptr<T>() : nullptr;
    const T* weights = weight.const_data_ptr<T>();
    T* outputs = output.mutable_data_ptr<T>();
    at::parallel_for(0, residual.numel() / size, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        if (updates) add(rows + row * size, updates + row * size, size);
        normalize(rows + row * size, weights, size, static_cast<float>(epsilon), outputs + row * size);
      }
    });
  });
  return output;
}

// Of each row [(num_query_heads + 2 * num_kv_heads) * size] normalises, where there is a norm, and rotates the queries
// and keys, by cos and sin [num_tokens, size].
inline void rotate_heads(Tensor rows, const Tensor& cos, const Tensor& sin, int64_t num_query_heads,
                         int64_t num_kv_heads, const OptionalTensor& query_norm, const OptionalTensor& key_norm,
                         double epsilon) {
  check_rows(rows, cos);
  check_rows(cos, sin);
  check_rows(sin, cos);
  for_type_of(rows, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t size = cos.size(1);
    const int64_t width = (num_query_heads + 2 * num_kv_heads) * size;
    TORCH_CHECK(rows.size(1) == width && rows.size(0) == cos.size(0));
    const T* norms[2] = {query_norm ? query_norm->const_data_ptr<T>() : nullptr,
                         key_norm ? key_norm->const_data_ptr<T>() : nullptr};
    T* first = rows.mutable_data_ptr<T>();
    const T *cosines = cos.const_data_ptr<T>(), *sines = sin.const_data_ptr<T>();
    at::parallel_for(0, rows.size(0), 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        for (int64_t index = 0; index < num_query_heads + num_kv_heads; index++) {
          T* head = first + row * width + index * size;
          const T* norm = norms[index >= num_query_heads];
          if (norm) normalize(head, norm, size, static_cast<float>(epsilon), head);
          rotate(head, cosines + row * size, sines + row * size, size);
        }
    });
  });
}

// silu(first half) * second half of each row.
inline Tensor gate_rows(const Tensor& gate_up) {
  check_rows(gate_up, gate_up);
  const int64_t num_rows = gate_up.size(0), size = gate_up.size(1) / 2;
  Tensor output = at::empty({num_rows, size}, gate_up.options());
  for_type_of(gate_up, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = gate_up.const_data_ptr<T>();
    T* to = output.mutable_data_ptr<T>();
    at::parallel_for(0, num_rows, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        gate(from + row * 2 * size, from + (row * 2 + 1) * size, size, to + row * size);
    });
  });
  return output;
}

// Calls f for parts of [0, num), in as many threads as there are. Whoever is done takes another part: a thread that has
// to wait for a processor holds up the others by one part, not by its share.
template <typename F>
inline void share(int64_t num, const F& f) {
  constexpr int64_t kPartsEach = 8;
  const int64_t num_threads = at::get_num_threads();
  const int64_t part = num_threads == 1 ? num : std::max<int64_t>(1, num / (num_threads * kPartsEach));
  std::atomic<int64_t> next{0};
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    for (int64_t first = next.fetch_add(part); first < num; first = next.fetch_add(part))
      f(first, std::min(first + part, num));
  });
}

template <typename X, typename W, typename O>
inline void multiply_in_parallel(const LinearInputs<X, W, O>& in) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<X, BFloat16> && std::is_same_v<O, BFloat16>)
    if (in.num_rows >= kFewestTileRows && has_tiles()) {
      TiledRows rows(in.rows, in.num_rows, in.num_inputs);
      at::parallel_for(0, rows.num_tiles(), 4, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; tile++) rows.arrange(tile);
      });
      share(in.num_panels(), [&](int64_t first, int64_t end) { multiply_panels_in_tiles(in, rows, first, end); });
      return;
    }
#endif
  share(in.num_panels(), [&](int64_t first, int64_t end) { multiply_panels(in, first, end); });
}

inline Tensor empty_outputs(const Tensor& inputs, int64_t num_outputs) {
  std::vector<int64_t> shape(inputs.sizes().begin(), inputs.sizes().end());
  shape.back() = num_outputs;
  return at::empty(shape, inputs.options());
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

// inputs [..., num_inputs] times the packed weight of as many inputs and `num_outputs`, plus bias [num_outputs].
inline Tensor multiply_by_weight(const Tensor& inputs, const Tensor& weight, int64_t num_outputs,
                                 const OptionalTensor& bias) {
  check_rows(weight, inputs);
  Tensor output = empty_outputs(inputs, num_outputs);
  for_type_of(inputs, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    check_packed<T, T>(weight, inputs, num_outputs, bias);
    const int64_t num_inputs = inputs.size(-1);
    multiply_in_parallel(LinearInputs<T, T, T>{inputs.const_data_ptr<T>(), weight.const_data_ptr<T>(),
                                               bias ? bias->const_data_ptr<T>() : nullptr, inputs.numel() / num_inputs,
                                               num_inputs, num_outputs, output.mutable_data_ptr<T>()});
  });
  return output;
}

// inputs [..., num_inputs] times a packed weight of int8 whose outputs have a scale each, [num_outputs].
inline Tensor multiply_by_int8(const Tensor& inputs, const Tensor& weight, const Tensor& scales,
                               const OptionalTensor& bias) {
  const int64_t num_inputs = inputs.size(-1), num_outputs = scales.size(0), num_rows = inputs.numel() / num_inputs;
  check_packed<int16_t, int8_t>(weight, inputs, num_outputs, bias);
  Tensor output = empty_outputs(inputs, num_outputs);
  std::vector<int16_t> rows(num_rows * num_inputs);
  std::vector<float> row_scales(num_rows);
  for_type_of(inputs, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = inputs.const_data_ptr<T>();
    at::parallel_for(0, num_rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        row_scales[row] = quantize(from + row * num_inputs, num_inputs, rows.data() + row * num_inputs);
    });
    multiply_in_parallel(LinearInputs<int16_t, int8_t, T>{
        rows.data(), weight.const_data_ptr<int8_t>(), bias ? bias->const_data_ptr<T>() : nullptr, num_rows, num_inputs,
        num_outputs, output.mutable_data_ptr<T>(), row_scales.data(), scales.const_data_ptr<float>()});
  });
  return output;
}

}  // namespace headway
