"""Vectors of texts per second: python benches/encoders.py path/to/stolon [MODEL ...]

Compares `stolon serve`, over HTTP, with sentence-transformers, llama.cpp (llama-cpp-python) and OpenVINO
GenAI, each in the process of this script, by turns. The models have random weights in the shapes of all-MiniLM-L6 and
bge-base, and the texts have 20 to 500 tokens. Prints the medians of each number of texts, and the medians
of the ratios of the rounds. Weights are f32 in the files of Stolon, sentence-transformers and OpenVINO, and
f16 in that of llama.cpp, as its converter writes them by default. OpenVINO pads the texts of a batch, and
gets batches of 32 in the order of their lengths, as sentence-transformers forms them itself. Run it on a machine with nothing else to do: the
threads of the others wait for each other in a loop, and lose the most next to other programs.

    pip install sentence-transformers llama-cpp-python gguf numpy openvino-genai openvino-tokenizers
"""

import argparse
import base64
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

import numpy
import torch

SHAPES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
VOCAB = 30522
LONGEST = 512


def words():
    """The pieces of a vocabulary of the usual size: words of four letters, and the special tokens."""
    letters = "abcdefghijklmnop"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    count = VOCAB - len(special)
    return special + ["".join(letters[n >> shift & 15] for shift in (0, 4, 8, 12)) for n in range(count)]


def make_model(folder, shape):
    """A BERT model with random weights, as sentence-transformers saves it, and its GGUF file."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    vocab = {word: index for index, word in enumerate(words())}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(vocab)[:5])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": LONGEST,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]})
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB, num_attention_heads=12, max_position_embeddings=LONGEST, **shape)
    model = BertModel(config, add_pooling_layer=False)
    model.save_pretrained(folder)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write(folder, "modules.json", [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)])
    write(folder, "sentence_bert_config.json", {"max_seq_length": LONGEST, "do_lower_case": False})
    write(folder, "1_Pooling/config.json", {
        "word_embedding_dimension": shape["hidden_size"], "pooling_mode_mean_tokens": True})
    write_gguf(folder / "model.gguf", config, model.state_dict(), list(vocab))


def write(folder, name, value):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value))


def write_gguf(path, config, tensors, vocab):
    import gguf

    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(LONGEST)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(vocab[:5] + ["\u2581" + word for word in vocab[5:]])
    writer.add_token_types([gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * (VOCAB - 5))
    writer.add_token_type_count(2)
    for add, token in [("bos", 2), ("eos", 3), ("unk", 1), ("sep", 3), ("pad", 0), ("mask", 4)]:
        getattr(writer, f"add_{add}_token_id")(token)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        is_matrix = values.ndim == 2 and "position" not in name and "token_type" not in name
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, values.astype(numpy.float16 if is_matrix else numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def texts(count, seed):
    """Texts of 20 to 500 tokens, two of which are special."""
    draw, own = random.Random(seed), words()[5:]
    return [" ".join(draw.choices(own, k=draw.randint(18, 498))) for _ in range(count)]


class Stolon:
    def __init__(self, folder, threads, binary):
        command = [binary, "serve", "--port", "0", "--model", str(folder), "--threads", str(threads)]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        lines = (line for line in self.server.stdout if line.startswith("listening on "))
        self.url = next(lines).removeprefix("listening on ").strip() + "/v1/embeddings"

    def embed(self, inputs):
        body = json.dumps({"input": inputs, "encoding_format": "base64"}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as response:
            data = json.load(response)["data"]
        return [numpy.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data]

    def close(self):
        self.server.terminate()
        self.server.wait(timeout=60)


class SentenceTransformers:
    def __init__(self, folder, threads, _):
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self.model = SentenceTransformer(str(folder), device="cpu")

    def embed(self, inputs):
        return self.model.encode(inputs, show_progress_bar=False)

    def close(self):
        pass


class LlamaCpp:
    def __init__(self, folder, threads, _):
        import llama_cpp

        self.model = llama_cpp.Llama(
            str(folder / "model.gguf"), embedding=True, n_ctx=4 * LONGEST, n_batch=4 * LONGEST,
            n_ubatch=4 * LONGEST, n_threads=threads, n_threads_batch=threads, verbose=False)

    def embed(self, inputs):
        return [numpy.array(row) for row in self.model.embed(inputs, normalize=True)]

    def close(self):
        self.model.close()


class OpenVino:
    def __init__(self, folder, threads, _):
        import openvino
        import openvino_genai
        import openvino_tokenizers
        from transformers import AutoTokenizer, BertModel

        model = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="sdpa").eval()
        names = ["input_ids", "attention_mask", "token_type_ids"]
        example = {name: torch.ones(2, 8, dtype=torch.int64) for name in names}
        converted = openvino.convert_model(model, example_input=example)
        for port in converted.inputs:
            port.node.set_partial_shape(openvino.PartialShape([-1, -1]))
        converted.validate_nodes_and_infer_types()
        openvino.save_model(converted, folder / "openvino_model.xml", compress_to_fp16=False)
        tokenizer = openvino_tokenizers.convert_tokenizer(AutoTokenizer.from_pretrained(folder))
        openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
        config = openvino_genai.TextEmbeddingPipeline.Config()
        config.pooling_type = openvino_genai.TextEmbeddingPipeline.PoolingType.MEAN
        config.normalize = True
        self.pipeline = openvino_genai.TextEmbeddingPipeline(
            str(folder), "CPU", config, INFERENCE_NUM_THREADS=threads, INFERENCE_PRECISION_HINT="f32")

    def embed(self, inputs):
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        rows = [None] * len(inputs)
        for start in range(0, len(order), 32):
            batch = order[start:start + 32]
            for index, row in zip(batch, self.pipeline.embed_documents([inputs[index] for index in batch])):
                rows[index] = numpy.array(row)
        return rows

    def close(self):
        del self.pipeline


ENGINES = {"Stolon": Stolon, "sentence-transformers": SentenceTransformers, "llama.cpp": LlamaCpp,
           "OpenVINO": OpenVino}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 32, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="the first two are always needed")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            make_model(folder, SHAPES[name])
            engines = {
                engine: make(folder, arguments.threads, arguments.binary)
                for engine, make in ENGINES.items() if engine in arguments.engines}
            check(engines)
            for count in arguments.counts:
                measure(name, count, engines, arguments.rounds)
            for engine in engines.values():
                engine.close()


def check(engines):
    """All engines compute the same model."""
    inputs = texts(4, 0)
    rows = {name: engine.embed(inputs) for name, engine in engines.items()}
    for name, own in rows.items():
        least = min(float(numpy.dot(a, b)) for a, b in zip(own, rows["sentence-transformers"]))
        assert least > 0.999, (name, least)


def measure(name, count, engines, rounds):
    times = {engine: [] for engine in engines}
    for round in range(rounds + 1):
        inputs = texts(count, round)
        tokens = sum(text.count(" ") + 3 for text in inputs)
        for engine, own in engines.items():
            # Threads of the last one may still be spinning.
            time.sleep(0.3)
            begun = time.perf_counter()
            own.embed(inputs)
            # The first round warms up.
            if round > 0:
                times[engine].append((time.perf_counter() - begun) / tokens)
    for engine, own in times.items():
        ratios = [theirs / ours for theirs, ours in zip(own, times["Stolon"])]
        print(f"{name} {count} texts, {engine}: {1 / statistics.median(own):.0f} tokens/s, "
              f"Stolon {statistics.median(ratios):.2f} times as fast", flush=True)


if __name__ == "__main__":
    sys.exit(main())
