"""The life of an engine: closing, signals, forks, pickling."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import stolon
from conftest import wait_until
from stolon.errors import EngineStoppedError, ForkedProcessError, InvalidValueError, ModelLoadError


def test_a_closed_engine_refuses_requests() -> None:
    with stolon.Engine("demo", kv_memory=64 << 20) as engine:
        stream = engine.stream("The", ignore_eos=True)
        next(stream)
    with pytest.raises(EngineStoppedError):
        engine.generate("The")
    with pytest.raises(EngineStoppedError):
        list(stream)
    assert engine.close()


def test_requests_in_flight_may_end_before_an_engine_stops() -> None:
    engine = stolon.Engine("demo", kv_memory=64 << 20)
    stream = engine.stream("The", ignore_eos=True, max_tokens=64)
    tokens = [next(stream)]
    reader = threading.Thread(target=lambda: tokens.extend(stream))
    reader.start()
    assert engine.close(drain=60.0)
    reader.join()
    assert len([token for token in tokens if token.id is not None]) == 64


def test_models_that_cannot_be_loaded(tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(ModelLoadError):
        stolon.Engine(tmp_path)
    with pytest.raises(InvalidValueError, match="kv_type: .*expected one of"):
        stolon.Engine("demo", kv_type="f7")
    with pytest.raises(InvalidValueError, match="`kv_cache_dir` and `kv_cache_bytes` together"):
        stolon.Engine("demo", kv_cache_dir=tmp_path)


def test_the_disk_keeps_prefixes(tmp_path: os.PathLike[str]) -> None:
    text = "The violet tent costs 45 crowns. " * 30
    cached = []
    for _ in range(2):
        with stolon.Engine(
            "demo", kv_memory=64 << 20, kv_cache_dir=tmp_path, kv_cache_bytes=64 << 20
        ) as engine:
            cached.append(engine.generate(text, max_tokens=4).usage.cached_tokens)
    assert cached[0] == 0 and cached[1] > 0


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also if a shell has started the tests in the background, with the
    signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_a_call_and_cancels_its_requests(engine: stolon.Engine) -> None:
    def interrupt(requests: int) -> None:
        wait_until(lambda: engine.stats()["running"] == requests)
        os.kill(os.getpid(), signal.SIGINT)

    calls: list[tuple[int, Callable[[], object]]] = [
        (3, lambda: engine.generate(["The"] * 3, ignore_eos=True)),
        (1, lambda: list(engine.stream("The", ignore_eos=True))),
    ]
    for requests, call in calls:
        before = engine.stats()["canceled"]
        thread = threading.Thread(target=interrupt, args=(requests,))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        thread.join()
        # They had not ended by themselves when the call did.
        wait_until(lambda: engine.stats()["canceled"] == before + requests)


def test_pickling_and_copying_are_refused(engine: stolon.Engine) -> None:
    stream = engine.stream("The", max_tokens=2)
    for thing in (engine, engine.cache, engine.sessions, stream, stolon.PrefixCache(4, 4)):
        for refused in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"pickle or copy a stolon.{type(thing).__name__}"):
                refused(thing)
    answer = engine.generate("The", max_tokens=2)
    assert pickle.loads(pickle.dumps(answer)) == answer
    list(stream)


def in_fork(check: Callable[[], None]) -> None:
    """Runs a check in a forked process, and fails if it fails or does not end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        except BaseException as error:
            print("in the forked process:", repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    end = time.monotonic() + 60
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            assert status == 0, "the forked process failed"
            return
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the forked process hangs")
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_gets_an_error_at_once(engine: stolon.Engine) -> None:
    stream = engine.stream("The", ignore_eos=True)
    next(stream)
    cache = stolon.PrefixCache(4, 16)
    session = engine.sessions.open()

    def check() -> None:
        calls: list[Callable[[], object]] = [
            lambda: engine.generate("The", max_tokens=2),
            lambda: engine.chat([{"role": "user", "content": "a"}]),
            lambda: engine.stream("The"),
            lambda: next(stream),
            lambda: engine.embed("The"),
            lambda: engine.tokenize("The"),
            lambda: engine.cache.query_match_len("The"),
            lambda: session.info(),
            lambda: cache.match([1, 2]),
            lambda: engine.close(),
        ]
        for call in calls:
            with pytest.raises(ForkedProcessError, match=f"in the process {os.getpid()}"):
                call()

    in_fork(check)

    def own_engine() -> None:
        nonlocal stream, session
        del stream, session
        with stolon.Engine("demo", kv_memory=64 << 20) as other:
            assert other.generate("The", max_tokens=2).token_ids

    in_fork(own_engine)
    # The process itself has lost nothing.
    next(stream)
    stream.close()
    assert session.close()


def test_an_engine_does_not_delay_the_end_of_the_interpreter() -> None:
    program = (
        "import stolon\n"
        "engine = stolon.Engine('demo', kv_memory=64 << 20)\n"
        "stream = engine.stream('The', ignore_eos=True)\n"
        "next(stream)\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
