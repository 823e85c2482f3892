"""The command `headway` itself: version, completion, help."""

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


def test_completion_offers_commands_and_options() -> None:
    for words, expected in (("headway ba", "batch"), ("headway chat --mod", "--model")):
        environment = {
            "_HEADWAY_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        result = CliRunner().invoke(app, [], prog_name="headway", env=environment)
        assert expected in result.stdout.split()


def test_every_command_explains_itself() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for name in ("serve", "chat", "complete", "batch", "top", "grafana", "bench", "models", "keys", "doctor"):
        assert name in listed
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0
