"""Generator of docs/performance.md: `python -m bench.performance_page > docs/performance.md`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.report import EngineRecords, by_engine
from bench.record import RESULTS, cell

Result = dict[str, Any]
Rows = Iterable[Sequence[str]]

_INTRODUCTION = """# Performance

The tables are made from the files in `bench/results` by `python -m bench.performance_page > docs/performance.md`. Under
each stand its command, machine and commit. No measurement here ran on a GPU. Absolute times mean little on machines of
two cores that have other work too: compare within a table. `bench/results/README.md` says more about each, and has the
present commands of programs that have moved since.

## Measure a server yourself

`headway bench` offers load to any OpenAI-compatible server and measures it:

```sh
headway bench --concurrency 1,4,16 --prompt-tokens 64:512 --max-tokens 128 --ignore-eos --json out.json --plot out.png
headway bench --rate 2,4,8 --duration 60 --warmup 8 --ttft-target-ms 500 --itl-target-ms 50
headway bench --trace requests.jsonl --rows rows.jsonl
```

- `--concurrency` keeps so many requests open. `--rate` sends at random times (Poisson), or with `--arrivals constant`
  at equal distances, also when earlier requests are still open. Of several numbers each is a level with its own line.
- A trace has one request a line: `{"time": 0.5, "prompt_tokens": 200, "max_tokens": 64, "band": "interactive"}`, or
  `prompt` with a text or with token ids. `time` is in seconds after the start. `extra_body` has further fields of the
  request's body. With `--retries` refused requests are sent again when OpenAI's clients would send them.
- Prompts are random words. Two first requests tell how many tokens a word has for this server, so lengths are met
  within a few percent; the table's tokens are those of the server's `usage`. The words are new in each run, so that no
  prefix cache has them; `--shared-prefix-tokens` makes all prompts begin alike. Sizes, bands and times follow from
  `--seed`.
- TTFT and total time count from the moment at which a request was to leave. If requests left late, because the machine
  is too busy to send them, a warning says so.
- ITL is the time between two tokens. A chunk may have several tokens: the gap before it is shared by them. Their number
  comes from `token_ids` (Headway, vLLM), else the tokens of `usage` are spread evenly over the chunks. Chunks that are
  read together count as one. Where chunks have several tokens, the time between two chunks is shown too.
- TPOT is (last chunk's time - first chunk's time) / tokens after the first chunk, for each request.
- Goodput counts whole answers whose TTFT and TPOT are within `--ttft-target-ms` and `--itl-target-ms`.
- A failed request is counted by status and code, and the run goes on; only the very first one ends it. Ctrl-C ends the
  load and prints what was measured, with exit code 130.
- `--plot` needs matplotlib: `pip install 'headway-serve[bench]'`.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """Table of one result."""

    title: str
    name: str
    """Name of the file in `bench/results`, without `.json`."""
    headings: tuple[str, ...]
    rows: Callable[[Result], Rows]
    text: str = ""


def page() -> str:
    """Return the page."""
    return "\n".join([_INTRODUCTION, *(line for section in SECTIONS for line in _lines(section))])


def _lines(section: Section) -> Iterator[str]:
    result: Result = json.loads((RESULTS / f"{section.name}.json").read_text())
    yield f"## {section.title}\n"
    if section.text:
        yield f"{section.text}\n"
    yield f"| {' | '.join(section.headings)} |"
    yield "|---" * len(section.headings) + "|"
    for row in section.rows(result):
        yield f"| {' | '.join(row)} |"
    yield f"\n{origin(section.name, result)}\n"


def origin(name: str, result: Result) -> str:
    """Return the command, machine and commit of a result."""
    environment = result["environment"]
    changed = ", with changes that were not committed" if environment["has_uncommitted_changes"] else ""
    commit = environment["commit"][:9]
    machine = f"{environment['cpu']}, {environment['cores']} cores"
    when = environment["when"].partition(" ")[0]
    return f"`{result['command'].strip()}` · {machine} · commit {commit}{changed} · {when} · `{name}.json`"


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


