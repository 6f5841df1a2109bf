"""The prefix tree and its block pool alone, for engines of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from . import _native
from ._engine import _OfOneProcess
from ._types import BlockCounts, CacheEvent

__all__ = ["CacheEvents", "Lease", "PrefixCache"]

Tokens = Any
"""Token ids: an array of 32 or 64 bits, such as numpy's, or a list of integers."""


class PrefixCache(_OfOneProcess):
    """Remembers which blocks of an engine's KV memory hold which prefix of tokens, so that a prefix
    that several prompts share is computed once.

    The KV memory has ``num_blocks`` blocks of ``block_size`` positions, a power of two up to 256.
    The cache manages their ids only; the memory belongs to the engine. Life of a request:

    1. :meth:`acquire` locks the cached prefix of its prompt and reserves blocks for the rest.
       It evicts what it needs.
    2. The engine computes the KV of the positions from ``lease.cached_len`` on, into
       ``lease.blocks``: position ``p`` is the entry ``p % block_size`` of
       ``lease.blocks[p // block_size]``.
    3. :meth:`insert` puts the full blocks into the cache. Afterwards, ``lease.blocks`` may name
       other blocks with the same content, because another request was faster.
    4. :meth:`Lease.grow` appends generated tokens.
    5. :meth:`Lease.release`, or the end of a ``with`` block, unlocks the prefix and frees the rest.

    Methods may be called from any thread. Lookups take no lock, not even the interpreter's.
    Prompts with different salts share nothing.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        *,
        eviction_policy: str = "lru",
        pin_budget: int | None = None,
    ) -> None:
        self._native = _native.PrefixCache(block_size, num_blocks, eviction_policy, pin_budget)
        self.block_size = block_size
        self.num_blocks = num_blocks

    def match(self, tokens: Tokens, *, salt: str | None = None) -> int:
        """The number of leading tokens that are cached: a multiple of the block size. It has no
        effect on the cache, and is a hint until :meth:`acquire` has locked the prefix."""
        return self._native.match_len(tokens, salt)

    def match_many(self, prompts: Sequence[Tokens], *, salt: str | None = None) -> list[int]:
        """:meth:`match` of several prompts, with one release of the interpreter's lock."""
        return self._native.match_lens(prompts, salt)

    def acquire(self, tokens: Tokens, *, salt: str | None = None) -> Lease:
        """Locks the longest cached prefix and reserves blocks for the rest.

        An engine that needs the logits of the last token acquires the prompt without it, so that
        it is computed even if all is cached, and calls :meth:`Lease.grow`. Raises
        :class:`stolon.errors.CacheFullError` if too few blocks are free or can be evicted.
        """
        return Lease(self._native.acquire(tokens, salt))

    def insert(self, lease: Lease, written: int | None = None) -> int:
        """Puts the full blocks among the first ``written`` tokens of the lease, whose KV has been
        computed, into the cache. Default: all tokens. Returns by how many blocks the cached part
        of the lease has grown."""
        return lease._native.insert(written)

    def evict(self, count: int) -> list[int]:
        """Removes at most ``count`` cached blocks that nothing holds, in the order of the eviction
        policy. Returns their ids."""
        return self._native.evict(count)

    def flush(self) -> list[int]:
        """Removes all that nothing holds, and ends all pins. Returns the ids of freed blocks."""
        return self._native.flush()

    def pin(self, tokens: Tokens, *, salt: str | None = None) -> int:
        """Protects the cached prefix of the tokens from eviction, within ``pin_budget`` blocks.
        Returns the number of the pin."""
        return self._native.pin(tokens, salt)

    def unpin(self, pin: int) -> bool:
        """Ends a pin. Returns whether it existed."""
        return self._native.unpin(pin)

    def events(self, capacity: int = 65536) -> CacheEvents:
        """What enters and leaves the cache from now on, in a queue of ``capacity`` events, from
        which a router can keep a copy of the index. The cache never waits for the reader."""
        return CacheEvents(self._native.events(capacity))

    def block_hashes(self, tokens: Tokens, *, salt: str | None = None) -> list[int]:
        """The chained hash of each whole block of the tokens, as events have it."""
        return self._native.block_hashes(tokens, salt)

    def counts(self) -> BlockCounts:
        """The numbers of blocks by state."""
        return BlockCounts(**self._native.counts())

    def audit(self) -> None:
        """Recounts all blocks. Raises :class:`stolon.errors.StolonError` if the accounting is
        wrong, which is a bug."""
        self._native.audit()


class Lease(_OfOneProcess):
    """The blocks of one sequence: :meth:`PrefixCache.acquire`."""

    def __init__(self, native: _native.Lease) -> None:
        self._native = native

    @property
    def cached_len(self) -> int:
        """Number of leading tokens whose KV is cached. Their blocks must not be written to."""
        return self._native.cached_len()

    @property
    def blocks(self) -> list[int]:
        """The ids of the blocks of all tokens, in their order."""
        return self._native.blocks()

    def __len__(self) -> int:
        return self._native.len()

    def grow(self, tokens: Tokens) -> None:
        """Appends tokens, and reserves blocks for them as :meth:`PrefixCache.acquire` does."""
        self._native.grow(tokens)

    def release(self) -> None:
        """Unlocks the cached prefix and frees the other blocks. May be called again."""
        self._native.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class CacheEvents(_OfOneProcess):
    """The changes of a cache, in their order: :meth:`PrefixCache.events`."""

    def __init__(self, native: _native.CacheEvents) -> None:
        self._native = native

    def drain(self) -> list[CacheEvent]:
        """Takes all events that have happened since the last call."""
        return [CacheEvent(**row) for row in self._native.drain()]
