"""Driver that measures one engine and prints a line `RESULT {json}` per figure; every runner ends in `main`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.peers.engine import (
    MAX_CONCURRENCY,
    EngineFactory,
    Events,
    PeerEngine,
    PeerRequest,
    decode_step_ms,
    equal_requests,
    mixed_requests,
    summary,
)
from bench.peers.machine import ProcessorMeter, alone, peak_memory_bytes

MODES = ("workload", "single", "decode")
RESULT = "RESULT "
DTYPES: dict[str, Literal["bfloat16", "float32"]] = {"bf16": "bfloat16", "fp32": "float32"}
"""Names of torch dtypes by option value."""
_SINGLE_TOKENS = 128


def main(
    make_engine: EngineFactory, name: str, add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
) -> None:
    """Load the engine, measure it in every mode of `--modes`, close it."""
    arguments = _parse(name, add_arguments)
    # A session of its own is a scheduling group of its own, whose priority `alone` can raise.
    with contextlib.suppress(OSError):
        os.setsid()
    started_s = time.perf_counter()
    engine = make_engine(arguments)
    about = {
        "engine": name, "model": arguments.tag, "dtype": arguments.dtype, "note": arguments.note,
        "load_s": round(time.perf_counter() - started_s, 2),
    }  # fmt: skip
    batches = [int(batch) for batch in arguments.batches.split(",")]
    measurement = Measurement(engine, arguments.conc, arguments.reps, batches)
    try:
        for mode in arguments.modes.split(","):
            with alone(arguments.lock, engine.pids()):
                for record in measurement.of(mode):
                    print(RESULT + json.dumps({**about, **record}), flush=True)
    finally:
        engine.close()


def _parse(name: str, add_arguments: Callable[[argparse.ArgumentParser], None] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--model", required=True, help="directory or file of the model, in the engine's format")
    parser.add_argument("--tag", default="", help="the model's name in the records")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batches", default="1,4,16,32", help="batch sizes of mode decode")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--conc", type=int, default=MAX_CONCURRENCY, help="sequences in the engine at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="", help="text for the records")
    parser.add_argument(
        "--lock",
        type=Path,
        default=Path(tempfile.gettempdir()) / "perf.lock",
        help="lock file that lets one measurement run at a time",
    )
    if add_arguments is not None:
        add_arguments(parser)
    return parser.parse_args()


def add_headway_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the limits of Headway's engine."""
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-mib", type=int, default=1024)
    parser.add_argument("--quantization", choices=["none", "int4", "int8"], default="none")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8", "int8"], default="auto")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of an engine in each mode, after a warm-up."""

    engine: PeerEngine
    concurrency: int
    num_repetitions: int
    batches: Sequence[int]

    def of(self, mode: str) -> Iterator[dict[str, Any]]:
        """Yield the records of one mode: mixed requests, a single request, or decode steps at several batch sizes."""
        self.engine.run(equal_requests(2, 64, 8, seed=9), self.concurrency)
        measured = {"workload": self._workload, "single": self._single, "decode": self._decode}[mode]()
        for record in measured:
            yield {"mode": mode, **record, "when": time.strftime("%H:%M:%S")}

    def _workload(self) -> Iterator[dict[str, Any]]:
        self.engine.run(mixed_requests(16, seed=7, longest_output=24), self.concurrency)
        for repetition in range(self.num_repetitions):
            requests = mixed_requests()
            events, machine = self._run(requests, self.concurrency)
            wrong = [r.number for r in requests if len(events.token_s.get(r.number, ())) != r.num_output_tokens]
            yield {
                "rep": repetition, "conc": self.concurrency, **summary(events), "wrong_len": len(wrong), **machine
            }  # fmt: skip

    def _single(self) -> Iterator[dict[str, Any]]:
        for repetition in range(self.num_repetitions):
            requests = equal_requests(1, _SINGLE_TOKENS, _SINGLE_TOKENS, seed=100 + repetition)
            events, machine = self._run(requests, self.concurrency)
            times = events.token_s[0]
            per_token_s = (times[-1] - times[0]) / (len(times) - 1)
            yield {
                "rep": repetition,
                "n": len(times),
                "ttft_ms": round((times[0] - events.started_s) * 1e3, 2),
                "tpot_ms": round(per_token_s * 1e3, 3),
                "decode_tok_s": round(1 / per_token_s, 2),
                **machine,
            }

    def _decode(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches:
            steps_ms = []
            for repetition in range(self.num_repetitions):
                num_tokens = 65 if batch < 32 else 49
                requests = equal_requests(batch, _SINGLE_TOKENS, num_tokens, seed=200 + 10 * batch + repetition)
                events, machine = self._run(requests, max(self.concurrency, batch))
                step_ms = decode_step_ms(events)
                if step_ms is not None:
                    steps_ms.append(step_ms)
            step_ms = statistics.median(steps_ms) if steps_ms else None
            yield {
                "batch": batch,
                "step_ms": None if step_ms is None else round(step_ms, 3),
                "steps": [round(each, 3) for each in steps_ms],
                "tok_s": None if step_ms is None else round(batch / step_ms * 1e3, 2),
                **machine,
            }

    def _run(self, requests: list[PeerRequest], concurrency: int) -> tuple[Events, dict[str, float]]:
        pids = self.engine.pids()
        meter = ProcessorMeter(pids)
        events = self.engine.run(requests, concurrency)
        shares = meter.shares()
        return events, {
            "cpu_own": round(shares.own, 1),
            "cpu_other": round(shares.other, 1),
            "steal": round(shares.steal, 2),
            "peak_rss_mb": round(peak_memory_bytes(pids) / 2**20, 1),
        }
