"""What the prefix cache saves coding agents: the requests of their sessions, sent again to two servers.

    python3 crates/serve/cli/tests/agents/sessions.py target/release/stolon MODULES TEMPLATES \\
        --only claude/qwen3 --log claude.jsonl
    python3 benches/agent_replay.py target/release/stolon --model MODEL claude.jsonl ... [--every 5]
        [--other NAME=URL ...]

MODULES and TEMPLATES are described in sessions.py, whose log has all requests of an agent in a session of thirty
turns. Each is sent to a server with a prefix cache, and each fifth one (`--every`) to a server without, for one
greedy token. The prompts are rendered with the model's own chat template, so any model will do whose context has
room for them; `--chat-template FILE` gives another template. With --other, each request is then sent to another
server, too, which has to serve the same model with the same template, under the name `scripted`. What other servers
refuse is replaced by text: pictures, and half of an emoji.

Prints for each log and each server the turns, the tokens of all prompts and the share of them that was cached, and
the seconds until the first token: their median and their sum. The sums of the server without a cache are estimated
from the turns that it got. Fails if its token differs: the cache must not change an answer.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "crates/serve/cli/tests/agents"))

from proxy import connect
from sessions import serve, stop, usage


def ask(url, path, request):
    """The seconds until the reply of one token, the tokens of the prompt and the cached ones, and the reply."""
    connection = connect(url)
    start = time.perf_counter()
    connection.request("POST", path.split("?")[0], json.dumps(request), {"content-type": "application/json"})
    reply = connection.getresponse()
    text = reply.read().decode(errors="replace")
    seconds = time.perf_counter() - start
    if reply.status != 200:
        sys.exit(f"{path}: {reply.status} {text[:500]}")
    value = json.loads(text)
    answer = value.get("choices") or value.get("content") or value.get("output")
    return seconds, *usage(text)[1:], without_ids(answer)


def without_ids(value):
    """The answer without names that are made up for each request."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "call_id")}
    return value


def without_pictures(value):
    """The request with texts for its pictures."""
    if isinstance(value, list):
        return [without_pictures(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in ("image", "image_url", "input_image"):
        return {"type": "input_text" if value["type"] == "input_image" else "text", "text": "a picture"}
    return {key: without_pictures(item) for key, item in value.items()}


def requests(log):
    """The path and the body of each turn."""
    for line in log.read_text().splitlines():
        row = json.loads(line)
        if row["turn"] is None or row["status"] != 200:
            continue
        request = without_pictures(json.loads(re.sub(r"\\ud83d(?!\\ud[c-f])", r"\\ufffd", row["request"])))
        for name in ("max_tokens", "max_completion_tokens", "chat_template_kwargs", "stream", "stream_options"):
            request.pop(name, None)
        request["max_output_tokens" if row["path"].split("?")[0].endswith("/responses") else "max_tokens"] = 1
        request["temperature"] = 0
        yield row["path"], request


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("logs", type=pathlib.Path, nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--chat-template")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument(
        "--other", action="append", default=[], metavar="NAME=URL", type=lambda text: text.split("=", 1),
        help="another server that gets each turn, too",
    )  # fmt: skip
    options = parser.parse_args()
    flags = ["--chat-template", options.chat_template] if options.chat_template else []
    warm = serve(options.binary, options.model, *flags)
    cold = serve(options.binary, options.model, *flags, "--no-prefix-caching")
    servers = {"with the cache": warm[1], **dict(options.other)}
    try:
        for log in options.logs:
            turns = list(requests(log))
            rows = {name: [] for name in [*servers, "without a cache"]}
            for turn, request in enumerate(turns):
                answers = {}
                for name, url in servers.items():
                    *row, answers[name] = ask(url, *request)
                    rows[name].append(row)
                if turn % options.every == 0:
                    *row, answer = ask(cold[1], *request)
                    rows["without a cache"].append(row)
                    if answer != answers["with the cache"]:
                        sys.exit(f"{log}: turn {turn}: {answers['with the cache']} with the cache, {answer} without")
            for name, measured in rows.items():
                report(f"{log.stem}, {name}", len(turns), measured)
    finally:
        for server, _ in (warm, cold):
            stop(server)


def report(title, turns, rows):
    seconds, prompts, cached = zip(*rows)
    print(
        f"{title}: {turns} turns, {sum(prompts) * turns // len(rows)} prompt tokens, "
        f"{100 * sum(cached) / sum(prompts):.1f} % cached; first token p50 {statistics.median(seconds):.2f} s, "
        f"in all {statistics.fmean(seconds) * turns:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
