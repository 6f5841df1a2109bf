"""Tests `stolon serve` with client libraries: python run.py path/to/stolon node_modules

Starts a server with the model in ../fixtures/scripted, whose answers are known, and runs each script of
this folder against it. Needs node, and the packages that package.json and requirements.txt name: those of
npm in the folder `node_modules`, those of Python in this interpreter. Needs no network.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
SCRIPTED = str(FOLDER.parent / "fixtures" / "scripted")


def main():
    binary, modules = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    command = [binary, "serve", "--port", "0", "--num-blocks", "1024", "--model", SCRIPTED, "--served-name", "scripted"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        listening = (line for line in server.stdout if line.startswith("listening on "))
        environment = {**os.environ, "STOLON_URL": next(listening).removeprefix("listening on ").strip() + "/v1"}
        with tempfile.TemporaryDirectory() as scripts:
            # Node looks for packages next to the script.
            os.symlink(modules, pathlib.Path(scripts) / "node_modules")
            for script in sorted(FOLDER.glob("*.mjs")):
                shutil.copy(script, scripts)
                subprocess.run(["node", pathlib.Path(scripts) / script.name], check=True, env=environment)
        for script in sorted(FOLDER.glob("*_client.py")):
            subprocess.run([sys.executable, script], check=True, env=environment)
    finally:
        server.terminate()
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
