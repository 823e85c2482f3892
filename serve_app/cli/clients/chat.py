"""Command `headway chat`: talk to a model, in a terminal or through a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from serve_app.cli.clients.client import DEFAULT_URL, KeyOption, ServerClient, ServerError, UrlOption, connected
from serve_app.cli.clients.conversation import Conversation, Turn, UnfitFile, quoted_file
from serve_app.cli.clients.events import JsonObject
from serve_app.cli.clients.generation import (
    STOPPED,
    Answer,
    BandOption,
    MaxTokensOption,
    ModelOption,
    Sampling,
    SeedOption,
    TemperatureOption,
    TopPOption,
    given_text,
    stream_answer,
)
from serve_app.cli.clients.markdown import answer_writer
from serve_app.cli.clients.parameters import PARAMETERS, UnfitParameter, field_of, parameter_text, parameter_value
from serve_app.cli.clients.terminal import message_of, stderr

_PATH = "/v1/chat/completions"
_PROMPT, _CONTINUATION = ">>> ", "... "
_BLOCK = '"""'
_HISTORY = Path("~/.cache/headway/chat_history")
_MAX_HISTORY = 1000
_MAX_SHOWN = 200
"""Characters of a forgotten question that are shown."""

ReadLine = Callable[[str], str]
"""Reader of a line after a prompt, such as `input`; EOFError: there are no more."""


