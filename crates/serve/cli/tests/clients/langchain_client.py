"""LangChain: chat, streaming, tools, batches, errors, cached tokens. Needs STOLON_URL."""

import os

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{days} warm days in {city}. script:plain"


def model(**options):
    options = {"model": "scripted", "temperature": 0, "stream_usage": True, "max_retries": 0, **options}
    return ChatOpenAI(base_url=os.environ["STOLON_URL"], api_key="none", **options)


def main():
    chat = model()
    ask = [SystemMessage("You say little."), HumanMessage("Say something. script:plain")]
    whole = chat.invoke(ask)
    assert whole.content == "Hello, world.", whole
    again = chat.invoke(ask)
    assert again.usage_metadata["input_token_details"]["cache_read"] > 0, again.usage_metadata
    pieces = list(chat.stream(ask))
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    assert len(pieces) > 2 and streamed.content == "Hello, world.", pieces
    assert streamed.usage_metadata["output_tokens"] == again.usage_metadata["output_tokens"], streamed
    assert [reply.content for reply in chat.batch([ask] * 4)] == ["Hello, world."] * 4

    bound = chat.bind_tools([get_weather])
    turns = [HumanMessage("What is the weather? script:call")]
    calling = bound.invoke(turns)
    pieces = list(bound.stream(turns))
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    for reply in (calling, streamed):
        (call,) = reply.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris", "days": 2}), reply
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([*turns, calling, result]).content == "Hello, world."

    # Any name stands for the only model.
    assert model(model="another").invoke(ask).content == "Hello, world."
    print("LangChain: all checks passed")


if __name__ == "__main__":
    main()
