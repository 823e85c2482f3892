"""Grammars of outputs, compiled and matched by llguidance; the only module that imports it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from replicas.errors import InvalidRequest, SequenceFailed
from replicas.protocol import GenerateRequest, Metric, MetricKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_GRAMMAR_BYTES = 262_144
"""Longest grammar, bytes of UTF-8."""

_WHITESPACE = r"( |\n {0,16}|\n\t{0,8})"
"""One space, or a line break with indentation; there need not be any."""

_CACHE_SIZE = 128
"""Number of compiled grammars that a compiler keeps; a small one takes 0.15 MiB, and 1 to 5 ms to compile again."""

# The lexer's fuel bounds the time of a compilation: 1,000,000 are some 20 ms. A token of an ambiguous grammar takes
# time that grows with the cube of a row's items: 0.1 s for 1,000 of them.
_LIMITS = LLParserLimits(
    max_items_in_row=1_000, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
    max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False,
)  # fmt: skip

_BUDGET_S = 1.0
_BUDGET_PER_TOKEN_S = 0.02
"""Processor time that a sequence's grammar may take, in all and for each token. Ordinary ones take 0.1 ms a token."""

_NUM_PROBED_TOKENS = 8
"""Number of tokens that a grammar's check follows, as some grammars reach a limit only then."""

_EXPLAINED = {
    "NoExtension": "no output meets it",
    "Parser Error: Current row has": "it has too many alternatives or optional properties at one place",
    "lexer error: too many expressions": "its regular expressions, numbers or lengths are too complex",
    "parser error: Too many items": "it is too ambiguous",
}
"""Begins of llguidance's messages about limits, and what they mean."""

