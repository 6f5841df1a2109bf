"""Compares Stolon with llama.cpp on real, trained models: the same files, in one run.

Not part of CI; `.ci/deep` runs all tasks except `speed`. Needs the packages of rivals.py:

    venv/bin/pip install gguf numpy
    CMAKE_ARGS="-DGGML_NATIVE=ON" venv/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    cargo build --release -p stolon-cli          # and here, for speed: cargo build --release
    venv/bin/python ../../crates/models/checkpoint/tests/fetch_models.py models
    venv/bin/python real.py models

Tasks:

    perplexity  of English documentation and of Python sources, which come with Python, for each file
                and for its weights widened to F16 with an f32 KV cache; fails if it differs from
                llama.cpp's by more than the limits
    kv          the same with each type of KV cache of both engines, in windows of --window tokens:
                the difference from the engine's own f32
    greedy      continuations of prompts (--prompts): how often the first token is the same, and how many tokens
                agree, next to the same figures of llama.cpp with another type of KV cache
    chat        a conversation of ten turns with SmolLM2, whose answers with a warm cache equal those of
                a server that has just started
    questions   how SmolLM2's answers to ten everyday questions end, by themselves or in a loop, with the
                defaults of both engines; fails if too many of Stolon's do not end (questions.py)
    speed       tokens per second of prefill and decode, time to the first tokens of 1, 4 and 16 prompts,
                time to load and resident memory
"""

import argparse
import http.client
import json
import math
import os
import pathlib
import pydoc_data.topics
import re
import statistics
import subprocess
import sys
import sysconfig
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "crates" / "models" / "checkpoint" / "tests"))
import fetch_models  # noqa: E402
import layout  # noqa: E402
import questions  # noqa: E402

WINDOW = 512
# Largest relative difference from the perplexity of llama.cpp with F16 weights, and with the
# weights of the file the largest relative excess over it. There it may be smaller by any amount:
# llama.cpp rounds activations to 8 bits in blocks of 256 for K-quants, Stolon in blocks of 32.
LIMIT_F16, LIMIT_STORED = 0.002, 0.005
CONTINUATION = 64
QUESTIONS = [
    "Name the seven days of the week.", "What is gravity?", "What colour is the sky on a clear day?",
    "Which city is the capital of France?", "Who wrote Romeo and Juliet?", "What is 2 + 3?",
    "Write one sentence about the sea.", "Now one about mountains.", "What was my first question?",
    "Thank you. Say goodbye.",
]


def texts():
    """English documentation and source code, which come with Python, by name."""
    english = re.sub(r"\n{3,}", "\n\n", "\n".join(pydoc_data.topics.topics.values()))
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    code = "".join((library / name).read_text() for name in ("argparse.py", "textwrap.py", "heapq.py"))
    return {"English": english[:60_000], "code": code[:60_000]}


