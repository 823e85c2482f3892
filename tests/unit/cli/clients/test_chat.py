"""`headway chat` and `headway complete` against the HTTP application over a scripted replica."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from replicas.errors import ServingError
from replicas.text.tokenizer_files import load_tokenizer
from serve_app.cli.clients.chat import ChatSession
from serve_app.cli.clients.client import ServerClient
from serve_app.cli.clients.conversation import Conversation
from serve_app.cli.clients.generation import Sampling
from serve_app.cli.main import app
from testkit.http.api import MODEL, REPLY, Api, MakeApi, serving
from testkit.http.scripted_dispatcher import ScriptedToken
from testkit.limits import LIMIT_S, until

ROOT = Path(__file__).parents[4]


async def run(api: Api, *arguments: str, stdin: str | bytes = "") -> Result:
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(
            partial(CliRunner().invoke, app, [*arguments, "--url", f"{url}/v1"], input=stdin)
        )


async def talk(api: Api, *lines: str) -> Conversation:
    """Type lines into a chat until it ends; return the conversation."""
    conversation = Conversation()
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        session = ChatSession(ServerClient(url, None), MODEL, conversation, Sampling(max_tokens=8))
        await asyncio.to_thread(session.run, reader(iter(lines)))
    return conversation


def reader(lines: Iterator[str]):
    def read(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    return read


def sent(api: Api) -> list[str]:
    """Return the prompts that reached the replica, as the tokenizer wrote them."""
    assert api.dispatcher.card is not None
    tokenizer = load_tokenizer(api.dispatcher.card.model_id)
    return [tokenizer.decode(request.prompt_token_ids) for request in api.replica.started]


async def test_a_pipe_gets_the_answer_and_nothing_else(api: Api) -> None:
    result = await run(api, "chat", "--max-tokens", "12", stdin="How are\nyou?\n")
    answer = result.stdout.removesuffix("\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert answer and REPLY.startswith(answer)
    assert sent(api) == ["<|user|>How are\nyou?\n<|assistant|>"]


async def test_options_reach_the_request(api: Api) -> None:
    options = ("--temperature", "0.5", "--top-p", "0.9", "--seed", "7", "--max-tokens", "3", "--band", "batch")
    assert (await run(api, "chat", "hi", "--system", "Be brief.", *options)).exit_code == 0
    [request] = api.replica.started
    params = request.params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.5, 0.9, 7, 3)
    assert request.band.name == "BATCH"
    assert sent(api)[0].startswith("<|system|>Be brief.\n<|user|>hi\n")


async def test_complete_continues_a_text(api: Api) -> None:
    result = await run(api, "complete", "the quick", "--max-tokens", "12")
    assert result.exit_code == 0 and REPLY.startswith(result.stdout.removesuffix("\n"))
    whole = await run(api, "complete", "--json", "--logprobs", "1", "--max-tokens", "2", stdin="the quick")
    assert json.loads(whole.stdout)["choices"][0]["logprobs"]["tokens"]


async def test_an_error_is_its_message_and_exit_code_1(make_api: MakeApi) -> None:
    for arguments, what in (
        (("chat", "hi", "--model", "other"), "`other`"),
        (("complete", "hi", "--max-tokens", "9999"), "maximum context length"),
        (("chat", "hi"), "the replica burns"),
    ):
        result = await run(make_api(fail_at=0, error=ServingError("the replica burns")), *arguments)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert result.stderr.startswith("error: ") and what in result.stderr


async def test_text_that_is_no_text_is_refused(api: Api) -> None:
    for command in ("chat", "complete"):
        assert (await run(api, command, stdin=b"\xff\xfe")).exit_code == 2
    assert (await run(api, "chat", stdin=" \n")).exit_code == 2
    assert not api.replica.started


async def test_an_error_after_text_has_its_own_line(make_api: MakeApi) -> None:
    result = await run(make_api(fail_at=5), "chat", "hi")
    assert result.exit_code == 1 and result.stdout.endswith("\n") and REPLY.startswith(result.stdout[:-1])
    assert result.stderr.startswith("error: ")


async def test_a_chat_sends_what_was_said_before(api: Api) -> None:
    conversation = await talk(api, "/system Be kind.", "one", '"""two', 'and /three"""', "four \\", "five")
    first, second = (turn.answer for turn in conversation.turns[:2])
    assert sent(api)[1] == (
        f"<|system|>Be kind.\n<|user|>one\n<|assistant|>{first}\n<|user|>two\nand /three\n<|assistant|>"
    )
    assert sent(api)[2].endswith(f"<|assistant|>{second}\n<|user|>four \nfive\n<|assistant|>")


async def test_commands_change_the_conversation(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = await talk(api, "one", "two", "/undo", "/retry", "/system", "/model", "/nonsense", "/exit", "never")
    assert [turn.question for turn in conversation.turns] == ["one"]
    assert sent(api)[0] == sent(api)[2] and len(sent(api)) == 3
    shown = capsys.readouterr()
    assert f"* {MODEL}" in shown.out and "there is no command /nonsense" in shown.err
    assert (await talk(api, "one", "/clear")).turns == []


async def test_parameters_are_set_and_shown(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    await talk(api, "/set temperature 0.5", "/set band batch", "/set seed 7", "/set max_tokens", "/set", "one")
    assert api.replica.started[-1].params.temperature == 0.5 and api.replica.started[-1].params.seed == 7
    assert api.replica.started[-1].band.name == "BATCH" and api.replica.started[-1].params.max_tokens > 8
    shown = " ".join(capsys.readouterr().out.split())
    assert "temperature 0.5 top_p the server's default" in shown and "band batch" in shown


async def test_wrong_parameters_are_refused_and_change_nothing(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("/set temprature 1", "/set band urgent", "/set temperature 5", "/set top_p high", "/set top_p Infinity")
    await talk(api, "/set temperature 0.5", *wrong, "one")
    assert api.replica.started[-1].params.temperature == 0.5 and api.replica.started[-1].params.top_p == 1.0
    errors = capsys.readouterr().err
    assert "there is no parameter temprature; did you mean temperature?" in errors
    assert "band is urgent; it must be one of interactive, standard, batch" in errors
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 5}
    refusal = (await api.http.post("/v1/chat/completions", json=body)).json()["error"]["message"]
    assert refusal in errors and errors.count("`top_p`") >= 2


async def test_a_file_goes_with_the_next_message(api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.md").write_text("one\n```\ntwo\n")
    (tmp_path / "b.txt").write_text("three")
    conversation = await talk(
        api, f"/file {tmp_path / 'a.md'}", f"/file {tmp_path / 'b.txt'}", "compare", "again", "/bye"
    )
    questions = [turn.question for turn in conversation.turns]
    assert questions == ["a.md:\n````\none\n```\ntwo\n````\n\nb.txt:\n```\nthree\n```\n\ncompare", "again"]
    assert f"{tmp_path / 'a.md'} goes with the next message." in capsys.readouterr().out


async def test_files_that_are_no_text_are_refused(api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {"large.txt": b"x" * 1_000_001, "image.png": b"\x89PNG", "zeros": b"a\0b"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    await talk(api, *(f"/file {tmp_path / name}" for name in contents), f"/file {tmp_path}", "/file /no/such", "/file")
    errors = capsys.readouterr().err.splitlines()
    assert errors == [
        f"error: {tmp_path}/large.txt has 1.0 MB; a file in a message may have 1.0 MB",
        f"error: {tmp_path}/image.png is no text in UTF-8: byte 0 is 0x89",
        f"error: {tmp_path}/zeros is no text: it has zero bytes",
        f"error: {tmp_path} is no file",
        "error: /no/such: No such file or directory",
        "error: name a file",
    ]


async def test_a_failed_question_is_asked_again_and_not_sent_twice(make_api: MakeApi) -> None:
    api = make_api(fail_at=0)
    api.replica.fail_only = lambda request: len(api.replica.started) == 1
    conversation = await talk(api, "one", "/retry", "two")
    assert [turn.question for turn in conversation.turns] == ["one", "two"]
    assert sent(api)[2].count("<|user|>one") == 1


async def test_a_saved_conversation_goes_on(api: Api, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    await talk(api, "/system Be kind.", "one", f"/save {file}")
    assert json.loads(file.read_text())["messages"][0] == {"role": "system", "content": "Be kind."}
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as an editor may save it
    await talk(api, f"/load {file}", "two")
    assert sent(api)[1].startswith("<|system|>Be kind.\n<|user|>one\n<|assistant|>")
    assert sent(api)[1].endswith("<|user|>two\n<|assistant|>")


async def test_files_that_are_no_conversation_are_left_alone(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear all")
    (tmp_path / "odd.json").write_text('{"messages": [{"role": "assistant", "content": "hi"}]}')
    await talk(api, f"/save {file}", f"/load {file}", f"/load {tmp_path / 'odd.json'}", "/load", "/load /no/such")
    assert file.read_text() == "Dear all"
    errors = capsys.readouterr().err
    assert errors.count("is not a conversation") == 2
    assert "does not alternate" in errors and "name a file" in errors and "No such file" in errors


async def test_ctrl_c_stops_the_answer_and_not_the_chat(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(gate_at=3, gate=asyncio.Event())
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        with terminal("chat", "--url", url, HOME=str(tmp_path)) as chat:
            await chat.read_until(">>> ")
            chat.type("one\n")
            await chat.read_until("hello")
            chat.process.send_signal(signal.SIGINT)
            await chat.read_until("(stopped)")
            await until(lambda: bool(api.replica.aborted))
            await chat.read_until(">>> ")
            chat.type("\x04")
            assert await asyncio.to_thread(chat.process.wait) == 0
    assert (tmp_path / ".cache/headway/chat_history").read_text() == "one\n"


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"TERM": "xterm-256color"}, "bold"),
        ({"TERM": "dumb"}, "**bold**"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "**bold**"),
    ],
)
async def test_a_terminal_shows_markdown_and_the_speed(
    api: Api, tmp_path: Path, environment: dict[str, str], shown: str
) -> None:
    api.replica.stops_at = 4
    api.replica.script = [ScriptedToken(65, text) for text in ("Some ", "**bo", "ld**", " text.")]
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        with terminal("chat", "--url", url, HOME=str(tmp_path), **environment) as chat:
            await chat.read_until(">>> ")
            chat.type("one\n")
            answer = await chat.read_until(" tokens in ")
            text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", answer)
            # A slow machine also shows the answer while its markdown is not whole.
            assert text[text.rindex("Some ") :].startswith(f"Some {shown} text.")
            chat.type("/bye\n")
            assert await asyncio.to_thread(chat.process.wait) == 0


class Terminal:
    """Pseudo-terminal with a program in it."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd, self._unread = fd, ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    async def read_until(self, text: str) -> str:
        """Return what came before `text`, without it."""
        while text not in self._unread:
            self._unread += await asyncio.to_thread(self._read)
        before, _, self._unread = self._unread.partition(text)
        return before

    def _read(self) -> str:
        readable, _, _ = select.select([self._fd], [], [], LIMIT_S)
        assert readable, f"nothing came after {self._unread!r}"
        return os.read(self._fd, 4096).decode(errors="replace")


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """Run `headway` in a terminal of its own."""
    fd, inner = pty.openpty()
    command = [sys.executable, "-m", "serve_app.cli.main", *arguments]
    settings = {**os.environ, "TERM": "dumb", **environment}
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=settings, cwd=ROOT)
    os.close(inner)
    try:
        yield Terminal(process, fd)
    finally:
        process.kill()
        process.wait()
        os.close(fd)
