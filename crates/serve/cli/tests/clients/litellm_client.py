"""LiteLLM: chat, streaming, tools, reasoning, errors, cached tokens. Needs STOLON_URL."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # It would fetch prices from the network.

import litellm

litellm.suppress_debug_info = True
ASK = {"model": "hosted_vllm/scripted", "api_base": os.environ["STOLON_URL"], "api_key": "none", "temperature": 0}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


def ask(text, **options):
    return litellm.completion(messages=[{"role": "user", "content": text}], num_retries=0, **{**ASK, **options})


def refused(kind, **options):
    try:
        ask("hello", **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"{options} were not refused")


def main():
    whole = ask("Say something. script:plain")
    assert whole.choices[0].message.content == "Hello, world.", whole
    again = ask("Say something. script:plain")
    assert again.usage.prompt_tokens_details.cached_tokens > 0, again.usage
    pieces = list(ask("Say something. script:plain", stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == "Hello, world.", pieces
    usage = [piece.usage for piece in pieces if getattr(piece, "usage", None)]
    assert usage and usage[-1].completion_tokens == again.usage.completion_tokens, pieces

    question = "What is the weather? script:call"
    streamed = litellm.stream_chunk_builder(list(ask(question, tools=TOOLS, stream=True)))
    for reply in (ask(question, tools=TOOLS), streamed):
        (call,) = reply.choices[0].message.tool_calls
        assert reply.choices[0].finish_reason == "tool_calls", reply
        assert call.function.name == "get_weather", call
        assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}, call
    turns = [
        {"role": "user", "content": question},
        reply.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees. script:plain"},
    ]
    answer = litellm.completion(messages=turns, tools=TOOLS, **ASK)
    assert answer.choices[0].message.content == "Hello, world.", answer

    thought = ask("script:think")
    assert thought.choices[0].message.reasoning_content == "Let me think about it.", thought
    # Any name stands for the only model.
    named = ask("script:plain", model="hosted_vllm/another")
    assert named.choices[0].message.content == "Hello, world.", named
    assert "temperature" in refused(litellm.BadRequestError, temperature=-1)
    print("LiteLLM: all checks passed")


if __name__ == "__main__":
    main()
