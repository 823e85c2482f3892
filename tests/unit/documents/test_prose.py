"""The documents are plain English: none of the refused words, and no sentence that a reader must take apart."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_WORDS = 35
REFUSED = {
    r"e\.g\.|i\.e\.|etc\.": "for example; that is; and others",
    r"via": "through, by, over",
    r"utili[sz]e[sd]?|leverages?": "use",
    r"in order to": "to",
    r"simply|easily|obviously|of course|basically|actually": "leave it out",
    r"seamless(ly)?|blazing(ly)?|powerful|robust|cutting-edge|state-of-the-art": "a figure",
    r"please": "leave it out",
    r"at the begin|the begin of": "at the beginning",
    r"as above|as below|see above|see below": "a link, or the name of what is meant",
    r"likewise": "also, or the whole sentence",
    r"save (?:for|if|that)|saving that": "except",
    r"hears? of|is told|are told|takes? in(?! )": "learns, receives",
    r"as good as|more or less": "a figure",
    r"its doing|does so|do so": "the verb",
    r"the latter|the former": "the noun",
    r"and/or": "or",
    r"behind (?:it|that|them)": "after",
    r"(\w+) \1": "the word once",
}
"""Refused words as regular expressions, and what to write instead."""
_NOT_PROSE = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|^\|.*$|<!--.*?-->", re.MULTILINE | re.DOTALL)


def prose_of(text: str) -> str:
    """Return a document's text without blocks, code, tables and the targets of links."""
    return _NOT_PROSE.sub(lambda match: "x" if match[0].startswith("`") and "\n" not in match[0] else "", text)


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of running text; a list's item and a heading end one, too."""
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*#]|\d+\.) )", prose_of(text)):
        yield from re.split(r"(?<=[.:?])\s+", " ".join(paragraph.split()))


def findings(text: str) -> list[str]:
    """Return the refused words of a text with what replaces them, and its overlong sentences."""
    words = prose_of(text)
    return [
        *(
            f"{match[0]!r}: {instead}"
            for pattern, instead in REFUSED.items()
            for match in re.finditer(rf"\b(?:{pattern})(?!\w)", words, re.IGNORECASE)
        ),
        *(f"{len(one.split())} words: {one}" for one in sentences_of(text) if len(one.split()) > MAX_WORDS),
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_a_document_has_no_finding(document: Path) -> None:
    assert findings(document.read_text()) == []


def test_a_refused_word_is_found_in_prose_alone() -> None:
    assert findings("It goes via `via`.\n\n| via |\n|---|\n") == ["'via': through, by, over"]
    assert findings("The the end.") == ["'The the': the word once"]


def test_a_long_sentence_is_found() -> None:
    sentence = " ".join(f"w{index}" for index in range(MAX_WORDS + 1))
    assert findings(sentence) == [f"{MAX_WORDS + 1} words: {sentence}"]
