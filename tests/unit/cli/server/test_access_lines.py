"""Access lines on the terminal: an operator's fields, as text or JSON, and nothing that controls the terminal."""

import json
import queue

import pytest

from serve_app.cli.server.access_lines import AccessLines, LogFormat, json_line, text_line
from serve_app.http.access_log import AccessLog
from testkit.limits import LIMIT_S

COMPLETION = {
    "time_unix_s": 1_700_000_000.25,
    "http_method": "POST",
    "path": "/v1/completions",
    "status": 200,
    "error_code": None,
    "model": "m",
    "band": "standard",
    "tenant": "acme",
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "cached_tokens": 8,
    "queue_s": 0.001,
    "ttft_s": 0.02,
    "duration_s": 0.5,
    "request_id": "r1",
    "response_bytes": 99,
}


def test_a_line_of_text_has_what_an_operator_reads():
    assert text_line(COMPLETION) == (
        "2023-11-14T22:13:20.250Z POST /v1/completions 200 model=m band=standard tenant=acme in=12 out=3 cached=8 "
        "queue_s=0.001 ttft_s=0.020 total_s=0.500 request_id=r1"
    )


def test_a_line_of_json_has_the_same_fields():
    line = json.loads(json_line(COMPLETION))
    assert line["in"] == 12 and line["total_s"] == 0.5 and line["error"] is None
    assert "response_bytes" not in line


@pytest.mark.parametrize("path", ["/\x1b[31m", "/\n2023 GET /", "/ status=200", '/"', "/\u202e", ""])
def test_client_text_is_quoted_in_access_lines(path):
    line = text_line({**COMPLETION, "path": path})
    assert line.isprintable() and line.isascii()
    assert json.dumps(path) in line


@pytest.mark.parametrize("line_format", LogFormat)
def test_an_ingress_line_is_printed(tmp_path, line_format):
    printed: queue.Queue[str] = queue.Queue()
    lines = AccessLines(tmp_path / "access", line_format, printed.put)
    log = AccessLog(str(tmp_path / "access"))
    log.write(COMPLETION)
    assert "r1" in printed.get(timeout=LIMIT_S)
    log.close()
    lines.close()
    assert (tmp_path / "access").stat().st_mode & 0o777 == 0o600
