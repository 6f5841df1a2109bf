"""Runs another server's own tests against Stolon: python run.py vllm|llama_cpp SOURCE STOLON [TEST ...]

SOURCE is the unpacked source distribution of vllm or of llama-cpp-python, and STOLON the binary. The
tests of vLLM that start a server and talk HTTP to it are run with the small built-in models instead
of the models that they name, and those of llama.cpp's server with a command that translates its
flags. `expected_NAME.txt` lists the tests that fail, under their reasons. The run fails if a test
that is not in the list fails, or one in the list passes. With names of tests, only these are run and
nothing is compared.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[4]
# Fixed, because the ids of some tests contain the order of a set.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONPATH": str(HERE)}
# Tests of llama.cpp's server that are about its own API, about features without a counterpart, or
# about programs around it.
NOT_SHARED = [
    "compat_gcp", "ctx_shift", "infill", "kv_keep_only_active", "lora", "mcp_servers", "proxy", "rerank",
    "router", "sleep", "slot_save", "speculative", "template", "tools_builtin",
]
# Tests of vLLM that are about other things than its HTTP server for text, or about routes of its own.
NOT_HTTP = [
    "cohere", "common", "generate", "launchers", "llm", "multimodal", "openai/correctness",
    "openai/decisions", "pooling", "rl", "scale_out", "serve/dev", "serve/sagemaker",
    "speech_to_text", "unit_tests",
]


def main():
    name, source, binary, *wanted = sys.argv[1:]
    source, binary = pathlib.Path(source).resolve(), str(pathlib.Path(binary).resolve())
    work = ROOT / "target" / "peers" / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    prepare = {"vllm": prepare_vllm, "llama_cpp": prepare_llama_cpp}[name]
    folder, arguments = prepare(source, work)
    report = work / "report.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-rN", "--tb=native", "--timeout=120",
        "-o", "junit_family=xunit1", f"--junitxml={report}", "-p", "no:cacheprovider", *arguments,
    ]
    environment = os.environ | ENVIRONMENT | {"STOLON": binary, "PEER_TESTS_ROOT": str(ROOT)}
    environment["PEER_TESTS_SOURCE"] = str(source)
    environment["LLAMA_SERVER_BIN_PATH"] = str(HERE / "llama_server.py")
    with open(work / "output.txt", "w") as output:
        subprocess.run([*command, *wanted], cwd=folder, env=environment, stdout=output, stderr=output)
    passed, failed, skipped = outcomes(report)
    print(f"{name}: {len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped;",
          f"the output is in {work / 'output.txt'}")
    if wanted:
        sys.exit(bool(failed))
    sys.exit(compare(HERE / f"expected_{name}.txt", passed, failed))


def prepare_vllm(source, work):
    """The tests of vLLM's server in a folder with an own `tests.utils`, which starts Stolon."""
    tests = work / "tests"
    shutil.copytree(source / "tests" / "entrypoints", tests / "entrypoints")
    for name in NOT_HTTP:
        shutil.rmtree(tests / "entrypoints" / name)
    (tests / "__init__.py").touch()
    # A fixture of the real one serves files that do not come with the source.
    (tests / "conftest.py").write_text("class LocalAssetServer:\n    pass\n")
    shutil.copy(HERE / "vllm_utils.py", tests / "utils.py")
    return work, ["-p", "vllm_plugin", "--continue-on-collection-errors", "tests/entrypoints"]


def prepare_llama_cpp(source, work):
    """The tests of llama.cpp's server, with the chat templates that they name."""
    source = source / "vendor" / "llama.cpp"
    for folder in ("tools/server/tests", "models/templates"):
        shutil.copytree(source / folder, work / folder)
    ignored = [f"--ignore=unit/test_{name}.py" for name in NOT_SHARED]
    return work / "tools" / "server" / "tests", ["-m", "not slow", *ignored, "unit"]


def outcomes(report):
    """The ids of the tests that passed, failed and were skipped."""
    passed, failed, skipped = set(), set(), set()
    for case in xml.parse(report).iter("testcase"):
        identity = f"{case.get('file')}::{case.get('name')}"
        if any(child.get("message") == "collection failure" for child in case):
            continue  # A file that cannot be imported needs the other server itself.
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.add(identity)
        elif "skipped" in kinds:
            skipped.add(identity)
        else:
            passed.add(identity)
    return passed - failed, failed, skipped


def compare(file, passed, failed):
    """Whether the failures differ from the expected ones: lines with the ids of tests, below lines
    with their reasons, which begin with `#`. A test whose outcome varies begins with `?`."""
    expected, varying = set(), set()
    for line in file.read_text().splitlines():
        if line.startswith("? "):
            varying.add(line[2:])
        elif line and not line.startswith("#"):
            expected.add(line)
    wrong = False
    for title, tests in (
        ("failed and is not expected to", failed - expected - varying),
        ("passed and is expected to fail: remove it from the list", expected & passed),
        ("is expected to fail and was not run", expected - passed - failed),
    ):
        for test in sorted(tests):
            wrong = True
            print(f"{test}: {title}")
    return wrong


if __name__ == "__main__":
    main()
