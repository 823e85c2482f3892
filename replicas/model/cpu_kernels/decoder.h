// All layers of a decoder of the Llama family in one call: between its small operations nothing waits for Python.
#pragma once

#include <ATen/core/List.h>

#include "operations.h"

namespace headway {

// A linear layer: a packed weight, if it is of 8 bits with scales.
struct Linear {
  Tensor weight;
  OptionalTensor scales, bias;
  int64_t num_inputs() const { return weight.size(1) * weight.size(3); }
  Tensor operator()(const Tensor& inputs, int64_t num_outputs) const {
    return scales ? multiply_by_int8(inputs, weight, *scales, bias)
                  : multiply_by_weight(inputs, weight, num_outputs, bias);
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

// What `attend_paged` takes, of all layers.
struct PagedBatch {
  at::TensorList keys, values;
  const Tensor &slots, &chunks, &tables;
  at::ArrayRef<double> scales;
  at::IntArrayRef windows;
};

// Attention over hidden [num_tokens, hidden_size], up to its output projection.
inline Tensor attend_layer(const Layer& layer, const Tensor& hidden, const Tensor& cos, const Tensor& sin,
                           int64_t num_query_heads, double epsilon, const PagedBatch& batch, size_t index) {
  const Tensor& keys = batch.keys[index];
  const int64_t num_kv_heads = keys.size(2);
  const int64_t num_heads = num_query_heads + 2 * num_kv_heads;
  Tensor rows = layer.query_key_value(hidden, num_heads * keys.size(3));
  rotate_heads(rows, cos, sin, num_query_heads, num_kv_heads, layer.query_norm, layer.key_norm, epsilon);
  const Tensor heads = rows.view({rows.size(0), num_heads, keys.size(3)});
  const Tensor attended = attend_paged(
      heads.narrow(1, 0, num_query_heads), heads.narrow(1, num_query_heads, num_kv_heads),
      heads.narrow(1, num_query_heads + num_kv_heads, num_kv_heads), keys, batch.values[index], batch.slots,
      batch.chunks, batch.tables, batch.scales[index], batch.windows[index], 0.0, std::nullopt);
  return layer.output(attended.view({rows.size(0), num_query_heads * keys.size(3)}), hidden.size(1));
}

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
  const PagedBatch batch{keys, values, slots, chunks, tables, scales, windows};
  LayerReader reader(parts);
  OptionalTensor update;
  for (size_t index = 0; index < num_layers; index++) {
    const Layer layer = reader.read();
    Tensor hidden = add_and_normalize(residual, update, layer.input_norm, epsilon);
    update = attend_layer(layer, hidden, cos, sin, num_query_heads, epsilon, batch, index);
    hidden = add_and_normalize(residual, update, layer.post_attention_norm, epsilon);
    const int64_t width = layer.down.num_inputs();
    update = layer.down(gate_rows(layer.gate_up(hidden, 2 * width)), hidden.size(1));
  }
  return *update;
}

}  // namespace headway
