"""Input files of batches, made of the load generator's requests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from bench.load.schedule import make_schedule
from bench.load.spec import Burst, LoadSpec, Stream

ENDPOINT = "/v1/completions"
_NOT_IN_LINES = ("stream", "priority", "user", "return_token_ids")


def write_lines(path: Path, stream: Stream, num_lines: int, seed: int, model: str = "headway-demo") -> None:
    """Write a file of `num_lines` lines sized like `stream`, in an order independent of their sizes.

    Lines are written a thousand at a time: the requests are never all in memory.
    """
    with path.open("w") as file:
        for start in range(0, num_lines, 1000):
            count = min(1000, num_lines - start)
            part = {"name": f"{stream.name}-{start}", "bursts": (Burst(count=count),), "phases": ()}
            schedule = make_schedule(LoadSpec(model=model, streams=(stream.model_copy(update=part),), seed=seed))
            file.writelines(_lines(start, (request.body for request in schedule)))


def _lines(start: int, bodies: Iterable[bytes]) -> Iterable[str]:
    for number, text in enumerate(bodies, start):
        body = {name: value for name, value in json.loads(text).items() if name not in _NOT_IN_LINES}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
        yield json.dumps(line, separators=(",", ":")) + "\n"
