"""Ranks that differ, fail or die end their replica, and leave no process behind."""

import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from replicas.engine.batch import ScheduledBatch
from replicas.errors import ModelLoadError
from replicas.model.loading.config import read_config
from replicas.model.parallel.shares import ModelCuts, Share
from replicas.model.ranks.messages import MessageForm
from replicas.model.ranks.ring import RankLost, RingReader
from replicas.protocol import SamplingParams
from testkit.model.cached_checkpoints import cached_checkpoint
from testkit.model.engine_runs import build_engine, load, random_prompts, requests_for, run, tokens
from testkit.model.rank_threads import following, load_parts
from testkit.model.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.rotated

PROMPTS = random_prompts((5, 33))
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, seed=7)
_LIMIT_S = 120.0
_PAUSE_S = 0.001
_LATEST_KILL_S = 2.0


class FlippingReader(RingReader):
    """Reader that changes the random number of the first row after a few messages."""

    num_left = 6

    def read(self, limit_s: float) -> bytes | None:
        message = super().read(limit_s)
        if message is None:
            return None
        self.num_left -= 1
        form = MessageForm()
        found = form.of_bytes(message)
        if self.num_left >= 0 or found.step is None or found.step.sampling is None:
            return message
        plan = found.step.sampling.full
        assert plan is not None
        found.step.words[plan.columns.start] = _flipped(found.step.words[plan.columns.start])
        return form.to_bytes(found)


def _flipped(word: int) -> int:
    """Return the bits of a number in the other half of [0, 1)."""
    uniform = struct.unpack("d", struct.pack("q", word))[0]
    return int(struct.unpack("q", struct.pack("d", (uniform + 0.5) % 1.0))[0])


def test_a_rank_that_draws_another_number_ends_the_replica() -> None:
    parts = load_parts(cached_checkpoint("llama"), 2)
    with following(parts, make_reader=FlippingReader) as ranks:
        with pytest.raises(RankLost, match="rank 1 has sampled other tokens than rank 0 in step"):
            run(ranks.engine(), requests_for(PROMPTS, SEEDED))
        with pytest.raises(RankLost, match="an earlier step failed: rank 1 has sampled other tokens"):
            ranks.leading.launch(ScheduledBatch())


def test_a_step_that_cannot_be_planned_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message was not published, so the ranks are still the same."""
    expected = tokens(build_engine(load(cached_checkpoint("llama"))), PROMPTS, SEEDED)
    with following(load_parts(cached_checkpoint("llama"), 2)) as ranks:
        planner = ranks.runners[0].planner
        plan, num_plans = planner.plan, iter(range(1000))

        def failing(batch: ScheduledBatch) -> object:
            if next(num_plans) == 5:
                raise ValueError("cannot plan")
            return plan(batch)

        monkeypatch.setattr(planner, "plan", failing)
        assert tokens(ranks.engine(), PROMPTS, SEEDED) == expected


@pytest.mark.parametrize(
    ("architecture", "num_ranks", "reason"),
    [
        ("llama", 3, r"is 3, which does not divide the 4 heads of self_attn.q_proj .*; 1, 2 and 4 do"),
        ("gpt2", 2, "tensor_parallel_size is 2, and models of that type run on one device alone: set it to 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(architecture: str, num_ranks: int, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        ModelCuts(read_config(str(cached_checkpoint(architecture))), Share(0, num_ranks))


def test_inner_sizes_and_kv_heads_are_checked(tmp_path: Path) -> None:
    config = read_config(str(write_checkpoint(tmp_path, with_tokenizer=False, intermediate_size=130)))
    with pytest.raises(ModelLoadError, match=r"mlp.down_proj \(intermediate_size: 130\); 1 and 2 do"):
        ModelCuts(config, Share(0, 4))
    config.num_attention_heads, config.num_key_value_heads = 12, 3
    with pytest.raises(ModelLoadError, match=r"the 3 heads of self_attn.k_proj .*; only 1 does"):
        ModelCuts(config, Share(0, 2))


@contextmanager
def replica(
    folder: Path, module: str, *arguments: str, says: str, num_others: int = 1
) -> Iterator[list[psutil.Process]]:
    """Run a first rank with files in `folder`; yield its process and those of the others, once it `says` that."""
    command = [sys.executable, "-m", f"testkit.model.{module}", str(cached_checkpoint("llama")), *arguments]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as first:
        process = psutil.Process(first.pid)
        try:
            assert first.stdout is not None and first.stdout.readline() == f"{says}\n"
            while len(others := other_ranks(process)) < num_others:
                assert first.poll() is None, "the first rank has ended"
                time.sleep(_PAUSE_S)
            yield [process, *others]
        finally:
            first.kill()


def other_ranks(first: psutil.Process) -> list[psutil.Process]:
    """Return the processes of the other ranks that have begun. Libraries may start other processes for a moment."""
    found = []
    for child in first.children():
        with suppress(psutil.Error):
            if "replicas.model.ranks.main" in child.cmdline():
                found.append(child)
    return found


def memory_files(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the inodes of the files in shared memory that are open in processes, of those that a rank makes."""
    found = set()
    for process in processes:
        with suppress(OSError):  # The process has ended, or is another user's.
            for file in Path(f"/proc/{process.pid}/fd").iterdir():
                if os.readlink(file).startswith("/memfd:headway-"):
                    found.add(file.stat().st_ino)
    return found


def check_nothing_left(ranks: list[psutil.Process], victim: int, folder: Path) -> None:
    """Kill a rank; check that the others end too, and that neither their memory nor their files are left."""
    files = memory_files(ranks)
    ranks[victim].send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(ranks, timeout=_LIMIT_S)
    assert not alive and len(gone) == len(ranks)
    assert files and not files & memory_files(psutil.process_iter())
    assert not [name for name in os.listdir("/dev/shm") if any(str(rank.pid) in name for rank in ranks)]
    assert not list(folder.iterdir())


def test_a_killed_first_rank_takes_the_other_with_it(tmp_path: Path) -> None:
    with replica(tmp_path, "rank_leader", says="ready") as ranks:
        check_nothing_left(ranks, 0, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("number", range(4))
def test_a_kill_in_work_leaves_nothing(number: int, tmp_path: Path) -> None:
    """One of two ranks is killed while they wait for work or compute."""
    with replica(tmp_path, "rank_leader", *(("busy",) if number > 1 else ()), says="ready") as ranks:
        time.sleep(random.Random(number).uniform(0.0, _LATEST_KILL_S))
        check_nothing_left(ranks, number % 2, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("number", range(46))
def test_a_kill_at_any_moment_of_the_start_leaves_nothing(number: int, tmp_path: Path) -> None:
    """The first rank or one of two others is killed, from the beginning until they wait for each other."""
    with replica(tmp_path, "rank_starter", "3", says="started", num_others=2) as ranks:
        time.sleep(random.Random(number).uniform(0.0, _LATEST_KILL_S))
        check_nothing_left(ranks, number % 3, tmp_path)
