"""Tests `stolon serve` with OpenAI's Python client: python openai_client.py path/to/stolon

Needs the package `openai`. Uses the demo model and needs no network. Fails with an exception at the
first reply that differs from what OpenAI's API specifies.
"""

import subprocess
import sys

import openai

SYSTEM = "The keeper of the tower collects keys and never throws one away. " * 20


def start(binary):
    """Starts a server on a free port; returns the process and the address it prints."""
    command = [binary, "serve", "--port", "0", "--num-blocks", "1024"]
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
    error = refused(openai.NotFoundError, model="another", messages=hello)
    assert error.code == "model_not_found"
    error = refused(openai.BadRequestError, model=model, messages=hello, temperature=-1)
    assert error.param == "temperature"
    too_long = [{"role": "user", "content": "tower " * 50_000}]
    error = refused(openai.BadRequestError, model=model, messages=too_long)
    assert error.code == "context_length_exceeded"


def main():
    process, address = start(sys.argv[1])
    try:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        model = check_models(client)
        check_completions(client, model)
        check_chat(client, model)
        check_errors(client, model)
    finally:
        process.terminate()
        process.wait(timeout=60)
    print(f"openai {openai.__version__}: all checks passed")


if __name__ == "__main__":
    main()
