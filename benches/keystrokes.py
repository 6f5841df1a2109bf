"""Completion while somebody types: python benches/keystrokes.py STOLON LLAMA_SERVER --model MODEL.gguf FILE

Sends the requests of llama.vim, key by key, to Stolon, to llama.cpp's server, and to llama.cpp's server with
`--cache-reuse 256`, which llama.vim's page recommends, by turns: `/infill` with the lines before the cursor (256),
those after it (64 and 8), and pieces of the file as other files. The file is typed from its middle on. MODEL must
have tokens to fill in the middle.

Prints medians over the keys: the time to the first token, the time of the whole answer, and the computed tokens;
and how many of the answers differ from those of the same server when it has computed the prompt from nothing.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "crates/serve/cli/tests/agents"))

from proxy import connect

BEFORE, CHUNK_LINES, CHUNKS = 256, 32, 8
PORT = 8620


def start(command, port):
    log = open(f"/tmp/keystrokes-{port}.log", "w")
    process = subprocess.Popen(command + ["--port", str(port)], stdout=log, stderr=log)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
            return process
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.1)
    sys.exit(f"{command[0]} did not start")


def ask(port, request):
    """The seconds until the first piece and until the end, the text, and the computed tokens of the prompt."""
    connection = connect(f"http://127.0.0.1:{port}")
    begun = time.perf_counter()
    connection.request("POST", "/infill", json.dumps(request), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        sys.exit(f"{reply.status} {reply.read().decode()[:500]}")
    first, text, computed = None, "", None
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        piece = json.loads(line[6:])
        if first is None and piece["content"]:
            first = time.perf_counter() - begun
        text += piece["content"]
        computed = piece.get("timings", {}).get("prompt_n", computed)
    total = time.perf_counter() - begun
    return first or total, total, text, computed


def requests(path, after, keys):
    """One request per key, from the middle of the file on."""
    lines = path.read_text().splitlines()
    middle = len(lines) // 2
    typed = "\n".join(lines[middle:])[:keys]
    pieces = [lines[at:at + CHUNK_LINES] for at in range(0, CHUNK_LINES * CHUNKS, CHUNK_LINES)]
    extra = [{"filename": f"{at}.rs", "text": "\n".join(piece)} for at, piece in enumerate(pieces)]
    shown = (lines[:middle] + [""])[-BEFORE - 1:]
    for end in range(keys + 1):
        *new, line = typed[:end].split("\n")
        yield {
            "input_extra": extra, "input_prefix": "\n".join(shown[:-1] + new) + "\n", "prompt": line,
            "input_suffix": "\n" + "\n".join(lines[-after:]), "n_predict": 16, "temperature": 0, "top_k": 1,
            "stream": True, "cache_prompt": True, "id_slot": 0, "t_max_prompt_ms": 60000,
            "t_max_predict_ms": 60000, "samplers": ["top_k"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stolon")
    parser.add_argument("llama_server")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--keys", type=int, default=30)
    parser.add_argument("--threads", default="2")
    options = parser.parse_args()
    llama = [options.llama_server, "-m", options.model, "-c", "8192", "-np", "1", "-t", options.threads]
    stolon = [options.stolon, "serve", "--model", options.model, "--threads", options.threads,
              "--max-model-len", "8192"]
    commands = {"Stolon": stolon, "llama.cpp": llama, "llama.cpp, reuse": [*llama, "--cache-reuse", "256"]}
    for after in [64, 8]:
        ports = {name: PORT + index for index, name in enumerate(commands)}
        processes = [start(command, ports[name]) for name, command in commands.items()]
        rows = {name: [] for name in commands}
        try:
            for key, request in enumerate(requests(options.file, after, options.keys)):
                for name in commands if key % 2 else reversed(commands):
                    rows[name].append(ask(ports[name], request))
            fresh = {"Stolon": {"skip_reading_prefix_cache": True}}
            differ = dict.fromkeys(commands, 0)
            for key, request in enumerate(requests(options.file, after, options.keys)):
                if key % 5:
                    continue
                for name in commands:
                    cold = fresh.get(name, {"cache_prompt": False})
                    differ[name] += ask(ports[name], request | cold)[2] != rows[name][key][2]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        print(f"{after} lines after the cursor")
        for name, measured in rows.items():
            # The first one computes everything.
            first, total, computed = (statistics.median(row[column] for row in measured[1:]) for column in [0, 1, 3])
            print(f"  {name}: first token {1e3 * first:.0f} ms, whole {1e3 * total:.0f} ms, "
                  f"{computed:.0f} tokens computed, first request {measured[0][0]:.2f} s, "
                  f"{differ[name]} of {len(range(0, options.keys + 1, 5))} answers differ from a cold one")


if __name__ == "__main__":
    main()
