// All layers of a decoder with gated delta nets and gated attention in one call, as `run_layers`.
#pragma once

#include "decoder.h"
#include "recurrent_operations.h"

namespace headway {

// State slots and KV cache of all layers, and the plans of their chunks. Each list has one entry for each layer that
// needs it; if the KV cache has no scales, their lists are empty.
struct HybridCache {
  at::TensorList keys, values, key_scales, value_scales, inputs, states, state_keys, updates, decays;
  const Tensor &slots, &chunks, &tables, &state_chunks, &snapshots;
};

// Layers of a hybrid decoder. Results that one operation passes to the next are in memory that all layers share.
class HybridLayers {
 public:
  HybridLayers(Tensor residual, const HybridCache& cache, double epsilon)
      : residual_(std::move(residual)), cache_(cache), epsilon_(epsilon), hidden_(rows_of(residual_.size(1))),
        update_(rows_of(residual_.size(1))) {}

  // Adds a layer of the gated delta rule.
  void add_delta_net(PartReader& parts) {
    normalize_input(parts);
    const StateTensors slots{cache_.inputs[num_delta_], cache_.states[num_delta_], cache_.state_keys[num_delta_],
                             cache_.updates[num_delta_], cache_.decays[num_delta_]};
    num_delta_++;
    const int64_t num_heads = slots.states.size(1), values = num_heads * slots.states.size(3);
    const Linear inputs = parts.linear();
    const Tensor weight = parts.some(), rates = parts.some(), biases = parts.some(), norm = parts.some();
    Tensor& rows = sized(rows_, weight.size(0) + values + 2 * num_heads);
    Tensor &mixed = sized(mixed_, weight.size(0)), &outputs = sized(outputs_, values);
    inputs.add(queue_, hidden_, rows);
    add_delta_mixing(queue_, rows, weight, rates, biases, 1.0, norm, epsilon_, slots, cache_.state_chunks,
                     cache_.snapshots, mixed, outputs);
    parts.linear().add(queue_, outputs, update_);
    add_feed_forward(parts);
  }

  // Adds a layer of attention whose queries have gates: in each head's numbers, the second half.
  void add_attention(PartReader& parts, int64_t num_query_heads, const Tensor& cos, const Tensor& sin, double scale) {
    normalize_input(parts);
    const CachePart keys = part_of(cache_.keys, cache_.key_scales), values = part_of(cache_.values, cache_.value_scales);
    num_attention_++;
    const int64_t size = keys.numbers.size(3), num_kv_heads = keys.numbers.size(2);
    Tensor& query_gate = sized(query_gate_, num_query_heads * 2 * size);
    Tensor &key_rows = sized(key_, num_kv_heads * size), &value_rows = sized(value_, num_kv_heads * size);
    Tensor& attended = sized(attended_, num_query_heads * size);
    parts.linear().add(queue_, hidden_, query_gate);
    parts.linear().add(queue_, hidden_, key_rows);
    parts.linear().add(queue_, hidden_, value_rows);
    const Tensor heads = query_gate.unflatten(1, {num_query_heads, 2 * size}), query = heads.narrow(2, 0, size);
    const Tensor key = key_rows.unflatten(1, {num_kv_heads, size}), value = value_rows.unflatten(1, {num_kv_heads, size});
    const Tensor query_norm = parts.some(), key_norm = parts.some();
    add_rotating(queue_, query, key, cos, sin, query_norm, key_norm, epsilon_);
    add_paged_attention(queue_, query, key, value, keys, values, cache_.slots, cache_.chunks, cache_.tables, scale, 0,
                        0.0, std::nullopt, attention_, attended);
    add_gates(heads.narrow(2, size, size), attended);
    parts.linear().add(queue_, attended, update_);
    add_feed_forward(parts);
  }

  // Runs all layers. Returns the last feed-forward update; the updates before it are in the residual.
  Tensor run() {
    queue_.run();
    return update_;
  }

 private:
  Tensor rows_of(int64_t num) const { return at::empty({residual_.size(0), num}, residual_.options()); }

