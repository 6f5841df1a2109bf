"""Lets coding agents work with `stolon serve`: python run.py path/to/stolon node_modules

Each agent of AGENTS, from the packages of npm that package.json names, gets the task to read a file, edit
it and run a command, and this script then looks at the files: once with settings of its own, and once with
`stolon launch` if that knows the agent. A small model could not drive an agent, so the server runs a model that recites: its chat
template ends a prompt with the name of a script, which follows from the tools that the agent offers and from
the number of results that it has sent, and the model's weights continue it with a call of a tool. All else is
real: the agents, their requests, the server, the parser of calls, and what the agents do on the disk. Needs node, and no network but the loopback.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "fixtures"))
import make_scripted_model as scripted

TASK = "Read notes.txt, replace draft by final in it, and then list it with ls into listing.txt."
MAX_SECONDS = 600
# Longer parts of a conversation are cut by the template: an agent's instructions do not matter to
# the scripts, and each byte is a token of the model.
PART_BYTES = 4000
TEMPLATE = """\
{%- set names = (tools or []) | map(attribute='function.name') | list %}
{%- for name in names %}{{ name + ' ' }}{% endfor %}
{%- for message in messages %}
    {{- '|' + message.role + '|' }}
    {%- if message.content %}{{ message.content[:PART_BYTES] }}{% endif %}
    {%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{%- endfor %}
{%- set turn = messages | selectattr('role', 'equalto', 'tool') | list | length %}
AGENT_RULES
{%- else %}{{ 'script:text' }}
{%- endif %}"""


class Agent:
    """A coding agent: the name of the tool that identifies it, the calls of the model, how it is started with
    settings of its own, its arguments for a task if `stolon launch` starts it, and the command that ends what
    it leaves running."""

    def __init__(self, name, tool, calls, start, arguments=None, end=None):
        self.name, self.tool, self.calls, self.start, self.arguments = name, tool, calls, start, arguments
        self.end = end

    def scripts(self, folder):
        for turn, (tool, arguments) in enumerate(self.calls(folder)):
            call = json.dumps({"name": tool, "arguments": arguments})
            yield f"script:{self.name}-{turn}", [f"Step {self.name} {turn}.\n<tool_call>\n{call}\n</tool_call>"]

    def ended(self, binaries):
        return self.end and [binaries / self.end[0], *self.end[1:]]

    def rule(self, folder):
        turns = len(self.calls(folder))
        return f"if '{self.tool}' in names and turn < {turns} %}}{{{{ 'script:{self.name}-' ~ turn }}}}"


def file_calls(tools, arguments):
    """The calls of an agent that reads, edits and runs with these tools. `arguments` are the names
    of the arguments for the file, the text to replace and its replacement."""
    (read, edit, run), (path, old, new) = tools, arguments

    def calls(folder):
        notes = str(folder / "notes.txt")
        return [
            (read, {path: notes}),
            (edit, {path: notes, old: "draft", new: "final"}),
            (run, {"command": "ls notes.txt > listing.txt", "description": "List the file"}),
        ]

    return calls


def claude_arguments(task):
    return ["-p", task, "--allowedTools", "Read,Edit,Bash", "--permission-mode", "acceptEdits"]


def start_claude(binaries, url, folder, home, task=TASK):
    environment = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "dummy", "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_SMALL_FAST_MODEL": "scripted", "CLAUDE_CONFIG_DIR": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
    }
    return [binaries / "claude", *claude_arguments(task)], environment


def codex_calls(folder):
    return [
        ("exec_command", {"cmd": "cat notes.txt"}),
        ("exec_command", {"cmd": "sed -i s/draft/final/ notes.txt"}),
        ("exec_command", {"cmd": "ls notes.txt > listing.txt"}),
    ]


def codex_arguments(task):
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task]


def start_codex(binaries, url, folder, home, task=TASK):
    (home / "config.toml").write_text(
        f'model = "scripted"\nmodel_provider = "stolon"\n[model_providers.stolon]\nname = "Stolon"\n'
        f'base_url = "{url}/v1"\nenv_key = "STOLON_KEY"\nwire_api = "responses"\n'
    )
    return [binaries / "codex", *codex_arguments(task)], {"CODEX_HOME": str(home), "STOLON_KEY": "dummy"}


def start_opencode(binaries, url, folder, home, task=TASK, model=None):
    provider = {
        "npm": "@ai-sdk/openai-compatible", "name": "Stolon",
        "options": {"baseURL": f"{url}/v1", "apiKey": "dummy"}, "models": {"scripted": {"name": "scripted", **(model or {})}},
    }
    settings = {"provider": {"stolon": provider}, "autoupdate": False, "share": "disabled"}
    (folder / "opencode.json").write_text(json.dumps(settings))
    return [binaries / "opencode", "run", "--model", "stolon/scripted", task], {}


def qwen_arguments(task):
    return ["--yolo", "-p", task]


def start_qwen(binaries, url, folder, home, task=TASK):
    environment = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "dummy", "OPENAI_MODEL": "scripted"}
    return [binaries / "qwen", "--auth-type", "openai", *qwen_arguments(task)], environment


def cline_calls(folder):
    notes = str(folder / "notes.txt")
    return [
        ("read_files", {"files": [{"path": notes}]}),
        ("editor", {"path": notes, "old_text": "draft", "new_text": "final"}),
        ("run_commands", {"commands": ["ls notes.txt > listing.txt"]}),
    ]


def start_cline(binaries, url, folder, home, task=TASK):
    provider = {
        "provider": "openai-compatible", "apiKey": "dummy", "model": "scripted", "baseUrl": f"{url}/v1",
    }
    settings = home / ".cline/data/settings"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "providers.json").write_text(json.dumps({
        "version": 1, "lastUsedProvider": "openai-compatible", "modes": {},
        "providers": {
            "openai-compatible": {
                "settings": provider, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual",
            },
        },
    }))
    return [binaries / "cline", task], {}


def pi_calls(folder):
    return [
        ("read", {"path": "notes.txt"}),
        ("edit", {"path": "notes.txt", "edits": [{"oldText": "draft", "newText": "final"}]}),
        ("bash", {"command": "ls notes.txt > listing.txt"}),
    ]


def start_pi(binaries, url, folder, home, task=TASK):
    provider = {
        "baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "dummy", "models": [{"id": "scripted"}],
    }
    (home / "models.json").write_text(json.dumps({"providers": {"stolon": provider}}))
    command = [binaries / "pi", "--print", "--provider", "stolon", "--model", "scripted", task]
    return command, {"PI_CODING_AGENT_DIR": str(home), "PI_OFFLINE": "1"}


CLAUDE_CALLS = file_calls(("Read", "Edit", "Bash"), ("file_path", "old_string", "new_string"))
OPENCODE_CALLS = file_calls(("read", "edit", "bash"), ("filePath", "oldString", "newString"))
QWEN_CALLS = file_calls(("read_file", "edit", "run_shell_command"), ("file_path", "old_string", "new_string"))
AGENTS = [
    Agent("claude", "Read", CLAUDE_CALLS, start_claude, claude_arguments),
    Agent("codex", "exec_command", codex_calls, start_codex, codex_arguments),
    Agent("opencode", "webfetch", OPENCODE_CALLS, start_opencode, lambda task: ["run", task]),
    Agent("qwen", "run_shell_command", QWEN_CALLS, start_qwen, qwen_arguments),
    Agent("cline", "read_files", cline_calls, start_cline, end=["cline", "hub", "stop"]),
    Agent("pi", "read", pi_calls, start_pi),
]


def serve(binary, folders, root):
    """Starts a server whose model recites the scripts of all agents. Returns it with its address."""
    scripts = {"script:text": ["All is done."]}
    rules = []
    for agent in AGENTS:
        scripts.update(agent.scripts(folders[agent.name]))
        rules.append(agent.rule(folders[agent.name]))
    rules = "".join("{%- " + ("el" if index else "") + rule for index, rule in enumerate(rules))
    template = TEMPLATE.replace("PART_BYTES", str(PART_BYTES)).replace("AGENT_RULES", rules)
    scripted.write(root / "model", scripts, template, 1 << 17)
    command = [binary, "serve", "--port", "0", "--kv-memory", "256M", "--model", root / "model"]
    command += ["--served-model-name", "scripted"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    listening = (line for line in server.stdout if line.startswith("listening on "))
    return server, next(listening).removeprefix("listening on ").strip()


def launch(agent, binary, binaries, url):
    """The command that starts an agent with `stolon launch`."""
    environment = {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    return [binary, "launch", agent.name, "--url", url, "--", *agent.arguments(TASK)], environment


def work(start, folder, home, end=None):
    """Runs an agent on its task, in a new folder and with a new home, and then the command `end`. Returns the
    errors in its result."""
    for path in (folder, home):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    (folder / "notes.txt").write_text("a draft\n")
    command, environment = start()
    # OpenCode takes its folder from PWD.
    environment = {**os.environ, "HOME": str(home), "PWD": str(folder), **environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=MAX_SECONDS, check=False,
    )
    if end:
        subprocess.run(end, env=environment, stdout=subprocess.DEVNULL, timeout=MAX_SECONDS, check=False)
    listing = folder / "listing.txt"
    problems = []
    if done.returncode != 0:
        problems.append(f"status {done.returncode}")
    if (folder / "notes.txt").read_text() != "a final\n":
        problems.append("notes.txt was not edited")
    if not listing.exists() or listing.read_text() != "notes.txt\n":
        problems.append("the command did not run")
    if "All is done." not in done.stdout:
        problems.append("the answer was not shown")
    return problems and [*problems, done.stdout[-4000:]]


def main():
    binary, modules = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        folders = {agent.name: root / agent.name for agent in AGENTS}
        server, url = serve(binary, folders, root)
        failed = False
        try:
            for agent in AGENTS:
                paths = folders[agent.name], root / f"{agent.name}-home"
                ways = {"own settings": lambda: agent.start(modules / ".bin", url, *paths)}
                if agent.arguments:
                    ways["stolon launch"] = lambda: launch(agent, binary, modules / ".bin", url)
                for way, start in ways.items():
                    problems = work(start, *paths, agent.ended(modules / ".bin"))
                    print(f"{agent.name}, {way}: {'; '.join(problems) if problems else 'ok'}", flush=True)
                    failed |= bool(problems)
        finally:
            server.terminate()
            server.wait(timeout=60)
    sys.exit(failed)


if __name__ == "__main__":
    main()
