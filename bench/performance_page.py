"""Generator of docs/performance.md: `python -m bench.performance_page > docs/performance.md`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.report import EngineRecords, by_engine
from bench.record import RESULTS, cell

Result = dict[str, Any]
Rows = Iterable[Sequence[str]]

_INTRODUCTION = """# Performance

Each table answers one question. The line below it has the command, the machine, the commit and the date. All commits
are on `main`. From the third table on the machines have two cores, no GPU and other work, so compare figures within a
table only. `bench/results/README.md` has more measurements, and the present commands of programs that have moved.
[`headway bench`](commands.md#bench) measures your own server.

This page is made from the code and `bench/results`: `python -m bench.performance_page > docs/performance.md`.
"""

_MAX_COMMAND_CHARS = 160
"""Most characters of a command that are shown; the record has all."""


@dataclass(frozen=True, slots=True)
class Section:
    """Table that answers one question."""

    question: str
    names: tuple[str, ...]
    """Names of the results in `bench/results`, without `.json`; their rows make one table."""
    headings: tuple[str, ...]
    rows: Callable[[Result], Rows]
    text: str = ""
    shown: tuple[str, ...] = ()
    """First cells of the rows that are shown; empty: all rows are."""


def page() -> str:
    """Return the page."""
    return "\n".join([_INTRODUCTION, *(line for section in SECTIONS for line in _lines(section))])


def _lines(section: Section) -> Iterator[str]:
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in section.names}
    yield f"## {section.question}\n"
    if section.text:
        yield f"{section.text}\n"
    yield f"| {' | '.join(section.headings)} |"
    yield "|---" * len(section.headings) + "|"
    rows = [row for result in results.values() for row in section.rows(result)]
    yield from (f"| {' | '.join(row)} |" for row in rows if not section.shown or row[0] in section.shown)
    yield from (f"\n{origin(name, result)}" for name, result in results.items())
    yield ""


def origin(name: str, result: Result) -> str:
    """Return the command, machine and commit of a result."""
    environment = result["environment"]
    commit = environment["commit"][:9]
    machine = f"{environment['cpu']}, {environment['cores']} cores"
    when = environment["when"].partition(" ")[0]
    command = textwrap.shorten(result["command"], _MAX_COMMAND_CHARS, placeholder=" ...")
    return f"`{command}`; {machine}; commit {commit}; {when}; `{name}.json`"


def _engines(result: Result) -> Rows:
    for engine in by_engine(result["records"]):
        yield engine.name, cell(engine.tokens_per_s, ",.0f"), *_latencies(engine)


def _latencies(engine: EngineRecords) -> Iterator[str]:
    """Yield figures of the best repetition, and of one request alone."""
    mixed = min(engine.of("workload"), key=lambda record: record["wall_s"], default=None)
    single = max((record["decode_tok_s"] for record in engine.of("single")), default=None)
    for name in ("ttft_ms", "tpot_ms"):
        yield "-" if mixed is None else f"{mixed[name]['p50']:,.0f} / {mixed[name]['p99']:,.0f}"
    yield cell(single, ",.0f")


def _prefix(result: Result) -> Rows:
    for name, key in (("computed", "miss_ttft_ms"), ("found in the cache", "hit_ttft_ms")):
        yield name, f"{result[key]['p50']:.1f}", f"{result[key]['p99']:.1f}"


def _formats(result: Result) -> Rows:
    plain = result["formats"][0]["bits_per_byte"]
    for outcome in result["formats"]:
        yield (
            outcome["format"],
            f"{outcome['mib']:.0f}",
            f"{outcome['bits_per_byte'] / plain - 1:+.2%}",
            f"{outcome['same_choice']:.1%}",
        )


def _targets(result: Result) -> Rows:
    kinds = ((turn["num_interactive"], turn["num_batch"], turn["tpot_target_ms"] is None) for turn in result["turns"])
    last = dict(zip(kinds, result["turns"], strict=True))  # Of each kind the last turn.
    for turn in last.values():
        yield (
            f"{turn['num_interactive']} and {turn['num_batch']}",
            cell(turn["tpot_target_ms"], ".0f"),
            cell(turn["tpot_ms"], ".0f"),
            f"{turn['batch_tokens_per_s']:.0f}",
        )


def _gpu_engines(result: Result) -> Rows:
    """Yield figures of both engines on a GPU, model by model; the best of Headway's runs."""
    for model, name in (("llama1b", "1B"), ("llama8b", "8B")):
        vllm = [line for line in result["vllm"] if line["model"] == model]
        ours = [line for run in ("headway", "headway_larger_graphs") for line in result[run] if line["model"] == model]
        for size in (1, 32, 256):
            theirs = next(line["ms_step_median"] for line in vllm if (line["part"], line.get("b")) == ("decode", size))
            fastest = min(line["ms"] for line in ours if (line["part"], line.get("B")) == ("decode", size))
            yield f"{name}: decode step of {size}, ms", f"{theirs:.2f}", f"{fastest:.2f}"
        tokens = [max(line["out_tok_s"] for line in vllm if line["part"].startswith("batch"))]
        tokens.append(max(line["tok_s"] for line in ours if line["part"] == "trace"))
        yield f"{name}: 1,000 requests at once, tokens/s", *(f"{value:,.0f}" for value in tokens)


_GPU_SERVERS = ("vllm-equal", "headway-tp")


def _gpu_service(result: Result) -> Rows:
    """Yield figures of both servers on a GPU over HTTP."""
    lines = {(line["server"], line["part"], line.get("rate")): line for line in result["http"]}

    def both(part: str, rate: float | None, form: Callable[[Result], str]) -> Iterator[str]:
        yield from (form(lines[server, part, rate]) for server in _GPU_SERVERS)

    def ttft(line: Result) -> str:
        return f"{line['ttft_p50_ms']:,.0f} / {line['ttft_p99_ms']:,.0f}"

    yield "interactive beside a backlog: TTFT p50 / p99 ms", *both("mixed: interactive", 5.0, ttft)
    for part, name in (("mixed: backlog", "the backlog meanwhile"), ("burst", "500 requests at once")):
        yield f"{name}, tokens/s", *both(part, None, lambda line: f"{line['out_tok_s']:,.0f}")
    yield "40 requests a second: TTFT p50 / p99 ms", *both("poisson", 40.0, ttft)


def _bars(result: Result) -> Rows:
    for bar in result["bars"]:
        bound = "at least" if bar["is_lower_bound"] else "at most"
        missed = "" if bar["is_kept"] else " (missed)"
        yield bar["name"], f"{cell(bar['value'], ',.3g')}{missed}", f"{bound} {bar['limit']:g}"


def _simulated(result: Result) -> Rows:
    for row in result["rows"]:
        yield (
            f"{row['ingresses']} by {row['replicas']:,}",
            f"{row['tokens_per_s']:,.0f} ({row['over_one_ingress']:.3f})",
            f"{row['fairness_of_standard']:.3f}",
            f"{row['max_over_mean_outstanding']:.2f}",
            " / ".join(f"{row['ttft_p99_s'][band]:.2f}" for band in ("interactive", "standard")),
        )


_BAR_HEADINGS = ("figure", "value", "wanted")

SECTIONS = (
    Section(
        "On a GPU: how long does an interactive request wait beside a backlog?",
        ("gpu_h200",),
        ("over HTTP, Llama-3.2-1B's shape in bfloat16", "vLLM 0.26, `--scheduling-policy priority`",
         "Headway, `--profile throughput`"),
        _gpu_service,
        "Five interactive requests a second beside 400 batch requests of 2,048 tokens. Both servers run at most 256 "
        "sequences, without a prefix cache; vLLM was not run with more.",
    ),
    Section(
        "On a GPU: how fast is the engine?",
        ("gpu_h200",),
        ("shapes of Llama 3 in bfloat16", "vLLM 0.26", "Headway"),
        _gpu_engines,
        "Decodes have 1,024 tokens of context. The 1,000 requests have prompts of up to 1,024 tokens, and outputs of "
        "up to 512.",
    ),
    Section(
        "How many tokens a second, next to other engines?",
        ("peers_Q",),
        ("engine", "tokens/s", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "tokens/s of one request"),
        _engines,
        "48 requests of mixed lengths, 16 at a time, Qwen2.5-0.5B's shape in bfloat16. Tokens/s are medians, latencies "
        "those of the best run.",
    ),
    Section(
        "Does background work slow down interactive requests?",
        ("routing_backlog", "routing_backlog_small"),
        _BAR_HEADINGS,
        _bars,
        "1,000 batch requests wait during the whole measurement. Nothing was lost and nothing failed. `timed`: a step "
        "takes the time of a slow GPU and computes nothing. `small`: SmolLM2-135M's shape on the processor. `demo`: "
        "the demo model, whose steps are so short that every further sequence makes them much longer.",
        (
            *(f"{kind}: interactive TTFT p99, with backlog / without" for kind in ("timed", "demo", "small")),
            *(f"{kind}: interactive inter-token p99, ratio" for kind in ("timed", "demo", "small")),
            "timed: total tokens/s, both / batch alone",
        ),
    ),
    Section(
        "Does a full batch slow down an interactive stream?",
        ("tpot_target",),
        ("interactive and batch", "target ms", "TPOT ms", "batch tokens/s"),
        _targets,
        "SmolLM2-135M-Instruct, one thread, without and with the default `slo=interactive=1/auto`.",
        ("1 and 0", "1 and 31"),
    ),
    Section("What happens at three times the load that replicas can serve?", ("routing_overload",), _BAR_HEADINGS,
            _bars),
    Section("What do clients see of a killed replica?", ("routing_failover",), _BAR_HEADINGS, _bars,
            shown=("kills of a replica with a stream in mid-decode", "streams that ended in an error",
                   "outputs that differ", "added pause p95, s")),
    Section("What does a batch lose when processes are killed?", ("jobs_kill",), _BAR_HEADINGS, _bars,
            shown=("processes killed", "lines in no file", "lines more than once", "jobs lost or failed",
                   "ends that no webhook told")),
    Section(
        "How do many ingresses and replicas share work?",
        ("scale_simulator_sizes",),
        ("ingresses by replicas", "tokens/s (of one ingress)", "Jain, standard", "max/mean outstanding tokens",
         "TTFT p99 s, interactive / standard"),
        _simulated,
        "Simulated time at three times the load that the replicas can serve. The routers are real, and so are the "
        "schedulers of up to 64 replicas. Steps take a slow GPU's time and compute nothing. 16 tenants have equal "
        "demands, and half of them use one ingress alone. Jain's index says how evenly they were served: 1 is even.\n\n"
        "![Figures by the numbers of ingresses and replicas](images/scale.svg)",
        tuple(f"{ingresses} by {replicas}" for replicas in ("16", "1,024") for ingresses in (1, 16)),
    ),
    Section(
        "What does the prefix cache gain?",
        ("prefix_hit",),
        ("prompt of 1,500 tokens", "TTFT p50 ms", "TTFT p99 ms"),
        _prefix,
    ),
    Section(
        "What do fewer bits cost?",
        ("weight_quality",),
        ("format", "weights, MiB", "more bits per byte", "same greedy choice"),
        _formats,
        "SmolLM2-135M-Instruct on Python's language reference. Its only weights at hand are a GGUF file in 4 bits "
        "(Q4_1); the first row has their values in bfloat16, and llama.cpp made the other files from them.",
        ("bf16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0", "quantization=int8", "quantization=int4", "kv_cache_dtype=int8",
         "kv_cache_dtype=fp8"),
    ),
)  # fmt: skip
"""Sections of the page, in order."""


if __name__ == "__main__":
    print(page(), end="")