  Tensor& sized(Tensor& rows, int64_t num) {
    if (!rows.defined()) rows = rows_of(num);
    TORCH_CHECK(rows.size(1) == num, "all layers of a kind must have the same sizes");
    return rows;
  }

  CachePart part_of(at::TensorList numbers, at::TensorList scales) const {
    return {numbers[num_attention_], scales.empty() ? OptionalTensor() : OptionalTensor(scales[num_attention_])};
  }

  void normalize_input(PartReader& parts) {
    add_normalizing(queue_, residual_, num_delta_ + num_attention_ ? &update_ : nullptr, parts.some(), epsilon_,
                    hidden_);
  }

  // Adds the loop of rows [num_tokens, num_heads * size] *= sigmoid(gates [num_tokens, num_heads, size]).
  void add_gates(const Tensor& gates, Tensor& rows) {
    for_type_of(rows, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      const int64_t num_heads = gates.size(1), size = gates.size(2), row_stride = gates.stride(0),
                    head_stride = gates.stride(1);
      const T* from = gates.const_data_ptr<T>();
      T* to = rows.mutable_data_ptr<T>();
      queue_.add_rows(rows.size(0) * num_heads, 16, [=](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; index++) {
          const T* gate = from + index / num_heads * row_stride + index % num_heads * head_stride;
          T* head = to + index * size;
#pragma omp simd
          for (int64_t i = 0; i < size; i++) head[i] = narrow<T>(widen(head[i]) * sigmoid(widen(gate[i])));
        }
      });
    });
  }

  void add_feed_forward(PartReader& parts) {
    add_normalizing(queue_, residual_, &update_, parts.some(), epsilon_, hidden_);
    const Linear gate = parts.linear(), up = parts.linear(), down = parts.linear();
    const int64_t width = down.num_inputs();
    Tensor &gates = sized(gate_, width), &ups = sized(up_, width), &gated = sized(gated_, width);
    gate.add(queue_, hidden_, gates);
    up.add(queue_, hidden_, ups);
    add_gating(queue_, gates, ups, gated);
    down.add(queue_, gated, update_);
  }

  Tensor residual_;
  const HybridCache& cache_;
  const double epsilon_;
  Tensor hidden_, update_, rows_, mixed_, outputs_, query_gate_, key_, value_, attended_, gate_, up_, gated_;
  std::shared_ptr<AttentionWork> attention_;
  WorkQueue queue_;
  size_t num_delta_ = 0, num_attention_ = 0;
};

// Runs the layers as `run_layers` does. `parts` holds the tensors that `HybridLayers` reads, layer after layer;
// `is_recurrent` has a 1 for each layer of the gated delta rule. For the caches see `HybridCache`. All norms have one
// epsilon.
inline Tensor run_hybrid_layers(Tensor residual, const Tensor& cos, const Tensor& sin,
                                const c10::List<OptionalTensor>& parts, at::IntArrayRef is_recurrent,
                                int64_t num_query_heads, double epsilon, double scale, at::TensorList keys,
                                at::TensorList values, at::TensorList key_scales, at::TensorList value_scales,
                                at::TensorList inputs, at::TensorList states, at::TensorList state_keys,
                                at::TensorList updates, at::TensorList decays, const Tensor& slots,
                                const Tensor& chunks, const Tensor& tables, const Tensor& state_chunks,
                                const Tensor& snapshots) {
  const HybridCache cache{keys,   values,  key_scales, value_scales, inputs, states, state_keys,
                          updates, decays, slots,      chunks,       tables, state_chunks, snapshots};
  HybridLayers layers(residual, cache, epsilon);
  PartReader reader(parts);
  for (const int64_t recurrent : is_recurrent) {
    if (recurrent)
      layers.add_delta_net(reader);
    else
      layers.add_attention(reader, num_query_heads, cos, sin, scale);
  }
  TORCH_CHECK(reader.is_at_end(), "the layers have other parts");
  return layers.run();
}

}  // namespace headway
