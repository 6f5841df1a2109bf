"""The results of an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "BlockCounts",
    "CacheEvent",
    "Completion",
    "Embedding",
    "Pin",
    "SessionInfo",
    "Timings",
    "Token",
    "TokenLogprob",
    "ToolCall",
    "Usage",
]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token, under the model's own distribution."""

    token_id: int
    logprob: float
    """Natural logarithm of the probability: at most 0."""
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """Ids and log-probabilities of the most likely tokens, as many as were requested."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer that is being generated."""

    text: str
    """The text that became final with this token. It may be empty."""
    reasoning: str
    """As ``text``, for the model's reasoning."""
    id: int | None
    """The token's id; ``None`` if only text is left that was withheld until now."""
    logprob: TokenLogprob | None
    """If it was requested."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model."""

    name: str
    arguments: str
    """JSON. It is the beginning of an object if the answer was cut off."""

    def parsed(self) -> dict[str, Any]:
        """The arguments as a ``dict``. Raises :class:`ValueError` if they were cut off."""
        arguments = json.loads(self.arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"arguments: expected a JSON object, got {self.arguments}")
        return arguments


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of tokens that a request used."""

    prompt_tokens: int
    cached_tokens: int
    """Number of the prompt's tokens that were read from the prefix cache."""
    image_tokens: int
    """Number of the prompt's tokens that are positions of images."""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations since the request was submitted, in seconds."""

    queue: float
    """Until it left the admission queue."""
    first_token: float
    total: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    """The text, without reasoning and calls of tools, up to the stop string if one ended it."""
    reasoning: str
    """The model's reasoning; empty if there is none, and for prompts that are not conversations."""
    tool_calls: list[ToolCall]
    token_ids: list[int]
    """The generated tokens, including an end-of-sequence token."""
    finish_reason: Literal["stop", "length", "repetition"]
    stop: str | int | None
    """The stop string or the stop id that ended the answer."""
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprob]
    """One entry per token if they were requested, else empty."""
    prompt_logprobs: list[TokenLogprob | None]
    """One entry per token of the prompt, the first ``None``, if they were requested, else empty."""

    def json(self) -> Any:
        """The text, read as JSON. Raises :class:`ValueError` if it is not, or was cut off."""
        if self.finish_reason == "length":
            raise ValueError(
                f"expected JSON, got an answer that was cut off after "
                f"{self.usage.completion_tokens} tokens: {self.text!r}"
            )
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of a text."""

    values: list[float]
    prompt_tokens: int
    cached_tokens: int
    """Number of the prompt's tokens that were read from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document and its score for a query."""

    index: int
    """Index of the document."""
    score: float
    """How well it answers the query; more is better."""
    prompt_tokens: int
    """Number of tokens of the query and the document together."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that is protected from eviction."""

    id: int
    tokens: int
    """Number of pinned tokens: whole blocks."""
    blocks: int
    demoted: bool
    """Whether it is on the disk only, because running requests needed its blocks."""
    ends_in: float | None
    """Seconds until it ends; ``None`` if it lasts until it is unpinned."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as it was when it was asked for. Times are in seconds."""

    id: str
    tokens: int
    """Number of tokens of the conversation."""
    held_tokens: int
    """Number of them that the session keeps from being evicted, from the first one on."""
    held_blocks: int
    turns: int
    """Number of complete turns."""
    prompt_tokens: int
    """Number of prompt tokens of these turns."""
    cached_tokens: int
    """Number of them that were found in the cache."""
    ttl: float
    """Time without a turn after which the session is closed."""
    age: float
    idle: float | None
    """Time since the last turn; ``None`` during a turn."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The blocks of a :class:`stolon.PrefixCache` by state."""

    free: int
    reserved: int
    """Blocks that belong to leases alone."""
    cached: int
    evictable: int
    """Cached blocks that no lease or pin holds."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A change of a :class:`stolon.PrefixCache`. Numbers have no gaps."""

    number: int
    kind: Literal["stored", "removed", "cleared", "reset"]
    """``reset``: the reader was too slow, and ``missed`` events are lost."""
    hashes: list[int]
    """The chained hash of each block."""
    tokens: list[int]
    """The tokens of stored blocks."""
    parent: int | None
    """The hash of the block before the first stored one; ``None`` at the start of a sequence."""
    missed: int


def logprob_of(row: Mapping[str, Any] | None) -> TokenLogprob | None:
    """The class for the ``dict`` of the native module."""
    return None if row is None else TokenLogprob(**row)


def token_of(row: Mapping[str, Any]) -> Token:
    """The class for the ``dict`` of the native module."""
    return Token(row["text"], row["reasoning"], row["id"], logprob_of(row["logprob"]))


def completion_of(row: dict[str, Any]) -> Completion:
    """The class for the ``dict`` of the native module."""
    row["tool_calls"] = [ToolCall(**call) for call in row["tool_calls"]]
    row["usage"] = Usage(**row["usage"])
    row["timings"] = Timings(**row["timings"])
    row["logprobs"] = [TokenLogprob(**entry) for entry in row["logprobs"]]
    row["prompt_logprobs"] = [logprob_of(entry) for entry in row["prompt_logprobs"]]
    return Completion(**row)
