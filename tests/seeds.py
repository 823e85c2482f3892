"""Choice of what a run plays of random worlds and of tests with many cases, and the way to play a world again.

A test of random worlds takes `seeds`, and is marked with how many worlds there are and how many each call plays:

    @pytest.mark.random_worlds(3000, per_call=250)
    def test_nothing_leaks(seeds: Seeds) -> None:
        for seed in seeds:
            play(random.Random(seed))

1. A run plays a twelfth of that number. Their seeds are drawn from the commit's hash, so that every commit explores
   others. Without a checkout of git they are the numbers from 0 upwards.
2. `--deep` plays all worlds with the seeds from 0 upwards, and those of the commit.
3. The report of a failure ends with the seed and with the command that plays this world alone. A seed that has found
   something goes into the mark, `examples=(...)`, and is played in every run.

Of a parametrized test that is marked `sampled(number)`, a run plays as many cases as the mark says, drawn from the
commit's hash. `--deep` plays all.

Modules that take long are marked `rotated`. Of those of a kind (`tests/unit`, `tests/ray`), a run plays a fifth,
drawn from the commit's hash. `--deep` plays all, and so does a run that names files.
"""

import random
import subprocess
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

MARK = "random_worlds"
_FIXTURE = "seeds"
_ROOT = Path(__file__).resolve().parents[1]
_GIT_LIMIT_S = 60.0
_SHARE = 12
_ROTATION = 5


class Seeds:
    """Seeds that one call of a test plays, in order."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = tuple(values)
        self.current: int | None = None
        """The seed of the world that is played; None: none is."""

    def __iter__(self) -> Iterator[int]:
        for seed in self._values:
            self.current = seed
            yield seed
        self.current = None

    @property
    def are_many(self) -> bool:
        """True if a call may assert something of all its worlds together, false if it plays one world again."""
        return len(self._values) > 1


def groups(number: int, per_call: int, test: str, commit: str | None, is_deep: bool) -> dict[str, range | list[int]]:
    """Seeds of each call of a test, by the call's name, for `number` worlds of which each call plays `per_call`."""
    num_calls = number // per_call
    num_played = -(-num_calls // _SHARE)
    num_fixed = num_calls if is_deep else num_played if commit is None else 0
    fixed = (range(call * per_call, (call + 1) * per_call) for call in range(num_fixed))
    calls: dict[str, range | list[int]] = {f"{seeds[0]}-{seeds[-1]}": seeds for seeds in fixed}
    if commit is not None:
        rng = random.Random(f"{commit} {test}")
        for call in range(num_played):
            calls[f"commit-{call}"] = [rng.getrandbits(40) for _ in range(per_call)]
    return calls


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random worlds")
    group.addoption("--deep", action="store_true", help="all random worlds, and the tests that are marked `deep`")
    group.addoption("--seed", type=int, help="of random worlds the one with this seed alone")
    group.addoption("--commit", help="what some seeds are drawn from; as it is, the hash of the commit")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.commit is None:  # here, so that xdist's processes are given one and the same
        config.option.commit = _commit()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        return
    options = metafunc.config.option
    chosen = _chosen(*mark.args, **mark.kwargs, test=metafunc.definition.nodeid, options=options)
    metafunc.parametrize(_FIXTURE, [Seeds(seeds) for seeds in chosen.values()], ids=list(chosen))


def _chosen(
    number: int, per_call: int = 1, examples: Sequence[int] = (), *, test: str, options: object
) -> dict[str, Sequence[int]]:
    seed, commit = getattr(options, "seed"), getattr(options, "commit")  # noqa: B009
    if seed is not None:
        return {str(seed): [seed]}
    known = {f"example-{example}": [example] for example in examples}
    return {**known, **groups(number, per_call, test, commit, getattr(options, "deep"))}  # noqa: B009


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    seeds = getattr(item, "funcargs", {}).get(_FIXTURE)
    if report.failed and isinstance(seeds, Seeds) and seeds.current is not None:
        again = f"python -m pytest '{item.nodeid.partition('[')[0]}' --seed {seeds.current}"
        report.sections.append(("random world", f"seed {seeds.current}; to play it again:\n{again}"))
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.deep:
        commit, names_files = config.option.commit, not all(Path(name).is_dir() for name in config.args)
        resting = set() if names_files else _resting(items, commit)
        quick = (item for item in items if _module(item) not in resting and not item.get_closest_marker("deep"))
        chosen = set(_sampled(quick, commit))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _resting(items: Iterable[pytest.Item], commit: str | None) -> set[str]:
    """Return the rotated modules that the commit does not play: four fifths of those of each kind."""
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for module in {_module(item) for item in items if item.get_closest_marker("rotated")}:
        kinds["/".join(module.split("/")[:-1][:2])].add(module)
    resting = set()
    for kind, modules in kinds.items():
        num_played = -(-len(modules) // _ROTATION)
        resting |= modules.difference(random.Random(f"{commit} {kind}").sample(sorted(modules), num_played))
    return resting


def _sampled(items: Iterable[pytest.Item], commit: str | None) -> Iterator[pytest.Item]:
    """Yield the cases that the commit plays of each test; all if the test is not marked."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for test, of_test in cases.items():
        mark = of_test[0].get_closest_marker("sampled")
        number = len(of_test) if mark is None else min(*mark.args, len(of_test))
        yield from random.Random(f"{commit} {test}").sample(of_test, number)


def _commit() -> str | None:
    """Return the hash of the commit that is checked out; None: this is no checkout, or there is no git."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