_LOCATION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(frozen=True, slots=True)
class VocabularySizes:
    """Sizes of a vocabulary as the model and as llguidance have it."""

    num_logits: int
    """Tokens that the model can sample; those beyond are in no output."""
    num_tokens: int
    """Tokens that llguidance knows, at least as many."""

    @property
    def mask_bytes(self) -> int:
        """Length of llguidance's masks: a bit for each token, in words of four bytes."""
        return -(-self.num_tokens // 32) * 4


class GrammarConstraint:
    """Constraint of one sequence's output by a grammar.

    Sequences of one grammar share its lexer, whose limits they can exhaust together. A sequence that meets a limit
    therefore goes on with a matcher of its own, which has accepted the same tokens.
    """

    def __init__(self, matcher: LLMatcher, sizes: VocabularySizes, compile_again: Callable[[], LLMatcher]) -> None:
        """Create the constraint; `compile_again` returns a matcher that shares nothing with any other."""
        self._matcher = matcher
        self._num_logits = sizes.num_logits
        self._mask_bytes = sizes.mask_bytes
        self._compile_again = compile_again
        self._is_alone = False
        self._accepted: list[int] = []
        self._spent_s = 0.0
        self._overrun: str | None = None

    @property
    def is_complete(self) -> bool:
        """True if no token may come next, except one that ends the sequence."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Reason why the grammar cannot be followed; None: there is none."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else self._overrun

    def accept(self, token_id: int) -> None:
        """Add the next output token.

        Raises:
            ValueError: the grammar does not allow the token, or following it takes too long.
        """
        self.accept_all((token_id,))

    def accept_all(self, token_ids: Sequence[int]) -> None:
        """Add several output tokens.

        Raises:
            ValueError: the grammar does not allow a token, or following them takes too long.
        """
        started_s = time.thread_time()
        self._accepted += token_ids
        if not self._matcher.consume_tokens(list(token_ids)):
            self._leave_shared_lexer()
        self._spend(time.thread_time() - started_s)
        if self.error is not None:
            raise ValueError(self.error)

    def forced_token_id(self) -> int | None:
        """Return the only token that may come next; None: there are several, or it would take a mask to tell.

        Where a grammar forces a text, llguidance allows only the tokens that the tokenizer makes of the text.
        """
        if self.error is not None:
            return None
        started_s = time.thread_time()
        forced = self._matcher.compute_ff_tokens()
        self._spend(time.thread_time() - started_s)
        return forced[0] if forced and forced[0] < self._num_logits else None

    def fill_mask(self, mask: memoryview) -> None:
        """Write the allowed tokens into `mask`, one bit for each token id. The GIL is free most of the time."""
        if self.error is not None:
            return
        started_s = time.thread_time()
        self._fill(np.frombuffer(mask, dtype=np.uint8))
        if self._matcher.is_error() and self._leave_shared_lexer():
            self._fill(np.frombuffer(mask, dtype=np.uint8))
        self._spend(time.thread_time() - started_s)

    def _spend(self, seconds: float) -> None:
        """Count processor time. Beyond the budget the constraint has an error from then on."""
        self._spent_s += seconds
        budget_s = _BUDGET_S + _BUDGET_PER_TOKEN_S * len(self._accepted)
        if self._spent_s > budget_s and self._overrun is None:
            self._overrun = f"it takes more than {budget_s:.1f} s for {len(self._accepted)} tokens"

    def _fill(self, mask: np.ndarray) -> None:
        """Fill a mask that is as long as the model's logits, which may be fewer or more than the tokenizer's tokens."""
        words = mask if mask.nbytes == self._mask_bytes else np.zeros(self._mask_bytes, np.uint8)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if words is not mask:
            mask[:] = 0
            common = min(mask.nbytes, words.nbytes)
            mask[:common] = words[:common]

    def _leave_shared_lexer(self) -> bool:
        """Go on with a matcher of its own; return False if this is one already, or cannot go on either."""
        if self._is_alone:
            return False
        self._is_alone = True
        self._matcher = self._compile_again()
        return bool(self._matcher.consume_tokens(self._accepted))


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Counts of a compiler's cache."""

    num_requests: int
    """Requests with a grammar."""
    num_hits: int
    """Requests whose grammar was compiled before."""
    size: int
    """Compiled grammars in the cache."""


class GrammarCompiler:
    """Compiler of grammars for one tokenizer, with a cache of those used last. Threads may share it.

    Invariant: the cache holds at most `_CACHE_SIZE` grammars.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int | None = None, eos_token_ids: Collection[int] = ()
    ) -> None:
        """Build the compiler, which takes about a second for 150,000 tokens.

        `vocab_size` is the number of logits; None: as many as the tokenizer has tokens. `eos_token_ids` end a sequence;
        none: the tokenizer's. A tokenizer that llguidance cannot read gives a compiler that refuses all grammars.
        """
        text, num_tokens = _written(tokenizer, vocab_size)
        self._sizes = VocabularySizes(vocab_size or num_tokens, max(vocab_size or 0, num_tokens))
        named = sorted(eos_token_ids) or [tokenizer.eos_token_id]
        eos = [token_id for token_id in named if token_id is not None and 0 <= token_id < self._sizes.num_logits]
        self._fault: str | None = None
        try:
            self._tokenizer = LLTokenizer(text, n_vocab=self._sizes.num_tokens, eos_token=eos or None)
        except Exception as error:  # Models without grammars are served, too, and llguidance may raise anything.
            self._fault = f"the model's tokenizer has no grammars: {_reason(str(error))}"
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_hits = 0

    def constraint_of(self, request: GenerateRequest) -> GrammarConstraint:
        """Return the constraint of a request that has one, after the output that the request brings.

        Raises:
            InvalidRequest: the grammar cannot be compiled.
            SequenceFailed: the grammar does not allow that output, or takes too long to follow.
        """
        assert request.params.grammar is not None
        constraint = self._constraint(request.params.grammar)
        try:
            constraint.accept_all(request.output_token_ids)
        except ValueError as error:
            raise SequenceFailed(f"the output so far cannot be followed: {error}") from None
        return constraint

    def check(self, grammar: str, param: str) -> None:
        """Compile a grammar and follow a few tokens.

        Raises:
            InvalidRequest: it is too long, wrong, or takes too long; the error names `param`.
        """
        check_length(grammar, param)
        try:
            fault = self._probed(self._constraint(grammar))
        except (InvalidRequest, ValueError) as error:
            fault = str(error)
        if fault is not None:
            raise InvalidRequest(f"`{param}` cannot be enforced: {fault}", param)

    def _probed(self, constraint: GrammarConstraint) -> str | None:
        """Follow a few tokens; return the reason why that fails, None if it does not."""
        mask = np.zeros(self._sizes.mask_bytes, np.uint8)
        for _ in range(_NUM_PROBED_TOKENS):
            constraint.fill_mask(mask.data)
            if constraint.is_complete or constraint.error is not None:
                break
            allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(mask, bitorder="little")), self._tokenizer.eos_tokens)
            if len(allowed) == 0:
                return None if mask.any() else "no token of the model continues its outputs"
            constraint.accept(int(allowed[0]))
        return constraint.error

    def _constraint(self, grammar: str) -> GrammarConstraint:
        """Return the constraint of a grammar, at its beginning."""
        shared = self._compiled(grammar)

        def compile_again() -> LLMatcher:
            with self._lock:
                if self._cache.get(grammar) is shared:
                    del self._cache[grammar]  # Its lexer has reached a limit, for all sequences.
            return self._compile(grammar)

        return GrammarConstraint(shared.deep_copy(), self._sizes, compile_again)

    def counts(self) -> CacheCounts:
        """Return the counts of the cache."""
        with self._lock:
            return CacheCounts(self._num_requests, self._num_hits, len(self._cache))

    def metrics(self) -> tuple[Metric, ...]:
        """Return the counts of requests with a grammar and of those whose grammar was in the cache, and its size."""
        counts = astuple(self.counts())
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
        # Without the lock: a second thread may compile the same grammar at the same time, which does no harm.
        matcher = self._compile(grammar)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be compiled: {_reason(matcher.get_error())}", "grammar")
        with self._lock:
            self._cache[grammar] = matcher
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        if self._fault is not None:
            raise InvalidRequest(self._fault, "grammar")
        try:
            return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        except ValueError as error:  # For example half of a surrogate pair, which has no UTF-8.
            raise InvalidRequest(f"the grammar cannot be compiled: {_reason(str(error))}", "grammar") from None


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


def check_length(text: str, param: str) -> None:
    """Check that a grammar, or what becomes one, is not too long.

    Raises:
        InvalidRequest: it is; the error names `param`.
    """
    num_bytes = len(text.encode(errors="surrogatepass"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        message = f"`{param}` makes a grammar of {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are accepted"
        raise InvalidRequest(message, param)


def json_schema_fault(schema: dict[str, Any]) -> str | None:
    """Return the reason why a JSON Schema has no grammar; None: it has one."""
    return _reason(LLMatcher.validate_grammar(json_schema_grammar(schema), limits=_LIMITS)) or None


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
        raise InvalidRequest(f"`{param}` is neither Lark nor GBNF: {_reason(str(error))}", param) from None


def structural_tag_grammar(parts: Sequence[MarkedPart]) -> str:
    """Return the grammar of free text with marked parts."""
    tags = [StructTag(trigger=part.trigger, begin=part.begin, grammar=part.schema, end=part.end) for part in parts]
    return str(StructTag.to_grammar(tags, assume_special=False))


def _written(tokenizer: PreTrainedTokenizerFast, vocab_size: int | None) -> tuple[str, int]:
    """Return a tokenizer's file as llguidance needs it, and the number of its tokens: one more than the largest id.

    It has neither padding nor truncation, and no added token for which the model has no logit: llguidance would write
    texts with it.
    """
    backend = tokenizer.backend_tokenizer
    if backend.padding is not None or backend.truncation is not None:
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
    text, ids = backend.to_str(), backend.get_vocab().values()
    num_tokens = max(ids, default=0) + 1
    if vocab_size is None or num_tokens <= vocab_size:
        return text, num_tokens
    content = json.loads(text)
    unknown = {token["id"] for token in content["added_tokens"] if token["id"] >= vocab_size}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] not in unknown]
    return json.dumps(content), max((token_id for token_id in ids if token_id not in unknown), default=0) + 1


def _reason(message: str) -> str:
    """Return the sentence of an error message of llguidance that says what is wrong."""
    lines = [line for line in message.strip().split("\n") if line != "<non-verbose/>"]
    first = _LOCATION.sub("", lines[0]) if lines else ""
    if first.endswith(":") and len(lines) > 1:  # The lines between quote the text.
        detail = next((line for line in lines[1:] if line.startswith("error: ")), lines[-1])
        first = f"{first} {detail.removeprefix('error: ')}"
    meaning = next((meaning for begin, meaning in _EXPLAINED.items() if first.startswith(begin)), None)
    return (first if meaning is None else f"{meaning} ({first})")[:300]
