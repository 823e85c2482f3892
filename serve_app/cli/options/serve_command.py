"""Command line of `headway serve`: words in vLLM's form, and a help in which the options come first that most need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand

_NAMES = "--served-model-name"
_ALL = "headway.help_all"
_COMMON = {
    "Model": ("model", "served_model_name", "chat_template", "max_model_len", "dtype", "quantization"),
    "Address": ("host", "port", "api_key", "api_key_file", "profile"),
    "Replicas and GPUs": ("num_replicas", "tensor_parallel_size", "num_gpus_per_replica", "gpu_memory_utilization"),
    "Limits": ("max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes", "kv_cache_dtype"),
    "Others": ("config", "data_dir", "access_log", "log_format", "help", "help_all"),
}
"""Options of the short help, by their panel."""
_PANELS = {name: panel for panel, names in _COMMON.items() for name in names}


def with_dashes(name: str) -> str:
    """Return the name of an option with dashes: underscores stand for them, as in `--max_num_seqs`."""
    return name.replace("_", "-")


class ServeCommand(TyperCommand):
    """Command whose help has the common options, and whose option `--served-model-name` takes several names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: of the common options in one sentence each, or after `show_all` of all of them."""
        if not ctx.meta.get(_ALL):
            parameters: list[Any] = self.get_params(ctx)
            options = {option.name: option for option in parameters if option.param_type_name == "option"}
            for option in options.values():
                option.hidden = True
            for name, panel in _PANELS.items():
                option = options[name]
                option.hidden, option.rich_help_panel = False, panel
                option.help = re.split(r"[.;:] ", option.help or "")[0].rstrip(".") + "."
            self.params.sort(key=lambda option: [*_PANELS, option.name].index(option.name))
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line."""
        return super().parse_args(ctx, list(_one_name_each(args)))


def show_all(ctx: Any, is_wanted: bool) -> None:
    """Print the help with every option, and end the command, if `is_wanted`."""
    if is_wanted:
        ctx.meta[_ALL] = True
        print(ctx.get_help())
        ctx.exit()


def _one_name_each(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, with the option before each of several names: `m --served-model-name a b`.

    Without a model before them, the word behind a name is the model: `--served-model-name a m`.
    """
    has_model = bool(words) and (not words[0].startswith("-") or any(word.split("=")[0] == "--model" for word in words))
    num_names = None  # None: the words behind are no names
    for word in words:
        if with_dashes(word) == _NAMES:
            num_names = 0
        elif num_names is not None and not word.startswith("-") and "=" not in word:
            if has_model and num_names:
                yield _NAMES
            num_names += 1
        else:
            num_names = None
        yield word