class Stolon:
    """A running `stolon serve`."""

    def __init__(self, binary, model, *arguments):
        command = [binary, "serve", "--port", "0", "--model", model, *arguments]
        begun = time.perf_counter()
        self.process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if line.startswith("listening on "):
                address = line.split("//")[1].strip()
                break
        else:
            sys.exit(f"{command} did not start")
        self.load = time.perf_counter() - begun
        self.address = address

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def post(self, path, body):
        # A connection that was idle while llama.cpp computed may have been closed.
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        if reply.status != 200:
            sys.exit(f"{path}: {reply.status} {text[:500]}")
        return json.loads(text)

    def count(self, text):
        """The number of tokens of a text."""
        body = {"prompt": text, "max_tokens": 1, "temperature": 0}
        return self.post("/v1/completions", body)["usage"]["prompt_tokens"]

    def score(self, tokens):
        """The sum of the log-probabilities of all tokens except the first."""
        body = {"prompt": tokens, "echo": True, "logprobs": 0, "max_tokens": 0}
        choice = self.post("/v1/completions", body)["choices"][0]
        return math.fsum(choice["logprobs"]["token_logprobs"][1:])

    def continuation(self, tokens):
        """The strings of the tokens of a greedy continuation."""
        body = {"prompt": tokens, "max_tokens": CONTINUATION, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        return self.post("/v1/completions", body)["choices"][0]["logprobs"]["tokens"]

    def resident(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024


class Llama:
    """A model in llama.cpp, through its C interface. `kv_type` is that of keys and values, or the two
    with a slash between them; `positions`, how many the cache holds."""

    def __init__(self, path, threads, kv_type="F16", positions=2 * WINDOW):
        import ctypes

        import llama_cpp as lc
        import numpy

        self.ctypes, self.lc, self.numpy = ctypes, lc, numpy
        self.quiet = lc.llama_log_callback(lambda *_: None)
        lc.llama_log_set(self.quiet, ctypes.c_void_p(0))
        lc.llama_backend_init()
        self.model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = positions, 2 * WINDOW, 2 * WINDOW
        params.n_threads = params.n_threads_batch = threads
        params.type_k, params.type_v = (
            getattr(lc, f"GGML_TYPE_{part}") for part in (kv_type.split("/") * 2)[:2]
        )
        self.context = lc.llama_init_from_model(self.model, params)
        self.memory = lc.llama_get_memory(self.context)
        self.vocabulary = lc.llama_model_get_vocab(self.model)
        self.vocab_size = lc.llama_vocab_n_tokens(self.vocabulary)
        self.batch = lc.llama_batch_init(2 * WINDOW, 0, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lc.llama_batch_free(self.batch)
        self.lc.llama_free(self.context)
        self.lc.llama_model_free(self.model)

    def tokens(self, text, add_special=False):
        data = text.encode()
        out = (self.lc.llama_token * (len(data) + 8))()
        count = self.lc.llama_tokenize(self.vocabulary, data, len(data), out, len(out), add_special, False)
        return list(out[:count])

    def begin(self):
        """The tokens that a text begins with: the beginning-of-sequence token, if the model has one."""
        return self.tokens("", add_special=True)

    def logits(self, tokens, start, wanted):
        """Computes tokens at the positions from `start` on, and the logits of all of them or of the
        last."""
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = start + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = wanted == "all" or i + 1 == len(tokens)
        if self.lc.llama_decode(self.context, self.batch) != 0:
            sys.exit("llama_decode failed")
        rows = range(len(tokens)) if wanted == "all" else [len(tokens) - 1]
        array = self.numpy.ctypeslib.as_array
        return [array(self.lc.llama_get_logits_ith(self.context, i), (self.vocab_size,)) for i in rows]

    def score(self, tokens):
        self.lc.llama_memory_clear(self.memory, True)
        total = []
        for start in range(0, len(tokens) - 1, 2 * WINDOW):
            rows = self.logits(tokens[start : start + 2 * WINDOW], start, "all")
            for row, token in zip(rows, tokens[start + 1 :]):
                row = row.astype(self.numpy.float64)
                largest = row.max()
                total.append(row[token] - largest - math.log(self.numpy.exp(row - largest).sum()))
        return math.fsum(total)

    def continuation(self, tokens):
        self.lc.llama_memory_clear(self.memory, True)
        answer, start, last = [], 0, tokens
        for _ in range(CONTINUATION):
            row = self.logits(last, start, "last")[0]
            start += len(last)
            last = [int(row.argmax())]
            answer.append(self.text(last[0]))
        return answer

    def text(self, token):
        out = self.ctypes.create_string_buffer(256)
        length = self.lc.llama_token_to_piece(self.vocabulary, token, out, len(out), 0, True)
        return out.raw[: max(length, 0)].decode(errors="replace")


def widened(path, weights="F16"):
    """A copy of a GGUF file with its matrices in F16 or BF16; vectors stay as they are."""
    import gguf
    from gguf import GGMLQuantizationType as Type

    target = path.with_name(f"{path.stem}.widened-{weights.lower()}.gguf")
    if target.exists():
        return target
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type)
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if stored not in (Type.F32, Type.F16):
            data, stored = gguf.quants.dequantize(data, stored), Type[weights]
            data = gguf.quants.quantize(data, stored)
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def perplexity_of(engine, windows):
    scored = sum(len(window) - 1 for window in windows)
    return math.exp(-math.fsum(engine.score(window) for window in windows) / scored)


def perplexity(options, path, kinds):
    """One row for each text and kind of weights. Returns whether all are within the limits."""
    print(f"\n### Perplexity of {path.name}, windows of {WINDOW} tokens\n")
    print("| text | weights, KV | tokens | Stolon | llama.cpp | difference |\n|---|---|---|---|---|---|")
    right = True
    for kind, file, kv_type, least, most in kinds:
        with Llama(file, options.threads, kv_type) as llama, Stolon(
            options.stolon, file, "--kv-dtype", kv_type.lower()
        ) as stolon:
            for name, text in texts().items():
                tokens, begin = llama.tokens(text), llama.begin()
                if stolon.count(text[:20_000]) != len(llama.tokens(text[:20_000], add_special=True)):
                    print(f"{path.name}: the tokens of {name} differ")
                    right = False
                tokens = tokens[: options.tokens]
                windows = [begin + tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]
                scored = sum(len(window) - 1 for window in windows)
                ours, theirs = (perplexity_of(engine, windows) for engine in (stolon, llama))
                difference = ours / theirs - 1
                right &= least <= difference <= most
                print(f"| {name} | {kind} | {scored:,} | {ours:.4f} | {theirs:.4f} | {difference:+.3%} |", flush=True)
    return right


def kv_types(options, path):
    """Perplexity with each type of KV cache, and its difference from the engine's own f32."""
    print(f"\n### Perplexity of {path.name} by KV type, windows of {options.window:,} tokens\n")
    print("| KV | " + " | ".join(f"{name} | " for name in texts()) + " |\n|---|" + "---|---|" * len(texts()))
    with Stolon(options.stolon, path) as stolon:
        windows = {}
        for name, text in texts().items():
            tokens = stolon.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
            begin = stolon.post("/tokenize", {"prompt": ""})["tokens"]
            tokens, step = tokens[: options.tokens], options.window - len(begin)
            windows[name] = [begin + tokens[i : i + step] for i in range(0, len(tokens), step)]

    def rows(name, kv_types, engine):
        exact = {}
        for kv_type in kv_types:
            row = [f"{name}, {kv_type}"]
            with engine(kv_type) as opened:
                for text, parts in windows.items():
                    got = perplexity_of(opened, parts)
                    row += [f"{got:.4f}", f"{got / exact.setdefault(text, got) - 1:+.3%}"]
            print("| " + " | ".join(row) + " |", flush=True)

    rows("Stolon", options.kv_types, lambda kv_type: Stolon(options.stolon, path, "--kv-dtype", kv_type))
    rows(
        "llama.cpp",
        options.llama_kv_types,
        lambda kv_type: Llama(path, options.threads, kv_type, options.window),
    )


def agreement(first, second):
    """The share of equal first tokens, and the mean number of tokens until the first difference."""
    def common(a, b):
        return next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), len(a))

    pairs = [common(a, b) for a, b in zip(first, second)]
    return sum(length > 0 for length in pairs) / len(pairs), statistics.mean(pairs)


