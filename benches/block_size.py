"""The cost of different sizes of KV blocks: `stolon serve` with blocks of several sizes, by turns.

    cargo build --release -p stolon-cli
    python3 benches/block_size.py target/release/stolon --model random:100m --kv-dtype bf16 f32

All servers have the same model and one thread. For each round and each work, each server computes the
same request, in an order that changes from round to round. The processor time of a server's threads is
measured, which other processes on the machine disturb less than they disturb wall-clock time.
`STOLON_CPU_PATH` selects the instruction set. The works:

    prefill N   a prompt of N tokens without a cached prefix
    decode N    32 tokens after a cached prompt of N tokens
    cached N    a cached prompt of N tokens: parsing, admission and one token

Prints the median over all rounds of each block size's time, divided by the time with 16 in the same
round, with the quartiles: 1.05 is 5 % slower than 16.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

SIZES = [4, 8, 16, 32]
REFERENCE = 16
ANSWER = 32
COMPUTED = {"skip_reading_prefix_cache": True, "skip_writing_prefix_cache": True}


class Server:
    """A running `stolon serve` with blocks of one size."""

    def __init__(self, options, size, kv_type):
        command = [options.binary, "serve", "--port", "0", "--model", options.model, "--threads", 1]
        command += ["--block-size", size, "--kv-dtype", kv_type, "--kv-memory", "1G", "--max-model-len", 8192]
        self.process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if line.startswith("listening on "):
                self.address = line.split("//")[1].strip()
                return
        sys.exit(f"{command} did not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def processor_time(self):
        """The processor time of all threads of the server, in nanoseconds."""
        # The result of clock_getcpuclockid on Linux.
        return time.clock_gettime_ns(~self.process.pid << 3 | 2)

    def complete(self, prompt, tokens, **others):
        """Requests an answer, and returns the processor time that it took, in milliseconds."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **others}
        begun = self.processor_time()
        # A connection that was idle while the other servers computed may have been closed.
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        if reply.status != 200:
            sys.exit(f"{reply.status} {text[:500]}")
        return (self.processor_time() - begun) / 1e6

    def work(self, name, prompts):
        """The time of a prefill or of a cached prompt, or of a decoded token."""
        kind, length = name.split()
        prompt = prompts[int(length)]
        if kind == "prefill":
            return self.complete(prompt, 1, **COMPUTED)
        first = self.complete(prompt, 1)
        if kind == "cached":
            return first
        return (self.complete(prompt, 1 + ANSWER) - first) / ANSWER


def measure(options, kv_type):
    """Prints the table of one type of KV."""
    rng = random.Random(1)
    prompts = {length: [rng.randrange(10, 200) for _ in range(length)] for length in (128, 512, 4096)}
    works = ["prefill 512", "prefill 4096", "decode 128", "decode 4096", "cached 4096"]
    times = {work: {size: [] for size in SIZES} for work in works}
    with contextlib.ExitStack() as stack:
        servers = {size: stack.enter_context(Server(options, size, kv_type)) for size in SIZES}
        for server in servers.values():
            for prompt in prompts.values():
                server.complete(prompt, 2)
        order = list(SIZES)
        for _ in range(options.rounds):
            for work in works:
                for size in order:
                    times[work][size].append(servers[size].work(work, prompts))
            order = order[1:] + order[:1]
    path = os.environ.get("STOLON_CPU_PATH", "the best instruction set")
    print(f"\n{options.model}, KV in {kv_type}, {path}, one thread, {options.rounds} rounds\n")
    print("| work | 16: ms | " + " | ".join(map(str, SIZES)) + " |\n|---|---|" + "---|" * len(SIZES))
    for work in works:
        reference = times[work][REFERENCE]
        cells = [f"{statistics.median(reference):.2f}"]
        for size in SIZES:
            low, middle, high = statistics.quantiles([a / b for a, b in zip(times[work][size], reference)], n=4)
            cells.append(f"{middle:.3f} ({low:.2f} to {high:.2f})")
        print(f"| {work} | " + " | ".join(cells) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=pathlib.Path, help="the command stolon")
    parser.add_argument("--model", default="random:100m")
    parser.add_argument("--kv-dtype", nargs="+", default=["bf16"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for kv_type in options.kv_dtype:
        measure(options, kv_type)


if __name__ == "__main__":
    main()