def chat(
    message: Annotated[
        str | None, typer.Argument(metavar="MESSAGE", help="Question; prints the answer and ends.")
    ] = None,
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message.")] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = None,
    band: BandOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Chat with a model. Without a terminal, standard input is one question and only the answer is printed."""
    with connected(url, api_key) as client:
        sampling = Sampling(temperature, top_p, seed, band, max_tokens)
        converse(ChatSession(client, model or client.only_model(), Conversation(system), sampling), message)


def converse(session: ChatSession, message: str | None) -> None:
    """Ask the question `message`; None: read the questions from the terminal, or one from another standard input."""
    if message is None and sys.stdin.isatty():
        print(f"{session.model} at {session.url}. /help lists the commands, Ctrl-D ends.")
        with _line_editing():
            session.run(input)
        return
    question = given_text(message).strip()
    if not question:
        raise typer.BadParameter("the question is empty")
    if session.ask(question).is_stopped:
        raise typer.Exit(STOPPED)


@dataclass(frozen=True, slots=True)
class Entry:
    """Message or command that the user has typed."""

    text: str
    is_command: bool


class ChatSession:
    """Chat with one model of a server; writes to stdout and stderr.

    `run` reads messages and commands. A failed question stays in the conversation without an answer, for `/retry`.
    """

    def __init__(self, client: ServerClient, model: str, conversation: Conversation, sampling: Sampling) -> None:
        self.model = model
        self._client, self._conversation = client, conversation
        self._parameters = sampling.fields()
        self._files: list[str] = []
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/help": (self._help, "List the commands."),
            "/clear": (self._clear, "Forget the conversation; keep the system message."),
            "/system": (self._system, "[TEXT]  Set the system message; without TEXT remove it."),
            "/model": (self._model, "[NAME]  Change the model; without NAME list the server's models."),
            "/set": (self._set, "[NAME [VALUE]]  Set a parameter, or without VALUE its default; alone show them."),
            "/file": (self._file, "PATH  Add a text file to the next message."),
            "/save": (self._save, "FILE  Save the conversation."),
            "/load": (self._load, "FILE  Continue a saved conversation."),
            "/retry": (self._retry, "Ask the last question again."),
            "/undo": (self._undo, "Forget the last question and its answer."),
            "/bye": (self._exit, "End, as Ctrl-D does."),
            "/exit": (self._exit, "End, as Ctrl-D does."),
        }

    @property
    def url(self) -> str:
        """Root URL of the server."""
        return self._client.url

    def run(self, read_line: ReadLine) -> None:
        """Answer messages and obey commands until there are no more lines; Ctrl-C drops the line that is typed."""
        while True:
            try:
                entry = _read_entry(read_line)
                if entry.is_command:
                    self._obey(entry.text)
                elif entry.text:
                    question = "\n\n".join([*self._files, entry.text])
                    self._files.clear()
                    self._try(question)
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return

    def ask(self, question: str) -> Answer:
        """Send the conversation with a question, write the answer as it comes, and remember both.

        Raises:
            ServerError: the server refuses the question or breaks off.
        """
        self._conversation.turns.append(Turn(question, ""))
        body = self._body(self._conversation.messages(question), self._parameters)
        if sys.stderr.isatty():
            body["stream_options"] = {"include_usage": True}
        with answer_writer() as write:
            answer = stream_answer(self._client, _PATH, body, write)
        self._conversation.turns[-1] = Turn(question, answer.text)
        if sys.stderr.isatty():
            is_cut_off = answer.finish_reason == "length"
            notes = [answer.speed, "cut off: the answer has reached its limit of tokens" if is_cut_off else ""]
            for note in filter(None, notes):
                stderr().print(f"[dim]({note})[/]")
        return answer

    def _body(self, messages: list[JsonObject], parameters: JsonObject) -> JsonObject:
        return {"model": self.model, "messages": messages, **parameters}

    def _try(self, question: str) -> None:
        try:
            answer = self.ask(question)
        except ServerError as error:
            _print_error(error.message)
        else:
            stderr().print("[dim](stopped)[/]" if answer.is_stopped else "")

    def _obey(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            _print_error(f"there is no command {name}; /help lists them")
            return
        try:
            self._commands[name][0](argument.strip())
        except ServerError as error:
            _print_error(error.message)
        except (UnfitFile, UnfitParameter, OSError) as error:
            _print_error(message_of(error))

    def _help(self, _: str) -> None:
        for name, command in self._commands.items():
            print(f"{name:<9}{command[1]}")
        print(
            f"A message of several lines begins and ends with {_BLOCK}, or has \\ at the end of each line but the last."
        )
        print("Ctrl-C stops an answer.")

    def _clear(self, _: str) -> None:
        self._conversation.turns.clear()
        self._files.clear()
        print("The conversation is empty.")

    def _system(self, text: str) -> None:
        self._conversation.system = text or None
        print("The system message is set." if text else "There is no system message now.")

    def _model(self, name: str) -> None:
        names = self._client.models()
        if name in names:
            self.model = name
            print(f"The model is {name}.")
        elif name:
            _print_error(f"the server has no model {name}; it has {', '.join(names)}")
        else:
            for known in names:
                print(f"{'*' if known == self.model else ' '} {known}")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name:
            for known, field in PARAMETERS.items():
                print(f"{known:<20}{parameter_text(known, self._parameters.get(field))}")
            return
        field = field_of(name)
        changed = {key: value for key, value in self._parameters.items() if key != field}
        if text:
            changed[field] = parameter_value(name, text.strip())
            self._check(changed)
        self._parameters = changed
        print(f"{name} is {parameter_text(name, changed.get(field))}.")

    def _check(self, parameters: JsonObject) -> None:
        """Begin an answer with these parameters, and stop it at once.

        Raises:
            ServerError: the server refuses them.
        """
        with closing(self._client.events(_PATH, self._body([{"role": "user", "content": "."}], parameters))) as events:
            next(events, None)

    def _file(self, file: str) -> None:
        path = _path(file)
        self._files.append(quoted_file(path))
        print(f"{path} goes with the next message.")

    def _save(self, file: str) -> None:
        path = _path(file)
        self._conversation.save(path, self.model)
        print(f"Saved in {path}.")

    def _load(self, file: str) -> None:
        self._conversation = Conversation.load(_path(file))
        print(f"{len(self._conversation.turns)} questions and answers")

    def _retry(self, _: str) -> None:
        if not self._conversation.turns:
            _print_error("there is no question yet")
            return
        self._try(self._conversation.turns.pop().question)

    def _undo(self, _: str) -> None:
        if not self._conversation.turns:
            _print_error("there is no question yet")
            return
        print(f"Forgotten: {shorten(self._conversation.turns.pop().question, _MAX_SHOWN, placeholder=' ...')}")

    def _exit(self, _: str) -> None:
        raise EOFError


def _read_entry(read_line: ReadLine) -> Entry:
    line = read_line(_PROMPT)
    if line.startswith(_BLOCK):
        return Entry(_read_block(line.removeprefix(_BLOCK), read_line), is_command=False)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read_line(_CONTINUATION))
    return Entry("\n".join(lines).strip(), is_command=line.startswith("/"))


def _read_block(line: str, read_line: ReadLine) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(_BLOCK):
        lines.append(read_line(_CONTINUATION))
    lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
    return "\n".join(lines).strip()


def _path(file: str) -> Path:
    if not file:
        raise UnfitFile("name a file")
    return Path(file).expanduser()


def _print_error(message: str) -> None:
    stderr().print(f"error: {message}", markup=False)


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Let `input` edit lines, with the history of former chats, as far as the system can."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = _HISTORY.expanduser()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    num_known = readline.get_current_history_length()
    try:
        yield
    finally:
        readline.set_history_length(_MAX_HISTORY)
        with contextlib.suppress(OSError):
            readline.append_history_file(readline.get_current_history_length() - num_known, path)
