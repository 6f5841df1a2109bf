"""A toy transformer whose requests share the keys and values (KV) of common prefixes.

`stolon.PrefixCache` says which blocks of the KV memory hold which prefix; the memory and the model
belong to this program. It needs numpy:

    pip install stolon numpy
    python toy_transformer.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import stolon

VOCABULARY, WIDTH, LAYERS = 97, 32, 2
BLOCK_SIZE, BLOCKS = 8, 64


class Transformer:
    """Two layers of attention with random weights, without training."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)

        def matrix(*shape: int) -> np.ndarray:
            return random.normal(0.0, WIDTH**-0.5, shape).astype(np.float32)

        self.embedding = matrix(VOCABULARY, WIDTH)
        self.query, self.key, self.value = (matrix(LAYERS, WIDTH, WIDTH) for _ in range(3))
        # Keys and values of all blocks: [layer, key or value, block, position in block, width].
        self.kv = np.zeros((LAYERS, 2, BLOCKS, BLOCK_SIZE, WIDTH), np.float32)

    def position(self, token: int, position: int, blocks: np.ndarray) -> np.ndarray:
        """Computes one position and writes its KV. Returns the logits of the next token."""
        hidden = self.embedding[token]
        block, offset = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        for layer in range(LAYERS):
            self.kv[layer, 0, block, offset] = hidden @ self.key[layer]
            self.kv[layer, 1, block, offset] = hidden @ self.value[layer]
            # The block table puts the positions of the sequence in order, wherever they are.
            keys, values = self.kv[layer][:, blocks].reshape(2, -1, WIDTH)[:, : position + 1]
            scores = np.exp(keys @ (hidden @ self.query[layer]) * WIDTH**-0.5)
            hidden = hidden + (scores / scores.sum()) @ values
        return hidden @ self.embedding.T


@dataclass
class Engine:
    """Answers prompts, one after the other."""

    cache: stolon.PrefixCache | None
    model: Transformer = field(default_factory=Transformer)
    computed: int = 0

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """The most likely continuation."""
        cache = self.cache or stolon.PrefixCache(BLOCK_SIZE, BLOCKS)
        answer: list[int] = []
        # Without its last token, whose logits are needed even if the whole prompt is cached.
        with cache.acquire(prompt[:-1]) as lease:
            lease.grow(prompt[-1:])
            tokens, done = list(prompt), lease.cached_len
            while len(answer) < count:
                blocks = np.array(lease.blocks)
                for position in range(done, len(tokens)):
                    logits = self.model.position(tokens[position], position, blocks)
                    self.computed += 1
                done = len(tokens)
                cache.insert(lease, done)  # other requests find the full blocks from now on
                answer.append(int(logits.argmax()))
                lease.grow(answer[-1:])
                tokens.append(answer[-1])
        return answer


def main() -> None:
    random = np.random.default_rng(1)
    handbook = random.integers(0, VOCABULARY, 100).tolist()
    prompts = [handbook + random.integers(0, VOCABULARY, 5).tolist() for _ in range(6)]

    sharing, plain = Engine(stolon.PrefixCache(BLOCK_SIZE, BLOCKS)), Engine(None)
    events = sharing.cache.events()
    answers = [sharing.generate(prompt, 8) for prompt in prompts]
    assert answers == [plain.generate(prompt, 8) for prompt in prompts]

    # A second round finds the prompts themselves, except where they were evicted.
    assert answers == [sharing.generate(prompt, 8) for prompt in prompts]
    sharing.cache.audit()
    stored = sum(len(event.hashes) for event in events.drain() if event.kind == "stored")
    print(f"{plain.computed} positions computed without a cache,")
    print(f"{sharing.computed} for twice as many answers with one: {stored} blocks were shared")
    assert sharing.computed < plain.computed


if __name__ == "__main__":
    main()
