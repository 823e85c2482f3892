"""Command `headway bench`: offer load to an OpenAI-compatible server and measure it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from replicas.protocol import Band
from serve_app.benchmark.levels import Arrivals, Concurrency, Extent, Level, Rate, Replay
from serve_app.benchmark.rows import Targets
from serve_app.benchmark.trace import band_of, read_trace
from serve_app.benchmark.workload import Endpoint, Lengths, Workload
from serve_app.cli.clients.client import DEFAULT_URL, KeyOption, UrlOption, connected
from serve_app.cli.clients.terminal import stderr

_DEFAULT_CONCURRENCY = "4"
_PLOT_KINDS = (".png", ".svg")
_PIPE_WIDTH = 200
_LOAD, _REQUESTS, _RESULTS = "Load", "Requests", "Results"

Parsed = TypeVar("Parsed")

ModelOption = Annotated[str | None, typer.Option(help="Model; not needed if the server has one.")]
ConcurrencyOption = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help=f"Requests that are open together; each of several numbers is a level. Default: {_DEFAULT_CONCURRENCY}.",
        rich_help_panel=_LOAD,
    ),
]
RateOption = Annotated[
    str | None,
    typer.Option(metavar="R[,R...]", help="Requests a second, whatever is still open.", rich_help_panel=_LOAD),
]
ArrivalsOption = Annotated[Arrivals, typer.Option(help="Spacing of requests at a rate.", rich_help_panel=_LOAD)]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="JSON lines with `time` (seconds), `prompt` (text or token ids) or `prompt_tokens`, `max_tokens`, "
        "and perhaps `band` and `extra_body`.",
        rich_help_panel=_LOAD,
    ),
]
NumRequestsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Requests of each level. Default, without --duration: 100, or 8 for each one that is open together.",
        rich_help_panel=_LOAD,
    ),
]
DurationOption = Annotated[
    float | None,
    typer.Option(min=0.1, help="Seconds of each level in which requests are sent.", rich_help_panel=_LOAD),
]
WarmupOption = Annotated[
    int, typer.Option(min=0, help="Requests before each level that do not count.", rich_help_panel=_LOAD)
]
TimeoutOption = Annotated[
    float, typer.Option(min=0.1, help="Longest duration of a request, seconds.", rich_help_panel=_LOAD)
]
RetriesOption = Annotated[
    bool,
    typer.Option("--retries", help="Send refused requests again, as OpenAI's clients do.", rich_help_panel=_LOAD),
]
EndpointOption = Annotated[Endpoint, typer.Option(help="Kind of the requests.", rich_help_panel=_REQUESTS)]
PromptTokensOption = Annotated[
    str,
    typer.Option(
        metavar="N|LOW:HIGH",
        help="Tokens of a prompt: a number, a range, or LOW:HIGH:MEDIAN:SIGMA for a log-normal distribution.",
        rich_help_panel=_REQUESTS,
    ),
]
MaxTokensOption = Annotated[
    str,
    typer.Option(metavar="N|LOW:HIGH", help="Most tokens of an answer, in the same forms.", rich_help_panel=_REQUESTS),
]
SharedPrefixOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens with which all prompts begin, as a part of their length. Without, no two prompts begin alike.",
        rich_help_panel=_REQUESTS,
    ),
]
BandOption = Annotated[
    str | None,
    typer.Option(
        metavar="BAND|BAND=SHARE,...",
        help="Priority: interactive, standard or batch, or a mix such as interactive=0.2,batch=0.8.",
        rich_help_panel=_REQUESTS,
    ),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Make all answers as long as they may be.", rich_help_panel=_REQUESTS),
]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="Randomness of answers.", rich_help_panel=_REQUESTS)]
ExtraBodyOption = Annotated[
    str, typer.Option(metavar="JSON", help="Further fields of each request.", rich_help_panel=_REQUESTS)
]
SeedOption = Annotated[int, typer.Option(help="Seed of sizes, bands and times.", rich_help_panel=_REQUESTS)]
TtftTargetOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="Longest time to first token that counts as goodput.", rich_help_panel=_RESULTS),
]
ItlTargetOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Longest mean time between two tokens of an answer that counts as goodput.",
        rich_help_panel=_RESULTS,
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", dir_okay=False, help="File for all figures.", rich_help_panel=_RESULTS),
]
RowsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", dir_okay=False, help="File for each request, JSON lines.", rich_help_panel=_RESULTS),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="PNG or SVG of latencies, throughput and goodput over time, or over the levels.",
        rich_help_panel=_RESULTS,
    ),
]


def bench(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    model: ModelOption = None,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    arrivals: ArrivalsOption = Arrivals.POISSON,
    trace: TraceOption = None,
    num_requests: NumRequestsOption = None,
    duration: DurationOption = None,
    warmup: WarmupOption = 0,
    timeout: TimeoutOption = 600.0,
    retries: RetriesOption = False,
    endpoint: EndpointOption = Endpoint.CHAT,
    prompt_tokens: PromptTokensOption = "256",
    max_tokens: MaxTokensOption = "128",
    shared_prefix_tokens: SharedPrefixOption = 0,
    band: BandOption = None,
    ignore_eos: IgnoreEosOption = False,
    temperature: TemperatureOption = 0.0,
    extra_body: ExtraBodyOption = "{}",
    seed: SeedOption = 0,
    ttft_target_ms: TtftTargetOption = None,
    itl_target_ms: ItlTargetOption = None,
    json_file: JsonOption = None,
    rows: RowsOption = None,
    plot: PlotOption = None,
) -> None:
    """Send requests to a server, and measure latencies, throughput and goodput.

    Prompts are random words. Ctrl-C ends the load and prints what was measured.
    """
    # aiohttp and numpy take a fifth of a second to import, which the other commands would pay too.
    from serve_app.benchmark.run import Server, ServerRefused
    from serve_app.benchmark.session import Files, Plan, Session

    _check_files(json_file, rows, plot)
    levels = _levels(concurrency, rate, arrivals, trace)
    prompts = _read("--prompt-tokens", Lengths.parse, prompt_tokens)
    if shared_prefix_tokens >= prompts.low:
        raise _wrong(
            "--shared-prefix-tokens", f"{shared_prefix_tokens} is not below the shortest prompt, {prompts.low}"
        )
    fields = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    fields |= _read("--extra-body", _json_object, extra_body)
    answers = _read("--max-tokens", Lengths.parse, max_tokens)
    bands = {} if band is None else _read("--band", _bands, band)
    with connected(url, api_key) as client:
        name = model or client.only_model()
    workload = Workload(name, endpoint, prompts, answers, shared_prefix_tokens, bands, fields, seed)
    plan = Plan(
        Server(url, api_key, timeout, retries),
        workload,
        levels,
        Extent(num_requests, duration, warmup),
        Targets(ttft_target_ms, itl_target_ms),
        Files(json_file, rows, plot),
    )
    output = Console(highlight=False)
    if not output.is_terminal:
        output = Console(highlight=False, width=_PIPE_WIDTH)
    try:
        code = Session(plan, output, stderr()).run()
    except ServerRefused as error:
        stderr().print(f"error: {error.message}", markup=False)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


def _wrong(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)


def _read(option: str, parse: Callable[[str], Parsed], text: str) -> Parsed:
    """Parse an option's text; its ValueError is a wrong use of the command."""
    try:
        return parse(text)
    except ValueError as error:
        raise _wrong(option, str(error)) from None


