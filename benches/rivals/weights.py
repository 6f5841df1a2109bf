"""Random weights of the shape of Qwen3-0.6B with a vocabulary of 32,768: 474 million parameters.

weights.make(FOLDER) writes FOLDER/hf (safetensors in bf16, for PyTorch, OpenVINO, vLLM and Stolon), and
FOLDER/BF16.gguf, FOLDER/Q8_0.gguf and FOLDER/Q4_0.gguf (for llama.cpp and Stolon) unless they are there. A token
is a byte or a made-up word, so that servers have text to send for each.
"""

import json
import pathlib

import gguf
import numpy
import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32_768, 1024, 3072, 28, 16, 8, 128
POSITIONS = 8192
THETA = 1_000_000.0
EPS = 1e-6

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
    "rope_theta": THETA,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}

# Of each layer: name in safetensors, name in GGUF, shape.
LAYER = [
    ("input_layernorm", "attn_norm", [HIDDEN]),
    ("self_attn.q_proj", "attn_q", [HEADS * HEAD_DIM, HIDDEN]),
    ("self_attn.k_proj", "attn_k", [KV_HEADS * HEAD_DIM, HIDDEN]),
    ("self_attn.v_proj", "attn_v", [KV_HEADS * HEAD_DIM, HIDDEN]),
    ("self_attn.o_proj", "attn_output", [HIDDEN, HEADS * HEAD_DIM]),
    ("self_attn.q_norm", "attn_q_norm", [HEAD_DIM]),
    ("self_attn.k_norm", "attn_k_norm", [HEAD_DIM]),
    ("post_attention_layernorm", "ffn_norm", [HIDDEN]),
    ("mlp.gate_proj", "ffn_gate", [INNER, HIDDEN]),
    ("mlp.up_proj", "ffn_up", [INNER, HIDDEN]),
    ("mlp.down_proj", "ffn_down", [HIDDEN, INNER]),
]


def tensors():
    """Pairs of names, and values in bf16: matrices around 0, norms around 1."""
    random = torch.Generator().manual_seed(1)
    shapes = [("model.embed_tokens", "token_embd", [VOCAB, HIDDEN])]
    for index in range(LAYERS):
        shapes += [(f"model.layers.{index}.{hf}", f"blk.{index}.{gg}", s) for hf, gg, s in LAYER]
    shapes.append(("model.norm", "output_norm", [HIDDEN]))
    for hf, gg, shape in shapes:
        values = torch.randn(shape, generator=random) * 0.02 + (1.0 if len(shape) == 1 else 0.0)
        yield f"{hf}.weight", f"{gg}.weight", values.to(torch.bfloat16)


def vocabulary():
    """The tokens of byte-level BPE: the 256 bytes in GPT-2's letters, and words."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(others))]
    return letters + ["th"] + [f"\u0120w{index}" for index in range(VOCAB - len(letters) - 1)]


def write_tokenizer(folder):
    model = {"type": "BPE", "vocab": {token: id for id, token in enumerate(vocabulary())}, "merges": ["t h"]}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def write_gguf(path, named, kind):
    """Norms stay f32, as llama.cpp wants them."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t h"])
    for name, values in named:
        values = values.to(torch.float32).numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            data = gguf.quants.quantize(numpy.ascontiguousarray(values), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(folder):
    folder = pathlib.Path(folder)
    done = folder / "done"
    if done.exists():
        return
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "hf")
    both = list(tensors())
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG, indent=1))
    named = {hf: values for hf, _, values in both}
    save_file(named, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.BF16, kinds.Q8_0, kinds.Q4_0):
        write_gguf(folder / f"{kind.name}.gguf", [(gg, values) for _, gg, values in both], kind)
    done.touch()
