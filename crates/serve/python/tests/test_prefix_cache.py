"""The prefix cache alone: against a slow and obvious one, on threads, and in the example."""

from __future__ import annotations

import random
import runpy
import sys
import threading
from array import array
from pathlib import Path

import pytest
import stolon
from stolon.errors import CacheFullError, InvalidValueError

EXAMPLE = Path(__file__).parent.parent / "examples" / "toy_transformer.py"


def put(cache: stolon.PrefixCache, tokens: list[int], salt: str | None = None) -> None:
    with cache.acquire(tokens, salt=salt) as lease:
        cache.insert(lease)


def test_the_life_of_a_request() -> None:
    cache = stolon.PrefixCache(4, 8)
    assert (cache.block_size, cache.num_blocks) == (4, 8)
    lease = cache.acquire(range(10))
    assert (lease.cached_len, len(lease), len(lease.blocks)) == (0, 10, 3)
    assert cache.match(range(10)) == 0
    assert cache.insert(lease, 7) == 1
    assert (lease.cached_len, cache.match(range(10))) == (4, 4)
    lease.grow([10, 11, 12])
    assert (len(lease), len(lease.blocks)) == (13, 4)
    assert cache.insert(lease) == 2
    assert cache.counts() == stolon.BlockCounts(free=4, reserved=1, cached=3, evictable=0)
    other = cache.acquire(range(8))
    assert other.cached_len == 8 and other.blocks == lease.blocks[:2]
    assert cache.evict(8) == []
    lease.release()
    other.release()
    lease.release()
    assert len(cache.evict(1)) == 1
    assert cache.match(range(12)) == 8
    assert len(cache.flush()) == 2
    cache.audit()
    assert cache.counts().free == 8
    with pytest.raises(InvalidValueError, match="got a released one"):
        len(lease)


def test_blocks_run_out_and_old_ones_are_evicted() -> None:
    cache = stolon.PrefixCache(4, 4)
    put(cache, list(range(8)))
    put(cache, list(range(100, 108)))
    assert cache.match(range(8)) == 8
    with cache.acquire(range(200, 208)):
        assert cache.match(range(8)) == 0  # the least recently used went first
        assert cache.match(range(100, 108)) == 8
        with pytest.raises(CacheFullError, match="expected 3 free blocks"):
            cache.acquire(range(300, 312))
    cache.audit()


@pytest.mark.parametrize("kind", ["list", "tuple", "u32", "i64", "numpy"])
def test_tokens_are_lists_or_arrays(kind: str) -> None:
    tokens = list(range(1, 9))
    if kind == "numpy":
        numpy = pytest.importorskip("numpy")
        given = numpy.array(tokens)
        assert stolon.PrefixCache(4, 4).match(given[::2].astype(numpy.int32)) == 0
    else:
        given = {"list": tokens, "tuple": tuple(tokens), "u32": array("I", tokens),
                 "i64": array("q", tokens)}[kind]
    cache = stolon.PrefixCache(4, 4)
    put(cache, given)
    assert cache.match(given) == cache.match(tokens) == 8
    assert cache.match_many([given, [1, 2, 3, 4, 9], []]) == [8, 4, 0]


@pytest.mark.parametrize("tokens", [[-1], array("q", [-1]), [2**32], ["a"], 5, "text"])
def test_what_is_no_token_is_refused(tokens: object) -> None:
    with pytest.raises((TypeError, OverflowError, InvalidValueError)):
        stolon.PrefixCache(4, 4).match(tokens)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="expected a power of two from 1 to 256, got 3"):
        stolon.PrefixCache(3, 4)
    with pytest.raises(InvalidValueError, match="expected one of lru"):
        stolon.PrefixCache(4, 4, eviction_policy="oldest")
    with pytest.raises(InvalidValueError, match="got 0"):
        stolon.PrefixCache(4, 4).events(0)
    cache = stolon.PrefixCache(4, 4)
    with cache.acquire([1]) as lease, pytest.raises(InvalidValueError, match="got 2"):
        cache.insert(lease, 2)


def test_salts_pins_and_events() -> None:
    cache = stolon.PrefixCache(4, 16, pin_budget=4)
    events = cache.events()
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8], salt="ada")
    assert cache.match([1, 2, 3, 4]) == 0
    assert cache.match([1, 2, 3, 4], salt="ada") == 4
    pin = cache.pin([1, 2, 3, 4], salt="ada")
    assert len(cache.evict(16)) == 1
    assert cache.unpin(pin) and not cache.unpin(pin)
    assert len(cache.evict(16)) == 1
    stored, *removed = events.drain()
    assert (stored.kind, stored.parent) == ("stored", None)
    assert stored.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert stored.hashes == cache.block_hashes(stored.tokens, salt="ada")
    assert [event.hashes for event in removed] == [[stored.hashes[1]], [stored.hashes[0]]]
    assert [event.number for event in (stored, *removed)] == [1, 2, 3]
    assert events.drain() == []
    small = cache.events(1)
    for first in (10, 20, 30):
        put(cache, [first, 1, 2, 3])
    assert small.drain()[0].kind == "reset"


def test_random_operations_against_a_slow_index() -> None:
    """The cache finds exactly what a set of all inserted prefixes has, while nothing is evicted;
    and a copy that is kept from the events has the same blocks after evictions."""
    choose = random.Random(5)
    cache, known, copy = stolon.PrefixCache(2, 4096), {()}, set()
    events = cache.events()
    for step in range(600):
        tokens = [choose.randrange(3) for _ in range(choose.randrange(14))]
        expected = max(n for n in range(0, len(tokens) + 1, 2) if tuple(tokens[:n]) in known)
        assert cache.match(tokens) == expected
        if choose.random() < 0.5:
            put(cache, tokens)
            known |= {tuple(tokens[:n]) for n in range(0, len(tokens) + 1, 2)}
    cache.evict(100)
    for event in events.drain():
        copy = copy | set(event.hashes) if event.kind == "stored" else copy - set(event.hashes)
    assert len(copy) == cache.counts().cached > 0
    for prefix in known:
        assert (cache.match(list(prefix)) == len(prefix)) == (
            not prefix or cache.block_hashes(list(prefix))[-1] in copy
        )
    cache.audit()


def test_lookups_on_threads_while_the_cache_changes() -> None:
    cache, stop, wrong = stolon.PrefixCache(4, 64), threading.Event(), []
    fixed = list(range(1000, 1032))
    lease = cache.acquire(fixed)
    cache.insert(lease)

    def look() -> None:
        while not stop.is_set():
            if cache.match(fixed) != 32:
                wrong.append(1)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for n in range(2000):
        put(cache, list(range(n, n + 16)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    lease.release()
    cache.audit()


def test_the_toy_transformer_shares_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "positions computed without a cache" in capsys.readouterr().out
    assert "numpy" in sys.modules
