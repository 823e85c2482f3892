"""Loss of batch lines and jobs when processes are killed: `python -m bench.jobs.kill [--kills N] [--workers N]`.

The demo model on two replicas under `make serve`; a batch of 2,000 lines, and jobs submitted beside it all the time.
Twenty times, evenly over the batch's progress, one process is killed with SIGKILL: a model replica, the jobs process,
the ingress, Serve's controller, its proxy, or all of `make serve`, which is then started again over the same data.
Clients retry every failed call; a job counts once it got a 202.

With `--workers` above 1 the jobs are in a PostgreSQL database of the bench's own, which no kill touches, and two of
three kills hit one of the jobs workers.

The bars: every `custom_id` is exactly once in the output or error file, every accepted job has its result, and each
of them gets a webhook at least once, always with the same id.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from bench.jobs.client import BatchClient, is_final, num_done, write_lines
from bench.jobs.submitter import PERIOD_S, RETRY_LIMIT_S, Receiver, ended_job, receiving, submitting, with_retries
from bench.routing.report import Bar, option_parser, options_of, report
from bench.routing.streams import Burst, Stream
from serve_app.benchmark.workload import Lengths
from serve_app.config import DEMO_MODEL_NAME
from testkit.free_port import free_port
from testkit.jobs.postgresql import NOT_INSTALLED, find_binaries, postgresql
from testkit.serving.served import serving, wait_for

_ONE_IN_WHOLE = 5
_KILLING_SHARE = 0.6
_SETTINGS = {
    "num_replicas": 2, "dtype": "float32", "device": "cpu", "num_threads": 1, "cpus_per_replica": 0.5,
    "max_num_seqs": 8, "load_poll_period_s": 0.2, "webhook_allowed_hosts": "127.0.0.1",
}  # fmt: skip


class Kind(Enum):
    """Processes that can be killed; the value is the beginning of the process's command line."""

    MODEL = "ray::ServeReplica:headway:Model"
    JOBS = "ray::ServeReplica:headway:Jobs"
    INGRESS = "ray::ServeReplica:headway:Ingress"
    CONTROLLER = "ray::ServeController"
    PROXY = "ray::ProxyActor"
    WHOLE = "make serve"
    """Every process of `make serve`, which is then started again."""


class Launcher:
    """One `make serve` after another, with the same port, home and configuration."""

    def __init__(self, open_contexts: contextlib.ExitStack, home: Path, settings: Mapping[str, object]) -> None:
        """Start the first one; `open_contexts` stops the last one and ends all processes."""
        self._open = open_contexts
        self._home = home
        self._arguments = " ".join(f"{name}={value}" for name, value in settings.items())
        self._port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start `make serve`; return when it is ready."""
        variables = (f"MODEL={DEMO_MODEL_NAME}", f"ARGS={self._arguments}")
        self._served = self._open.enter_context(serving(self._home, *variables, port=self._port))

    def kill(self, kind: Kind, rng: random.Random) -> bool:
        """Kill a process of this kind, or all; return False if there is none now."""
        if kind is Kind.WHOLE:
            self._served.kill()
            return True
        processes = self._served.find_all(kind.value)
        if processes:
            rng.choice(processes).kill()
        return bool(processes)


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of work, and number of kills."""

    num_lines: int = 2000
    num_kills: int = 20
    output_tokens: int = 96
    between_jobs_s: float = 2.0
    num_workers: int = 1
    """Jobs workers."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill."""

    at_unix_s: float
    kind: str
    num_done: int
    """Lines of the batch that had ended by then."""


@dataclass(slots=True)
class Seen:
    """Result of a run."""

    batch: dict[str, Any]
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    kills: list[Kill]
    jobs: dict[str, str]
    """Status of every accepted job, by id."""
    webhooks: dict[str, list[str]]
    """Ids of the received webhooks, by the id of the batch or job."""


def main() -> int:
    """Serve, kill, collect, judge."""
    parser = option_parser(__doc__)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--lines", type=int)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="jobs workers")
    own = parser.parse_args()
    options = options_of(own)
    scale = Scale(num_lines=60, num_kills=3, output_tokens=48) if options.is_quick else Scale()
    scale = replace(
        scale,
        num_lines=own.lines or scale.num_lines,
        num_kills=own.kills or scale.num_kills,
        num_workers=own.workers,
    )
    with (
        tempfile.TemporaryDirectory(prefix="hw-kill-") as home,
        receiving() as receiver,
        _database(scale.num_workers) as database,
        contextlib.ExitStack() as open_contexts,
    ):
        settings = {**_SETTINGS, "data_dir": f"{home}/data", **database, **options.settings}
        launcher = Launcher(open_contexts, Path(home), settings)
        seen = _run(launcher, receiver, scale, Path(home), options.seed)
    figures, bars = judge(scale, seen)
    name = "kill" if scale.num_workers == 1 else "kill_workers"
    return report(name, options, bars, {"scale": asdict(scale), **figures}, [], family="jobs")


@contextlib.contextmanager
def _database(num_workers: int) -> Iterator[dict[str, object]]:
    """Yield the settings for this number of jobs workers; several share a PostgreSQL database."""
    if num_workers == 1:
        yield {}
        return
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit(NOT_INSTALLED)
    with postgresql(binaries) as server, server.fresh_database() as url:
        yield {"database_url": url, "num_jobs_workers": num_workers}


