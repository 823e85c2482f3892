"""A killed rank of two takes its replica with it, and the streams of the replica end as they would have."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.serving import REAL, serving
from testkit.limits import START_LIMIT_S
from testkit.serving.served import Served, wait_for
from testkit.serving.streams import Stream, clients
from tests.ray.conftest import MODEL_NAME

pytestmark = pytest.mark.deep

NUM_STREAMS, NUM_TOKENS = 24, 200
OTHER_RANK = "-m replicas.model.ranks.main"
FIRST_RANK = "ray::ServeReplica:headway:Model"


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    fields: dict[str, Any] = {
        "model": checkpoint, "served_model_name": MODEL_NAME, "dtype": "float32", "device": "cpu", "num_replicas": 2,
        "tensor_parallel_size": 2, "cpus_per_replica": 0.1, "kv_cache_bytes": "64MiB", "max_num_seqs": NUM_STREAMS,
        "data_dir": tmp_path_factory.mktemp("data"),
    }  # fmt: skip
    with serving(REAL, fields) as served:
        yield served


def body(number: int) -> dict[str, Any]:
    fields = {"model": MODEL_NAME, "prompt": f"stream {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {**fields, "seed": number, "temperature": number % 2, "stream": True}


def processes(served: Served, command: str) -> list[psutil.Process]:
    return [process for process in served.descendants() if command in _command(process)]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def check_ended(streams: list[Stream]) -> None:
    wait_for(lambda: all(stream.is_over for stream in streams), "every stream has ended", START_LIMIT_S)
    assert not [stream.error for stream in streams if stream.error is not None]


@pytest.mark.parametrize("command", [OTHER_RANK, FIRST_RANK], ids=["other", "first"])
def test_streams_of_a_replica_that_loses_a_rank_are_completed(served: Served, command: str) -> None:
    def are_whole() -> bool:
        return len(processes(served, OTHER_RANK)) == 2 == len(served.replicas())

    wait_for(are_whole, "both replicas have two ranks", START_LIMIT_S, 0.5)
    with clients(served.url) as many:
        expected = [many.open(body(number)) for number in range(NUM_STREAMS)]
        check_ended(expected)
        streams = [many.open(body(number)) for number in range(NUM_STREAMS)]
        wait_for(lambda: all(stream.texts for stream in streams), "every stream has begun", START_LIMIT_S)
        other = processes(served, OTHER_RANK)[0]
        first = other.parent()
        assert first is not None
        (other if command == OTHER_RANK else first).kill()
        check_ended(streams)
        assert [stream.texts for stream in streams] == [stream.texts for stream in expected]
        wait_for(lambda: is_gone(first) and is_gone(other), "both ranks are gone", START_LIMIT_S)
