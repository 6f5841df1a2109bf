"""The Llama architecture in one file, with Hugging Face parameter names, and its structured initialization.

`Llama` computes what `transformers.LlamaForCausalLM` computes for the same state dict (`attention_bias` on, tied
embeddings). `initialize` writes an induction circuit into the first two layers, which training then refines:

1. The token embedding fills the first half of the residual stream (block T).
2. Layer 0 has four heads whose query and key are constant biases. Under RoPE their score depends on the distance
   alone, and it peaks at distance 1, 2, 3 and 4. They copy the embeddings of the last four tokens, the farther the
   more compressed, into the blocks P1, P2, P3 and P4.
3. Layer 1 has two heads whose query reads (T, P1, P2, P3) and whose key reads (P1, P2, P3, P4) through the same
   random maps, in the slowly turning RoPE dimensions only. They find the place where the last four tokens stood
   before, and copy the token that followed there back into block T, where the tied unembedding reads it. Two more
   heads share their keys and values; they ask for the last token alone and prefer near places, which leads to the
   question.

Everything else starts as small Gaussian noise.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

NOISE_STD = 0.02
EMBED_STD = 0.3
FINAL_NORM_GAIN = 0.4
SHIFT_BIAS = 10.4
SHIFT_PAIRS = 8
MATCH_SCALE = 1.73
# How much the last token and the three before it count in a match.
MATCH_WEIGHTS = (1.3, 1.0, 0.8, 0.7)
COPY_GAIN = 2.0
NEAR_COPY_GAIN = 1.5
NEAR_BIAS = 4.0
# RoPE pairs whose common bias makes the near heads prefer the last few dozen tokens.
NEAR_PAIRS = slice(5, 11)
# Tokens that are the same word to a reader start with this share of their embedding in common.
ALIKE_SHARE = 0.75
# RoPE pairs turning slower than this many radians a token carry content.
CONTENT_FREQUENCY_MAX = 6e-4
BLOCK_T = slice(0, 112)
BLOCKS_P = (slice(112, 176), slice(176, 208), slice(208, 232), slice(232, 256))


@dataclass(frozen=True)
class Shape:
    """The fields of config.json that size the model."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 1e7
    rms_norm_eps: float = 1e-5

    def hf_config(self, end: int, pad: int) -> dict:
        """The whole of config.json, for the ids of the end and padding tokens."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", **asdict(self),
            "attention_bias": True, "attention_dropout": 0.0, "mlp_bias": False, "hidden_act": "silu",
            "initializer_range": NOISE_STD, "rope_scaling": None, "tie_word_embeddings": True, "pretraining_tp": 1,
            "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad, "use_cache": True,
            "torch_dtype": "bfloat16",
        }


def rope_frequencies(shape: Shape) -> torch.Tensor:
    """Radians a position, one for each of the head_dim / 2 pairs (i, i + head_dim / 2)."""
    return shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on x [batch, heads, length, head_dim]; cos and sin are [batch, 1, length, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with biases on all four projections."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width)
        self.o_proj = nn.Linear(width, shape.hidden_size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """The gated SiLU feed-forward layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids and positions [batch, length] in, final hidden states [batch, length, hidden_size] out."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, :, None].float() * rope_frequencies(self.shape)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab_size] by the tied embedding."""
        return F.linear(hidden, self.embed_tokens.weight)


def orthonormal(rows: int, columns: int) -> torch.Tensor:
    """A random [rows, columns] matrix whose shorter side is orthonormal."""
    square = torch.linalg.qr(torch.randn(max(rows, columns), max(rows, columns)))[0]
    return square[:rows, :columns]


