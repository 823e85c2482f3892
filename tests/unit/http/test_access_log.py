"""Access lines reach their reader whole and in order, and a slow reader never holds the writer up."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.http.access_log import AccessLog
from testkit.limits import LIMIT_S


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "access"))
        listening.listen()
        listening.settimeout(LIMIT_S)
        yield listening


def test_lines_that_a_slow_reader_has_no_room_for_are_counted(listener, tmp_path):
    log = AccessLog(str(tmp_path / "access"))
    reader, _ = listener.accept()
    reader.settimeout(LIMIT_S)
    num_written = 20_000
    for number in range(num_written):
        log.write({"number": number, "path": "x" * 300})
    lines = reader.makefile("rb")
    seen = [json.loads(lines.readline())]
    log.write({"number": num_written, "path": "/last"})
    while seen[-1]["path"] != "/last":
        seen.append(json.loads(lines.readline()))
        if seen[-1]["number"] == num_written - 1:
            break
        log.write({"number": num_written, "path": "/last"})
    reader.close()
    log.close()
    numbers = [line["number"] for line in seen if line["path"] != "/last"]
    assert numbers == list(range(len(numbers)))
    num_dropped = sum(line["num_dropped"] for line in seen)
    assert num_dropped >= num_written - len(numbers) > 0


def test_without_a_reader_lines_are_dropped(listener, tmp_path):
    AccessLog(str(tmp_path / "nobody")).write({"path": "/"})
    log = AccessLog(str(tmp_path / "access"))
    reader, _ = listener.accept()
    reader.close()
    for _ in range(3):
        log.write({"path": "/"})
    log.close()
