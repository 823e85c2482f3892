"""Create or update the virtual environment of a clone: `python deploy/make_venv.py .venv`, which `make serve` runs.

`make venv` adds `dev`, the extra with the tools of developers. torch is installed first, in the version of
constraints.txt. A machine without an NVIDIA device gets the CPU build, from PyTorch's own index if that can be reached.
Needs the standard library alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_REACH_LIMIT_S = 10
"""Longest wait for PyTorch's index, seconds. It cannot be reached from everywhere, and is not asked twice."""
_LINE_PERIOD_S = 15.0
"""Time between two lines of progress where the output is no terminal, seconds."""
_NOT_OFFERED = ("No matching distribution found", "ResolutionImpossible")
"""Messages of pip where the index has no such build, the second one if a constraint of the user names torch, too."""


class Failed(Exception):
    """Failure of a step; the message has the end of its output."""


def main() -> None:
    """Run the command."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python deploy/make_venv.py FOLDER [EXTRA]")
    venv, extras, begin_s = Path(sys.argv[1]).absolute(), sys.argv[2:], time.monotonic()
    python = venv / "bin" / "python"
    print(f"Installing Headway into {sys.argv[1]}, only the first time and after an update", flush=True)
    try:
        if not python.exists():
            run("environment", [sys.executable, "-m", "venv", str(venv)])
        install_torch(python, ROOT / "constraints.txt", has_nvidia_device())
        run(
            "packages",
            [*_pip(python), "--constraint", "constraints.txt", "--editable", f".[{extras[0]}]" if extras else "."],
        )
    except Failed as failure:
        sys.exit(f"error: {failure}")
    # Python compiles modules itself only where it may write.
    packages = ("headway", "serve_app", "replicas", "router")
    subprocess.run([python, "-m", "compileall", "-q", *packages], cwd=ROOT, check=True)
    num_bytes = sum(file.stat().st_size for file in venv.rglob("*") if not file.is_symlink())
    print(f"Installed in {time.monotonic() - begin_s:.0f} s; it takes {num_bytes / 1e6:,.0f} MB", flush=True)


def has_nvidia_device() -> bool:
    """Return True if this machine has an NVIDIA device or its driver."""
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia*"))


def install_torch(python: Path, constraints: Path, has_gpu: bool) -> None:
    """Install torch into the environment of `python`, unless it has the version that `constraints` names.

    Raises:
        Failed: it cannot be installed.
    """
    version = re.findall(r"^torch==(\S+)$", constraints.read_text(), re.MULTILINE)[0]
    code = "import importlib.metadata as m; print(m.version('torch'))"
    installed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if installed.stdout.strip().partition("+")[0] == version:
        return
    if not has_gpu and sys.platform == "linux":
        once = ("--timeout", str(_REACH_LIMIT_S), "--retries", "0", "--no-deps")
        try:
            # The label is that of CPU builds alone. The packages that torch needs come with the others.
            run("torch", [*_pip(python), "--index-url", CPU_INDEX, *once, f"torch=={version}+cpu"])
        except Failed as failure:
            if not any(message in str(failure) for message in _NOT_OFFERED):
                raise
            print(
                f"  torch: {CPU_INDEX} cannot be reached. pip takes what its own index has, on x86 the CUDA build "
                f"(5.6 GB). To avoid it, press Ctrl-C, have pip install a CPU wheel of torch {version} "
                f"({python} -m pip install FILE), and start again.",
                flush=True,
            )
        else:
            return
    run("torch", [*_pip(python), "--constraint", str(constraints), f"torch=={version}"])


def _pip(python: Path) -> list[str]:
    options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    return [str(python), "-m", "pip", "install", *options]


def run(step: str, command: list[str]) -> None:
    """Run a command and show what it does: in one line of a terminal, elsewhere in a line every 15 s.

    Raises:
        Failed: it ended with an error.
    """
    begin_s = shown_s = time.monotonic()
    is_terminal = sys.stdout.isatty()
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                now_s = time.monotonic()
                if is_terminal or now_s - shown_s >= _LINE_PERIOD_S:
                    shown_s = now_s
                    _show(f"  {step}: {now_s - begin_s:.0f} s, {_state(_lines(log.name))}", is_terminal)
        finally:
            process.terminate()
        if is_terminal:
            _show("", is_terminal)
        if process.returncode:
            raise Failed(f"{step}: {' '.join(command)}\n" + "\n".join(_lines(log.name)[-15:]))
    print(f"  {step}: {time.monotonic() - begin_s:.0f} s", flush=True)


def _lines(log: str) -> list[str]:
    return Path(log).read_text(errors="replace").splitlines()


def _state(lines: list[str]) -> str:
    """Return what pip does, by its last line: a package that it fetches or builds, or the installation."""
    last = lines[-1].strip() if lines else "no output yet"
    for line in lines:  # lines about packages that are replaced follow it
        if line.startswith("Installing collected packages"):
            return f"installing {line.count(',') + 1} packages"
    num_packages = sum(line.startswith("Collecting ") for line in lines)
    return f"package {num_packages}: {last}" if num_packages else last


def _show(line: str, is_terminal: bool) -> None:
    if is_terminal:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}", end="", flush=True)
    else:
        print(line[:120], flush=True)


if __name__ == "__main__":
    main()