@torch.no_grad()
def initialize(model: Llama, alike: list[list[int]]) -> None:
    """Fills `model` with noise and writes the induction circuit of the module's description into it. The tokens of
    each list in `alike` start with similar embeddings."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, NOISE_STD)
    model.norm.weight.fill_(FINAL_NORM_GAIN)
    model.embed_tokens.weight[:, BLOCK_T].normal_(0.0, EMBED_STD)
    for ids in alike:
        own = model.embed_tokens.weight[ids, BLOCK_T]
        model.embed_tokens.weight[ids, BLOCK_T] = (math.sqrt(ALIKE_SHARE) * own[:1]
                                                   + math.sqrt(1.0 - ALIKE_SHARE) * own)
    halves = orthonormal(112, 112)
    first, second = halves[:64], F.pad(halves[64:], (0, 0, 0, 16))
    medium = orthonormal(32, 64)
    narrow = orthonormal(24, 32) @ medium
    compress = (torch.eye(64), medium, narrow, narrow)
    write_shift_heads(model.shape, model.layers[0].self_attn, first, compress)
    write_match_heads(model.shape, model.layers[1].self_attn, (first, second), compress)


def write_shift_heads(shape: Shape, attention: Attention, first: torch.Tensor,
                      compress: tuple[torch.Tensor, ...]) -> None:
    """Head n attends n + 1 tokens back and writes compress[n] @ first of that token's embedding to BLOCKS_P[n]."""
    dim, half = shape.head_dim, shape.head_dim // 2
    frequencies = rope_frequencies(shape)[:SHIFT_PAIRS]
    for kv_head in range(2):
        rows = slice(kv_head * dim, (kv_head + 1) * dim)
        attention.k_proj.bias[rows][:SHIFT_PAIRS] = SHIFT_BIAS
        # Block T alone is filled here, so the norm divides it by its share of the whole width.
        attention.v_proj.weight[rows] = 0.0
        attention.v_proj.weight[rows, BLOCK_T] = first * math.sqrt(BLOCK_T.stop / shape.hidden_size)
    for head, (block, projection) in enumerate(zip(BLOCKS_P, compress, strict=True)):
        bias = attention.q_proj.bias[head * dim:(head + 1) * dim]
        bias[:SHIFT_PAIRS] = SHIFT_BIAS * torch.cos((head + 1) * frequencies)
        bias[half:half + SHIFT_PAIRS] = -SHIFT_BIAS * torch.sin((head + 1) * frequencies)
        columns = slice(head * dim, (head + 1) * dim)
        attention.o_proj.weight[:, columns] = 0.0
        attention.o_proj.weight[block, columns] = EMBED_STD * projection


def write_match_heads(shape: Shape, attention: Attention, copies: tuple[torch.Tensor, torch.Tensor],
                      compress: tuple[torch.Tensor, ...]) -> None:
    """Heads 0 and 2 (one for each key-value head) find the last four tokens and copy the token that followed;
    heads 1 and 3 do so for the last token alone, near by."""
    dim, half = shape.head_dim, shape.head_dim // 2
    slow = [i for i, f in enumerate(rope_frequencies(shape).tolist()) if f < CONTENT_FREQUENCY_MAX]
    content = torch.tensor(slow + [i + half for i in slow])
    size, first = len(content), copies[0]
    for kv_head, copied in enumerate(copies):
        maps = [weight * orthonormal(size, len(p)) for weight, p in zip(MATCH_WEIGHTS, compress, strict=True)]
        key = torch.zeros(size, shape.hidden_size)
        for block, random_map in zip(BLOCKS_P, maps, strict=True):
            key[:, block] = random_map
        last = torch.zeros(size, shape.hidden_size)
        last[:, BLOCK_T] = maps[0] @ first
        last_four = last.clone()
        # The same token sits one block nearer in the query, where it is compressed less.
        for n in range(1, len(maps)):
            last_four[:, BLOCKS_P[n - 1]] = maps[n] @ compress[n] @ compress[n - 1].T
        rows = slice(kv_head * dim, (kv_head + 1) * dim)
        attention.k_proj.weight[kv_head * dim + content] = MATCH_SCALE * key
        attention.k_proj.bias[rows][NEAR_PAIRS] = NEAR_BIAS
        attention.v_proj.weight[rows] = 0.0
        attention.v_proj.weight[rows, BLOCK_T] = copied
        match_head, near_head = 2 * kv_head, 2 * kv_head + 1
        attention.q_proj.weight[match_head * dim + content] = MATCH_SCALE * last_four
        attention.q_proj.weight[near_head * dim + content] = MATCH_SCALE * last
        attention.q_proj.bias[near_head * dim:(near_head + 1) * dim][NEAR_PAIRS] = NEAR_BIAS
        for head, gain in ((match_head, COPY_GAIN), (near_head, NEAR_COPY_GAIN)):
            columns = slice(head * dim, (head + 1) * dim)
            attention.o_proj.weight[:, columns] = 0.0
            attention.o_proj.weight[BLOCK_T, columns] = gain * EMBED_STD * copied.T
