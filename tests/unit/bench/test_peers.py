"""The peers' workload, the figures made of token times, and which peers can be run; over an engine of made-up times."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bench.peers import registry
from bench.peers.driver import Measurement
from bench.peers.engine import Events, PeerEngine, PeerRequest, decode_step_ms, mixed_requests, summary
from bench.peers.registry import Peer, read_peers
from bench.peers.report import Record, by_engine, table

PEERS = Path(registry.__file__).with_name("peers.toml")


class RegularEngine(PeerEngine):
    """All first tokens after a second, then one every 10 ms; `lost` requests stay one token short."""

    def __init__(self, lost: frozenset[int] = frozenset()) -> None:
        self._lost = lost
        self.concurrencies: list[int] = []

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        self.concurrencies.append(concurrency)
        times = {r.number: [1.0 + 0.01 * index for index in range(r.num_output_tokens)] for r in requests}
        for number in self._lost & set(times):
            times[number].pop()
        return Events(times, 0.0, max(each[-1] for each in times.values()))


def records(engine: RegularEngine, mode: str) -> list[Record]:
    return list(Measurement(engine, concurrency=16, num_repetitions=2, batches=(1, 32)).of(mode))


def test_every_peer_gets_the_same_workload():
    requests = mixed_requests()
    assert len(requests) == 48 and requests == mixed_requests()
    assert sum(len(request.prompt) for request in requests) == 7434
    assert sum(request.num_output_tokens for request in requests) == 5056
    assert all(259 <= token < 8000 for request in requests for token in request.prompt)


def test_figures_come_from_the_moments_of_tokens():
    events = Events({0: [1.0, 1.1, 1.3], 1: [2.0, 2.5]}, started_s=0.5, ended_s=2.5)
    figures = summary(events)
    assert figures["out_tokens"] == 5 and figures["tok_s"] == 2.5
    assert figures["ttft_ms"]["p50"] == pytest.approx(1000.0)
    assert figures["itl_ms"]["mean"] == pytest.approx((100 + 200 + 500) / 3, abs=0.01)
    assert figures["tpot_ms"]["p50"] == pytest.approx((150 + 500) / 2)


def test_a_decode_step_counts_only_while_all_decode():
    together = Events({0: [0.0, 1.0, 1.1, 1.2, 1.3], 1: [1.0, 1.1, 1.2]}, 0.0, 1.3)
    assert decode_step_ms(together) == pytest.approx(100.0)
    assert decode_step_ms(Events({0: [0.0], 1: [1.0]}, 0.0, 1.0)) is None


def test_every_mode_gives_its_records():
    engine = RegularEngine()
    mixed = records(engine, "workload")
    assert [record["rep"] for record in mixed] == [0, 1] and mixed[0]["wrong_len"] == 0
    assert mixed[0]["itl_ms"]["p99"] == pytest.approx(10.0)
    assert {record["decode_tok_s"] for record in records(engine, "single")} == {100.0}
    assert [(record["batch"], record["step_ms"]) for record in records(engine, "decode")] == [(1, 10.0), (32, 10.0)]
    assert set(engine.concurrencies) == {16, 32}, "as many as the largest batch"


def test_answers_of_the_wrong_length_are_counted():
    assert records(RegularEngine(lost=frozenset({3, 5})), "workload")[0]["wrong_len"] == 2


def test_a_peer_that_is_not_installed_names_what_is_missing(tmp_path: Path):
    model = tmp_path / "S"
    model.mkdir()
    assert Peer("here", "x").missing(model) == []
    assert Peer("elsewhere", "x", python=str(tmp_path / "python")).missing(model) == [str(tmp_path / "python")]
    assert Peer("format", "x", model=f"{tmp_path}/{{shape}}.gguf").missing(model) == [f"{tmp_path}/S.gguf"]


def test_a_peer_is_started_with_its_model_and_its_own_arguments(tmp_path: Path):
    peer = Peer("p", "bench.peers.x", arguments=("--serve", "~/server -m {model}"))
    command = peer.command(tmp_path / "S", ["--reps", "1"])
    assert command[:3] == [sys.executable, "-m", "bench.peers.x"]
    assert f"{Path.home()}/server -m {tmp_path}/S" in command
    assert command[-2:] == ["--reps", "1"] and command[command.index("--tag") + 1] == "S"


def test_the_list_of_peers_names_runners_that_exist():
    peers = read_peers(PEERS)
    assert peers[0].name == "headway" and len({peer.name for peer in peers}) == len(peers)
    for peer in peers:
        assert (PEERS.parent / f"{peer.module.removeprefix('bench.peers.')}.py").is_file()


def test_the_table_puts_the_fastest_first():
    def record(note: str, tokens_per_s: float) -> Record:
        gaps = {"mean": 1.0, "p50": 1.0, "p99": 2.0}
        return {
            "mode": "workload", "note": note, "tok_s": tokens_per_s, "ttft_ms": gaps, "itl_ms": gaps,
            "peak_rss_mb": 1.0, "cpu_other": 0.0,
        }  # fmt: skip

    engines = by_engine([record("slow", 100.0), record("fast", 300.0), record("fast", 310.0), record("fast", 290.0)])
    assert [engine.name for engine in engines] == ["fast", "slow"] and engines[0].tokens_per_s == 300.0
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(engines, "title"))
    assert "300 (290..310)" in capture.get() and "33%" in capture.get()
