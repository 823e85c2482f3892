"""The wheel and the source distribution: what they hold, and that the wheel serves without the clone."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import httpx
import psutil
import pytest

from testkit.free_port import free_port
from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.served import ROOT, clean_environment, wait_for

pytestmark = pytest.mark.rotated

TOPS = {"headway", "serve_app", "router", "replicas"}
SUFFIXES = {"py", "cpp", "h", "json", "safetensors", "jinja", "md", "txt", "yaml", "html", "css", "js", "mako"}
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, built from the files of the repository, and the wheel built from that."""
    folder, clone = tmp_path_factory.mktemp("distributions"), tmp_path_factory.mktemp("clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    build("sdist", clone, folder)
    [source] = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(clone / "unpacked", filter="data")
    [unpacked] = (clone / "unpacked").iterdir()
    build("wheel", unpacked, folder)
    return folder


def build(kind: str, tree: Path, folder: Path) -> None:
    command = [sys.executable, "-c", BUILD.format(kind), str(folder)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=START_LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has the wheel. Its libraries are those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    [wheel] = distributions.glob("*.whl")
    install = ["--python", str(python), "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=START_LIMIT_S)
    # Added last: pip would count the editable installation as this package. Its finder does not run from here.
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


def test_the_wheel_holds_the_service_alone(distributions: Path) -> None:
    [wheel] = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [PurePosixPath(name) for name in archive.namelist()]
    tops = {name.parts[0] for name in names if not name.parts[0].endswith(".dist-info")}
    assert tops == TOPS
    held = {str(name) for name in names if name.parts[0] in TOPS}
    tracked = subprocess.run(["git", "ls-files", *TOPS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert held == {name for name in tracked.split() if (ROOT / name).exists()}
    assert {name.rpartition(".")[2] for name in held} <= SUFFIXES


def test_the_source_distribution_holds_no_tests(distributions: Path) -> None:
    [source] = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        tops = {PurePosixPath(name).parts[1] for name in archive.getnames() if "/" in name}
    metadata = {"headway_serve.egg-info", "PKG-INFO", "setup.cfg", "pyproject.toml", "MANIFEST.in"}
    assert tops - metadata == {*TOPS, "constraints.txt", "LICENSE", "README.md"}


def test_the_wheel_chats_outside_the_clone_with_a_server_of_its_own(installed: Path, tmp_path: Path) -> None:
    """`headway run` starts a server, chats, and leaves nothing behind."""
    environment = {name: value for name, value in clean_environment(tmp_path).items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{installed}:{os.environ['PATH']}"
    where = [str(installed / "python"), "-c", "import headway, replicas; print(headway.__file__, replicas.__file__)"]
    files = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert str(ROOT) not in files and files.count(str(installed.parent)) == 2
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    command, pipe = [str(installed / "headway"), "run", "headway-demo", "hi", "--url", url], subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            server = wait_for(lambda: psutil.Process(process.pid).children(), "the server is started", LIMIT_S)[0]
            out, err = process.communicate(timeout=START_LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 0 and out.strip(), err
    assert "Starting headway-demo: replicas ...\n" in err and "Serving" not in out + err
    assert not server.is_running()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
