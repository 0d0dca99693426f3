#!/usr/bin/env bash
# Run tests of kernels for NEON: an aarch64 Python of Debian under qemu-user, with aarch64 wheels of NumPy and Numba.
# Downloads about 0.3 GB into build/neon and needs no root. Arguments are those of pytest. Needs a Debian with apt-get.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
neon=$PWD/build/neon
if ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then
  echo "make neon: needs apt-get and dpkg-deb of Debian 12, to download qemu-user-static and an aarch64 Python"
  exit 1
fi
if [ ! -e "$neon/.ready" ]; then
  rm -rf "$neon"
  mkdir -p "$neon"/{qemu,root,site,apt/state/lists/partial,apt/cache/archives/partial}
  touch "$neon/apt/status"
  (cd "$neon" && apt-get -qq download qemu-user-static && dpkg-deb -x qemu-user-static*.deb qemu)
  # A package list of its own, so that the machine's packages and architectures do not change.
  apt=(apt-get -qq -o Dir::State="$neon/apt/state" -o Dir::State::status="$neon/apt/status"
    -o Dir::Cache="$neon/apt/cache" -o APT::Architecture=arm64 -o APT::Architectures=arm64)
  "${apt[@]}" update
  "${apt[@]}" install --download-only --yes --no-install-recommends python3.11 libgomp1 libstdc++6
  for package in "$neon"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$neon/root"; done
  # The versions of the environment here, so that both compile with the same LLVM.
  pins=$("$python" -m pip freeze | grep -E '^(numpy|numba|llvmlite|msgpack|pytest|hypothesis|PyYAML|psutil|pyzmq|backports.zstd|gguf)==')
  # shellcheck disable=SC2086
  "$python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: --implementation cp \
    --python-version 3.11 --abi cp311 --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --target "$neon/site" $pins
  touch "$neon/.ready"
fi
# A copy without compiled parts, with a cache of its own: code for this processor must not meet code for aarch64.
rm -rf "$neon/source"
mkdir -p "$neon/source"
git ls-files -z --cached --others --exclude-standard | tar --null -cf - -T - | tar -xf - -C "$neon/source"
cd "$neon/source"
run=("$neon/qemu/usr/bin/qemu-aarch64-static" -L "$neon/root" -E "PYTHONPATH=$neon/site:$neon/source"
  "$neon/root/usr/bin/python3.11")
"${run[@]}" -c '
import platform, re
import numba
from cbtop.compute.jit.cpu import TIER
from llvmlite import binding
assert platform.machine() == "aarch64" and TIER == "generic", (platform.machine(), TIER)
@numba.njit("void(float32[::1], float32[::1])")
def add(x, y):
    for i in range(x.size):
        y[i] += x[i]
assert re.search(r"fadd\s+v\d+\.4s", add.inspect_asm(add.signatures[0])), "no NEON instruction was compiled"
print(f"{binding.get_default_triple()}, tier {TIER}, under qemu-user")'
# No plugins are installed there, so their options are unknown.
"${run[@]}" -m pytest -o addopts= -W ignore::pytest.PytestConfigWarning -p no:cacheprovider -m 'not slow' -q "$@"
