"""Environments of the clients: a virtual environment or a folder of node modules for each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("~/.cache/headway-bench/clients").expanduser()
PROGRAMS = Path(__file__).parent / "programs"
_INSTALLED = "installed.json"
_INSTALL_LIMIT_S = 900.0
_RETRIES = ("--retries", "3", "--timeout", "60")


class CannotInstall(Exception):
    """Packages that could not be installed; the message holds the end of the installer's output."""


@dataclass(frozen=True, slots=True)
class Client:
    """Client of the sweep."""

    name: str
    program: str
    """File of its program."""
    packages: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    """Arguments of the program."""

    @property
    def directory(self) -> Path:
        """Directory of its environment."""
        return ROOT / self.name

    def install(self) -> None:
        """Make the environment, unless it has these packages already.

        Raises:
            CannotInstall: the packages are not to be had.
        """
        marker = self.directory / _INSTALLED
        if marker.exists() and json.loads(marker.read_text()) == list(self.packages):
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._is_node:
            (self.directory / "package.json").write_text('{"private": true, "type": "module"}\n')
            self._run("npm", "install", "--no-audit", "--no-fund", "--fetch-retries=3", *self.packages)
        else:
            self._run(sys.executable, "-m", "venv", ".")
            self._run(self._python, "-m", "pip", "install", "--quiet", *_RETRIES, *self.packages)
        marker.write_text(json.dumps(self.packages))

    def command(self) -> list[str]:
        """Return the command of the program, which runs in the environment's directory."""
        if not self._is_node:
            return [self._python, str(PROGRAMS / self.program), *self.arguments]
        # Node looks for packages beside the program.
        for name in (self.program, "ways.mjs"):
            shutil.copy(PROGRAMS / name, self.directory / name)
        return ["node", self.program, *self.arguments]

    @property
    def _is_node(self) -> bool:
        return self.program.endswith(".mjs")

    @property
    def _python(self) -> str:
        return str(self.directory / "bin" / "python")

    def _run(self, *command: str) -> None:
        try:
            result = subprocess.run(
                command, cwd=self.directory, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotInstall(str(error)) from None
        if result.returncode != 0:
            raise CannotInstall((result.stdout + result.stderr).strip()[-400:])


CLIENTS = (
    Client("openai-python", "openai_python.py", ("openai", "pydantic")),
    Client("openai-node", "openai_node.mjs", ("openai", "zod")),
    Client("openai-agents", "openai_agents.py", ("openai-agents",)),
    Client("langchain", "langchain_client.py", ("langchain", "langchain-openai")),
    Client("pydantic-ai", "pydantic_ai_client.py", ("pydantic-ai-slim[openai]",)),
    Client("instructor", "instructor_client.py", ("instructor",)),
    Client("litellm", "litellm_client.py", ("litellm", "mcp")),
    Client("llama-index", "llama_index_client.py", ("llama-index-llms-openai-like",)),
    Client("ai-sdk", "ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
    Client("dspy", "dspy_client.py", ("dspy",)),
    Client("haystack", "haystack_client.py", ("haystack-ai",)),
    Client("smolagents", "smolagents_client.py", ("smolagents[openai]",)),
    Client("autogen", "autogen_client.py", ("autogen-agentchat", "autogen-ext[openai]")),
    Client("crewai", "crewai_client.py", ("crewai",)),
    Client("semantic-kernel", "semantic_kernel_client.py", ("semantic-kernel",)),
    Client("anthropic-python", "anthropic_python.py", ("anthropic", "pydantic")),
    Client("anthropic-node", "anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    Client("langchain-anthropic", "langchain_anthropic_client.py", ("langchain", "langchain-anthropic")),
    Client("litellm-anthropic", "litellm_client.py", ("litellm", "mcp"), ("anthropic",)),
    Client("claude-code", "claude_code.mjs", ("@anthropic-ai/claude-code-linux-x64",)),
    Client("openai-responses", "openai_responses.py", ("openai", "pydantic")),
    Client("openai-responses-node", "openai_responses_node.mjs", ("openai", "zod")),
    Client("openai-agents-responses", "openai_agents_responses.py", ("openai-agents",)),
    Client("openai-stored", "openai_stored.py", ("openai", "pydantic")),
    Client("openai-stored-node", "openai_stored_node.mjs", ("openai",)),
    Client("openai-agents-stored", "openai_agents_stored.py", ("openai-agents",)),
    Client("litellm-responses", "litellm_responses.py", ("litellm", "mcp")),
    Client("codex", "codex.mjs", ("@openai/codex-linux-x64@npm:@openai/codex@0.171.0-linux-x64",)),
    *(
        Client(f"{library}-embeddings", "vectors_client.py", packages, (library,))
        for library, packages in (
            ("openai", ("openai",)),
            ("langchain", ("langchain-openai",)),
            ("litellm", ("litellm",)),
            ("llama-index", ("llama-index-embeddings-openai-like",)),
            ("qdrant", ("qdrant-client", "openai")),
        )
    ),
    Client("outlines", "outlines_client.py", ("outlines[openai]",)),
)
