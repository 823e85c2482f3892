"""Options of `vllm serve` that are no settings here, each with the sentence that says what takes its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

_GPUS = "A replica runs on the GPUs of one node (tensor_parallel_size); Ray places replicas (num_replicas)."
_TEXT_ONLY = "Models read and write text only."
_ADAPTERS = "Adapters are not served beside a model; merge them into its weights and serve the result."
_SPECULATION = "There is no speculative decoding."
_GENERATES = "Models generate text; embeddings and scores are not served."
_FORMAT = "Weights are read from safetensors or a GGUF file as they are."
_REMOTE_CODE = "Code that comes with a model is never run; models of the architectures that transformers has need none."
_OWN_TOKENIZER = "The tokenizer is that of the model's directory; put another tokenizer.json there."
_REVISION = "The newest revision is fetched; fetch another with `hf download --revision`, and name its directory."
_CONFIG_JSON = "The model is as its config.json says; change the file in the model's directory."
_OFFLOADING = "Weights and KV cache stay on their device; lower kv_cache_bytes, or set quantization."
_CACHE_SIZE = "Set kv_cache_bytes for a CPU, gpu_memory_utilization for a GPU."
_STEPS = "Steps have prompts in chunks; set max_num_batched_tokens, max_num_partial_prefills or target_itl_ms."
_ORDER = "Requests run by band, then fairly between tenants; send `priority` or `x-headway-priority` with a request."
_GRAPHS = "The sizes of CUDA graphs are chosen at the start; set enforce_eager to do without graphs."
_KERNELS = "Kernels are chosen at the start; set attention_backend or compile_layers."
_GRAMMARS = "llguidance enforces structured outputs, as each request asks (docs/structured-outputs.md)."
_DEFAULTS = "Write the values into a generation_config.json, and name its folder in generation_config."
_TEMPLATES = "Send `chat_template_kwargs` with a request, or name another template in chat_template."
_FAMILY = "Calls and reasoning are parsed as the chat template has them; tool_call_parser names another form of both."
_TLS = "TLS ends at a proxy in front of the server (docs/security.md)."
_PROXY = "Put a proxy in front of the server, and give it the rule."
_HTTP_LIMITS = "The limits of HTTP headers are fixed (docs/limits.md)."
_LOGS = "Each request has one access line without its text (off: --no-access-log); errors are in the log's file."
_METRICS = "/metrics has every metric, and otlp_traces_endpoint traces (docs/metrics.md)."
_PROFILER = "Use torch's or NVIDIA's profiler on the process of a model replica."
_CORS = "CORS is set by allowed_origins alone."
_PROCESSES = "Set num_ingress_replicas for HTTP processes, num_tokenizer_threads for the threads of each."
_ONE_ENGINE = "The engine and its scheduler are fixed."
_NO_TRANSFER = "KV blocks stay in their replica; prompts go to the replica that has their prefix."
_USAGE = "A request asks for it with `stream_options.include_usage`."
_FINGERPRINT = "`system_fingerprint` is a hash of the model and its settings."
_ROUTES = "/load, /tokenizer_info and the header `x-request-id` are always there."
_PAGES = "/docs and /openapi.json are always there, and load nothing from elsewhere."
_MOE = "Experts are in the replica of their model, on one GPU."
_MAMBA = "Models with recurrent states have a fixed form of them."

_GROUPS = {
    _GPUS: """
        pipeline_parallel_size=1 prefill_context_parallel_size=1
        decode_context_parallel_size=1 dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
        distributed_executor_backend=ray|uni data_parallel_rank data_parallel_start_rank data_parallel_size_local
        data_parallel_address data_parallel_rpc_port data_parallel_backend=ray data_parallel_hybrid_lb=false
        data_parallel_external_lb=false data_parallel_supervisor_port dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold master_addr master_port nnodes=1
        node_rank=0 distributed_timeout_seconds disable_nccl_for_dp_synchronization=false
        disable_custom_all_reduce=true|false max_parallel_loading_workers headless=false
    """,
    _MOE: """
        enable_expert_parallel=false moe_backend=auto all2all_backend enable_elastic_ep=false enable_dbo=false
        ubatch_size=0 dbo_decode_token_threshold dbo_prefill_token_threshold enable_eplb=false eplb_config
        expert_placement_strategy num_redundant_experts=0 eplb_window_size eplb_step_interval
        eplb_log_balancedness=false
    """,
    _TEXT_ONLY: """
        language_model_only=true limit_mm_per_prompt enable_mm_embeds=false interleave_mm_strings=false
        media_io_kwargs mm_processor_kwargs disable_mm_preprocessor_cache=true mm_processor_cache_gb=0
        mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only=false mm_encoder_tp_mode
        mm_encoder_attn_backend skip_mm_profiling=true video_pruning_rate=0 allowed_local_media_path
        allowed_media_domains enable_multimodal_encoder_data_parallel=false disable_chunked_mm_input=true|false
        enable_mm_processor_stats=false ec_transfer_config
    """,
    _ADAPTERS: """
        lora_modules enable_lora=false enable_lora_bias=false max_loras max_lora_rank lora_extra_vocab_size
        lora_dtype long_lora_scaling_factors max_cpu_loras fully_sharded_loras=false default_mm_loras
        enable_tower_connector_lora=false specialize_active_lora=false enable_prompt_adapter=false
        max_prompt_adapters max_prompt_adapter_token prompt_adapters qlora_adapter_name_or_path
    """,
    _SPECULATION: """
        speculative_config speculative_model speculative_model_quantization num_speculative_tokens=0
        speculative_disable_mqa_scorer=true|false speculative_draft_tensor_parallel_size speculative_max_model_len
        speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min
        spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold
        typical_acceptance_sampler_posterior_alpha disable_logprobs_during_spec_decoding=true|false
        num_lookahead_slots=0
    """,
    _GENERATES: """
        task=auto|generate runner=auto|generate convert=auto|none pooler_config override_pooler_config
        io_processor_plugin enable_flash_late_interaction=false enable_prompt_embeds=false
    """,
    _FORMAT: """
        load_format=auto|safetensors|gguf config_format=auto|hf safetensors_load_strategy=lazy
        model_loader_extra_config ignore_patterns use_tqdm_on_load=true|false pt_load_map_location=cpu
        allow_deprecated_quantization=false weight_transfer_config
    """,
    _REMOTE_CODE: "trust_remote_code=false code_revision model_impl=auto|transformers",
    _OWN_TOKENIZER: "tokenizer tokenizer_mode=auto|fast|hf skip_tokenizer_init=false tokenizer_revision",
    _REVISION: "revision",
    _CONFIG_JSON: """
        hf_config_path hf_overrides rope_scaling rope_theta disable_sliding_window=false override_attention_dtype
        override_neuron_config
    """,
    _MAMBA: "mamba_cache_dtype=auto mamba_ssm_cache_dtype=auto mamba_block_size mamba_cache_mode",
    "The hub's cache is the folder in the environment's HF_HUB_CACHE.": "download_dir",
    "The hub's token is that of `hf auth login`, or the environment's HF_TOKEN.": "hf_token",
    _OFFLOADING: """
        cpu_offload_gb=0 cpu_offload_params offload_backend offload_group_size=0 offload_num_in_group
        offload_prefetch_step offload_params kv_offloading_size kv_offloading_backend enable_sleep_mode=false
    """,
    "A preempted sequence is computed again, and needs no swap space.": "swap_space=0 preemption_mode=recompute",
    _CACHE_SIZE: "kv_cache_memory_bytes num_gpu_blocks_override",
    "Each token of an 8-bit KV cache has its own scale.": "calculate_kv_scales=true",
    "The hash of KV blocks is always BLAKE2b.": "prefix_caching_hash_algo",
    _STEPS: """
        enable_chunked_prefill=true max_long_partial_prefills long_prefill_token_threshold num_scheduler_steps=1
        multi_step_stream_outputs=true|false scheduler_delay_factor=0 kv_sharing_fast_prefill=false
    """,
    "Set coalesce_interval_s or max_stream_chunks_per_s.": "stream_interval=1",
    _ORDER: "scheduling_policy=priority scheduler_cls",
    _GRAPHS: """
        cudagraph_capture_sizes cuda_graph_sizes max_cudagraph_capture_size max_seq_len_to_capture
        cudagraph_metrics=false
    """,
    _KERNELS: """
        compilation_config attention_config kernel_config enable_flashinfer_autotune=false optimization_level
        performance_mode disable_cascade_attn=true|false additional_config
    """,
    _GRAMMARS: """
        structured_outputs_config guided_decoding_backend=auto|guidance guided_decoding_disable_fallback=true
        guided_decoding_disable_any_whitespace=false guided_decoding_disable_additional_properties=false
    """,
    "A request asks for alternatives to tokens and their chances by its own fields.": "logprobs_mode=raw_logprobs",
    "Send `logit_bias`, `bad_words` or a grammar with a request.": "logits_processor_pattern logits_processors",
    "Send `seed` with a request: its tokens depend on nothing else, such as what ran before.": "seed",
    _DEFAULTS: "override_generation_config",
    _TEMPLATES: """
        default_chat_template_kwargs chat_template_content_format=auto trust_request_chat_template=false
        response_role=assistant exclude_tools_when_tool_choice_none=false cohere_is_reasoning_model=true
        cohere_format
    """,
    _FAMILY: """
        enable_auto_tool_choice=true enable_reasoning=true reasoning_parser reasoning_parser_plugin
        tool_parser_plugin
    """,
    "Tools are run by the client, which sends their results.": "tool_server",
    "A request asks for it with `return_tokens_as_token_ids`.": "return_tokens_as_token_ids=false",
    _USAGE: "enable_force_include_usage=false",
    "A request asks for it with `include_metrics`.": "enable_per_request_metrics=false",
    "`usage` always has `prompt_tokens_details`.": "enable_prompt_tokens_details=true",
    _ROUTES: "enable_server_load_tracking=true enable_tokenizer_info_endpoint=true enable_request_id_headers=true",
    _PAGES: "disable_fastapi_docs=false enable_offline_docs=true",
    _FINGERPRINT: "fingerprint_mode=hash fingerprint_value",
    _TLS: "ssl_keyfile ssl_certfile ssl_ca_certs enable_ssl_refresh=false ssl_cert_reqs=0 ssl_ciphers",
    _PROXY: "root_path middleware uds",
    _HTTP_LIMITS: "h11_max_incomplete_event_size h11_max_header_count",
    _CORS: "allow_credentials=false allowed_methods allowed_headers",
    "The protocol is HTTP.": "grpc=false tokens_only=false",
    _LOGS: """
        log_config_file max_log_len enable_log_outputs=false enable_log_deltas=false log_error_stack=true
        uvicorn_log_level disable_uvicorn_access_log=false disable_access_log_for_endpoints
        disable_log_requests=true enable_log_requests=false
    """,
    _METRICS: """
        show_hidden_metrics_for_version collect_detailed_traces kv_cache_metrics=false kv_cache_metrics_sample
        enable_mfu_metrics=false enable_logging_iteration_details=false disable_log_stats=true
        aggregate_engine_logging=false kv_events_config
    """,
    _PROFILER: "profiler_config ray_workers_use_nsight=false enable_layerwise_nvtx_tracing=false",
    _PROCESSES: """
        renderer_num_workers tokenizer_pool_size=0 tokenizer_pool_type tokenizer_pool_extra_config
        disable_frontend_multiprocessing=false disable_async_output_proc=false
        intial_incremental_detokenization_offset
    """,
    _ONE_ENGINE: """
        worker_cls=auto worker_extension_cls use_v2_block_manager=true disable_hybrid_kv_cache_manager=true|false
        fail_on_environ_validation=true|false
    """,
    _NO_TRANSFER: "kv_transfer_config",
}
"""Map from a sentence to its options. Behind `=` are the values that ask for what Headway does anyway."""

RENAMED = {
    "data_parallel_size": "num_replicas",
    "api_server_count": "num_ingress_replicas",
    "shutdown_timeout": "graceful_shutdown_timeout_s",
}
"""Map from vLLM's name of a setting to the name here."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "max_model_len": {"auto": "None", "-1": "None"},
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "attention_backend": {"FLASH_ATTN": "flash", "TRITON_ATTN": "triton", "TORCH_SDPA": "gather"},
    "allowed_origins": {'["*"]': "*"},
}
"""Map from a setting that vLLM has, too, to its values there and what they are called here."""

