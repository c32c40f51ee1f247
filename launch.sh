#!/usr/bin/env bash
# Run a Python file on every GPU of this machine; without at least two GPUs, as 2 CPU ranks.
#
#   ./launch.sh [--nproc N] [--cpu] [--here] [torchrun options] FILE [ARGS...]      or -m MODULE for FILE
#   ./launch.sh test [--gpu] [pytest arguments]
#
# test --gpu runs what needs GPUs, on all of them, in nine minutes: [--part I/N] [--all-candidates]
#
# The first start installs what is missing, into the active virtual or conda environment or into .venv. An
# environment that has dist-autotune of another place keeps it, and nothing runs, unless --here is given.
# An installed torch is used as it is; otherwise the release that pyproject.toml names comes from pip's
# index, or from DIST_AUTOTUNE_TORCH_INDEX (https://download.pytorch.org/whl/cpu: small, for CPU ranks).
# Several hosts: the same command on each, with torchrun's own options before FILE, for example
#   ./launch.sh --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29500 FILE

set -euo pipefail

here=""  # --here: the environment's dist-autotune may be replaced
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

say() { echo "launch.sh: $*" >&2; }
die() { say "$@"; exit 2; }
usage() { sed -n '2,/^$/{s/^# \{0,1\}//;p}' "$root/launch.sh"; }

# ---- the environment

# Set `python`, with the project installed, and for $1 = test what the tests import.
set_up() {
  exec 9<"$root/launch.sh"  # one start at a time: several hosts may share this directory
  flock 9
  find_python
  install
  case ${1:-} in
    test) install_for_tests ;;
    test-on-gpus) install_for_tests pytest-xdist ;;  # a machine with GPUs may have no network
  esac
  exec 9<&-
}

find_python() {
  local own=$root/.venv
  if [[ -n ${VIRTUAL_ENV:-} ]]; then
    python=$VIRTUAL_ENV/bin/python3
  elif [[ -n ${CONDA_PREFIX:-} && ${CONDA_DEFAULT_ENV:-} != base ]]; then
    python=$CONDA_PREFIX/bin/python3
  elif [[ -x $own/bin/python3 ]]; then
    python=$own/bin/python3
  else
    python=$(command -v python3) || die "python3 is not installed; Python 3.11 or newer is needed"
    # A python3 on PATH may belong to a virtual environment that was never activated; then it is used.
    is_true 'sys.prefix != sys.base_prefix' || make_environment "$own"
  fi
  is_true 'sys.version_info >= (3, 11)' || die "$python is not Python 3.11 or newer"
}

make_environment() {
  local directory=$1 options=()
  is_true 'sys.version_info >= (3, 11)' || die "$python is not Python 3.11 or newer"
  if is_true 'importlib.util.find_spec("torch")'; then
    options=(--system-site-packages)
  fi
  say "making the virtual environment $directory" "${options[@]}"
  if ! "$python" -m venv "${options[@]}" "$directory" >&2; then
    rm -rf "$directory"
    die "$python cannot make virtual environments; Debian and Ubuntu: apt install python3-venv"
  fi
  python=$directory/bin/python3
}

is_true() { "$python" -c "import importlib.util, sys; sys.exit(not ($1))"; }

