"""The dashboard in a real browser: it shows the requests, asks for the key, works by keyboard and fits a phone."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from testkit.http.api import MODEL, Api, MakeApi, serving
from testkit.http.chromium import CHROMIUM, Tab, open_tab
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import until

pytestmark = [pytest.mark.deep, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]

IS_WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
CLIPPED = """Array.from(document.querySelectorAll("main *")).filter(each =>
    !each.closest("thead, summary, svg") && each.scrollWidth > each.clientWidth + 1
    && getComputedStyle(each).display !== "inline").map(each => each.id || each.textContent)"""
NUM_ROWS = "document.querySelectorAll('#requests > li').length"


async def press(tab: Tab, key: str, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        await tab.call(
            "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
            **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
        )  # fmt: skip


async def ask(api: Api, number: int, **headers: str) -> None:
    for _ in range(number):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 3}
        assert (await api.post("/v1/completions", body, **headers)).status_code == 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_shows_requests_and_fits_its_window(make_api: MakeApi, tmp_path: Path, scheme: str) -> None:
    gate = asyncio.Event()
    api = make_api(gate=gate, gate_at=3)
    await ask(api, 3)
    running = asyncio.create_task(api.complete(max_tokens=5))
    await until(lambda: bool(api.replica.running))
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        await tab.until(f"{NUM_ROWS} === 4")
        assert await tab.value("document.querySelector('#requests .state').textContent") == "decode"
        assert await tab.value("document.getElementById('model').textContent") == MODEL
        for width in (1280, 390):
            await tab.resize(width, 844, scheme)
            assert not await tab.value(IS_WIDER), width
            assert await tab.value(CLIPPED) == [], width
        gate.set()
        await running
        await tab.until("document.querySelector('#requests .state').textContent === 'completed'")
        assert await tab.value(NUM_ROWS) == 4, "a row stays when its request ends"


async def test_a_row_opens_by_keyboard_and_stays_open(api: Api, tmp_path: Path) -> None:
    await ask(api, 2)
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        await tab.until(f"{NUM_ROWS} === 2")
        await press(tab, "Tab", 9)
        await press(tab, "Enter", 13)
        opened = "document.querySelectorAll('#requests details[open] dd').length > 5"
        await tab.until(opened)
        await ask(api, 1)
        await tab.until(f"{NUM_ROWS} === 3")
        assert await tab.value(opened), "news close no row"
        focused = "document.activeElement.closest('#requests > li') === document.querySelectorAll('#requests > li')[1]"
        assert await tab.value(focused), "and take no focus"


async def test_the_page_asks_for_an_operators_key(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme", "ops", operator="ops")})
    await ask(api, 1, authorization="Bearer acme")
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        await tab.until("document.activeElement?.id === 'key'")
        for key, shown in (("acme", "needs an operator"), ("ops", "")):
            await tab.call("Input.insertText", text=key)
            await press(tab, "Enter", 13)
            error = "document.getElementById('key-error').textContent"
            await tab.until(f"document.getElementById('key').value === '' && {error}.includes({shown!r})")
        await tab.until(f"{NUM_ROWS} === 1 && document.getElementById('key-form').hidden")


async def test_a_server_that_stops_is_said_so(api: Api, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as browser:
        async with serving(api.app) as url:
            tab = await browser.enter_async_context(open_tab(f"{url}/dashboard", tmp_path / "profile"))
            await tab.until("document.getElementById('connection').textContent.startsWith('live')")
        await tab.until("document.getElementById('connection').className === 'bad'")
