"""Python programs that use clients, run as by `python -c`, without the second that each would take to import them.

A process imports the clients once, and runs each program in a fork of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

from testkit.limits import LIMIT_S

_ROOT = Path(__file__).resolve().parents[2]
_OUTPUT = "program-output"


class PythonPrograms:
    """Runs programs one after the other."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, source: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
        """Run a program in `folder`; return its exit status, and its output with its errors."""
        assert self._process.stdin is not None and self._process.stdout is not None
        program = {"source": source, "folder": str(folder), "environment": dict(environment)}
        self._process.stdin.write(json.dumps(program).encode() + b"\n")
        async with asyncio.timeout(LIMIT_S):
            status = int(await self._process.stdout.readline())
        return status, (folder / _OUTPUT).read_text()


@asynccontextmanager
async def python_programs() -> AsyncIterator[PythonPrograms]:
    """Start the process, which ends with the context."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "testkit.http.python_programs", cwd=_ROOT, stdin=pipe, stdout=pipe, limit=2**20
    )
    try:
        yield PythonPrograms(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def main() -> None:
    """Run the programs that come as lines of JSON, and print the exit status of each."""
    import httpx  # noqa: F401
    import openai  # noqa: F401

    for line in sys.stdin:
        program = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(program["source"], Path(program["folder"]), program["environment"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(source: str, folder: Path, environment: dict[str, str]) -> NoReturn:
    status = 0
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        output = os.open(_OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
