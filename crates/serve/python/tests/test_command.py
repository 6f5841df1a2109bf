"""The command in the package."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest


def stolon(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stolon", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_statuses_and_errors_are_those_of_the_command() -> None:
    version = stolon("--version")
    assert (version.returncode, version.stdout.split()[0]) == (0, "stolon")
    wrong = stolon("srve")
    assert wrong.returncode == 2 and "srve" in wrong.stderr
    missing = stolon("generate", "--model", "/no/such/model.gguf", "--prompt", "hello")
    assert missing.returncode == 1 and missing.stderr.startswith("error: ")
    assert Path(sys.executable).with_name("stolon").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_answers_and_ends_by_a_signal(number: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "stolon", "serve", "demo", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                    break
            except OSError:
                assert server.poll() is None, server.communicate()
                assert time.monotonic() < end, "the server does not get ready"
                time.sleep(0.05)
        message = {"role": "user", "content": "Hello"}
        body = {"model": "demo", "messages": [message], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] > 0
        os.kill(server.pid, number)
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.communicate()
