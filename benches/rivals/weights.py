"""Random weights of three shapes with a vocabulary of 32,768, a folder for each.

    qwen3      the shape of Qwen3-0.6B: 474 million parameters, attention in all 28 layers
    qwen3.5    the shape of Qwen3.5-0.8B: 532 million, Gated DeltaNet in 18 of 24 layers
    qwen3-moe  a small relative of Qwen3-30B-A3B: 24 layers of 48 experts, of which a token uses 6;
               1.97 billion parameters, 385 million for a token

weights.make(FOLDER, SHAPE) writes FOLDER/SHAPE/hf (safetensors in bf16, for PyTorch, OpenVINO, vLLM and Stolon),
and BF16.gguf, Q8_0.gguf and Q4_0.gguf next to it (for llama.cpp and Stolon) unless they are there, and says
where. A token is a byte or a made-up word, so that servers can send each token as text.

weights.quantized(FOLDER, TYPE) lets llama.cpp write BF16.gguf in another type, such as Q4_K_M, unless the file
is there, and says where.
"""

import json
import pathlib

import gguf
import numpy
import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, POSITIONS, EPS = 32_768, 1024, 8192, 1e-6

CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


class Qwen3:
    """The configuration of Qwen3, and for each layer the names in safetensors and in GGUF, and the
    shapes."""

    arch, layers, inner, heads, kv_heads, head_dim, theta = "qwen3", 28, 3072, 16, 8, 128, 1e6
    # The number that a model adds to the weights of its norms. In GGUF files it is already added.
    offset = 0.0

    def config(self):
        return {
            **CONFIG,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.theta,
        }

    def metadata(self, writer):
        writer.add_block_count(self.layers)
        writer.add_context_length(POSITIONS)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_freq_base(self.theta)
        writer.add_layer_norm_rms_eps(EPS)
        writer.add_vocab_size(VOCAB)

    def attention(self, query_width=1):
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            ("self_attn.q_proj.weight", "attn_q.weight", [query_width * queries, HIDDEN]),
            ("self_attn.k_proj.weight", "attn_k.weight", [keys, HIDDEN]),
            ("self_attn.v_proj.weight", "attn_v.weight", [keys, HIDDEN]),
            ("self_attn.o_proj.weight", "attn_output.weight", [HIDDEN, queries]),
            ("self_attn.q_norm.weight", "attn_q_norm.weight", [self.head_dim]),
            ("self_attn.k_norm.weight", "attn_k_norm.weight", [self.head_dim]),
        ]

    def mixer(self, index):
        return self.attention()

    def layer(self, index, second_norm="ffn_norm"):
        return [
            ("input_layernorm.weight", "attn_norm.weight", [HIDDEN]),
            *self.mixer(index),
            ("post_attention_layernorm.weight", f"{second_norm}.weight", [HIDDEN]),
            *self.mlp(),
        ]

    def mlp(self):
        return [
            ("mlp.gate_proj.weight", "ffn_gate.weight", [self.inner, HIDDEN]),
            ("mlp.up_proj.weight", "ffn_up.weight", [self.inner, HIDDEN]),
            ("mlp.down_proj.weight", "ffn_down.weight", [HIDDEN, self.inner]),
        ]


