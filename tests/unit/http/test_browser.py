"""Pages of other origins in a real browser: `fetch` works from the allowed ones and only from them."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from testkit.http.api import MODEL, REPLY, MakeApi, serving
from testkit.http.scripted_dispatcher import ScriptedToken, write_keys

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_LIMIT_S = 120.0

pytestmark = [pytest.mark.deep, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]

SCRIPT = """
const body = {model: "MODEL", max_tokens: NUM_TOKENS, messages: [{role: "user", content: "hello"}]};
const headers = {"authorization": "Bearer acme", "content-type": "application/json", "x-stainless-os": "Web"};
const send = (fields, key = headers) => fetch("API/v1/chat/completions",
    {method: "POST", headers: key, body: JSON.stringify({...body, ...fields})});
const attempts = {
    async models() { return (await (await fetch("API/v1/models/", {headers})).json()).data[0].id; },
    async chat() { return (await (await send({})).json()).choices[0].message.content; },
    async stream() {
        const answer = await send({stream: true});
        const lines = (await new Response(answer.body).text()).trim().split("\\n\\n");
        const texts = lines.slice(0, -1).map(line => JSON.parse(line.slice(6)).choices[0].delta.content ?? "");
        return [lines.length > 3, texts.join(""), lines.at(-1)];
    },
    async error() {
        const answer = await send({temperature: 9});
        return [answer.status, (await answer.json()).error.code];
    },
    async no_key() { const answer = await send({}, {"content-type": "application/json"}); return answer.status; },
    async headers() {
        const answer = await send({}), names = ["x-request-id", "x-ratelimit-limit-requests", "openai-processing-ms"];
        return names.map(name => answer.headers.has(name));
    },
};
async function run() {
    const report = {};
    for (const [name, attempt] of Object.entries(attempts)) {
        try { report[name] = await attempt(); } catch (error) { report[name] = error.name; }
    }
    const form = new FormData();
    form.append("purpose", "user_data");
    form.append("file", new Blob(["text"]), "a.txt");
    await fetch("OPEN/v1/files", {method: "POST", mode: "no-cors", body: form}).catch(() => null);
    await fetch("/report", {method: "POST", body: JSON.stringify(report)});
}
run();
"""


class Page:
    """Server of a web page that calls an API, and of the page's report."""

    def __init__(self) -> None:
        self.script = ""
        self.report: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.app = Starlette(routes=[Route("/", self._show), Route("/report", self._take, methods=["POST"])])

    async def _show(self, request: Request) -> Response:
        return HTMLResponse(f"<!doctype html><title>page</title><script>{self.script}</script>")

    async def _take(self, request: Request) -> Response:
        self.report.set_result(await request.json())
        return Response(status_code=204)


@contextlib.asynccontextmanager
async def browser(url: str, folder: Path) -> AsyncIterator[None]:
    """Open a page in Chromium, in which every name is this machine."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *options, f"--user-data-dir={folder}", "--host-resolver-rules=MAP *.test 127.0.0.1", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.parametrize(
    ("host", "allowed", "is_allowed"),
    [
        ("127.0.0.1", "loopback", True),
        ("page.test", "loopback", False),
        ("page.test", "http://page.test:PORT", True),
        ("127.0.0.1", None, False),
    ],
)
async def test_fetch_works_from_allowed_origins_only(
    make_api: MakeApi, script: list[ScriptedToken], tmp_path: Path, host: str, allowed: str | None, is_allowed: bool
) -> None:
    page = Page()
    async with contextlib.AsyncExitStack() as stack:
        port = (await stack.enter_async_context(serving(page.app))).rpartition(":")[2]
        settings = {
            "allowed_origins": allowed and allowed.replace("PORT", port),
            "allowed_hosts": "localhost,127.0.0.1,[::1]",
        }
        api = make_api(settings={**settings, "api_key_file": write_keys(tmp_path, "acme")})
        without_keys = make_api(settings=settings)
        url, open_url = [await stack.enter_async_context(serving(each.app)) for each in (api, without_keys)]
        page.script = SCRIPT.replace("MODEL", MODEL).replace("NUM_TOKENS", str(len(script)))
        page.script = page.script.replace("API", url).replace("OPEN", open_url)
        await stack.enter_async_context(browser(f"http://{host}:{port}/", tmp_path / "profile"))
        async with asyncio.timeout(START_LIMIT_S):
            report = await page.report
    works = {
        "models": MODEL,
        "chat": REPLY,
        "stream": [True, REPLY, "data: [DONE]"],
        "error": [400, "invalid_value"],
        "no_key": 401,
        "headers": [True, True, True],
    }
    assert report == (works if is_allowed else dict.fromkeys(works, "TypeError"))
    assert len(without_keys.jobs.store.files) == is_allowed
