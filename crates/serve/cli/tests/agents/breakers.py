"""What breaks the cache for coding agents is named: python breakers.py path/to/stolon node_modules

Each agent of run.py works on its task, and a proxy records its requests. Then a server gets the last request but
one of each agent, and is asked why the last one is not cached (`/v1/cache/explain`), after a change of BREAKERS was
planted in it. The reason has to be that of the change. Without a change, and with one that changes no text,
nothing may be lost. All requests are the agents' own, tools and instructions included.
"""

import json
import pathlib
import re
import sys
import tempfile

import run
from proxy import Proxy, connect
from run import scripted
from sessions import serve, stop

TEMPLATE = "crates/models/text/tests/fixtures/chat_templates/think_style.jinja"
EXPLAIN = {
    "/v1/chat/completions": "/v1/cache/explain",
    "/v1/messages": "/v1/cache/explain/messages",
    "/v1/responses": "/v1/cache/explain/responses",
}


class Recorder(Proxy):
    """Keeps the requests that offer tools and were answered."""

    def __init__(self, url):
        self.requests = []
        super().__init__(url)

    def record(self, path, note, status, body, reply):
        path = path.split("?")[0]
        if status == 200 and path in EXPLAIN and (request := json.loads(body)).get("tools"):
            self.requests.append((path, request))


def conversation(request):
    return request.get("messages") or request["input"]


