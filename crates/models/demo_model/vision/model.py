"""The SmolVLM architecture in one file, with Hugging Face parameter names.

`Vision` computes what `transformers.SmolVLMForConditionalGeneration` computes for the same state dict: a vision
transformer makes features of the patches of a picture, the features of each square of patches become an embedding, and
a Llama reads the embeddings in place of those of the image token.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

NOISE_STD = 0.02
EMBED_STD = 0.05


@dataclass(frozen=True)
class TowerShape:
    """The fields of `vision_config`."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    image_size: int = 64
    patch_size: int = 8
    layer_norm_eps: float = 1e-6


@dataclass(frozen=True)
class TextShape:
    """The fields of `text_config`."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True)
class Shape:
    """The fields of config.json that size the model."""

    text: TextShape
    tower: TowerShape = TowerShape()
    scale_factor: int = 2

    @property
    def image_tokens(self) -> int:
        """Embeddings of a picture."""
        return (self.tower.image_size // self.tower.patch_size // self.scale_factor) ** 2

    def hf_config(self, end: int, pad: int, image: int) -> dict:
        """The whole of config.json, for the ids of the end, padding and image tokens."""
        ends = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
        text = {key: value for key, value in asdict(self.text).items() if key != "rope_theta"}
        return {
            "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "dtype": "bfloat16",
            "image_token_id": image, "scale_factor": self.scale_factor, "tie_word_embeddings": True, **ends,
            "text_config": {
                "model_type": "llama", **text, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
                "rope_parameters": {"rope_theta": self.text.rope_theta, "rope_type": "default"},
                "tie_word_embeddings": True, "dtype": "bfloat16", **ends,
            },
            "vision_config": {
                "model_type": "smolvlm_vision", **asdict(self.tower), "num_channels": 3,
                "hidden_act": "gelu_pytorch_tanh", "dtype": "bfloat16",
            },
        }


def split_heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[batch, length, heads * head_dim] as [batch, heads, length, head_dim]."""
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


class TowerAttention(nn.Module):
    """Attention between all patches."""

    def __init__(self, shape: TowerShape):
        super().__init__()
        self.head_dim = shape.hidden_size // shape.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(shape.hidden_size, shape.hidden_size) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(p(x), self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(join_heads(F.scaled_dot_product_attention(q, k, v)))


class TowerMlp(nn.Module):
    """The GELU feed-forward layer."""

    def __init__(self, shape: TowerShape):
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.fc2 = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class TowerLayer(nn.Module):
    """One pre-norm layer of the vision transformer."""

    def __init__(self, shape: TowerShape):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.self_attn = TowerAttention(shape)
        self.layer_norm2 = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.mlp = TowerMlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Embeddings(nn.Module):
    """Projects the patches and adds their positions."""

    def __init__(self, shape: TowerShape):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, shape.hidden_size, shape.patch_size, shape.patch_size)
        self.position_embedding = nn.Embedding((shape.image_size // shape.patch_size) ** 2, shape.hidden_size)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.patch_embedding(pictures).flatten(2).transpose(1, 2) + self.position_embedding.weight


class Tower(nn.Module):
    """Pictures [batch, 3, edge, edge] with values from -1 to 1 in, features [batch, patches, hidden_size] out."""

    def __init__(self, shape: TowerShape):
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(TowerLayer(shape) for _ in range(shape.num_hidden_layers))})
        self.post_layernorm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(pictures)
        for layer in self.encoder["layers"]:
            x = layer(x)
        return self.post_layernorm(x)


class Attention(nn.Module):
    """Grouped-query attention with RoPE, causal."""

    def __init__(self, shape: TextShape):
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (split_heads(p(x), self.shape.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return self.o_proj(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on x [batch, heads, length, head_dim]; cos and sin are [batch, 1, length, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Mlp(nn.Module):
    """The gated SiLU feed-forward layer."""

    def __init__(self, shape: TextShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm layer of the Llama."""

    def __init__(self, shape: TextShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Embeddings [batch, length, hidden_size] and positions [batch, length] in, final hidden states out."""

    def __init__(self, shape: TextShape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32) / self.shape.head_dim
        angles = positions[:, None, :, None].float() * self.shape.rope_theta ** -steps
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab_size] by the tied embedding."""
        return F.linear(hidden, self.embed_tokens.weight)


class Connector(nn.Module):
    """Projects the concatenated features of each square of patches."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.factor = shape.scale_factor
        width = shape.tower.hidden_size * self.factor ** 2
        self.modality_projection = nn.ModuleDict({"proj": nn.Linear(width, shape.text.hidden_size, bias=False)})

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        edge, factor = round(features.shape[1] ** 0.5), self.factor
        squares = features.view(len(features), edge // factor, factor, edge // factor, factor, -1)
        return self.modality_projection["proj"](squares.transpose(2, 3).flatten(3).flatten(1, 2))


class Vision(nn.Module):
    """The whole model."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.vision_model = Tower(shape.tower)
        self.connector = Connector(shape)
        self.text_model = Llama(shape.text)
        for parameter_name, parameter in self.named_parameters():
            if parameter_name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in parameter_name:
                is_table = "embed_tokens" in parameter_name or "position" in parameter_name
                fan_in = parameter[0].numel()
                nn.init.normal_(parameter, 0.0, EMBED_STD if is_table else fan_in ** -0.5)
            if parameter_name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight")):
                parameter.data *= 0.4

    def see(self, pictures: torch.Tensor) -> torch.Tensor:
        """Embeddings [batch, image_tokens, hidden_size] of pictures whose values are from 0 to 1."""
        return self.connector(self.vision_model(pictures * 2 - 1))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, image: int) -> torch.Tensor:
        """Final hidden states of token ids, in which each id `image` is in the place of the next row of `seen`."""
        x = self.text_model.embed_tokens(ids)
        x = x.masked_scatter((ids == image)[..., None], seen)
        return self.text_model(x, positions)
