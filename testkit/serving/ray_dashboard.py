"""Ray's dashboard in a browser: its question for the token, and clicks on its links."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from testkit.http.chromium import Tab, open_tab
from testkit.limits import LIMIT_S
from testkit.serving.served import Served

_LINK = "Array.from(document.querySelectorAll('a')).find(link => link.textContent.trim() === {text!r})"
_SUBMIT = "Array.from(document.querySelectorAll('button')).find(button => button.textContent.trim() === 'Submit')"
_FIELD = "document.querySelector('[role=dialog] input')"
_LOAD_S = 5.0
"""Time in which a page of the dashboard fetches what it shows, seconds."""
_SIZE = (1280, 900)


class RayDashboard:
    """Ray's dashboard in a tab."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.num_clicks = 0

    async def give_token(self, token: str) -> None:
        """Answer the question for the token."""
        await self.tab.until(f"Boolean({_FIELD})")
        await self.tab.value(f"{_FIELD}.focus()")
        await self.tab.call("Input.insertText", text=token)
        await self.tab.until(f"Boolean({_SUBMIT}) && !{_SUBMIT}.disabled")
        await self.tab.value(f"{_SUBMIT}.click()")
        async with asyncio.timeout(LIMIT_S):
            while not await self._has_menu():
                await asyncio.sleep(0.2)

    async def _has_menu(self) -> bool:
        """Return True if the page shows its menu and no question. The right token makes it load itself anew."""
        menu = _LINK.format(text="Serve")
        try:
            return bool(await self.tab.value(f"!document.querySelector('[role=dialog]') && Boolean({menu})"))
        except AssertionError:
            return False

    async def find(self, text: str) -> None:
        """Wait for a link, scroll to it and draw a line around it."""
        link = _LINK.format(text=text)
        await self.tab.until(f"Boolean({link})")
        await self.tab.value(f"{link}.scrollIntoView({{block: 'nearest'}})")
        await self.tab.value(f"{link}.style.outline = '3px solid #d55e00'")

    async def click(self, text: str) -> None:
        """Click on the link with a text."""
        link = _LINK.format(text=text)
        await self.tab.until(f"Boolean({link})")
        await self.tab.value(f"{link}.click()")
        self.num_clicks += 1

    async def reload_until(self, text: str) -> None:
        """Load the page anew until it has a text: Ray serves logs only a while after the start of a node's agent."""
        has_text = f"document.body?.textContent.includes({text!r})"
        async with asyncio.timeout(LIMIT_S):
            while True:
                await asyncio.sleep(_LOAD_S)
                if await self.tab.value(has_text):
                    return
                await self.tab.call("Page.reload")


@contextlib.asynccontextmanager
async def ray_dashboard(application: Served, profile: Path) -> AsyncIterator[RayDashboard]:
    """Open Ray's dashboard of a served application, and give it the token; `profile` is for the browser."""
    token = Path(application.places["token_path"]).read_text()
    async with open_tab(application.dashboard_url, profile) as tab:
        await tab.resize(*_SIZE)
        dashboard = RayDashboard(tab)
        await dashboard.give_token(token)
        yield dashboard
