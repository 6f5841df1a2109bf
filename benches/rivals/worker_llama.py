"""The llama.cpp worker of rivals.py: MODEL.gguf THREADS [plain]. Commands as in src/main.rs.

`plain` leaves weights in the file's layout, which keeps llama.cpp off its int8 tiles.
"""

import ctypes
import sys
import time

import llama_cpp as lc
import numpy

CONTEXT, POSITIONS, SEQUENCES, BATCH = 512, 2048, 16, 2048


class Worker:
    def __init__(self, path, threads, plain):
        self.quiet = lc.llama_log_callback(lambda *_: None)
        lc.llama_log_set(self.quiet, ctypes.c_void_p(0))
        lc.llama_backend_init()
        params = lc.llama_model_default_params()
        params.use_extra_bufts = not plain
        self.model = lc.llama_model_load_from_file(path.encode(), params)
        params = lc.llama_context_default_params()
        params.n_ctx = SEQUENCES * POSITIONS
        params.n_batch = BATCH
        params.n_seq_max = SEQUENCES
        # One sequence may have all positions.
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = threads
        self.context = lc.llama_init_from_model(self.model, params)
        self.memory = lc.llama_get_memory(self.context)
        self.vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        self.batch = lc.llama_batch_init(BATCH, 0, 1)
        self.cached = None

    def step(self, entries):
        """Computes (token, position, sequence, logits?) entries; waits for the result."""
        self.batch.n_tokens = len(entries)
        for i, (token, position, sequence, logits) in enumerate(entries):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = logits
        if lc.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        lc.llama_synchronize(self.context)

    def prompt(self, count, sequence):
        return [(i * 31 % self.vocab, i, sequence, i + 1 == count) for i in range(count)]

    def prefill(self, count):
        return self.first(1, count)

    def first(self, sequences, count):
        lc.llama_memory_clear(self.memory, True)
        self.cached = None
        entries = [entry for sequence in range(sequences) for entry in self.prompt(count, sequence)]
        begun = time.perf_counter()
        self.step(entries)
        for sequence in range(sequences):
            self.likeliest((sequence + 1) * count - 1)
        return time.perf_counter() - begun

    def likeliest(self, row):
        logits = lc.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax())

    def decode(self, sequences, steps):
        return self.generate(sequences, CONTEXT, steps)

    def deep(self, depth, steps):
        return self.generate(1, depth, steps)

    def generate(self, sequences, depth, steps):
        if self.cached != (sequences, depth):
            lc.llama_memory_clear(self.memory, True)
            for sequence in range(sequences):
                prompt = self.prompt(depth, sequence)
                for begin in range(0, depth, BATCH):
                    self.step(prompt[begin:begin + BATCH])
            self.cached = (sequences, depth)
        for sequence in range(sequences):
            lc.llama_memory_seq_rm(self.memory, sequence, depth, -1)
        tokens = list(range(sequences))
        begun = time.perf_counter()
        for step in range(steps):
            self.step([(tokens[s], depth + step, s, True) for s in range(sequences)])
            for s in range(sequences):
                tokens[s] = self.likeliest(s)
        return (time.perf_counter() - begun) / steps


def main():
    begun = time.perf_counter()
    worker = Worker(sys.argv[1], int(sys.argv[2]), "plain" in sys.argv)
    seconds = time.perf_counter() - begun
    print(f"ready {seconds:.3f} {lc.llama_print_system_info().decode()}", flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(f"{getattr(worker, name)(*map(int, numbers)):.6f}", flush=True)


main()
