"""Limits of memory and processors as Docker, Kubernetes and systemd set them, over made-up control groups."""

import resource
from pathlib import Path

import pytest

from replicas.model.hardware import limits
from replicas.model.hardware.limits import cpu_limit, memory_limit

MIB = 2**20
NO_LIMIT_V1 = 2**63 - 4096


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder of a process on a machine with 1 TiB of free memory and 64 processors."""
    memory = type("memory", (), {"total": 2**40, "available": 2**40})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64), raising=False)
    (tmp_path / "self").mkdir()
    return tmp_path / "self"


def mount(process: Path, group: str, kind: str = "cgroup2", root: str = "/", options: str = "rw") -> Path:
    """Add a mount of control groups, and the process's group in it; return the mount's folder."""
    folder = process.parent / f"mount {kind} {options}".replace(" ", "_").replace(",", "_")
    folder.mkdir(exist_ok=True)
    controllers = "" if kind == "cgroup2" else options.removeprefix("rw,")
    with (process / "mountinfo").open("a") as mounts:
        mounts.write(f"30 20 0:26 {root} {folder} rw,nosuid shared:4 - {kind} cgroup {options}\n")
    with (process / "cgroup").open("a") as groups:
        groups.write(f"{0 if kind == 'cgroup2' else 4}:{controllers}:{group}\n")
    return folder


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_a_machine_without_limits_counts_whole(machine: Path) -> None:
    assert memory_limit(machine) == limits.MemoryLimit(2**40, 2**40, "no limit of a container")
    assert cpu_limit(machine).num_cpus == 64
    group = mount(machine, "/user.slice")
    write(group / "user.slice", memory__max="max", memory__current=5, cpu__max="max 100000")
    assert (memory_limit(machine).total, cpu_limit(machine).num_cpus) == (2**40, 64)


def test_a_container_sees_its_group_as_the_root(machine: Path) -> None:
    """Docker and Kubernetes, version 2."""
    group = mount(machine, "/")
    write(group, memory__max=512 * MIB, memory__current=200 * MIB, cpu__max="40000 100000")
    (group / "memory.stat").write_text(f"anon 1\nactive_file {10 * MIB}\ninactive_file {20 * MIB}\n")
    assert memory_limit(machine) == limits.MemoryLimit(512 * MIB, 342 * MIB, str(group / "memory.max"))
    assert cpu_limit(machine) == limits.CpuLimit(0.4, str(group))


def test_the_smallest_limit_of_all_parents_counts(machine: Path) -> None:
    """A systemd slice with MemoryHigh and CPUQuota, and a unit in it with a larger MemoryMax."""
    group = mount(machine, "/team.slice/headway.service")
    write(group / "team.slice", memory__high=300 * MIB, memory__current=100 * MIB, cpu__max="150000 100000")
    write(group / "team.slice/headway.service", memory__max=900 * MIB, memory__current=50 * MIB)
    assert memory_limit(machine).free == 200 * MIB
    assert memory_limit(machine).source.endswith("team.slice/memory.high")
    assert cpu_limit(machine).num_cpus == 1.5


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_groups_of_version_1_count(machine: Path, root: str) -> None:
    """A container without a namespace of its own names its group by the path on the host."""
    memory = mount(machine, "/docker/abc", "cgroup", root, "rw,memory")
    processors = mount(machine, "/docker/abc", "cgroup", root, "rw,cpu,cpuacct")
    inner = "" if root != "/" else "docker/abc"
    write(memory, memory__limit_in_bytes=NO_LIMIT_V1, memory__usage_in_bytes=7)
    write(memory / inner, memory__limit_in_bytes=256 * MIB, memory__usage_in_bytes=56 * MIB)
    write(memory / inner, memory__stat="total_active_file 4")
    write(processors / inner, cpu__cfs_quota_us=25000, cpu__cfs_period_us=100000)
    assert memory_limit(machine).free == 200 * MIB + 4
    assert cpu_limit(machine).num_cpus == 0.25
    write(processors / inner, cpu__cfs_quota_us=-1)
    assert cpu_limit(machine).num_cpus == 64


def test_a_group_outside_the_mount_is_read_at_the_mount(machine: Path) -> None:
    group = mount(machine, "/../../kubepods/x")
    write(group, memory__max=100 * MIB, memory__current=0)
    assert memory_limit(machine).free == 100 * MIB


def test_a_users_limit_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {resource.RLIMIT_AS: MIB}
    monkeypatch.setattr("resource.getrlimit", lambda kind: (sizes.get(kind, resource.RLIM_INFINITY),) * 2)
    assert memory_limit(machine) == limits.MemoryLimit(MIB, MIB, "ulimit -v")
