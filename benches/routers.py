"""Two workers behind a router of another project: routing by KV events against round robin.

    python3 -m venv venv && venv/bin/pip install vllm-router==0.1.17
    venv/bin/python benches/routers.py vllm target/release/stolon
    venv/bin/python benches/routers.py dynamo target/dynamo/release/stolon-dynamo
    venv/bin/python benches/routers.py dynamo-relay target/release/stolon

`vllm` is the router of the vLLM project in front of two `stolon serve`, built with the feature `fleet`.
`dynamo` is the frontend of NVIDIA Dynamo (packages ai-dynamo and ai-dynamo-runtime, with file discovery) in
front of two `stolon-dynamo`, and `dynamo-relay` in front of two `stolon serve`, each with a
`crates/serve/fleet/dynamo/relay.py`. Each run starts new workers and a new router, and the policies take turns.

The model has the tokenizer of the demo model and random weights, because only the time matters;
--layers and --hidden set its size. The KV pool of a worker holds two thirds of the prefixes of
`groups`: they do not all fit into one worker, but into both together. A word is about two tokens.
The workloads:

  groups  64 groups of prompts, which begin with the same 400 words and end with 64 different ones
  agents  8 agents at a time, 12 turns each. A prompt is the conversation so far; all begin alike.

With --check, nothing is measured. Each worker has room for everything, and the router has to send a request
to the worker that holds its prefix. Then a worker is killed (SIGKILL) in mid-load and started again, and the
router is restarted. Each answer is compared with the first one to the same prompt. An answer that differs,
and a request that fails at another time, are errors.
"""

import argparse
import collections
import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "crates" / "models" / "demo_model" / "text"
GROUPS, PREFIX, REST, ANSWER, BLOCK = 64, 400, 64, 16, 16
AGENTS, TURNS, SYSTEM, TURN = 8, 12, 400, 80
NAME = "model"
WORDS = """the worker holds a prefix and answers a request while other requests wait for their first token in
a queue of the scheduler which admits them by cost and by age until all of the blocks are in use again""".split()


