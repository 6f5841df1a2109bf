"""The engine, its streams, its prefix cache and its sessions."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, Unpack, overload

from . import _native
from ._options import (
    EngineOptions,
    Message,
    Prompt,
    RequestOptions,
    check_names,
    request_of,
    to_json,
)
from ._types import (
    Completion,
    Embedding,
    Pin,
    Ranked,
    SessionInfo,
    Token,
    completion_of,
    token_of,
)

__all__ = ["Cache", "Engine", "Session", "Sessions", "Stream"]

_Texts = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
"""Several prompts. A string is a sequence of strings, too, so `Sequence[str]` is not among them."""


class _OfOneProcess:
    """An object that cannot be sent to another process."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy a stolon.{type(self).__name__}: its threads and memory belong "
            "to this process. Make an engine in each process"
        )


class Engine(_OfOneProcess):
    """A running engine.

    ``model`` is the folder of a Hugging Face model, a ``.gguf`` file, a hub id such as
    ``Qwen/Qwen3-0.6B``, or ``demo``, a small built-in model.

    All methods may be called from any thread, and release the interpreter's lock while they wait.
    Requests of several threads are batched. Ctrl-C ends a call, and cancels its requests.

    An engine belongs to the process that made it. In a forked process, every call raises
    :class:`stolon.errors.ForkedProcessError`.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        check_names("Engine", options, EngineOptions.__annotations__)
        given = {name: value for name, value in options.items() if value is not None}
        self._native = _native.Engine(os.fspath(model), to_json(given))
        self.cache = Cache(self._native.cache())
        self.sessions = Sessions(self._native.sessions())

    # ---- answers ----

    @overload
    def generate(
        self, prompts: str, *, progress: bool = ..., **options: Unpack[RequestOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: _Texts,
        *,
        progress: bool = ...,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Any, *, progress: bool = False, **options: Unpack[RequestOptions]
    ) -> Completion | list[Completion]:
        """Continues a text, or each prompt of a list: texts, or lists of token ids.

        The engine gets all prompts at once and computes what they share once. The answers are in
        the order of the prompts. If a request fails, the others are canceled, and the message of
        the error has its index. ``progress`` shows a bar, if ``tqdm`` is installed.
        """
        if isinstance(prompts, str):
            return self._complete("generate", [prompts], options, progress)[0]
        _check_list("prompts", prompts, "strings, or of lists of token ids")
        return self._complete("generate", prompts, options, progress)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        progress: bool = ...,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        *,
        progress: bool = ...,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...
    def chat(
        self, messages: Any, *, progress: bool = False, **options: Unpack[RequestOptions]
    ) -> Completion | list[Completion]:
        """Answers a conversation, or each conversation of a list, as :meth:`generate`.

        Reasoning and calls of tools are taken out of the text. Tools are described to a model
        whose chat template has none.
        """
        _check_list("messages", messages, "messages, or of conversations")
        if messages and hasattr(messages[0], "keys"):
            return self._complete("chat", [messages], options, progress)[0]
        for index, conversation in enumerate(messages):
            _check_list(f"messages[{index}]", conversation, "messages")
        return self._complete("chat", messages, options, progress)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """Begins to answer a text, token ids or a conversation, and returns its tokens as they
        arrive, for ``for`` and for ``async for``. Returns at once."""
        request, images = request_of("stream", prompt, options)
        return Stream(self._native.stream(to_json(request), images))

    def _complete(
        self, function: str, prompts: Sequence[Any], options: Any, progress: bool
    ) -> list[Completion]:
        requests, images = [], []
        for index, prompt in enumerate(prompts):
            request, files = request_of(function, prompt, options)
            requests.append(request)
            images += [(index, file) for file in files]
        with _Progress(len(requests), progress) as bar:
            rows = self._native.complete(to_json(requests), images, bar.update)
        return [completion_of(row) for row in rows]

    # ---- embeddings, scores and tokens ----

    @overload
    def embed(
        self, texts: str, *, dimensions: int | None = ..., task: str | None = ...
    ) -> Embedding: ...
    @overload
    def embed(
        self, texts: _Texts, *, dimensions: int | None = ..., task: str | None = ...
    ) -> list[Embedding]: ...
    def embed(
        self, texts: Any, *, dimensions: int | None = None, task: str | None = None
    ) -> Embedding | list[Embedding]:
        """The embedding of a text, or of each one of a list. ``dimensions`` shortens it, if the
        model's embeddings can be shortened. ``task`` names the task whose matrices compute it, if
        the model has matrices for tasks."""
        one = isinstance(texts, str)
        if not one:
            _check_list("texts", texts, "strings, or of lists of token ids")
        requests = [request_of("embed", text, {})[0] for text in ([texts] if one else texts)]
        rows = self._native.embed(to_json(requests), dimensions, task)
        embeddings = [Embedding(*row) for row in rows]
        return embeddings[0] if one else embeddings

    def rerank(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> list[Ranked]:
        """Scores documents for a query, and returns them with the best one first. Documents that
        are too long are cut. ``instruction`` is the task by which a language model judges."""
        _check_list("documents", documents, "strings")
        rows = self._native.rerank(query, list(documents), instruction)
        return [Ranked(*row) for row in rows]

    @overload
    def classify(
        self, prompts: str | Sequence[Message], labels: Sequence[str] | None = ...
    ) -> dict[str, float]: ...
    @overload
    def classify(
        self, prompts: _Texts | Sequence[Sequence[Message]], labels: Sequence[str] | None = ...
    ) -> list[dict[str, float]]: ...
    def classify(
        self, prompts: Any, labels: Sequence[str] | None = None
    ) -> dict[str, float] | list[dict[str, float]]:
        """The probability of each label for a text or a conversation, or for each one of a list.

        With ``labels``, that of each answer of a language model, divided by the sum of all; each
        label begins as the model's answer does. Without, those of a model for classification.
        """
        if labels is not None:
            _check_list("labels", labels, "strings")
        one = isinstance(prompts, str)
        if not one:
            _check_list("prompts", prompts, "texts, of messages, or of conversations")
            one = bool(prompts) and hasattr(prompts[0], "keys")
        requests = [request_of("classify", text, {})[0] for text in ([prompts] if one else prompts)]
        rows = self._native.classify(to_json(requests), None if labels is None else list(labels))
        found = [dict(row) for row in rows]
        return found[0] if one else found

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """The token ids of a text, with the special tokens that begin a prompt."""
        return self._native.tokenize(text, add_special)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids."""
        return self._native.detokenize(list(ids), skip_special)

    def prompt_tokens(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> list[int]:
        """The token ids of a prompt as the engine computes it, with its chat template."""
        request, _ = request_of("prompt_tokens", prompt, options)
        return self._native.prompt_tokens(to_json(request))

    # ---- the engine ----

    @property
    def model_info(self) -> dict[str, Any]:
        """The model and its sizes: ``id``, ``vocab_size``, ``max_positions``, ``block_size``.."""
        return _object(self._native.model_info())

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and gauges of this moment."""
        return _object(self._native.stats())

    def close(self, *, drain: float = 0.0) -> bool:
        """Stops the engine and releases its memory. Requests in flight may take ``drain`` seconds
        to end before that. Returns whether all had ended. May be called again.

        An engine that is not closed ends with the process, and KV that is on its way to
        ``kv_cache_dir`` may be lost."""
        return self._native.close(drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Stream(_OfOneProcess):
    """The tokens of one answer, for ``for`` or ``async for``: :meth:`Engine.stream`.

    The request is canceled by :meth:`close`, by the end of a ``with`` block, and when the stream
    is deleted: after ``break`` in a loop over ``engine.stream(..)`` at once, because nothing else
    refers to it. A stream that is not read pauses its request.
    """

    completion: Completion | None
    """The whole answer, after the last token."""

    def __init__(self, native: _native.Stream) -> None:
        self._native = native
        self._pending: asyncio.Future[dict[str, Any] | None] | None = None
        self.completion = None

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        if (token := self._take(self._native.next())) is None:
            raise StopIteration
        return token

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        if self._pending is None:
            self._pending = self._next_async()
        # If the caller is canceled, the next call gets this item.
        row = await asyncio.shield(self._pending)
        self._pending = None
        if (token := self._take(row)) is None:
            raise StopAsyncIteration
        return token

    def _next_async(self) -> asyncio.Future[dict[str, Any] | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, Any] | None] = loop.create_future()

        def settle(row: dict[str, Any] | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(row)

        self._native.next_async(
            lambda row, error: loop.call_soon_threadsafe(settle, row, error)
        )
        return future

    def _take(self, row: dict[str, Any] | None) -> Token | None:
        if row is not None and "finish_reason" in row:
            self.completion = completion_of(row)
            return None
        return None if row is None else token_of(row)

    def close(self) -> None:
        """Cancels the request, if it has not ended."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Cache(_OfOneProcess):
    """The prefix cache of an engine: ``engine.cache``. Prompts are as for :meth:`Engine.stream`."""

    def __init__(self, native: _native.Cache) -> None:
        self._native = native

    def query_match_len(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> int:
        """The number of the prompt's tokens that are cached now: a hint of what a request would
        not compute. Lock-free, and without a side effect on the cache."""
        return self._native.query_match_len(_json("query_match_len", prompt, options))

    def explain(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> dict[str, Any] | None:
        """Why a part of the prompt is not cached: ``reason``, the lost tokens, and where it goes
        another way than the nearest earlier request. ``None`` if all is cached that can be."""
        miss = self._native.explain(_json("explain", prompt, options))
        return None if miss is None else _object(miss)

    def warm(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> int:
        """Computes a prompt, so that later requests find it. Returns its length in tokens."""
        return self._native.warm(_json("warm", prompt, options))

    def pin(
        self, prompt: Prompt, *, ttl: float | None = None, **options: Unpack[RequestOptions]
    ) -> int:
        """Protects the cached prefix of the prompt from eviction, for ``ttl`` seconds or until
        :meth:`unpin`. Returns the number of the pin. :meth:`warm` computes the prefix first."""
        return self._native.pin(_json("pin", prompt, options), ttl)

    def unpin(self, pin: int) -> bool:
        """Ends a pin. Returns whether it existed."""
        return self._native.unpin(pin)

    def pins(self) -> list[Pin]:
        """All pins, the oldest first."""
        return [Pin(*row) for row in self._native.pins()]

    def evict_prefix(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> int:
        """Removes what is cached of sequences that start with the prompt. Returns the number of
        freed blocks."""
        return self._native.evict_prefix(_json("evict_prefix", prompt, options))

    def flush(self) -> None:
        """Empties the cache, except for what running requests use."""
        self._native.flush()

    def stats(self) -> dict[str, Any]:
        """Statistics of the cache."""
        return _object(self._native.stats())


class Sessions(_OfOneProcess):
    """The sessions of an engine: ``engine.sessions``."""

    def __init__(self, native: _native.Sessions) -> None:
        self._native = native

    def open(
        self,
        name: str | None = None,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
        ttl: float | None = None,
    ) -> Session:
        """Opens a session, whose name must not be in use. Default: a random name."""
        return Session(self._native, self._native.open(name, cache_salt, adapter, ttl)["id"])

    def list(self) -> list[SessionInfo]:
        """All open sessions, the one that has been idle longest first."""
        return [SessionInfo(**row) for row in self._native.list()]


class Session(_OfOneProcess):
    """A conversation whose prefix stays cached between its turns.

    Requests become its turns with ``session=``; with ``append=True``, their prompt continues the
    tokens of the session.
    """

    id: str

    def __init__(self, native: _native.Sessions, name: str) -> None:
        self._native = native
        self.id = name

    def __repr__(self) -> str:
        return f"Session(id={self.id!r})"

    def info(self) -> SessionInfo:
        """The session as it is now."""
        return SessionInfo(**self._native.info(self.id))

    def fork(self, name: str | None = None, *, tokens: int | None = None) -> Session:
        """Opens a session that continues after this one, or after its first ``tokens`` tokens."""
        return Session(self._native, self._native.fork(self.id, name, tokens)["id"])

    def rewind(self, tokens: int) -> SessionInfo:
        """Takes the session back to its first ``tokens`` tokens."""
        return SessionInfo(**self._native.rewind(self.id, tokens))

    def close(self) -> bool:
        """Closes the session. Returns whether it was open."""
        return self._native.close(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Progress:
    """A bar of ``tqdm``, if it is wanted and installed."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._bar: Any = None
        if wanted:
            try:
                tqdm: Any = importlib.import_module("tqdm")
            except ImportError:
                return
            self._bar = tqdm.tqdm(total=total, unit="prompt")

    @property
    def update(self) -> Any:
        """The function that is told the number of finished requests; ``None`` without a bar."""
        return None if self._bar is None else self._show

    def _show(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _check_list(name: str, value: Any, of: str) -> None:
    """Raises :class:`TypeError` for what is not a list or another sequence of objects."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name}: expected a list of {of}, got a {type(value).__name__}")


def _json(function: str, prompt: Any, options: Any) -> str:
    """A request without images, for a function that looks at its prompt."""
    request, images = request_of(function, prompt, options)
    if images:
        raise TypeError(f"{function}() takes no images")
    return to_json(request)


def _object(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    return value
