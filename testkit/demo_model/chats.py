"""Chat documents for training: questions about the training files' definitions, answered by docstring or source."""

import ast
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass

from testkit.demo_model.corpus import SourceFile
from testkit.demo_model.greetings import EXCHANGES, SYSTEM_PROMPTS, spellings

Message = dict[str, str]
Chat = list[Message]

EXPLAIN = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name} for?",
    "How does {name} work?",
    "Tell me about {name}.",
    "Document {name}",
    "what is {name}",
    "Can you explain {name} to me?",
)
SHOW = (
    "Show the source of {name}.",
    "Show me the source code of {name}.",
    "How is {name} implemented?",
    "Print the code of {name}",
)
WRITE = (
    "Write a Python function {signature} that does this: {purpose}",
    "Write a function {signature}. {purpose}",
    "Implement {signature} in Python: {purpose}",
    "Please write {signature}. Its docstring says: {purpose}",
)
LIST = (
    "What does the module {name} define?",
    "List the functions and classes in {name}.",
    "What is in the {name} module?",
)

MAX_DOC_CHARS = 900
MAX_SOURCE_CHARS = 1600
MAX_LISTED = 24
SYSTEM_SHARE = 0.15
FOLLOW_UP_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Definition:
    """Module, class or function that has a docstring; `signature` and `source` are empty for a module."""

    name: str
    signature: str
    doc: str
    source: str


def message(role: str, content: str) -> Message:
    """Return one message in the form that the chat template reads."""
    return {"role": role, "content": content}


def exchange(question: str, answer: str) -> Chat:
    """Return a chat of a user's question and the assistant's answer."""
    return [message("user", question), message("assistant", answer)]


def module_name(path: str) -> str:
    """Return the dotted name under which the library file at `path` is imported."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def definitions(file: SourceFile) -> Iterator[Definition]:
    """Yield the documented module, classes, functions and methods of one file, outermost first."""
    try:
        tree = ast.parse(file.text)
    except SyntaxError:
        return
    doc = ast.get_docstring(tree)
    if doc:
        yield Definition(module_name(file.path), "", doc, "")
    yield from nested_definitions(tree, module_name(file.path), file.text.splitlines(keepends=True))


def nested_definitions(parent: ast.AST, prefix: str, lines: list[str]) -> Iterator[Definition]:
    """Yield the documented classes and functions directly below `parent`, each class followed by those inside it."""
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        name = f"{prefix}.{node.name}"
        doc = ast.get_docstring(node)
        if doc:
            source = inspect.cleandoc("".join(lines[node.lineno - 1 : node.end_lineno]))
            yield Definition(name, signature_of(node), doc, dedented(lines[node.lineno - 1 : node.end_lineno], source))
        if isinstance(node, ast.ClassDef):
            yield from nested_definitions(node, name, lines)


def dedented(lines: list[str], fallback: str) -> str:
    """Return `lines` without the indentation of the first line, or `fallback` if a line is indented less."""
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    if all(line.startswith(indent) or not line.strip() for line in lines):
        return "".join(line[len(indent) :] if line.strip() else line for line in lines).strip()
    return fallback


def signature_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return `class Name`, or `name(arguments)` with the arguments of the source."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def shortened(doc: str) -> str:
    """Return the first paragraphs of `doc`, 900 characters at most.

    A longer first paragraph is cut at the end of a line, and a longer first line at a space.
    """
    if len(doc) <= MAX_DOC_CHARS:
        return doc
    head = doc[:MAX_DOC_CHARS]
    for boundary in ("\n\n", "\n", " "):
        if boundary in head:
            return head[: head.rindex(boundary)].rstrip()
    return head


def first_sentence(doc: str) -> str:
    """Return the first sentence of `doc` on one line, with a full stop at its end."""
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "."


def fenced(source: str) -> str:
    """Return `source` as a Markdown code block."""
    return f"```python\n{source}\n```"


def explained(item: Definition, rng: random.Random) -> Chat:
    """Return a question about `item`, answered by its signature and docstring."""
    lead = f"`{item.name}` is a module.\n\n" if not item.signature else f"`{item.signature}`\n\n"
    return exchange(rng.choice(EXPLAIN).format(name=item.name), lead + shortened(item.doc))


def shown(item: Definition, rng: random.Random) -> Chat:
    """Return a request for the source of `item`, answered by the source."""
    return exchange(rng.choice(SHOW).format(name=item.name), fenced(item.source))


def written(item: Definition, rng: random.Random) -> Chat:
    """Return a request to write `item` from its signature and purpose, answered by its source."""
    question = rng.choice(WRITE).format(signature=item.signature, purpose=first_sentence(item.doc))
    return exchange(question, fenced(item.source))


def listed(file: SourceFile, rng: random.Random) -> Chat | None:
    """Return a question about the contents of a module, answered by a list; None if nothing in it is public."""
    try:
        nodes = ast.parse(file.text).body
    except SyntaxError:
        return None
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    public = [node for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]
    if not public:
        return None
    name = module_name(file.path)
    lines = [f"- `{signature_of(node)}`" for node in public[:MAX_LISTED]]
    return exchange(rng.choice(LIST).format(name=name), f"`{name}` defines:\n\n" + "\n".join(lines))


def library_chats(files: list[SourceFile], rng: random.Random) -> list[Chat]:
    """Return one explanation per definition of `files`, a second chat for each short source, and lists of modules."""
    chats = []
    for file in files:
        for item in definitions(file):
            chats.append(explained(item, rng))
            if item.source and len(item.source) <= MAX_SOURCE_CHARS:
                chats.append(rng.choice((shown, written))(item, rng))
        contents = listed(file, rng)
        if contents is not None:
            chats.append(contents)
    return chats


def greeting_chats(repeats: int, rng: random.Random) -> list[Chat]:
    """Return every hand-written exchange `repeats` times, in varied spelling."""
    return [
        exchange(rng.choice(spellings(question)), rng.choice(answers))
        for questions, answers in EXCHANGES
        for question in questions
        for _ in range(repeats)
    ]


def chat_documents(files: list[SourceFile], greeting_repeats: int, seed: int) -> list[Chat]:
    """Return all chats in random order; some begin with a system message, some join two exchanges."""
    rng = random.Random(seed)
    singles = library_chats(files, rng) + greeting_chats(greeting_repeats, rng)
    rng.shuffle(singles)
    chats: list[Chat] = []
    for chat in singles:
        if chats and len(chats[-1]) == 2 and rng.random() < FOLLOW_UP_SHARE:
            chats[-1] = chats[-1] + chat
        else:
            chats.append(chat)
    return [
        [message("system", rng.choice(SYSTEM_PROMPTS)), *chat] if rng.random() < SYSTEM_SHARE else chat
        for chat in chats
    ]
