"""The exceptions of the package.

All of them are a :class:`StolonError`. Wrong arguments of a function, such as an option that does
not exist, are a :class:`TypeError` as everywhere in Python.
"""

from __future__ import annotations

__all__ = [
    "CacheFullError",
    "DeadlineError",
    "EngineStoppedError",
    "ForkedProcessError",
    "InvalidValueError",
    "ModelLoadError",
    "NotSupportedError",
    "OverloadedError",
    "RequestFailedError",
    "StolonError",
]


class StolonError(Exception):
    """Any error of the engine."""

    retry_after: float | None
    """Seconds after which the same request may succeed; ``None`` if that is not to be expected."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InvalidValueError(StolonError, ValueError):
    """A setting or a request has an impossible value. The message says what was expected."""


class NotSupportedError(StolonError):
    """The model cannot do that: make embeddings or generate text, for example."""


class ModelLoadError(StolonError):
    """The model could not be loaded, or the engine could not be started."""


class OverloadedError(StolonError):
    """The engine has too much to do now. ``retry_after`` says when to try again."""


class DeadlineError(StolonError, TimeoutError):
    """The request took longer than its ``timeout``, or waited longer than its ``queue_timeout``."""


class RequestFailedError(StolonError):
    """The engine could not complete the request."""


class EngineStoppedError(StolonError):
    """The engine was closed, or has stopped after failures."""


class ForkedProcessError(EngineStoppedError):
    """The object was made by another process, from which this one was forked."""


class CacheFullError(StolonError):
    """A :class:`stolon.PrefixCache` has too few free blocks that can be evicted."""
