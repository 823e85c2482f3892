"""A chat template may be given as a file or by name; it is tried at the start, and a prompt is written with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from replicas.errors import ModelLoadError
from replicas.text.tokenizer_files import load_tokenizer
from serve_app.config import DEMO_MODEL_NAME
from serve_app.openai.request.schema import ChatBody
from serve_app.openai.tokenize.prompt_encoder import ChatTurns, PromptEncoder
from serve_app.preflight.fields import read_fields
from serve_app.preflight.machine import check_text

WRITTEN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
BODY = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "hello"}]})


def encoder_with(tokenizer: Any, chat_template: str, own: Any = None) -> PromptEncoder:
    fast = load_tokenizer(tokenizer.name_or_path)
    fast.chat_template = own
    return PromptEncoder(fast, tokenizer.name_or_path, chat_template=chat_template)


def text_of(encoder: PromptEncoder) -> str | None:
    return encoder.encode_chat(ChatTurns.of(BODY), None, False).text


def test_a_file_takes_the_place_of_the_models_template(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(WRITTEN)
    assert text_of(encoder_with(tokenizer, str(path))) == "<user>hello<assistant>"


def test_a_name_chooses_one_of_the_models_templates(tokenizer: Any) -> None:
    own = {"default": "{{ messages[0].content }}", "rag": WRITTEN}
    assert text_of(encoder_with(tokenizer, "rag", own)) == "<user>hello<assistant>"
    with pytest.raises(ValueError, match="chat_template is 'tool'; it must be a file or one of default, rag"):
        encoder_with(tokenizer, "tool", own)


@pytest.mark.parametrize("file", ["chat_template.json", "chat_template.jinja"])
def test_a_model_for_images_has_the_template_of_its_processor(tokenizer: Any, tmp_path: Path, file: str) -> None:
    fast = load_tokenizer(tokenizer.name_or_path)
    fast.chat_template = None
    fast.save_pretrained(tmp_path)
    text = json.dumps({"chat_template": WRITTEN}) if file.endswith("json") else WRITTEN
    (tmp_path / file).write_text(text)
    assert text_of(PromptEncoder.load(str(tmp_path))) == "<user>hello<assistant>"


@pytest.mark.parametrize("part", ["part.text", "part['text'] if part.type == 'text' else '<image>'"])
def test_a_template_that_takes_lists_alone_gets_the_text_as_a_part(tokenizer: Any, tmp_path: Path, part: str) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(
        WRITTEN.replace("{{ message.content }}", f"{{% for part in message.content %}}{{{{ {part} }}}}{{% endfor %}}")
    )
    encoder = encoder_with(tokenizer, str(path))
    assert text_of(encoder) == "<user>hello<assistant>"


def test_another_process_writes_the_same_prompt(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(WRITTEN)
    make, arguments = encoder_with(tokenizer, str(path)).__reduce__()
    assert text_of(make(*arguments)) == "<user>hello<assistant>"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for message in messages %}\n{{ message", r"cannot render a user's message: TemplateSyntaxError: .*line 2"),
        ("{{ raise_exception('no') }}", "cannot render a user's message: TemplateError: no"),
        ("{{ messages | no_such_filter }}", "cannot render a user's message: Template.*no_such_filter"),
        ("You are helpful.", "leaves out a user's message; it must write `messages`"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_before_the_start(tmp_path: Path, template: str, fault: str) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    config = read_fields({"model": DEMO_MODEL_NAME, "chat_template": str(path)})
    with pytest.raises(ModelLoadError, match=f"chat_template {path} {fault}"):
        check_text(config.model_path, config)


def test_a_missing_file_is_refused_before_the_start() -> None:
    config = read_fields({"model": DEMO_MODEL_NAME, "chat_template": "/no/template.jinja"})
    with pytest.raises(ModelLoadError, match=r"chat_template is '/no/template\.jinja'; it must be a file"):
        check_text(config.model_path, config)
