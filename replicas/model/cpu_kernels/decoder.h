// All layers of a decoder of the Llama family in one call: between its small operations nothing waits for Python.
#pragma once

#include <ATen/core/List.h>

#include <deque>

#include "operations.h"

namespace headway {

// A linear layer: a packed weight, if it is of 8 bits with scales.
struct Linear {
  Tensor weight;
  OptionalTensor scales, bias;
  int64_t num_inputs() const { return weight.size(1) * weight.size(3); }
  void add(Phases& phases, const Tensor& inputs, Tensor& output) const {
    add_multiplying(phases, inputs, weight, scales, bias, output);
  }
};

struct Layer {
  Tensor input_norm;
  Linear query_key_value;
  OptionalTensor query_norm, key_norm;
  Linear output;
  Tensor post_attention_norm;
  Linear gate_up, down;
};

// Takes a layer's parts from a list in the order of `Layer` and `Linear`; where it has none, the list has nothing.
class LayerReader {
 public:
  static constexpr size_t kNumParts = 16;
  explicit LayerReader(const c10::List<OptionalTensor>& parts) : parts_(parts) {}
  Layer read() {
    Layer layer;
    layer.input_norm = some();
    layer.query_key_value = linear();
    layer.query_norm = any();
    layer.key_norm = any();
    layer.output = linear();
    layer.post_attention_norm = some();
    layer.gate_up = linear();
    layer.down = linear();
    return layer;
  }

 private:
  OptionalTensor any() { return parts_.get(next_++); }
  Tensor some() { return any().value(); }
  Linear linear() {
    Linear linear;
    linear.weight = some();
    linear.scales = any();
    linear.bias = any();
    return linear;
  }
  const c10::List<OptionalTensor>& parts_;
  size_t next_ = 0;
};

// What operations of a layer leave to the next ones. All layers use the same memory, which so stays in the cache.
class Rows {
 public:
  explicit Rows(const Tensor& like) : like_(like) {}
  // [num_tokens, width], undefined.
  Tensor& of(int64_t width) {
    if (all_.empty() || all_.back().size(1) != width) all_.push_back(at::empty({like_.size(0), width}, like_.options()));
    return all_.back();
  }

 private:
  const Tensor& like_;
  std::deque<Tensor> all_;  // a layer may be of another width than the one before it
};

// Adds to residual [num_tokens, hidden_size] what the layers give, except for the last feed-forward part: that is
// returned. `parts` holds what `LayerReader` reads, layer after layer; keys and values [num_blocks, block_size,
// num_kv_heads, size], the scale of scores and the window are given for each layer.
inline Tensor run_layers(Tensor residual, const Tensor& cos, const Tensor& sin,
                         const c10::List<OptionalTensor>& parts, int64_t num_query_heads, double epsilon,
                         at::TensorList keys, at::TensorList values, const Tensor& slots, const Tensor& chunks,
                         const Tensor& tables, at::ArrayRef<double> scales, at::IntArrayRef windows) {
  const size_t num_layers = keys.size();
  TORCH_CHECK(parts.size() == num_layers * LayerReader::kNumParts && values.size() == num_layers &&
                  scales.size() == num_layers && windows.size() == num_layers,
              "all must be given for each of ", num_layers, " layers");
  LayerReader reader(parts);
  Phases phases;
  Rows all_heads(residual), all_attended(residual), all_gate_up(residual), all_gated(residual);
  Tensor hidden = at::empty_like(residual), update = at::empty_like(residual);
  for (size_t index = 0; index < num_layers; index++) {
    const Layer layer = reader.read();
    const Tensor &layer_keys = keys[index], &layer_values = values[index];
    const int64_t num_kv_heads = layer_keys.size(2), size = layer_keys.size(3);
    const int64_t num_heads = num_query_heads + 2 * num_kv_heads;
    add_normalizing(phases, residual, index ? OptionalTensor(update) : std::nullopt, layer.input_norm, epsilon, hidden);
    Tensor& rows = all_heads.of(num_heads * size);
    layer.query_key_value.add(phases, hidden, rows);
    add_rotating(phases, rows, cos, sin, num_query_heads, num_kv_heads, layer.query_norm, layer.key_norm, epsilon);
    const Tensor heads = rows.view({rows.size(0), num_heads, size});
    Tensor& attended = all_attended.of(num_query_heads * layer_values.size(3));
    add_paged_attention(phases, heads.narrow(1, 0, num_query_heads), heads.narrow(1, num_query_heads, num_kv_heads),
                        heads.narrow(1, num_query_heads + num_kv_heads, num_kv_heads), layer_keys, layer_values, slots,
                        chunks, tables, scales[index], windows[index], 0.0, std::nullopt, attended);
    layer.output.add(phases, attended, update);
    add_normalizing(phases, residual, update, layer.post_attention_norm, epsilon, hidden);
    Tensor& gate_up = all_gate_up.of(2 * layer.down.num_inputs());
    layer.gate_up.add(phases, hidden, gate_up);
    Tensor& gated = all_gated.of(layer.down.num_inputs());
    add_gating(phases, gate_up, gated);
    layer.down.add(phases, gated, update);
  }
  phases.run();
  return update;
}

}  // namespace headway
