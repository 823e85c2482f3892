"""The jobs process on the dashboard, in a real browser."""

from pathlib import Path

import pytest

from replicas.errors import NoReplicaAvailable
from testkit.http.api import MakeApi, serving
from testkit.http.chromium import CHROMIUM, open_tab

pytestmark = [pytest.mark.deep, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


async def test_a_jobs_process_that_is_away_does_not_answer(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api()
    api.jobs.error = NoReplicaAvailable("away")
    async with serving(api.app) as url, open_tab(f"{url}/dashboard", tmp_path / "profile") as tab:
        for place in ("tiles", "jobs"):
            await tab.until(f"document.getElementById('{place}').textContent.includes('does not answer')")
