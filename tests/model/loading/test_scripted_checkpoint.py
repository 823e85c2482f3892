"""The test kit's scripted checkpoint answers as its scripts say, through the real engine."""

from pathlib import Path

import pytest

from replicas.model.loading.options import Dtype
from replicas.protocol import FinishReason, SamplingParams
from replicas.text.tokenizer_files import load_tokenizer
from testkit.model.engine_runs import Sizes, build_engine, load, requests_for, run
from testkit.model.scripted_checkpoint import Script, write_scripted_checkpoint

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO_CALLS = f'{CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{"city": "Rome"}}}}\n</tool_call>'
SCRIPTS = (
    Script("I am a scripted model."),
    Script(CALL, ("weather in Paris",)),
    Script(TWO_CALLS, ("time and weather",)),
    Script("It is sunny in Paris: 18 °C, “fine”.", ("18 degrees",), rank=1),
    Script("<think>\n9.9 is larger.\n</think>\n\nIt is 9.9.", ("9.9 or 9.11",)),
    Script('{"name": "Ada", "age": 36}', ("Extract the person",), rank=2),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_checkpoint(tmp_path_factory.mktemp("scripted"), SCRIPTS)


def prompt(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant", "tool")
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


CONVERSATIONS = (
    (prompt("hi"), SCRIPTS[0]),
    (prompt("What is the weather in Paris?"), SCRIPTS[1]),
    (prompt("The time and weather there, please." + " And quickly!" * 5), SCRIPTS[2]),
    (prompt("weather in Paris, weather in Paris", "I look.", "sunny, 18 degrees"), SCRIPTS[3]),
    (prompt("Is it 9.9 or 9.11?"), SCRIPTS[4]),
    (prompt("Extract the person: 18 degrees in Paris are enough for Ada, 36."), SCRIPTS[5]),
)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_batched", [70, 9])
def test_each_trigger_gives_its_script(checkpoint: Path, dtype: Dtype, num_batched: int, temperature: float) -> None:
    tokenizer = load_tokenizer(str(checkpoint))
    texts = [
        str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        for turns, _ in CONVERSATIONS
    ]
    prompts = [tuple(tokenizer.encode(text)) for text in texts]
    assert [tokenizer.decode(ids) for ids in prompts] == texts
    engine = build_engine(load(checkpoint, dtype), Sizes(num_blocks=96, max_num_batched_tokens=num_batched))
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1)
    outputs = run(engine, requests_for(prompts, params))
    assert [output.text for output in outputs] == [script.text for _, script in CONVERSATIONS]
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP}
