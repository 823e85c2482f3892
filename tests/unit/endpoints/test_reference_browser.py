"""The API reference in a real browser: it fits every window, links unfold parts, "try it" works, also by keyboard."""

from pathlib import Path

import pytest

from testkit.http.api import MODEL, REPLY, Api, MakeApi, serving
from testkit.http.axe import axe_core, serious_faults
from testkit.http.chromium import CHROMIUM, open_tab
from testkit.http.scripted_dispatcher import write_keys

pytestmark = [pytest.mark.deep, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]

READY = "document.getElementById('model').textContent && !document.querySelector('.try').hidden"
CHAT = "document.getElementById('POST/v1/chat/completions')"
OPEN_ALL = "document.querySelectorAll('details').forEach(each => each.open = true)"
BROKEN_NAMES = """Array.from(document.querySelectorAll("dt > code, summary .path"))
    .filter(name => name.getClientRects().length > 1).map(name => name.textContent)"""
"""Names that are broken over lines."""


@pytest.mark.parametrize("width", [1280, 390])
async def test_everything_fits_and_axe_finds_no_serious_fault(api: Api, tmp_path: Path, width: int) -> None:
    async with serving(api.app) as url, open_tab(f"{url}/docs", tmp_path / "profile") as tab:
        await tab.until(READY)
        await tab.resize(width, 844)
        closed = await tab.value("document.documentElement.scrollHeight")
        assert closed < (9_000 if width == 1280 else 14_000)
        await tab.value(OPEN_ALL)
        assert await tab.value("document.documentElement.scrollWidth") == width
        wider = "Array.from(document.querySelectorAll('main *')).filter(each => !each.closest('pre')"
        wider += f" && each.getBoundingClientRect().right > {width}).map(each => each.outerHTML)"
        assert await tab.value(wider) == []
        assert await tab.value(BROKEN_NAMES) == []
        await tab.value("document.querySelectorAll('details').forEach((each, index) => each.open = index < 3)")
        if axe_core() is not None:
            for scheme in ("light", "dark"):
                await tab.resize(width, 844, scheme)
                assert await serious_faults(tab) == [], scheme


async def test_an_example_names_this_server_and_a_link_unfolds_an_object(api: Api, tmp_path: Path) -> None:
    async with serving(api.app) as url, open_tab(f"{url}/docs#ChatMessage", tmp_path / "profile") as tab:
        await tab.until(READY)
        assert await tab.value("document.getElementById('ChatMessage').open")
        assert f"{url}/v1/chat/completions" in await tab.value(f"{CHAT}.querySelector('.sample').textContent")


async def test_a_request_is_tried_by_keyboard_alone(api: Api, tmp_path: Path) -> None:
    async with serving(api.app) as url, open_tab(f"{url}/docs", tmp_path / "profile") as tab:
        await tab.until(READY)
        await tab.tab_to(f"focused === {CHAT}.querySelector('summary')")
        await tab.press("Enter")
        await tab.until(f"{CHAT}.open")
        await tab.tab_to(f"focused === {CHAT}.querySelector('.try button')")
        await tab.press("Enter")
        await tab.until(f"{CHAT}.querySelector('.status').textContent.startsWith('200 after')")


async def test_a_request_is_tried_and_a_key_asked_for(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme")}, stops_at=40)
    async with serving(api.app) as url, open_tab(f"{url}/docs", tmp_path / "profile") as tab:
        await tab.until(READY)
        await tab.value(f"{CHAT}.open = true; {CHAT}.querySelector('.try button').click()")
        await tab.until("document.activeElement?.id === 'key'")
        await tab.call("Input.insertText", text="acme")
        await tab.value("document.querySelector('dialog form').requestSubmit()")
        await tab.until(f"{CHAT}.querySelector('.status').textContent.startsWith('200 after')")
        answer = await tab.value(f"JSON.parse({CHAT}.querySelector('.answer').textContent)")
        assert answer["model"] == MODEL
        assert answer["choices"][0]["message"]["content"].startswith(REPLY[:5])
        body = f"{CHAT}.querySelector('.body')"
        await tab.value(f"{body}.value = {body}.value.replace('64', '-1'); {CHAT}.querySelector('.try button').click()")
        await tab.until(f"{CHAT}.querySelector('.status').textContent.startsWith('400 after')")
        assert "max_tokens" in await tab.value(f"{CHAT}.querySelector('.answer').textContent")