def free_port():
    """A free port below 32768: Dynamo accepts no higher one for its metrics."""
    while True:
        with socket.socket() as probe:
            port = random.randrange(20_000, 32_768)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def make_model(folder, layers, hidden):
    """A model directory with the demo model's tokenizer and random weights of bfloat16."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((DEMO / "config.json").read_text())
    heads = hidden // config["head_dim"]
    config |= {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    (folder / "config.json").write_text(json.dumps(config))
    kv = config["head_dim"] * (heads // 2)
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        part = f"model.layers.{layer}."
        sizes = {"q": [hidden, hidden], "k": [kv, hidden], "v": [kv, hidden], "o": [hidden, hidden]}
        shapes |= {f"{part}self_attn.{name}_proj.weight": shape for name, shape in sizes.items()}
        biased = {"q": [hidden], "k": [kv], "v": [kv], "o": [hidden]}
        shapes |= {f"{part}self_attn.{name}_proj.bias": shape for name, shape in biased.items()}
        for name, shape in {"gate": [2 * hidden, hidden], "up": [2 * hidden, hidden], "down": [hidden, 2 * hidden]}.items():
            shapes[f"{part}mlp.{name}_proj.weight"] = shape
        shapes |= {f"{part}{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
    header, offset, numbers = {}, 0, random.Random(1)
    with open(folder / "model.safetensors", "wb") as file:
        sizes = {}
        for name, shape in shapes.items():
            sizes[name] = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + sizes[name]]}
            offset += sizes[name]
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in sizes.items():
            data = bytearray(numbers.randbytes(size))
            # The high byte of each number has its sign and its exponent: the magnitude is from
            # 0.008 to 0.03.
            data[1::2] = bytes(0x3C | byte & 0x80 for byte in data[1::2])
            file.write(data)
    return folder


class Process:
    """A program that is stopped at the end, with its output in a file."""

    def __init__(self, command, log, **environment):
        self.log = open(log, "ab")
        environment = os.environ | environment
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment)

    def wait_until_ready(self, port, path):
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        ended = "" if self.process.poll() is None else ", because its process has ended"
        log = pathlib.Path(self.log.name).read_text(errors="replace")
        raise SystemExit(f"port {port} does not answer{ended}:\n{log[-1000:]}")

    def stop(self, sign=signal.SIGTERM):
        self.process.send_signal(sign)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Fleet:
    """Two workers and a router in front of them."""

    def __init__(self, kind, binary, model, blocks, policy, folder):
        self.kind, self.binary, self.model, self.blocks, self.policy = kind, binary, model, blocks, policy
        self.folder, self.port = pathlib.Path(tempfile.mkdtemp(dir=folder)), free_port()
        self.ports = [[free_port() for _ in range(3)] for _ in range(2)]
        self.workers = [self.start_worker(number) for number in range(2)]
        self.router = self.start_router()
        self.wait()

    def flags(self):
        flags = ["--model", str(self.model), "--block-size", str(BLOCK), "--num-blocks", str(self.blocks)]
        return [*flags, "--threads", "1", "--served-model-name", NAME]

    def start_worker(self, number):
        """The processes of a worker."""
        log = self.folder / f"worker-{number}.log"
        port, events, replay = self.ports[number]
        if self.kind == "dynamo":
            return [Process([self.binary, *self.flags()], log, **self.dynamo(), DYN_SYSTEM_PORT=str(port))]
        config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}"}
        config["replay_endpoint"] = f"tcp://*:{replay}"
        command = [self.binary, "serve", "--port", str(port), *self.flags()]
        processes = [Process([*command, "--kv-events-config", json.dumps(config)], log)]
        processes[0].wait_until_ready(port, "/ready")
        if self.kind == "dynamo-relay":
            command = [sys.executable, str(ROOT / "crates/serve/fleet/dynamo/relay.py"), "--url", f"http://127.0.0.1:{port}"]
            command += ["--events", f"tcp://127.0.0.1:{events}", "--tokenizer", str(self.model)]
            processes.append(Process([*command, "--served-model-name", NAME], log, **self.dynamo()))
        return processes

    def dynamo(self):
        """The settings of Dynamo: no service but the programs themselves."""
        settings = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(self.folder / "discovery")}
        return settings | {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_LOG": "info"}

    def start_router(self):
        log = self.folder / "router.log"
        if self.kind != "vllm":
            command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
            command += ["--http-port", str(self.port), "--router-mode", self.policy]
            command += ["--migration-limit", "3"]
            return Process(command, log, **self.dynamo())
        command = [shutil.which("vllm-router", path=os.path.dirname(sys.executable))]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--policy", self.policy]
        command += ["--prometheus-port", str(free_port()), "--worker-urls"]
        command += [f"http://127.0.0.1:{port}" for port, _, _ in self.ports]
        if self.policy == "kv_aware":
            for port, events, replay in self.ports:
                command += ["--kv-event-source", f"http://127.0.0.1:{port}=tcp://127.0.0.1:{events}"]
                command += ["--kv-event-replay-source", f"http://127.0.0.1:{port}=tcp://127.0.0.1:{replay}"]
            command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", NAME]
        return Process(command, log)

    def wait(self):
        """Waits until both workers answer through the router."""
        deadline, problem = time.monotonic() + 180, None
        while time.monotonic() < deadline:
            try:
                if all(ask(self.port, "Hello", 1)["text"] is not None for _ in range(4)):
                    return
            except (OSError, ValueError, http.client.HTTPException) as error:
                problem = error
                time.sleep(0.5)
        raise SystemExit(f"the router does not answer: {problem}")

    def count(self, worker, name):
        """A counter of a worker, such as prompt_tokens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[worker][0], timeout=5)
        connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
        lines = connection.getresponse().read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"stolon:{name}_total"))

    def close(self):
        for process in (self.router, *self.workers[0], *self.workers[1]):
            process.stop()