def greedy(options, path):
    print(f"\n### Greedy continuations of {options.prompts} prompts, {CONTINUATION} tokens, {path.name}\n")
    step = 100_000 // options.prompts
    with Llama(path, options.threads) as llama:
        begin = llama.begin()
        excerpts = [llama.tokens(text[at : at + 400]) for text in texts().values() for at in range(0, 50_000, step)]
        prompts = [begin + tokens[:64] for tokens in excerpts]
        reference = [llama.continuation(prompt) for prompt in prompts]
    with Llama(path, options.threads, "F32") as llama:
        noise = [llama.continuation(prompt) for prompt in prompts]
    with Stolon(options.stolon, path) as stolon:
        ours = [stolon.continuation(prompt) for prompt in prompts]
        again = [stolon.continuation(prompt) for prompt in prompts]
    print("| compared with llama.cpp, KV in F16 | same first token | tokens until they differ |\n|---|---|---|")
    for name, answers in (("Stolon", ours), ("llama.cpp, KV in F32", noise)):
        equal, length = agreement(answers, reference)
        print(f"| {name} | {equal:.0%} | {length:.1f} |")
    return ours == again


def chat(options, path):
    """Ten turns with one server, and each turn with a server that has just started."""
    print(f"\n### Ten turns with {path.name}\n")
    messages, right = [], True

    def answer(server):
        body = {"messages": messages, "temperature": 0, "max_tokens": 80}
        return server.post("/v1/chat/completions", body)

    with Stolon(options.stolon, path) as warm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            reply = answer(warm)
            text = reply["choices"][0]["message"]["content"]
            with Stolon(options.stolon, path) as cold:
                right &= answer(cold)["choices"][0]["message"]["content"] == text
            usage = reply["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"- {question} **{text.strip()[:70]!r}** ({cached} of {usage['prompt_tokens']} cached)")
            messages.append({"role": "assistant", "content": text})
    print("\nWarm and cold answers are equal." if right else "\nWarm and cold answers DIFFER.")
    return right and "Wednesday" in messages[1]["content"]


def speed(options, paths):
    """Measures the speed of Stolon and llama.cpp by turns, as in rivals.py."""
    import rivals

    # The number of tokens, or None if the table shows the time.
    works = {
        "prefill 512": 512, "prefill 1088": 1088, "decode 1 16": 1, "decode 4 16": 4, "decode 16 8": 16,
        "first 1 128": None, "first 4 128": None, "first 16 128": None,
    }
    headings = [
        "prefill 512", "prefill 1,088", "decode of 1", "of 4", "of 16",
        "first tokens of 1 × 128, ms", "of 4", "of 16", "load, s", "resident, MB",
    ]
    print("\n### Tokens per second and times, medians, Stolon / llama.cpp = how many times as fast\n")
    print("| file | " + " | ".join(headings) + " |\n|---|" + "---|" * len(headings))
    for path in paths:
        arguments = [path, options.threads]
        llama = [sys.executable, HERE / "worker_llama.py", *arguments, *["plain"] * options.plain]
        commands = ([options.worker, *arguments], llama)
        engines = [rivals.Engine(str(command[0]), [*map(str, command)], {}) for command in commands]
        engines = [rivals.stop_idle(engine) for engine in engines]
        times = {work: ([], []) for work in works}
        for round in range(options.rounds + 1):
            for work in works:
                for engine, seconds in zip(engines, times[work]):
                    with rivals.turn(engine):
                        taken = engine.ask(work)
                    if round > 0:
                        seconds.append(taken)
        cells = []
        for work, tokens in works.items():
            ours, theirs = map(statistics.median, times[work])
            if tokens:
                cells.append(f"{tokens / ours:.0f} / {tokens / theirs:.0f} = {theirs / ours:.2f}")
            else:
                cells.append(f"{ours * 1000:.0f} / {theirs * 1000:.0f} = {theirs / ours:.2f}")
        cells.append(" / ".join(f"{engine.load:.2f}" for engine in engines))
        cells.append(" / ".join(f"{rivals.resident(engine.process) >> 20}" for engine in engines))
        print(f"| {path.name} | " + " | ".join(cells) + " |", flush=True)
        for engine in engines:
            with rivals.turn(engine):
                engine.close()
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=pathlib.Path, help="folder of fetch_models.py")
    parser.add_argument("--tasks", nargs="*", default=["perplexity", "kv", "greedy", "chat", "questions", "speed"])
    parser.add_argument("--stolon", type=pathlib.Path, default=ROOT / "target/release/stolon", help="the command")
    parser.add_argument("--worker", type=pathlib.Path, default=HERE / "target/release/stolon-rivals")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=10_240, help="tokens of each text")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of `greedy`, half of them from each text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="answers to each question of `questions`")
    parser.add_argument("--stolon-only", action="store_true", help="do not give `questions` to llama.cpp")
    parser.add_argument("--window", type=int, default=4096, help="tokens of a window of `kv`")
    types = ["f32", "bf16", "f16", "int8", "k8v4", "int4"]
    parser.add_argument("--kv-types", nargs="*", default=types, help="types of `kv`, the exact one first")
    theirs = ["F32", "Q8_0", "Q8_0/Q4_0", "Q4_0"]
    parser.add_argument("--llama-kv-types", nargs="*", default=theirs, help="the same of llama.cpp")
    options = parser.parse_args()
    files = [options.models / name for name in fetch_models.FILES]
    options.plain = layout.keep_off_tiles(files[0])
    right = True
    for path in files:
        if "perplexity" in options.tasks:
            kinds = [
                ("as stored, f16", path, "F16", -math.inf, LIMIT_STORED),
                ("F16, f32", widened(path), "F32", -LIMIT_F16, LIMIT_F16),
            ]
            right &= perplexity(options, path, kinds)
        if "kv" in options.tasks:
            kv_types(options, path)
        if "greedy" in options.tasks:
            right &= greedy(options, path)
    if "chat" in options.tasks:
        right &= chat(options, options.models / fetch_models.SMOLLM2)
    if "questions" in options.tasks:
        # The other file is a base model, which has no chat template.
        smollm2 = options.models / fetch_models.SMOLLM2
        for path in (smollm2, widened(smollm2)):
            right &= questions.questions(options, Stolon, path)
    if "speed" in options.tasks:
        speed(options, [file for path in files for file in (path, widened(path))])
    sys.exit(0 if right else "some results are not as expected")


if __name__ == "__main__":
    main()
