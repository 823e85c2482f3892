"""Tiny Llama checkpoint that emits given texts after given prompts, for tests of tools and structured output.

The weights are written by hand, and everything else is an ordinary checkpoint: config, safetensors, a byte-level BPE
tokenizer and a chat template of the Hermes form.

1. Each script's text is cut into pieces. Markers such as `<tool_call>` and the structure of JSON, up to each value, are
   tokens that scripts share. The rest is cut into chunks: a chunk is a token that stands at one place of one script. No
   merge makes it, so no prompt contains it.
2. A chunk's successor is a bigram of embedding and output matrix, which are one-hot.
3. Attention has no queries and keys, so it is the mean over all earlier tokens. It carries presences into the residual
   stream: of each script's triggers (phrases of the prompt, each one token), and of chunks.
4. A script begins behind any token that is neither a chunk nor shared. The trigger of the highest rank decides which.
   Without a trigger it is the default script.
5. Behind a shared token comes a chunk of the same script, the first one that was not there yet. If another shared token
   follows, the chunks before it decide.
6. A grammar forces tokens where only one text is possible. These are bytes and shared tokens, so the script goes on
   behind them.
7. Bytes have small logits, by which an output that a grammar takes off its script ends soon: quotes and brackets that
   close come first.

Logits differ by hundreds at least, so a temperature of at most 2 changes nothing on the script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_RANK = 5
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_TURN_BEGIN, _TURN_END = "<|im_start|>", "<|im_end|>"
_CHUNK_CHARS = 8
_HEAD_SIZE = 64
_CONTEXT = 8192
_MAX_CONTEXT = 2**18

_DEFAULT = 100.0
_TRIGGER = 1e5 * _MAX_CONTEXT
"""Weight of a trigger of rank 0: it outweighs the default also where it is one token of a full context."""
_RANK_FACTOR = 256.0
"""Ratio of the weights of two ranks, so that one trigger outranks many of the rank below."""
_RESUME_FACTOR = 0.9
"""Ratio of the weights of two successive chunks with which a script may go on behind forced bytes."""
_PASSED = _TRIGGER * _RANK_FACTOR ** (MAX_RANK + 1)
"""Weight of the chunks before a marker for the choice of its successor; it outweighs all triggers."""
_CHOICE_FACTOR = 4.0
"""Ratio of the weights of two successive such choices."""
_MAX_CHOICES = 12
_FOLLOWED = 1e34
"""Weight of a chunk for its successor, and against what cannot follow it; it outweighs all others."""
_ENDING = '"}]:,0123456789'
"""Bytes that an output off its script prefers, in this order."""
_END = 2.0 * (len(_ENDING) + 3)
"""Logit of the end, above that of all bytes."""
_VALUE = re.compile(r'((?<=": ")[^"]+|(?<=": )[\w.-]+)')
"""Value in a text of JSON, without its quotes."""
_SHARED = re.compile("(" + "|".join(MARKERS) + ")")

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

Write each call as <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (tools and loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True, slots=True)
class Script:
    """Text that the model answers to prompts with a trigger."""

    text: str
    triggers: tuple[str, ...] = ()
    """Phrases of prompts; none for the default script, of which there is one."""
    rank: int = 0
    """Rank among scripts whose triggers stand in one prompt; the highest wins. At most `MAX_RANK`."""


def write_scripted_checkpoint(path: Path, scripts: Sequence[Script], context: int = _CONTEXT) -> Path:
    """Write a model that answers with the scripts into `path`; its context has at most 2**18 tokens."""
    vocabulary = _Vocabulary(scripts)
    vocabulary.tokenizer().save_pretrained(path)
    model = _model(_Weights(vocabulary), context)
    model.generation_config.eos_token_id = vocabulary.ids[_TURN_END]
    model.save_pretrained(path)
    return path


class _Vocabulary:
    """Tokens of the model: bytes, chunks, shared pieces of scripts, the template's markers and triggers."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        assert sum(not script.triggers for script in scripts) == 1, "one script must be the default"
        assert all(0 <= script.rank <= MAX_RANK for script in scripts), f"ranks are 0 to {MAX_RANK}"
        self.scripts = scripts
        pieces = [list(_pieces(script.text)) for script in scripts]
        triggers = [trigger for script in scripts for trigger in script.triggers]
        shared = dict.fromkeys([*MARKERS, *(piece.text for cut in pieces for piece in cut if piece.is_shared)])
        self.bytes = sorted(pre_tokenizers.ByteLevel.alphabet())
        added = [name for name in (*shared, *triggers) if _spelled(name) not in self.bytes]
        assert len(set(added)) == len(added), "a trigger belongs to two scripts, or is a part of one"
        used = {*self.bytes, *map(_spelled, added)}
        outputs = [[name for piece in cut for name in _names(piece, used)] for cut in pieces]
        self.chunks = [name for output in outputs for name in output if name not in shared]
        names = [*self.bytes, *map(_spelled, self.chunks), _TURN_BEGIN, _TURN_END, *added]
        self.ids = {name: token_id for token_id, name in enumerate(names)}
        self.outputs = [[self.id_of(name) for name in output] for output in outputs]
        """Token ids of each script."""
        self.shared = set(map(self.id_of, shared))
        self._added = [AddedToken(name, normalized=False, special=False) for name in added]

    def id_of(self, text: str) -> int:
        """Return the id of a piece, chunk or trigger."""
        return self.ids[text] if text in self.ids else self.ids[_spelled(text)]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer."""
        plain = {name: self.ids[name] for name in (*self.bytes, *map(_spelled, self.chunks))}
        tokenizer = Tokenizer(models.BPE(vocab=plain, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([_TURN_BEGIN, _TURN_END])
        tokenizer.add_tokens(self._added)
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=_TURN_END,
            clean_up_tokenization_spaces=False,
            chat_template=CHAT_TEMPLATE,
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Piece of a script."""

    text: str
    is_shared: bool


