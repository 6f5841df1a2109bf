"""Time to first token of questions about images: python benches/images.py path/to/stolon [MODEL ...]

Starts a server for each model, and asks several questions about each picture. The first question
encodes the picture and computes its positions; the others find them in the cache. Prints medians
over the pictures, the positions of a picture, and the memory after many pictures. With --check, it
fails if the next questions take more than a tenth of the first one's time or, with --flat, if the
memory grows.
Only the standard library is needed.
"""

import argparse
import base64
import json
import pathlib
import random
import statistics
import struct
import subprocess
import time
import urllib.request
import zlib


def picture(seed, width, height):
    """A PNG file of random rectangles as a data URL."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    draw = random.Random(seed)
    rows = [bytearray(bytes(draw.randrange(256) for _ in range(3)) * width) for _ in range(height)]
    for _ in range(8):
        x, y = draw.randrange(width), draw.randrange(height)
        color = bytes(draw.randrange(256) for _ in range(3))
        for row in rows[y : y + height // 4]:
            length = min(width // 4, width - x)
            row[3 * x : 3 * (x + length)] = color * length
    data = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def ask(address, model, url, question):
    """The time until the only token, and the usage."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    route = "chat/completions"
    body = {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 1, "temperature": 0}
    if "moondream" in model:
        # It has no chat template.
        route = "query"
        body = {"question": question, "image_url": url, "settings": {"max_tokens": 1, "temperature": 0}}
    request = urllib.request.Request(
        f"{address}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        usage = json.load(response)["usage"]
    return time.perf_counter() - begun, usage


def resident(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def measure(binary, model, arguments):
    command = [binary, "serve", "--port", "0", "--model", model, *arguments.server]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = (line for line in process.stdout if line.startswith("listening on "))
        address = next(lines).removeprefix("listening on ").strip()
        ask(address, model, picture(0, *arguments.size), "What is this?")
        first, later, usage = [], [], {}
        for seed in range(1, arguments.pictures + 1):
            url = picture(seed, *arguments.size)
            time_of_first, usage = ask(address, model, url, "What is this?")
            first.append(time_of_first)
            for question in ["Which color has it?", "How many are there?", "Where is the red one?"]:
                later.append(ask(address, model, url, question)[0])
        ratio = statistics.median(later) / statistics.median(first)
        print(
            f"{model}: {usage['prompt_tokens_details']['image_tokens']} of {usage['prompt_tokens']} positions are"
            f" the picture's; first question {statistics.median(first) * 1e3:.0f} ms,"
            f" the next ones {statistics.median(later) * 1e3:.1f} ms ({ratio:.3f})"
        )
        before = resident(process)
        for seed in range(arguments.flat):
            ask(address, model, picture(seed % 300 + 1000, 32, 32), f"What is number {seed}?")
            if seed == arguments.flat // 2:
                before = resident(process)
        after = resident(process)
        if arguments.flat:
            print(f"{model}: memory {before:.0f} MB after half of {arguments.flat} pictures, {after:.0f} MB after all")
        if arguments.check and arguments.flat:
            assert after <= 1.1 * before, f"expected memory within 1.1 of {before:.0f} MB, got {after:.0f} MB"
        elif arguments.check:
            assert ratio <= 0.1, f"expected at most 0.1 of the first question's time, got {ratio:.3f}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("models", nargs="*", default=["random:smolvlm-tiny"])
    parser.add_argument("--pictures", type=int, default=5)
    parser.add_argument("--size", type=int, nargs=2, default=[640, 480])
    parser.add_argument("--flat", type=int, default=0, help="number of requests after which memory is compared")
    parser.add_argument("--check", action="store_true", help="fail if an aim is missed")
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[])
    arguments = parser.parse_args()
    for model in arguments.models:
        measure(arguments.binary, model, arguments)


if __name__ == "__main__":
    main()
