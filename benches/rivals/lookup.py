"""Compares what prompt lookup brings in Stolon, llama.cpp's server and vLLM for CPUs, on a trained model.

Needs what servers.py needs, and `accelerate`; fetch_models.py fetches the model:

    venv/bin/python ../../crates/models/checkpoint/tests/fetch_models.py models
    venv/bin/python lookup.py models

Each engine runs twice, with lookup and without, and all get the weights of SmolLM2 135M in bf16. Each server is
stopped while the others run. In each round every server does every work in turn; the first round warms up and is
not counted. An answer has 192 tokens and is greedy, except for prose. Its prompt is cached, and its rate is
measured from its first token on. Each round has another cache salt, because Stolon would guess from the
answers of the round before:

    edit    a source file, and the beginning of the same file with another name in it
    quote   a page of documentation, and its beginning once more
    list    records as JSON
    prose   a text that is continued at temperature 1, in which little repeats itself

The table has the median rates, the median of the quotients of each round, and whether all answers of an engine
to a work are the same, with and without lookup.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

import real
import rivals
import servers
from fetch_models import SMOLLM2

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOKENS = 192
# The flags of lookup.
LOOKUP = {
    "stolon": [],
    "llama": ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"],
    "llama-default": ["--spec-default"],
    "llama-long": ["--spec-type", "ngram-simple"],
    "llama-cache": ["--spec-type", "ngram-cache", "--spec-draft-n-max", "8"],
    "vllm": [
        "--speculative-config",
        json.dumps({"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
    ],
}


def works():
    """Prompt and temperature by name."""
    file = (ROOT / "crates/engine/scheduler/src/step_cost.rs").read_text()[:4500]
    edited = file.replace("StepCost", "CostOfSteps")
    page = (ROOT / "docs/src/design/tiers.md").read_text()[:4500]
    prose = (ROOT / "docs/src/design/images.md").read_text()[:2000]
    record = '{{"id": {}, "name": "item{}", "price": {}, "tags": ["a{}"]}},\n'.format
    return {
        "edit": (f"{file}\n\nThe same file, in which StepCost is called CostOfSteps:\n\n{edited[:900]}", 0),
        "quote": (f"{page}\n\nThe same text once more:\n\n{page[:400]}", 0),
        "list": ("".join(record(number, number * 7, number * 13, number % 5) for number in range(1, 21)), 0),
        "prose": (prose, 1),
    }


class Server(servers.Server):
    def rate(self, tokens, temperature, salt):
        """Tokens a second from the first token of an answer on, and its text. The prompt is cached before."""
        sampling = {"temperature": temperature, "seed": 1, "cache_salt": salt}
        self.stream(tokens, 1, **sampling)
        events, _ = self.stream(tokens, TOKENS, **sampling)
        pieces = [(at, "".join(choice["text"] for choice in event.get("choices", []))) for at, event in events]
        times = [at for at, piece in pieces if piece]
        return (TOKENS - 1) / (times[-1] - times[0]), "".join(piece for _, piece in pieces)


def directory(path):
    """The model of a GGUF file as a directory of transformers, with weights in bf16."""
    folder = path.with_name(f"{path.stem}.bf16")
    if not folder.exists():
        import torch
        import transformers

        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        # A model that was read from a GGUF file cannot be saved.
        config = read.config.to_dict()
        del config["quantization_config"]
        model = type(read)(type(read.config).from_dict(config)).to(torch.bfloat16)
        model.load_state_dict(read.state_dict())
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def start(name, has_lookup, options):
    engine, threads = name.partition("-")[0], options.threads
    flags, port, environment = LOOKUP[name] if has_lookup else [], servers.free_port(), {}
    log = open(options.models / f"{name}-{'lookup' if has_lookup else 'plain'}.log", "w")
    if engine == "stolon":
        command = [options.stolon, "serve", "--model", options.hf, "--port", port, "--threads", threads]
        command += ["--kv-memory", "1G", *([] if has_lookup else ["--speculation", "off"])]
    elif engine == "llama":
        command = [options.llama_server, "--model", options.gguf, "--port", port, "--threads", threads]
        command += ["--parallel", 1, "--ctx-size", servers.CONTEXT, "--no-webui"]
    else:
        command, environment = servers.vllm(options, options.hf, port)
    return Server(name, [*command, *flags], environment, port, log)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=pathlib.Path, help="folder of fetch_models.py")
    parser.add_argument("--stolon", type=pathlib.Path, default=ROOT / "target/release/stolon")
    parser.add_argument("--vllm", type=pathlib.Path, default=HERE / "venv-vllm/bin/vllm")
    parser.add_argument("--llama-server", type=pathlib.Path, default=HERE / "llama.cpp/build/bin/llama-server")
    parser.add_argument("--engines", nargs="+", choices=LOOKUP, default=["stolon", "llama", "vllm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))))
    options = parser.parse_args()
    path = options.models / SMOLLM2
    options.hf, options.gguf = directory(path), real.widened(path, "BF16")
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.hf)
    print(f"{servers.processor()}, {options.threads} threads")
    running = {}
    for engine in options.engines:
        for has_lookup in (False, True):
            server = start(engine, has_lookup, options)
            server.stream([1, 2, 3], 4)
            running[engine, has_lookup] = rivals.stop_idle(server)
    print("all servers are ready", flush=True)
    answers = {}
    for round in range(options.rounds + 1):
        for work, (prompt, temperature) in works().items():
            tokens = tokenizer(prompt).input_ids
            for key, server in running.items():
                with rivals.turn(server):
                    time.sleep(0.2)
                    rate, text = server.rate(tokens, temperature, f"{work} {round}")
                if round > 0:
                    answers.setdefault((work, *key), []).append((rate, text))
    print("| work | engine | plain | lookup | times | same answer |\n|---|---|---|---|---|---|")
    for work in works():
        for engine in options.engines:
            plain, lookup = (answers[work, engine, has_lookup] for has_lookup in (False, True))
            rates = [statistics.median(rate for rate, _ in of_all) for of_all in (plain, lookup)]
            times = statistics.median(b / a for (a, _), (b, _) in zip(plain, lookup))
            is_same = "yes" if len({answer for _, answer in plain + lookup}) == 1 else "no"
            print(f"| {work} | {engine} | {rates[0]:.0f} | {rates[1]:.0f} | {times:.2f} | {is_same} |")
    for server in running.values():
        with rivals.turn(server):
            server.close()


if __name__ == "__main__":
    main()
