"""Data directory of a server: `~/.headway`, or one of its own below it while another server has that."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from serve_app.cli.server.locks import try_lock
from serve_app.cli.server.ports import Address
from serve_app.config import HeadwayConfig

_SERVERS = "servers"


@contextlib.contextmanager
def own_data_dir(config: HeadwayConfig, address: Address) -> Iterator[HeadwayConfig]:
    """Yield the configuration with a data directory that no other server has within the context.

    1. A `data_dir` or `database_url` that is given may be shared: nothing changes.
    2. Else `servers/ADDRESS` in the default directory is used, if an earlier server at this address left it.
    3. Else the default directory is used, unless another server has locked it.
    4. Else `servers/ADDRESS` is made.

    Raises:
        OSError: a directory cannot be written, or other servers have both.
    """
    if {"data_dir", "database_url"} & config.model_fields_set:
        yield config
        return
    default = Path(config.data_dir)
    host = re.sub(r"[^\w.-]", "_", address.host)
    own = default / _SERVERS / f"{host}-{address.port}"
    for folder in (own, default) if own.is_dir() else (default, own):
        _make_private(folder, default)
        lock = try_lock(folder / "lock")
        if lock is not None:
            with lock:
                yield config.model_copy(update={"data_dir": str(folder)})
            return
    raise OSError(f"other servers have {default} and {own}")


def left_data_dir(config: HeadwayConfig) -> Path | None:
    """Return the default data directory if this server has one of its own below it; None: it has not."""
    default = Path(HeadwayConfig().data_dir)
    return default if Path(config.data_dir).parent == default / _SERVERS else None


def _make_private(folder: Path, default: Path) -> None:
    """Make a folder and those between it and the default one, for their owner alone."""
    for directory in (default, folder.parent, folder) if folder != default else (default,):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
