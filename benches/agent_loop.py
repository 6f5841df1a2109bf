"""A coding agent's conversation of 40 turns, with a warm and with a cold prefix cache.

    python3 -m venv venv && venv/bin/pip install openai
    venv/bin/python benches/agent_loop.py target/release/stolon --model MODEL [--plot benches/agent-loop.svg]
        [--other NAME=URL ...]

The conversation is scripted: a system prompt of about 2,000 tokens and three tools, then turns in which the
assistant calls a tool and gets a part of a file of this repository, or a test's output. OpenAI's Python
client sends every turn with the whole conversation so far, streamed. The model answers with a few tokens,
which the script replaces by its own. The cold server runs with --no-prefix-caching; because it computes
the whole conversation each time, it gets every fourth turn only.

With --other, each turn is then sent to another server, too, which has to serve the same model with
benches/agent_loop.jinja as its chat template, with a cache of its own:

    llama-server --model MODEL --ctx-size 16384 --jinja --chat-template-file benches/agent_loop.jinja

Prints one line per turn and the totals, and fails if the two servers' answers differ: the cache must not
change an answer.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import time

import openai

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
TURNS = 40
RULES = """You are a coding agent in the repository of an inference engine written in Rust. Work in small
steps: read before you change, run the tests after each change, and explain a change in one sentence. """
FILES = ["crates/engine/scheduler/src/scheduler.rs", "crates/engine/kvcache/src/writer.rs", "crates/serve/http/src/handlers/chat.rs", "src/engine.rs"]


def tool(name, description, **parameters):
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("read_file", "Read a part of a file.", path="Path in the repository", lines="First and last line"),
    tool("edit_file", "Replace a text in a file.", path="Path", old="Text to replace", new="New text"),
    tool("run_tests", "Run tests and return their output.", filter="Part of the tests' names"),
]


def conversation():
    """Yields the messages of each turn, the whole conversation before it included."""
    guide = (ROOT / "ARCHITECTURE.md").read_text()[:7_000]
    messages = [{"role": "system", "content": RULES + "The architecture of the project:\n\n" + guide}]
    messages.append({"role": "user", "content": "Find out how a request is admitted, and add a test of it."})
    sources = [(path, (ROOT / path).read_text().splitlines()) for path in FILES]
    for turn in range(TURNS):
        yield list(messages)
        path, lines = sources[turn % len(sources)]
        first = turn // len(sources) * 8
        if turn % 3 == 2:
            name, arguments = "run_tests", {"filter": f"admission_{turn}"}
            result = f"running 3 tests\ntest admission_{turn} ... ok\ntest result: ok. 3 passed; 0 failed"
        else:
            name, arguments = "read_file", {"path": path, "lines": f"{first}-{first + 8}"}
            result = "\n".join(lines[first : first + 8])
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": f"Step {turn + 1}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


class Api:
    """A server's API."""

    def __init__(self, url):
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self.model = self.client.models.list().data[0].id

    def ask(self, messages, tokens):
        """The text and calls of the answer, the time to its first token in seconds, prompt tokens
        and cached tokens."""
        begin, first, text, usage = time.perf_counter(), None, "", None
        stream = self.client.chat.completions.create(
            model=self.model, messages=messages, tools=TOOLS, max_completion_tokens=tokens, temperature=0,
            stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        for piece in stream:
            for choice in piece.choices:
                calls = "".join(call.model_dump_json(exclude={"id"}) for call in choice.delta.tool_calls or [])
                if choice.delta.content or calls:
                    first = first or time.perf_counter() - begin
                    text += (choice.delta.content or "") + calls
            usage = piece.usage or usage
        cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
        return text, first, usage.prompt_tokens, cached or 0


class Server(Api):
    """A running server of this project."""

    def __init__(self, binary, model, *flags):
        command = [binary, "serve", "--port", "0", "--model", model, "--kv-memory", "2G", *flags]
        command += ["--chat-template", str(HERE / "agent_loop.jinja"), "--tool-call-parser", "hermes"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        listening = (line for line in self.process.stdout if line.startswith("listening on "))
        super().__init__(next(listening).removeprefix("listening on ").strip())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=60)


def measure(binary, model, tokens, cold_every, others):
    """The measurements, as one dictionary per turn. The times of other servers have their names."""
    turns = list(conversation())
    rows = []
    others = {name: Api(url) for name, url in others}
    with Server(binary, model) as warm:
        for number, messages in enumerate(turns, 1):
            text, seconds, prompt, cached = warm.ask(messages, tokens)
            rows.append({"turn": number, "prompt": prompt, "cached": cached, "warm": seconds, "text": text})
            print(f"turn {number}: {prompt} prompt tokens, {cached} cached, first token {seconds * 1e3:.0f} ms")
            for name, other in others.items():
                _, seconds, prompt, cached = other.ask(messages, tokens)
                rows[-1][name] = seconds
                print(f"    {name}: {prompt} prompt tokens, {cached} cached, first token {seconds * 1e3:.0f} ms")
    with Server(binary, model, "--no-prefix-caching") as cold:
        for row, messages in itertools.islice(zip(rows, turns), cold_every - 1, None, cold_every):
            text, row["cold"], _, cached = cold.ask(messages, tokens)
            assert cached == 0 and text == row["text"], f"turn {row['turn']}: {text!r} instead of {row['text']!r}"
            print(f"turn {row['turn']} cold: first token {row['cold'] * 1e3:.0f} ms")
    return rows


def plot(rows, path, title):
    """Draws two curves of times above bars of cached and computed tokens, as SVG."""
    width, left, top, middle, bottom = 760, 60, 40, 250, 420
    step = (width - left - 20) / len(rows)
    slowest = max(row.get("cold", row["warm"]) for row in rows) * 1.1
    longest = max(row["prompt"] for row in rows) * 1.1
    x = lambda row: left + (row["turn"] - 0.5) * step
    y = lambda seconds: middle - (middle - top) * seconds / slowest
    label = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}" fill="{}">{}</text>'.format
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 460" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="460" fill="white"/>',
        label(width / 2, 18, "middle", "black", title),
        label(left + 8, top + 8, "start", "#c0392b", "time to first token, cold"),
        label(left + 8, top + 24, "start", "#1f77b4", "time to first token, warm"),
        label(left + 8, middle + 28, "start", "#1f77b4", "prompt tokens from the cache"),
        label(left + 8, middle + 44, "start", "#c0392b", "prompt tokens computed"),
    ]
    for share in (0, 0.5, 1):
        seconds, tokens = slowest / 1.1 * share, longest / 1.1 * share
        parts.append(label(left - 6, y(seconds) + 4, "end", "#555", f"{seconds:.1f} s"))
        level = bottom - (bottom - middle - 20) * tokens / longest
        parts.append(label(left - 6, level + 4, "end", "#555", f"{tokens:.0f}"))
    for name, color in (("cold", "#c0392b"), ("warm", "#1f77b4")):
        points = " ".join(f"{x(row):.1f},{y(row[name]):.1f}" for row in rows if name in row)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    for row in rows:
        height = lambda tokens: (bottom - middle - 20) * tokens / longest
        cached, computed = height(row["cached"]), height(row["prompt"] - row["cached"])
        for level, size, color in ((bottom - cached, cached, "#9ecae1"), (bottom - cached - computed, computed, "#c0392b")):
            parts.append(
                f'<rect x="{x(row) - step * 0.4:.1f}" y="{level:.1f}" width="{step * 0.8:.1f}" '
                f'height="{size:.1f}" fill="{color}"/>'
            )
    for turn in (1, *range(10, len(rows) + 1, 10)):
        parts.append(label(x({"turn": turn}), bottom + 16, "middle", "#555", turn))
    parts.append(label(width / 2, bottom + 34, "middle", "#555", "turn"))
    pathlib.Path(path).write_text("\n".join([*parts, "</svg>", ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="the command stolon")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--cold-every", type=int, default=4, help="ask the cold server each Nth turn")
    parser.add_argument(
        "--other", action="append", default=[], metavar="NAME=URL", type=lambda text: text.split("=", 1),
        help="another server that gets each turn, too",
    )  # fmt: skip
    parser.add_argument("--plot", help="file for the plot, as SVG")
    args = parser.parse_args()
    rows = measure(args.binary, args.model, args.tokens, args.cold_every, args.other)
    prompt, cached = (sum(row[name] for row in rows) for name in ("prompt", "cached"))
    both = [row for row in rows if "cold" in row]
    warm, cold = (statistics.median(row[name] for row in both) for name in ("warm", "cold"))
    print(
        f"{prompt} prompt tokens in {len(rows)} turns, {cached / prompt:.1%} from the cache; first token at the "
        f"median of {len(both)} turns: warm {warm * 1e3:.0f} ms, cold {cold * 1e3:.0f} ms; equal answers"
    )
    for name, _ in args.other:
        own, other = (statistics.median(row[key] for row in rows[1:]) for key in ("warm", name))
        print(f"first token at the median of all turns but the first: {own * 1e3:.0f} ms, {name} {other * 1e3:.0f} ms")
    if args.plot:
        plot(rows, args.plot, f"A coding agent's conversation: {pathlib.Path(args.model).stem}, two CPU cores")


if __name__ == "__main__":
    main()
