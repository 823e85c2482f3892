"""Serve on two raylets, do one fault after another under load, and judge what the clients have seen.

A stream has to give the text that it gives undisturbed, or to end with an error. Every accepted job and prompt of a
batch has to be completed exactly once, and the webhook of a job to arrive with one id. The faults are repeated until
`--minutes` are over; each is done at least once. `--only` chooses one of them.

Then Ray's gcs and raylet are killed under `headway serve`, one after the other. The server ends and is started again on
the same data folder; the same has to hold.

A full disk is a limit on the size of files (RLIMIT_FSIZE), a read-only database the attribute `immutable`, which needs
root and ext4.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.chaos.daemons import DAEMONS, Restarted
from bench.chaos.faults import Stage
from bench.chaos.load import BATCH_PROMPTS, Load, longest_gap_s
from bench.chaos.receivers import Receivers, receiving
from bench.chaos.redis import redis_server
from bench.jobs.submitter import RETRY_LIMIT_S, with_retries
from bench.record import write
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.serving.raylets import serving
from testkit.serving.served import wait_for

MODEL_NAME = "tiny-llama"
_WHOLE_LIMIT_S, _QUIET_S, _POLL_S = 180.0, 3.0, 0.5
_LOST = ("jobs_lost", "prompts_lost", "prompts_twice", "webhooks_lost", "webhooks_with_two_ids", "streams_changed")
_SETTINGS = {
    "dtype": "float32", "num_replicas": 2, "num_ingress_replicas": 2, "max_num_seqs": 8, "kv_cache_bytes": "128MiB",
    "load_poll_period_s": 0.2, "webhook_allowed_hosts": "127.0.0.1",
}  # fmt: skip


def do(name: str, fault: Callable[[], None], stage: Stage, load: Load, receivers: Receivers) -> dict[str, Any]:
    """Do a fault, wait until every part is back; return what the clients saw in the meantime."""
    load.submit_batch()
    marks, begin_s = load.seen.marks(), time.monotonic()
    fault()
    over_s = time.monotonic()
    time.sleep(_POLL_S)
    wait_for(stage.is_whole, f"all parts are back after {name}", _WHOLE_LIMIT_S, _POLL_S)
    whole_s = time.monotonic()
    time.sleep(_QUIET_S)
    end_s = time.monotonic()
    seen = load.seen.since(marks)
    row = {
        "fault": name,
        "lasted_s": over_s - begin_s,
        "whole_after_s": whole_s - begin_s,
        "longest_without_an_answer_s": longest_gap_s(load.seen.served_s, begin_s, end_s),
        "longest_without_an_accepted_job_s": longest_gap_s(load.seen.accepted_s, begin_s, end_s),
        "longest_without_a_webhook_s": longest_gap_s(receivers.received_s, begin_s, end_s),
        **seen,
    }
    print(_line(row), flush=True)
    return row


def _line(row: dict[str, Any]) -> str:
    answer, job = row["longest_without_an_answer_s"], row["longest_without_an_accepted_job_s"]
    return (
        f"{row['fault']}: no answer for {answer:.1f} s, no job for {job:.1f} s, whole after "
        f"{row['whole_after_s']:.1f} s; streams {row['streams']}, other requests "
        f"{row['probes']}, jobs {row['refused_jobs']}"
    )


def judge(load: Load, receivers: Receivers) -> dict[str, Any]:
    """Wait for the end of all accepted work; return what was lost, duplicated or changed."""
    seen = load.seen
    ended = Counter(with_retries(load.ended_job, job_id) for job_id in seen.job_ids)
    indexes, statuses = Counter[tuple[str, int]](), Counter[str]()
    for batch_id in seen.batch_ids:
        for output in with_retries(load.outputs, batch_id):
            indexes[batch_id, output["index"]] += 1
            statuses[output["status"]] += 1
    num_expected = len(seen.accepted_s)
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: len(receivers.ids) >= num_expected, "all webhooks", RETRY_LIMIT_S, _POLL_S)
    num_prompts = BATCH_PROMPTS * len(seen.batch_ids)
    return {
        "num_jobs": len(seen.job_ids),
        "jobs_by_status": dict(ended),
        "jobs_lost": len(seen.job_ids) - ended["completed"],
        "num_prompts": num_prompts,
        "prompts_by_status": dict(statuses),
        "prompts_lost": num_prompts - statuses["completed"],
        "prompts_twice": sum(number > 1 for number in indexes.values()),
        "num_webhooks": len(receivers.ids),
        "webhooks_lost": num_expected - len(receivers.ids),
        "webhooks_with_two_ids": sum(len(set(ids)) > 1 for ids in receivers.ids.values()),
        "streams_changed": len(seen.changed),
        "streams": dict(Counter(seen.streams)),
    }


def run_daemons(only: str | None) -> dict[str, Any]:
    """Return the figures of deaths of Ray's daemons."""
    with tempfile.TemporaryDirectory(prefix="hw-chaos-") as folder, receiving() as receivers:
        checkpoint = Path(folder) / MODEL_NAME
        checkpoint.mkdir()
        write_checkpoint(checkpoint, max_position_embeddings=4096)
        server = Restarted(Path(folder), checkpoint, receivers)
        rows = []
        with server.running() as url:
            load = Load(url, MODEL_NAME, f"{receivers.url}/good")
            with load.running():
                for daemon in (each for each in DAEMONS if only in (None, each)):
                    time.sleep(_QUIET_S)
                    rows.append(server.kill(daemon, load))
                    print(_line(rows[-1]), flush=True)
            return {"faults": rows, "afterwards": judge(load, receivers)}


