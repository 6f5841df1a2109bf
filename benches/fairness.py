"""Effects of one client's load on other clients: fairness.py MODEL STOLON [STOLON ...].

Starts each given `stolon` by turns. A normal client (address 127.0.0.2) sends prompts of 5 tokens,
one after the other, and another one (127.0.0.3) reads a stream of tokens, while a hostile client
(127.0.0.1) sends one of the loads. Prints the time to the first token of the small prompts, the
time between the stream's tokens, and the duration of the load, from which its throughput follows.
Linux has these addresses; MODEL is a GGUF file.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import threading
import time

# A grammar whose masks are slow to compute.
GRAMMAR = "start: a a a a a a a a\na: a a | b |\nb: a | /[a-z ]/"


class Server:
    def __init__(self, stolon, model):
        command = [stolon, "serve", "--port", "0", "--model", model, "--num-blocks", "2048"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if line.startswith("listening on "):
                self.address = line.split()[2].removeprefix("http://")
                return
        raise SystemExit(f"{stolon} did not start")

    def post(self, body, client):
        """The connection and the response."""
        host, port = self.address.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=300, source_address=(f"127.0.0.{client}", 0))
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def ask(self, body, client):
        begun = time.perf_counter()
        connection, response = self.post(body, client)
        response.read()
        connection.close()
        return time.perf_counter() - begun

    def stop(self):
        self.process.terminate()
        self.process.wait()


def prompt(count, generator):
    return [generator.randrange(1000, 40_000) for _ in range(count)]


def prefill(server, generator):
    """Four prompts of 6,000 tokens at once."""
    bodies = [{"prompt": prompt(6_000, generator), "max_tokens": 1} for _ in range(4)]
    threads = [threading.Thread(target=server.ask, args=(body, 1)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def grammar(server, generator):
    """Sixteen answers to a hostile grammar."""
    body = {"prompt": prompt(5, generator), "max_tokens": 40, "n": 16, "guided_grammar": GRAMMAR, "temperature": 1}
    server.ask(body, 1)


def idle(_, __):
    time.sleep(8)


class Stream(threading.Thread):
    """Reads tokens until it is ended; `gaps` are the times between them."""

    def __init__(self, server):
        super().__init__()
        self.server, self.ended, self.gaps = server, False, []

    def run(self):
        # Digits only, because tokens may divide the bytes of other characters.
        text = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"
        body = {"prompt": text, "max_tokens": 4_000, "ignore_eos": True, "stream": True, "temperature": 0}
        connection, response = self.server.post(body, 3)
        last = None
        while not self.ended and (line := response.readline()):
            if line.startswith(b"data: "):
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
        connection.close()


def measure(server, load, generator):
    stream = Stream(server)
    stream.start()
    time.sleep(1)
    stream.gaps.clear()
    begun = time.perf_counter()
    loading = threading.Thread(target=load, args=(server, generator))
    loading.start()
    time.sleep(0.3)
    firsts = []
    while loading.is_alive():
        firsts.append(server.ask({"prompt": prompt(5, generator), "max_tokens": 1}, 2))
        time.sleep(0.1)
    took = time.perf_counter() - begun
    stream.ended = True
    stream.join()
    gaps = sorted(stream.gaps) or [took]
    return statistics.median(firsts), max(firsts), gaps[int(0.99 * (len(gaps) - 1))], took


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("stolon", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    results = {}
    for number in range(options.rounds):
        for stolon in options.stolon:
            server = Server(stolon, options.model)
            generator = random.Random(number)
            # Memory of the KV pool becomes resident when it is first written, which can take long.
            prefill(server, generator)
            for load in (idle, prefill, grammar):
                results.setdefault((load.__name__, stolon), []).append(measure(server, load, generator))
            server.stop()
    print("first token of 5 tokens: median, longest (ms) | between tokens p99 (ms) | load (s)")
    for (load, stolon), rounds in sorted(results.items()):
        middle = [statistics.median(values) for values in zip(*rounds)]
        print(f"{load:8} {middle[0] * 1e3:8.0f} {middle[1] * 1e3:8.0f} | {middle[2] * 1e3:8.0f} | {middle[3]:6.1f} | {stolon}")


main()
