"""Thirty turns of coding agents with `stolon serve`:

    python sessions.py path/to/stolon node_modules templates [--real MODEL.gguf ...] [--only AGENT/TEMPLATE ...]
                                                             [--log FILE]

Each agent of run.py but Cline has a session with each of TEMPLATES, the chat templates of well-known models;
`templates` is a folder with those that llama.cpp publishes. As in run.py the model recites, so that the agent has something
to do. Between the agent and the server is a proxy. It names the script of each turn in the request, writes down
what is refused and what was cached, and brings about what happens in long sessions: half of an emoji in a result,
an answer that ends within a call, and, next to those, a picture for a model that takes text only and a
compaction. A session fails if a request is refused, or if one of these did not occur. Qwen Code and pi get no
picture and compact nothing.

With `--real`, each request of one more session is also sent to servers with these models, whose answers nobody
reads: these models are too small to work. Their contexts are small, too, so the agents have short instructions,
and the models get the tools that are called only.
"""

import argparse
import base64
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading

import run
from proxy import Proxy, connect
from run import scripted

TURNS = 30
# Each part of a session is one more run of the agent, which continues the one before.
TURNS_PER_PART = 10
MAX_SECONDS = 600
HIDDEN = 512
IMAGE_TURN, EMOJI_TURN, CUT_TURN, TWO_CALLS_TURN = 4, 7, 14, 17
EMOJI = "\U0001f600"
SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}\
{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# The prompt ends with the name of the script, which the model continues.
SCRIPT = "{%- if add_generation_prompt %}{{ script }}{%- endif %}"
# What agents get instead of their own instructions, for real models with a small context.
INSTRUCTIONS = "You are an agent. Use the tools."
# A picture of one pixel.
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
# What the agents ask for when they compact a conversation.
COMPACTION = ["CONTEXT CHECKPOINT COMPACTION", "Respond with TEXT ONLY", "anchored summary"]
OCCURS = {"cut", "half an emoji", "picture", "compaction"}
SUMMARY = "<summary>\nThe files were read in order. Go on with the next one.\n</summary>"


def json_call(tool, arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def tagged_call(tool, arguments):
    values = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in arguments.items()
    )
    return f"<tool_call>\n<function={tool}>\n{values}</function>\n</tool_call>"


def mistral_call(tool, arguments):
    return f"[TOOL_CALLS]{tool}[ARGS]{json.dumps(arguments)}"


class Template:
    """A chat template, how its model writes calls, what it writes before them, and what the template itself
    begins each answer with, if that is reasoning."""

    def __init__(self, file, call, before="", opening="", source=None):
        self.file, self.call, self.before, self.opening, self.source = file, call, before, opening, source

    def text(self, folder):
        source = self.source or (folder / self.file).read_text()
        if not self.opening:
            return source + SCRIPT
        # The server has to see that the reasoning is open, so the opening stays at the end.
        old = "{{- " + repr(self.opening) + " }}"
        assert source.count(old) == 1, self.file
        return source.replace(old, "{{- script ~ " + repr(self.opening) + " }}")

    def scripts(self, folders):
        """The scripts of all turns: two pieces each, so that an answer can be cut within its call."""
        answers = {"text": [self.before + "All is done."]}
        for session in SESSIONS:
            # The agent's name makes the pieces different from those of the others.
            answers[f"{session.name}-summary"] = [f"{self.before}{SUMMARY} ({session.name})"]
            for turn in range(TURNS):
                calls = "\n".join(self.call(*call) for call in session.calls(turn, folders[session.name]))
                text = f"{self.before}Turn {turn} of {session.name}.\n{calls}"
                answers[f"{session.name}-{turn:02}"] = [text[:-12], text[-12:]]
        return distinct({f"script:{name}{self.opening}": pieces for name, pieces in answers.items()})


TEMPLATES = {
    "qwen3": Template("Qwen-Qwen3-0.6B.jinja", json_call, "<think>\nI look.\n</think>\n\n"),
    "qwen3.5": Template("Qwen3.5-4B.jinja", tagged_call, "I look.\n</think>\n\n", "<think>\n"),
    "gemma": Template("google-gemma-2-2b-it.jinja", json_call),
    "mistral": Template("Mistral-Small-3.2-24B-Instruct-2506.jinja", mistral_call),
    "smollm2": Template(None, json_call, source=SMOLLM2),
}


class Session:
    """How an agent takes part: the calls that the model makes in a turn, how a part of the session starts, and what
    has to occur in it."""

    def __init__(self, name, read, execute, start, picture=None, occurs=OCCURS):
        self.name, self.read, self.execute, self.start, self.picture = name, read, execute, start, picture
        self.occurs = occurs
        self.tools = {read("")[0], execute("")[0]}

    def calls(self, turn, folder):
        path = str(folder / f"notes-{turn:02}.txt")
        if turn == IMAGE_TURN and self.picture:
            return [self.picture(str(folder / "picture.png"))]
        if turn == EMOJI_TURN:
            return [self.execute(f"cat {folder / 'emoji.txt'}")]
        if turn == TWO_CALLS_TURN:
            return [self.execute("ls"), self.execute(f"cat {path}")]
        return [self.read(path) if turn % 2 else self.execute(f"wc -c {path}")]


def start_claude(binaries, url, folder, home, part, task, proxy):
    command, environment = run.start_claude(binaries, url, folder, home, task)
    if part:
        command.append("--continue")
    if proxy.short:
        command += ["--tools", "Read,Bash", "--system-prompt", INSTRUCTIONS]
    return command, environment


def start_codex(binaries, url, folder, home, part, task, proxy):
    command, environment = run.start_codex(binaries, url, folder, home, task)
    if proxy.short:
        (home / "instructions.md").write_text(INSTRUCTIONS)
        command[2:2] = ["-c", f"model_instructions_file={json.dumps(str(home / 'instructions.md'))}"]
    if part:
        command[-1:] = ["resume", "--last", task]
    if part == 2:
        command[2:2] = ["-c", f"model_auto_compact_token_limit={proxy.last_tokens - 50}"]
    return command, environment


def start_opencode(binaries, url, folder, home, part, task, proxy):
    # The agent compacts when its last request had more tokens than the model's limit leaves.
    limit = {"context": proxy.last_tokens if part == 2 else 1_000_000, "output": 1000}
    model = {"limit": limit, "attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
    command, environment = run.start_opencode(binaries, url, folder, home, task, model)
    if part:
        command.append("--continue")
    return command, environment


def start_qwen(binaries, url, folder, home, part, task, proxy):
    command, environment = run.start_qwen(binaries, url, folder, home, task)
    if part:
        command.append("--continue")
    if proxy.short:
        command += ["--system-prompt", INSTRUCTIONS]
    return command, environment


def start_pi(binaries, url, folder, home, part, task, proxy):
    command, environment = run.start_pi(binaries, url, folder, home, task)
    if part:
        command.insert(1, "--continue")
    if proxy.short:
        command[1:1] = ["--system-prompt", INSTRUCTIONS]
    return command, environment


SESSIONS = [
    Session(
        "claude", lambda path: ("Read", {"file_path": path}),
        lambda command: ("Bash", {"command": command, "description": "Look"}), start_claude,
        lambda path: ("Read", {"file_path": path}),
    ),
    Session(
        "codex", lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        lambda command: ("exec_command", {"cmd": command}), start_codex,
        lambda path: ("view_image", {"path": path}),
    ),
    Session(
        "opencode", lambda path: ("read", {"filePath": path}), lambda command: ("bash", {"command": command}),
        start_opencode,
        lambda path: ("read", {"filePath": path}),
    ),
    Session(
        "qwen", lambda path: ("read_file", {"file_path": path}),
        lambda command: ("run_shell_command", {"command": command, "is_background": False}), start_qwen,
        occurs={"cut", "half an emoji"},
    ),
    Session(
        "pi", lambda path: ("read", {"path": path}), lambda command: ("bash", {"command": command}), start_pi,
        occurs={"cut", "half an emoji"},
    ),
]


def distinct(scripts):
    """The same scripts with other cuts where two of them have the same piece: a piece is a token."""
    seen = set()
    for pieces in scripts.values():
        while len(pieces) == 2 and pieces[1] in seen:
            pieces[:] = [pieces[0][:-1], pieces[0][-1] + pieces[1]]
        seen.update(pieces)
    return scripts


class SessionProxy(Proxy):
    """Between one agent and the server. Its turns are the requests in which the agent works, whatever else it asks
    for besides (titles, compactions)."""

    def __init__(self, session, url, shadows=(), log=None):
        self.session, self.shadows, self.log = session, shadows, log
        self.short = bool(shadows)
        self.turn, self.last_tokens, self.cut, self.ends_part = 0, 0, False, False
        self.seen, self.refused, self.shares = set(), [], []
        self.shadow_shares = {shadow: [] for shadow in shadows}
        self.too_long = dict.fromkeys(shadows, 0)
        self.names = {}
        self.lock = threading.Lock()
        super().__init__(url)

    def changed(self, path, body):
        """The request as it is sent, after servers with real models got it, and its turn, if it is one."""
        try:
            request = json.loads(body)
        except ValueError:
            return body, None
        with self.lock:
            script, turn = self.script(request)
            request["chat_template_kwargs"] = {"script": f"script:{script}", "enable_thinking": True}
            if turn == CUT_TURN and not self.cut:
                # The agent gets the beginning of a call; then the model makes it once more.
                self.cut = True
                self.turn -= 1
                for name in ("max_tokens", "max_completion_tokens"):
                    request.pop(name, None)
                request["max_output_tokens" if path.endswith("/responses") else "max_tokens"] = 1
                self.seen.add("cut")
        text = json.dumps(request)
        if json.dumps(EMOJI)[1:-1] in text:
            self.seen.add("half an emoji")
        if any(mark in text for mark in ('"image"', '"image_url"', '"input_image"')):
            self.seen.add("picture")
        body = text.replace(json.dumps(EMOJI)[1:-1], "\\ud83d").encode()
        for shadow in self.shadows if turn is not None else []:
            self.ask(shadow, path, body)
        return body, turn

    def script(self, request):
        """The script that answers a request, and its turn."""
        messages = request.get("messages") or request.get("input") or []
        last = json.dumps(messages[-2:]) if isinstance(messages, list) else ""
        if any(mark in last for mark in COMPACTION):
            self.seen.add("compaction")
            return f"{self.session.name}-summary", None
        if not request.get("tools") or request.get("max_tokens") == 1:
            return "text", None
        turn = self.turn
        self.turn += 1
        if self.ends_part or turn >= TURNS:
            self.turn -= 1
            self.ends_part = False
            return "text", turn
        self.ends_part = (turn + 1) % TURNS_PER_PART == 0
        return f"{self.session.name}-{turn:02}", turn

    def ask(self, shadow, path, body):
        """Sends a request to a server with a real model, for a short answer."""
        request = json.loads(body)
        for name in ("max_tokens", "max_completion_tokens", "chat_template_kwargs", "stream", "stream_options"):
            request.pop(name, None)
        request["max_output_tokens" if path.endswith("/responses") else "max_tokens"] = 4
        name = lambda tool: tool.get("name") or tool.get("function", {}).get("name")
        request["tools"] = [tool for tool in request["tools"] if name(tool) in self.session.tools]
        connection = connect(shadow)
        # Half of an emoji is written as an escape sequence again.
        connection.request("POST", path.split("?")[0], json.dumps(request), {"content-type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
        if reply.status == 400 and "context_length_exceeded" in text:
            self.too_long[shadow] += 1
        elif reply.status >= 400:
            self.refused.append(f"{shadow}: {reply.status} {text[:300]}")
        if reply.status >= 400:
            return
        self.shadow_shares[shadow].append(usage(text)[1:])

    def record(self, path, turn, status, body, text):
        with self.lock:
            if self.log:
                row = {"path": path, "turn": turn, "status": status, "request": (body or b"").decode(), "reply": text}
                with self.log.open("a") as log:
                    log.write(json.dumps(row) + "\n")
            if status >= 400 and "/v1" in path:
                self.refused.append(f"turn {turn}, {path}: {status} {text[:300]}")
            if turn is not None and status == 200:
                answer, prompt, cached = usage(text)
                self.last_tokens = prompt + answer
                self.shares.append((prompt, cached))


def usage(text):
    """Tokens of the answer, of the prompt, and of those the cached ones, of a reply of any API."""

    def last(name):
        values = re.findall(rf'"{name}":\s*(\d+)', text)
        return int(values[-1]) if values else 0

    if "cache_read_input_tokens" in text:
        cached = max(int(value) for value in re.findall(r'"cache_read_input_tokens":\s*(\d+)', text))
        fresh = max(int(value) for value in re.findall(r'"input_tokens":\s*(\d+)', text))
        written = max([int(value) for value in re.findall(r'"cache_creation_input_tokens":\s*(\d+)', text)] or [0])
        return last("output_tokens"), cached + fresh + written, cached
    prompt = last("prompt_tokens") or last("input_tokens")
    return last("completion_tokens") or last("output_tokens"), prompt, last("cached_tokens")


def serve(binary, model, *more):
    command = [binary, "serve", "--port", "0", "--model", model, *more]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    listening = (line for line in server.stdout if line.startswith("listening on "))
    return server, next(listening).removeprefix("listening on ").strip()


def template_of(model, templates):
    """The option for the chat template of a real model; the base model of Gemma has none of its own."""
    if "gemma" not in model.stem:
        return []
    return ["--chat-template", templates / TEMPLATES["gemma"].file]


def stop(server):
    server.terminate()
    server.wait(timeout=60)


def converse(session, binaries, proxy, folder, home):
    """Runs all parts of a session. Returns what is wrong."""
    for turn in range(TURNS):
        (folder / f"notes-{turn:02}.txt").write_text(f"These are the notes of turn {turn}.\n" * 8)
    (folder / "emoji.txt").write_text(f"an emoji: {EMOJI}\n")
    (folder / "picture.png").write_bytes(PICTURE)
    problems, part, cut = [], 0, False
    while proxy.turn < TURNS and part < 8:
        tasks = [f"Part {part}: look at the notes, as before."]
        if session.name == "claude" and part == 2:
            tasks.insert(0, "/compact")
        for task in tasks:
            command, environment = session.start(binaries, proxy.address, folder, home, part, task, proxy)
            done = subprocess.run(
                command, cwd=folder, env={**os.environ, "HOME": str(home), "PWD": str(folder), **environment},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=MAX_SECONDS, check=False,
            )
            # An agent may end at an answer that was cut; then the session goes on with its next part.
            was_cut, cut = cut, proxy.cut
            if done.returncode != 0 and cut == was_cut:
                problems.append(f"part {part} ended with status {done.returncode}: {done.stdout[-1500:]}")
        part += 1
    if proxy.turn < TURNS:
        problems.append(f"only {proxy.turn} turns")
    missing = session.occurs - proxy.seen
    if missing:
        problems.append(f"did not occur: {', '.join(sorted(missing))}")
    return problems + proxy.refused


def shown(shares):
    return " ".join(f"{100 * cached // max(prompt, 1)}" for prompt, cached in shares)


def report(name, proxy, problems):
    print(f"{name}: {'; '.join(problems) if problems else 'ok'}, {proxy.turn} turns", flush=True)
    print(f"    cached by turn (%): {shown(proxy.shares)}", flush=True)
    for shadow, shares in proxy.shadow_shares.items():
        longest = max(prompt for prompt, _ in shares or [(0, 0)])
        title = f"{proxy.names.get(shadow)}, {proxy.too_long[shadow]} too long, others up to {longest} tokens"
        print(f"    {title}, cached (%): {shown(shares)}", flush=True)
    rest = [cached / max(prompt, 1) for prompt, cached in proxy.shares[1:]]
    return problems or (["too little was cached"] if statistics.median(rest or [0]) < 0.8 else [])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("modules", type=pathlib.Path)
    parser.add_argument("templates", type=pathlib.Path)
    parser.add_argument("--real", nargs="*", default=[], type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--log", type=pathlib.Path)
    options = parser.parse_args()
    binary, binaries = options.binary.resolve(), options.modules.resolve() / ".bin"
    failed = False
    cases = [(name, []) for name in TEMPLATES] + ([("qwen3", options.real)] if options.real else [])
    for name, real in cases:
        sessions = [
            session for session in SESSIONS
            if not options.only or f"{session.name}/{'real' if real else name}" in options.only
        ]
        if not sessions:
            continue
        with tempfile.TemporaryDirectory() as root:
            root = pathlib.Path(root)
            folders = {session.name: root / session.name for session in SESSIONS}
            template = TEMPLATES[name]
            text = template.text(options.templates)
            scripted.write(root / "model", template.scripts(folders), text, 1 << 18, HIDDEN)
            # Templates of published models rely on these.
            tokens = {"bos_token": "<s>", "eos_token": scripted.END}
            (root / "model" / "tokenizer_config.json").write_text(json.dumps(tokens))
            server, url = serve(binary, root / "model", "--kv-memory", "512M", "--served-model-name", "scripted")
            others = [
                serve(binary, model, "--kv-memory", "2G", *template_of(model, options.templates)) for model in real
            ]
            names = {url: model.stem for (_, url), model in zip(others, real, strict=True)}
            try:
                for session in sessions:
                    folder, home = folders[session.name], root / f"{session.name}-home"
                    folder.mkdir()
                    home.mkdir()
                    proxy = SessionProxy(session, url, [url for _, url in others], options.log)
                    proxy.names = names
                    problems = converse(session, binaries, proxy, folder, home)
                    title = f"{session.name}, {name}" + (" and real models" if real else "")
                    failed |= bool(report(title, proxy, problems))
            finally:
                for other, _ in [(server, url), *others]:
                    stop(other)
    sys.exit(failed)


if __name__ == "__main__":
    main()
