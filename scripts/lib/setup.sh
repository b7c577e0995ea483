# SPDX-License-Identifier: Apache-2.0
# Sourced by scripts/demo, scripts/test and others. Installs only what a bare Debian 12 machine lacks. If
# nothing is missing, neither root nor a network is needed. Expects `set -euo pipefail` and $ROOT.

# One compiler cache for all trees below $ROOT: scripts/mutants builds a copy of this tree there.
export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$ROOT}" CCACHE_NOHASHDIR="${CCACHE_NOHASHDIR:-1}"

LIB="$ROOT/scripts/lib"
VENV="$ROOT/.venv"

# say TEXT: prints TEXT with the time since the script began, which shows what is slow.
say() { printf '[%3d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# run_quietly LOG COMMAND...: writes the command's output to LOG. If it fails, also prints the end of LOG.
run_quietly() {
  local log="$1"
  shift
  mkdir -p "$(dirname "$log")"
  if ! "$@" >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    die "failed: $* (all of its output: $log)"
  fi
}

# as_root COMMAND...: runs COMMAND as root, or by sudo without a password. COMMAND must be a program.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

missing_packages() {
  local package
  for package in "$@"; do
    dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || echo "$package"
  done
}

# check_release FILE: exits if the distribution's gRPC or libfabric is known to be too old. Unknown
# distributions are accepted. `VERSION_ID="22.04"` is compared as 2204, "12" as 1200.
check_release() {
  if [ ! -r "$1" ]; then return; fi
  local id version name number least
  id="$(. "$1" && echo "${ID:-}")"
  version="$(. "$1" && echo "${VERSION_ID:-}")"
  name="$(. "$1" && echo "${PRETTY_NAME:-$id $version}")"
  case "$id" in debian) least=1200 ;; ubuntu) least=2404 ;; *) return ;; esac
  if [[ ! "$version" =~ ^([0-9]+)(\.([0-9]{2}))?$ ]]; then return; fi
  number=$((10#${BASH_REMATCH[1]} * 100 + 10#${BASH_REMATCH[3]:-0}))
  if [ "$number" -lt "$least" ]; then
    die "$name is too old: its gRPC (1.30) or libfabric (1.11) cannot build this; Debian 12 and Ubuntu 24.04 can"
  fi
}

# fetch_prometheus: unpacks prometheus and promtool into build/prometheus, because an installed package would
# start its service. Without them the tests that need them are skipped.
fetch_prometheus() {
  local folder="$ROOT/build/prometheus"
  if command -v promtool >/dev/null || [ -x "$folder/usr/bin/promtool" ]; then return; fi
  say "fetching prometheus"
  mkdir -p "$folder" "$ROOT/build/setup"
  (
    cd "$folder"
    apt-get download prometheus || { as_root apt-get update && apt-get download prometheus; }
    dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb
  ) >"$ROOT/build/setup/prometheus.log" 2>&1 || say "no prometheus (build/setup/prometheus.log says why): its tests are skipped"
}

# Chooses g++ 12 or newer. If the default is older, gcc-12 is installed beside it and used.
choose_compiler() {
  if [ -n "${CXX:-}" ]; then return; fi
  local major
  major="$(g++ -dumpversion 2>/dev/null | cut -d. -f1)"
  if [ -n "$major" ] && [ "$major" -lt 12 ]; then
    install_packages gcc-12 g++-12
    export CC=gcc-12 CXX=g++-12
  fi
}

# install_packages NAME...: installs those that are not installed.
install_packages() {
  if ! command -v dpkg-query >/dev/null; then
    say "no dpkg here: taking for granted what scripts/lib/packages lists"
    return
  fi
  local missing
  mapfile -t missing < <(missing_packages "$@")
  if [ "${#missing[@]}" = 0 ]; then return; fi
  if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    die "these packages are missing and only root can install them: apt-get install ${missing[*]}"
  fi
  say "installing ${missing[*]}"
  run_quietly "$ROOT/build/setup/apt.log" as_root env DEBIAN_FRONTEND=noninteractive apt-get update
  # The tests start their own etcd, so the system service is not started, neither now nor at the next boot.
  local policy=/usr/sbin/policy-rc.d own_policy=
  if [[ " ${missing[*]} " == *" etcd-server "* ]] && [ ! -e "$policy" ]; then
    own_policy=1
    printf '#!/bin/sh\nexit 101\n' | as_root sh -c "cat >$policy && chmod +x $policy"
  fi
  run_quietly "$ROOT/build/setup/apt.log" as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
  if [ -n "$own_policy" ]; then
    as_root rm -f "$policy"
    if [ -d /run/systemd/system ]; then as_root systemctl disable etcd >/dev/null 2>&1 || true; fi
  fi
}

# Prints the path of a Python that has venv, and for which the pinned torch has wheels.
find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10 /usr/bin/python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' \
      2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python from 3.10 to 3.14 with venv found; set PYTHON to one"
}

