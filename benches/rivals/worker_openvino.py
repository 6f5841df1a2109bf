"""The OpenVINO GenAI worker of rivals.py and servers.py: MODEL_DIRECTORY THREADS WEIGHTS [cached], where WEIGHTS is
fp16, int8 or int4. Commands as in src/main.rs; with `cached`, `requests FILE` as servers.py writes it.

The model is converted into a folder next to MODEL_DIRECTORY at the first start, with

    venv/bin/pip install openvino-genai openvino-tokenizers "optimum-intel[openvino]"

Activations and KV are bf16, or f32 where the processor does not multiply bf16 (OpenVINO refuses bf16 KV there).
Prompts are token ids. The prefix cache is off unless `cached` is named; then also the size of a step is the
default one, because requests come at any time. Where the processor has AMX, oneDNN uses it unless
ONEDNN_MAX_CPU_ISA says otherwise.
"""

import contextlib
import json
import pathlib
import sys
import time

import numpy
import openvino
import openvino_genai as genai

CONTEXT = 512
POSITIONS = 2048
SEQUENCES = 16


def convert(folder, weights):
    """The folder of the model in OpenVINO's form."""
    out = folder.parent / f"openvino-{weights}"
    if not (out / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        bits = {"fp16": None, "int8": 8, "int4": 4}[weights]
        quantized = OVWeightQuantizationConfig(bits=bits, sym=True, group_size=128 if bits == 4 else -1) if bits else None
        # The conversion prints its progress.
        with contextlib.redirect_stdout(sys.stderr):
            model = OVModelForCausalLM.from_pretrained(
                folder, export=True, load_in_8bit=False, compile=False, quantization_config=quantized
            )
            model.save_pretrained(out)
    return out


class Worker:
    def __init__(self, folder, threads, weights, cached):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 4 if cached else 2
        scheduler.enable_prefix_caching = cached
        scheduler.dynamic_split_fuse = True
        if not cached:
            # All prompts of a run are computed in one step, as by the other workers.
            scheduler.max_num_batched_tokens = SEQUENCES * POSITIONS
        scheduler.max_num_seqs = SEQUENCES
        precision = "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": threads,
        }
        model = convert(folder, weights)
        begun = time.perf_counter()
        self.pipeline = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self.load = time.perf_counter() - begun
        self.next_id = 0
        self.handles = []

    def add(self, ids, new):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        # The model has no end of sequence; a negative one is refused.
        config.ignore_eos = True
        config.set_eos_token_id(0)
        config.do_sample = False
        self.next_id += 1
        # A request ends when its handle is dropped.
        self.handles.append(self.pipeline.add_request(self.next_id, openvino.Tensor(ids[None, :]), config))
        return self.handles[-1]

    def run_of_ids(self, count, first):
        return (numpy.arange(count, dtype=numpy.int64) * 31 + first) % 32_768

    def finish(self):
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.handles.clear()

    def prefill(self, count):
        begun = time.perf_counter()
        self.add(self.run_of_ids(count, 0), 1)
        self.finish()
        return time.perf_counter() - begun

    def decode(self, sequences, steps):
        for sequence in range(sequences):
            self.add(self.run_of_ids(CONTEXT, sequence), steps + 2)
        self.pipeline.step()
        begun = time.perf_counter()
        for _ in range(steps):
            self.pipeline.step()
        seconds = (time.perf_counter() - begun) / steps
        self.finish()
        return seconds

    def requests(self, path):
        """Seconds to the first tokens and to the last ones, in the form of Server.run of
        servers.py."""
        asked = json.loads(pathlib.Path(path).read_text())
        waiting = [numpy.array(prompt, dtype=numpy.int64) for prompt in reversed(asked["prompts"])]
        begun = time.perf_counter()
        running, times = [], []
        while waiting or running:
            while waiting and len(running) < asked["at_once"]:
                sent = time.perf_counter()
                running.append([self.add(waiting.pop(), asked["length"]), sent, None])
            self.pipeline.step()
            now = time.perf_counter()
            for request in list(running):
                handle, sent, first = request
                if handle.can_read():
                    handle.read()
                    first = request[2] = first or now
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    times.append((first - sent, first - begun, now - begun))
                    running.remove(request)
                    self.handles.remove(handle)
        return times


def main():
    cached = sys.argv[4:] == ["cached"]
    worker = Worker(pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], cached)
    print(f"ready {worker.load:.3f} openvino-genai {genai.__version__}, {sys.argv[3]}", flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        answer = worker.requests(words[0]) if name == "requests" else getattr(worker, name)(*map(int, words))
        print(json.dumps(answer), flush=True)


main()
