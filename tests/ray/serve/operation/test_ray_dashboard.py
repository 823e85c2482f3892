"""Ray's dashboard in a real browser: three clicks lead to the replica of a request."""

from pathlib import Path

import httpx
import pytest

from testkit.http.chromium import CHROMIUM
from testkit.serving.ray_dashboard import ray_dashboard
from testkit.serving.served import Served
from tests.ray.conftest import MODEL_NAME

pytestmark = [pytest.mark.deep, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


async def test_three_clicks_lead_to_the_replica_of_a_request(app: Served, http: httpx.Client, tmp_path: Path) -> None:
    body = {"model": MODEL_NAME, "prompt": "the quick", "max_tokens": 2}
    http.post("/v1/completions", json=body, headers={"x-request-id": "order-4711"}).raise_for_status()
    replica_id = http.get("/v1/requests/order-4711").json()["replica_id"]
    async with ray_dashboard(app, tmp_path / "profile") as dashboard:
        for text in ("Serve", "Model", replica_id):
            await dashboard.click(text)
        await dashboard.tab.until(f"document.body.textContent.includes('#Model#{replica_id}')")
        assert dashboard.num_clicks == 3
        pid = next(each["pid"] for each in app.replicas() if each["replica_id"] == replica_id)
        await dashboard.tab.until(f"document.body.textContent.includes('{pid}')")
