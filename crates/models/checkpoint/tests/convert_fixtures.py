"""Writes the models of fixtures/ to GGUF files with llama.cpp's own converter, for the tests of what it writes.

    pip install torch transformers safetensors numpy
    python convert_fixtures.py LLAMA_CPP FOLDER          # the sources of llama.cpp, which have conversion/
    STOLON_CONVERTED=FOLDER cargo test -p stolon-cpu -- --ignored converted

A fixture has a configuration of today's transformers. Where the converter expects what the publishers of a model
write, it gets a copy that is changed to that.
"""

import json
import logging
import pathlib
import shutil
import subprocess
import sys
import tempfile

from safetensors.torch import load_file, save_file

FIXTURES = pathlib.Path(__file__).resolve().parent / "fixtures"
sys.path.append(str(FIXTURES))

import weights

# Why the converter cannot write these fixtures.
LEFT_OUT = {
    "granitemoehybrid": "it expects experts or recurrent layers",
    "kimi_linear": "it expects as many heads of both kinds",
    "mistral4": "it does not know the name of the class",
    "nemotron_h_moe": "it expects experts in all layers with an MLP or in none",
    "qwen2_moe": "it expects experts in all layers",
    "qwen3_vl_moe": "it expects experts in all layers",
}

# Why the converter cannot write these adapters.
ADAPTERS_LEFT_OUT = {
    "deepseek_v2": "it cannot divide the projection to the keys and values of heads",
    "deepseek_v3": "it cannot divide the projection to the keys and values of heads",
    "falcon_h1_plain": "it cannot multiply the inputs of Mamba-2 by their factors",
    "gpt_oss": "it does not read parameters of experts",
    "kimi_linear": "it does not write the model",
    "llama3": "files have one scale for all modules",
    "nemotron_h_moe": "it does not read parameters of experts",
    "olmoe": "it does not read parameters of experts",
    "qwen2_moe": "it does not write the model",
    "qwen3_moe": "it does not read parameters of experts",
    "qwen3_next": "it does not write the model",
}

# The token in the place of an image, which has the id 60 in the fixtures.
ENCODERS = {
    "gemma3": "<image_soft_token>",
    "qwen3_5": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "smolvlm": "<image>",
}
IMAGE_TOKEN_ID = 60


def as_published(name, config):
    """Changes the configuration of a fixture to what the converter expects."""
    if config["model_type"] == "granitemoehybrid":
        kinds = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [kinds[kind] for kind in config["layer_types"]]
        if not config["num_local_experts"]:
            config["intermediate_size"] = config["shared_intermediate_size"]
    if config["model_type"] in ("deepseek_v3", "glm4_moe_lite"):
        config["scoring_func"] = "sigmoid"
    if config["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
        pattern = [letters[kind] for kind in config["layers_block_type"]]
        config["hybrid_override_pattern"] = "".join(pattern)
        config["num_hidden_layers"] = len(pattern)
        config["mamba_d_head"] = config["mamba_head_dim"]
        for key in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size"):
            del config[key]
    if name == "qwen3_5":
        # Otherwise, adapters of it are not converted.
        config["mtp_num_hidden_layers"] = 1
    if name == "smolvlm":
        config["text_config"]["architectures"] = ["VLlama3ForCausalLM"]
    if name == "cohere2":
        config["rotary_pct"] = 1.0
    if name == "falcon_h1_plain":
        config["ssm_multipliers"] = [1.0] * 5
        config["mamba_d_ssm"] = config["mamba_expand"] * config["hidden_size"]


def copied(fixture, folder):
    """A copy of a fixture that the converter reads, and the tokens that it gets."""
    folder = pathlib.Path(folder) / fixture.name
    shutil.copytree(fixture, folder, ignore=shutil.ignore_patterns("expected.safetensors", "images.safetensors"))
    weights.write(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    as_published(fixture.name, config)
    path.write_text(json.dumps(config))
    size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    tokens = [f"token {id}" for id in range(size)]
    tokenizer = {"model": {"vocab": {token: id for id, token in enumerate(tokens)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if config["model_type"] == "gemma3":
        file = folder / "model.safetensors"
        tower, published = "vision_tower.", "vision_tower.vision_model."
        named = {name.replace(tower, published): value for name, value in load_file(file).items()}
        save_file(named, file)
        path = folder / "preprocessor_config.json"
        processor = {**json.loads(path.read_text()), "image_seq_length": config["mm_tokens_per_image"]}
        path.write_text(json.dumps(processor))
    return folder, tokens


def write_vocabulary(model, tokens):
    model.gguf_writer.add_tokenizer_model("gpt2")
    model.gguf_writer.add_tokenizer_pre("gpt-2")
    model.gguf_writer.add_token_list(tokens)
    model.gguf_writer.add_token_types([1] * len(tokens))
    model.gguf_writer.add_token_merges(["t h"])


def main():
    sources, out = map(pathlib.Path, sys.argv[1:3])
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import gguf
    from conversion import ModelBase, get_model_class

    # Without the defaults of transformers, which make all Nemotron-H models such with experts.
    ModelBase.load_hparams = lambda folder, *_, **__: json.loads((folder / "config.json").read_text())
    logging.disable(logging.WARNING)
    failed = []

    def convert(fixture, file, image_token=None, encoder=False, head=False):
        with tempfile.TemporaryDirectory() as folder:
            folder, tokens = copied(fixture, folder)
            if image_token:
                tokens[IMAGE_TOKEN_ID] = image_token
            config = json.loads((folder / "config.json").read_text())
            classes = config if encoder or fixture.name != "smolvlm" else config["text_config"]
            kind = get_model_class(classes["architectures"][0], mmproj=encoder)
            kind.set_vocab = lambda model: write_vocabulary(model, tokens)
            kind.no_mtp = not head
            try:
                kind(folder, gguf.LlamaFileType.ALL_F32, file).write()
            except Exception as error:
                failed.append(f"{file.name}: {error!r}")

    def convert_adapter(fixture, file):
        with tempfile.TemporaryDirectory() as folder:
            base, _ = copied(FIXTURES / fixture.name, folder)
            adapter = shutil.copytree(fixture, pathlib.Path(folder) / "adapter")
            weights.write(adapter)
            command = [sys.executable, sources / "convert_lora_to_gguf.py", adapter, "--base", base]
            result = subprocess.run([*command, "--outfile", file, "--outtype", "f32"], capture_output=True, text=True)
            if result.returncode != 0:
                failed.append(f"{file}: {result.stderr}")

    for part in ("images", "lora", "mtp"):
        (out / part).mkdir(parents=True, exist_ok=True)
    for fixture in sorted(path.parent for path in FIXTURES.glob("*/expected.safetensors")):
        # The converter reads the encoder only of Moondream.
        if fixture.name not in LEFT_OUT and not fixture.name.startswith("moondream"):
            convert(fixture, out / f"{fixture.name}.gguf")
    for fixture in (FIXTURES / "mtp").iterdir():
        # The converter knows MiMo-V2 only.
        if fixture.name != "mimo":
            convert(fixture, out / "mtp" / f"{fixture.name}.gguf", head=True)
    for name, token in ENCODERS.items():
        convert(FIXTURES / "images" / name, out / "images" / f"{name}.gguf", token)
        convert(FIXTURES / "images" / name, out / "images" / f"{name}-mmproj.gguf", token, encoder=True)
    for fixture in (FIXTURES / "lora").iterdir():
        if fixture.name not in ADAPTERS_LEFT_OUT:
            convert_adapter(fixture, out / "lora" / f"{fixture.name}.gguf")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
