"""Corpus of the demo model: the running interpreter's standard library, split into training and held-out files."""

import ast
import hashlib
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

EXCLUDED = (
    "site-packages/",
    "lib-dynload/",
    "config-",
    "_sysconfigdata",
    "idlelib/",
    "lib2to3/",
    "html/entities.py",
    "ensurepip/_bundled/",
)
"""Prefixes of excluded paths: files that are not the library's own, of little value, or generated tables."""

TABLE_MARKS = ("decoding_table = (", "decoding_map = ")
"""Texts that mark a codec file as a generated character table."""

TOPICS = "pydoc_data/topics.py"
HELD_OUT_MODULUS = 60
NEAR_DUPLICATE_SHARE = 0.5
MIN_LINE_CHARS = 20


@dataclass(frozen=True, slots=True)
class SourceFile:
    """File of the standard library; `path` is relative to the library, with forward slashes."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """True if the file belongs to the library's tests."""
        return any(part in ("test", "tests") for part in self.path.split("/"))


@dataclass(frozen=True, slots=True)
class Corpus:
    """Corpus split into training and held-out files. No training file is a copy or a near copy of a held-out file."""

    training: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def is_held_out(path: str) -> bool:
    """Return True if sha256 of the relative path, modulo 60, is 0: the file is never trained on."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_source(root: Path, path: str) -> SourceFile | None:
    """Return the file at `root / path`; None if it is missing, not UTF-8, blank or a generated table."""
    try:
        text = (root / path).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    if not text.strip() or any(mark in text for mark in TABLE_MARKS):
        return None
    return SourceFile(path, text)


def load_corpus(root: Path) -> Corpus:
    """Read and split the library below `root`, in the order of its paths."""
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    sources = [read_source(root, path) for path in paths if not path.startswith(EXCLUDED)]
    files = without_copies([source for source in sources if source is not None])
    held_out = tuple(file for file in files if is_held_out(file.path))
    training = [file for file in files if not is_held_out(file.path)]
    return Corpus(tuple(without_near_duplicates(training, held_out)), held_out)


def without_copies(files: list[SourceFile]) -> list[SourceFile]:
    """Return `files` without those that have the text of an earlier one."""
    first: dict[str, SourceFile] = {}
    for file in files:
        first.setdefault(file.text, file)
    return list(first.values())


def without_near_duplicates(training: list[SourceFile], held_out: tuple[SourceFile, ...]) -> list[SourceFile]:
    """Return `training` without the near copies of a held-out file.

    A near copy shares more than half of the long lines of either file.
    """
    owners: dict[str, set[int]] = defaultdict(set)
    held_lines = [long_lines(file.text) for file in held_out]
    for index, lines in enumerate(held_lines):
        for line in lines:
            owners[line].add(index)
    kept_files = []
    for file in training:
        lines = long_lines(file.text)
        shared = [0] * len(held_out)
        for line in lines:
            for index in owners.get(line, ()):
                shared[index] += 1
        limits = [NEAR_DUPLICATE_SHARE * min(len(lines), len(held)) for held in held_lines]
        if all(count <= limit for count, limit in zip(shared, limits, strict=True)):
            kept_files.append(file)
    return kept_files


def long_lines(text: str) -> set[str]:
    """Return the distinct stripped lines of at least 20 characters; unrelated files share shorter ones."""
    return {stripped for line in text.splitlines() if len(stripped := line.strip()) >= MIN_LINE_CHARS}


def documents(file: SourceFile) -> list[str]:
    """Return the training documents of one file: its text or, for pydoc's topics, each topic as plain text."""
    if file.path != TOPICS:
        return [file.text]
    assignment = next(node for node in ast.parse(file.text).body if isinstance(node, ast.Assign))
    topics: dict[str, str] = ast.literal_eval(assignment.value)
    return list(topics.values())
