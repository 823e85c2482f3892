"""The real application over `TimedRunner`s: `serve run bench.timed_app:build key=value`.

Ingress, router, engine and scheduler are the real ones; only the device is replaced. The tokenizer is that of the named
model (by default the bundled demo model). Takes every field of `HeadwayConfig` and those of `TimedConfig`.

No `from __future__ import annotations` here: Serve reads the annotation of `build` at run time.
"""

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator
from ray import serve

from bench.routing.baselines import POLICIES, BaselineFlow
from replicas.engine.batch import ScheduledBatch
from serve_app.app import build_with
from serve_app.config import HeadwayConfig
from testkit.engine.timed_runner import STEP_TIMES, StepTimes, TimedRunner, TimedStep

if TYPE_CHECKING:
    from replicas.engine.batch import IncrementalDecoder
    from replicas.model_replica import Backend
    from replicas.options import ReplicaOptions
    from replicas.protocol import GenerateRequest

ENGINE_THREAD = "engine"
"""Name of the engine's thread for the operating system."""


class TimedConfig(HeadwayConfig):
    """Configuration of a timed application: the real one's fields and these."""

    model: str | None = None
    num_blocks: int = Field(default=8192, ge=1)
    """KV blocks of a replica."""
    step_times: str = "gpu-8b"
    """Duration of steps: a name in `testkit.engine.timed_runner`."""
    detokenize: bool = True
    """true: replicas turn tokens into text; false: they omit the text, to save CPU with many replicas."""
    baseline_policy: str | None = None
    """Routing policy to compare with: a name in `bench.routing.baselines`; none: the product's own."""
    intake_path: str | None = None
    """File to which replicas append the seconds from a request's arrival at an ingress to its arrival in the engine;
    none: they append nothing."""
    max_queued_per_replica: int = Field(default=0, ge=0)
    """Requests of each band that a baseline gives a replica beyond its slots; 0: they wait in the ingress."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.step_times not in STEP_TIMES:
            raise ValueError(f"step_times ({self.step_times}) must be one of {', '.join(STEP_TIMES)}")
        if self.baseline_policy is not None and self.baseline_policy not in POLICIES:
            raise ValueError(f"baseline_policy ({self.baseline_policy}) must be one of {', '.join(POLICIES)}")
        if self.max_queued_per_replica and self.baseline_policy is None:
            raise ValueError(
                f"max_queued_per_replica ({self.max_queued_per_replica}) needs a baseline_policy, and there is none"
            )
        return self


def build(config: TimedConfig) -> serve.Application:
    """Return the application, for `serve run` and `bench.serving`."""
    plain = HeadwayConfig(**config.model_dump(include=set(HeadwayConfig.model_fields)))
    loader = TimedBackendLoader(STEP_TIMES[config.step_times], config.num_blocks, config.detokenize, config.intake_path)
    if config.baseline_policy is None:
        return build_with(plain, loader)
    return build_with(plain, loader, BaselineFlow(config.baseline_policy, config.max_queued_per_replica))


class NamedThreadRunner(TimedRunner):
    """Timed runner that names its thread for the operating system, so that its processor time can be told apart."""

    _has_named = False

    def launch(self, batch: ScheduledBatch) -> TimedStep:
        """Begin a step."""
        if not self._has_named:
            self._has_named = True
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(ENGINE_THREAD)
        return super().launch(batch)


@dataclass(frozen=True, slots=True)
class TimedBackendLoader:
    """Factory of a timed replica's backend, called in the replica's process."""

    step_times: StepTimes
    num_blocks: int
    has_text: bool
    intake_path: str | None

    def __call__(self, options: "ReplicaOptions") -> "Backend":
        """Return a `TimedRunner` with the vocabulary, context length and tokenizer of the named model."""
        from replicas.model.loading.tokenizer import make_decoder
        from replicas.model_replica import Backend
        from replicas.text.tokenizer_files import load_tokenizer

        model = json.loads((Path(options.model.path) / "config.json").read_text())
        eos = model["eos_token_id"]
        eos_token_ids = frozenset(eos if isinstance(eos, list) else [eos])
        tokenizer = load_tokenizer(options.model.path) if self.has_text else None

        def decoders(request: "GenerateRequest") -> "IncrementalDecoder":
            """Return the decoder of a request that the engine takes now."""
            if self.intake_path is not None and request.arrival_unix_s is not None:
                with Path(self.intake_path).open("a") as file:
                    file.write(f"{time.time() - request.arrival_unix_s}\n")
            return make_decoder(tokenizer, request.prompt_token_ids)

        return Backend(
            runner=NamedThreadRunner(self.step_times, model["vocab_size"], max(eos_token_ids)),
            decoders=decoders,
            num_blocks=self.num_blocks,
            max_model_len=options.model.max_model_len or model["max_position_embeddings"],
            vocab_size=model["vocab_size"],
            eos_token_ids=eos_token_ids,
            dtype="none",
            device="timed",
        )