def _pieces(text: str) -> Iterator[_Piece]:
    """Cut a script at markers, and JSON at its values."""
    for part in filter(None, _SHARED.split(text)):
        if part in MARKERS or part == "\n":  # Calls stand on lines of their own.
            yield _Piece(part, True)
            continue
        # The values are the odd ones.
        values = _VALUE.split(part)
        yield from (_Piece(value, len(values) > 1 and place % 2 == 0) for place, value in enumerate(values) if value)


def _names(piece: _Piece, used: set[str]) -> list[str]:
    """Return the piece if it is shared, else its chunks; add these to the texts that are in use."""
    if piece.is_shared:
        return [piece.text]
    chunks = _chunks(piece.text, frozenset(used))
    assert chunks is not None, f"{piece.text!r} is too short, or stands at too many places of the scripts"
    used.update(map(_spelled, chunks))
    return chunks


def _chunks(text: str, used: frozenset[str]) -> list[str] | None:
    """Cut a text into chunks that are not in use, preferably into larger ones; None if there is no such cut."""
    if not text:
        return []
    usual = min(_CHUNK_CHARS, len(text))
    for size in (*range(usual, len(text) + 1), *range(usual - 1, 0, -1)):
        chunk = _spelled(text[:size])
        rest = None if chunk in used else _chunks(text[size:], used | {chunk})
        if rest is not None:
            return [text[:size], *rest]
    return None


