"""Report of a start on the terminal: the steps while they last, then the facts of the running server."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pydantic_core import to_json
from rich.console import Console
from rich.progress import Progress, TaskID

from replicas.protocol import ModelCard
from serve_app.cli.server.data_folder import left_data_dir
from serve_app.cli.server.private_cluster import PrivateCluster
from serve_app.config import HeadwayConfig
from serve_app.models.progress import spinner


class Steps:
    """Display of the steps of a start: a spinner with the time on a terminal, else one line for each."""

    def __init__(self, file: TextIO) -> None:
        self._console = Console(file=file, highlight=False, markup=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def begin(self, text: str) -> None:
        """Show the next step."""
        if not self._console.is_terminal:
            self._console.print(text)
        elif self._progress is None:
            self._progress = spinner(self._console)
            self._progress.start()
            self._task = self._progress.add_task(text, total=None)
        else:
            self._progress.update(self._task, description=text)

    def close(self) -> None:
        """Remove the spinner."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@dataclass(frozen=True, slots=True)
class Report:
    """Facts of a server that has started."""

    config: HeadwayConfig
    card: ModelCard
    cluster: PrivateCluster
    url: str
    log_path: Path
    has_keys: bool
    """True if requests need an API key."""
    jobs_state: str | None
    """State of the jobs process in `/health`; None: unknown."""
    front: str
    """Profile and number of ingresses, and the reason of the choice."""
    memory: str
    """Memory of the processes."""

    def lines(self) -> Iterator[str]:
        """Yield the report: a line for each fault of the checkpoint, and at most sixteen others."""
        yield f"Serving {self.config.model_name} at {self.url}"
        yield f"  model      {self._model()}"
        if self.config.is_toy_model:
            yield "  note       this model is a toy for tests; its answers are of no use"
        if self.card.weights:
            yield f"  weights    {self.card.weights}"
        yield from (f"  note       {note}" for note in self.card.notes)
        yield f"  KV cache   {self._kv_cache()}"
        yield f"  replicas   {self._replicas()}"
        yield f"  profile    {self.front}"
        yield f"  memory     {self.memory}"
        if self.jobs_state not in (None, "ok"):
            yield f"  jobs       {self.jobs_state}: files, batches and jobs are refused; the log says why"
        shared = left_data_dir(self.config)
        if shared is not None:
            yield f"  data       {self.config.data_dir}, since another server has used {shared}"
        ray = f"Ray's is {self.cluster.dashboard_url}, which asks for the token in {self.cluster.token_path}"
        yield f"  dashboard  {self.url}/dashboard; {ray}"
        yield f"  ray        . {self.cluster.environment_path}, then `ray status`, `serve status`"
        yield f"  log        {self.log_path}"
        yield f"Try: {self.url} in a browser, or headway chat --url {self.url}"
        yield f"     {self._curl()}"
        yield "Ctrl-C stops it."

    def _model(self) -> str:
        kernels = f", {self.card.kernels}" if self.card.kernels else ""
        return f"{self.config.model_path}, {self.card.dtype} on {self.card.device}{kernels}"

    def _kv_cache(self) -> str:
        longest, num_longest = self.card.max_model_len, self.card.num_longest
        num_tokens, requests = (
            round(num_longest * longest),
            f"{num_longest:.1f} requests of the full length of {longest:,}",
        )
        dtype = f" in {self.card.cache_dtype}" if self.card.cache_dtype else ""
        return f"{num_tokens:,} tokens{dtype}: {requests}; at most {self.card.max_num_seqs} run together"

    def _replicas(self) -> str:
        fewest, most = self.config.effective_min_replicas, self.config.effective_max_replicas
        return f"{self.config.num_replicas}" + (f", between {fewest} and {most}" if self.config.is_autoscaled else "")

    def _curl(self) -> str:
        body = {"model": self.config.model_name, "messages": [{"role": "user", "content": "Hello!"}]}
        key = ' -H "authorization: Bearer $HEADWAY_API_KEY"' if self.has_keys else ""
        data = shlex.quote(to_json(body).decode())
        return f"curl {self.url}/v1/chat/completions{key} -H 'content-type: application/json' -d {data}"
