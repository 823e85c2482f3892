"""Evenness of policies in simulations with output lengths that they do not know."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from bench.routing.baselines import LeastRequests, PowerOfTwo, RoundRobin
from replicas.protocol import Band
from replicas.shared_rules.block_hash import extend_hashes
from router.balancing.load_table import InFlight, LoadTable
from router.balancing.policy import LeastTokens, PrefixIndex
from router.types import RoutingPolicy, RoutingRequest
from testkit.router.plain_decisions import ListedCandidates
from testkit.router.simulated_replicas import BLOCK_SIZE, request, stats
from testkit.router.simulated_time import FakeClock

MakePolicy = Callable[[random.Random], RoutingPolicy]


@dataclass
class Sizes:
    """Sizes of one request: its prompt, its predicted output, and its real output, known to the replica alone."""

    prompt: tuple[int, ...]
    expected_output_tokens: int
    output_tokens: int


def skewed(rng: random.Random, prefix: tuple[int, ...] = ()) -> Sizes:
    """Prompts and outputs of one to five hundred tokens; the expectation is right within a factor of two."""
    prompt = (*prefix, *(rng.randrange(10**6) for _ in range(skewed_length(rng))))
    output_tokens = skewed_length(rng)
    return Sizes(prompt, max(1, int(output_tokens * rng.uniform(0.5, 2.0))), output_tokens)


def skewed_length(rng: random.Random) -> int:
    return min(500, 1 + int(rng.lognormvariate(3.0, 1.3)))


@dataclass
class Fleet:
    """Replicas that compute one request after the other, with the true number of tokens left on each."""

    policy: RoutingPolicy
    num_replicas: int = 4
    tokens_per_s: float = 1000.0
    clock: FakeClock = field(default_factory=FakeClock)
    work: dict[str, float] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    """Those that had to be computed."""
    running: list[tuple[float, int, InFlight]] = field(default_factory=list)
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.table = LoadTable(self.clock)
        self.cache = PrefixIndex()
        for number in range(self.num_replicas):
            # No prompt is too many for its cache.
            self.table.record(replace(stats(f"replica-{number}", slots=1000), num_blocks=50_000))
            self.work[f"replica-{number}"] = 0.0

    def send(self, sizes: Sizes) -> float:
        """Give a request to the replica that the policy chooses; the work that it finds there."""
        while self.running and self.running[0][0] <= self.clock.now:
            self.table.end(heapq.heappop(self.running)[-1])
        hashes: list[bytes] = []
        extend_hashes(hashes, sizes.prompt, BLOCK_SIZE)
        wanted = RoutingRequest(request(str(self.num_sent), sizes.prompt), sizes.expected_output_tokens, hashes)
        replica_id = self.policy.rank(wanted, ListedCandidates(self.table.views())).first
        num_to_compute = self.policy.placed(wanted, replica_id)
        in_flight = self.table.begin(replica_id, Band.STANDARD, num_to_compute, sizes.expected_output_tokens)
        found = self.work[replica_id]
        self._work_on(replica_id, sizes, hashes)
        ends_s = self.clock.now + self.work[replica_id] / self.tokens_per_s
        heapq.heappush(self.running, (ends_s, self.num_sent, in_flight))
        self.num_sent += 1
        return found

    def pass_time(self, seconds: float) -> None:
        for replica_id, work in self.work.items():
            self.work[replica_id] = max(0.0, work - seconds * self.tokens_per_s)
        self.clock.now += seconds

    def spread(self) -> float:
        """Most outstanding tokens of a replica, over the mean; as the table counts them."""
        outstanding = [view.outstanding_tokens for view in self.table.views()]
        return max(outstanding) * len(outstanding) / sum(outstanding)

    def _work_on(self, replica_id: str, sizes: Sizes, hashes: list[bytes]) -> None:
        cached = self.cache.num_blocks_held(hashes).get(replica_id, 0) * BLOCK_SIZE
        self.cache.add(replica_id, hashes)
        num_prompt_tokens = max(1, len(sizes.prompt) - cached)
        self.num_prompt_tokens += num_prompt_tokens
        self.work[replica_id] += num_prompt_tokens + sizes.output_tokens


def run_trace(make: MakePolicy, seed: int, num_prefixes: int = 0) -> tuple[float, int]:
    """Return the work (p99) before 1500 Poisson arrivals at 0.8 of the replicas' rate, and the tokens computed."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.randrange(10**6) for _ in range(200)) for _ in range(num_prefixes)]
    trace = [skewed(rng, rng.choice(prefixes) if prefixes else ()) for _ in range(1500)]
    mean_tokens = sum(len(sizes.prompt) + sizes.output_tokens for sizes in trace) / len(trace)
    fleet = Fleet(make(random.Random(seed)))
    rate = 0.8 * fleet.num_replicas * fleet.tokens_per_s / mean_tokens
    found = []
    for sizes in trace:
        fleet.pass_time(rng.expovariate(rate))
        found.append(fleet.send(sizes))
    return sorted(found)[int(0.99 * len(found))], fleet.num_prompt_tokens


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(20))
def test_simultaneous_requests_spread_within_15_percent(seed: int):
    rng = random.Random(seed)
    fleet = Fleet(LeastTokens(rng))
    for _ in range(200):
        fleet.send(skewed(rng))
    assert fleet.spread() <= 1.15


@pytest.mark.parametrize("seed", range(10))
def test_two_hundred_requests_with_one_prefix_spread_too(seed: int):
    """A popular prefix makes no hot spot."""
    rng = random.Random(seed)
    prefix = tuple(range(500))
    fleet = Fleet(LeastTokens(rng))
    for _ in range(200):
        fleet.send(skewed(rng, prefix))
    assert fleet.spread() <= 1.15


@pytest.mark.parametrize("seed", range(3))
def test_work_based_routing_beats_counts_on_a_skewed_trace(seed: int):
    by_tokens, _ = run_trace(LeastTokens, seed)
    by_two_counts, _ = run_trace(PowerOfTwo, seed)
    by_counts, _ = run_trace(LeastRequests, seed)
    by_turns, _ = run_trace(lambda rng: RoundRobin(), seed)
    assert by_tokens < by_counts
    assert by_tokens < 0.9 * by_two_counts
    assert by_tokens < 0.7 * by_turns


@pytest.mark.parametrize("seed", range(3))
def test_shared_prefixes_are_reused_without_a_hot_spot(seed: int):
    with_affinity, num_computed = run_trace(LeastTokens, seed, num_prefixes=300)
    without, num_computed_without = run_trace(LeastRequests, seed, num_prefixes=300)
    assert num_computed < 0.8 * num_computed_without
    assert with_affinity < without
