"""The page for chats in a real browser, before the real engine and a scripted model, by keyboard alone."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions
from serve_app.http_app import IngressSettings
from testkit.http.axe import axe_core, serious_faults
from testkit.http.chromium import CHROMIUM, Tab, open_tab
from testkit.http.local_service import local_service
from testkit.http.scripted_dispatcher import write_keys
from testkit.model.scripted_checkpoint import Script, write_scripted_checkpoint

pytestmark = [pytest.mark.deep, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]

MODEL = "scripted"
FORMS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
MARKDOWN = """# Tides

The sea rises **twice** a day, see [tides](https://example.org/tides) and [this](javascript:alert(1)).
<img src=x onerror=alert(1)>

1. high
2. low
   - spring tide

```python
def tide(hour): return 2.5 * cos(hour)  # a line that is longer than the window of any phone, and therefore scrolls
```

| harbour | range |
|---|---|
| Brest | 7.3 m |
"""
SCRIPTS = (
    Script("Hello."),
    Script(MARKDOWN, ("the tides",)),
    Script("<think>\nThe tenths decide.\n</think>\n\n9.9 is larger.", ("9.9 or 9.11",), rank=1),
    Script('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', ("in Paris",), rank=2),
    Script("It is sunny in Paris.", ("18 degrees",), rank=3),
    Script("word " * 1500, ("without end",), rank=4),
)
LAST = "document.querySelector('#messages > :last-child')"
IS_WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_checkpoint(tmp_path_factory.mktemp("scripted"), SCRIPTS)


@dataclass
class Chat:
    """The page, and what a visitor does there."""

    tab: Tab
    url: str

    async def write(self, text: str) -> None:
        """Write into the focused field, which may not be ready yet."""
        while not await self.tab.value("document.activeElement.value"):
            await self.tab.call("Input.insertText", text=text)

    async def ask(self, text: str, *, is_answered: bool = True) -> None:
        """Send a message, and wait for the end of the answer."""
        await self.tab.until("document.activeElement.id === 'input'")
        await self.write(text)
        await self.tab.press("Enter")
        await self.tab.until(f"messages.some(message => message.content.includes({text!r}))")
        if is_answered:
            await self.tab.until(f"running === null && {LAST}.classList.contains('assistant')")

    async def text(self, selector: str) -> Any:
        return await self.tab.value(f"{LAST}.querySelector({selector!r})?.textContent")

    async def reload(self) -> None:
        await self.tab.value("window.isOld = true")
        await self.tab.call("Page.reload")
        await self.tab.until("!window.isOld && document.readyState === 'complete'")


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
async def chat(checkpoint: Path, tmp_path: Path, settings: dict[str, Any]) -> AsyncIterator[Chat]:
    options = ReplicaOptions(
        ModelOptions(str(checkpoint), dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**24),
        EngineLimits(max_num_seqs=4, max_num_batched_tokens=512),
    )
    ingress = IngressSettings(
        model=str(checkpoint), served_model_name=MODEL, ray_dashboard_url="http://127.0.0.1:8265", **settings
    )
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(local_service(options, ingress))
        tab = await stack.enter_async_context(open_tab(service.url, tmp_path / "profile"))
        await tab.until("document.getElementById('model').textContent")
        await tab.resize(1280, 800)
        yield Chat(tab, service.url)


async def test_a_first_chat_needs_no_reading(chat: Chat) -> None:
    await chat.ask("Hi")
    assert await chat.text(".content") == "Hello."
    note = await chat.text(".note")
    assert "tokens" in note and "first after" in note and note.endswith("standard")
    assert await chat.tab.value("document.getElementById('model').textContent") == MODEL
    assert await chat.tab.value("document.getElementById('ray').href") == "http://127.0.0.1:8265/"


async def test_markdown_becomes_nodes_and_html_stays_text(chat: Chat) -> None:
    await chat.ask("Tell me about the tides")
    shown = f"{LAST}.querySelector('.content')"
    assert await chat.tab.value(f"{shown}.querySelector('h3').textContent") == "Tides"
    assert await chat.tab.value(f"{shown}.querySelector('strong').textContent") == "twice"
    assert await chat.tab.value(f"Array.from({shown}.querySelectorAll('a'), each => each.href)") == [
        "https://example.org/tides"
    ]
    assert await chat.tab.value(f"{shown}.querySelector('ol > li > ul > li').textContent") == "spring tide"
    assert (await chat.tab.value(f"{shown}.querySelector('pre').textContent")).startswith("def tide")
    assert await chat.tab.value(f"{shown}.querySelector('td:last-child').textContent") == "7.3 m"
    assert await chat.tab.value(f"{shown}.querySelector('img')") is None
    assert "<img src=x onerror=alert(1)>" in await chat.text(".content")


async def test_reasoning_and_a_tool_call_are_shown_and_its_result_is_sent(chat: Chat) -> None:
    await chat.ask("Is 9.9 or 9.11 larger?")
    assert await chat.text(".reasoning p") == "The tenths decide."
    assert await chat.text(".content") == "9.9 is larger."
    assert not await chat.tab.value(f"{LAST}.querySelector('.reasoning').open")
    await chat.tab.value("document.getElementById('sample-tool').click()")
    await chat.ask("What is the weather in Paris?")
    assert await chat.text(".call .code-bar") == "calls get_weather"
    assert json.loads(await chat.text(".call pre")) == {"city": "Paris"}
    await chat.reload()
    await chat.tab.until("document.querySelector('.call textarea') !== null")
    await chat.tab.value("document.querySelector('.call textarea').focus()")
    await chat.write("18 degrees")
    await chat.tab.press("Tab")
    await chat.tab.press("Enter")
    await chat.tab.until(f"running === null && {LAST}.textContent.includes('sunny')")
    assert await chat.tab.value("document.querySelectorAll('.call form:not([hidden])').length") == 0


async def test_escape_stops_an_answer_which_may_be_tried_again(chat: Chat) -> None:
    await chat.ask("Talk without end", is_answered=False)
    await chat.tab.until(f"running !== null && {LAST}.textContent.includes('word')")
    await chat.tab.press("Escape")
    await chat.tab.until("running === null")
    assert "stopped" in await chat.text(".note")
    await chat.tab.value(f"{LAST}.querySelector('.again').click()")
    await chat.tab.until(f"running !== null && {LAST}.textContent.includes('word')")
    assert await chat.tab.value("messages.length") == 2
    await chat.tab.value("document.getElementById('new').click()")
    await chat.tab.until("running === null && messages.length === 0 && !document.getElementById('intro').hidden")


async def test_the_keyboard_alone_is_enough(chat: Chat) -> None:
    await chat.tab.value("document.activeElement.blur()")
    await chat.tab.tab_to("focused.id === 'input'")
    await chat.ask("Tell me about the tides")
    assert await chat.text("h3") == "Tides"
    await chat.tab.tab_to("focused.textContent === 'Copy'")
    await chat.tab.tab_to("focused.id === 'input'")
    await chat.ask("Talk without end", is_answered=False)
    await chat.tab.tab_to("focused.id === 'stop'")
    await chat.tab.press("Enter")
    await chat.tab.until("running === null && document.activeElement.id === 'input'")
    await chat.tab.tab_to("focused.id === 'new'")
    await chat.tab.press("Enter")
    await chat.tab.until("messages.length === 0 && document.activeElement.id === 'input'")


async def test_settings_reach_the_server_and_stay_with_the_conversation(chat: Chat) -> None:
    for name, value in (
        ("band", "batch"),
        ("system", "Talk about the tides"),
        ("max_tokens", "5"),
        ("temperature", "0"),
    ):
        field = f"document.getElementById('s-{name}')"
        await chat.tab.value(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event('input'))")
    await chat.reload()
    await chat.ask("Hi")
    assert await chat.text("h3") == "Tides", "the system prompt is sent"
    assert (await chat.text(".note")).endswith("batch · cut at the limit of tokens")
    await chat.reload()
    assert await chat.tab.value("messages.length") == 2
    assert await chat.text("h3") == "Tides"
    assert await chat.tab.value("document.getElementById('s-system').value") == "Talk about the tides"


async def test_a_refusal_is_shown_with_its_reason_and_a_way_on(chat: Chat) -> None:
    await chat.tab.value("settings.temperature = '9'")
    await chat.ask("Hi", is_answered=False)
    await chat.tab.until("document.querySelector('#failure p').textContent.includes('temperature')")
    assert await chat.tab.value("messages.length") == 1
    await chat.tab.value("settings.temperature = ''; document.querySelector('#failure button').click()")
    await chat.tab.until(f"running === null && {LAST}.textContent.includes('Hello.')")
    assert await chat.tab.value("document.getElementById('failure').hidden")


class TestWithKeys:
    """A server with API keys."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        return {"api_key_file": write_keys(tmp_path, "acme")}

    async def test_the_key_is_asked_for_and_kept_for_the_session_alone(self, chat: Chat) -> None:
        for key, is_right in (("wrong", False), ("acme", True)):
            await chat.tab.until("document.activeElement?.id === 'key' && document.activeElement.value === ''")
            await chat.write(key)
            await chat.tab.press("Enter")
            if not is_right:
                await chat.tab.until("document.getElementById('key-error')?.textContent.includes('key')")
        await chat.tab.until("document.querySelector('dialog') === null && document.getElementById('s-model').value")
        await chat.tab.value("document.getElementById('input').focus()")
        await chat.ask("Hi")
        assert await chat.text(".content") == "Hello."
        assert (
            await chat.tab.value("JSON.stringify(localStorage).includes('acme') || location.href.includes('acme')")
            is False
        )
        await chat.tab.value("document.getElementById('forget-key').click()")
        await chat.tab.until("document.activeElement?.id === 'key'")

    async def test_axe_finds_no_serious_fault_in_the_question_for_the_key(self, chat: Chat) -> None:
        await find_no_fault(chat, "document.activeElement?.id === 'key'")


@pytest.mark.parametrize("text", [None, "Tell me about the tides", "What is the weather in Paris?"])
async def test_each_state_fits_every_window_and_axe_finds_no_serious_fault(chat: Chat, text: str | None) -> None:
    await chat.tab.value("document.getElementById('sample-tool').click()")
    await chat.tab.value("document.getElementById('input').focus()")
    if text is not None:
        await chat.ask(text)
    await chat.tab.value("fail('prompt has 9000 tokens; the model accepts 8192')")
    for is_open in ("true", "false"):
        await chat.tab.value(f"showSettings({is_open})")
        await find_no_fault(chat, "true")


async def find_no_fault(chat: Chat, ready: str) -> None:
    if axe_core() is None:
        pytest.skip("there is no axe-core here, and npm cannot fetch it")
    await chat.tab.until(ready)
    for width, scheme in FORMS:
        await chat.tab.resize(width, 844, scheme)
        assert not await chat.tab.value(IS_WIDER), width
        assert await serious_faults(chat.tab) == [], (width, scheme)
