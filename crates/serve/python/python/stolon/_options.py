"""The options of engines and requests, and how they are handed to the native module."""

from __future__ import annotations

import difflib
import io
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Union

if TYPE_CHECKING:
    from ._engine import Session

__all__ = ["EngineOptions", "Image", "Message", "Prompt", "RequestOptions"]

Message = Mapping[str, Any]
"""A message of a conversation in the form of OpenAI's API: ``role``, ``content`` and so on."""

Prompt = Union[str, Sequence[int], Sequence[Message]]
"""A text, token ids, or a conversation."""

Image = Any
"""The content of an image file as ``bytes``, its path, a picture of Pillow, or an array of numpy with
the type ``uint8`` and the shape ``[height, width]``, ``[height, width, 3]`` or ``[.., 4]``."""


class EngineOptions(TypedDict, total=False):
    """The settings of :class:`stolon.Engine`. Sizes are in bytes and times in seconds.

    The documentation of ``stolon::EngineBuilder`` has the defaults and the limits.
    """

    adapters: Mapping[str, str | os.PathLike[str]]
    """LoRA adapters by name: folders with PEFT's files."""
    adapter_memory: int
    admission: Literal["fcfs", "longest-prefix", "cost"]
    bind_threads: bool
    block_size: int
    chat_template: str
    """Source of a Jinja template in place of the model's."""
    default_max_tokens: int
    draft_model: str
    """A smaller model with the same vocabulary, which guesses tokens of answers."""
    encoder_cache_bytes: int
    eviction_policy: str
    history_bytes: int
    kv_cache_bytes: int
    """Maximum size of ``kv_cache_dir``, which needs it."""
    kv_cache_dir: str | os.PathLike[str]
    """A directory for KV that leaves the memory, and that the next start finds."""
    kv_memory: int
    """Size of the KV pool."""
    kv_type: str
    """f32, bf16, f16, int8, k8v4 (keys in int8, values in int4) or int4."""
    logit_cache_bytes: int
    map_embeddings: bool
    """Whether embeddings are read from the model file row by row instead of being loaded."""
    max_batched_tokens: int
    max_positions: int
    max_queued_requests: int
    max_queued_tokens: int
    max_running: int
    max_sessions: int
    mmproj: str | os.PathLike[str]
    mtp: bool
    """Whether the model's own head for multi-token prediction guesses tokens."""
    namespace_quota: int
    normalize: bool
    """Whether embeddings are scaled to length 1, with ``pooling``. Default: true."""
    num_blocks: int
    pin_budget: int
    pooling: Literal["last", "mean"]
    """How embeddings are made, for a model whose files do not say it."""
    prefix_caching: bool
    rerank_template: str
    """The prompt of a reranker that answers with a token: a text with ``{query}`` and, after it,
    ``{document}``, and maybe ``{instruction}`` before both."""
    rerank_tokens: Sequence[str]
    """The answer of a language model that raises the score of a document, and the one that lowers
    it: ``["yes", "no"]`` for Qwen3-Reranker."""
    session_budget: int
    session_ttl: float
    step_timeout: float
    threads: int
    weights: str
    window_kv: str


class RequestOptions(TypedDict, total=False):
    """The options of a request. Times are in seconds.

    The documentation of ``stolon::Request`` and ``stolon::SamplingParams`` has the limits.
    """

    adapter: str
    append: bool
    """The prompt continues the tokens of the session."""
    cache_salt: str
    """Prefixes are shared only with requests of the same salt."""
    choice: Sequence[str]
    """The answer is one of these strings."""
    end_repetition: bool
    frequency_penalty: float
    gbnf: str
    """The answer follows this grammar of llama.cpp."""
    ignore_eos: bool
    images: Sequence[Image]
    json_object: bool
    """The answer is a JSON object."""
    json_schema: Any
    """The answer follows this JSON schema, a ``dict``, or the schema of a class of pydantic."""
    lark: str
    """The answer follows this grammar of Lark."""
    logit_bias: Mapping[int, float]
    logprobs: int
    """Log-probabilities of each token and of this number of the most likely ones."""
    max_tokens: int
    min_p: float
    min_tokens: int
    presence_penalty: float
    priority: int
    prompt_logprobs: int
    queue_timeout: float
    regex: str
    """A regular expression matches the whole answer."""
    repetition_penalty: float
    sampling: Literal["greedy", "recommended", "chat"]
    """The sampling parameters that others replace: greedy (default), those that the model's authors
    recommend, or those for chats."""
    seed: int
    session: str | Session
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    temperature: float
    template_variables: Mapping[str, Any]
    """Variables of the chat template, such as ``enable_thinking``."""
    tenant: str
    timeout: float
    tool_choice: Literal["auto", "required"]
    tools: Sequence[Any]
    """Functions in the form of OpenAI's API."""
    top_k: int
    top_p: float