def run(minutes: float, only: str | None, has_redis: bool) -> dict[str, Any]:
    """Return the figures of a run."""
    until_s = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="hw-chaos-") as folder, receiving() as receivers:
        checkpoint = Path(folder) / MODEL_NAME
        checkpoint.mkdir()
        write_checkpoint(checkpoint, max_position_embeddings=4096)
        data_dir = Path(folder) / "data"
        with contextlib.ExitStack() as stack:
            environment = stack.enter_context(redis_server(Path(folder))) if has_redis else {}
            raylets = stack.enter_context(
                serving(Path(folder), environment, model=checkpoint, data_dir=data_dir, **_SETTINGS)
            )
            load = Load(raylets.app.url, MODEL_NAME, f"{receivers.url}/good")
            stage = Stage(raylets, load, receivers.url, data_dir, has_redis)
            wait_for(stage.is_whole, "all parts run", _WHOLE_LIMIT_S, _POLL_S)
            faults = {name: fault for name, fault in stage.faults().items() if only is None or only in name}
            rows: list[dict[str, Any]] = []
            with load.running():
                time.sleep(_QUIET_S)
                while not rows or time.monotonic() < until_s:
                    rows += [do(name, fault, stage, load, receivers) for name, fault in faults.items()]
            return {"faults": rows, "afterwards": judge(load, receivers)}


def main() -> int:
    """Measure, print and write the figures; fail if anything was lost, duplicated or changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--redis", action="store_true", help="Ray's gcs has its state in a redis-server, and is killed, too"
    )
    parser.add_argument("--only", help="a part of one fault's name")
    options = parser.parse_args()
    is_of_daemon = options.only in DAEMONS
    parts: dict[str, dict[str, Any]] = {}
    if not is_of_daemon:
        parts["on_two_raylets"] = run(options.minutes, options.only, options.redis)
    if is_of_daemon or options.only is None:
        parts["of_daemons"] = run_daemons(options.only)
    for name, part in parts.items():
        print(name, part["afterwards"])
    if options.only is None:
        print(write("chaos", parts["on_two_raylets"] | {"of_daemons": parts["of_daemons"]}), file=sys.stderr)
    return 1 if any(part["afterwards"][name] for part in parts.values() for name in _LOST) else 0


if __name__ == "__main__":
    sys.exit(main())
