"""Time of a request from its arrival at an idle ingress to the engine: `python -m bench.server.intake_time`.

The prompt has 1,000 token ids. The application is served over an engine that computes nothing, in the throughput
profile. By turns with it, a bare Serve application is served in the same profile, whose ingress passes as many numbers
to another deployment: the time from its call to that deployment is that of a bare handle call. The median of the
product should exceed the bare one by at most 1.5 ms. Both are measured within one machine, on its unix clock.

No `from __future__ import annotations` here: Serve reads the annotations of deployments at run time.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

from bench.record import percentile, write
from bench.serving import TIMED, serving

_BARE = "bench.server.intake_time:build"
_MODEL = "demo"
_MOST_EXTRA_MS = 1.5
_FIRST_ID, _END_ID = 10, 500
_PAUSE_S = 0.02
_NUM_FIRST = 20
"""Requests of each turn that are not counted."""


class Callee:
    """Deployment that tells the time at which a call arrives."""

    async def __call__(self, numbers: list[int]) -> float:
        """Return the unix time."""
        return time.time()


class Caller:
    """Ingress of the bare application."""

    def __init__(self, callee: DeploymentHandle[Any]) -> None:
        self._callee = callee

    async def __call__(self, request: Request) -> float:
        """Return the seconds from a handle call with the numbers of the body to its arrival."""
        if request.method != "POST":
            return 0.0
        numbers = (await request.json())["prompt"]
        called_s = time.time()
        arrived_s: float = await self._callee.remote(numbers)
        return arrived_s - called_s


def build(arguments: dict[str, str]) -> serve.Application:
    """Return the bare application, for `bench.serving`."""
    return serve.deployment(Caller).bind(serve.deployment(Callee).bind())


def bodies(num_ids: int, num_requests: int) -> list[dict[str, Any]]:
    """Return the bodies of a turn."""
    rng = random.Random(0)
    return [
        {"model": _MODEL, "max_tokens": 1, "prompt": [rng.randrange(_FIRST_ID, _END_ID) for _ in range(num_ids)]}
        for _ in range(num_requests)
    ]


def post_all(url: str, requests: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """Post bodies one after the other, and return the answers."""
    answers = []
    with httpx.Client() as client:
        for body in requests:
            answers.append(client.post(url, json=body).raise_for_status())
            time.sleep(_PAUSE_S)
    return answers


def product_turn(options: argparse.Namespace) -> list[float]:
    """Return the milliseconds of each request of a turn from its arrival to the engine."""
    with tempfile.TemporaryDirectory(prefix="hw-intake-") as folder:
        path = Path(folder) / "intake"
        fields = {"served_model_name": _MODEL, "intake_path": path, "max_model_len": 2 * options.ids}
        with serving(TIMED, fields, throughput_profile=True) as served:
            post_all(f"{served.url}/v1/completions", bodies(options.ids, options.requests + _NUM_FIRST))
        return [float(line) * 1e3 for line in path.read_text().split()][-options.requests :]


def bare_turn(options: argparse.Namespace) -> list[float]:
    """Return the milliseconds of each bare handle call of a turn."""
    with serving(_BARE, {}, throughput_profile=True) as served:
        answers = post_all(served.url, bodies(options.ids, options.requests + _NUM_FIRST))
    return [float(answer.text) * 1e3 for answer in answers][-options.requests :]


def main() -> None:
    """Serve both by turns, print the medians and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=1000, help="token ids of a prompt")
    parser.add_argument("--requests", type=int, default=200, help="requests of a turn")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    product, bare = [], []
    for _ in range(options.turns):
        product.append(product_turn(options))
        bare.append(bare_turn(options))
    product_ms, bare_ms = (median([median(turn) for turn in turns]) for turns in (product, bare))
    extra_ms = product_ms - bare_ms
    print(f"to the engine {product_ms:.2f} ms, bare handle call {bare_ms:.2f} ms: {extra_ms:.2f} ms more")
    print(f"at most {_MOST_EXTRA_MS} ms more: {'kept' if extra_ms <= _MOST_EXTRA_MS else 'not kept'}")
    figures = {
        "num_ids": options.ids,
        "num_requests": options.requests,
        "product_ms": product_ms,
        "bare_ms": bare_ms,
        "extra_ms": extra_ms,
        "turns": [
            {"product_ms": median(ours), "product_p99_ms": percentile(ours, 99), "bare_ms": median(theirs)}
            for ours, theirs in zip(product, bare, strict=True)
        ],
    }
    print(write("intake_time", figures))


if __name__ == "__main__":
    main()
