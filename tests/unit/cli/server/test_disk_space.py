"""A disk that fills up while a server runs is reported once, and once more when there is room again."""

from pathlib import Path

from serve_app.cli.server.disk_space import DiskWatch

FULL = (
    "warning: data_dir /data has 12.0 MB free on its disk; a server needs 50.0 MB: make room, or name another one with "
    "data_dir=FOLDER"
)


def test_each_change_is_reported_once() -> None:
    free = {Path("/data"): 10**9, Path("/tmp"): 10**9}
    watch = DiskWatch({"data_dir": Path("/data"), "TMPDIR": Path("/tmp")}, free.__getitem__)
    seen = []
    for num_free in (10**9, 12 * 10**6, 11 * 10**6, 60 * 10**6, 12 * 10**6, 10**9, 12 * 10**6):
        free[Path("/data")] = num_free
        seen.append(list(watch.news()))
    assert seen == [[], [FULL], [], [], [], ["data_dir /data has 1.0 GB free again."], [FULL]]


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    assert list(DiskWatch({"data_dir": tmp_path / "gone"}).news()) == []
