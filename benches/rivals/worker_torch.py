"""The PyTorch worker of rivals.py: MODEL_DIRECTORY THREADS. Commands as in src/main.rs."""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

CONTEXT = 512


class Worker:
    def __init__(self, path, threads):
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.vocab = self.model.config.vocab_size
        self.caches = {}
        self.layer = None

    def run(self, ids, cache):
        with torch.inference_mode():
            return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def prompt(self, count, sequences):
        return (torch.arange(count) * 31 % self.vocab).repeat(sequences, 1)

    def prefill(self, count):
        ids = self.prompt(count, 1)
        begun = time.perf_counter()
        self.run(ids, DynamicCache(config=self.model.config))
        return time.perf_counter() - begun

    def decode(self, sequences, steps):
        if sequences not in self.caches:
            cache = DynamicCache(config=self.model.config)
            self.run(self.prompt(CONTEXT, sequences), cache)
            self.caches[sequences] = cache
        cache = self.caches[sequences]
        if cache.get_seq_length() > CONTEXT:
            cache.crop(CONTEXT - cache.get_seq_length())
        ids = torch.arange(sequences)[:, None]
        begun = time.perf_counter()
        for _ in range(steps):
            ids = self.run(ids, cache)[:, -1].argmax(-1)[:, None]
        return (time.perf_counter() - begun) / steps

    def linear(self, rows):
        """The layer of src/bin/linear.rs; the fastest of three."""
        if not self.layer:
            self.layer = torch.nn.Linear(2048, 6144, bias=False, dtype=torch.bfloat16)
        x = torch.rand(rows, 2048).to(torch.bfloat16)

        def run():
            begun = time.perf_counter()
            self.layer(x)
            return time.perf_counter() - begun

        with torch.inference_mode():
            return min(run() for _ in range(3))


def main():
    begun = time.perf_counter()
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    seconds = time.perf_counter() - begun
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"ready {seconds:.3f} torch {torch.__version__} {capability}", flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(f"{getattr(worker, name)(*map(int, numbers)):.6f}", flush=True)


main()
