"""Reads KV events with vLLM's own code: kv_events.py STOLON VLLM_WHEEL.

Starts a server that publishes KV events, sends requests, and decodes the events with the types of
`vllm/distributed/kv_events.py` from a wheel of vLLM. Needs pyzmq and msgspec. What is replayed to a
REQ socket, as vLLM's example subscriber uses one, and to a DEALER socket, must be what was
published.
"""

import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import types
import urllib.request
import zipfile

import msgspec
import zmq

TOPIC = "kv@127.0.0.1@demo"


def vllm_types(wheel):
    """The module of the wheel, without the rest of vLLM, which its types do not use."""
    for name, values in {
        "vllm": [],
        "vllm.config": [],
        "vllm.config.kv_events": ["KVEventsConfig"],
        "vllm.logger": ["init_logger"],
        "vllm.utils": [],
        "vllm.utils.network_utils": ["get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"],
        "vllm.v1": [],
        "vllm.v1.core": [],
        "vllm.v1.core.kv_cache_utils": [],
    }.items():
        module = types.ModuleType(name)
        for value in values:
            setattr(module, value, type(value, (), {"__init__": lambda *_: None}))
        sys.modules[name] = module
    # As in vLLM: bytes, or the low 64 bits as a number.
    sys.modules["vllm.v1.core.kv_cache_utils"].ExternalBlockHash = bytes | int
    with tempfile.NamedTemporaryFile(suffix=".py") as file:
        with zipfile.ZipFile(wheel) as archive:
            file.write(archive.read("vllm/distributed/kv_events.py"))
        file.flush()
        spec = importlib.util.spec_from_file_location("kv_events", file.name)
        module = importlib.util.module_from_spec(spec)
        sys.modules["kv_events"] = module
        spec.loader.exec_module(module)
    return module


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return response.read()


def receive(subscriber):
    """All batches that have arrived, until nothing comes for half a second."""
    batches = []
    while subscriber.poll(500):
        topic, number, payload = subscriber.recv_multipart()
        assert topic == TOPIC.encode(), topic
        batches.append((int.from_bytes(number, "big"), payload))
    return batches


def replay(context, kind, port, first):
    client = context.socket(kind)
    client.connect(f"tcp://127.0.0.1:{port}")
    number = first.to_bytes(8, "big")
    client.send_multipart([number] if kind == zmq.REQ else [b"", number])
    batches = []
    while client.poll(5000):
        *delimiter, topic, number, payload = client.recv_multipart()
        assert delimiter == ([] if kind == zmq.REQ else [b""]), delimiter
        if number == b"\xff" * 8:
            client.close(linger=0)
            return batches
        assert topic == TOPIC.encode(), topic
        batches.append((int.from_bytes(number, "big"), payload))
        if kind == zmq.REQ:
            # A REQ socket takes one reply for a request.
            client.close(linger=0)
            return batches
    raise SystemExit("the replay has no end")


def main():
    stolon, wheel = sys.argv[1:]
    vllm = vllm_types(wheel)
    decoder = msgspec.msgpack.Decoder(vllm.KVEventBatch)
    events_port, replay_port = free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": TOPIC,
    }
    command = [stolon, "serve", "--port", "0", "--num-blocks", "256", "--kv-events-config", json.dumps(config)]
    # As large as the cache, so that both lose blocks.
    disk = tempfile.TemporaryDirectory()
    command += ["--kv-cache-dir", disk.name, "--kv-cache-dir-size", "1x"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout:
            if line.startswith("listening on "):
                url = line.split()[2]
                break
        context = zmq.Context()
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(f"tcp://127.0.0.1:{events_port}")
        subscriber.setsockopt(zmq.SUBSCRIBE, TOPIC.encode())
        subscriber.poll(300)
        for number in range(60):
            prompt = [10 + (number * 7 + index * (1 + number % 5)) % 100 for index in range(320)]
            body = {"prompt": prompt, "max_tokens": 2}
            if number % 3 == 0:
                body["cache_salt"] = f"tenant {number}"
            post(f"{url}/v1/completions", body)
        published = receive(subscriber)
        numbers = [number for number, _ in published]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a gap"
        known, seen = {vllm.MEDIUM_GPU: set(), vllm.MEDIUM_STORAGE: set()}, {}
        replayed = replay(context, zmq.DEALER, replay_port, 0)
        assert [number for number, _ in replayed] == list(range(numbers[-1] + 1))
        assert replayed[numbers[0] :] == published
        assert replay(context, zmq.REQ, replay_port, 3) == replayed[3:4]
        for _, payload in replayed:
            for event in decoder.decode(payload).events:
                name = f"{type(event).__name__} {getattr(event, 'medium', '')}".strip()
                seen[name] = seen.get(name, 0) + 1
                if isinstance(event, vllm.BlockStored):
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    block_size = event.block_size
                    parents = known[vllm.MEDIUM_GPU] | known[vllm.MEDIUM_STORAGE]
                    assert event.parent_block_hash is None or event.parent_block_hash in parents
                    if event.extra_keys is not None:
                        assert len(event.extra_keys) == len(event.block_hashes)
                        seen["with a namespace"] = seen.get("with a namespace", 0) + 1
                    known[event.medium].update(event.block_hashes)
                elif isinstance(event, vllm.BlockRemoved):
                    assert known[event.medium].issuperset(event.block_hashes)
                    known[event.medium].difference_update(event.block_hashes)
                else:
                    for blocks in known.values():
                        blocks.clear()
        media = [vllm.MEDIUM_GPU, vllm.MEDIUM_STORAGE]
        kinds = [f"{kind} {medium}" for kind in ("BlockStored", "BlockRemoved") for medium in media]
        for kind in [*kinds, "AllBlocksCleared", "with a namespace"]:
            assert seen.get(kind, 0) > 0, (kind, seen)
        with urllib.request.urlopen(f"{url}/v1/cache/stats") as response:
            stats = json.load(response)
        with urllib.request.urlopen(f"{url}/v1/cache/tiers") as response:
            stats |= json.load(response)
        cached, stored = (len(known[medium]) for medium in media)
        # A record has 64 tokens.
        records = stored * block_size // 64
        assert cached == stats["cache"]["blocks"] and records == stats["disk"]["records"], stats
        print(f"{len(replayed)} batches, {seen}, {cached} blocks known that are cached and {stored} on the disk")
    finally:
        server.terminate()
        assert server.wait(20) == 0, server.returncode


main()
