"""The command `headway` itself: version, completion, help, mistyped names; and the targets of `make`."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "headway")
    assert result.stdout.split()[1][0].isdigit()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str) -> None:
    result = CliRunner().invoke(app, [], prog_name="headway", env={"_HEADWAY_COMPLETE": f"source_{shell}"})
    assert result.exit_code == 0
    assert "_HEADWAY_COMPLETE" in result.stdout and "headway" in result.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [("headway ba", "batch"), ("headway chat --mod", "--model"), ("headway serve --max-n", "-seqs")],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_commands_and_options(shell: str, words: str, expected: str) -> None:
    environment = {
        "_HEADWAY_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    result = CliRunner().invoke(app, [], prog_name="headway", env=environment)
    assert expected in result.stdout, result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chta", "There is no command 'chta'. Did you mean 'chat'?"),
        ("xyz", "There is no command 'xyz'."),
        ("models pul", "No such command 'pul'. Did you mean 'pull'?"),
    ],
)
def test_a_mistyped_command_gets_the_nearest(words: str, message: str) -> None:
    refused = CliRunner().invoke(app, words.split(), env={"COLUMNS": "100"})
    assert (refused.exit_code, message in refused.stderr) == (2, True)


def test_the_help_of_serve_fits_on_two_screens_and_has_the_common_options() -> None:
    runner = CliRunner()
    short = runner.invoke(app, ["serve", "--help"], env={"COLUMNS": "80"}).stdout
    assert len(short.splitlines()) <= 80
    assert {"--model", "--port", "--num-replicas", "--max-num-seqs", "--help-all"} <= set(short.split())
    whole = runner.invoke(app, ["serve", "--help-all"], env={"COLUMNS": "80"}).stdout
    assert "--job-lease-s" in whole.split() and "--job-lease-s" not in short.split()
    assert "--tensor-parallel-size" not in whole


def test_make_alone_lists_its_targets() -> None:
    root = Path(__file__).parents[3]
    listed = subprocess.run(["make", "--no-print-directory"], cwd=root, capture_output=True, text=True, check=True)
    phony = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert phony and set(re.findall(r"^  make (\S+)", listed.stdout, re.MULTILINE)) == set(phony[1].split())


def test_every_command_explains_itself() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for name in ("serve", "chat", "complete", "batch", "top", "grafana", "bench", "models", "keys", "doctor"):
        assert name in listed
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0
