"""The OpenVINO GenAI worker of rivals.py: MODEL_DIRECTORY THREADS WEIGHTS, which is fp16, int8 or int4. Commands
as in src/main.rs.

The model is converted into a folder next to MODEL_DIRECTORY at the first start, with

    venv/bin/pip install openvino-genai openvino-tokenizers "optimum-intel[openvino]"

Activations and KV are bf16, or f32 where the processor does not multiply bf16 (OpenVINO refuses bf16 KV there).
Prompts are token ids, and the prefix cache is off. Where the processor has AMX, oneDNN uses it unless
ONEDNN_MAX_CPU_ISA says otherwise.
"""

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
        model = OVModelForCausalLM.from_pretrained(
            folder, export=True, load_in_8bit=False, compile=False, quantization_config=quantized
        )
        model.save_pretrained(out)
    return out


class Worker:
    def __init__(self, folder, threads, weights):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
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

    def add(self, count, first, new):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        # The model has no end of sequence; a negative one is refused.
        config.ignore_eos = True
        config.set_eos_token_id(0)
        config.do_sample = False
        ids = (numpy.arange(count, dtype=numpy.int64) * 31 + first) % 32_768
        self.next_id += 1
        # A request ends when its handle is dropped.
        self.handles.append(self.pipeline.add_request(self.next_id, openvino.Tensor(ids[None, :]), config))

    def finish(self):
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.handles.clear()

    def prefill(self, count):
        begun = time.perf_counter()
        self.add(count, 0, 1)
        self.finish()
        return time.perf_counter() - begun

    def decode(self, sequences, steps):
        for sequence in range(sequences):
            self.add(CONTEXT, sequence, steps + 2)
        self.pipeline.step()
        begun = time.perf_counter()
        for _ in range(steps):
            self.pipeline.step()
        seconds = (time.perf_counter() - begun) / steps
        self.finish()
        return seconds


def main():
    worker = Worker(pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    print(f"ready {worker.load:.3f} openvino-genai {genai.__version__}, {sys.argv[3]}", flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(f"{getattr(worker, name)(*map(int, numbers)):.6f}", flush=True)


main()
