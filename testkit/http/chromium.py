"""Headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from testkit.limits import START_LIMIT_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}
_HAS_VISIBLE_FOCUS = """getComputedStyle(document.activeElement).outlineStyle === "solid"
    || document.activeElement === document.body"""
_MOST_STOPS = 100
"""More than a page has places that Tab reaches before the wanted one."""
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--hide-scrollbars"),
)


class Tab:
    """One page in the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; return its result."""
        call_id = next(self._ids)
        await self._socket.send_json({"id": call_id, "method": method, "params": params})
        async with asyncio.timeout(START_LIMIT_S):
            while True:
                message: dict[str, Any] = await self._socket.receive_json()
                if message.get("id") == call_id:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        options = {"returnByValue": True, "awaitPromise": True}
        result = await self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true; return its value."""
        async with asyncio.timeout(START_LIMIT_S):
            while not (found := await self.value(expression)):
                await asyncio.sleep(0.1)
        return found

    async def press(self, key: str) -> None:
        """Press Enter, Escape or Tab."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key], **text
            )

    async def tab_to(self, condition: str) -> None:
        """Press Tab until the focused element meets a condition. The focus must be visible at each element before it.

        Raises:
            AssertionError: no such element is reached, or a focus is not visible.
        """
        for _ in range(_MOST_STOPS):
            await self.press("Tab")
            assert await self.value(_HAS_VISIBLE_FOCUS), await self.value("document.activeElement.outerHTML")
            if await self.value(f"(focused => {condition})(document.activeElement)"):
                return
        raise AssertionError(f"Tab reaches nothing with {condition}")

    async def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window, pixels, and the preferred colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


@contextlib.asynccontextmanager
async def open_tab(url: str, folder: Path) -> AsyncIterator[Tab]:
    """Open a page; `folder` is for the browser's profile."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            port = await _debugging_port(folder / "DevToolsActivePort")
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                [page] = [target for target in json.loads(await response.text()) if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                await tab.until("document.readyState === 'complete' && location.protocol === 'http:'")
                yield tab
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _debugging_port(path: Path) -> int:
    async with asyncio.timeout(START_LIMIT_S):
        while True:
            if await asyncio.to_thread(path.exists) and (text := await asyncio.to_thread(path.read_text)):
                return int(text.splitlines()[0])
            await asyncio.sleep(0.1)
