"""Unsupported fields of OpenAI and vLLM, with the values that are accepted and ignored."""

from __future__ import annotations

from collections.abc import Mapping

IgnoredValues = Mapping[str, tuple[object, ...]]
"""Map from a field's name to the values that are accepted and ignored; null always is."""

COMMON_IGNORED: IgnoredValues = {
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
}

CHAT_IGNORED: IgnoredValues = {
    **COMMON_IGNORED,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "best_of": (1,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}

COMPLETION_IGNORED: IgnoredValues = {
    **COMMON_IGNORED,
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}

TOKENIZE_IGNORED: IgnoredValues = {
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
}

MESSAGE_IGNORED: IgnoredValues = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning": (),
    "reasoning_content": (),
}
"""Fields of the SDKs' message objects, which clients send back with a reply as history."""


def without_ignored(fields: Mapping[str, object], ignored: IgnoredValues) -> dict[str, object]:
    """Return `fields` without the unsupported fields whose value is in `ignored` or null."""
    return {
        name: value
        for name, value in fields.items()
        if not (name in ignored and (value is None or value in ignored[name]))
    }
