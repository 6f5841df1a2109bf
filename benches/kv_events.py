"""The cost of publishing KV events: servers with events and one without, by turns.

    python3 -m venv venv && venv/bin/pip install pyzmq
    venv/bin/python benches/kv_events.py target/release/stolon

Each run starts a server (built with the feature `fleet`), and `stolon bench serve` sends it the
same prompts as random token ids. No two prompts share a prefix, so that every block of a prompt is
stored and, because the KV pool is small, removed again. The demo model is used because it computes
a block faster than any other model, so that the events are the largest share; --model chooses
another. A turn has a run of each kind:

  off      no events
  read     a subscriber receives all events
  stalled  a subscriber takes nothing: its queue in the server is full for nearly the whole run

With --disk, all servers have a disk tier for a quarter of the computed KV, so that records are
removed from it, too, and its events are published with the events of the cache.

Reports throughput, and the processor time of the server for the same work, which other processes on the
machine disturb less: medians of the turns, each compared with the run without events of the same turn.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import threading

import zmq

TICKS = os.sysconf("SC_CLK_TCK")
KINDS = ["off", "read", "stalled"]
INPUT, OUTPUT = 512, 16


class Subscriber(threading.Thread):
    """Receives batches until it is stopped, or receives none if `takes` is false."""

    def __init__(self, endpoint, takes):
        super().__init__()
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        if not takes:
            self.socket.setsockopt(zmq.RCVHWM, 1)
            self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.takes, self.batches, self.bytes, self.stopping = takes, 0, 0, threading.Event()
        self.start()

    def run(self):
        while not self.stopping.is_set():
            if not self.takes:
                self.stopping.wait()
            elif self.socket.poll(100):
                frames = self.socket.recv_multipart()
                self.batches += 1
                self.bytes += len(frames[2])
        self.socket.close(linger=0)


def processor_seconds(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run(args, kind, folder):
    command = [args.binary, "serve", "--port", "0", "--block-size", "16", "--num-blocks", str(args.blocks)]
    command += ["--model", args.model]
    if args.disk:
        command += ["--kv-cache-dir", folder, "--kv-cache-dir-size", str(args.disk)]
    if kind != "off":
        port = 20_000 + os.getpid() % 10_000
        config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "hwm": 100}
        command += ["--kv-events-config", json.dumps(config)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line for line in server.stdout if line.startswith("listening on ")).split()[2]
        subscriber = Subscriber(f"tcp://127.0.0.1:{port}", kind == "read") if kind != "off" else None
        before = processor_seconds(server)
        bench = [args.binary, "bench", "serve", "--base-url", url, "--num-prompts", str(args.prompts)]
        bench += ["--max-concurrency", "8", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
        bench += ["--token-ids", str(args.token_ids), "--ignore-eos", "--json", "--num-warmups", "1"]
        report = json.loads(subprocess.run(bench, check=True, capture_output=True, text=True).stdout)
        seconds = processor_seconds(server) - before
        if subscriber:
            subscriber.stopping.set()
            subscriber.join()
            assert kind != "read" or subscriber.batches > args.prompts / 8, subscriber.batches
        assert report["completed"] == args.prompts, report
        counts = (subscriber.batches, subscriber.bytes) if subscriber else (0, 0)
        return {"processor": seconds, "throughput": report["total_token_throughput"], "counts": counts}
    finally:
        server.terminate()
        server.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="the command stolon")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--token-ids", type=int, default=2400, help="prompts have token ids below this number")
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--blocks", type=int, default=2000, help="size of the KV pool")
    parser.add_argument("--disk", metavar="SIZE", help="size of a disk tier, such as 64MiB")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    turns = []
    for number in range(args.turns):
        # Each kind is first, second and last equally often.
        order = KINDS[number % 3 :] + KINDS[: number % 3]
        results = {}
        for kind in order if number % 2 == 0 else order[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                results[kind] = run(args, kind, folder)
        turns.append(results)
        figures = [f"{kind} {r['processor']:.2f} s, {r['throughput']:.0f} tokens/s" for kind, r in results.items()]
        batches, size = results["read"]["counts"]
        print(f"turn {number + 1}: {'; '.join(figures)}; {batches} batches, {size} bytes", flush=True)
    for kind in KINDS[1:]:
        for name in ("processor", "throughput"):
            ratios = sorted(turn[kind][name] / turn["off"][name] for turn in turns)
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            median = statistics.median(ratios)
            print(f"{kind}: {name} x {median:.4f}, half of the turns {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
