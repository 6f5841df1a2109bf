"""Tests `stolon serve` with OpenAI's Python client: python openai_client.py path/to/stolon

Needs the package `openai`. Uses the demo model and those in fixtures/scripted and in
crates/models/checkpoint/tests/fixtures/embedding, and needs no network.
Fails with an exception at the first reply that differs from what OpenAI's API specifies.
"""

import base64
import enum
import json
import pathlib
import re
import struct
import subprocess
import sys
import time
import typing
import urllib.request
import zlib

import openai
import pydantic

EMBEDDING = pathlib.Path(__file__).resolve().parents[3] / "models" / "checkpoint" / "tests" / "fixtures" / "embedding"
SCRIPTED = str(pathlib.Path(__file__).parent / "fixtures" / "scripted")
SYSTEM = "The keeper of the tower collects keys and never throws one away. " * 20


def start(binary, arguments=()):
    """Starts a server on a free port; returns the process and the address it prints."""
    command = [binary, "serve", "--port", "0", "--num-blocks", "1024", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("listening on "):
            return process, line.removeprefix("listening on ").strip()
    raise RuntimeError(f"the server ended with {process.wait()} before it listened")


def check_models(client):
    models = [model.id for model in client.models.list()]
    assert models, "no model is listed"
    assert client.models.retrieve(models[0]).id == models[0]
    return models[0]


def check_completions(client, model):
    whole = client.completions.create(model=model, prompt="The tower", max_tokens=8, temperature=0)
    assert whole.usage.completion_tokens <= 8
    pieces = client.completions.create(model=model, prompt="The tower", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    scored = client.completions.create(
        model=model, prompt=["a b", "c d"], max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    for choice, prompt in zip(scored.choices, ["a b", "c d"], strict=True):
        assert choice.text == prompt
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def check_chat(client, model):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What does the keeper collect?"}]
    ask = dict(model=model, messages=messages, max_completion_tokens=16, temperature=0, seed=1)
    whole = client.chat.completions.create(**ask)
    answer = whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    again = client.chat.completions.create(**ask)
    assert again.choices[0].message.content == answer
    details = again.usage.prompt_tokens_details
    assert details.cached_tokens >= again.usage.prompt_tokens // 16 * 16 - 16, again.usage
    text, usage = "", None
    for piece in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        if piece.choices:
            text += piece.choices[0].delta.content or ""
        usage = piece.usage or usage
    assert text == answer
    assert usage.completion_tokens == whole.usage.completion_tokens
    scored = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    content = scored.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    several = client.chat.completions.create(**{**ask, "temperature": 1}, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def check_errors(client, model):
    def refused(kind, **arguments):
        try:
            client.chat.completions.create(**arguments)
        except kind as error:
            return error
        raise AssertionError(f"{arguments} was not refused")

    hello = [{"role": "user", "content": "hello"}]
    # Any name stands for the only model, but it does not exist.
    named = client.chat.completions.create(model="another", messages=hello, max_tokens=1)
    assert named.model == "another", named
    try:
        client.models.retrieve("another")
        raise AssertionError("a model that does not exist was found")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    error = refused(openai.BadRequestError, model=model, messages=hello, temperature=-1)
    assert error.param == "temperature"
    too_long = [{"role": "user", "content": "tower " * 50_000}]
    error = refused(openai.BadRequestError, model=model, messages=too_long)
    assert error.code == "context_length_exceeded"


def check_cancel(client, model):
    """A client that closes its stream ends its request, which would otherwise run for long."""
    address = str(client.base_url).removesuffix("/v1/")

    def counts():
        with urllib.request.urlopen(f"{address}/admin/audit") as reply:
            return json.load(reply)["audit"]

    ask = dict(model=model, messages=[{"role": "user", "content": "Count."}], extra_body={"ignore_eos": True})
    with client.chat.completions.create(**ask, stream=True, max_completion_tokens=3_000) as stream:
        for _ in zip(range(3), stream):
            pass
        assert counts()["running"] == 1
    deadline = time.monotonic() + 30
    while counts()["running"] + counts()["blocks_reserved"] > 0:
        assert time.monotonic() < deadline, counts()
        time.sleep(0.01)


WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}


def check_tools(client, model):
    """A call, its result and the answer, streamed and whole, and reasoning."""
    turns = [{"role": "user", "content": "What is the weather? script:call"}]
    ask = dict(model=model, temperature=0, tools=[{"type": "function", "function": WEATHER}])
    whole = client.chat.completions.create(**ask, messages=turns).choices[0]
    with client.chat.completions.stream(**ask, messages=turns) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert len(deltas) > 1, deltas
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}, call
        assert choice.message.content == "I look it up."
    turns += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees. script:plain"}]
    answer = client.chat.completions.create(**ask, messages=turns).choices[0]
    assert answer.message.content == "Hello, world.", answer
    thought = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "script:think"}])
    assert thought.choices[0].message.reasoning_content == "Let me think about it.", thought