def _methods(result: Result) -> Rows:
    first = result["outcomes"][0]["tokens_per_s"]
    for outcome in result["outcomes"]:
        yield (
            outcome["method"],
            f"{outcome['tokens_per_s']:,.0f} ({outcome['tokens_per_s'] / first:.2f})",
            cell(outcome["padding_efficiency"], ".0%"),
            f"{outcome['ttft_p50_s']:.1f} / {outcome['ttft_p99_s']:.1f}",
            f"{outcome['latency_p50_s']:.1f} / {outcome['latency_p99_s']:.1f}",
            cell(outcome["urgent_latency_p50_s"], ".1f"),
        )


def _prefix(result: Result) -> Rows:
    for name, key in (("computed", "miss_ttft_ms"), ("found in the cache", "hit_ttft_ms")):
        yield name, f"{result[key]['p50']:.1f}", f"{result[key]['p99']:.1f}"


def _budgets(result: Result) -> Rows:
    for budget in result["budgets"]:
        yield (
            str(budget["max_num_batched_tokens"]),
            f"{budget['undisturbed_p50_ms']:.1f} / {budget['undisturbed_p99_ms']:.1f}",
            f"{budget['disturbed_p50_ms']:.1f} / {budget['disturbed_p99_ms']:.1f}",
            f"{budget['prefill_slowdown']:.2f}",
        )


def _steps(result: Result) -> Rows:
    for step in dict.fromkeys(record["step"] for record in result["steps"]):
        times = {record["way"]: record["median_ms"] for record in result["steps"] if record["step"] == step}
        yield step, *(cell(times.get(way), ".1f") for way in ("plain", "compiled", "int8"))


def _formats(result: Result) -> Rows:
    plain = result["formats"][0]["bits_per_byte"]
    for each in result["formats"]:
        yield (
            each["format"],
            each["weights"],
            f"{each['mib']:.0f}",
            f"{each['bits_per_byte']:.4f}",
            f"{each['bits_per_byte'] / plain - 1:+.2%}",
            f"{each['same_choice']:.1%}",
            "" if (others := each.get("llama_cpp_bits_per_byte")) is None else f"{others:.4f}",
        )


def _targets(result: Result) -> Rows:
    for load in result["loads"]:
        target = load["target_itl_ms"]
        yield (
            f"{load['requests_per_s']:g}",
            "none" if target is None else f"{target:g}",
            f"{load['itl_mean_ms']:.0f}",
            f"{load['itl_p95_ms']:.0f}",
            f"{load['tokens_per_s']:,.0f}",
        )


def _sizes(result: Result) -> Rows:
    for size in result["sizes"]:
        yield (
            f"{size['num_running']:,}",
            f"{size['num_waiting']:,}",
            f"{size['decoding_ms']:.2f}",
            f"{size['changing_ms']:.2f}",
        )


def _bars(result: Result) -> Rows:
    for bar in result["bars"]:
        bound = "at least" if bar["is_lower_bound"] else "at most"
        missed = "" if bar["is_kept"] else " (missed)"
        yield bar["name"], f"{cell(bar['value'], ',.3g')}{missed}", f"{bound} {bar['limit']:g}"


def _ceilings(result: Result) -> Rows:
    for ceiling in result["ceilings"]:
        yield ceiling["library"], f"{ceiling['chunks_per_s']:,.0f}", f"{ceiling['chunks_per_cpu_s']:,.0f}"


def _starts(result: Result) -> Rows:
    for name, times in result["median"].items():
        left = max(turn["num_left"] for turn in result["turns"][name])
        memory = f"{times['memory_mb']:,.0f}"
        yield name, *(f"{times[key]:.1f}" for key in ("start_s", "start_cpu_s", "stop_s")), memory, str(left)


def _refusals(result: Result) -> Rows:
    for name, model in result["models"].items():
        yield name, f"{model['seconds']:.1f}", str(model["exit_status"])


def _simulated(result: Result) -> Rows:
    for row in result["rows"]:
        yield (
            f"{row['ingresses']} by {row['replicas']:,}",
            f"{row['tokens_per_s']:,.0f} ({row['over_one_ingress']:.3f})",
            str(row["batch_before_waiting_interactive"]),
            f"{row['fairness_of_standard']:.3f}",
            f"{row['max_over_mean_outstanding']:.2f}",
            f"{row['sent_back']} / {row['sent_again']}",
            " / ".join(f"{row['queue_p99_s'][band]:.2f}" for band in ("interactive", "standard")),
            " / ".join(f"{row['ttft_p99_s'][band]:.2f}" for band in ("interactive", "standard")),
            f"{row['prefix_hits']:.2f}",
        )


