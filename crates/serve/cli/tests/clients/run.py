"""Tests `stolon serve` with client libraries: python run.py path/to/stolon node_modules

Starts a server with the model in ../fixtures/scripted, whose answers are known, and runs each script of
this folder against it. `retrieval.py` has a server of its own with three models. Needs node, and the
packages that package.json and requirements.txt name: those of npm in the folder `node_modules`, those of
Python in this interpreter. Needs no network.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
SCRIPTED = str(FOLDER.parent / "fixtures" / "scripted")


ENCODERS = FOLDER.parents[3] / "models" / "checkpoint" / "tests" / "fixtures" / "encoders"
SCRIPTED_ALONE = ["--model", SCRIPTED, "--served-name", "scripted"]
THREE_MODELS = [
    "--model", f"chat={SCRIPTED}", "--model", f"embed={ENCODERS / 'xlm_roberta'}",
    "--model", f"rerank={ENCODERS / 'xlm_roberta_reranker'}",
]


def main():
    binary, modules = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    with serving(binary, SCRIPTED_ALONE) as environment:
        with tempfile.TemporaryDirectory() as scripts:
            # Node looks for packages next to the script.
            os.symlink(modules, pathlib.Path(scripts) / "node_modules")
            for script in sorted(FOLDER.glob("*.mjs")):
                shutil.copy(script, scripts)
                subprocess.run(["node", pathlib.Path(scripts) / script.name], check=True, env=environment)
        for script in sorted(FOLDER.glob("*_client.py")):
            subprocess.run([sys.executable, script], check=True, env=environment)
    with serving(binary, THREE_MODELS) as environment:
        subprocess.run([sys.executable, FOLDER / "retrieval.py"], check=True, env=environment)


@contextlib.contextmanager
def serving(binary, models):
    """A server with these models, as the environment of its clients."""
    command = [binary, "serve", "--port", "0", "--num-blocks", "1024", *models]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        listening = (line for line in server.stdout if line.startswith("listening on "))
        url = next(listening).removeprefix("listening on ").strip() + "/v1"
        yield {**os.environ, "STOLON_URL": url, "STOLON_ENCODERS": str(ENCODERS)}
    finally:
        server.terminate()
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
