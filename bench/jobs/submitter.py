"""Submitter of jobs that retries until each is accepted, while processes are killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

RETRY_LIMIT_S = 300.0
PERIOD_S = 0.25

T = TypeVar("T")


@dataclass(slots=True)
class JobSubmitter:
    """Submitter in a thread of its own; it retries each job until it is accepted."""

    url: str
    callback_url: str
    period_s: float
    ids: list[str] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop once the last job is accepted."""
        assert self._thread is not None
        self._is_over.set()
        self._thread.join(RETRY_LIMIT_S)

    def _run(self) -> None:
        number = 0
        while not self._is_over.wait(self.period_s):
            number += 1
            self.ids.append(with_retries(lambda key=f"job-{number}": self._submit(key)))  # type: ignore[misc]

    def _submit(self, key: str) -> str:
        body = {"prompt": f"def {key}(", "max_tokens": 16, "callback_url": self.callback_url}
        response = httpx.post(
            f"{self.url}/generate", json=body, headers={"idempotency-key": key}, timeout=30.0, trust_env=False
        )
        if response.status_code != httpx.codes.ACCEPTED:
            raise RuntimeError(f"{response.status_code} {response.text[:300]}")
        return str(response.json()["job_id"])


def ended_job(url: str, job_id: str) -> str:
    """Return the status of an ended job.

    Raises:
        RuntimeError: the job has not ended.
    """
    status = str(httpx.get(f"{url}/status/{job_id}", timeout=30.0, trust_env=False).raise_for_status().json()["status"])
    if status in ("queued", "running"):
        raise RuntimeError(f"job {job_id} is {status}")
    return status


def with_retries(ask: Callable[[], T]) -> T:
    """Return the result of `ask`, retried on errors up to `RETRY_LIMIT_S`: the process it calls may be dead for now."""
    deadline_s = time.monotonic() + RETRY_LIMIT_S
    while True:
        try:
            return ask()
        except (httpx.HTTPError, RuntimeError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(PERIOD_S)
