"""Child processes of a start: slow ones end by themselves, ones without progress are ended."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from replicas.child_processes import START_TIMEOUT_VARIABLE, Progress, Stalled, run_child, start_timeout_s
from testkit.serving.served import wait_for

LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, str(LIMIT_S))


def has_ended(process_id: int) -> bool:
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def run(code: str, cpu_limit_s: float | None = None) -> subprocess.CompletedProcess[str]:
    return run_child("the check", [sys.executable, "-c", code], cpu_limit_s)


def test_a_result_has_output_errors_and_status() -> None:
    done = run("import sys; print('out'); sys.exit('wrong')")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "wrong\n", 1)


def test_large_outputs_do_not_block() -> None:
    assert len(run("print('x' * 10**6)").stdout) == 10**6 + 1


def test_errors_are_watched_while_they_come() -> None:
    seen: list[str] = []
    code = (
        "import sys, time\nfor i in range(3): print('x' * 300, i, end='', file=sys.stderr, flush=True); time.sleep(0.6)"
    )
    done = run_child("the check", [sys.executable, "-c", code], watch=seen.append)
    assert {text[-2:] for text in seen} >= {" 0", " 1", " 2"} and max(map(len, seen)) == 400
    assert len(done.stderr) == 906


def test_a_slow_child_that_computes_now_and_then_is_waited_for() -> None:
    code = f"import time\nfor _ in range(8): sum(range(10**6)); time.sleep({LIMIT_S / 4})\nprint('done')"
    assert run(code).stdout == "done\n"


def test_a_child_that_waits_forever_is_killed_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "id"
    code = "import subprocess; c = subprocess.Popen(['sleep', '600']); "
    code += f"open({str(path)!r}, 'w').write(str(c.pid)); c.wait()"
    with pytest.raises(Stalled, match=rf"the check made no progress for 1 s.*{START_TIMEOUT_VARIABLE}"):
        run(code)
    # The system ends a killed process when it next gives it a processor.
    wait_for(lambda: has_ended(int(path.read_text())), "the child of the child has ended")


def test_a_child_that_computes_forever_ends_by_its_processor_time() -> None:
    with pytest.raises(Stalled, match="the check has computed for 0 s, its limit, without an end"):
        run("while True: pass", cpu_limit_s=0.5)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", ""])
def test_a_limit_that_is_no_number_of_seconds_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match=START_TIMEOUT_VARIABLE):
        start_timeout_s()


def test_progress_lasts_as_long_as_the_measure_changes() -> None:
    progress = Progress(0.05)
    for number in range(4):
        progress.note("x", number)
        time.sleep(0.04)
    time.sleep(0.05)
    with pytest.raises(Stalled, match="x made no progress"):
        progress.note("x", 3)
