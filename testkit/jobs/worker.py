"""A jobs worker in a process of its own, without Ray: `python -m testkit.jobs.worker DATABASE_URL FOLDER SLOTS`.

It answers lines after a few milliseconds, and sends webhooks to this machine. A file of the folder `owners`, named by
the id under which it holds work, has its process id. It runs until it is killed, or its parent has ended.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from replicas.timing.clock import Clock
from serve_app.jobs.api.records import JobsSettings
from serve_app.jobs.files.store import FsspecStore
from serve_app.jobs.webhooks.addresses import AllowedHosts
from serve_app.jobs.webhooks.client import WebhookClient
from serve_app.jobs.webhooks.guard import SystemResolver, WebhookGuard
from serve_app.jobs.webhooks.sender import SendingLimits, WebhookSender
from serve_app.jobs.webhooks.signing import WebhookSigner, new_secret
from testkit.jobs.database_worlds import MODEL
from testkit.jobs.jobs_process import Process, ScriptedCompletions, jobs_process
from testkit.jobs.memory_files import MemoryFiles

LEASE_S = 0.5
_MAX_ANSWER_S = 0.03
_PERIOD_S = 0.02


@dataclass
class _Answering(ScriptedCompletions):
    rng: random.Random = field(default_factory=random.Random)

    async def answer(self, prepared: Any) -> dict[str, Any]:
        await asyncio.sleep(self.rng.uniform(0.0, _MAX_ANSWER_S))
        return await super().answer(prepared)


async def main(database_url: str, folder: Path, num_slots: int) -> None:
    """Work until the parent has ended."""
    completions = _Answering()
    completions.gate.set()
    settings = JobsSettings(MODEL, job_lease_s=LEASE_S)
    files, parent = cast(MemoryFiles, FsspecStore(str(folder / "files"))), os.getppid()
    async with jobs_process(database_url, files, completions, num_slots=num_slots, settings=settings) as process:
        sending = asyncio.create_task(_sender(process).run())
        while os.getppid() == parent and not sending.done():
            (folder / "owners" / process.runtime._ownership.id).write_text(str(os.getpid()))
            process.runtime.check_health()
            await asyncio.sleep(_PERIOD_S)


def _sender(process: Process) -> WebhookSender:
    guard = WebhookGuard(AllowedHosts.parse("127.0.0.1"), SystemResolver())
    client = WebhookClient(WebhookSigner(new_secret()), guard)
    limits = SendingLimits(poll_period_s=0.1)
    return WebhookSender(process.runtime.outbox, client.post, random.Random(), Clock(), limits)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
