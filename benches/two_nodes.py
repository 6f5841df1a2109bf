"""Two servers that share an object store: one loads the KV that the other has computed.

    cargo build --release -p stolon-cli --features object-store
    python3 benches/two_nodes.py load target/release/stolon
    python3 benches/two_nodes.py split target/release/stolon

Each server has a thread of its own and an empty directory; the store is a directory.

`load` compares the time to the first token with and without a store, by turns. First the prompts
were computed by another server just before, and the answers must be equal. Then no server has
computed them, so they are looked for in vain. Then another server has computed them, and the store
is slow and speaks S3's protocol. In this case the server is asked once it has listed the store,
which it does every 30 seconds, and knows its speed. Where computing is faster, the prompts are
computed: compare the loaded tokens with the times.

`split`: one server computes prompts and the other one decodes, compared by turns with two servers
that do both for half of the requests each. The first one computes the next prompts while the second
one decodes, so that both are always busy; the time of a turn is the longer of the two times. The
second one is asked after it has listed the stored prompts; this wait is not counted.
"""

import argparse
import concurrent.futures
import http.client
import http.server
import json
import pathlib
import random
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.parse

VOCABULARY = 32_000


class Server:
    """A `stolon serve` on a thread of its own."""

    def __init__(self, args, folder, store=None, environment=None):
        # The environment of the server, without settings of an object store that the caller may have.
        command = [args.binary, "serve", "--port", "0", "--model", args.model, "--threads", "1"]
        command += ["--num-blocks", "4096", "--block-size", "16"]
        if store:
            command += ["--kv-cache-dir", str(folder), "--kv-object-store", store]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        url = next(line for line in self.process.stdout if line.startswith("listening on ")).split()[2]
        self.address = urllib.parse.urlsplit(url).netloc

    def post(self, path, body):
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def ask(self, prompt, tokens):
        """A greedy answer: its token ids, the times of its tokens in seconds, and how many tokens
        were not computed."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
        begin, ids, times, usage = time.perf_counter(), [], [], {}
        for line in self.post("/v1/completions", body):
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])
                usage = piece.get("usage") or usage
                new = [token for choice in piece["choices"] for token in choice.get("token_ids") or []]
                times += [time.perf_counter() - begin] * len(new)
                ids += new
        assert len(ids) == tokens, (len(ids), usage)
        return {"ids": ids, "times": times, "cached": usage["prompt_tokens_details"]["cached_tokens"]}

    def wait_for(self, prompts):
        """Waits until the server knows that the store has these prompts, except for their last
        tokens."""
        deadline = time.monotonic() + 180
        for prompt in prompts:
            while True:
                found = json.load(self.post("/v1/cache/query", {"prompt": prompt}))["results"][0]
                if found["object_store_tokens"] >= (len(prompt) - 1) // 64 * 64:
                    break
                assert time.monotonic() < deadline, found
                time.sleep(0.2)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


class SlowStore(http.server.ThreadingHTTPServer):
    """The parts of an S3 server that are needed here. It sends `speed` bytes per second."""

    def __init__(self, speed):
        super().__init__(("127.0.0.1", 0), SlowHandler)
        self.speed, self.objects, self.sending = speed, {}, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def environment(self):
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}",
            "AWS_ALLOW_HTTP": "true",
        }


class SlowHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        self.server.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(b"")

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if "list-type=2" in query:
            folder = path.rstrip("/") + "/"
            keys = [key.removeprefix(folder) for key in self.server.objects]
            item = "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><Size>1</Size></Contents>"
            items = "".join(item.format(key) for key in keys)
            self.reply(f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode())
        elif (body := self.server.objects.get(path)) is None:
            self.reply(b"<Error><Code>NoSuchKey</Code></Error>", 404)
        else:
            # The speed is the sum over all connections.
            with self.server.sending:
                time.sleep(len(body) / self.server.speed)
            self.reply(body)

    def reply(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def make_prompts(count, length, seed):
    numbers = random.Random(f"{seed} {length}")
    return [[numbers.randrange(10, VOCABULARY) for _ in range(length)] for _ in range(count)]


def milliseconds(times):
    return f"{1e3 * statistics.median(times):.0f} ms ({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"


def load(args, folder):
    store = folder / "store"
    store.mkdir()
    first, second = [Server(args, folder / name, f"file://{store}") for name in ("first", "second")]
    cold = Server(args, None)
    # Servers measure how fast they compute before they decide whether loading is faster.
    for server in (first, second, cold):
        for prompt in make_prompts(2, 512, f"warm-up {id(server)}"):
            server.ask(prompt, 4)
    sets = {length: make_prompts(args.prompts, length, "load") for length in args.lengths}
    for prompts in sets.values():
        for prompt in prompts:
            first.ask(prompt, 4)
    # Waits for the uploads. Only the server that has uploaded the prompts knows that they are
    # stored.
    first.wait_for([prompt for prompts in sets.values() for prompt in prompts])
    for length, prompts in sets.items():
        compare(f"{length} tokens", second, cold, prompts)
    length = max(args.lengths)
    compare(f"{length} tokens that are nowhere", second, cold, make_prompts(args.prompts, length, "nowhere"))
    for server in (first, second, cold):
        server.stop()
    load_slowly(args, folder, max(args.lengths))


def compare(name, server, cold, prompts):
    """Measures the time to the first token of a server with a store and of one without, by
    turns."""
    loaded, computed, cached = [], [], []
    for number, prompt in enumerate(prompts):
        answers = {}
        for one in (server, cold) if number % 2 else (cold, server):
            answers[one] = one.ask(prompt, 16)
        assert answers[server]["ids"] == answers[cold]["ids"], "the answers differ"
        loaded.append(answers[server]["times"][0])
        computed.append(answers[cold]["times"][0])
        cached.append(answers[server]["cached"])
    ratio = statistics.median(computed) / statistics.median(loaded)
    print(f"{name}: first token with the store {milliseconds(loaded)}, without {milliseconds(computed)}, "
          f"{ratio:.2f} times; {statistics.median(cached)} tokens loaded; equal answers", flush=True)


def load_slowly(args, folder, length):
    """A store that takes longer than computing."""
    store = SlowStore(args.slow)
    first, second = [Server(args, folder / f"slow {name}", "s3://bucket/cache", store.environment()) for name in "ab"]
    for prompt in make_prompts(2, 512, "slow warm-up"):
        second.ask(prompt, 4)
    prompts = make_prompts(args.prompts, length, "slow")
    expected = [first.ask(prompt, 16) for prompt in prompts]
    second.wait_for(prompts)
    answers = [second.ask(prompt, 16) for prompt in prompts]
    assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in expected], "the answers differ"
    times, computed = ([answer["times"][0] for answer in some] for some in (answers, expected))
    print(f"store of {args.slow / 1e6:.1f} MB/s, {length} tokens: first token after {milliseconds(times)}, "
          f"of the first prompt {1e3 * times[0]:.0f} ms, computed {milliseconds(computed)}; "
          f"tokens loaded: {[answer['cached'] for answer in answers]}", flush=True)
    for server in (first, second):
        server.stop()
    store.shutdown()


def all_at_once(server, prompts, tokens, clients=8):
    """Asks a server, several prompts at a time. Returns the answers and the time."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: server.ask(prompt, tokens), prompts))
    return answers, time.perf_counter() - begin


