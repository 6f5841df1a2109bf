"""Stolon: an LLM inference engine with a shared prefix cache that programs can query.

>>> import stolon
>>> with stolon.Engine("demo") as engine:
...     answer = engine.chat([{"role": "user", "content": "Hello"}], max_tokens=16)
"""

from . import errors
from ._engine import Cache, Engine, Session, Sessions, Stream
from ._options import EngineOptions, RequestOptions
from ._prefix_cache import CacheEvents, Lease, PrefixCache
from ._types import (
    BlockCounts,
    CacheEvent,
    Completion,
    Embedding,
    Pin,
    Ranked,
    SessionInfo,
    Timings,
    Token,
    TokenLogprob,
    ToolCall,
    Usage,
)

__all__ = [
    "BlockCounts",
    "Cache",
    "CacheEvent",
    "CacheEvents",
    "Completion",
    "Embedding",
    "Engine",
    "EngineOptions",
    "Lease",
    "Pin",
    "PrefixCache",
    "Ranked",
    "RequestOptions",
    "Session",
    "SessionInfo",
    "Sessions",
    "Stream",
    "Timings",
    "Token",
    "TokenLogprob",
    "ToolCall",
    "Usage",
    "errors",
]
