// Operations of recurrent layers on tensors.
#pragma once

#include "operations.h"
#include "recurrent.h"

namespace headway {

// Tensors of one layer's states in all slots, as in `LayerStates` of state_cache.py.
struct StateTensors {
  Tensor inputs, states, keys, updates, decays;
};

// Returns the plan of chunks [num_chunks, 7] and snapshots [num_snapshots, 2], both int64: rows of `StateChunk` and
// `Snapshot`.
inline StatePlan plan_of(const Tensor& chunks, const Tensor& snapshots, int64_t block_size) {
  TORCH_CHECK(chunks.is_contiguous() && snapshots.is_contiguous() && chunks.size(1) == 7);
  return {reinterpret_cast<const StateChunk*>(chunks.const_data_ptr<int64_t>()),
          reinterpret_cast<const Snapshot*>(snapshots.const_data_ptr<int64_t>()), chunks.size(0), block_size};
}

// Adds the convolution of inputs [num_tokens, num_channels] by weight [num_channels, width].
template <typename T>
inline void add_convolving(WorkQueue& queue, const StatePlan& plan, const Tensor& inputs, const Tensor& weight,
                           const OptionalTensor& bias, bool has_silu, const Tensor& stored, Tensor& output) {
  const int64_t num_channels = weight.size(0), width = weight.size(1);
  check_rows(weight, inputs);
  check_rows(stored, inputs);
  TORCH_CHECK(inputs.stride(1) == 1 && inputs.size(1) >= num_channels && stored.size(2) == num_channels &&
                  stored.size(1) == width - 1 + plan.block_size && num_channels % kLanes == 0,
              "the inputs do not fit the slots");
  add_convolution(queue, plan,
                  Convolution<T>{inputs.const_data_ptr<T>(), inputs.stride(0), weight.const_data_ptr<T>(),
                                 bias ? bias->const_data_ptr<T>() : nullptr, has_silu, stored.mutable_data_ptr<T>(),
                                 num_channels, width, output.mutable_data_ptr<T>()});
}

// Returns a rule with the sizes and tensors of its states.
template <typename T>
inline Rule<T> rule_of(const StateTensors& slots) {
  Rule<T> rule{};
  rule.num_heads = slots.states.size(1), rule.key_size = slots.states.size(2), rule.value_size = slots.states.size(3);
  rule.num_key_heads = slots.keys.size(1);
  TORCH_CHECK(rule.key_size % kLanes == 0 && rule.value_size % kLanes == 0 && rule.num_heads % rule.num_key_heads == 0,
              "the sizes of heads must be multiples of ", kLanes);
  rule.states = slots.states.mutable_data_ptr<float>();
  rule.keys = slots.keys.mutable_data_ptr<float>();
  rule.updates = slots.updates.mutable_data_ptr<float>();
  rule.decays = slots.decays.mutable_data_ptr<float>();
  return rule;
}

// Returns the convolution [num_tokens, num_channels] of each sequence's inputs (see `ConvCall`).
inline Tensor convolve_states(const Tensor& inputs, const Tensor& weight, const OptionalTensor& bias, bool has_silu,
                              Tensor stored, const Tensor& chunks, const Tensor& snapshots) {
  Tensor output = at::empty_like(inputs);
  WorkQueue queue;
  const StatePlan plan = plan_of(chunks, snapshots, stored.size(1) - weight.size(1) + 1);
  for_type_of(inputs, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    add_convolving<T>(queue, plan, inputs, weight, bias, has_silu, stored, output);
  });
  queue.run();
  return output;
}