def _token_paths(result: Result) -> Rows:
    for name, parts in result["medians"].items():
        yield (
            name.removeprefix("ingresses_"),
            *(f"{parts[part]:.0f}" for part in ("ingress", "proxy", "replica_outside_engine", "rest_of_ray")),
            f"{parts['tokens_per_s']:,.0f}",
            f"{parts['chunks_per_token']:.2f}",
        )


_ENGINE_HEADINGS = ("engine", "tokens/s", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "tokens/s of one request")
_METHOD_HEADINGS = (
    "method", "tokens/s (of continuous)", "padding efficiency", "TTFT p50 / p99 s", "latency p50 / p99 s",
    "urgent requests' latency p50 s",
)  # fmt: skip
_BUDGET_HEADINGS = ("tokens of a step", "calm p50 / p99 ms", "beside a prefill p50 / p99 ms", "prefill's slowdown")
_STEP_HEADINGS = ("sequences x tokens", "transformers' layers, ms", "Headway, ms", "Headway with `int8`, ms")
_SIMULATED_HEADINGS = (
    "ingresses by replicas",
    "tokens/s (of one ingress)",
    "batch before a waiting interactive",
    "Jain, standard",
    "max/mean outstanding tokens",
    "sent back / again",
    "queue p99 s, interactive / standard",
    "TTFT p99 s, interactive / standard",
    "prefix hits",
)
_BAR_HEADINGS = ("figure", "value", "wanted")

