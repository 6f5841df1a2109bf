"""Tests `stolon serve` with Anthropic's Python client: python anthropic_client.py path/to/stolon

Needs the package `anthropic`. Uses the model in fixtures/scripted and needs no network. Fails with an
exception at the first reply that differs from what Anthropic's API specifies.
"""

import json
import sys

import anthropic
from openai_client import SCRIPTED, picture, start

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}
SYSTEM = [{"type": "text", "text": "The keeper collects keys. " * 40, "cache_control": {"type": "ephemeral"}}]


def check_loop(client, model):
    """A call, its result and the answer, streamed and whole."""
    turns = [{"role": "user", "content": "What is the weather? script:call"}]
    ask = dict(model=model, max_tokens=64, system=SYSTEM, tools=[WEATHER])
    whole = client.messages.create(**ask, messages=turns)
    assert whole.stop_reason == "tool_use", whole
    with client.messages.stream(**ask, messages=turns) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    # A call whose form is not guaranteed is sent when it is complete.
    assert json.loads("".join(pieces)) == {"city": "Paris", "days": 2}, pieces
    assert [block.type for block in streamed.content] == ["text", "tool_use"]
    call = streamed.content[1]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris", "days": 2}), call
    assert streamed.usage.cache_read_input_tokens > streamed.usage.input_tokens, streamed.usage
    created = whole.usage.cache_creation
    assert created.ephemeral_5m_input_tokens == whole.usage.cache_creation_input_tokens > 0, whole.usage
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees. script:plain"}
    turns += [{"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**ask, messages=turns)
    assert (answer.content[0].text, answer.stop_reason) == ("Hello, world.", "end_turn"), answer
    counted = client.messages.count_tokens(model=model, system=SYSTEM, tools=[WEATHER], messages=turns)
    usage = answer.usage
    computed = usage.input_tokens + usage.cache_creation_input_tokens
    assert counted.input_tokens == computed + usage.cache_read_input_tokens


def check_rest(client, model):
    ask = dict(model=model, max_tokens=64)
    thought = client.messages.create(
        **ask, messages=[{"role": "user", "content": "Hm."}], thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in thought.content] == ["thinking", "text"], thought
    stopped = client.messages.create(
        **ask, messages=[{"role": "user", "content": "script:plain"}], stop_sequences=["world"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "world"), stopped
    try:
        client.models.retrieve("another")
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("another model was not refused")
    try:
        anthropic.Anthropic(base_url=client.base_url, api_key="wrong", max_retries=0).messages.create(
            **ask, messages=[{"role": "user", "content": "hi"}]
        )
    except anthropic.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was not refused")


def check_images(client, model):
    source = {"type": "base64", "media_type": "image/png", "data": picture(20, 30, (200, 0, 0)).split(",")[1]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    ask = dict(model=model, max_tokens=3, messages=[{"role": "user", "content": content}])
    first = client.messages.create(**ask)
    again = client.messages.create(**ask)
    assert again.content == first.content and again.usage.cache_read_input_tokens > 10, again.usage
    content[0] = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    try:
        client.messages.create(**ask)
    except anthropic.BadRequestError as error:
        assert "data URL" in str(error), error
    else:
        raise AssertionError("a remote image was accepted")


def main():
    process, address = start(sys.argv[1], ["--model", SCRIPTED, "--api-key", "0123456789abcdef-key"])
    try:
        client = anthropic.Anthropic(base_url=address, api_key="0123456789abcdef-key", max_retries=0)
        model = "scripted"
        check_loop(client, model)
        check_rest(client, model)
    finally:
        process.terminate()
        process.wait(timeout=60)
    process, address = start(sys.argv[1], ["--model", "random:smolvlm-tiny"])
    try:
        client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
        check_images(client, "random:smolvlm-tiny")
    finally:
        process.terminate()
        process.wait(timeout=60)
    print(f"anthropic {anthropic.__version__}: all checks passed")


if __name__ == "__main__":
    main()
