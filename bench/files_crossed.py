"""Files of the product that one request crosses: `python -m bench.files_crossed`.

Serves the demo model in this process, over HTTP, without Ray. Then it sends one chat request and one batch of one line.
It traces the calls of all threads from each request to its answer, and lists the files of the called functions.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.config import DEMO_MODEL_NAME, HeadwayConfig
from serve_app.http.settings import IngressSettings
from testkit.http.local_service import local_service

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("serve_app", "router", "replicas"))
_WAIT_S = 60.0


class Recorder:
    """Profile function that notes the files of calls while it is on."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._is_on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note a call; the signature is that of `sys.setprofile`."""
        if self._is_on and event == "call":
            self._files.add(frame.f_code.co_filename)

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Record until the context ends; the list then holds the product's files."""
        found: list[str] = []
        self._files.clear()
        self._is_on = True
        try:
            yield found
        finally:
            self._is_on = False
            found += sorted(file.removeprefix(f"{ROOT}/") for file in self._files if file.startswith(PACKAGES))


async def chat(http: httpx.AsyncClient) -> None:
    """Send one streamed chat request."""
    body = {
        "model": DEMO_MODEL_NAME,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
    }
    (await http.post("/v1/chat/completions", json=body)).raise_for_status()


async def batch(http: httpx.AsyncClient) -> None:
    """Upload a file of one line, run it as a batch, and download the result."""
    body = {"model": DEMO_MODEL_NAME, "prompt": "x", "max_tokens": 4}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body})
    upload = {"file": ("lines.jsonl", line.encode())}
    file = (await http.post("/v1/files", data={"purpose": "batch"}, files=upload)).raise_for_status().json()
    fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    made = (await http.post("/v1/batches", json=fields)).raise_for_status().json()
    async with asyncio.timeout(_WAIT_S):
        while made["status"] != "completed":
            await asyncio.sleep(0.05)
            made = (await http.get(f"/v1/batches/{made['id']}")).json()
    (await http.get(f"/v1/files/{made['output_file_id']}/content")).raise_for_status()


async def measure(recorder: Recorder, data_dir: Path) -> dict[str, list[str]]:
    """Return the files that each kind of request crosses."""
    model = HeadwayConfig().model_path
    options = ReplicaOptions(
        ModelOptions(model, num_threads=1), RunnerOptions(kv_cache_bytes=16 * 2**20), EngineLimits(), StreamOptions()
    )
    found = {}
    settings = IngressSettings(model=model, served_model_name=DEMO_MODEL_NAME)
    async with (
        local_service(options, settings, data_dir) as service,
        httpx.AsyncClient(base_url=service.url, timeout=_WAIT_S) as http,
    ):
        for send in (chat, batch):
            await send(http)  # what only a first request does is not counted
            with recorder.recording() as found[send.__name__]:
                await send(http)
    return found


def main() -> None:
    """Print the files, and how many there are."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    with tempfile.TemporaryDirectory() as data_dir:
        found = asyncio.run(measure(recorder, Path(data_dir)))
    sys.setprofile(None)
    for name, files in found.items():
        print(f"{name}: {len(files)} files")
        print("".join(f"  {file}\n" for file in files))


if __name__ == "__main__":
    main()
