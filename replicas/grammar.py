"""Grammars of outputs, compiled and matched by llguidance; the only module that imports it."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from transformers import PreTrainedTokenizerFast

from replicas.errors import InvalidRequest, SequenceFailed
from replicas.protocol import GenerateRequest, Metric, MetricKind

MAX_GRAMMAR_BYTES = 262_144
"""Longest grammar, bytes of UTF-8."""

_WHITESPACE = r"( |\n {0,16}|\n\t{0,8})"
"""One space, or a line break with indentation; there need not be any."""

_CACHE_SIZE = 512
"""Number of compiled grammars that a compiler keeps."""

# The lexer's fuel bounds the time of a compilation: 1,000,000 are some 20 ms.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000, max_lexer_states=50_000,
    max_grammar_size=100_000, verbose_errors=False,
)  # fmt: skip


class GrammarConstraint:
    """Constraint of one sequence's output by a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """True if no token may come next, except one that ends the sequence."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Reason why the grammar cannot be followed; None: there is none."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def accept(self, token_id: int) -> None:
        """Add the next output token.

        Raises:
            ValueError: the grammar does not allow the token, or following it takes too long.
        """
        if not self._matcher.consume_token(token_id):
            raise ValueError(self.error)

    def fill_mask(self, mask: memoryview) -> None:
        """Write the allowed tokens into `mask`, one bit for each token id. The GIL is free meanwhile."""
        words = np.frombuffer(mask, dtype=np.uint8)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


class GrammarCompiler:
    """Compiler of grammars for one tokenizer, with a cache of those used last. Threads may share it.

    Invariant: the cache holds at most `_CACHE_SIZE` grammars.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int | None = None, eos_token_ids: Collection[int] = ()
    ) -> None:
        """Build the compiler, which takes about a second for 150,000 tokens.

        `vocab_size` is the number of logits, if the model has more than the tokenizer has tokens. `eos_token_ids` end a
        sequence; none: the tokenizer's.
        """
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        eos: list[int] | int | None = sorted(eos_token_ids) or tokenizer.eos_token_id
        self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=eos)
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_hits = 0

    def constraint_of(self, request: GenerateRequest) -> GrammarConstraint:
        """Return the constraint of a request that has one, after the output that the request brings.

        Raises:
            InvalidRequest: the grammar cannot be compiled.
            SequenceFailed: the grammar does not allow that output.
        """
        assert request.params.grammar is not None
        matcher = self._compiled(request.params.grammar).deep_copy()
        if request.output_token_ids and not matcher.consume_tokens(list(request.output_token_ids)):
            raise SequenceFailed(f"the grammar does not allow the output so far: {_first_line(matcher.get_error())}")
        return GrammarConstraint(matcher)

    def check(self, grammar: str, param: str) -> None:
        """Compile a grammar and compute its first set of tokens.

        Raises:
            InvalidRequest: it is too long, wrong, or takes too long; the error names `param`.
        """
        num_bytes = len(grammar.encode(errors="surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            message = f"`{param}` makes a grammar of {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are accepted"
            raise InvalidRequest(message, param)
        try:
            matcher = self._compiled(grammar).deep_copy()
            matcher.compute_bitmask()
        except (InvalidRequest, ValueError) as error:
            raise InvalidRequest(f"`{param}` cannot be enforced: {_first_line(str(error))}", param) from None
        if matcher.is_error():
            raise InvalidRequest(f"`{param}` cannot be enforced: {_first_line(matcher.get_error())}", param)

    def metrics(self) -> tuple[Metric, ...]:
        """Return the counts of requests with a grammar and of those whose grammar was in the cache, and its size."""
        with self._lock:
            counts = (self._num_requests, self._num_hits, len(self._cache))
        helps = (
            ("headway:grammar_requests", "requests with a grammar", MetricKind.COUNTER),
            ("headway:grammar_cache_hits", "requests whose grammar was compiled before", MetricKind.COUNTER),
            ("headway:grammar_cache_size", "compiled grammars in the cache", MetricKind.GAUGE),
        )
        return tuple(Metric(*named, value) for named, value in zip(helps, counts, strict=True))

    def _compiled(self, grammar: str) -> LLMatcher:
        """Return the matcher of a grammar at its beginning, which is shared: callers use copies."""
        with self._lock:
            self._num_requests += 1
            known = self._cache.get(grammar)
            if known is not None:
                self._num_hits += 1
                self._cache.move_to_end(grammar)
                return known
        # Without the lock: a second thread may compile the same grammar meanwhile, which does no harm.
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be compiled: {_first_line(matcher.get_error())}", "grammar")
        with self._lock:
            self._cache[grammar] = matcher
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return matcher


@dataclass(frozen=True, slots=True)
class MarkedPart:
    """Part of a text that must meet a JSON Schema, between two markers."""

    trigger: str
    """Text that must begin such a part; `begin` starts with it."""
    begin: str
    schema: dict[str, Any]
    end: str


def schema_options(*, has_whitespace: bool = True, takes_any_of: bool = False) -> dict[str, Any]:
    """Return the entry of a JSON Schema that holds llguidance's options.

    Whitespace between JSON's tokens is bounded, so that a model cannot write it for ever. With `takes_any_of` a `oneOf`
    is enforced like an `anyOf` where its alternatives may overlap.
    """
    whitespace = {"whitespace_pattern": _WHITESPACE} if has_whitespace else {"whitespace_flexible": False}
    return {"x-guidance": {**whitespace, "coerce_one_of": takes_any_of, "lenient": False}}


def json_schema_fault(schema: dict[str, Any]) -> str | None:
    """Return the reason why a JSON Schema has no grammar; None: it has one."""
    fault = LLMatcher.validate_grammar(json_schema_grammar(schema), limits=_LIMITS)
    return _first_line(fault) or None


def json_schema_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar, in Lark's syntax, of the JSON texts that meet a schema."""
    return f"start: %json {json.dumps(schema)}"


def regex_grammar(regex: str) -> str:
    """Return the grammar of the texts that match a regular expression from beginning to end."""
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return str(grammar["lark_grammar"])


def choice_grammar(texts: Sequence[str]) -> str:
    """Return the grammar of a choice between texts."""
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def lark_grammar(text: str, param: str) -> str:
    """Return a grammar in Lark's syntax, from Lark or GBNF.

    Raises:
        InvalidRequest: it is neither; the error names `param`.
    """
    try:
        return str(any_to_lark(text))
    except (GbnfToLarkError, ValueError) as error:
        raise InvalidRequest(f"`{param}` is neither Lark nor GBNF: {_first_line(str(error))}", param) from None


def structural_tag_grammar(parts: Sequence[MarkedPart]) -> str:
    """Return the grammar of free text with marked parts."""
    tags = [StructTag(trigger=part.trigger, begin=part.begin, grammar=part.schema, end=part.end) for part in parts]
    return str(StructTag.to_grammar(tags, assume_special=False))


def _first_line(message: str) -> str:
    return message.strip().split("\n", 1)[0][:300]