def ask(port, prompt, tokens):
    """A streamed completion: its text, the time to its first token in seconds, and its usage."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    begin, first, text, usage, done = time.perf_counter(), None, "", None, False
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read()[:300]}")
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line[6:].strip() == b"[DONE]":
            done = True
            break
        piece = json.loads(line[6:])
        if "error" in piece:
            raise ValueError(str(piece["error"]))
        for choice in piece.get("choices", []):
            if choice.get("text"):
                first = first or time.perf_counter() - begin
                text += choice["text"]
        usage = piece.get("usage") or usage
    connection.close()
    if not done:
        raise ValueError("the answer was cut off")
    return {"text": text, "first": first or time.perf_counter() - begin, "usage": usage or {}}


def words(count, seed):
    """A text of `count` words, about twice as many tokens."""
    numbers = random.Random(seed)
    return " ".join(numbers.choice(WORDS) for _ in range(count))


def group_prompts(rounds):
    """The prompts of the groups in a random order, which is the same for all policies."""
    order = [group for group in range(GROUPS) for _ in range(rounds)]
    random.Random(5).shuffle(order)
    prefixes = [words(PREFIX, f"group {group}") for group in range(GROUPS)]
    return [f"{prefixes[group]} {words(REST, f'rest {number}')}" for number, group in enumerate(order)]


def run_groups(port, rounds, clients=8):
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: ask(port, prompt, ANSWER), group_prompts(rounds)))


def run_agents(port, _rounds):
    system = words(SYSTEM, "system")

    def agent(number):
        history, answers = f"{system} {words(TURN, f'task {number}')}", []
        for turn in range(TURNS):
            answers.append(ask(port, history, ANSWER))
            history += f" {answers[-1]['text']} {words(TURN, f'result {number} {turn}')}"
        return answers

    with concurrent.futures.ThreadPoolExecutor(AGENTS) as pool:
        return [answer for answers in pool.map(agent, range(AGENTS)) for answer in answers]


WORKLOADS = {"groups": run_groups, "agents": run_agents}


def measure(fleet, workload, rounds):
    begin = time.perf_counter()
    answers = WORKLOADS[workload](fleet.port, rounds)
    seconds = time.perf_counter() - begin
    first = sorted(answer["first"] for answer in answers)
    details = [answer["usage"].get("prompt_tokens_details") or {} for answer in answers]
    prompt = sum(answer["usage"].get("prompt_tokens", 0) for answer in answers)
    cached = sum(detail.get("cached_tokens") or 0 for detail in details)
    return {
        "p50_ms": 1e3 * statistics.median(first),
        "p90_ms": 1e3 * first[int(0.9 * (len(first) - 1))],
        "requests_per_s": len(answers) / seconds,
        "tokens_per_s": (prompt + ANSWER * len(answers)) / seconds,
        "cached": cached / max(prompt, 1),
        "texts": [answer["text"] for answer in answers],
    }


def compare(args, model, blocks, folder):
    policies = ["kv_aware", "round_robin"] if args.kind == "vllm" else ["kv", "round-robin"]
    for workload in args.workloads:
        results = {policy: [] for policy in policies}
        for turn in range(args.turns):
            # The policies take turns: A B, then B A.
            for policy in policies if turn % 2 == 0 else policies[::-1]:
                fleet = Fleet(args.kind, args.binary, model, blocks, policy, folder)
                try:
                    result = measure(fleet, workload, args.rounds)
                finally:
                    fleet.close()
                results[policy].append(result)
                figures = ", ".join(f"{name} {value:.3g}" for name, value in result.items() if name != "texts")
                print(f"{workload}, {policy}, turn {turn + 1}: {figures}", flush=True)
        texts = [result["texts"] for policy in policies for result in results[policy]]
        assert all(text == texts[0] for text in texts), "answers differ"
        for policy in policies:
            names = [name for name in results[policy][0] if name != "texts"]
            medians = {name: statistics.median(r[name] for r in results[policy]) for name in names}
            figures = ", ".join(f"{name} {value:.3g}" for name, value in medians.items())
            print(f"{workload}, {policy}, median of {args.turns}: {figures}; equal answers", flush=True)


class Load:
    """Requests that continue while processes are killed. Records the failures and their times."""

    def __init__(self, port, prompts, expected, clients=6):
        self.port, self.prompts, self.expected = port, prompts, expected
        self.stopping, self.lock = threading.Event(), threading.Lock()
        self.answered, self.failed, self.begun = 0, [], {}
        self.threads = [threading.Thread(target=self.run, args=(n,)) for n in range(clients)]
        for thread in self.threads:
            thread.start()

    def run(self, number):
        numbers = random.Random(number)
        while not self.stopping.is_set():
            index, begin = numbers.randrange(len(self.prompts)), time.monotonic()
            try:
                text = ask(self.port, self.prompts[index], ANSWER)["text"]
                assert text == self.expected[index], f"prompt {index}: {text!r}"
                with self.lock:
                    self.answered += 1
            except (OSError, ValueError, http.client.HTTPException) as error:
                with self.lock:
                    self.failed.append((begin, time.monotonic(), repr(error)[:200]))
                time.sleep(0.2)

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()


def routed(port, name):
    """The number of groups whose prefix is found by a request that continues it in a new way."""
    prompts = [f"{words(PREFIX, f'group {group}')} {words(REST, f'{name} {group}')}" for group in range(GROUPS)]
    usages = [ask(port, prompt, 1)["usage"] for prompt in prompts]
    found = sum(usage["prompt_tokens_details"]["cached_tokens"] >= PREFIX - BLOCK for usage in usages)
    print(f"{found} of {GROUPS} requests were routed to a worker that holds their prefix", flush=True)
    return found


def check(args, model, blocks, folder):
    """While processes are killed, answers are right and no request is lost except those in
    flight."""
    prompts = group_prompts(1)
    policy = "kv_aware" if args.kind == "vllm" else "kv"
    fleet = Fleet(args.kind, args.binary, model, blocks, policy, folder)
    try:
        # Several at a time, so that both workers get some.
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            expected = list(pool.map(lambda prompt: ask(fleet.port, prompt, ANSWER)["text"], prompts))
        shares = [fleet.count(number, "prompt_tokens") for number in range(2)]
        print(f"prompt tokens of the workers: {shares}", flush=True)
        assert min(shares) > 0.1 * sum(shares), "one worker got nearly everything"
        again = [ask(fleet.port, prompt, ANSWER)["text"] for prompt in prompts]
        assert again == expected, "a cached answer differs"
        # Each prefix is on one worker only, so a request has cached tokens only if it was routed
        # there.
        assert routed(fleet.port, "first") >= 0.9 * GROUPS
        load = Load(fleet.port, prompts, expected)
        kills = []
        for what in ("worker", "router"):
            time.sleep(args.seconds)
            kills.append((time.monotonic(), what))
            if what == "worker":
                for process in fleet.workers[0]:
                    process.stop(signal.SIGKILL)
                time.sleep(args.seconds)
                fleet.workers[0] = fleet.start_worker(0)
            else:
                fleet.router.stop()
                fleet.router = fleet.start_router()
                fleet.wait()
            kills.append((time.monotonic(), f"{what} is back"))
        time.sleep(args.seconds)
        load.stop()
        # The new router has learned from replays what was cached before it started.
        assert routed(fleet.port, "last") >= 0.9 * GROUPS
    finally:
        fleet.close()
    (killed, _), (back, _), (stopped, _), (up, _) = kills
    # A request is lost if a process was answering it when it was killed, or if the router sent it
    # to the process before it noticed the end. A request that finds no router is refused, not lost.
    kinds = collections.Counter()
    for begin, end, error in load.failed:
        if begin <= killed + 0.5 and killed <= end + 0.5:
            kinds["in flight when the worker was killed"] += 1
        elif begin <= stopped <= end + 0.5:
            kinds["in flight when the router was stopped"] += 1
        elif stopped <= begin <= up:
            kinds["while there was no router"] += 1
        else:
            kinds[f"other: {begin - killed:+.1f} s after the kill (back at {back - killed:+.1f}): {error}"] += 1
    print(f"{load.answered} right answers, none wrong; failed: {dict(kinds)}")
    assert load.answered > 0 and not any(kind.startswith("other") for kind in kinds), "requests were lost"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["vllm", "dynamo", "dynamo-relay"])
    parser.add_argument("binary", help="the command stolon, or stolon-dynamo")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each group")
    parser.add_argument("--turns", type=int, default=3, help="runs of each policy")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seconds", type=float, default=5, help="time between the events of --check")
    parser.add_argument("--logs", help="existing folder for the output of all processes, which is kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "model").mkdir()
        model = make_model(folder / "model", args.layers, args.hidden)
        everything = GROUPS * (2 * PREFIX // BLOCK)
        blocks = 4 * everything if args.check else 2 * everything // 3
        (check if args.check else compare)(args, model, blocks, args.logs or folder)


if __name__ == "__main__":
    main()
