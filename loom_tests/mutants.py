#!/usr/bin/env python3
"""Mutates each atomic and lock of the code that the loom models check, one at a time.

For each mutant at least one model must fail. The mutations are:

- a weaker memory ordering, or a fence that is left out;
- a read-modify-write in two steps;
- a lock that is released and taken again between two statements;
- two neighbouring statements in the other order;
- a store, a wake-up or a notification that is left out.

Mutants that do not compile do not count. Those that are equivalent to the original are listed, each
with its reason, in mutants.txt. The script fails if another mutant survives.

    loom_tests/mutants.py [--list] [PART OF A FILE NAME]
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TREE = ["leases", "readers", "blocks", "reclaim"]
# The models of each file.
FILES = {
    "crates/engine/kvcache/src/lease.rs": TREE,
    "crates/engine/kvcache/src/core.rs": TREE,
    "crates/engine/kvcache/src/node.rs": TREE,
    "crates/engine/kvcache/src/node/table.rs": TREE,
    "crates/engine/kvcache/src/reclaim.rs": TREE,
    "crates/engine/kvcache/src/pool/fence.rs": TREE,
    "crates/engine/scheduler/src/event_channel.rs": ["events"],
    "crates/engine/scheduler/src/permits.rs": ["queue"],
    "crates/engine/scheduler/src/session/sessions.rs": ["sessions"],
    "crates/models/kernels/src/threads.rs": ["threads"],
}
# The models take seconds. A mutant may make one wait for ever.
SECONDS = 300
SYNCHRONISES = re.compile(r"\block\(|\.lock\(|Ordering|_order\(\)|\.wake|notify_|fence\(")
STATEMENT = re.compile(r"^( +)([^/ ].*;)$")
GUARD = re.compile(r"^( +)let mut (\w+) = ((?:self\.)?lock\(.*\)|self\.\w+\(\));$")
MODIFY = re.compile(r"([\w.]+)\.fetch_(add|sub)\(([^,]+), ((?:\w+::)*\w+)\)")


def functions(lines):
    """Ranges of lines of the functions outside of tests that synchronise threads."""
    end = next((n for n, line in enumerate(lines) if line.startswith("#[cfg(test)]")
                or line.startswith("#[cfg(all(test")), len(lines))
    start = None
    for n, line in enumerate(lines[:end]):
        indent = len(line) - len(line.lstrip())
        if re.match(r" *(pub(\(\w+\))? )?(const )?(unsafe )?fn ", line) and start is None:
            start = (n, indent)
        elif start and line.rstrip() == " " * start[1] + "}":
            if any(SYNCHRONISES.search(text) for text in lines[start[0]:n]):
                yield start[0], n
            start = None


def mutants(path):
    """Pairs of a description and the lines of a mutant."""
    lines = path.read_text().split("\n")
    for start, end in functions(lines):
        for n in range(start, end):
            line = lines[n]
            if line.lstrip().startswith(("//", "#[")):
                continue

            def changed(new, what):
                return f"{path.relative_to(ROOT)}: {what}: {line.strip()}", lines[:n] + new + lines[n + 1:]

            for found in re.finditer(r"Ordering::(Acquire|Release|AcqRel)", line):
                weaker = line[:found.start()] + "Ordering::Relaxed" + line[found.end():]
                yield changed([weaker], "relaxed")
            if "fence(Ordering" in line:
                yield changed([], "no fence")
            if found := MODIFY.search(line):
                place, sign, amount, order = found.groups()
                relaxed = re.sub(r"\w+$", "Relaxed", order)
                step = (f"{{ let old = {place}.load({relaxed}); {place}.store(old.wrapping_{sign}"
                        f"({amount}), {relaxed}); old }}")
                yield changed([line[:found.start()] + step + line[found.end():]], "in two steps")
            if re.search(r"\.store\(|\.wake\(|notify_", line) and line.endswith(";"):
                yield changed([], "left out")
            if guard := GUARD.match(line):
                indent, name, taken = guard.groups()
                last = next(at for at in range(n, end + 1) if at == end
                            or (lines[at].strip() and not lines[at].startswith(indent)))
                for at in range(n + 2, last):
                    text = lines[at]
                    if text.startswith(f"{indent}drop({name})"):
                        break
                    if text.startswith(indent) and text[len(indent)] not in " })/.#":
                        again = f"{indent}drop({name}); let mut {name} = {taken};"
                        what = f"{path.relative_to(ROOT)}: locked again: {text.strip()}"
                        yield what, lines[:at] + [again] + lines[at:]
            one, two = STATEMENT.match(line), STATEMENT.match(lines[n + 1])
            if one and two and one[1] == two[1] and not one[2].startswith(("return", "use ")):
                swapped = lines[:n] + [lines[n + 1], line] + lines[n + 2:]
                yield f"{path.relative_to(ROOT)}: swapped: {line.strip()}", swapped


def known_survivors():
    """The equivalent mutants. A line that begins with `#` is the reason for those after it."""
    text = (ROOT / "loom_tests/mutants.txt").read_text()
    return {line for line in text.split("\n") if line and not line.startswith("#")}


def main():
    options = [option for option in sys.argv[1:] if option != "--list"]
    files = [ROOT / name for name in FILES if not options or options[0] in name]
    if "--list" in sys.argv:
        for path in files:
            for what, _ in mutants(path):
                print(what)
        return
    copy = ROOT / "target/loom-mutants/source"
    shutil.rmtree(copy, ignore_errors=True)
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                             capture_output=True, text=True).stdout.split()
    for name in tracked:
        if not name.startswith(("crates/models/checkpoint/tests/fixtures", "benches/history")) and (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    environment = dict(os.environ, RUSTFLAGS="--cfg loom", CARGO_TERM_COLOR="never",
                       CARGO_TARGET_DIR=str(ROOT / "target/loom-mutants"))
    command = ["cargo", "test", "-q", "-p", "stolon-loom-tests", "--release"]

    def run(path, *more, seconds):
        models = [part for name in FILES[str(path.relative_to(ROOT))] for part in ("--test", name)]
        try:
            return subprocess.run(command + models + list(more), cwd=copy, env=environment,
                                  capture_output=True, text=True, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            subprocess.run(["pkill", "-f", "loom-mutants/release/deps"], check=False)
            return "timeout"

    known, survived, counts = known_survivors(), [], {}
    for path in files:
        target = copy / path.relative_to(ROOT)
        original = target.read_text()
        if run(path, seconds=3600) != 0:
            sys.exit(f"the models of {path} fail without a mutation")
        for what, lines in mutants(path):
            target.write_text("\n".join(lines))
            result = "does not compile"
            if run(path, "--no-run", seconds=3600) == 0:
                result = {0: "survived", "timeout": "caught in time"}.get(run(path, seconds=SECONDS), "caught")
            counts[result] = counts.get(result, 0) + 1
            print(f"{result}: {what}", flush=True)
            if result == "survived" and what not in known:
                survived.append(what)
        target.write_text(original)
    print(counts)
    if survived:
        sys.exit("no model fails for:\n" + "\n".join(survived))


if __name__ == "__main__":
    main()
