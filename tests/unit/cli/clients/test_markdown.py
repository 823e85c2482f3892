"""Markdown on a terminal while it comes: what stands on the screen at the end, and what was drawn again."""

import io
import random
import re

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from serve_app.cli.clients.markdown import MarkdownView
from tests.seeds import Seeds

SAMPLE = """\
# Rivers

Some **bold** words and `code`.
The second line. <br> <think>aside</think>

1. Seine

   - Marne
   - Oise

2. Loire

```python
def flow(x):

    return x + 1
```

| river | length |
|---|--:|
| Seine | 777 |

See [the docs](http://x.example/z) and ![a map](http://p.example/r.png).

[1]: http://example.com

> quoted
> twice

---
\x1b[31mThe end
"""
WIDE_TABLE = f"| a | b |\n|---|---|\n| word | {'long' * 30} |\n"


class Screen:
    """Terminal that understands the sequences that are used here; it keeps all lines and counts those drawn."""

    def __init__(self, height: int) -> None:
        self.lines, self.row, self.column, self.height = [""], 0, 0, height

    def write(self, text: str) -> None:
        for sequence in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.|\n", text):
            self._obey(sequence)

    def _obey(self, sequence: str) -> None:
        if sequence == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif sequence == "\r":
            self.column = 0
        elif not sequence.startswith("\x1b"):
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + sequence + line[self.column + 1 :]
            self.column += 1
        elif sequence.endswith("A"):
            self.row -= int(sequence[2:-1] or 1)
            assert self.row >= len(self.lines) - self.height, "the line is above the screen"
        elif sequence.endswith("K"):
            assert sequence == "\x1b[2K"
            self.lines[self.row] = ""
        else:
            assert sequence[-1] in "mhl", sequence

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def shown(text: str, sizes: random.Random | None = None, width: int = 60, height: int = 12) -> str:
    """Return what stands on a terminal after `text` has come in parts of random sizes, or at once."""
    file, screen = io.StringIO(), Screen(height)
    console = Console(file=file, force_terminal=True, width=width, height=height, color_system="standard", _environ={})
    view = MarkdownView(console)
    rest = text
    while rest:
        size = len(rest) if sizes is None else sizes.randint(1, 9)
        view.write(rest[:size])
        rest = rest[size:]
        screen.write(file.getvalue())
        file.seek(0), file.truncate()
    view.close()
    screen.write(file.getvalue())
    return screen.text()


def test_marks_become_forms() -> None:
    text = shown(SAMPLE)
    for mark in ("**", "`", "# ", "|---"):
        assert mark not in text
    assert "Some bold words and code.\nThe second line. <br> <think>aside</think>\n" in text
    assert " 1 Seine" in text and " 2 Loire" in text and "    return x + 1" in text
    text = " ".join(text.split())
    assert "the docs (http://x.example/z)" in text and "a map (http://p.example/r.png)" in text
    assert "[1]: http://example.com" in text and "[31mThe end" in text


def test_parts_of_any_size_give_the_same_as_the_whole() -> None:
    for seed in range(20):
        assert shown(SAMPLE, random.Random(seed)) == shown(SAMPLE), seed


def test_a_block_higher_than_the_screen_is_whole_at_the_end() -> None:
    code = "".join(f"line {i}\n" for i in range(40))
    text = shown(f"```\n{code}```\n\nafter", random.Random(1), height=8)
    assert re.findall(r"line (\d+)", text) == [str(i) for i in range(40)] and "after" in text


def test_a_table_whose_words_do_not_fit_stays_as_written() -> None:
    assert "long" * 30 in shown(WIDE_TABLE, width=40).replace("\n", "")
    assert "|---|" not in shown(WIDE_TABLE, width=200)


@pytest.mark.random_worlds(300, per_call=100, examples=(808992826185,))
def test_no_character_is_lost(seeds: Seeds) -> None:
    pieces = ["# ", "- ", "1. ", "> ", "```\n", "| a | b |\n|--|--|\n", "| c ", "\n", "\n\n", "    ", "**", "_", "`",
              "<div>", "](u) ", "[x", "![y", "&amp;", "~~", "---\n", "word ", "long" * 12, "日本語",
              "\\(x\\) ", "\t"]  # fmt: skip
    for seed in seeds:
        rng = random.Random(seed)
        text = "".join(rng.choices(pieces, k=rng.randint(1, 30)))
        if any(
            token.type == "fence" and token.info.strip()
            for token in MarkdownIt("commonmark", {"html": False}).enable("table").parse(text)
        ):
            continue  # The language of a code block is not shown.
        width = rng.choice((8, 20, 80))
        screen = shown(text, rng, width, 10)
        for word in ("word", "long", "日"):
            assert "".join(screen.split()).count(word[0]) >= text.count(word) * word.count(word[0]), (seed, text)
