"""Compares Stolon with llama.cpp, ik_llama.cpp, PyTorch and OpenVINO GenAI on random weights of a shape of weights.py.

Not part of the build or of CI. Needs Python 3.10 or later and about 3 GB of disk space:

    python3 -m venv venv
    venv/bin/pip install torch transformers safetensors gguf numpy
    CMAKE_ARGS="-DGGML_NATIVE=ON" venv/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    cargo build --release --bins
    venv/bin/python rivals.py --rounds 5

Each engine is a separate process that is stopped while the others run, since the threads of some wait for
work by spinning. In each round every engine runs every task in turn, so that other load on the machine
affects all of them alike. The table shows medians, and the fastest run in brackets.

If a virtual machine traps llama.cpp's AMX int8 instructions, leave `llama-q8` out of --engines and use
`llama-q8-plain`; if it traps PyTorch's AMX instructions, set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16. OpenVINO
(`openvino`, `openvino-int8`, `openvino-int4`) and ik_llama.cpp (`ik-bf16`, and others with --ik) run if they
are named; worker_openvino.py and worker_ik.py say what they need. So do `stolon`, `llama` and `ik` with weights
in Q4_0 (`-q4`), Q4_K_M (`-q4km`) and IQ4_XS (`-iq4`). Behind those of ik_llama.cpp, `-repack` may follow.
"""

import argparse
import atexit
import contextlib
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time

import weights

HERE = pathlib.Path(__file__).resolve().parent
# Command, column heading, tokens per run.
WORKS = [
    ("prefill 512", "prefill 512", 512),
    ("prefill 1088", "prefill 1,088", 1088),
    ("prefill 2048", "prefill 2,048", 2048),
    ("prefill 8192", "prefill 8,192", 8192),
    ("decode 1 16", "decode of 1", 1),
    ("decode 4 16", "decode of 4", 4),
    ("decode 8 16", "decode of 8", 8),
    ("decode 16 16", "decode of 16", 16),
    ("deep 4096 16", "at 4,096", 1),
    ("deep 16384 16", "at 16,384", 1),
]
# Weights in GGUF files.
TYPES = {"bf16": "BF16", "q8": "Q8_0", "q4": "Q4_0", "q4km": "Q4_K_M", "iq4": "IQ4_XS"}
LINEAR = [(f"linear {rows}", f"{rows} rows", rows) for rows in (1, 8, 64, 512)]
LINEAR_ENGINES = ["stolon-bf16", "torch", "stolon-f32", "gemm-f32", "matrixmultiply-f32"]
MODEL_ENGINES = ["stolon", "stolon-avx512", "stolon-avx2", "stolon-q8", "torch", "llama-bf16", "llama-q8"]


def family(process):
    """The ids of a process and of the processes that it started."""
    found = [process.pid]
    for pid in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def resident(process):
    """Bytes of memory of a process and of the processes that it started."""
    status = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in family(process)]
    return sum(int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024 for text in status)


