"""Keeps llama.cpp off AMX tiles on a virtual machine that advertises them and traps their use."""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def keep_off_tiles(path):
    """Lets llama.cpp leave weights in the layout of the file if it crashes with its own layout.
    Returns whether it crashed."""
    command = [sys.executable, str(HERE / "worker_llama.py"), str(path), "1"]
    nowhere = subprocess.DEVNULL
    done = subprocess.run(command, input="prefill 32\n", text=True, stdout=nowhere, stderr=nowhere, check=False)
    if done.returncode >= 0:
        return False
    print("llama.cpp crashes on this machine with weights in its own layout, so it gets the file's.", flush=True)
    import llama_cpp

    original = llama_cpp.llama_model_default_params

    def plain():
        params = original()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_model_default_params = llama_cpp.llama_cpp.llama_model_default_params = plain
    return True
