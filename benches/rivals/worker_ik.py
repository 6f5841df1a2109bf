"""The ik_llama.cpp worker of rivals.py and real.py: FOLDER MODEL.gguf THREADS [repack]. Commands as in src/main.rs.

FOLDER has the programs `llama-bench` and `llama-batched-bench`, built with -DGGML_NATIVE=ON. Each command
runs one of them, with its defaults (f16 keys and values, flash attention), and loads the model anew, which is
not counted. `repack` interleaves the rows of all weights at load (`-rtr`), which its authors recommend on CPUs.
"""

import json
import pathlib
import re
import subprocess
import sys
import time

CONTEXT = 512


class Worker:
    def __init__(self, folder, path, threads, repack):
        self.folder = pathlib.Path(folder)
        self.common = ["-m", path, "-t", threads]
        self.repack = repack

    def run(self, program, *arguments):
        """What a program prints: its results, then its log."""
        command = [self.folder / program, *self.common, *map(str, arguments)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return result.stdout, result.stderr

    def bench(self, *arguments):
        """The seconds that `llama-bench` measures for one test."""
        (result,) = json.loads(self.run("llama-bench", "-r", 1, "-o", "json", "-rtr", int(self.repack), *arguments)[0])
        return result["avg_ns"] / 1e9

    def batched(self, sequences, prompt, steps):
        """The seconds for the prompts of all sequences and for `steps` tokens of each."""
        shape = ["-npp", prompt, "-ntg", steps, "-npl", sequences, "-c", sequences * (prompt + steps), "-b", 2048]
        output = self.run("llama-batched-bench", *shape, *(["-rtr"] if self.repack else []))
        row = re.search(rf"^\| *{prompt} \| *{steps} \| *{sequences} \|(.*)$", "".join(output), re.MULTILINE)
        _, prompts, _, tokens, *_ = row[1].split("|")
        return float(prompts), float(tokens)

    def prefill(self, count):
        return self.bench("-p", count, "-n", 0)

    def first(self, sequences, count):
        return self.batched(sequences, count, 1)[0]

    def decode(self, sequences, steps):
        return self.batched(sequences, CONTEXT, steps)[1] / steps

    def deep(self, depth, steps):
        return self.bench("-p", 0, "-n", 0, "-gp", f"{depth},{steps}") / steps


def main():
    worker = Worker(*sys.argv[1:4], "repack" in sys.argv)
    begun = time.perf_counter()
    worker.bench("-p", 1, "-n", 0)
    print(f"ready {time.perf_counter() - begun:.3f} the programs of {worker.folder}", flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(f"{getattr(worker, name)(*map(int, numbers)):.6f}", flush=True)


main()
