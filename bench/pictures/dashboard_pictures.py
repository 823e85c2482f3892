"""Pictures of the dashboards for the documents: `python -m bench.pictures.dashboard_pictures` writes into docs/images.

It serves the demo model with `make serve` and takes pictures with headless Chromium: Headway's dashboard under a load
of two tenants and a batch after a third replica has been started and one of the three was killed, and Ray's dashboard
on the way from the id of a request to the log of its replica.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
from PIL import Image

from serve_app.config import DEMO_MODEL_NAME
from serve_app.keys.key_file import digest_of
from testkit.http.chromium import CHROMIUM, Tab, open_tab
from testkit.serving.batch_calls import line, submit
from testkit.serving.ray_dashboard import ray_dashboard
from testkit.serving.served import Served, serving, wait_for

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
_OPERATOR = "ops"
_ARGUMENTS = "max_num_seqs=4 num_threads=1 cpus_per_replica=0.1 target_drain_s=1"
_MAX_REPLICAS = 3
_FORMS = {"": (1280, "light"), "-dark": (1280, "dark"), "-phone": (390, "light")}
"""Width of the window and colour scheme by the end of the picture's name."""
_HEIGHT = 900
_MAX_HEIGHT = 2000
_NUM_LINES = 3000
_SETTLE_S = 3.0
"""Time in which a page of Ray's dashboard fetches what it shows, seconds."""
_LOG = "initializing replica"
"""Text in the log of every replica."""
_MIGRATED = """Array.from(document.querySelectorAll('#requests rect.migrated'))
    .some(part => Number(part.getAttribute('width')) > 15)"""


async def take(tab: Tab, name: str, *, is_whole: bool = True) -> None:
    """Write a picture of a tab: of the page, at most `_MAX_HEIGHT` of it, or of what the window shows."""
    options: dict[str, Any] = {"captureBeyondViewport": is_whole}
    if is_whole:
        size = (await tab.call("Page.getLayoutMetrics"))["cssContentSize"]
        options["clip"] = {**size, "height": min(size["height"], _MAX_HEIGHT), "scale": 1}
    picture = await tab.call("Page.captureScreenshot", format="png", **options)
    path = IMAGES / f"{name}.png"
    whole = Image.open(io.BytesIO(base64.b64decode(picture["data"]))).convert("RGB")
    # A palette makes the file a third as large. The default method mixes rare colours, such as those of the legend.
    whole.quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    print(path, flush=True)


async def _ask(http: aiohttp.ClientSession, key: str, band: str, max_tokens: int) -> None:
    """Ask one question after the other."""
    headers = {"authorization": f"Bearer {key}", "x-headway-priority": band}
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    while True:
        async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Have two tenants ask, one of them in the band `interactive`."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as http:
        clients = [("acme", "interactive", 60)] * 4 + [("nightly", "standard", 200)] * 14
        tasks = [asyncio.create_task(_ask(http, *client)) for client in clients]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _submit_batch(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="nightly") as client:
        submit(client, *(line(f"line-{number}", model=DEMO_MODEL_NAME, max_tokens=64) for number in range(_NUM_LINES)))


@contextlib.contextmanager
def served(arguments: str, *variables: str) -> Iterator[Served]:
    """Serve the demo model with keys of two tenants and an operator."""
    with tempfile.TemporaryDirectory(prefix="hw-pictures-") as home:
        keys = Path(home) / "keys.yaml"
        owners: dict[str, dict[str, object]] = {
            name: {"tenant": name, "ceiling": "interactive"} for name in ("acme", "nightly", _OPERATOR)
        }
        owners[_OPERATOR]["operator"] = True
        keys.write_text(json.dumps({digest_of(name): owner for name, owner in owners.items()}))
        options = (f"MODEL={DEMO_MODEL_NAME}", *variables, f"ARGS={arguments} api_key_file={keys}")
        with serving(Path(home), *options, key=_OPERATOR) as application:
            yield application


async def dashboard(application: Served, profile: Path) -> None:
    """Take the pictures of Headway's dashboard."""
    async with load(application.url), open_tab(f"{application.url}/dashboard", profile) as tab:
        await asyncio.to_thread(_submit_batch, application.url)
        await tab.call("Runtime.evaluate", expression=f"sessionStorage.setItem('headway-operator-key', '{_OPERATOR}')")
        await tab.call("Page.reload")
        await tab.until("document.querySelectorAll('#requests > li').length >= 10")
        await asyncio.to_thread(_kill_one, application)
        await tab.until(_MIGRATED)
        for end, (width, scheme) in _FORMS.items():
            await tab.resize(width, _HEIGHT, scheme)
            await asyncio.sleep(0.5)
            await take(tab, f"dashboard{end}")


async def ray(application: Served, profile: Path) -> None:
    """Take the pictures of Ray's dashboard, on the way to the replica of a request."""
    body = {"model": DEMO_MODEL_NAME, "prompt": "The sea", "max_tokens": 8}
    async with aiohttp.ClientSession(application.url, headers={"authorization": "Bearer acme"}) as http:
        for number in range(20):
            headers = {"x-request-id": f"order-{4700 + number}"}
            async with http.post("/v1/completions", json=body, headers=headers) as answer:
                replica_id = answer.headers["x-model-replica"]
    async with ray_dashboard(application, profile) as dashboard:
        for number, text, following in ((1, "Serve", "Model"), (2, "Model", replica_id), (3, replica_id, None)):
            await dashboard.click(text)
            if number > 1:
                await dashboard.reload_until(_LOG)
            if following is None:
                await dashboard.tab.until(f"document.body.textContent.includes('#Model#{replica_id}')")
            else:
                await dashboard.find(following)
            await asyncio.sleep(_SETTLE_S)
            await take(dashboard.tab, f"ray-{number}", is_whole=False)


def _kill_one(application: Served) -> None:
    wait_for(lambda: len(application.replicas()) == _MAX_REPLICAS, "all replicas are known")
    psutil.Process(application.replicas()[0]["pid"]).kill()


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["dashboard", "ray"])
    options = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("There is no Chromium here.")
    with tempfile.TemporaryDirectory(prefix="hw-chromium-") as profile:
        if options.only != "ray":
            with served(f"{_ARGUMENTS} min_replicas=2 max_replicas={_MAX_REPLICAS}", "REPLICAS=2") as application:
                asyncio.run(dashboard(application, Path(profile) / "headway"))
        if options.only != "dashboard":
            with served("num_threads=1 cpus_per_replica=0.1", "REPLICAS=2") as application:
                asyncio.run(ray(application, Path(profile) / "ray"))


if __name__ == "__main__":
    main()
