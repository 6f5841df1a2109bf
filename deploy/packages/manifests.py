#!/usr/bin/env python3
"""Writes the manifests of package managers for a release: a Homebrew formula, an AUR package and
winget's three files, with the checksums of the archives that `deploy/packages/archive` made.

    deploy/packages/manifests.py --archives target/packages --url https://.../v0.1.0 \\
        --home https://... --out target/manifests
"""

import argparse
import pathlib
import sys

DESCRIPTION = "LLM inference server with a shared prefix cache"
LICENSE = "MIT OR Apache-2.0"

FORMULA = """\
class Stolon < Formula
  desc "{description}"
  homepage "{home}"
  version "{version}"
  license any_of: ["MIT", "Apache-2.0"]

{systems}
  def install
    bin.install "stolon"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/stolon.bash" => "stolon"
    zsh_completion.install "completions/stolon.zsh" => "_stolon"
    fish_completion.install "completions/stolon.fish"
  end

  service do
    run [opt_bin/"stolon", "serve", "--config", etc/"stolon.toml"]
    keep_alive true
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/stolon --version")
  end
end
"""

SYSTEM = """\
  on_{system} do
    on_{cpu} do
      url "{url}/{file}"
      sha256 "{checksum}"
    end
  end
"""

PKGBUILD = """\
pkgname=stolon-bin
pkgver={version}
pkgrel=1
pkgdesc="{description}"
arch=(x86_64 aarch64)
url="{home}"
license=(MIT Apache-2.0)
provides=(stolon)
conflicts=(stolon)
source_x86_64=("{url}/{x86_64}")
source_aarch64=("{url}/{aarch64}")
sha256sums_x86_64=({x86_64_checksum})
sha256sums_aarch64=({aarch64_checksum})

package() {{
  cd stolon-$pkgver-$CARCH-unknown-linux-musl
  install -Dm755 stolon "$pkgdir/usr/bin/stolon"
  install -Dm644 -t "$pkgdir/usr/share/man/man1" man/*.1
  install -Dm644 completions/stolon.bash "$pkgdir/usr/share/bash-completion/completions/stolon"
  install -Dm644 completions/stolon.zsh "$pkgdir/usr/share/zsh/site-functions/_stolon"
  install -Dm644 completions/stolon.fish "$pkgdir/usr/share/fish/vendor_completions.d/stolon.fish"
  install -Dm644 -t "$pkgdir/usr/share/licenses/$pkgname" LICENSE-MIT LICENSE-APACHE
}}
"""

WINGET = {
    "": """\
PackageIdentifier: Stolon.Stolon
PackageVersion: {version}
DefaultLocale: en-US
ManifestType: version
ManifestVersion: 1.6.0
""",
    ".locale.en-US": """\
PackageIdentifier: Stolon.Stolon
PackageVersion: {version}
PackageLocale: en-US
Publisher: The Stolon authors
PackageName: Stolon
PackageUrl: {home}
License: {license}
ShortDescription: {description}
ManifestType: defaultLocale
ManifestVersion: 1.6.0
""",
    ".installer": """\
PackageIdentifier: Stolon.Stolon
PackageVersion: {version}
InstallerType: zip
NestedInstallerType: portable
NestedInstallerFiles:
  - RelativeFilePath: {folder}\\stolon.exe
    PortableCommandAlias: stolon
Installers:
  - Architecture: x64
    InstallerUrl: {url}/{file}
    InstallerSha256: {checksum}
ManifestType: installer
ManifestVersion: 1.6.0
""",
}


class Archives:
    """The archives of one version in a folder, by target."""

    def __init__(self, folder):
        self.files = {}
        versions = set()
        for path in sorted(folder.glob("stolon-*.sha256")):
            checksum, file = path.read_text().split()
            _, version, target = file.removesuffix(".zip").removesuffix(".tar.gz").split("-", 2)
            self.files[target] = (file, checksum)
            versions.add(version)
        if len(versions) != 1:
            sys.exit(f"{folder}: expected archives of one version, got {sorted(versions)}")
        self.version = versions.pop()


def formula(archives, common):
    """The Homebrew formula, with every system that has an archive."""
    systems = []
    for target, (file, checksum) in archives.files.items():
        if "windows" in target:
            continue
        system = "macos" if "darwin" in target else "linux"
        cpu = "arm" if target.startswith("aarch64") else "intel"
        parts = {"system": system, "cpu": cpu, "file": file, "checksum": checksum}
        systems.append(SYSTEM.format(**common, **parts))
    return FORMULA.format(**common, systems="\n".join(systems))


def manifests(archives, common):
    """The text of each file, by its path."""
    files = {"homebrew/stolon.rb": formula(archives, common)}
    linux = {}
    for cpu in ["x86_64", "aarch64"]:
        file, checksum = archives.files.get(f"{cpu}-unknown-linux-musl", (None, None))
        linux |= {cpu: file, f"{cpu}_checksum": checksum}
    if None not in linux.values():
        files["aur/PKGBUILD"] = PKGBUILD.format(**common, **linux)
    windows = archives.files.get("x86_64-pc-windows-gnu")
    if windows:
        file, checksum = windows
        parts = {"file": file, "checksum": checksum.upper(), "folder": file.removesuffix(".zip")}
        for name, text in WINGET.items():
            files[f"winget/Stolon.Stolon{name}.yaml"] = text.format(**common, **parts)
    return files


def main():
    """Writes the manifests and prints their paths."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--archives", type=pathlib.Path, required=True)
    parser.add_argument("--url", required=True, help="the folder that the archives are downloaded from")
    parser.add_argument("--home", required=True, help="the home page of the project")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    archives = Archives(args.archives)
    common = {
        "version": archives.version,
        "url": args.url.rstrip("/"),
        "home": args.home,
        "description": DESCRIPTION,
        "license": LICENSE,
    }
    for name, text in manifests(archives, common).items():
        path = args.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
