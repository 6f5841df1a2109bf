#!/usr/bin/env python3
"""Runs `stolon serve` with the flags of llama.cpp's server, for its tests."""

import os
import sys

# Flags that mean the same, with their names here.
RENAMED = {
    "--port": "--port", "--host": "--host", "--ctx-size": "--max-model-len",
    "--n-predict": "--default-max-tokens", "--alias": "--served-model-name",
    "--api-key": "--api-key", "--chat-template-file": "--chat-template",
}
# Flags without a value; all others have one.
SWITCHES = {
    "--offline", "--cont-batching", "--embedding", "--reranking", "--metrics", "--kv-unified",
    "--swa-full", "--slots", "--no-slots", "--verbose", "--context-shift", "--no-ui",
    "--no-models-autoload", "--jinja", "--no-jinja", "--no-mmproj", "--no-cache-idle-slots",
    "--ui-mcp-proxy", "--backend_sampling",
}


# Context length of the small built-in model.
CONTEXT = 4096


def main():
    model, flags, arguments = "demo", ["--public-metrics"], sys.argv[1:]
    while arguments:
        flag = arguments.pop(0)
        if flag in SWITCHES:
            if flag == "--embedding":
                root = os.environ["PEER_TESTS_ROOT"]
                model = f"{root}/crates/models/checkpoint/tests/fixtures/embedding"
            continue
        value = arguments.pop(0)
        if flag == "--ctx-size":
            if model != "demo":
                continue  # The model for embeddings has a short context.
            value = str(min(int(value), CONTEXT))
        if flag == "--n-predict" and int(value) < 0:
            continue  # No limit, as without the flag.
        if flag in RENAMED:
            flags += [RENAMED[flag], value]
    binary = os.environ["STOLON"]
    os.execv(binary, [binary, "serve", "--model", model, "--kv-memory", "64M", *flags])


main()