def texts(value):
    """All strings in a JSON value, as pairs of what contains them and their key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, item in items:
        if isinstance(item, str):
            yield value, key
        else:
            yield from texts(item)


def replace(value, pattern, new):
    """Replaces the first match of a pattern in the texts of a JSON value."""
    for holder, key in texts(value):
        if key in ("text", "content", "system", "instructions", "output") and re.search(pattern, holder[key]):
            holder[key] = re.sub(pattern, new, holder[key], count=1)
            return
    raise ValueError(f"no {pattern} in {json.dumps(value)[:2000]}")


def results(request):
    """The places of the results of calls in the conversation."""

    def is_result(message):
        content = message.get("content")
        in_parts = isinstance(content, list) and any(part.get("type") == "tool_result" for part in content)
        return message.get("role") == "tool" or message.get("type") == "function_call_output" or in_parts

    return [place for place, message in enumerate(conversation(request)) if is_result(message)]


def changed_instructions(request):
    """A header with a hash, or the time, before the instructions."""
    if isinstance(request.get("system"), str) or "instructions" in request:
        name = "system" if "system" in request else "instructions"
        request[name] = "build: 8f3c\n" + request[name]
    elif "system" in request:
        request["system"][0]["text"] = "build: 8f3c\n" + request["system"][0]["text"]
    else:
        replace(conversation(request)[0], "^", "build: 8f3c\n")


def reversed_tools(request):
    request["tools"].reverse()


def described_tool(request):
    functions = [tool.get("function", tool) for tool in request["tools"]]
    tool = [tool for tool in functions if "description" in tool][-1]
    tool["description"] = tool.get("description", "") + " Two servers are connected."


def fewer_tools(request):
    del request["tools"][len(request["tools"]) // 2]


def cleared_result(request):
    """An old result was replaced, as agents do that keep their context small."""
    message = conversation(request)[results(request)[0]]
    replace(message, "(?s).+", "[Old tool result content cleared]")


def changed_task(request):
    """The first message of the user, with a date after it."""
    replace([message for message in conversation(request) if message.get("role") == "user"][:1], "(?s)$", " Today is Monday.")


def moved_reminder(request):
    """A reminder that is at the end of the conversation, and no longer at its beginning."""
    first = next(message for message in conversation(request) if message.get("role") == "user")
    if isinstance(first["content"], list) and len(first["content"]) > 1:
        reminder = first["content"].pop(0)
    else:
        replace(first, "^.{10}", "")
        reminder = {"type": "text", "text": "Remember."}
    conversation(request).append({"role": "user", "content": [reminder]})


def inserted_message(request):
    conversation(request).insert(results(request)[0] + 1, {"role": "user", "content": "A note: the file was saved."})


def removed_turn(request):
    """The first call and its result are gone."""
    place = results(request)[0]
    del conversation(request)[place - 1 : place + 1]


def other_salt(request):
    request["cache_salt"] = "another"


def no_thinking(request):
    request["chat_template_kwargs"] = {"enable_thinking": False}


def spaced_arguments(request):
    """The arguments of calls as another JSON text of the same value, which is not a change."""
    for message in conversation(request):
        for call in message.get("tool_calls") or ([message] if message.get("type") == "function_call" else []):
            call = call.get("function", call)
            call["arguments"] = json.dumps(json.loads(call["arguments"]), indent=2)


BLOCK = 16
NOTHING = None


def no_change(request):
    pass


# The changes for each agent, with their reasons.
BREAKERS = {
    "claude": [
        (changed_instructions, "message_changed"), (moved_reminder, "message_changed"),
        (reversed_tools, "tools_changed"), (cleared_result, "message_changed"), (other_salt, "other_salt"),
    ],
    "codex": [
        (changed_instructions, "message_changed"), (described_tool, "tools_changed"),
        (cleared_result, "message_changed"), (spaced_arguments, NOTHING),
    ],
    "opencode": [
        (changed_instructions, "message_changed"), (fewer_tools, "tools_changed"),
        (inserted_message, "message_inserted"), (changed_task, "message_changed"), (spaced_arguments, NOTHING),
    ],
    "qwen": [
        (described_tool, "tools_changed"), (cleared_result, "message_changed"), (removed_turn, "message_removed"),
        (changed_task, "message_changed"),
    ],
    "cline": [
        (changed_instructions, "message_changed"), (inserted_message, "message_inserted"),
        # The template writes it at the end of the prompt.
        (no_thinking, NOTHING), (described_tool, "tools_changed"),
    ],
    "pi": [(reversed_tools, "tools_changed"), (removed_turn, "message_removed"), (other_salt, "other_salt")],
}


def record(binary, modules, root):
    """The last two requests of each agent."""
    folders = {agent.name: root / agent.name for agent in run.AGENTS}
    server, url = run.serve(binary, folders, root)
    recorded = {}
    try:
        for agent in run.AGENTS:
            recorder = Recorder(url)
            paths = folders[agent.name], root / f"{agent.name}-home"
            start = lambda: agent.start(modules / ".bin", recorder.address, *paths)
            problems = run.work(start, *paths, agent.ended(modules / ".bin"))
            assert not problems, (agent.name, problems)
            recorded[agent.name] = recorder.requests[-2:]
    finally:
        stop(server)
    return recorded


def post(url, path, request):
    connection = connect(url)
    connection.request("POST", path, json.dumps(request), {"content-type": "application/json"})
    reply = connection.getresponse()
    text = reply.read().decode()
    assert reply.status == 200, (path, reply.status, text[:1000])
    return json.loads(text)


def explained(url, path, request):
    """Why the prompt of a request is not cached: the members of the explanation, or None if nothing is lost but
    the last block, which has the answer that this server gave to the request before."""
    result = post(url, EXPLAIN[path], request)["results"][0]
    miss = result.get("miss")
    return miss if miss and miss["lost_tokens"] > BLOCK else None


def main():
    binary, modules = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    named = wrong = 0
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        recorded = record(binary, modules, root)
        template = pathlib.Path(TEMPLATE).read_text()
        scripted.write(root / "plain", {"script:text": ["Done."]}, template, 1 << 18)
        server, url = serve(binary, root / "plain", "--kv-memory", "1G", "--served-model-name", "scripted")
        try:
            for agent, [(path, earlier), (_, last)] in recorded.items():
                limits = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
                changed = {"stream", "stream_options", *limits}
                most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
                earlier = {name: value for name, value in earlier.items() if name not in changed}
                post(url, path, {**earlier, most: 1})
                print(f"{agent}: {path}", flush=True)
                for plant, reason in [(no_change, NOTHING), *BREAKERS[agent]]:
                    request = json.loads(json.dumps(last))
                    plant(request)
                    miss = explained(url, path, request)
                    found = miss and miss["reason"]
                    shown = plant.__name__.replace("_", " ")
                    details = f"{miss['lost_tokens']} tokens, message {miss['message']}" if miss else ""
                    expected = "" if found == reason else f", expected {reason}"
                    print(f"    {shown}: {found}{expected} {details}", flush=True)
                    wrong += found != reason
                    named += found == reason
        finally:
            stop(server)
    print(f"{named} of {named + wrong} named")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