def check_names(function: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raises :class:`TypeError` for the first option that does not exist."""
    names = sorted(known)
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(names)}"
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}': {hint}")


def _plain(value: Any) -> Any:
    """The plain form of a value that JSON does not have: arrays and numbers of numpy, paths."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"expected a value that can be written as JSON, got a {type(value).__name__}")


def to_json(value: Any) -> str:
    """The value as JSON."""
    return json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False)


def _schema(schema: Any) -> Any:
    """The JSON schema of a class of pydantic, or the schema itself."""
    describe = getattr(schema, "model_json_schema", None)
    if describe is not None:
        return describe()
    if isinstance(schema, (Mapping, bool)):
        return schema
    raise TypeError(
        "json_schema: expected a dict or a class of pydantic, got "
        f"{schema if isinstance(schema, type) else type(schema)}"
    )


def _image(image: Image) -> bytes:
    """The content of an image file."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (str, os.PathLike)):
        return Path(image).read_bytes()
    if hasattr(image, "save"):
        png = io.BytesIO()
        image.save(png, format="PNG")
        return png.getvalue()
    if hasattr(image, "tobytes") and hasattr(image, "shape"):
        return _png(image)
    raise TypeError(
        "images: expected the bytes of a file, its path, a picture of Pillow or an array, got a "
        f"{type(image).__name__}"
    )


def _png(pixels: Any) -> bytes:
    """A PNG file of an array of numpy, so that the engine needs no other form of images."""
    shape = tuple(pixels.shape)
    kind = {2: 0, 3: {3: 2, 4: 6}.get(shape[-1])}.get(len(shape)) if 0 not in shape else None
    if kind is None or str(pixels.dtype) != "uint8":
        raise ValueError(
            "images: expected an array of uint8 with the shape [height, width] or [height, width, "
            f"3 or 4], got one of {pixels.dtype} with the shape {list(shape)}"
        )

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", shape[1], shape[0], 8, kind, 0, 0, 0)
    # Each row begins with the number of its filter, 0 for none.
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    signature = b"\x89PNG\r\n\x1a\n"
    data = chunk(b"IDAT", zlib.compress(rows, 1))
    return signature + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def prompt_of(prompt: Any) -> dict[str, Any]:
    """A prompt as the native module reads it."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if hasattr(prompt, "tolist"):
        return {"tokens": prompt.tolist()}
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise TypeError(
            "prompt: expected a string, token ids or the messages of a conversation, got a "
            f"{type(prompt).__name__}"
        )
    kind = "messages" if prompt and isinstance(prompt[0], Mapping) else "tokens"
    return {kind: list(prompt)}


def request_of(
    function: str, prompt: Any, options: Mapping[str, Any]
) -> tuple[dict[str, Any], list[bytes]]:
    """A request as the native module reads it, and its images."""
    check_names(function, options, RequestOptions.__annotations__)
    given = {name: value for name, value in options.items() if value is not None}
    images = [_image(image) for image in given.pop("images", ())]
    if "json_schema" in given:
        given["json_schema"] = _schema(given["json_schema"])
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "session" in given:
        given["session"] = getattr(given["session"], "id", given["session"])
    return {"prompt": prompt_of(prompt), "options": given}, images
