"""The programs of the documentation run, and do what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import stolon

PACKAGE = Path(__file__).parent.parent


def programs(path: Path) -> list[str]:
    blocks = path.read_text(encoding="utf-8").split("```python\n")[1:]
    return [block.split("```")[0] for block in blocks]


def test_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = programs(PACKAGE / "README.md")
    exec(program, {})
    assert capsys.readouterr().out.startswith("['")


def test_the_page_of_the_book(capsys: pytest.CaptureFixture[str]) -> None:
    first, streaming, cached, own = programs(PACKAGE / "../../../docs/src/python.md")
    names: dict[str, Any] = {}
    exec(first, names)
    assert "45" in capsys.readouterr().out
    with stolon.Engine("demo", kv_memory=64 << 20) as engine:
        names["engine"] = engine
        exec(streaming, names)
        asyncio.run(names["answer"](names["about"]("Who owns the speckled goat?")))
        assert "Ottilie" in capsys.readouterr().out
        exec(cached, names)
        assert len(engine.cache.pins()) == 1
        assert capsys.readouterr().out.startswith("message_changed ")
        assert names["branch"].info().turns > 0
    names["tokens"], names["compute"] = list(range(40)), lambda tokens, blocks: None
    exec(own, names)
    assert names["cache"].match(range(40)) == 32
