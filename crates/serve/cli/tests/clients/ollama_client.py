"""Ollama's Python client and llm-ollama, the plugin of the command `llm`."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile

import ollama


def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city.

    Args:
        city: The city.
        days: The number of days.
    """
    return f"18 degrees in {city}. script:plain"


def check_chat(client, model):
    """A call, its result and the answer, streamed and whole."""
    messages = [{"role": "user", "content": "What is the weather? script:call"}]
    greedy = {"temperature": 0, "num_ctx": 4096}
    whole = client.chat(model, messages=messages, tools=[get_weather], options=greedy, keep_alive="10m")
    assert whole.done_reason == "stop" and whole.eval_count > 0 and whole.total_duration > 0, whole
    calls = []
    for piece in client.chat(model, messages=messages, tools=[get_weather], options=greedy, stream=True):
        calls += piece.message.tool_calls or []
    assert calls == whole.message.tool_calls, (calls, whole)
    assert calls[0].function.arguments == {"city": "Paris", "days": 2}, calls
    messages.append(whole.message)
    result = get_weather(**calls[0].function.arguments)
    messages.append({"role": "tool", "content": result, "tool_name": calls[0].function.name})
    answer = client.chat(model, messages=messages, tools=[get_weather], options=greedy)
    assert answer.message.content == "Hello, world.", answer
    thought = client.chat(model, messages=[{"role": "user", "content": "script:think"}], think=True, options=greedy)
    assert thought.message.thinking and "<think>" not in thought.message.content, thought
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    asked = [{"role": "user", "content": "script:json"}]
    formed = client.chat(model, messages=asked, format=schema, options=greedy)
    assert json.loads(formed.message.content) == {"answer": 42}, formed


async def check_home_assistant(address, model):
    """The loop of Home Assistant's integration: pieces of an asynchronous client, results without a name, a
    `keep_alive` with a unit, and tools until no more are called."""
    client = ollama.AsyncClient(host=address)
    assert [entry.model for entry in (await client.list()).models] == [f"{model}:latest"]
    tool = {"type": "function", "function": {
        "name": "get_weather", "description": "The weather", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 0}},
            "required": []}}}
    history = [ollama.Message(role="system", content="You are a voice assistant for Home Assistant."),
               ollama.Message(role="user", content="Is it warm outside? script:call")]
    for _ in range(10):
        said, calls = "", []
        async for piece in await client.chat(model=model, messages=list(history), tools=[tool], stream=True,
                                             keep_alive="-1s", options={"num_ctx": 8192}):
            said += piece["message"].get("content") or ""
            calls += piece["message"].get("tool_calls") or []
        calls = [ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(
            name=call["function"]["name"], arguments=call["function"]["arguments"])) for call in calls]
        history.append(ollama.Message(role="assistant", content=said, tool_calls=calls))
        if not calls:
            break
        result = json.dumps({"response_type": "action_done"}) + " script:plain"
        history += [ollama.Message(role="tool", content=result) for _ in calls]
    assert [message.role for message in history] == ["system", "user", "assistant", "tool", "assistant"], history
    assert history[-1].content == "Hello, world.", history


def check_generate(client, model):
    whole = client.generate(model, prompt="Now script:plain", options={"temperature": 0})
    assert whole.response == "Hello, world.", whole
    pieces = client.generate(model, prompt="Now script:plain", options={"temperature": 0}, stream=True)
    assert "".join(piece.response for piece in pieces) == whole.response
    raw = client.generate(model, prompt="script:plain", raw=True, options={"temperature": 0, "num_predict": 2})
    assert (raw.response, raw.done_reason) == ("Hello, wor", "length"), raw
    assert client.generate(model, prompt="").done_reason == "load"


def refused(status, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except ollama.ResponseError as error:
        assert error.status_code == status and error.error, error
        return error.error
    raise AssertionError(f"{call} was not refused")


def check_models(client, model):
    listed = client.list().models[0]
    assert listed.model == f"{model}:latest" and listed.digest and listed.modified_at, listed
    running = client.ps().models[0]
    assert running.context_length == 4096 and running.expires_at, running
    shown = client.show(listed.model)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities), shown.capabilities
    assert shown.modelinfo[shown.modelinfo["general.architecture"] + ".context_length"] == 4096
    assert client.pull(model).status == "success"
    assert "stolon serve --model" in refused(404, client.pull, "llama3.2")
    refused(404, client.show, "llama3.2")
    refused(501, client.create, "mine", from_=model)
    refused(501, client.copy, model, "mine")
    refused(501, client.delete, model)
    refused(400, client.generate, model, prompt="a", suffix="b")
    refused(400, client.chat, model, messages=[{"role": "user", "content": "x"}], options={"temperature": -1})


def check_llm(address):
    """The plugin of the command `llm`, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OLLAMA_HOST": address, "LLM_USER_PATH": folder}
        run = [sys.executable, "-m", "llm", "-m", "ollama/scripted", "-o", "temperature", "0", "Now script:plain"]
        for options in ([], ["--no-stream"]):
            shown = subprocess.run(run + options, env=environment, capture_output=True, text=True, timeout=120)
            assert shown.stdout.strip() == "Hello, world.", shown


def main():
    address = os.environ["STOLON_URL"].removesuffix("/v1")
    client = ollama.Client(host=address)
    check_chat(client, "scripted")
    asyncio.run(check_home_assistant(address, "scripted"))
    check_generate(client, "scripted")
    check_models(client, "scripted")
    check_llm(address)
    print("ollama for Python: all checks passed")


if __name__ == "__main__":
    main()
