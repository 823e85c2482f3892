"""Mixed load: streams with seeds, jobs, prompt batches and probes, and what their clients see."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.jobs.submitter import PERIOD_S, RETRY_LIMIT_S, with_retries
from serve_app.cli.clients.events import read_events

NUM_STREAMS, STREAM_TOKENS = 4, 200
BATCH_PROMPTS = 60
_NUM_BODIES, _LIMIT_S, _PROBE_PERIOD_S = 6, 120.0, 0.1


@dataclass
class Seen:
    """Everything that the clients have seen; their threads append, others read."""

    streams: list[str] = field(default_factory=list)
    """Outcome of each stream: `unchanged`, `changed`, or the failure."""
    probes: list[str] = field(default_factory=list)
    """Failures of probes."""
    served_s: list[float] = field(default_factory=list)
    """Times at which a probe was served."""
    refused_jobs: list[str] = field(default_factory=list)
    accepted_s: list[float] = field(default_factory=list)
    """Times at which a job was accepted."""
    job_ids: list[str] = field(default_factory=list)
    batch_ids: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Text of each stream that another one should have."""

    def marks(self) -> dict[str, int]:
        """Return the lengths of the lists, from which `since` counts."""
        return {name: len(getattr(self, name)) for name in ("streams", "probes", "refused_jobs")}

    def since(self, marks: dict[str, int]) -> dict[str, dict[str, int]]:
        """Return the outcomes since then, counted."""
        return {name: dict(Counter(getattr(self, name)[start:])) for name, start in marks.items()}


def longest_gap_s(times: list[float], begin_s: float, end_s: float) -> float:
    """Return the longest time without an event between two times."""
    within = [begin_s, *(moment for moment in list(times) if begin_s <= moment <= end_s), end_s]
    return max(later - earlier for earlier, later in itertools.pairwise(within))


class Load:
    """Clients of one application, each in a thread."""

    def __init__(self, url: str, model: str, callback_url: str) -> None:
        self.seen = Seen()
        self._url = url
        self._http = httpx.Client(base_url=url, timeout=_LIMIT_S, trust_env=False)
        self._callback_url = callback_url
        self._bodies = [
            {"model": model, "prompt": f"{number} the quick brown fox", "seed": number, "max_tokens": STREAM_TOKENS,
             "ignore_eos": True, "stream": True}
            for number in range(_NUM_BODIES)
        ]  # fmt: skip
        self._probe = {"model": model, "prompt": "x", "max_tokens": 1, "priority": 0}
        self._is_over = threading.Event()
        self._may_submit = threading.Lock()
        self._undisturbed: list[str] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run all clients within the context; the undisturbed texts are read first."""
        self._undisturbed = [self._read(body)[1] for body in self._bodies]
        clients: list[Callable[[], None]] = [*[self._streams] * NUM_STREAMS, self._probes, self._jobs]
        threads = [threading.Thread(target=client, daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join(RETRY_LIMIT_S)

    @contextlib.contextmanager
    def without_new_jobs(self) -> Iterator[None]:
        """Accept no new job within the context."""
        with self._may_submit:
            yield

    def submit_batch(self) -> None:
        """Submit a prompt batch; it must be accepted."""
        body = {"prompts": [f"{number}" for number in range(BATCH_PROMPTS)], "max_tokens": 8}
        self.seen.batch_ids.append(with_retries(self._accepted, "/v1/batch/async", body, {})["batch_id"])

    def submit_jobs_to(self, callback_url: str, number: int) -> None:
        """Submit jobs whose webhooks go elsewhere."""
        for _ in range(number):
            body = {"prompt": "x", "max_tokens": 2, "callback_url": callback_url}
            self.seen.job_ids.append(with_retries(self._accepted, "/generate", body, {})["job_id"])

    def ended_job(self, job_id: str) -> str:
        """Return the status of an ended job; a job that is not known is `lost`.

        Raises:
            RuntimeError: it has not ended.
        """
        answer = self._http.get(f"/status/{job_id}")
        if answer.status_code == 404:
            return "lost"
        status = str(answer.raise_for_status().json()["status"])
        if status in ("queued", "running"):
            raise RuntimeError(f"job {job_id} is {status}")
        return status

    def outputs(self, batch_id: str) -> list[dict[str, Any]]:
        """Return the outputs of an ended batch.

        Raises:
            RuntimeError: it has not ended.
        """
        answer = self._http.get(f"/v1/batch/{batch_id}?limit=1000")
        batch = answer.raise_for_status().json()
        if batch["status"] in ("pending", "processing"):
            raise RuntimeError(f"batch {batch_id} is {batch['status']}")
        found: list[dict[str, Any]] = batch["outputs"]
        return found

    def _streams(self) -> None:
        number = threading.get_ident() % _NUM_BODIES
        while not self._is_over.is_set():
            number = (number + 1) % _NUM_BODIES
            failure, text = self._read(self._bodies[number])
            if failure is not None:
                self.seen.streams.append(failure)
                time.sleep(PERIOD_S)
                continue
            is_same = text == self._undisturbed[number]
            self.seen.streams.append("unchanged" if is_same else "changed")
            if not is_same:
                self.seen.changed.append(text)

    def _read(self, body: dict[str, Any]) -> tuple[str | None, str]:
        """Read one stream; return its failure, if any, and its text."""
        text = ""
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=body, timeout=_LIMIT_S, trust_env=False
            ) as answer:
                if answer.status_code != 200:
                    return _failure(answer.status_code, answer.read()), ""
                for event in read_events(answer):
                    if "error" in event:
                        return f"ended by {event['error']['code']}", ""
                    text += "".join(choice["text"] for choice in event["choices"])
        except httpx.TransportError as error:
            return ("cut" if text else "no answer") + f" ({type(error).__name__})", ""
        return None, text

    def _probes(self) -> None:
        while not self._is_over.is_set():
            try:
                answer = httpx.post(f"{self._url}/v1/completions", json=self._probe, timeout=_LIMIT_S, trust_env=False)
                if answer.status_code == 200:
                    self.seen.served_s.append(time.monotonic())
                else:
                    self.seen.probes.append(_failure(answer.status_code, answer.content))
            except httpx.TransportError as error:
                self.seen.probes.append(type(error).__name__)
            time.sleep(_PROBE_PERIOD_S)

    def _jobs(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            key = f"job-{len(self.seen.job_ids)}-{time.monotonic_ns()}"
            body = {"prompt": "def f(", "max_tokens": 8, "callback_url": self._callback_url}
            with self._may_submit:
                job = with_retries(self._accepted, "/generate", body, {"idempotency-key": key})
                self.seen.job_ids.append(job["job_id"])
                self.seen.accepted_s.append(time.monotonic())

    def _accepted(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        try:
            answer = httpx.post(f"{self._url}{path}", json=body, headers=headers, timeout=30.0, trust_env=False)
        except httpx.TransportError as error:
            self.seen.refused_jobs.append(type(error).__name__)
            raise
        if answer.status_code != 202:
            self.seen.refused_jobs.append(_failure(answer.status_code, answer.content))
            raise RuntimeError(f"{answer.status_code} {answer.text[:300]}")
        accepted: dict[str, Any] = answer.json()
        return accepted


def _failure(status: int, body: bytes) -> str:
    """Return status and code of an error; a body without OpenAI's error object is told as such."""
    try:
        return f"{status} {json.loads(body)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"{status} without an error object"