def at_the_same_time(*calls):
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(*call) for call in calls]]


def gaps(answers):
    return sorted(b - a for answer in answers for a, b in zip(answer["times"], answer["times"][1:]))


def split(args, folder):
    store = folder / "store"
    store.mkdir()
    prefill, decode = [Server(args, folder / name, f"file://{store}") for name in ("prefill", "decode")]
    both = [Server(args, None) for _ in range(2)]
    for server in (prefill, decode, *both):
        all_at_once(server, make_prompts(2, 512, f"warm-up {id(server)}"), 4)
    length, tokens = args.lengths[0], args.tokens
    batches = [make_prompts(args.prompts, length, f"split {turn}") for turn in range(args.turns + 1)]
    all_at_once(prefill, batches[0], 1)
    results = []
    for turn in range(args.turns):
        decode.wait_for(batches[turn])
        prompts, half = batches[turn], args.prompts // 2

        def run_split():
            computed, decoded = at_the_same_time(
                (all_at_once, prefill, batches[turn + 1], 1), (all_at_once, decode, prompts, tokens)
            )
            return decoded[0], computed[1], decoded[1]

        def run_both():
            parts = at_the_same_time(
                (all_at_once, both[0], prompts[:half], tokens, 4), (all_at_once, both[1], prompts[half:], tokens, 4)
            )
            return parts[0][0] + parts[1][0], parts[0][1], parts[1][1]

        answers = {}
        for run in (run_split, run_both) if turn % 2 else (run_both, run_split):
            answers[run] = run()
        (apart, computing, decoding), (together, *times) = answers[run_split], answers[run_both]
        assert [a["ids"] for a in apart] == [a["ids"] for a in together], "the answers differ"
        loaded = statistics.median(answer["cached"] for answer in apart)
        results.append((max(computing, decoding), computing, decoding, max(times), gaps(apart), gaps(together)))
        print(f"turn {turn + 1}: split {computing:.1f} s of prefill, {decoding:.1f} s of decoding "
              f"({loaded} tokens loaded); both {max(times):.1f} s", flush=True)
    median = lambda index: statistics.median(result[index] for result in results)
    share = lambda index, part: 1e3 * statistics.median(r[index][int(part * (len(r[index]) - 1))] for r in results)
    print(f"median of {args.turns}, {args.prompts} prompts of {length} tokens, answers of {tokens}: split "
          f"{median(0):.1f} s (prefill {median(1):.1f}, decoding {median(2):.1f}), both {median(3):.1f} s; time "
          f"between tokens p50 and p99: split {share(4, 0.5):.0f} and {share(4, 0.99):.0f} ms, both "
          f"{share(5, 0.5):.0f} and {share(5, 0.99):.0f} ms; equal answers")
    for server in (prefill, decode, *both):
        server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "split"])
    parser.add_argument("binary", help="the command stolon")
    parser.add_argument("--model", default="random:100m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer of `split`")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--slow", type=float, default=5e5, help="bytes per second of the slow store")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"load": load, "split": split}[args.what](args, pathlib.Path(folder))


if __name__ == "__main__":
    main()
