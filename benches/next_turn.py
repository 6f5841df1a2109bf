"""What computing the next turn ahead brings: python benches/next_turn.py target/release/stolon --model MODEL --chat-template FILE

A conversation with a model that reasons, and whose template (the one of Qwen3.5, for example) leaves the
reasoning of earlier answers out, so that all that follows the reasoning has to be computed again. It is sent to
two servers, by turns: with `--next-turn-prefill on`, and `off`. After each answer comes a pause, as when a user
reads or a tool runs, and then the next turn. The model need not be trained to reason: the reasoning is closed
after a number of tokens.

Prints the medians of the time to the first token: of the next turn, after the pause, and of a short prompt of
another client that arrives right after an answer, while the next turn is being computed.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "crates/serve/cli/tests/agents"))

from proxy import connect
from sessions import serve, stop

QUESTION = "Which part of the plan comes next, and why? Question {}."
OTHER = "What is the capital of country {}?"


def stream(url, request):
    """The seconds until the first piece of the answer, the reasoning and the content."""
    connection = connect(url)
    start = time.perf_counter()
    body = {"model": "m", "stream": True, "temperature": 0, "ignore_eos": True, **request}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        sys.exit(f"{reply.status} {reply.read().decode()[:500]}")
    first, reasoning, content = None, "", ""
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            reasoning += choice["delta"].get("reasoning_content") or ""
            content += choice["delta"].get("content") or ""
            if first is None and (reasoning or content):
                first = time.perf_counter() - start
    return first, reasoning, content


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--chat-template", required=True)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--reasoning", type=int, default=100, help="tokens of reasoning in each answer")
    parser.add_argument("--answer", type=int, default=300, help="tokens of each answer after it")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between an answer and the next turn")
    options = parser.parse_args()
    names = ["on", "off"]
    flags = ["--chat-template", options.chat_template, "--reasoning-budget", str(options.reasoning)]
    servers = {name: serve(options.binary, options.model, *flags, "--next-turn-prefill", name) for name in names}
    conversations = {name: [] for name in names}
    turns, others = ({name: [] for name in names} for _ in range(2))
    try:
        for turn in range(options.turns):
            for name in names if turn % 2 else reversed(names):
                url, messages = servers[name][1], conversations[name]
                messages.append({"role": "user", "content": QUESTION.format(turn)})
                request = {"messages": messages, "max_tokens": options.reasoning + options.answer}
                seconds, reasoning, content = stream(url, request)
                if not reasoning or not content:
                    sys.exit(f"no reasoning or no answer: {reasoning!r} {content!r}")
                messages.append({"role": "assistant", "content": content})
                other = [{"role": "user", "content": OTHER.format(turn)}]
                others[name].append(stream(url, {"messages": other, "max_tokens": 2})[0])
                time.sleep(options.pause)
                turns[name].append(seconds)
    finally:
        for server, _ in servers.values():
            stop(server)
    for title, measured in [("the next turn", turns), ("another client, right after an answer", others)]:
        # The first turn has none before it.
        row = ", ".join(f"{name} {1e3 * statistics.median(measured[name][1:]):.0f} ms" for name in names)
        print(f"first token of {title}: {row}")


if __name__ == "__main__":
    main()
