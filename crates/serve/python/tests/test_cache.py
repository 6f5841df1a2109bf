"""The prefix cache and the sessions of a running engine."""

from __future__ import annotations

import pytest
import stolon
from conftest import GOAT, TENT
from stolon.errors import InvalidValueError

TEXT = "The violet tent costs 45 crowns. The speckled goat belongs to Ottilie. " * 4


def test_warm_pin_and_evict(engine: stolon.Engine) -> None:
    with pytest.raises(InvalidValueError, match="pin"):
        engine.cache.pin(TEXT)
    length = engine.cache.warm(TEXT)
    assert length == len(engine.prompt_tokens(TEXT))
    cached = engine.cache.query_match_len(TEXT)
    assert 0 < cached <= length
    pin = engine.cache.pin(TEXT, ttl=60.0)
    (found,) = engine.cache.pins()
    assert (found.id, found.tokens) == (pin, cached)
    assert found.ends_in is not None and 0 < found.ends_in <= 60
    assert engine.cache.evict_prefix(TEXT) == 0
    assert engine.cache.unpin(pin) and not engine.cache.unpin(pin)
    assert engine.cache.evict_prefix(TEXT) > 0
    assert engine.cache.query_match_len(TEXT) == 0
    assert engine.cache.stats()["blocks_pinned"] == 0


def test_salts_share_nothing(engine: stolon.Engine) -> None:
    engine.cache.warm(TEXT, cache_salt="ada")
    assert engine.cache.query_match_len(TEXT) == 0
    assert engine.cache.query_match_len(TEXT, cache_salt="ada") > 0


def test_a_miss_is_explained(engine: stolon.Engine) -> None:
    engine.chat(TENT, max_tokens=8)
    other = [{**TENT[0], "content": "Now: " + TENT[0]["content"]}, TENT[1]]
    miss = engine.cache.explain(other)
    assert miss is not None
    assert miss["reason"] == "message_changed"
    assert miss["message"]["index"] == 0
    assert miss["lost_tokens"] > 0


def test_sessions_fork_and_rewind(engine: stolon.Engine) -> None:
    with engine.sessions.open(ttl=60.0) as session:
        first = engine.generate(TEXT, session=session, max_tokens=8, ignore_eos=True)
        tokens = session.info().tokens
        assert tokens == first.usage.prompt_tokens + 8
        fork = session.fork("branch")
        assert fork.id == "branch"
        options = {"append": True, "max_tokens": 4, "ignore_eos": True}
        second = engine.generate(" The goat", session=session, **options)
        assert second.usage.prompt_tokens > tokens
        assert second.usage.cached_tokens > 0
        # The branch gives the same answer, and so does the session when it was taken back.
        assert engine.generate(" The goat", session=fork, **options).text == second.text
        assert session.rewind(tokens).tokens == tokens
        assert engine.generate(" The goat", session=session.id, **options).text == second.text
        assert {info.id for info in engine.sessions.list()} == {session.id, "branch"}
        assert fork.close() and not fork.close()
        with pytest.raises(InvalidValueError, match="expected an id that is not in use"):
            engine.sessions.open(session.id)
    with pytest.raises(InvalidValueError, match="expected an open session"):
        session.info()


def test_an_answer_does_not_depend_on_the_cache() -> None:
    prompts = [TEXT[: 40 * n] for n in range(1, 7)]
    options = {"max_tokens": 12, "ignore_eos": True, "logprobs": 1}
    with stolon.Engine("demo", kv_memory=64 << 20) as cached:
        with stolon.Engine("demo", kv_memory=64 << 20, prefix_caching=False) as plain:
            for prompt in prompts:
                one, other = (e.generate(prompt, **options) for e in (cached, plain))
                assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
                assert other.usage.cached_tokens == 0
        assert one.usage.cached_tokens > 0
        assert cached.chat(GOAT, max_tokens=8).text
