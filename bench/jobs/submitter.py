"""Submitter of jobs that retries until each is accepted, while processes are killed, and receiver of their webhooks."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import tenacity

RETRY_LIMIT_S = 300.0
PERIOD_S = 0.25

with_retries = tenacity.Retrying(
    retry=tenacity.retry_if_exception_type((httpx.HTTPError, RuntimeError)),
    stop=tenacity.stop_after_delay(RETRY_LIMIT_S),
    wait=tenacity.wait_fixed(PERIOD_S),
    reraise=True,
)
"""Caller of functions that fail as long as a process is dead: `with_retries(function, argument, ...)`."""


@contextlib.contextmanager
def submitting(url: str, callback_url: str, period_s: float) -> Iterator[list[str]]:
    """Submit a job every `period_s` within the context; yield the ids of the accepted ones, a list that grows.

    The last job is accepted before the context ends.
    """
    job_ids: list[str] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(period_s):
            job_ids.append(with_retries(_submit, url, callback_url, f"job-{len(job_ids) + 1}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield job_ids
    finally:
        is_over.set()
        thread.join(RETRY_LIMIT_S)


def _submit(url: str, callback_url: str, key: str) -> str:
    body = {"prompt": f"def {key}(", "max_tokens": 16, "callback_url": callback_url}
    headers = {"idempotency-key": key}
    response = httpx.post(f"{url}/generate", json=body, headers=headers, timeout=30.0, trust_env=False)
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


@dataclass(frozen=True, slots=True)
class Receiver:
    """Address of a receiver of webhooks, and what it has received; its threads append, others read."""

    url: str
    ids: defaultdict[str, list[str]]
    """Ids of the webhooks about a batch's or job's end, one for each delivery, by the id of the batch or job."""


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver on a free port of this machine."""
    ids: defaultdict[str, list[str]] = defaultdict(list)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            event = json.loads(self.rfile.read(int(self.headers["content-length"])))
            ids[event["data"]["id"]].append(self.headers["webhook-id"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Receiver(f"http://127.0.0.1:{server.server_address[1]}/hook", ids)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
