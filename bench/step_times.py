"""Step times to choose from by name. None of these was measured here: they are stated assumptions.

`gpu-8b`: a model of 8 billion parameters in bfloat16 on one data-centre GPU. A decode step reads 16 GB of
weights at about 2 TB/s (8 ms); a decode adds its sampling and its share of KV; prefill runs at about
33,000 tokens a second; attention reads 128 KiB of KV a context token.
`gpu-70b`: the same for 70 billion parameters on four of them.
`slow-gpu`: `gpu-8b` five times slower throughout. Two processor cores that must also carry HTTP and the
clients keep up with several such replicas, where they would themselves be the bottleneck of `gpu-8b`.

Times fitted to a model that really ran come from `python -m bench.fit_step_times`.
"""

from __future__ import annotations

from bench.timed_runner import StepTimes

_GPU_8B = StepTimes(base_s=8e-3, per_decode_s=0.02e-3, per_prefill_token_s=0.03e-3, per_context_token_s=6e-8)
_GPU_70B = StepTimes(base_s=22e-3, per_decode_s=0.05e-3, per_prefill_token_s=0.08e-3, per_context_token_s=6e-8)

STEP_TIMES = {
    "gpu-8b": _GPU_8B,
    "gpu-70b": _GPU_70B,
    "slow-gpu": StepTimes(base_s=40e-3, per_decode_s=0.1e-3, per_prefill_token_s=0.15e-3, per_context_token_s=3e-7),
    "instant": StepTimes(base_s=0.0, per_decode_s=0.0, per_prefill_token_s=0.0),
}
