#!/usr/bin/env python3
"""Mutates each atomic and lock of the code that the loom models check, one at a time.

For each mutant at least one model must fail. The mutations are:

- a weaker memory ordering, or a fence that is left out;
- a read-modify-write in two steps;
- a lock that is released and taken again between two statements;
- two neighboring statements in the other order, if one of them synchronizes threads;
- a store, a wake-up, a notification, or a lock that is released at once, that is left out;
- a guard of the epochs that is dropped at once.

Mutants that do not compile do not count. Those that are equivalent to the original are listed, each
with its reason, in mutants.txt. The script fails if another mutant survives.

    loom_tests/mutants.py [--list] [PART OF A FILE NAME]
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TREE = ["leases", "readers", "blocks", "reclaim"]
# The models of each file.
FILES = {
    "crates/engine/kvcache/src/lease.rs": TREE,
    "crates/engine/kvcache/src/core.rs": TREE,
    "crates/engine/kvcache/src/node.rs": TREE,
    "crates/engine/kvcache/src/node/table.rs": TREE,
    "crates/engine/kvcache/src/reader.rs": TREE,
    "crates/engine/kvcache/src/reclaim.rs": TREE,
    "crates/engine/kvcache/src/pool.rs": TREE,
    "crates/engine/kvcache/src/pool/fence.rs": TREE,
    "crates/engine/kvcache/src/pool/lease.rs": TREE,
    "crates/engine/kvcache/src/events.rs": ["subscribers"],
    "crates/engine/scheduler/src/event_channel.rs": ["events"],
    "crates/engine/scheduler/src/permits.rs": ["queue"],
    "crates/engine/scheduler/src/session/sessions.rs": ["sessions"],
    "crates/models/kernels/src/threads.rs": ["threads"],
    "crates/models/kernels/src/threads/scratch.rs": ["threads"],
}
# Builds with this profile are quick after a change of one line, and the models run nearly as fast
# as in other builds.
PROFILE = {
    "profile.release.opt-level": "1",
    'profile.release.package."*".opt-level': "3",
    "profile.release.codegen-units": "16",
    "profile.release.debug": "false",
}
SYNCHRONIZES = re.compile(
    r"\block\(|\.lock(_now)?\(|Ordering|_order\(\)|\.wake\(|notify_|fence\(|\.pin\(|\.tenants\(\)")
# A statement that may be left out.
ACT = re.compile(r"\.store\(|\.wake\(|Waker::wake|notify_|^ *drop\(lock\(")
# Ends the synchronization that an earlier statement has begun. It is harmless to end it later.
ENDS = re.compile(r"\bdrop\(")
STATEMENT = re.compile(r"^( +)([^/ )}].*;)$")
BINDING = re.compile(r"let (?:mut )?(\w+) = ")
PIN = re.compile(r"^( +)let (\w+) = (.*\.pin\(\));$")
GUARD = re.compile(r"^( +)let mut (\w+) = ((?:self\.)?lock\(.*\)|self\.\w+\(\));$")
ORDER = r"(?:\w+::)*(?:Ordering::\w+|\w+_order\(\))"
MODIFY = re.compile(rf"([\w.]+)\.(fetch_add|fetch_sub|fetch_and|swap)\(([^,]+), ({ORDER})\)")
EXCHANGE = re.compile(rf"([\w.]+)\.compare_exchange\(([^,]+), ([^,]+), ({ORDER}), {ORDER}\)")
# The new value of each read-modify-write.
RESULTS = {
    "fetch_add": "old.wrapping_add({})",
    "fetch_sub": "old.wrapping_sub({})",
    "fetch_and": "old & ({})",
    "swap": "{}",
}


def functions(lines):
    """Ranges of lines of the functions outside of tests that synchronize threads."""
    end = next((n for n, line in enumerate(lines) if line.startswith("#[cfg(test)]")
                or line.startswith("#[cfg(all(test")), len(lines))
    start = None
    for n, line in enumerate(lines[:end]):
        indent = len(line) - len(line.lstrip())
        if re.match(r" *(pub(\(\w+\))? )?(const )?(unsafe )?fn ", line) and start is None:
            start = (n, indent)
        elif start and line.rstrip() == " " * start[1] + "}":
            if any(SYNCHRONIZES.search(text) for text in lines[start[0]:n]):
                yield start[0], n
            start = None


def mutants(path):
    """Pairs of a description and the lines of a mutant."""
    lines = path.read_text().split("\n")
    for start, end in functions(lines):
        name = re.search(r"\bfn (\w+)", lines[start])[1]
        for n in range(start, end):
            line = lines[n]
            if is_comment(line):
                continue

            def described(what, text):
                return f"{path.relative_to(ROOT)}: {name}: {what}: {text.strip()}"

            def changed(new, what):
                return described(what, line), lines[:n] + new + lines[n + 1:]

            for found in re.finditer(r"Ordering::(Acquire|Release|AcqRel)", line):
                weaker = line[:found.start()] + "Ordering::Relaxed" + line[found.end():]
                yield changed([weaker], "relaxed")
            if "fence(Ordering" in line:
                yield changed([], "no fence")
            if steps := in_two_steps(line):
                yield changed([steps], "in two steps")
            if ACT.search(line) and line.endswith(";"):
                yield changed([], "left out")
            if guard := GUARD.match(line):
                indent, variable, taken = guard.groups()
                last = next(at for at in range(n, end + 1) if at == end
                            or (lines[at].strip() and not lines[at].startswith(indent)))
                first = next(at for at in range(n + 1, end + 1) if not is_comment(lines[at]))
                for at in range(first + 1, last):
                    text = lines[at]
                    if text.startswith(f"{indent}drop({variable})"):
                        break
                    used = re.compile(rf"(?<![.\w]){variable}\b(?!:[^:])")
                    used = any(used.search(later) for later in lines[at:last])
                    if used and text.startswith(indent) and text[len(indent)] not in " {})/.#":
                        again = f"{indent}drop({variable}); let mut {variable} = {taken};"
                        yield described("locked again", text), lines[:at] + [again] + lines[at:]
            if pin := PIN.match(line):
                yield changed([f"{pin[1]}let {pin[2]} = drop({pin[3]});"], "dropped at once")
            one, two = STATEMENT.match(line), STATEMENT.match(lines[n + 1])
            if one and two and one[1] == two[1] and are_ordered(one[2], two[2]):
                swapped = lines[:n] + [lines[n + 1], line] + lines[n + 2:]
                yield described("swapped", line), swapped


def in_two_steps(line):
    """The line with a load and a store instead of its read-modify-write, if it has one."""
    if found := MODIFY.search(line):
        place, operation, operand, order = found.groups()
        new = RESULTS[operation].format(operand)
        steps = "{{ let old = {0}.load({1}); {0}.store({3}, {2}); old }}"
    elif found := EXCHANGE.search(line):
        place, old, new, order = found.groups()
        steps = "{{ let old = {0}.load({1}); if old == " + old
        steps += " {{ {0}.store({3}, {2}); Ok(old) }} else {{ Err(old) }} }}"
    else:
        return None
    load, store = (re.sub(r"\w+(\(\))?$", kind, order) if "::" in order else f"Ordering::{kind}"
                   for kind in ("Acquire", "Release"))
    return line[:found.start()] + steps.format(place, load, store, new) + line[found.end():]


def is_comment(line):
    return line.lstrip().startswith(("//", "#["))


def are_ordered(one, two):
    """Whether other threads may see a difference if two statements change places."""
    if one.startswith(("return", "use ")):
        return False
    bound = BINDING.match(one)
    if bound and re.search(rf"\b{bound[1]}\b", two):
        return False
    return bool(SYNCHRONIZES.search(one) or SYNCHRONIZES.search(two) or ENDS.search(two))


def known_survivors():
    """The equivalent mutants. A line that begins with `#` is the reason for those after it."""
    text = (ROOT / "loom_tests/mutants.txt").read_text()
    return {line for line in text.split("\n") if line and not line.startswith("#")}


def update(copy):
    """Makes `copy` a copy of the repository. Touches only what differs, so that builds are reused,
    and what an earlier run has mutated is built again."""
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                             capture_output=True, text=True).stdout.split("\n")
    unused = ("crates/models/checkpoint/tests/fixtures", "benches/history")
    tracked = {name for name in tracked if (ROOT / name).is_file() and not name.startswith(unused)}
    for path in list(copy.rglob("*")):
        if path.is_file() and str(path.relative_to(copy)) not in tracked:
            path.unlink()
    for name in tracked:
        source, target = ROOT / name, copy / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def main():
    options = [option for option in sys.argv[1:] if option != "--list"]
    files = [ROOT / name for name in FILES if not options or options[0] in name]
    if "--list" in sys.argv:
        for path in files:
            for what, _ in mutants(path):
                print(what)
        return
    copy = ROOT / "target/loom-mutants/source"
    update(copy)
    environment = dict(os.environ, RUSTFLAGS="--cfg loom", CARGO_TERM_COLOR="never",
                       CARGO_TARGET_DIR=str(ROOT / "target/loom-mutants"), CARGO_INCREMENTAL="1")
    command = ["cargo", "test", "-q", "-p", "stolon-loom-tests", "--release"]
    command += [part for setting in PROFILE.items() for part in ("--config", "=".join(setting))]

    def run(path, *more, seconds):
        models = [part for name in FILES[str(path.relative_to(ROOT))] for part in ("--test", name)]
        process = subprocess.Popen(command + models + list(more), cwd=copy, env=environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    known, survived, counts = known_survivors(), [], {}
    for path in files:
        target = copy / path.relative_to(ROOT)
        original = target.read_text()
        if run(path, "--no-run", seconds=3600) != 0:
            sys.exit(f"the models of {path} do not compile")
        begun = time.monotonic()
        if run(path, seconds=3600) != 0:
            sys.exit(f"the models of {path} fail without a mutation")
        # A mutant may make a model wait forever.
        seconds = 60 + 10 * (time.monotonic() - begun)
        for what, lines in mutants(path):
            if what in known:
                counts["equivalent"] = counts.get("equivalent", 0) + 1
                continue
            target.write_text("\n".join(lines))
            result = "does not compile"
            if run(path, "--no-run", seconds=3600) == 0:
                result = run(path, seconds=seconds)
                result = {0: "survived", "timeout": "caught in time"}.get(result, "caught")
            counts[result] = counts.get(result, 0) + 1
            print(f"{result}: {what}", flush=True)
            if result == "survived":
                survived.append(what)
        target.write_text(original)
    print(counts)
    if survived:
        sys.exit("no model fails for:\n" + "\n".join(survived))


if __name__ == "__main__":
    main()