SHORT_FLAGS = {
    "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp",
    "prefill_context_parallel_size": "-pcp", "decode_context_parallel_size": "-dcp", "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr", "data_parallel_size_local": "-dpl", "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp", "data_parallel_backend": "-dpb", "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe", "enable_expert_parallel": "-ep", "api_server_count": "-asc",
    "compilation_config": "-cc", "attention_config": "-ac", "speculative_config": "-sc", "optimization_level": "-O",
    "nnodes": "-n", "node_rank": "-r", "quantization": "-q",
}  # fmt: skip
"""Map from a setting to vLLM's short form of its option."""

_FORMATS_IN_CHECKPOINTS = frozenset(
    [
        "awq",
        "awq_marlin",
        "gptq",
        "gptq_marlin",
        "bitsandbytes",
        "compressed-tensors",
        "gguf",
        "modelopt",
        "mxfp4",
        "torchao",
        "hqq",
    ]
)
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])")
_MAX_VALUE_CHARS = 40
_YES_OR_NO = frozenset(("true", "false"))


@dataclass(frozen=True, slots=True)
class VllmOption:
    """Option of `vllm serve` without a setting here."""

    sentence: str
    """Reason why it is refused, and what to use instead."""
    accepted: frozenset[str]
    """Values that ask for what Headway does anyway."""

    @property
    def is_flag(self) -> bool:
        """True if the option is yes or no."""
        return bool(self.accepted) and self.accepted <= _YES_OR_NO