def check_responses(client, model):
    ask = dict(model=model, temperature=0, tools=[{"type": "function", **WEATHER, "strict": True}])
    items = [{"role": "user", "content": "What is the weather? script:call"}]
    with client.responses.stream(**ask, input=items) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    assert kinds.count("response.function_call_arguments.delta") > 1, kinds
    assert response.output_text == "I look it up.", response
    call = response.output[-1]
    assert json.loads(call.arguments) == {"city": "Paris", "days": 2}, call
    items += response.output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees. script:plain"}]
    answer = client.responses.create(**ask, input=items)
    assert (answer.output_text, answer.status) == ("Hello, world.", "completed"), answer
    assert answer.usage.input_tokens_details.cached_tokens > 0, answer.usage
    # The server keeps the conversation.
    more = "Thank you. script:plain"
    continued = client.responses.create(**ask, input=more, previous_response_id=answer.id)
    whole = client.responses.create(**ask, input=items + answer.output + [{"role": "user", "content": more}])
    assert continued.usage.input_tokens == whole.usage.input_tokens, (continued, whole)
    assert client.responses.retrieve(continued.id).output_text == continued.output_text
    client.responses.delete(continued.id)
    try:
        client.responses.retrieve(continued.id)
        raise AssertionError("it is deleted")
    except openai.NotFoundError:
        pass
    cut = client.responses.create(model=model, input="script:plain", max_output_tokens=1)
    assert cut.incomplete_details.reason == "max_output_tokens", cut


class Color(str, enum.Enum):
    red = "red"
    blue = "blue"


class Paint(pydantic.BaseModel):
    """Paints a wall."""

    color: Color
    layers: int = pydantic.Field(ge=1, le=9)
    reason: typing.Literal["old", "new"] | None


def check_structured(client, model):
    turns = [{"role": "user", "content": "script:plain"}]
    ask = dict(model=model, temperature=0)
    parsed = client.chat.completions.parse(**ask, messages=turns, response_format=Paint, max_tokens=400)
    paint = parsed.choices[0].message.parsed
    assert isinstance(paint, Paint) and 1 <= paint.layers <= 9, parsed
    with client.chat.completions.stream(**ask, messages=turns, response_format=Paint, max_tokens=400) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == paint
    parsed = client.responses.parse(**ask, input="script:plain", text_format=Paint, max_output_tokens=400)
    assert parsed.output_parsed == paint, parsed
    tools = [openai.pydantic_function_tool(Paint)]
    for choice in ("required", {"type": "function", "function": {"name": "Paint"}}):
        parsed = client.chat.completions.parse(
            **ask, messages=turns, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=400
        )
        (call,) = parsed.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Paint), parsed
    free = client.chat.completions.parse(**ask, messages=turns, tools=tools).choices[0].message
    assert (free.content, free.tool_calls) == ("Hello, world.", None), free
    one = client.chat.completions.create(**ask, messages=turns, extra_body={"structured_outputs": {"regex": "[ab]{3}c"}})
    assert re.fullmatch("[ab]{3}c", one.choices[0].message.content), one
    try:
        schema = {"name": "s", "strict": True, "schema": {"type": "array", "uniqueItems": True}}
        form = {"type": "json_schema", "json_schema": schema}
        client.chat.completions.create(**ask, messages=turns, response_format=form)
        raise AssertionError("a schema that is not supported was accepted")
    except openai.BadRequestError as error:
        assert error.param == "response_format.json_schema.schema.uniqueItems", error