def send(process, number):
    """Sends a signal to a process that has not ended, and to the processes that it started."""
    if process.poll() is None:
        for pid in family(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def stop_idle(engine):
    """Stops an engine outside its turns, and ends it with this command."""
    atexit.register(send, engine.process, signal.SIGKILL)
    send(engine.process, signal.SIGSTOP)
    return engine


@contextlib.contextmanager
def turn(engine):
    """Lets an engine run that `stop_idle` has stopped."""
    send(engine.process, signal.SIGCONT)
    try:
        yield engine
    finally:
        send(engine.process, signal.SIGSTOP)


class Engine:
    """A worker process that answers each command with a number or a list: the seconds it took."""

    def __init__(self, name, command, environment):
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if "RIVALS_VERBOSE" in os.environ else subprocess.DEVNULL,
            env={**os.environ, **environment},
            text=True,
        )
        answer = self.process.stdout.readline().split(maxsplit=2)
        if not answer or answer[0] != "ready":
            raise SystemExit(f"{name} did not start: {' '.join(map(str, command))}")
        self.load, self.description = float(answer[1]), answer[2].strip()

    def ask(self, work):
        self.process.stdin.write(work + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended in `{work}`: {self.process.wait()}")
        return json.loads(answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def engines(folder, stolon, ik, threads, names):
    python = [sys.executable]
    llama = lambda kind: [*python, HERE / "worker_llama.py", folder / f"{kind}.gguf", threads]
    openvino = lambda kind: [*python, HERE / "worker_openvino.py", folder / "hf", threads, kind]
    ik_llama = lambda kind, *repack: [*python, HERE / "worker_ik.py", ik, folder / f"{kind}.gguf", threads, *repack]
    own = lambda model: [stolon, folder / model, threads]
    known = {
        "stolon": (own("hf"), {}),
        "stolon-avx512": (own("hf"), {"STOLON_CPU_PATH": "avx512"}),
        "stolon-avx2": (own("hf"), {"STOLON_CPU_PATH": "avx2"}),
        "torch": ([*python, HERE / "worker_torch.py", folder / "hf", threads], {}),
        "openvino": (openvino("fp16"), {}),
        "openvino-int8": (openvino("int8"), {}),
        "openvino-int4": (openvino("int4"), {}),
        "llama-q8-plain": ([*llama("Q8_0"), "plain"], {}),
    }
    for suffix, kind in TYPES.items():
        if any(suffix in name.split("-") for name in names):
            weights.quantized(folder, kind)
        known[f"stolon-{suffix}"] = (own(f"{kind}.gguf"), {})
        known[f"llama-{suffix}"] = (llama(kind), {})
        known[f"ik-{suffix}"] = (ik_llama(kind), {})
        known[f"ik-{suffix}-repack"] = (ik_llama(kind, "repack"), {})
    for library in ("stolon-bf16", "stolon-f32", "gemm-f32", "matrixmultiply-f32"):
        environment = {"MATMUL_NUM_THREADS": threads}
        known[library] = ([stolon.with_name("linear"), library, threads], environment)
    for name in names:
        command, environment = known[name]
        yield stop_idle(Engine(name, [str(word) for word in command], environment))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=HERE / "weights", help="folder for the random weights")
    parser.add_argument("--stolon", type=pathlib.Path, default=HERE / "target/release/stolon-rivals", help="the Stolon worker")
    parser.add_argument("--ik", type=pathlib.Path, help="folder with the programs of ik_llama.cpp")
    parser.add_argument("--shape", default="qwen3", choices=weights.SHAPES, help="shape of the weights")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up")
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))), help="threads per engine")
    parser.add_argument("--engines", nargs="*", help="engines to run; default: those of bf16 and 8 bits, without OpenVINO")
    parser.add_argument("--linear", action="store_true", help="run one linear layer instead of a whole model")
    parser.add_argument("--works", nargs="*", help="run only tasks that begin with one of these words; default: all")
    options = parser.parse_args()

    folder = weights.make(options.folder, options.shape)
    chosen = options.works or [""]
    all_works = LINEAR if options.linear else WORKS
    works = [work for work in all_works if any(work[0].startswith(start) for start in chosen)]
    names = options.engines or (LINEAR_ENGINES if options.linear else MODEL_ENGINES)
    running = list(engines(folder, options.stolon, options.ik, options.threads, names))
    for engine in running:
        print(f"{engine.name}: ready after {engine.load:.1f} s; {engine.description}")
    times = {(engine.name, work[0]): [] for engine in running for work in works}
    # The first round warms everything up and is not counted.
    for round in range(options.rounds + 1):
        for work, _, _ in works:
            for engine in running:
                with turn(engine):
                    time.sleep(0.05)
                    seconds = engine.ask(work)
                if round > 0:
                    times[engine.name, work].append(seconds)
    for engine in running:
        with turn(engine):
            engine.close()

    # For a linear layer, a token is a row of activations.
    print(f"\nTokens per second, {options.threads} threads, median of {options.rounds} (best):\n")
    print("| |" + "".join(f" {heading} |" for _, heading, _ in works))
    print("|---|" + "---|" * len(works))
    for engine in running:
        cells = []
        for work, _, tokens in works:
            seconds = times[engine.name, work]
            cells.append(f" {tokens / statistics.median(seconds):.1f} ({tokens / min(seconds):.1f}) |")
        print(f"| {engine.name} |" + "".join(cells))


if __name__ == "__main__":
    main()