install() {
  local pin others
  [[ -n $(missing) ]] || return 0
  replace_other
  "$python" -m pip --version &>/dev/null || "$python" -m ensurepip >&2  # uv's environments have no pip
  if pin=$(missing | grep '^torch='); then
    pip_install "$pin" ${DIST_AUTOTUNE_TORCH_INDEX:+--index-url "$DIST_AUTOTUNE_TORCH_INDEX"}
  fi
  if pin=$(missing | grep '^triton='); then  # after torch: most builds of it bring their own
    pip_install --quiet "$pin"
  fi
  mapfile -t others < <(missing | grep -v '^dist-autotune')
  if ((${#others[@]})); then
    pip_install --quiet "${others[@]}"
  fi
  # Without dependencies: nightly builds call Triton by another name, and pip would put a second one over it.
  # First with the setuptools that is there, which needs no package index.
  pip_install -qqq --no-deps --no-build-isolation -e "$root" || pip_install --quiet --no-deps -e "$root"
}

# Say which install this one replaces; end where that is a surprise.
replace_other() {
  local other environment=${python%/bin/python3}
  other=$(missing | sed -n 's/^dist-autotune from //p')
  [[ -n $other ]] || return 0
  if [[ -z $here && $environment != "$root/.venv" && (! $other == /* || -d $other) ]]; then
    say "the environment $environment has dist-autotune from $other."
    die "--here replaces it by $root; with no environment active, $root/.venv is used"
  fi
  say "replaces the install from $other in $environment"
}

install_for_tests() {  # not what begins with $1, a|b
  local wanted
  mapfile -t wanted < <(missing test | grep -vE "^(${1:-none of them})")
  if ((${#wanted[@]})); then
    pip_install --quiet "${wanted[@]}" || say "going on without: ${wanted[*]}"
  fi
}

pip_install() {
  say "pip install $*"
  "$python" -m pip install "$@" >&2
}

# Print what is missing, the extra $1 included, one requirement a line. Importing none of it takes 0.1 s, not 2.
missing() {
  "$python" -P - "$root" "$@" <<'EOF'
import importlib.metadata, importlib.util, json, re, sys, tomllib
from pathlib import Path
from urllib.parse import unquote

root, *extras = sys.argv[1:]
settings = tomllib.loads(Path(root, "pyproject.toml").read_text())
project, pins = settings["project"], settings["tool"]["dist-autotune"]
requirements = sum((project["optional-dependencies"][extra] for extra in extras), project["dependencies"])
for requirement in requirements:
    name = re.match(r"[\w-]+", requirement)[0]
    if importlib.util.find_spec(name.replace("-", "_").removeprefix("pytest_")) is None:
        print(pins.get(name, requirement))
try:
    origin = json.loads(importlib.metadata.distribution("dist-autotune").read_text("direct_url.json") or "{}")
except importlib.metadata.PackageNotFoundError:
    print("dist-autotune")
else:  # of the copy beside this script, or of another place
    if (url := origin.get("url", "")) != Path(root).as_uri():
        print("dist-autotune from", unquote(url).removeprefix("file://") or "a package index")
EOF
}

# ---- ranks

launch() {
  local ranks="" cpu="" several_hosts="" module="" options=()
  while [[ ${1:-} == -* ]]; do
    case $1 in
      --cpu) cpu=yes ;;
      --here) here=yes ;;
      -m | --module) module=--module ;;
      --nproc | --nproc-per-node) ranks=${2:-}; shift ;;
      --nproc=* | --nproc-per-node=*) ranks=${1#*=} ;;
      --*=*) options+=("$1") ;;
      --*) options+=("$1" "${2:-}"); shift ;;
      *) die "unknown option $1; ./launch.sh --help" ;;
    esac
    shift || die "an option before FILE lacks its value"
  done
  [[ -z $ranks || $ranks =~ ^[1-9][0-9]*$ ]] || die "--nproc $ranks: the number of ranks is 1 or more"
  [[ $# -gt 0 ]] || die "no FILE given; ./launch.sh --help"
  [[ -n $module || -f $1 ]] || die "$1: no such file"
  if [[ " ${options[*]} " =~ \ --(nnodes|rdzv|master|node)[-_a-z]*[\ =] ]]; then
    several_hosts=yes
  else
    options+=(--standalone)
  fi

  set_up
  choose_device
  : "${OMP_NUM_THREADS:=$((cores = $(nproc) / ranks, cores > 0 ? cores : 1))}"  # or every rank takes all
  export OMP_NUM_THREADS
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}  # benchmarks/NAME.py imports benchmarks.common
  # "--": torchrun would take an option of FILE, such as --m, for an abbreviation of its own.
  exec "$python" -m torch.distributed.run "${options[@]}" --nproc-per-node "$ranks" $module -- "$@"
}

# Settle launch's `ranks` and what they run on: GPUs, or the CPU, which is said in one line.
choose_device() {
  local gpus why
  gpus=$(count_gpus)
  if [[ -n $cpu ]]; then
    why="--cpu"
  elif ((gpus == 0)); then
    why="no GPU"
  elif ! torch_uses_gpus; then
    why="the installed torch is a CPU build"
  elif [[ -z $ranks && -z $several_hosts ]] && ((gpus == 1)); then
    why="1 GPU, two are needed"
  elif ((${ranks:=$gpus} > gpus)); then
    die "--nproc $ranks: more ranks than GPUs ($gpus); --cpu runs them on the CPU"
  else
    return 0
  fi
  : "${ranks:=2}"
  export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
  local how="(gloo, Triton's interpreter, shared memory)" who
  who="1 CPU rank $how checks"
  ((ranks == 1)) || who="$ranks CPU ranks $how check"
  say "$why: $who behaviour, not speed"
  interpreter_suits_numpy || say "Triton 3.6's interpreter fails with numpy 2.4 or newer: pip install 'numpy<2.4'"
}

interpreter_suits_numpy() {
  "$python" -P -c '
import sys
from importlib.metadata import version
sys.exit(version("triton").startswith("3.6.") and [int(n) for n in version("numpy").split(".")[:2]] >= [2, 4])'
}

# Print the number of GPUs that a process started here would see. torch would take seconds to say.
count_gpus() {
  local found visible
  found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
  if [[ -v CUDA_VISIBLE_DEVICES ]]; then
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES%%-1*}"
    ((${#visible[@]} >= found)) || found=${#visible[@]}
  fi
  echo "$found"
}

torch_uses_gpus() {  # torch/version.py says so without the import of torch
  "$python" -P -c '
import importlib.util, pathlib, runpy, sys
version = runpy.run_path(pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py"))
sys.exit(not (version["cuda"] or version.get("hip")))'
}

# ---- tests

# Each world of tests/conftest.py is a pytest session. `status` is 5, pytest's "no tests", until one passed.
run_tests() {
  local cpu=yes gpu="" paths=() options=() workers=() status=5 argument
  if [[ ${DIST_AUTOTUNE_TEST_GPU:-} == 1 ]]; then
    cpu="" gpu=yes
  fi
  for argument in "$@"; do
    if [[ $argument == --gpu ]]; then
      cpu="" gpu=yes
    elif [[ $argument == --here ]]; then
      here=yes
    elif [[ -e ${argument%%::*} ]]; then
      paths+=("$argument")
    else
      options+=("$argument")
    fi
  done
  set_up "test${gpu:+-on-gpus}"
  if [[ -n $cpu ]] && ((${#paths[@]})); then
    session "${paths[@]}"
  elif [[ -n $cpu ]]; then
    if is_true 'importlib.util.find_spec("xdist")'; then  # many tests wait: one worker more than cores
      workers=(-n "$(($(nproc) < 8 ? $(nproc) + 1 : 8))" --dist worksteal)
    fi
    session "${workers[@]}" "$root/tests"
    session "${workers[@]}" "$root/tests/aot"
  fi
  if [[ -n $gpu ]]; then
    export DIST_AUTOTUNE_TEST_GPU=1 COLUMNS=${COLUMNS:-200}  # a line for each failure, not cut at 80
    session -q --tb=short -p no:cacheprovider "${paths[@]:-$root/tests}"
  fi
  return "$status"
}

session() {
  local code=0
  "$python" -m pytest -c "$root/pyproject.toml" "$@" "${options[@]}" || code=$?
  if ((code == 0 && status == 5)); then
    status=0
  elif ((code != 0 && !(code == 5 && ${#options[@]}))); then  # -k may select nothing in one world
    status=1
  fi
}

case ${1:-} in
  -h | --help) usage ;;
  "") usage >&2; exit 2 ;;
  test) run_tests "${@:2}" ;;
  *) launch "$@" ;;
esac