def check_embeddings(client, model):
    """Compares with sentence-transformers. The client asks for base64 unless told otherwise."""
    cases = json.loads((EMBEDDING / "expected.json").read_text())
    for column, options in {"last": {}, "short": {"dimensions": 12}}.items():
        for key in ["text", "tokens"]:
            inputs = [case[key] for case in cases]
            for more in [{}, {"encoding_format": "float"}]:
                reply = client.embeddings.create(model=model, input=inputs, **options, **more)
                assert [entry.index for entry in reply.data] == list(range(len(cases)))
                assert reply.usage.prompt_tokens == sum(len(case["tokens"]) for case in cases)
                for entry, case in zip(reply.data, cases, strict=True):
                    differences = map(lambda a, b: abs(a - b), entry.embedding, case[column])
                    assert len(entry.embedding) == len(case[column]) and max(differences) < 2e-6
    one = client.embeddings.create(model=model, input=cases[1]["text"])
    assert len(one.data) == 1 and len(one.data[0].embedding) == 32
    for wrong, param in [("", "input"), (["a", ""], "input[1]"), (["x" * 300], "input[0]")]:
        try:
            client.embeddings.create(model=model, input=wrong)
        except openai.BadRequestError as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"{wrong} was accepted")


def picture(width, height, color):
    """A PNG file of one color as a data URL."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(color) * width) * height)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def check_images(client, model):
    red, blue = picture(40, 30, (200, 0, 0)), picture(40, 30, (0, 0, 200))

    def ask(question, *urls):
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
        content = [*parts, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=model, messages=messages, max_completion_tokens=4, temperature=0)

    first, second = ask("What is this?", red), ask("What color has it?", red)
    image_tokens = first.usage.prompt_tokens_details.image_tokens
    assert 0 < image_tokens < first.usage.prompt_tokens, first.usage
    assert first.usage.prompt_tokens_details.cached_tokens == 0, first.usage
    assert second.usage.prompt_tokens_details.cached_tokens > image_tokens, second.usage
    other = ask("What is this?", blue)
    assert other.usage.prompt_tokens_details.cached_tokens < image_tokens, other.usage
    assert ask("What is this?", red).choices == first.choices, "the cache changed the answer"
    both = ask("What differs?", red, blue)
    assert both.usage.prompt_tokens_details.image_tokens == 2 * image_tokens, both.usage
    parts = [{"type": "input_image", "image_url": red, "detail": "auto"}, {"type": "input_text", "text": "What is this?"}]
    response = client.responses.create(
        model=model, input=[{"role": "user", "content": parts}], max_output_tokens=4, temperature=0
    )
    assert response.usage.input_tokens == first.usage.prompt_tokens, response.usage
    for url, expected in [
        ("https://example.com/a.png", "data URL"),
        (red[:60], "image 1"),
        ("data:image/png;base64,QUJD", "image 1"),
    ]:
        try:
            ask("What is this?", url)
        except openai.BadRequestError as error:
            assert expected in str(error), error
        else:
            raise AssertionError(f"{url} was accepted")


def check_no_images(client, model):
    content = [{"type": "image_url", "image_url": {"url": picture(2, 2, (0, 0, 0))}}]
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}])
    except openai.BadRequestError as error:
        assert "text only" in str(error), error
    else:
        raise AssertionError("an image was accepted by a model that takes text only")


def check_server(binary, arguments, checks):
    process, address = start(binary, arguments)
    try:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        model = check_models(client)
        for check in checks:
            check(client, model)
    finally:
        process.terminate()
        process.wait(timeout=60)


def main():
    checks = [check_completions, check_chat, check_errors, check_cancel, check_no_images]
    check_server(sys.argv[1], [], checks)
    check_server(sys.argv[1], ["--model", "random:smolvlm-tiny"], [check_images])
    check_server(sys.argv[1], ["--model", SCRIPTED], [check_tools, check_responses])
    # This model would reason without end if the grammar does not permit the text of its script.
    plain = ["--model", SCRIPTED, "--reasoning-parser", "none"]
    check_server(sys.argv[1], plain, [check_structured])
    embedding = ["--model", str(EMBEDDING), "--embedding-sizes", "any"]
    check_server(sys.argv[1], embedding, [check_embeddings])
    print(f"openai {openai.__version__}: all checks passed")


if __name__ == "__main__":
    main()
