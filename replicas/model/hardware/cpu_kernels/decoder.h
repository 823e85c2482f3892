// All layers of a decoder of the Llama family in one call, without Python between the operations.
#pragma once

#include <ATen/core/List.h>

#include "operations.h"

namespace headway {

// Linear layer with a packed weight. A weight of 4 or 8 bits has scales.
struct Linear {
  Tensor weight;
  OptionalTensor scales, bias;
  int64_t num_inputs() const {
    const bool has_nibbles = weight.scalar_type() == at::kByte || weight.scalar_type() == at::kShort;
    return weight.size(1) * (has_nibbles ? kGroupedInputs<Nibbles> : weight.size(3));
  }
  void add(WorkQueue& queue, const Tensor& inputs, Tensor& output) const {
    add_multiplying(queue, inputs, weight, scales, bias, output);
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

// Reader of a list of tensors. Missing tensors are empty optionals in the list.
class PartReader {
 public:
  explicit PartReader(const c10::List<OptionalTensor>& parts) : parts_(parts) {}
  bool is_at_end() const { return next_ == parts_.size(); }
  OptionalTensor any() { return parts_.get(next_++); }
  Tensor some() { return any().value(); }
  Linear linear() {
    Linear linear;
    linear.weight = some();
    linear.scales = any();
    linear.bias = any();
    return linear;
  }

 private:
  const c10::List<OptionalTensor>& parts_;
  size_t next_ = 0;
};

// Reads a layer in the order of the fields of `Layer` and `Linear`.
inline Layer read_layer(PartReader& parts) {
  Layer layer;
  layer.input_norm = parts.some();
  layer.query_key_value = parts.linear();
  layer.query_norm = parts.any();
  layer.key_norm = parts.any();
  layer.output = parts.linear();
  layer.post_attention_norm = parts.some();
  layer.gate_up = parts.linear();
  layer.down = parts.linear();
  return layer;
}
constexpr size_t kNumLayerParts = 16;

// Runs the layers. Adds their updates to residual [num_tokens, hidden_size], except the last feed-forward update, which
// is returned. `parts` holds the tensors that `read_layer` reads, layer after layer. Keys and values (`CachePart`),
// the scale of scores and the window are given for each layer; if the cache has no scales, their lists are empty. All
// layers have the same sizes.
inline Tensor run_layers(Tensor residual, const Tensor& cos, const Tensor& sin,
                         const c10::List<OptionalTensor>& parts, int64_t num_query_heads, double epsilon,
                         at::TensorList keys, at::TensorList values, at::TensorList key_scales,
                         at::TensorList value_scales, const Tensor& slots, const Tensor& chunks, const Tensor& tables,
                         at::ArrayRef<double> scales, at::IntArrayRef windows) {
  const size_t num_layers = keys.size();
  TORCH_CHECK(parts.size() == num_layers * kNumLayerParts && values.size() == num_layers &&
                  scales.size() == num_layers && windows.size() == num_layers && num_layers > 0 &&
                  (key_scales.empty() || key_scales.size() == num_layers) && key_scales.size() == value_scales.size(),
              "all must be given for each of ", num_layers, " layers");
  PartReader reader(parts);
  Layer layer = read_layer(reader);
  const int64_t num_kv_heads = keys[0].size(2), size = keys[0].size(3), width = layer.down.num_inputs();
  // Results that one operation passes to the next. All layers use the same memory, so it stays in the cache.
  const auto rows_of = [&](int64_t num) { return at::empty({residual.size(0), num}, residual.options()); };
  Tensor hidden = rows_of(residual.size(1)), update = rows_of(residual.size(1));
  Tensor heads = rows_of((num_query_heads + 2 * num_kv_heads) * size);
  Tensor attended = rows_of(num_query_heads * values[0].size(3)), gate_up = rows_of(2 * width), gated = rows_of(width);
  const auto some_heads = [&](int64_t first, int64_t num) {
    return heads.narrow(1, first * size, num * size).unflatten(1, {num, size});
  };
  const Tensor query = some_heads(0, num_query_heads), key = some_heads(num_query_heads, num_kv_heads),
               value = some_heads(num_query_heads + num_kv_heads, num_kv_heads);
  const Tensor gate = gate_up.narrow(1, 0, width), up = gate_up.narrow(1, width, width);
  const auto part_of = [](at::TensorList numbers, at::TensorList of_numbers, size_t index) {
    return CachePart{numbers[index], of_numbers.empty() ? OptionalTensor() : OptionalTensor(of_numbers[index])};
  };
  std::shared_ptr<AttentionWork> attention;
  WorkQueue queue;
  for (size_t index = 0; index < num_layers; index++) {
    if (index) layer = read_layer(reader);
    TORCH_CHECK(keys[index].sizes() == keys[0].sizes() && values[index].sizes() == values[0].sizes(),
                "all layers must have caches of one size");
    add_normalizing(queue, residual, index ? &update : nullptr, layer.input_norm, epsilon, hidden);
    layer.query_key_value.add(queue, hidden, heads);
    add_rotating(queue, query, key, cos, sin, layer.query_norm, layer.key_norm, epsilon);
    add_paged_attention(queue, query, key, value, part_of(keys, key_scales, index),
                        part_of(values, value_scales, index), slots, chunks, tables, scales[index], windows[index],
                        0.0, std::nullopt, attention, attended);
    layer.output.add(queue, attended, update);
    add_normalizing(queue, residual, &update, layer.post_attention_norm, epsilon, hidden);
    layer.gate_up.add(queue, hidden, gate_up);
    add_gating(queue, gate, up, gated);
    layer.down.add(queue, gated, update);
  }
  queue.run();
  return update;
}

}  // namespace headway
