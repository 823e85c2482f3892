"""Ways of using a client: what each program checks, and its outcome as a line of JSON.

The programs run in environments of their own, so that this folder imports nothing of Headway's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

BASE_URL = os.environ["HEADWAY_BASE_URL"]
ROOT_URL = BASE_URL.removesuffix("/v1")
SCENARIO = json.loads(os.environ["HEADWAY_SCENARIO"])
MODEL = SCENARIO["model"]
GREETING, PERSON = SCENARIO["greeting"], SCENARIO["person"]
WEATHER, CALLED, STEPWISE = SCENARIO["weather"], SCENARIO["called"], SCENARIO["stepwise"]
API_KEY = "none"

CITIES: list[str] = []
"""Cities that the tool was called with."""


def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: Name of the city.
    """
    CITIES.append(city)
    results = {weather["city"]: str(weather["result"]) for weather in (WEATHER, CALLED, STEPWISE)}
    return results.get(city, "unknown city")


def check_greeting(text: object) -> None:
    assert str(text).strip() == GREETING["answer"], f"the answer is {text!r}"


def check_weather(text: object, weather: Any = WEATHER) -> None:
    """Check the final answer, and that the tool was called once before it."""
    called, CITIES[:] = list(CITIES), []
    assert called == [weather["city"]], f"the tool was called with {called}, and the answer is {text!r}"
    assert str(text).strip() == weather["answer"], f"the answer is {text!r}"


def check_person(person: Any) -> None:
    fields = person if isinstance(person, dict) else {"name": person.name, "age": person.age}
    assert fields["name"] == PERSON["name"] and fields["age"] in PERSON["ages"], f"the object is {fields}"


def run(packages: tuple[str, ...], ways: dict[str, Callable[[], Any]]) -> None:
    """Try each way and print its outcome; a way may return an awaitable."""
    _print({"versions": {name: version(name) for name in packages}})
    for name, way in ways.items():
        _print({"way": name, **_outcome(way)})


def _print(fields: dict[str, Any]) -> None:
    """Print a line for the sweep; clients print lines of their own."""
    print(f"\nOUTCOME {json.dumps(fields)}", flush=True)


def _outcome(way: Callable[[], Any]) -> dict[str, str]:
    CITIES.clear()
    try:
        result = way()
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))
    except Exception as error:
        if os.environ.get("HEADWAY_TRACEBACKS"):
            traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        return {"outcome": "refused" if "unsupported_parameter" in reason else "failed", "reason": reason[:600]}
    return {"outcome": "passed"}


async def _awaited(result: Any) -> None:
    await asyncio.wait_for(result, 60)