SECTIONS = (
    Section(
        "Other engines, SmolLM2-135M's shape",
        "peers_S_partial",
        _ENGINE_HEADINGS,
        _engines,
        "48 requests of mixed lengths, 16 together, in bfloat16. Tokens/s are medians; latencies are of the best run.",
    ),
    Section("Other engines, Qwen2.5-0.5B's shape", "peers_Q", _ENGINE_HEADINGS, _engines),
    Section("Weights and KV cache in fewer bits, SmolLM2-135M's shape", "peers_S_4bits", _ENGINE_HEADINGS, _engines),
    Section("Weights in 4 bits, Qwen2.5-0.5B's shape", "peers_Q_4bits", _ENGINE_HEADINGS, _engines),
    Section("In process and over HTTP", "peers_S_http", _ENGINE_HEADINGS, _engines),
    Section(
        "Ways to batch, demo model",
        "baselines_demo",
        _METHOD_HEADINGS,
        _methods,
        "Classic ways to batch over the same engine, kernels and cache with 16 slots.",
    ),
    Section("Ways to batch, SmolLM2-135M's shape", "baselines_smollm2_shape", _METHOD_HEADINGS, _methods),
    Section(
        "Prefix cache",
        "prefix_hit",
        ("prompt of 1,500 tokens", "TTFT p50 ms", "TTFT p99 ms"),
        _prefix,
    ),
    Section(
        "Time between two tokens beside a long prefill",
        "step_fairness",
        _BUDGET_HEADINGS,
        _budgets,
        "Eight decodes beside a prefill of 2,032 tokens, demo model.",
    ),
    Section(
        "Quality of weights and KV cache in each format, SmolLM2-135M-Instruct",
        "weight_quality",
        (
            "format",
            "weights",
            "MiB",
            "bits per byte",
            "more than the first",
            "same greedy choice",
            "llama.cpp, bits per byte",
        ),
        _formats,
        "Text: articles of Python's language reference. There is no true bfloat16 row: the only weights at hand are a "
        "GGUF file in 4 bits (Q4_1). The first row has its values in bfloat16, and llama.cpp made the other GGUF files "
        "from it. The table shows what a format costs beyond that file, and flatters Q4_1. GPTQ and AWQ are rounded to "
        "nearest. The rows of `kv_cache_dtype` have the weights of the first row.",
    ),
    Section("A step of SmolLM2-135M's shape", "decode_steps_smollm2_shape", _STEP_HEADINGS, _steps),
    Section(
        "A target for the time between two tokens",
        "latency_target",
        ("requests/s", "`target_itl_ms`", "ITL mean ms", "ITL p95 ms", "tokens/s"),
        _targets,
    ),
    Section(
        "An engine step without the device",
        "scheduler_step",
        ("running", "waiting", "all decode, ms", "one in twenty ends, ms"),
        _sizes,
    ),
    Section("Balance over four replicas", "routing_balance", _BAR_HEADINGS, _bars),
    Section("Three times more than the replicas can do", "routing_overload", _BAR_HEADINGS, _bars),
    Section("Interactive requests beside a backlog", "routing_backlog", _BAR_HEADINGS, _bars),
    Section("Interactive requests beside a batch file", "jobs_interactive_timed_small", _BAR_HEADINGS, _bars),
    Section(
        "1 to 16 ingresses in front of 1 to 1,024 replicas, simulated",
        "scale_simulator_sizes",
        _SIMULATED_HEADINGS,
        _simulated,
        "Simulated time: the routers are real, and so are the schedulers and KV caches of up to 64 replicas. More "
        "replicas have a model of the scheduler. With it 32 replicas did the same tokens/s within 1 %, at one and "
        "three times their load, even or uneven. Steps take a slow GPU's time and compute nothing. Three times the "
        "load that the replicas can serve, 16 tenants with equal demands, half of which use one ingress alone. One "
        "ingress, which knows all requests, is the ideal. Wanted of several: 0.97 of its tokens/s, no batch request "
        "before an interactive one that waits at the same ingress, Jain's index of 0.95. With few replicas, Jain's "
        "index is that of few requests. `sent back`: requests that a replica refused; `sent again`: requests whose "
        "ingress died. A request that still waits at the end counts with its wait so far.\n\n"
        "![Figures by the numbers of ingresses and replicas](images/scale.svg)",
    ),
    Section(
        "8 ingresses in front of 256 replicas of 256 slots, simulated",
        "scale_simulator_256x256",
        _SIMULATED_HEADINGS,
        _simulated,
        "As above. Max/mean outstanding tokens (wanted: 1.2) depends on the slots: 16 requests of unequal lengths are "
        "too few to even out, and 256 are not. 8 ingresses lose most at the start, in which all slots are filled: "
        "of 64 replicas, they did 0.99 of the tokens/s of one from the eighth second on.",
    ),
    Section(
        "Uneven load and faults in front of 64 replicas, simulated",
        "scale_simulator_faults",
        _SIMULATED_HEADINGS,
        _simulated,
        "As above, but demands by Zipf's law, half of the requests in bursts of 100, prompts with shared prefixes. "
        "A replica dies, the ingress with most requests dies, and every second ingress hears nothing new for 2 s. No "
        "request fails: streams of the replica go on elsewhere, and clients of the ingress send their requests again. "
        "With one ingress those are all requests. A tenant that comes while slots are free may take them all, so "
        "Jain's index says little here.",
    ),
    Section(
        "Processor time of a token with one ingress and two",
        "token_path_ingresses",
        (
            "ingresses",
            "ingresses, us",
            "proxy, us",
            "replicas outside the engine, us",
            "rest of Ray, us",
            "tokens/s",
            "chunks a token",
        ),
        _token_paths,
        "Streams of single tokens through `PROFILE=throughput` from four replicas; steps take a slow GPU's time and "
        "compute nothing. Two cores are the limit here, not the ingress, so tokens/s do not grow. A replica's message "
        "carries half as many streams to each of two ingresses. On cores of their own, two are "
        "faster than one by twice the ratio of the first figure to the second.",
    ),
    Section("Replicas that are killed", "routing_failover", _BAR_HEADINGS, _bars),
    Section("A burst and a square wave", "routing_burst", _BAR_HEADINGS, _bars),
    Section("Processes that are killed while a batch runs", "jobs_kill", _BAR_HEADINGS, _bars),
    Section(
        "Start, stop and memory",
        "start_stop",
        ("application", "start, s", "its processor time, s", "stop, s", "memory, MB", "processes left"),
        _starts,
        "`headway serve` with the model in the cache, beside a bare Serve application whose replica imports torch. "
        "The memory is the sum of all processes' PSS, of `headway serve` after 100 chats.",
    ),
    Section(
        "Models that cannot be served",
        "broken_models",
        ("model", "seconds until the reason is told", "exit status"),
        _refusals,
    ),
    Section(
        "The load generator's own ceiling",
        "load_ceiling",
        ("library", "chunks/s", "chunks per second of its processor"),
        _ceilings,
        "Chunks that `headway bench` can read (it uses aiohttp) from a trivial server that shares the two cores, which "
        "other work had as well.",
    ),
)
"""Sections of the page, in order."""


if __name__ == "__main__":
    print(page(), end="")
