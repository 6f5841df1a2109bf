#!/bin/sh
# Installs the command `stolon` for one user.
#
#     STOLON_DOWNLOADS=https://... STOLON_VERSION=0.1.0 sh install.sh
#
# STOLON_DOWNLOADS is the folder of the release's archives. STOLON_INSTALL_DIR is the folder of the
# program, by default ~/.local/bin. The archive's checksum is verified before anything is installed.
set -eu

fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

downloads=${STOLON_DOWNLOADS:-}
version=${STOLON_VERSION:-}
[ -n "$downloads" ] || fail 'STOLON_DOWNLOADS: expected the URL of the folder with the archives'
[ -n "$version" ] || fail 'STOLON_VERSION: expected a version, for example 0.1.0'
directory=${STOLON_INSTALL_DIR:-$HOME/.local/bin}

case $(uname -s)-$(uname -m) in
Linux-x86_64) target=x86_64-unknown-linux-musl ;;
Linux-aarch64 | Linux-arm64) target=aarch64-unknown-linux-musl ;;
Darwin-x86_64) target=x86_64-apple-darwin ;;
Darwin-arm64) target=aarch64-apple-darwin ;;
*) fail "there is no archive for $(uname -s) on $(uname -m); build from source instead" ;;
esac

name=stolon-$version-$target
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

fetch() {
    if command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --output "$work/$1" "$downloads/$1"
    elif command -v wget >/dev/null; then
        wget -q -O "$work/$1" "$downloads/$1"
    else
        fail 'neither curl nor wget is installed'
    fi || fail "could not download $downloads/$1"
}

fetch "$name.tar.gz"
fetch "$name.tar.gz.sha256"
cd "$work"
if command -v sha256sum >/dev/null; then
    sha256sum -c "$name.tar.gz.sha256" >/dev/null || fail 'the checksum is wrong; nothing was installed'
else
    shasum -a 256 -c "$name.tar.gz.sha256" >/dev/null || fail 'the checksum is wrong; nothing was installed'
fi
tar -xzf "$name.tar.gz"
mkdir -p "$directory"
# A new file, moved into place: a running `stolon` keeps the old one.
cp "$name/stolon" "$directory/.stolon.new"
chmod 755 "$directory/.stolon.new"
mv "$directory/.stolon.new" "$directory/stolon"

printf 'installed %s\n' "$("$directory/stolon" --version)"
case :$PATH: in
*:"$directory":*) ;;
*) printf '%s is not in PATH; add it, or run %s/stolon\n' "$directory" "$directory" ;;
esac
printf 'try: stolon demo\n'
