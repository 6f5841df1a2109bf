"""What publishing KV events costs: one server with events and one without, by turns.

    python3 -m venv venv && venv/bin/pip install pyzmq
    venv/bin/python benches/kv_events.py target/release/stolon

Each run starts a server (built with the feature `fleet`), and `stolon bench serve` sends it the same prompts
as random token ids, of which none share a prefix, so that every block of a prompt is stored and, because the
KV pool is small, removed again. With events, a subscriber receives them all. The demo model is used because
it computes a block faster than any other model, so that the events are the largest share.

Reports throughput, and the processor time of the server for the same work, which other processes on the
machine disturb less: medians, and the ratio of each pair of runs.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import threading

import zmq

TICKS = os.sysconf("SC_CLK_TCK")


class Subscriber(threading.Thread):
    """Receives batches until it is stopped."""

    def __init__(self, endpoint):
        super().__init__()
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.batches, self.bytes, self.stopping = 0, 0, threading.Event()
        self.start()

    def run(self):
        while not self.stopping.is_set():
            if self.socket.poll(100):
                frames = self.socket.recv_multipart()
                self.batches += 1
                self.bytes += len(frames[2])
        self.socket.close(linger=0)


def processor_seconds(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run(args, events):
    command = [args.binary, "serve", "--port", "0", "--block-size", "16", "--num-blocks", str(args.blocks)]
    if events:
        port = 20_000 + os.getpid() % 10_000
        config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
        command += ["--kv-events-config", json.dumps(config)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line for line in server.stdout if line.startswith("listening on ")).split()[2]
        subscriber = Subscriber(f"tcp://127.0.0.1:{port}") if events else None
        before = processor_seconds(server)
        bench = [args.binary, "bench", "serve", "--base-url", url, "--num-prompts", str(args.prompts)]
        bench += ["--max-concurrency", "8", "--random-input-len", "512", "--random-output-len", "16"]
        bench += ["--token-ids", "2400", "--ignore-eos", "--json", "--num-warmups", "1"]
        report = json.loads(subprocess.run(bench, check=True, capture_output=True, text=True).stdout)
        seconds = processor_seconds(server) - before
        if subscriber:
            subscriber.stopping.set()
            subscriber.join()
            assert subscriber.batches > args.prompts / 8, subscriber.batches
        assert report["completed"] == args.prompts, report
        counts = (subscriber.batches, subscriber.bytes) if subscriber else (0, 0)
        return {"processor": seconds, "throughput": report["total_token_throughput"], "counts": counts}
    finally:
        server.terminate()
        server.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="the command stolon")
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--blocks", type=int, default=2000, help="size of the KV pool")
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    pairs = []
    for number in range(args.pairs):
        # By turns: off on, on off.
        order = [False, True] if number % 2 == 0 else [True, False]
        results = {events: run(args, events) for events in order}
        pairs.append((results[False], results[True]))
        off, on = pairs[-1]
        print(f"pair {number + 1}: processor {off['processor']:.2f} s without, {on['processor']:.2f} s with; "
              f"{off['throughput']:.0f} and {on['throughput']:.0f} tokens/s; {on['counts']} batches, bytes", flush=True)
    ratio = statistics.median(on["processor"] / off["processor"] for off, on in pairs)
    speed = statistics.median(on["throughput"] / off["throughput"] for off, on in pairs)
    print(f"median of {args.pairs} pairs: processor time x {ratio:.4f}, throughput x {speed:.4f}")


if __name__ == "__main__":
    main()
