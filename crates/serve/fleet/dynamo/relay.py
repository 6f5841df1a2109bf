"""A running `stolon serve` as a worker of NVIDIA Dynamo, without the crate stolon-dynamo.

    stolon serve --model MODEL --port 8081 --block-size 16 --kv-events-config \\
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
    python3 relay.py --url http://127.0.0.1:8081 --events tcp://127.0.0.1:5557 --tokenizer MODEL

Needs the packages ai-dynamo and ai-dynamo-runtime 1.6, and aiohttp. Registers the server with
Dynamo, whose frontend tokenizes and routes, sends each request to the server's completions API as
token ids, and lets Dynamo read the server's KV events. Options that the completions API does not
have are refused by the server. MODEL must be a directory or a hub id; the Dynamo settings are its
environment variables (DYN_...).
"""

import argparse
import json
import os
import re

import aiohttp
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig

# Members of Dynamo's requests that have the same name and meaning in the server's API.
SAMPLING = "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty".split()
STOPPING = "max_tokens min_tokens ignore_eos".split()


def completion(request, model, context_length):
    """The body of the request to the server."""
    sampling, stopping = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    body = {"model": model, "prompt": list(request["token_ids"]), "stream": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}, "max_tokens": context_length}
    body |= {name: sampling[name] for name in SAMPLING if sampling.get(name) is not None}
    body |= {name: stopping[name] for name in STOPPING if stopping.get(name) is not None}
    if not stopping.get("ignore_eos"):
        lists = [stopping.get(name) for name in ("stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible")]
        body["stop_token_ids"] = sorted({token for ids in lists for token in ids or []})
    routing = request.get("routing") or {}
    if routing.get("cache_salt"):
        body["cache_salt"] = routing["cache_salt"]
    for name in ("n", "best_of"):
        if (sampling.get(name) or 1) != 1:
            raise ValueError(f"`{name}`: expected 1, got {sampling[name]}")
    if sampling.get("guided_decoding"):
        raise ValueError("`guided_decoding` is not relayed; stolon-dynamo has it")
    return body


class Relay(LLMEngine):
    """Dynamo's interface of an engine, on a server."""

    def __init__(self, args):
        self.args, self.session, self.model, self.context_length = args, None, None, None

    @classmethod
    async def from_args(cls, argv=None):
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--url", required=True, help="address of the server")
        parser.add_argument("--events", required=True, help="address of its KV events")
        parser.add_argument("--topic", default="", help="topic of its KV events")
        parser.add_argument("--tokenizer", required=True, help="directory or hub id of the model")
        parser.add_argument("--served-model-name", default="model")
        args = parser.parse_args(argv)
        config = WorkerConfig(
            namespace=os.environ.get("DYN_NAMESPACE", "dynamo"),
            model_name=args.tokenizer,
            served_model_name=args.served_model_name,
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            event_plane=os.environ.get("DYN_EVENT_PLANE"),
        )
        return cls(args), config

    async def start(self, worker_id):
        self.session = aiohttp.ClientSession(self.args.url, timeout=aiohttp.ClientTimeout(total=None))
        async with self.session.get("/v1/models") as response:
            response.raise_for_status()
            model = (await response.json())["data"][0]
        self.model, self.context_length = model["id"], model["max_model_len"]
        async with self.session.get("/metrics") as response:
            response.raise_for_status()
            metrics = await response.text()
        sizes = next(line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{"))
        size = lambda label: int(re.search(f'{label}="([0-9]+)"', sizes)[1])
        registration = LlmRegistration(
            context_length=self.context_length,
            kv_cache_block_size=size("block_size"),
            total_kv_blocks=size("num_gpu_blocks"),
        )
        return EngineConfig(self.model, self.args.served_model_name, llm=registration)

    async def generate(self, request, context):
        body = completion(request, self.model, self.context_length)
        reason, usage = None, None
        # When this generator is closed, the connection is, too, and the server cancels the request.
        async with self.session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if context.is_stopped():
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise RuntimeError(piece["error"]["message"])
                usage = piece.get("usage") or usage
                for choice in piece["choices"]:
                    reason = choice.get("finish_reason") or reason
                    if choice.get("token_ids"):
                        yield {"token_ids": choice["token_ids"], "index": 0}
        if reason is None:
            raise RuntimeError("the answer was cut off")
        end = {"token_ids": [], "index": 0, "finish_reason": reason}
        yield end | ({"completion_usage": usage} if usage else {})

    async def kv_event_sources(self):
        return [ZmqSource(self.args.events, self.args.topic)]

    async def cleanup(self):
        if self.session:
            await self.session.close()
            self.session = None


if __name__ == "__main__":
    run(Relay)