# make_venv DIR REQUIREMENTS [PIP OPTION...]: makes a virtual environment, from scratch if its requirements
# have changed or its Python is gone. If there are options, they are given to a second `pip install`.
make_venv() {
  local venv="$1" requirements="$2" name="${1##*/}" python
  shift 2
  if [ -x "$venv/bin/python" ] && cmp -s "$requirements" "$venv/.requirements"; then return; fi
  python="$(find_python)"
  say "making ${venv#"$ROOT/"} with $("$python" --version) and $(grep -v '^#' "$requirements" | paste -sd ' '); log: build/setup/$name-pip.log"
  rm -rf "$venv"
  run_quietly "$ROOT/build/setup/$name.log" "$python" -m venv "$venv"
  run_quietly "$ROOT/build/setup/$name-pip.log" "$venv/bin/pip" install --disable-pip-version-check -r "$requirements"
  if [ $# -gt 0 ]; then
    run_quietly "$ROOT/build/setup/$name-more.log" "$venv/bin/pip" install --disable-pip-version-check "$@"
  fi
  cp "$requirements" "$venv/.requirements"
}

# setup_frameworks_venv: makes the virtual environments of tests/frameworks and sets their paths:
# FRAMEWORKS_VENV runs the tests, ROPETEAM_SKY_VENV has SkyPilot. An environment that the caller has named is
# used unchanged.
setup_frameworks_venv() {
  FRAMEWORKS_VENV="${ROPETEAM_FRAMEWORKS_VENV:-$ROOT/build/frameworks-venv}"
  if [ -z "${ROPETEAM_FRAMEWORKS_VENV:-}" ]; then
    make_venv "$FRAMEWORKS_VENV" "$ROOT/tests/frameworks/requirements.txt" --no-deps torchtitan==0.3.0
  fi
  if [ -z "${ROPETEAM_SKY_VENV:-}" ]; then
    export ROPETEAM_SKY_VENV="$ROOT/build/sky-venv"
    make_venv "$ROPETEAM_SKY_VENV" "$ROOT/tests/frameworks/requirements-sky.txt"
  fi
}

# link_venv: after `. .venv/bin/activate` Python finds the package in api/python, and the programs that
# build/release has so far are on PATH. They find their own files from their real location.
link_venv() {
  if [ ! -x "$VENV/bin/python" ]; then return; fi
  local packages program
  packages="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  printf '%s\n' "$ROOT/api/python" >"$packages/ropeteam.pth"
  for program in api/cli/ropeteam node/ropeteamd bench/ropeteam-bench; do
    if [ -x "$ROOT/build/release/$program" ]; then
      ln -sfn "$ROOT/build/release/$program" "$VENV/bin/${program##*/}"
    fi
  done
}

setup_machine() {
  check_release /etc/os-release
  local packages
  mapfile -t packages < <(grep -v '^#' "$LIB/packages")
  install_packages "${packages[@]}"
  choose_compiler
  make_venv "$VENV" "$LIB/requirements.txt"
}

# Installs what the fuzz targets need besides the packages: clang, and the runtime libraries of its version.
setup_fuzzer() {
  install_packages clang
  if command -v clang++ >/dev/null; then
    install_packages "libclang-rt-$(clang++ -dumpversion | cut -d. -f1)-dev"
  fi
}

fuzzer_works() {
  command -v clang++ >/dev/null && printf 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
    clang++ -x c++ -fsanitize=fuzzer,address -o /dev/null - 2>/dev/null
}

# A script may set these for every preset: a suffix of the build tree, and options for CMake.
BUILD_SUFFIX=""
BUILD_OPTIONS=()

# build_preset PRESET [TARGET...]: configures and builds the targets, or all. Programs of the release build
# are linked into .venv.
build_preset() {
  local preset="$1" tree="$1$BUILD_SUFFIX"
  shift
  say "configuring $tree"
  run_quietly "$ROOT/build/setup/configure-$tree.log" cmake -S "$ROOT" --preset "$preset" -B "$ROOT/build/$tree" \
    "${BUILD_OPTIONS[@]}"
  say "building $tree${*:+ ($*)}; log: build/setup/build-$tree.log"
  run_quietly "$ROOT/build/setup/build-$tree.log" ninja -C "$ROOT/build/$tree" "$@"
  if [ "$tree" = release ]; then link_venv; fi
}