class Qwen3Moe(Qwen3):
    """Experts in all layers."""

    arch, layers, inner, kv_heads, experts, used = "qwen3moe", 24, 512, 4, 48, 6

    def config(self):
        return {
            **super().config(),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.inner,
            "num_experts": self.experts,
            "num_experts_per_tok": self.used,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def metadata(self, writer):
        super().metadata(writer)
        writer.add_expert_count(self.experts)
        writer.add_expert_used_count(self.used)
        writer.add_expert_feed_forward_length(self.inner)

    def mlp(self):
        """The matrices of all experts are one tensor in GGUF, and one tensor each in safetensors."""
        size = {"gate": [self.inner, HIDDEN], "up": [self.inner, HIDDEN], "down": [HIDDEN, self.inner]}
        return [
            ("mlp.gate.weight", "ffn_gate_inp.weight", [self.experts, HIDDEN]),
            *(
                (f"mlp.experts.{{}}.{part}_proj.weight", f"ffn_{part}_exps.weight", [self.experts, *size[part]])
                for part in size
            ),
        ]


class Qwen35(Qwen3):
    arch, layers, inner, heads, kv_heads, head_dim, theta = "qwen35", 24, 3584, 8, 2, 256, 1e7
    offset = 1.0
    interval, state_heads, state_dim, taps = 4, 16, 128, 4
    rotary, sections = 64, [11, 11, 10]

    def config(self):
        rope = {"rope_type": "default", "rope_theta": self.theta, "partial_rotary_factor": 0.25}
        return {
            **super().config(),
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "full_attention_interval": self.interval,
            "attn_output_gate": True,
            "linear_conv_kernel_dim": self.taps,
            "linear_num_key_heads": self.state_heads,
            "linear_num_value_heads": self.state_heads,
            "linear_key_head_dim": self.state_dim,
            "linear_value_head_dim": self.state_dim,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": {**rope, "mrope_interleaved": True, "mrope_section": self.sections},
        }

    def metadata(self, writer):
        super().metadata(writer)
        writer.add_rope_dimension_count(self.rotary)
        writer.add_rope_dimension_sections([*self.sections, 0])
        writer.add_full_attention_interval(self.interval)
        writer.add_ssm_conv_kernel(self.taps)
        writer.add_ssm_state_size(self.state_dim)
        writer.add_ssm_group_count(self.state_heads)
        writer.add_ssm_time_step_rank(self.state_heads)
        writer.add_ssm_inner_size(self.state_heads * self.state_dim)

    def mixer(self, index):
        if (index + 1) % self.interval == 0:
            # Each query has a gate.
            return self.attention(query_width=2)
        width = self.state_heads * self.state_dim
        return [
            ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", [3 * width, HIDDEN]),
            ("linear_attn.in_proj_z.weight", "attn_gate.weight", [width, HIDDEN]),
            ("linear_attn.in_proj_b.weight", "ssm_beta.weight", [self.state_heads, HIDDEN]),
            ("linear_attn.in_proj_a.weight", "ssm_alpha.weight", [self.state_heads, HIDDEN]),
            ("linear_attn.conv1d.weight", "ssm_conv1d.weight", [3 * width, 1, self.taps]),
            ("linear_attn.dt_bias", "ssm_dt.bias", [self.state_heads]),
            ("linear_attn.A_log", "ssm_a", [self.state_heads]),
            ("linear_attn.norm.weight", "ssm_norm.weight", [self.state_dim]),
            ("linear_attn.out_proj.weight", "ssm_out.weight", [HIDDEN, width]),
        ]

    def layer(self, index):
        return super().layer(index, "post_attention_norm")


SHAPES = {"qwen3": Qwen3(), "qwen3.5": Qwen35(), "qwen3-moe": Qwen3Moe()}


def tensors(shape):
    """Names in safetensors and in GGUF, and values of both: small numbers, norms that multiply by about 1."""
    random = torch.Generator().manual_seed(1)
    named = [("embed_tokens.weight", "token_embd.weight", [VOCAB, HIDDEN])]
    for index in range(shape.layers):
        named += [(f"layers.{index}.{hf}", f"blk.{index}.{gg}", size) for hf, gg, size in shape.layer(index)]
    named.append(("norm.weight", "output_norm.weight", [HIDDEN]))
    for hf, gg, size in named:
        values = torch.randn(size, generator=random) * 0.02
        others = values
        if hf.endswith("linear_attn.norm.weight"):
            values = others = values + 1.0
        elif hf.endswith("norm.weight"):
            values, others = values + 1.0 - shape.offset, values + 1.0
        elif hf.endswith("A_log"):
            others = -values.exp()
        elif hf.endswith("conv1d.weight"):
            # Values large enough that the recurrence matters.
            values = values * 20.0
            others = values.squeeze(1)
        rounded = values.to(torch.bfloat16)
        yield f"model.{hf}", gg, rounded, rounded if others is values else others.to(torch.bfloat16)


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


def write_gguf(path, shape, named, kind):
    """Vectors, convolutions and routers stay f32, as llama.cpp wants them."""
    writer = gguf.GGUFWriter(path, shape.arch)
    shape.metadata(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t h"])
    for name, values in named:
        values = numpy.ascontiguousarray(values.to(torch.float32).numpy())
        if values.ndim == 1 or name.endswith(("ssm_conv1d.weight", "ffn_gate_inp.weight")):
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(folder, name="qwen3"):
    folder, shape = pathlib.Path(folder) / name, SHAPES[name]
    done = folder / "done"
    if done.exists():
        return folder
    (folder / "hf").mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "hf")
    both = list(tensors(shape))
    (folder / "hf" / "config.json").write_text(json.dumps(shape.config(), indent=1))
    named = {}
    for hf, _, values, _ in both:
        # `{}` is the place of the number of an expert.
        named |= {hf.format(index): part.clone() for index, part in enumerate(values)} if "{}" in hf else {hf: values}
    save_file(named, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.BF16, kinds.Q8_0, kinds.Q4_0):
        write_gguf(folder / f"{kind.name}.gguf", shape, [(gg, values) for _, gg, _, values in both], kind)
    done.touch()
    return folder


def quantized(folder, kind):
    path = pathlib.Path(folder) / f"{kind}.gguf"
    if not path.exists():
        import llama_cpp as lc

        params = lc.llama_model_quantize_default_params()
        params.ftype = getattr(lc, f"LLAMA_FTYPE_MOSTLY_{kind}")
        unfinished = path.with_suffix(".part")
        source = path.with_name("BF16.gguf")
        if lc.llama_model_quantize(str(source).encode(), str(unfinished).encode(), params) != 0:
            raise SystemExit(f"llama.cpp could not write {path}")
        unfinished.rename(path)
    return path
