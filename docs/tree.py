"""Draws docs/src/tree.svg: the prefix tree while eight chats share a handbook.

    python3 docs/tree.py target/release/stolon

Starts `stolon serve` with the demo model, asks eight questions about its handbook one after another,
and requests the tree (`/v1/cache/outline`) after each answer. The picture is an animation with one
frame for each answer. Nothing in it is made up: nodes, tokens and texts are what the server has
replied. Token counts do not depend on the machine, so the file is the same everywhere.
"""

import json
import pathlib
import subprocess
import sys
import urllib.request
from xml.sax.saxutils import escape

OUT = pathlib.Path(__file__).parent / "src" / "tree.svg"
# The page offers six questions about the handbook. These are two more.
MORE = ["How much does the amber tent cost?", "Who owns the ivory piano?"]
CHATS = 8
FRAME_SECONDS = 1.5
# The last frame stays longer.
LAST_FRAMES = 3

WIDTH, TOP, ROW, GAP = 880, 64, 34, 6
TRUNK_X, TRUNK_WIDTH = 20, 250
# Pixels for each token of a branch. The trunk is not to scale.
TOKEN = 12
HEIGHT = TOP + CHATS * ROW + 76

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 15px; }
.dim { fill: #59636e; }
.back { fill: #ffffff; }
.cached { fill: #cfe5d8; stroke: #2f7d55; }
.computed { fill: #ffd8a8; stroke: #b35900; }
.other { fill: #eef1f4; stroke: #a5adb6; }
.bar { fill: #cfe5d8; } .part { fill: #b35900; }
.frame { opacity: 0; } .last { opacity: 1; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .dim { fill: #9198a1; } .back { fill: #0d1117; }
  .cached { fill: #1d4630; stroke: #5fbf8a; } .computed { fill: #6b3d0c; stroke: #ffb86b; }
  .other { fill: #21262d; stroke: #6e7681; } .bar { fill: #1d4630; } .part { fill: #ffb86b; }
}
"""


class Server:
    """A server with the demo model, which ends with the block of `with`."""

    def __init__(self, binary):
        command = [binary, "serve", "--port", "0", "--kv-memory", "64M", "--model", "demo"]
        # The beginnings of next turns would be nodes of no chat.
        command += ["--next-turn-prefill", "off"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = next(line for line in self.process.stdout if line.startswith("listening on "))
        self.url = line.removeprefix("listening on ").strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=60)

    def get(self, path):
        return json.load(urllib.request.urlopen(self.url + path))

    def post(self, path, body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request))


def ask(server, handbook, question):
    """The answer, the tokens of the prompt, and how many of them came from the cache."""
    messages = [{"role": "system", "content": handbook}, {"role": "user", "content": question}]
    reply = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 64})
    usage = reply["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def record(binary):
    """The chats, and the nodes of the tree after each of them."""
    with Server(binary) as server:
        page = server.get("/page/handbook.json")
        questions = (page["questions"] + MORE)[:CHATS]
        chats, frames = [], []
        for question in questions:
            chats.append((question, *ask(server, page["system"], question)))
            nodes = server.get("/v1/cache/outline?tokens=true")["nodes"]
            for node in nodes:
                prefix = server.get(f"/v1/cache/prefix/{node['id']}?tokens=true")["text"]
                node["chats"] = [i for i, chat in enumerate(chats) if shares(prefix, page["system"], chat[0])]
            frames.append(nodes)
    return chats, frames


def shares(prefix, handbook, question):
    """Whether the prompt with this question begins with the prefix, or the prefix with that prompt."""
    after = prefix.split(handbook.strip())[-1] if handbook.strip() in prefix else ""
    asked = after.split("<|user|>")[-1].strip() if "<|user|>" in after else ""
    return question.startswith(asked) if len(asked) < len(question) else asked.startswith(question)


def rows(nodes):
    """The row of each chat: chats below one node are next to each other."""
    order = []

    def visit(index):
        children = [i for i, node in enumerate(nodes) if node["parent"] == index]
        if not children:
            order.extend(nodes[index]["chats"])
        for child in sorted(children, key=lambda i: min(nodes[i]["chats"])):
            visit(child)

    for index, node in enumerate(nodes):
        if node["parent"] is None:
            visit(index)
    assert sorted(order) == list(range(CHATS)), order
    return {chat: row for row, chat in enumerate(order)}


def box(x, y, width, height, kind):
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" class="{kind}"/>'


def text(x, y, content, kind="", anchor="start"):
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def draw_tree(nodes, row_of, newest, cached):
    """The nodes from left to right. `newest` is the chat that was answered last, which has found
    `cached` tokens in the cache."""
    shapes = []
    ends = {}
    for index, node in enumerate(nodes):
        root = node["parent"] is None
        begin_x, begin_tokens = (TRUNK_X, 0) if root else ends[node["parent"]]
        lone = root and not any(other["parent"] == index for other in nodes)
        width = TRUNK_WIDTH + (20 * TOKEN if lone else 0) if root else node["tokens"] * TOKEN - GAP
        at = [row_of[chat] for chat in node["chats"]]
        y, height = TOP + min(at) * ROW, (max(at) - min(at) + 1) * ROW - GAP
        kind = "other"
        if newest in node["chats"]:
            kind = "cached" if begin_tokens + node["tokens"] <= cached else "computed"
        shapes.append(box(begin_x, y, width, height, kind))
        ends[index] = (begin_x + width + GAP, begin_tokens + node["tokens"])
        label = f"{node['tokens']:,} tokens"
        if root:
            if lone:
                shapes.append(text(begin_x + 10, y + height / 2 + 4, f"handbook, question and answer, {label}"))
            else:
                shapes.append(text(begin_x + 10, y + height / 2 - 7, f"handbook, {label}"))
                shapes.append(text(begin_x + 10, y + height / 2 + 13, "computed once", "dim"))
        elif width > 100:
            shapes.append(text(begin_x + 8, y + height / 2 + 4, label, "dim"))
        else:
            shapes.append(text(begin_x + width / 2, y + height / 2 + 4, str(node["tokens"]), "dim", "middle"))
    return shapes, {chat: end for i, node in enumerate(nodes) for chat in node["chats"] for end in [ends[i][0]]}


def draw_frame(chats, nodes, row_of, newest):
    question, answer, prompt, cached = chats[newest]
    shapes, ends = draw_tree(nodes, row_of, newest, cached)
    shapes.append(text(TRUNK_X, 26, f"Chat {newest + 1}: {question}", "title"))
    shapes.append(text(TRUNK_X, 47, f"{cached:,} of {prompt:,} prompt tokens from the cache, {prompt - cached:,} computed", "dim"))
    for chat in range(newest + 1):
        shapes.append(text(ends[chat] + 4, TOP + row_of[chat] * ROW + 19, chats[chat][1]))
    asked = sum(chat[2] for chat in chats[: newest + 1])
    computed = sum(chat[2] - chat[3] for chat in chats[: newest + 1])
    full = sum(chat[2] for chat in chats)
    y, width = TOP + CHATS * ROW + 18, WIDTH - 2 * TRUNK_X
    shapes.append(box(TRUNK_X, y, round(width * asked / full, 1), 14, "bar"))
    shapes.append(box(TRUNK_X, y, round(width * computed / full, 1), 14, "part"))
    shapes.append(text(TRUNK_X, y + 34, f"{asked:,} prompt tokens asked, {computed:,} computed", "dim"))
    return shapes


def animation(frame):
    """The rules that show a frame for its share of the time, and the last one if nothing moves."""
    total = CHATS - 1 + LAST_FRAMES
    begin, end = 100 * frame / total, 100 * (frame + 1) / total
    shown = f"{begin:.2f}% {{ opacity: 1; }} " + ("" if frame == CHATS - 1 else f"{end:.2f}% {{ opacity: 0; }} ")
    before = "" if frame == 0 else "0% { opacity: 0; } "
    return (
        f"@keyframes f{frame} {{ {before}{shown}}}\n"
        f".f{frame} {{ animation: f{frame} {total * FRAME_SECONDS}s step-end infinite; }}"
    )


def draw(chats, frames):
    row_of = rows(frames[-1])
    rules = "\n".join(animation(frame) for frame in range(CHATS))
    title = f"The prefix tree while {CHATS} chats share one handbook"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}@media (prefers-reduced-motion: no-preference) {{\n{rules}\n}}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="back"/>',
    ]
    for newest, nodes in enumerate(frames):
        last = " last" if newest == CHATS - 1 else ""
        lines.append(f'<g class="frame f{newest}{last}">')
        lines.extend(draw_frame(chats, nodes, row_of, newest))
        lines.append("</g>")
    lines.append("</svg>\n")
    OUT.write_text("\n".join(lines))


if __name__ == "__main__":
    draw(*record(sys.argv[1]))
