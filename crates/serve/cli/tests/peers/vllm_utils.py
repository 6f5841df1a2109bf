"""Replaces vLLM's `tests/utils.py`: starts Stolon with those of vLLM's flags that it has."""

import os
import pathlib
import socket
import subprocess
import tempfile
import time

import anthropic
import openai
import pytest
import requests

ROOT = pathlib.Path(os.environ["PEER_TESTS_ROOT"])
VLLM_PATH = pathlib.Path(os.environ["PEER_TESTS_SOURCE"])
ROCM_EXTRA_ARGS = []
ROCM_ENV_OVERRIDES = {}
# Flags that both servers have. Others are about vLLM's engine or its parsers.
FLAGS = {"--api-key", "--chat-template", "--root-path", "--ssl-certfile", "--ssl-keyfile"}


def stand_in(model):
    """The small model that is used instead of this one."""
    if any(word in model for word in ("e5", "embed", "bge", "gte")):
        return str(ROOT / "crates" / "models" / "checkpoint" / "tests" / "fixtures" / "embedding")
    if "VL" in model:
        return "random:smolvlm-tiny"
    return "demo"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def translated(arguments):
    """Those of the flags that Stolon has."""
    kept, rest = [], [part for text in arguments for part in text.split("=", 1)]
    while rest:
        flag = rest.pop(0)
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if flag == "--served-model-name":
            kept += [part for name in values for part in (flag, name)]
        elif flag == "--allowed-origins":
            kept += [flag, values[0].strip('[]"')]
        elif flag in FLAGS:
            kept += [flag, *values]
    return kept


def __getattr__(name):
    """Decorators of tests that need a device, and helpers without a counterpart."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: pytest.mark.skip(reason=f"needs {name}")


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, vllm_serve_args, *, env_dict=None, seed=0, auto_port=True,
                 max_wait_seconds=None, override_hf_configs=None):
        arguments = translated(vllm_serve_args)
        if "--served-model-name" not in arguments:
            arguments += ["--served-model-name", model]
        self.host, self.port, self.uds = "127.0.0.1", free_port(), None
        self.show_hidden_metrics = False
        key = (env_dict or {}).get("VLLM_API_KEY")
        arguments += ["--api-key", key] if key else []
        command = [os.environ["STOLON"], "serve", "--model", stand_in(model), "--port", str(self.port)]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, "--kv-memory", "256M", "--public-metrics", *arguments],
            stdout=self.log, stderr=self.log,
        )
        deadline = time.time() + 60
        while True:
            try:
                if requests.get(self.url_for("health"), timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            if self.process.poll() is not None or time.time() > deadline:
                self.log.seek(0)
                self._shutdown()
                raise RuntimeError(f"the server does not start: {self.log.read()}")
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._shutdown()

    def _shutdown(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def url_root(self):
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return f"{self.url_root}/{'/'.join(part.strip('/') for part in parts if part)}"

    def _client(self, kind, base, **settings):
        settings = {"timeout": 100, "max_retries": 0, "api_key": self.DUMMY_API_KEY} | settings
        return kind(base_url=base, **settings)

    def get_client(self, **settings):
        return self._client(openai.OpenAI, self.url_for("v1"), **settings)

    def get_async_client(self, **settings):
        return self._client(openai.AsyncOpenAI, self.url_for("v1"), **settings)

    def get_client_anthropic(self, **settings):
        return self._client(anthropic.Anthropic, self.url_root, **settings)

    def get_async_client_anthropic(self, **settings):
        return self._client(anthropic.AsyncAnthropic, self.url_root, **settings)
