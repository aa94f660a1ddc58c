#!/usr/bin/env bash
# Builds one part of a release into dist/, the same here and in .github/workflows/release.yml.
#
#   scripts/release.sh static x86_64|aarch64    the command, statically linked with musl, as .tar.gz
#   scripts/release.sh wheel x86_64|aarch64     the Python package, for glibc 2.28 and Python 3.11 or newer
#
# Any of them builds on any Linux host: zig, from PyPI, is compiler and linker for the other libc and the
# other processor. Needs Rust with rustup and Python 3.11 or newer with venv. PROFILE=dev builds faster,
# to try this script.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-} arch=${2:-}
case $part/$arch in static/x86_64 | static/aarch64 | wheel/x86_64 | wheel/aarch64) ;; *)
  echo "usage: scripts/release.sh static|wheel x86_64|aarch64" >&2
  exit 2
esac
profile=${PROFILE:-release}
venv=$PWD/target/release-venv
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q "maturin==1.16.*" "cargo-zigbuild==0.24.*" "ziglang==0.17.*"
export PATH=$venv/bin:$PATH CARGO_PROFILE_RELEASE_STRIP=symbols
mkdir -p dist

if [ "$part" = wheel ]; then
  rustup target add "$arch-unknown-linux-gnu"
  # maturin refuses a wheel that needs more than the named glibc.
  maturin build --manifest-path python/Cargo.toml --locked --profile "$profile" --zig \
    --target "$arch-unknown-linux-gnu" --compatibility manylinux_2_28 --out dist
  exit
fi

target=$arch-unknown-linux-musl
rustup target add "$target"
# Without CUDA: a statically linked program cannot open the driver's library at run time.
cargo zigbuild --locked --profile "$profile" --target "$target" --no-default-features --features cli
folder=$profile
if [ "$profile" = dev ]; then folder=debug; fi
version=$(cargo metadata --locked --no-deps --format-version 1 | python3 -c 'import json, sys; print(json.load(sys.stdin)["packages"][0]["version"])')
name=preshard-$version-$arch-linux
rm -rf "target/$name"
mkdir "target/$name"
cp "target/$target/$folder/preshard" README.md LICENSE CHANGELOG.md "target/$name"
"target/$name/preshard" --version >/dev/null 2>&1 || echo "note: built, but not run: this host does not run $arch"
tar -C target -czf "dist/$name.tar.gz" "$name"
echo "dist/$name.tar.gz"