def _spelled(text: str) -> str:
    """Return a text as a byte-level vocabulary spells it."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text))


@dataclass(frozen=True, slots=True)
class _Choice:
    """Logit of a successor."""

    selector: int
    """Residual dimension of a presence."""
    weight: float
    constant: float = 0.0
    """Logit without the presence."""


class _Weights:
    """Weights of the model. The residual stream has a dimension for each token, then one for each presence."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary, self._shared = vocabulary, vocabulary.shared
        self.num_tokens = len(vocabulary.ids)
        self.presences: list[list[int]] = []
        """Tokens that write each presence."""
        inner = set(map(vocabulary.id_of, vocabulary.chunks)) | self._shared
        self._outer = set(range(self.num_tokens)) - inner | {vocabulary.ids[name] for name in vocabulary.bytes}
        """Tokens behind which a script may begin."""
        self.end_token_id = vocabulary.ids[_TURN_END]
        num_presences = sum(1 + 2 * len(tokens) for tokens in vocabulary.outputs)
        self.output = torch.zeros(self.num_tokens, self.num_tokens + num_presences)
        """Output matrix [num_tokens, residual size]."""
        self._prefer_ends()
        for script, tokens in zip(vocabulary.scripts, vocabulary.outputs, strict=True):
            self._add(script, tokens)

    def _prefer_ends(self) -> None:
        """Forbid all tokens but bytes, which have preferences, and the end, which comes before them."""
        self.output[:, : self.num_tokens] = -_FOLLOWED
        spelled_ending = [_spelled(char) for char in _ENDING]
        for name in self._vocabulary.bytes:
            is_printable = name.isascii()
            place = spelled_ending.index(name) if name in spelled_ending else len(_ENDING) + 1 - is_printable
            self.output[self._vocabulary.ids[name], : self.num_tokens] = 2.0 * (len(_ENDING) + 2 - place)
        self.output[self.end_token_id, : self.num_tokens] = _END
        # What ends a script or stands between two calls does so only where the script has it.
        for token in (self.end_token_id, *(self._shared & self._outer)):
            self.output[token, sorted(self._shared - self._outer)] = -_FOLLOWED

    def _add(self, script: Script, tokens: Sequence[int]) -> None:
        """Add a script: its begin, and the successor of each of its tokens."""
        weight, constant = (_TRIGGER * _RANK_FACTOR**script.rank, 0.0) if script.triggers else (0.0, _DEFAULT)
        selector = self._new_presence([self._vocabulary.ids[trigger] for trigger in script.triggers])
        self._allow(tokens[0], self._outer, _Choice(selector, weight, constant))
        for place, (token, successor) in enumerate(zip(tokens, [*tokens[1:], self.end_token_id], strict=True)):
            # A script begins before it goes on, and goes on in order.
            choice = _Choice(selector, weight / 2 * _RESUME_FACTOR**place, constant)
            if token not in self._shared:
                self.output[successor, token] = _FOLLOWED
            elif successor == self.end_token_id:
                # Also where the calls were not those of the script.
                last = self._choice_behind(tokens[:place]) or choice
                self._allow(successor, self._contexts(token), replace(last, constant=_END))
            elif successor in self._shared:
                self._allow(successor, self._contexts(token), self._choice_behind(tokens[:place]) or choice)
            else:
                self._allow(successor, self._contexts(token), choice)
                # One dimension that this chunk and all later ones write rules the chunk out.
                later = [token for token in tokens[place + 1 :] if token not in self._shared]
                self.output[successor, self._new_presence(later)] = -_FOLLOWED

    def _contexts(self, token: int) -> set[int]:
        """Return the tokens behind which the successor of a shared token may come: a shared byte is like any other."""
        return self._outer if token in self._outer else {token}

    def _choice_behind(self, tokens: Sequence[int]) -> _Choice | None:
        """Return the choice of a shared successor by the last chunk before it; None if there is none."""
        chunks = [token for token in tokens if token not in self._shared]
        num_shared = len(tokens) - len(chunks)
        assert num_shared <= _MAX_CHOICES, f"a script has more than {_MAX_CHOICES} markers and keys"
        # A later choice outranks an earlier one.
        return _Choice(self._new_presence(chunks[-1:]), _PASSED * _CHOICE_FACTOR**num_shared) if chunks else None

    def _new_presence(self, tokens: list[int]) -> int:
        """Return the residual dimension of a new presence, which these tokens write."""
        self.presences.append(tokens)
        return self.num_tokens + len(self.presences) - 1

    def _allow(self, token: int, contexts: set[int], choice: _Choice) -> None:
        """Allow a token behind others, where a presence chooses it."""
        places = sorted(contexts)
        row = self.output[token]
        row[places] = row[places].clamp(min=choice.constant)
        row[choice.selector] = max(float(row[choice.selector]), choice.weight)


def _model(weights: _Weights, context: int) -> LlamaForCausalLM:
    """Return the model of the weights; sizes are rounded up to whole heads."""
    num_tokens, num_presences = weights.num_tokens, len(weights.presences)
    num_heads = -(-num_presences // _HEAD_SIZE)
    hidden_size = -(-weights.output.shape[1] // _HEAD_SIZE) * _HEAD_SIZE
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=hidden_size,
        intermediate_size=_HEAD_SIZE,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=weights.end_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" not in name:
                values.zero_()
        layer = model.model.layers[0].self_attn
        _fill(model.model.embed_tokens.weight, torch.eye(num_tokens))
        _fill(model.lm_head.weight, weights.output)
        # The norm multiplies a one-hot vector by the root of its size.
        scale = hidden_size**-0.5
        for presence, tokens in enumerate(weights.presences):
            layer.v_proj.weight[presence, tokens] = scale
            layer.o_proj.weight[num_tokens + presence, presence] = 1.0
    return model


def _fill(target: Tensor, values: Tensor) -> None:
    """Write a matrix into the first rows and columns of a larger one."""
    target[: values.shape[0], : values.shape[1]] = values
