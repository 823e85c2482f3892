"""The environment of a clone has the CPU build of torch without an NVIDIA device, or says what it takes instead."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotated

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("make_venv", ROOT / "deploy" / "make_venv.py")
assert SPEC is not None and SPEC.loader is not None
make_venv = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_venv)

CPU, CUDA = "2.13.0+cpu", "2.13.0"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture
def index(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory that pip has for its only index; empty. The environment has no torch."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for variable in ("PIP_CONFIG_FILE", "PIP_CONSTRAINT"):
        monkeypatch.setenv(variable, "/dev/null")
    subprocess.run([python, "-m", "pip", "uninstall", "-qy", "torch"], check=True, capture_output=True)
    return tmp_path


def publish(index: Path, version: str) -> None:
    """Put an empty wheel of torch into the index."""
    metadata = f"torch-{version}.dist-info"
    with zipfile.ZipFile(index / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")


def install(python: Path, has_gpu: bool) -> str:
    """Install torch; return the version that the environment has then."""
    make_venv.install_torch(python, ROOT / "constraints.txt", has_gpu)
    code = "import importlib.metadata as m; print(m.version('torch'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_cpu_build_is_installed_without_an_nvidia_device(python: Path, index: Path) -> None:
    publish(index, CPU)
    publish(index, "2.14.0")
    assert install(python, has_gpu=False) == CPU
    check: list[str] = [
        str(python),
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--constraint",
        str(ROOT / "constraints.txt"),
        "torch>=2.8",
    ]
    checked = subprocess.run(check, check=True, capture_output=True, text=True)
    assert "Would install" not in checked.stdout  # the label of a CPU build meets the constraint


def test_what_is_fetched_instead_is_said_before(python: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(index, CUDA)
    assert install(python, has_gpu=False) == CUDA
    assert "on x86 the CUDA build (5.6 GB). To avoid it, press Ctrl-C" in capsys.readouterr().out


def test_a_constraint_of_the_user_hides_no_missing_build(
    python: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, CUDA)
    constraint = index / "constraint.txt"
    constraint.write_text("torch<=2.14.1")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraint))
    assert install(python, has_gpu=False) == CUDA


def test_lines_about_a_replaced_package_belong_to_the_installation() -> None:
    lines = ["Successfully built x", "Installing collected packages: a, b", "    Successfully uninstalled a-1"]
    assert make_venv._state(lines) == "installing 2 packages"


def test_an_nvidia_device_gets_the_build_of_the_index(
    python: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(index, CUDA)
    assert install(python, has_gpu=True) == CUDA
    assert "CUDA" not in capsys.readouterr().out


def test_a_build_that_is_there_stays(python: Path, index: Path) -> None:
    publish(index, CUDA)
    install(python, has_gpu=True)
    publish(index, CPU)
    assert install(python, has_gpu=False) == CUDA


def test_a_failure_shows_the_end_of_pips_output(python: Path, index: Path) -> None:
    with pytest.raises(make_venv.Failed, match=r"torch: (?s:.*)\nERROR: "):
        install(python, has_gpu=False)
