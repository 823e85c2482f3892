"""Processes for large work: they do it as a thread does, are replaced, and leave nothing behind."""

import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import pytest

import serve_app.openai.tokenize.work_process as module
from replicas.errors import InvalidRequest, NoReplicaAvailable, ServingError
from serve_app.openai.request.body import IgnoredValues
from serve_app.openai.request.conversation import MessageList
from serve_app.openai.request.parsing import convert_fields, parse_body, read_fields
from serve_app.openai.request.schema import (
    CHAT_IGNORED,
    COMPLETION_IGNORED,
    TOKENIZE_IGNORED,
    ChatBody,
    CompletionBody,
    TokenizeBody,
)
from serve_app.openai.request.validation import RequestLimits
from serve_app.openai.tokenize.prompt_encoder import ChatTurns, encoder_of
from serve_app.openai.tokenize.work_process import WorkProcess, WorkProcesses
from testkit.limits import LIMIT_S

LIMITS = RequestLimits(max_messages=4, max_prompts=3, max_body_values=400)
MAX_PROMPT_TOKENS = 60


def wait_until(is_true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def nothing() -> None:
    pass


def num_encoders() -> int:
    return encoder_of.cache_info().misses


def end_at_once() -> None:
    os._exit(1)


def stop_within_a_message() -> None:
    os.write(int(sys.argv[1]), bytes([0, 0, 1, 0, 0]))  # the first of 256 bytes
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture(scope="module")
def process(tokenizer: Any) -> Iterator[WorkProcess]:
    process = WorkProcess(partial(encoder_of, tokenizer.name_or_path, None, None))
    wait_until(process.is_ready)
    yield process
    process.end()


def test_work_is_done_in_another_process_at_low_priority(process: WorkProcess) -> None:
    assert process.call(os.getpid) == process.pid != os.getpid()
    assert process.call(partial(os.getpriority, os.PRIO_PROCESS, 0)) > os.getpriority(os.PRIO_PROCESS, 0)


def test_its_encoder_is_the_one_that_it_has_prepared(process: WorkProcess, tokenizer: Any) -> None:
    encoder = encoder_of(tokenizer.name_or_path, None, None)
    assert process.call(partial(encoder.encode_prompts, ["the quick", [1, 2]], None, True)) == encoder.encode_prompts(
        ["the quick", [1, 2]], None, True
    )
    assert process.call(num_encoders) == 1


def text(content: str) -> str:
    return f'{{"role": "user", "content": "{content}"}}'


BODIES: list[tuple[type[Any], IgnoredValues, str]] = [
    *(
        (schema, ignored, body)
        for schema, ignored in ((ChatBody, CHAT_IGNORED), (TokenizeBody, TOKENIZE_IGNORED))
        for body in (
            f'{{"model": "m", "messages": [{text("hello wörld")}, {text("the fox")}]}}',
            f'{{"model": "m", "messages": [{text("a" * 2000)}]}}',
            f'{{"model": "m", "messages": [{", ".join([text("a")] * 5)}]}}',
            f'{{"model": "m", "messages": [{text("a")}, {{"role": "user"}}]}}',
            '{"model": "m", "messages": [{"role": "assistant", "content": "first"}]}',
            '{"model": "m", "messages": []}',
            '{"model": "m", "messages": "a"}',
            f'{{"model": "m", "messages": [{text("a")}], "surprise": 1, "prompts": ["a"]}}',
            f'{{"model": "m", "messages": [{text("a")}], "chat_template_kwargs": {{"tools": 1}}}}',
            f'{{"model": "m", "messages": [{text("a")}], "tools": [{{}}]}}',
            "[1, 2]",
            '{"model": ',
            '{"model": [%s]}' % ("1," * 300 + "1"),
        )
    ),
    *(
        (CompletionBody, COMPLETION_IGNORED, body)
        for body in (
            '{"model": "m", "prompt": ["the quick", "brown"]}',
            '{"model": "m", "prompt": [[1, 2, 3], [4]]}',
            '{"model": "m", "prompt": ["a", "b", "c", "d"]}',
            f'{{"model": "m", "prompt": "{"fox " * 1000}"}}',
            '{"model": "m", "prompt": "a", "temperature": 9}',
            '{"model": "m", "prompt": 7}',
        )
    ),
]


def body_of(schema: type[Any], ignored: IgnoredValues, text: bytes) -> Any:
    return convert_fields(partial(parse_body, schema, ignored=ignored), LIMITS, read_fields([text], LIMITS)).value


def read(do: Callable[[Callable[[], Any]], Any], model: str, kind: tuple[type[Any], IgnoredValues, str]) -> object:
    """Return what comes of a body: its fields and its prompts, or the error."""
    schema, ignored, text = kind
    encoder = encoder_of(model, None)
    try:
        body = do(partial(body_of, schema, ignored, text.encode()))
        if schema is CompletionBody:
            encoded = do(partial(encoder.encode_prompts, body.prompt, MAX_PROMPT_TOKENS, True))
            return dict(body), encoded
        encoded = do(partial(encoder.encode_chat, ChatTurns.of(body), MAX_PROMPT_TOKENS, False))
        return {**dict(body), "messages": list(body.messages)}, encoded
    except ServingError as error:
        return type(error), error.args, error.code, error.param


@pytest.mark.parametrize("kind", BODIES, ids=[f"{kind[0].__name__}-{kind[2][:60]}" for kind in BODIES])
def test_both_roads_give_the_same(process: WorkProcess, tokenizer: Any, kind: Any) -> None:
    here = read(lambda work: work(), tokenizer.name_or_path, kind)
    assert read(process.call, tokenizer.name_or_path, kind) == here


def test_the_bodies_are_good_and_bad(tokenizer: Any) -> None:
    found = [read(lambda work: work(), tokenizer.name_or_path, kind) for kind in BODIES]
    errors = [each for each in found if isinstance(each, tuple) and isinstance(each[0], type)]
    assert all(issubclass(kind, InvalidRequest) for kind, *_ in errors)
    assert len(errors) == len(BODIES) - 4


def test_messages_stay_bytes_until_one_is_read(tokenizer: Any) -> None:
    """Pass on what would fail if it were read."""
    body = ChatBody(model="m", messages=[{"role": "user", "content": "a"}])  # type: ignore[arg-type]
    body = body.model_copy(update={"messages": MessageList.unread(b"unreadable")})
    turns = pickle.loads(pickle.dumps(ChatTurns.of(body)))
    assert turns.messages.num_bytes == len(b"unreadable")
    with pytest.raises(pickle.UnpicklingError):
        len(turns.messages)


def test_until_a_process_is_ready_work_is_done_here_and_a_dead_one_is_replaced() -> None:
    now_s = 0.0
    processes = WorkProcesses(nothing, 1, lambda: now_s)
    assert processes.run(os.getpid) == os.getpid()
    wait_until(lambda: processes.run(os.getpid) != os.getpid())
    first = processes.run(os.getpid)
    with pytest.raises(NoReplicaAvailable) as caught:
        processes.run(end_at_once)
    assert caught.value.code == "reader_lost"
    assert processes.run(os.getpid) == os.getpid()
    now_s = 100.0
    wait_until(lambda: processes.run(os.getpid) not in (first, os.getpid()))


@pytest.mark.parametrize(
    ("work", "is_stopped"),
    [(nothing, True), (partial(len, bytes(2**22)), True), (stop_within_a_message, False)],
    ids=["before the work", "within the work", "within the answer"],
)
def test_a_stopped_process_is_ended_after_a_time(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], is_stopped: bool
) -> None:
    monkeypatch.setattr(module, "_LIMIT_S", 0.2)
    process = WorkProcess(nothing)
    wait_until(process.is_ready)
    if is_stopped:
        os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(lambda: process.call(work))
        try:
            with pytest.raises(NoReplicaAvailable):
                answer.result(LIMIT_S / 10)
        finally:
            process._process.kill()
    assert process.has_ended


