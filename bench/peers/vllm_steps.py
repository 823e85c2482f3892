"""CPU time of vLLM's steps outside the device; runs in vLLM's own virtual environment.

`bench.engine.scheduler_step --vllm-python` starts it. Each line of its input describes a trace in JSON; the answer is a
line with the milliseconds of each step. A step is what vLLM's engine core and front end do for it:
`AsyncScheduler.schedule`, `update_from_output` and `OutputProcessor.process_outputs`, with statistics. The messages
between their two processes are not part of it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


class VllmSteps:
    """vLLM's scheduler and output processor with the sequences of one trace, which decode a step ahead."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self._text: list[int] = trace["text"]
        self._num_steps = 0
        config = (
            importlib.import_module("vllm")
            .EngineArgs(
                model=trace["model"],
                dtype="float32",
                max_model_len=trace["max_model_len"],
                max_num_seqs=trace["max_num_seqs"],
                max_num_batched_tokens=trace["max_num_batched_tokens"],
                block_size=trace["block_size"],
                enable_prefix_caching=True,
                async_scheduling=True,
                hf_overrides={"max_position_embeddings": trace["max_model_len"]},
            )
            .create_engine_config()
        )
        config.cache_config.num_gpu_blocks = trace["num_blocks"]
        hashing = importlib.import_module("vllm.utils.hashing")
        cache_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        hash_of = hashing.get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        cache_utils.init_none_hash(hash_of)
        self._hasher = cache_utils.get_request_block_hasher(trace["block_size"], hash_of)
        self._scheduler = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler(
            vllm_config=config,
            kv_cache_config=_cache_config(trace),
            structured_output_manager=importlib.import_module("vllm.v1.structured_output").StructuredOutputManager(
                config
            ),
            block_size=trace["block_size"],
            log_stats=True,
        )
        tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(trace["model"])
        self._processor = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor(
            tokenizer, log_stats=True
        )
        self._outputs = importlib.import_module("vllm.v1.outputs")
        self._statistics = importlib.import_module("vllm.v1.metrics.stats").IterationStats
        for number, prompt in enumerate(trace["prompts"]):
            self._add(f"r{number}", prompt, trace["max_tokens"], trace["temperature"], number)

    def steps_ms(self, num_steps: int, num_sequences: int) -> list[float]:
        """Return the milliseconds of `num_steps` steps in which all sequences get a token."""
        steps_ms: list[float] = []
        ahead = self._scheduler.schedule()
        while len(steps_ms) < num_steps:
            results = self._results(ahead)
            started_s = time.thread_time()
            step, ahead = ahead, self._scheduler.schedule()
            outputs = self._scheduler.update_from_output(step, results)[0]
            shown = self._processor.process_outputs(outputs.outputs, outputs.timestamp, self._statistics())
            step_s = time.thread_time() - started_s
            if len(shown.request_outputs) == num_sequences:
                steps_ms.append(step_s * 1e3)
        return steps_ms

    def _results(self, step: Any) -> Any:
        """Return tokens of the text for a step, as a runner has them."""
        self._num_steps += 1
        ids = list(step.num_scheduled_tokens)
        tokens = [[self._text[(row * 31 + self._num_steps) % len(self._text)]] for row in range(len(ids))]
        return self._outputs.ModelRunnerOutput(ids, {name: row for row, name in enumerate(ids)}, tokens)

    def _add(self, name: str, prompt: list[int], max_tokens: int, temperature: float, seed: int) -> None:
        sampling = importlib.import_module("vllm.sampling_params")
        params = sampling.SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=0.95, seed=seed, ignore_eos=True,
            output_kind=sampling.RequestOutputKind.DELTA,
        )  # fmt: skip
        request = importlib.import_module("vllm.v1.engine").EngineCoreRequest(
            request_id=name, prompt_token_ids=prompt, mm_features=None, sampling_params=params, pooling_params=None,
            arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
            external_req_id=name,
        )  # fmt: skip
        self._processor.add_request(request, None)
        sequence = importlib.import_module("vllm.v1.request").Request
        self._scheduler.add_request(sequence.from_engine_core_request(request, self._hasher))


def _cache_config(trace: dict[str, Any]) -> Any:
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    spec = interface.FullAttentionSpec(
        block_size=trace["block_size"], num_kv_heads=1, head_size=64, dtype=importlib.import_module("torch").float32
    )
    return interface.KVCacheConfig(trace["num_blocks"], [], [interface.KVCacheGroupSpec(["layer"], spec)])


def main() -> None:
    """Answer each trace of the input."""
    os.environ.update(_ENVIRONMENT)
    for line in sys.stdin:
        trace = json.loads(line)
        steps = VllmSteps(trace)
        print(json.dumps(steps.steps_ms(trace["num_steps"], len(trace["prompts"]))), flush=True)


if __name__ == "__main__":
    main()