// Advances the states; returns the outputs [num_tokens, num_heads, value_size] (see `RuleCall`). All are float32.
inline Tensor advance_states(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                             const OptionalTensor& beta, Tensor states, Tensor keys, Tensor updates, Tensor decays,
                             const Tensor& chunks, const Tensor& snapshots) {
  for (const Tensor* tensor : {&query, &key, &value, &decay}) check_rows(*tensor, states);
  if (beta) check_rows(*beta, states);
  Tensor output = at::empty_like(value);
  Rule<float> rule = rule_of<float>({Tensor(), states, keys, updates, decays});
  TORCH_CHECK(value.size(1) == rule.num_heads && value.size(2) == rule.value_size &&
                  key.size(1) == rule.num_key_heads && key.size(2) == rule.key_size && query.sizes() == key.sizes(),
              "the heads do not fit the slots");
  rule.query = query.const_data_ptr<float>(), rule.query_stride = query.stride(0);
  rule.key = key.const_data_ptr<float>(), rule.key_stride = key.stride(0);
  rule.value = value.const_data_ptr<float>(), rule.value_stride = value.stride(0);
  rule.decay = decay.const_data_ptr<float>();
  rule.beta = beta ? beta->const_data_ptr<float>() : nullptr;
  rule.output = output.mutable_data_ptr<float>();
  WorkQueue queue;
  add_rule(queue, plan_of(chunks, snapshots, keys.size(2)), rule);
  queue.run();
  return output;
}

// Adds the loops of `mix_by_delta_rule`; `mixed` [num_tokens, num_channels] holds what they pass on.
inline void add_delta_mixing(WorkQueue& queue, const Tensor& rows, const Tensor& weight, const Tensor& rates,
                             const Tensor& biases, double beta_scale, const Tensor& norm, double epsilon,
                             const StateTensors& slots, const Tensor& chunks, const Tensor& snapshots, Tensor& mixed,
                             Tensor& output) {
  const StatePlan plan = plan_of(chunks, snapshots, slots.keys.size(2));
  for_type_of(rows, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Rule<T> rule = rule_of<T>(slots);
    const int64_t key_numbers = rule.num_key_heads * rule.key_size, values = rule.num_heads * rule.value_size;
    const int64_t num_channels = 2 * key_numbers + values, stride = rows.size(1);
    check_rows(rows, norm);
    check_rows(biases, rates);
    TORCH_CHECK(stride == num_channels + values + 2 * rule.num_heads && weight.size(0) == num_channels &&
                    norm.size(0) == rule.value_size && rates.size(0) == rule.num_heads &&
                    biases.size(0) == rule.num_heads && rates.scalar_type() == at::kFloat,
                "the rows do not fit the slots");
    add_convolving<T>(queue, plan, rows, weight, std::nullopt, true, slots.inputs, mixed);
    const T *channels = mixed.const_data_ptr<T>(), *gate = rows.const_data_ptr<T>() + num_channels;
    rule.query = channels, rule.key = channels + key_numbers, rule.value = channels + 2 * key_numbers;
    rule.query_stride = rule.key_stride = rule.value_stride = num_channels;
    rule.gates = {gate + values + rule.num_heads, gate + values, stride, rates.const_data_ptr<float>(),
                  biases.const_data_ptr<float>(), static_cast<float>(beta_scale)};
    rule.normalizes = true;
    rule.gate = gate, rule.gate_stride = stride;
    rule.norm = norm.const_data_ptr<T>(), rule.epsilon = static_cast<float>(epsilon);
    rule.output = output.mutable_data_ptr<T>();
    add_rule(queue, plan, rule);
  });
}

// Computes a mixer of the gated delta rule between its linear layers. Each of `rows` has the queries, keys and values
// of all heads, the gate of the norm, b and a (see `Gates`). Returns [num_tokens, num_heads * value_size].
inline Tensor mix_by_delta_rule(const Tensor& rows, const Tensor& weight, const Tensor& rates, const Tensor& biases,
                                double beta_scale, const Tensor& norm, double epsilon, Tensor inputs, Tensor states,
                                Tensor keys, Tensor updates, Tensor decays, const Tensor& chunks,
                                const Tensor& snapshots) {
  Tensor mixed = at::empty({rows.size(0), weight.size(0)}, rows.options());
  Tensor output = at::empty({rows.size(0), states.size(1) * states.size(3)}, rows.options());
  WorkQueue queue;
  add_delta_mixing(queue, rows, weight, rates, biases, beta_scale, norm, epsilon,
                   {inputs, states, keys, updates, decays}, chunks, snapshots, mixed, output);
  queue.run();
  return output;
}

}  // namespace headway
