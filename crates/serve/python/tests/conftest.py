"""One engine with the built-in model for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import stolon

HANDBOOK = "The violet tent costs 45 crowns. The speckled goat belongs to Ottilie. " * 8


def about(question: str) -> list[dict[str, Any]]:
    """A conversation with a question about the handbook."""
    return [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": question}]


TENT = about("How much does the violet tent cost?")
GOAT = about("Who owns the speckled goat?")


@pytest.fixture(scope="session")
def engine() -> Iterator[stolon.Engine]:
    with stolon.Engine("demo", kv_memory=64 << 20, pooling="mean") as engine:
        yield engine


@pytest.fixture(autouse=True)
def _cold(engine: stolon.Engine) -> Iterator[None]:
    """No test sees what another one has cached, and none leaves a request behind."""
    engine.cache.flush()
    yield
    _wait_until(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)


def _wait_until(is_done: Any, seconds: float = 10.0) -> None:
    import time

    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


wait_until = _wait_until
