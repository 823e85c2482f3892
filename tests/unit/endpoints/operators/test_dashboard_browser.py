"""The dashboard in a real browser: it shows the requests, asks for the key, works by keyboard and fits a phone."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from replicas.protocol import Band
from router.flow.flow_queue import TenantQueue
from testkit.http.api import MODEL, Api, MakeApi, serving
from testkit.http.axe import axe_core, serious_faults
from testkit.http.chromium import CHROMIUM, open_tab
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import until

pytestmark = [pytest.mark.deep, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]

IS_WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
CLIPPED = """Array.from(document.querySelectorAll("main *")).filter(each =>
    !each.closest(innerWidth > 760 ? "summary, svg, .ellipsis" : "thead, summary, svg, .ellipsis")
    && each.scrollWidth > each.clientWidth + 1
    && getComputedStyle(each).display !== "inline").map(each => each.id || each.textContent)"""
FORMS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
"""Widths of the window in pixels, and colour schemes."""
NUM_ROWS = "document.querySelectorAll('#requests > li').length"


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
        assert await tab.value("document.querySelector('#replicas td:last-child').textContent") == "only one, 4 of 4"
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
        await tab.tab_to("focused.matches('#requests summary')")
        await tab.press("Enter")
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
            await tab.press("Enter")
            error = "document.getElementById('key-error').textContent"
            if shown:
                await tab.until(f"document.getElementById('key')?.value === '' && {error}.includes({shown!r})")
        await tab.until(f"{NUM_ROWS} === 1 && document.querySelector('dialog') === null")


async def test_a_server_that_stops_is_said_so(api: Api, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as browser:
        async with serving(api.app) as url:
            tab = await browser.enter_async_context(open_tab(f"{url}/dashboard", tmp_path / "profile"))
            await tab.until("document.getElementById('connection').textContent.startsWith('live')")
        await tab.until("document.getElementById('connection').className === 'bad'")


async def test_bars_have_one_scale_and_only_some_requests_are_shown_at_first(api: Api, tmp_path: Path) -> None:
    api.replica.tpot_s = 0.05
    await api.complete(max_tokens=20)
    api.replica.tpot_s = 0.0
    await ask(api, 14)
    width = """Array.from(document.querySelectorAll('#requests > li'), row =>
        Array.from(row.querySelectorAll('rect'), part => Number(part.getAttribute('width'))).reduce((a, b) => a + b))"""
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        await tab.until(f"{NUM_ROWS} === 10")
        assert max(await tab.value(width)) == pytest.approx(1000, abs=2), "the longest of those that are shown"
        await tab.value("document.getElementById('more').click()")
        await tab.until(f"{NUM_ROWS} === 15")
        widths = await tab.value(width)
        assert widths.index(max(widths)) == 14
        assert max(widths) == pytest.approx(1000, abs=2)
        assert sorted(widths)[-2] < 500


async def test_the_last_hour_is_drawn_and_a_table_without_rows_is_hidden(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(history_times=[0.0, 20.0, 40.0])
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        await tab.until("document.querySelectorAll('#charts polyline').length === 4")
        assert await tab.value("document.querySelector('#charts polyline').points.length") == 3
        label = await tab.value("document.querySelector('#charts svg').getAttribute('aria-label')")
        assert label == "Output tokens/s over the last hour: now 13, scale to 20"
        assert await tab.value("document.getElementById('batches-section').hidden")


PLACES = """Array.from(document.querySelectorAll("#tiles > div, h2, th, #queues td:first-child, #jobs > div"))
    .map(each => each.textContent.trim() + " " + JSON.stringify(each.getBoundingClientRect()))"""


async def test_nothing_jumps_when_the_numbers_change(api: Api, tmp_path: Path) -> None:
    """The list of requests is the only part that grows."""
    tenants = {f"tenant-{number}": TenantQueue(number, 10**number) for number in range(1, 9)}
    await ask(api, 1)
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        for width in (1280, 390):
            await tab.resize(width, 844)
            api.dispatcher.queued = {}
            await tab.until("document.querySelector('#queues').textContent.includes('0') && !main.hidden")
            await tab.until("latest.queues.every(queue => queue.num_requests === 0)")
            places = {each.split("{")[1] for each in await tab.value(PLACES)}
            api.dispatcher.queued = dict.fromkeys(Band, tenants)
            await tab.until("latest.queues.every(queue => queue.num_requests === 36)")
            assert {each.split("{")[1] for each in await tab.value(PLACES)} == places, width


@pytest.fixture
def axe() -> None:
    if axe_core() is None:
        pytest.skip("there is no axe-core here, and npm cannot fetch it")


@pytest.mark.usefixtures("axe")
async def test_axe_finds_no_serious_fault(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(gate=asyncio.Event(), gate_at=3)
    api.dispatcher.queued = {Band.BATCH: {"nightly": TenantQueue(7, 700), "weekly": TenantQueue(3, 30)}}
    await ask(api, 3)
    running = asyncio.create_task(api.complete(max_tokens=5))
    await until(lambda: bool(api.replica.running))
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        await tab.until(f"{NUM_ROWS} === 4")
        await tab.value("document.querySelector('#requests > li:last-child summary').click()")
        for width, scheme in FORMS:
            await tab.resize(width, 844, scheme)
            assert await serious_faults(tab) == [], (width, scheme)
    running.cancel()


@pytest.mark.usefixtures("axe")
async def test_axe_finds_no_serious_fault_in_the_form_for_the_key(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "ops", operator="ops")})
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        await tab.until("document.activeElement?.id === 'key'")
        for width, scheme in FORMS:
            await tab.resize(width, 844, scheme)
            assert await serious_faults(tab) == [], (width, scheme)


@pytest.mark.usefixtures("axe")
async def test_axe_finds_a_fault_where_there_is_one(api: Api, tmp_path: Path) -> None:
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        await tab.until("!document.getElementById('main').hidden")
        await tab.value("document.querySelector('#h-jobs').append(document.createElement('button'))")
        assert [fault["id"] for fault in await serious_faults(tab)] == ["button-name"]