def test_a_process_that_cannot_start_harms_no_work() -> None:
    times_s = itertools.count(0.0, 100.0)
    processes = WorkProcesses(end_at_once, 1, lambda: next(times_s))
    assert [processes.run(os.getpid) for _ in range(3)] == [os.getpid()] * 3


PARENT = """
import time
from functools import partial
from serve_app.openai.tokenize.work_process import WorkProcess
process = WorkProcess(partial(time.sleep, 0.01))
while not process.is_ready():
    time.sleep(0.01)
print(process.pid, flush=True)
time.sleep(100)
"""


def test_the_process_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert has_not_ended(pid)
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not has_not_ended(pid))


def has_not_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_an_error_without_pickle_still_tells_its_kind(process: WorkProcess) -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: no"):
        process.call(raise_unpicklable)


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError


def raise_unpicklable() -> None:
    raise Unpicklable("no")


def use_until_lost(process: WorkProcess) -> None:
    while True:
        if process.is_ready():
            assert process.call(partial(sum, range(10_000))) == 49_995_000
        else:
            time.sleep(0.005)


def held() -> tuple[list[psutil.Process], int]:
    """Return this process's children, and its number of open files."""
    this = psutil.Process()
    return this.children(recursive=True), this.num_fds()


@pytest.mark.deep
@pytest.mark.parametrize("number", range(40))
def test_kills_at_any_moment_leave_nothing(number: int) -> None:
    """Of 1,000 processes, 25 in each case, each is killed while it starts, waits for work or does it."""
    rng, before = random.Random(number), held()
    for _ in range(25):
        process = WorkProcess(nothing)
        if rng.random() < 0.5:
            wait_until(process.is_ready)
        killer = threading.Timer(rng.uniform(0.0, 0.3), os.kill, (process.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(NoReplicaAvailable):
            use_until_lost(process)
        killer.join()
        assert process.has_ended
    assert held() == before
