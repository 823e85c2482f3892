"""Files that several processes write and read at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serve_app.models.whole_files import write_whole


def test_readers_find_one_whole_text_while_several_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = [letter * 100_000 for letter in "abcd"]
    write_whole(path, texts[0])
    with ThreadPoolExecutor(4) as writers:
        written = [writers.submit(write_whole, path, text) for text in texts * 20]
        while not all(each.done() for each in written):
            assert path.read_text() in texts
        for each in written:
            each.result()
    assert list(tmp_path.iterdir()) == [path]
