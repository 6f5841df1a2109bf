"""Streams: for threads and for event loops, and how they are canceled."""

from __future__ import annotations

import asyncio
import gc

import pytest
import stolon
from conftest import GOAT, TENT, wait_until
from stolon.errors import InvalidValueError

LONG = {"ignore_eos": True, "max_tokens": 100_000}


def running(engine: stolon.Engine) -> int:
    stats = engine.stats()
    return int(stats["running"] + stats["waiting"])


def test_a_stream_is_the_answer_in_pieces(engine: stolon.Engine) -> None:
    whole = engine.chat(TENT, max_tokens=16, logprobs=0)
    stream = engine.stream(TENT, max_tokens=16, logprobs=0)
    assert stream.completion is None
    tokens = list(stream)
    assert "".join(token.text for token in tokens) == whole.text
    assert [token.id for token in tokens if token.id is not None] == whole.token_ids
    assert [token.logprob for token in tokens if token.logprob] == whole.logprobs
    assert stream.completion is not None
    assert stream.completion.text == whole.text
    assert stream.completion.usage.cached_tokens > 0
    assert list(stream) == []


def test_stop_strings_before_min_tokens_are_text(engine: stolon.Engine) -> None:
    # With functions to call, an answer is taken apart.
    options = {"tools": [{"type": "function", "function": {"name": "price"}}], "max_tokens": 16}
    free = engine.chat(TENT, **options).text
    word = free.split()[0]
    options |= {"stop": [word], "min_tokens": 12}
    whole = engine.chat(TENT, **options)
    assert whole.text.startswith(word)
    assert "".join(token.text for token in engine.stream(TENT, **options)) == whole.text


def test_break_and_del_cancel(engine: stolon.Engine) -> None:
    for _ in engine.stream("The", **LONG):
        assert running(engine) == 1
        break
    wait_until(lambda: running(engine) == 0)
    stream = engine.stream("The", **LONG)
    next(stream)
    del stream
    gc.collect()
    wait_until(lambda: running(engine) == 0)
    with engine.stream("The", **LONG) as stream:
        next(stream)
    wait_until(lambda: running(engine) == 0)
    assert len(list(stream)) <= 17  # what was read before it was closed
    assert engine.stats()["canceled"] >= 3


def test_an_error_comes_with_the_first_token(engine: stolon.Engine) -> None:
    stream = engine.stream([999999999])
    with pytest.raises(InvalidValueError, match="token id 999999999"):
        next(stream)


def test_event_loops(engine: stolon.Engine) -> None:
    expected = [engine.chat(messages, max_tokens=16).text for messages in (TENT, GOAT)]

    async def answer(messages: list[dict[str, str]]) -> str:
        return "".join([token.text async for token in engine.stream(messages, max_tokens=16)])

    async def main() -> None:
        assert await asyncio.gather(answer(TENT), answer(GOAT)) == expected
        with pytest.raises(InvalidValueError, match="token id 999999999"):
            async for _ in engine.stream([999999999]):
                pass
        async for _ in engine.stream("The", **LONG):
            break
        # The event loop runs while a token is awaited.
        stream = engine.stream("The", **LONG)
        task = asyncio.create_task(anext(stream))
        while not task.done():
            await asyncio.sleep(0)
        stream.close()

    asyncio.run(main())
    wait_until(lambda: running(engine) == 0)


def test_a_canceled_wait_loses_no_token(engine: stolon.Engine) -> None:
    options = {"ignore_eos": True, "max_tokens": 40}
    expected = engine.generate("The", **options).token_ids

    async def main() -> list[int]:
        stream, ids, canceled = engine.stream("The", **options), [], 0
        while True:
            waiting = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0)
            waiting.cancel()
            try:
                token = await waiting
            except asyncio.CancelledError:
                canceled += 1
                token = await anext(stream, None)
            if token is None:
                assert canceled > 0
                return ids
            if token.id is not None:
                ids.append(token.id)

    assert asyncio.run(main()) == expected
