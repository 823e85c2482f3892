// Registration of the kernels as torch operations, `torch.ops.headway.*`. torch releases Python's GIL during a call.
#include <torch/library.h>

#include "decoder.h"
#include "hybrid_decoder.h"
#include "operations.h"
#include "recurrent_operations.h"

namespace headway {

TORCH_LIBRARY(headway, library) {
  library.def(
      "attend_paged(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor(c!)? key_scales, Tensor(d!)? value_scales, Tensor slots, Tensor chunks, Tensor tables, float scale, "
      "int window, float softcap, Tensor? sinks) -> Tensor");
  library.def(
      "attend_texts(Tensor query, Tensor key, Tensor value, Tensor texts, float scale, int window) -> Tensor");
  library.def("add_and_normalize(Tensor(a!) residual, Tensor? update, Tensor weight, float epsilon) -> Tensor");
  library.def(
      "rotate_heads(Tensor(a!) rows, Tensor cos, Tensor sin, int num_query_heads, int num_kv_heads, "
      "Tensor? query_norm, Tensor? key_norm, float epsilon) -> ()");
  library.def("gate_rows(Tensor gate_up) -> Tensor");
  library.def(
      "multiply_by_groups(Tensor inputs, Tensor weight, Tensor scales, int num_outputs, Tensor? bias) -> Tensor");
  library.def("multiply_by_int8(Tensor inputs, Tensor weight, Tensor scales, Tensor? bias) -> Tensor");
  library.def("multiply_heads(Tensor inputs, Tensor weights, int num_outputs) -> Tensor");
  library.def("multiply_by_weight(Tensor inputs, Tensor weight, int num_outputs, Tensor? bias) -> Tensor");
  library.def(
      "convolve_states(Tensor inputs, Tensor weight, Tensor? bias, bool has_silu, Tensor(a!) stored, Tensor chunks, "
      "Tensor snapshots) -> Tensor");
  library.def(
      "advance_states(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor(a!) states, "
      "Tensor(b!) keys, Tensor(c!) updates, Tensor(d!) decays, Tensor chunks, Tensor snapshots) -> Tensor");
  library.def(
      "mix_by_delta_rule(Tensor rows, Tensor weight, Tensor rates, Tensor biases, float beta_scale, Tensor norm, "
      "float epsilon, Tensor(a!) inputs, Tensor(b!) states, Tensor(c!) keys, Tensor(d!) updates, Tensor(e!) decays, "
      "Tensor chunks, Tensor snapshots) -> Tensor");
  library.def(
      "run_layers(Tensor(a!) residual, Tensor cos, Tensor sin, Tensor?[] parts, int num_query_heads, float epsilon, "
      "Tensor(b!)[] keys, Tensor(c!)[] values, Tensor(d!)[] key_scales, Tensor(e!)[] value_scales, Tensor slots, "
      "Tensor chunks, Tensor tables, float[] scales, int[] windows) -> Tensor");
  library.def(
      "run_hybrid_layers(Tensor(a!) residual, Tensor cos, Tensor sin, Tensor?[] parts, int[] is_recurrent, "
      "int num_query_heads, float epsilon, float scale, Tensor(b!)[] keys, Tensor(c!)[] values, "
      "Tensor(d!)[] key_scales, Tensor(e!)[] value_scales, Tensor(f!)[] inputs, Tensor(g!)[] states, "
      "Tensor(h!)[] state_keys, Tensor(i!)[] updates, Tensor(j!)[] decays, Tensor slots, Tensor chunks, "
      "Tensor tables, Tensor state_chunks, Tensor snapshots) -> Tensor");
}

TORCH_LIBRARY_IMPL(headway, CPU, library) {
  library.impl("attend_paged", &attend_paged);
  library.impl("attend_texts", &attend_texts);
  library.impl("add_and_normalize", &add_and_normalize);
  library.impl("rotate_heads", &rotate_heads);
  library.impl("gate_rows", &gate_rows);
  library.impl("multiply_by_groups", &multiply_by_groups);
  library.impl("multiply_by_int8", &multiply_by_int8);
  library.impl("multiply_heads", &multiply_heads);
  library.impl("multiply_by_weight", &multiply_by_weight);
  library.impl("convolve_states", &convolve_states);
  library.impl("advance_states", &advance_states);
  library.impl("mix_by_delta_rule", &mix_by_delta_rule);
  library.impl("run_layers", &run_layers);
  library.impl("run_hybrid_layers", &run_hybrid_layers);
}

}  // namespace headway