def _options() -> dict[str, VllmOption]:
    options = {}
    for sentence, entries in _GROUPS.items():
        for name, _, values in (entry.partition("=") for entry in entries.split()):
            assert name not in options, name
            options[name] = VllmOption(sentence, frozenset(values.split("|")) - {""})
    return options


REFUSED = _options()
"""Map from the name of an option, with underscores, to what takes its place."""


def read_count(text: str) -> int | None:
    """Return the number that a text such as `16k` (16,000), `16K` (16,384) or `1.5m` stands for; None: it has no unit.

    Raises:
        ValueError: it is no whole number.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return None
    digits, unit = match.groups()
    power = "kmgt".index(unit.lower()) + 1
    count = Decimal(digits) * (1000**power if unit.islower() else 1024**power)
    if count % 1:
        hint = f"; did you mean {digits}{unit.lower()}?" if unit.isupper() else ""
        raise ValueError(f"{text} is no whole number{hint}")
    return int(count)


def read_vllm_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which options of vLLM's are settings of Headway's, or left out if they ask for nothing else.

    Raises:
        ValueError: naming each option that asks for something else, with what takes its place.
    """
    refusals = [refusal for name, value in given.items() if (refusal := _refusal(name, value)) is not None]
    refusals += [
        f"{name} is vLLM's name of {own}; both are given"
        for name, own in RENAMED.items()
        if {name, own} <= given.keys()
    ]
    if refusals:
        raise ValueError(" ".join(refusals))
    kept = {RENAMED.get(name, name): value for name, value in given.items() if name not in REFUSED}
    return {name: VALUES[name].get(str(value), value) if name in VALUES else value for name, value in kept.items()}


def _refusal(name: str, value: object) -> str | None:
    """Return the sentence that refuses an option; None: it is accepted, or none of vLLM's."""
    if name == "quantization" and str(value) in _FORMATS_IN_CHECKPOINTS:
        return f"quantization={value} is not needed: the format of quantized weights is read from the checkpoint."
    if name not in REFUSED or _text(value) in REFUSED[name].accepted:
        return None
    return f"{name}={_text(value)[:_MAX_VALUE_CHARS]} is refused. {REFUSED[name].sentence}"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