def judge(scale: Scale, seen: Seen) -> tuple[dict[str, Any], list[Bar]]:
    """Return the figures and the bars."""
    counts = Counter(line["custom_id"] for line in (*seen.output, *seen.errors))
    expected = {f"line-{number}" for number in range(scale.num_lines)}
    wrong_jobs = {job_id: status for job_id, status in seen.jobs.items() if status != "completed"}
    unreported = [subject for subject, ids in seen.webhooks.items() if not ids]
    two_ids = [subject for subject, ids in seen.webhooks.items() if len(set(ids)) > 1]
    bars = [
        Bar("processes killed", len(seen.kills), scale.num_kills, True),
        Bar("kinds of process killed", len({kill.kind for kill in seen.kills}), min(len(Kind), scale.num_kills), True),
        Bar("batch completed", float(seen.batch["status"] == "completed"), 1, True),
        Bar("lines in no file", len(expected - counts.keys()), 0),
        Bar("lines more than once", sum(number > 1 for number in counts.values()), 0),
        Bar("lines that are not in the input", len(counts.keys() - expected), 0),
        Bar("lines that failed", len(seen.errors), 0),
        Bar("lines that the counts miss", abs(scale.num_lines - num_done(seen.batch)), 0),
        Bar("jobs accepted", len(seen.jobs), 1, True),
        Bar("jobs lost or failed", len(wrong_jobs), 0),
        Bar("ends without a webhook", len(unreported), 0),
        Bar("ends with two webhook ids", len(two_ids), 0),
    ]
    return {
        "kills": [asdict(kill) for kill in seen.kills],
        "wrong_jobs": wrong_jobs,
        "num_webhooks": sum(map(len, seen.webhooks.values())),
        "first_errors": seen.errors[:5],
    }, bars


def kinds_to_kill(num_kills: int, rng: random.Random, num_workers: int = 1) -> list[Kind]:
    """Return the kinds in random order: one in five the whole, the others in turn.

    Of several jobs workers one dies in two of three turns.
    """
    single = [kind for kind in Kind if kind is not Kind.WHOLE]
    if num_workers > 1:
        single = [kind for other in single if other is not Kind.JOBS for kind in (Kind.JOBS, other, Kind.JOBS)]
    num_whole = max(1, num_kills // _ONE_IN_WHOLE)
    kinds = [Kind.WHOLE] * num_whole + [single[index % len(single)] for index in range(num_kills - num_whole)]
    rng.shuffle(kinds)
    return kinds


def _run(launcher: Launcher, receiver: Receiver, scale: Scale, home: Path, seed: int) -> Seen:
    client = BatchClient(launcher.url)
    path = home / "lines.jsonl"
    write_lines(path, _stream(scale), scale.num_lines, seed)
    batch_id = client.create(client.upload(path), receiver.url)
    with submitting(launcher.url, receiver.url, scale.between_jobs_s) as job_ids:
        kills = _kill_repeatedly(launcher, client, batch_id, scale, random.Random(seed))
        batch = with_retries(client.wait, batch_id, is_final, RETRY_LIMIT_S)
    jobs = {job_id: with_retries(ended_job, launcher.url, job_id) for job_id in job_ids}
    subjects = [batch_id, *jobs]
    with contextlib.suppress(TimeoutError):
        wait_for(
            lambda: all(receiver.ids[subject] for subject in subjects),
            "every end has a webhook",
            RETRY_LIMIT_S,
            PERIOD_S,
        )
    output, errors = (
        list(client.results(batch[name])) if batch[name] else [] for name in ("output_file_id", "error_file_id")
    )
    return Seen(batch, output, errors, kills, jobs, {subject: receiver.ids[subject] for subject in subjects})


def _kill_repeatedly(
    launcher: Launcher, client: BatchClient, batch_id: str, scale: Scale, rng: random.Random
) -> list[Kill]:
    """Kill processes one after another, each time the batch has advanced by one more step."""
    kills: list[Kill] = []
    # Not to the very end: while no process answers the batch goes on, and the next kill comes late.
    step = _KILLING_SHARE * scale.num_lines / (scale.num_kills + 1)
    for number, kind in enumerate(kinds_to_kill(scale.num_kills, rng, scale.num_workers), 1):
        target = number * step
        batch = with_retries(client.wait, batch_id, lambda it: num_done(it) >= target, RETRY_LIMIT_S)  # noqa: B023
        if is_final(batch):
            break
        at_unix_s = time.time()
        while not launcher.kill(kind, rng):
            time.sleep(PERIOD_S)  # it is being replaced already
        kills.append(Kill(at_unix_s, kind.name.lower(), num_done(batch)))
        print(f"killed {kind.name.lower()} at {num_done(batch)} of {scale.num_lines} lines", flush=True)
        if kind is Kind.WHOLE:
            launcher.start()
    return kills


def _stream(scale: Scale) -> Stream:
    return Stream(
        name="lines",
        bursts=(Burst(count=1),),
        prompt=Lengths(8, 128, 48, 0.4),
        output=Lengths(16, 256, scale.output_tokens, 0.4),
    )


if __name__ == "__main__":
    sys.exit(main())
