"""Tokenizer and chat template: prompts become token ids in worker threads."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from replicas.errors import InvalidRequest
from replicas.tokenizer_files import load_tokenizer
from serve_app.openai.request.limits import prompt_too_long
from serve_app.openai.request.schema import ChatMessage, EncodedPrompt, Prompt
from serve_app.openai.tokenize.token_text import TokenText
from serve_app.openai.tokenize.workers import WorkerThreads


class PromptTokenizer:
    """Tokenizer of messages and texts, which works in worker threads.

    Only the batch calls of `tokenizers` release the GIL, so even a single text is encoded as a batch.
    The chat template is the only code of a model that runs, in transformers' Jinja sandbox.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str, workers: WorkerThreads) -> None:
        backend: Tokenizer = tokenizer.backend_tokenizer
        # A tokenizer file may switch on truncation and padding; both would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self._templates = tokenizer
        self._tokenizer = backend
        self._name = name
        self._workers = workers
        self._max_token_chars = max(map(len, backend.get_vocab()))
        self._knows_developer = "developer" in str(tokenizer.chat_template)
        self.token_text = TokenText(backend)

    @classmethod
    def load(cls, model: str, workers: WorkerThreads) -> PromptTokenizer:
        """Load the tokenizer of `model`, a directory or hub id."""
        return cls(load_tokenizer(model), model, workers)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_prompt_tokens: int | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> EncodedPrompt:
        """Render messages with the model's chat template and encode them.

        With `add_generation_prompt` the text ends where the assistant's turn begins.

        Raises:
            InvalidRequest: the model has no chat template, its template refuses the messages, or their text
                is too long for `max_prompt_tokens` tokens.
        """

        def encode() -> EncodedPrompt:
            text = self._render(messages, add_generation_prompt)
            self._refuse_oversized(text, "messages", max_prompt_tokens)
            return self._encode(text, add_special_tokens)

        return await self._workers.run(encode)

    async def encode_prompts(
        self, prompts: Sequence[Prompt], *, max_prompt_tokens: int | None = None, add_special_tokens: bool = True
    ) -> list[EncodedPrompt]:
        """Encode texts, by default with the model's special tokens; token ids stay as they are.

        Raises:
            InvalidRequest: a text is too long for `max_prompt_tokens` tokens.
        """

        def encode(prompt: Prompt) -> EncodedPrompt:
            if not isinstance(prompt, str):
                return EncodedPrompt(tuple(prompt), None)
            self._refuse_oversized(prompt, "prompt", max_prompt_tokens)
            return self._encode(prompt, add_special_tokens)

        return await self._workers.run(lambda: [encode(prompt) for prompt in prompts])

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""

        def decode() -> str:
            (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
            return text

        return await self._workers.run(decode)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them."""
        return await self._workers.run(
            lambda: [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids],
        )

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        if not self._templates.chat_template:
            raise InvalidRequest(f"model `{self._name}` has no chat template; use /v1/completions", "messages")
        turns = [message.model_dump(exclude_none=True) for message in messages]
        for turn in turns:
            if turn["role"] == "developer" and not self._knows_developer:
                turn["role"] = "system"
        try:
            return str(
                self._templates.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}", "messages") from None

    def _encode(self, text: str, add_special_tokens: bool) -> EncodedPrompt:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return EncodedPrompt(tuple(encoding.ids), text)

    def _refuse_oversized(self, text: str, param: str, max_prompt_tokens: int | None) -> None:
        """Refuse, without tokenizing, a text that is too long even if every token were the vocabulary's longest."""
        min_tokens = -(-len(text) // self._max_token_chars)
        if max_prompt_tokens is not None and min_tokens > max_prompt_tokens:
            raise prompt_too_long(min_tokens, max_prompt_tokens, param, at_least=True)
