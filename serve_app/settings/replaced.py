"""Settings that no longer exist, each with the sentence that says what replaces it."""

from __future__ import annotations

from collections.abc import Iterable

_SLO = "Set slo: `slo={0}=TTFT/TPOT`, in YAML `slo: {{{0}: [TTFT, TPOT]}}`, either may be none."
_QUEUE = "Set max_queue: `max_queue={0}`, in YAML `max_queue: {{{1}}}`."
_USUAL = _QUEUE.format(
    "interactive=REQUESTS/TOKENS,standard=REQUESTS/TOKENS",
    "interactive: [REQUESTS, TOKENS], standard: [REQUESTS, TOKENS]",
)
_BATCH = _QUEUE.format("batch=REQUESTS/TOKENS", "batch: [REQUESTS, TOKENS]")
_WAIT = "Set max_wait_s: `max_wait_s={0}=SECONDS`, in YAML `max_wait_s: {{{0}: SECONDS}}`, or none."

REPLACED = {
    "access_log_socket": "`headway serve --access-log` prints the access lines.",
    "autoscale_interval_s": "Reports to Serve's controller are always 0.2 s apart.",
    "batch_tpot_target_s": _SLO.format("batch"),
    "batch_ttft_target_s": _SLO.format("batch"),
    "coalesce_tokens": "8 waiting tokens always make a chunk; set coalesce_interval_s or max_stream_chunks_per_s.",
    "health_check_period_s": "Health checks are always 1 s apart; set health_check_timeout_s.",
    "ingress_target_streams": "An ingress always has a target of 200 requests; set max_ingress_replicas.",
    "interactive_tpot_target_s": _SLO.format("interactive"),
    "interactive_ttft_target_s": _SLO.format("interactive"),
    "max_body_objects": "It is always a quarter of max_body_values; set that.",
    "max_choices": "A request always has at most 128 choices; set max_prompts.",
    "max_deltas_per_s": "Set max_stream_chunks_per_s.",
    "max_drain_wait_s": "Streams of a replica that is to leave always have 5 s to end before they move.",
    "max_echo_logprobs": "A reply always has at most 131,072 log probabilities of prompt tokens; set max_logprobs.",
    "max_interactive_wait_s": _WAIT.format("interactive"),
    "max_messages": "A conversation always has at most 2,048 messages; set max_body_bytes or max_body_values.",
    "max_queued_batch_requests": _BATCH,
    "max_queued_batch_tokens": _BATCH,
    "max_queued_preparation_bytes": "It is always 32 times max_body_bytes; set that.",
    "max_queued_preparations": "It is always the number of interactive requests in max_queue; set that.",
    "max_queued_requests": _USUAL,
    "max_queued_tokens": _USUAL,
    "max_standard_wait_s": _WAIT.format("standard"),
    "max_unfinished_batches": "A tenant may always have 10,000 unfinished batches and jobs; set max_unfinished_lines.",
    "num_bound_early": "Requests always wait in the ingress until a replica has room.",
    "routing_policy": "The policy is always least_tokens.",
    "scale_to_zero_delay_s": "It is the second number of downscale_delay_s, such as `downscale_delay_s=60/300`.",
    "standard_tpot_target_s": _SLO.format("standard"),
    "standard_ttft_target_s": _SLO.format("standard"),
    "stall_timeout_s": "It is always 12 times max_replica_silence_s; set that.",
}
"""Map from the name of a former setting to the sentence."""


def refuse_replaced(names: Iterable[str]) -> None:
    """Refuse former settings, whatever their values.

    Raises:
        ValueError: naming each, with what replaces it.
    """
    refusals = [f"{name} is no longer a setting. {REPLACED[name]}" for name in names if name in REPLACED]
    if refusals:
        raise ValueError(" ".join(refusals))
