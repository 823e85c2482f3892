"""Input files split into lines."""

import pytest

from serve_app.jobs.lifecycle.input_file import InvalidFile, split_lines


async def parts_of(data: bytes, size: int):
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_lines_do_not_depend_on_the_parts_of_the_file(size):
    data = b"\xef\xbb\xbfone\r\n\n\xef\xbb\xbf  two\nthree"
    found = [line async for lines in split_lines(parts_of(data, size), 100) for line in lines]
    assert [(line.number, line.data) for line in found] == [(1, b"one"), (3, b"two"), (4, b"three")]


@pytest.mark.parametrize("data", [b"ok\n" + b"x" * 11, b"ok\n" + b"x" * 11 + b"\nok", b"ok\n" + b"x" * 1000])
async def test_a_line_that_is_too_long_is_named(data):
    with pytest.raises(InvalidFile) as caught:
        async for _ in split_lines(parts_of(data, 4), 10):
            pass
    assert (caught.value.error.code, caught.value.error.line) == ("line_too_long", 2)