def _levels(concurrency: str | None, rate: str | None, arrivals: Arrivals, trace: Path | None) -> list[Level]:
    given = [text is not None for text in (concurrency, rate, trace)]
    if sum(given) > 1:
        raise typer.BadParameter("--concurrency, --rate and --trace exclude each other")
    if trace is not None:
        return [Replay(_read("--trace", lambda path: read_trace(Path(path)), str(trace)))]
    if rate is not None:
        return [Rate(per_s, arrivals) for per_s in _read("--rate", _positive_numbers, rate)]
    numbers = _read("--concurrency", _positive_numbers, concurrency or _DEFAULT_CONCURRENCY)
    if any(number != int(number) for number in numbers):
        raise _wrong("--concurrency", f"'{concurrency}' has a number that is not whole")
    return [Concurrency(int(number)) for number in numbers]


def _positive_numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"'{text}' is not a list of numbers such as 1,4,16") from None
    if not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"'{text}' has a number that is not above 0")
    return numbers


def _bands(text: str) -> Mapping[Band, float]:
    """Read `interactive`, or shares such as `interactive=0.2,batch=0.8`."""
    shares: dict[Band, float] = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        try:
            shares[band_of(name)] = float(share or 1)
        except ValueError as error:
            raise ValueError(f"'{part}': {error}") from None
    if min(shares.values()) < 0 or sum(shares.values()) <= 0:
        raise ValueError(f"'{text}' must have shares of 0 and more, and one above 0")
    return shares


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"'{text}' is not a JSON object")
    return value


def _check_files(json_file: Path | None, rows: Path | None, plot: Path | None) -> None:
    """Refuse files that could not be written after the load, before it."""
    for option, path in (("--json", json_file), ("--rows", rows), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise _wrong(option, f"there is no folder {path.absolute().parent}")
    if plot is None:
        return
    if plot.suffix not in _PLOT_KINDS:
        raise _wrong("--plot", f"'{plot}' does not end in {' or '.join(_PLOT_KINDS)}")
    if find_spec("matplotlib") is None:
        raise _wrong("--plot", "plots need matplotlib, which `pip install 'headway-serve[bench]'` brings")
