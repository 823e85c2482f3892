"""A secret that is drawn once and kept to ourselves."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor

from serve_app.jobs.webhooks.signing import WebhookSigner, load_or_create_secret


def test_it_is_drawn_once_and_only_we_can_read_it(tmp_path):
    path = tmp_path / "secret"
    secret = load_or_create_secret(path)
    assert load_or_create_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["secret"]
    assert load_or_create_secret(tmp_path / "other") != secret
    WebhookSigner(secret)


def test_an_operators_own_secret_in_the_file_is_used(tmp_path):
    (tmp_path / "secret").write_text("whsec_mine\n")
    assert load_or_create_secret(tmp_path / "secret") == "whsec_mine"


def test_who_looks_at_the_same_time_finds_the_same(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: load_or_create_secret(tmp_path / "secret"), range(8)))
    assert len(secrets) == 1
