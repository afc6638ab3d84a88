# shellcheck shell=bash
# The set-up that launch/quickstart.sh and tests/run.sh share: a Python 3.11, a virtual environment in .venv, pinned packages.
# What runs inside that environment does not belong here.
#
# Usage, from a script with `set -euo pipefail`:
#   source ".../launch/lib.sh"
#   mrl_setup cpu          # or: mrl_setup cpu dev
#   "$MRL_VENV/bin/megatron-rl" --help
#
# What it remembers: .venv/megatron-rl-setup holds `installing` while packages are being written and, after that, a
# fingerprint of everything the result depends on, the extras and the checkout's path. Equal means nothing to do;
# `installing` found later means that a set-up was cut off, and the environment is built anew.
#
# What a user may set:
#   MEGATRON_RL_PYTHON       the Python 3.11 to use
#   MEGATRON_RL_TORCH_INDEX  the package index for torch; `default` takes what pip takes, even several GB of CUDA
#
# Exit codes: 10 no suitable Python, 11 no venv module, 12 disk full, 13 package index not reached, 14 no such build of
# torch, 15 another install error, 16 waited too long for another set-up, 17 .venv belongs to something else, 130 interrupted.

MRL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
MRL_PINS="$MRL_ROOT/constraints-cpu.txt"
MRL_PYTHON_VERSION=3.11
MRL_CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
MRL_NEEDED_MB=3000
MRL_LOCK_TIMEOUT_S=1800

mrl_use_venv() { # DIR; where everything below works, .venv in the checkout unless a script says otherwise
  MRL_VENV=$1
  MRL_STATE="$MRL_VENV/megatron-rl-setup"
  MRL_LOG="$MRL_VENV/megatron-rl-setup.log"
}
mrl_use_venv "$MRL_ROOT/.venv"

mrl_say() { printf '%s\n' "[setup] $*" >&2; }

mrl_fail() { # CODE LINE...
  local code=$1
  shift
  printf '[setup] ERROR: %s\n' "$1" >&2
  shift
  if (($#)); then printf '%s\n' "$@" | sed 's/^/[setup]   /' >&2; fi
  exit "$code"
}

# ------------------------------------------------------------------------------------------------------- finding a Python

mrl_python_version() { # PYTHON -> "3.11" when it is a working 64-bit CPython
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2]) if sys.maxsize > 2**32 and sys.implementation.name == "cpython" else sys.exit(1)' \
    2>/dev/null
}

mrl_python_candidates() { # one per line, the user's own choice first
  if [[ -n "${MEGATRON_RL_PYTHON:-}" ]]; then
    printf '%s\n' "$MEGATRON_RL_PYTHON"
    return
  fi
  type -aP "python$MRL_PYTHON_VERSION" python3 python || true
  local path
  for path in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$MRL_PYTHON_VERSION".*/bin/python \
    "$HOME/.local/share/uv/python/cpython-$MRL_PYTHON_VERSION"*/bin/python3; do
    if [[ -x "$path" ]]; then printf '%s\n' "$path"; fi
  done
}

mrl_find_python() { # sets MRL_PYTHON, or explains what is missing
  local candidate version seen="" without_venv=""
  while IFS= read -r candidate; do
    version="$(mrl_python_version "$candidate")" || continue
    seen="$seen $candidate ($version);"
    [[ "$version" == "$MRL_PYTHON_VERSION" ]] || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      MRL_PYTHON=$candidate
      return
    fi
    without_venv=$candidate
  done < <(mrl_python_candidates)

  if [[ -n "$without_venv" ]]; then
    mrl_fail 11 "$without_venv is Python $MRL_PYTHON_VERSION but lacks the modules venv and ensurepip." \
      "Debian and Ubuntu: sudo apt-get install python$MRL_PYTHON_VERSION-venv" \
      "or point MEGATRON_RL_PYTHON at another Python $MRL_PYTHON_VERSION."
  fi
  if [[ -n "${MEGATRON_RL_PYTHON:-}" ]]; then
    mrl_fail 10 "MEGATRON_RL_PYTHON=$MEGATRON_RL_PYTHON is not a working 64-bit CPython $MRL_PYTHON_VERSION." \
      "Unset it to search PATH, pyenv and uv, or point it at such a Python."
  fi
  mrl_fail 10 "no Python $MRL_PYTHON_VERSION found (the version that megatron-rl is tested with). Seen:${seen:- none at all}" \
    "Any of these installs one, for your user alone:" \
    "  uv python install $MRL_PYTHON_VERSION        (https://docs.astral.sh/uv; found without further settings)" \
    "  pyenv install $MRL_PYTHON_VERSION            (found without further settings)" \
    "  conda create -n py311 python=$MRL_PYTHON_VERSION" \
    "or for the system: apt-get install python$MRL_PYTHON_VERSION python$MRL_PYTHON_VERSION-venv, dnf install python$MRL_PYTHON_VERSION, brew install python@$MRL_PYTHON_VERSION." \
    "If it is not on PATH, set MEGATRON_RL_PYTHON=/path/to/python$MRL_PYTHON_VERSION."
}

# ------------------------------------------------------------------------------------------------- is there anything to do

mrl_fingerprint() { # of what the environment was built from
  local version
  version="$("$MRL_VENV/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null)" || version="no python"
  {
    printf '%s\n' "$MRL_ROOT" "$version"
    cat "$MRL_ROOT/setup.py" "$MRL_ROOT/constraints-cpu.txt" "$MRL_ROOT/launch/lib.sh" "$MRL_ROOT/megatron_rl/__init__.py"
  } | cksum
}

mrl_state_line() { # NUMBER; empty when there is none
  if [[ -f "$MRL_STATE" ]]; then sed -n "$1p" "$MRL_STATE"; fi
}

mrl_write_state() { # LINE... ; renamed into place, so that no reader sees half of it
  printf '%s\n' "$@" >"$MRL_STATE.tmp"
  mv -f "$MRL_STATE.tmp" "$MRL_STATE"
}

mrl_is_ready() { # EXTRA...
  [[ -x "$MRL_VENV/bin/megatron-rl" && "$(mrl_state_line 1)" == "$(mrl_fingerprint)" ]] || return 1
  local extra installed
  installed=" $(mrl_state_line 2) "
  for extra in "$@"; do
    [[ "$installed" == *" $extra "* ]] || return 1
  done
}

# ------------------------------------------------------------------------------------------------------ guards before work

mrl_lock() { # one set-up at a time; the kernel drops the lock when the last process that holds descriptor 9 ends
  exec 9>"$MRL_VENV.lock" || mrl_fail 12 "cannot write to $(dirname "$MRL_VENV"): it must be writable and its disk not full."
  "$MRL_PYTHON" - "$MRL_LOCK_TIMEOUT_S" <<'PYTHON' || mrl_fail 16 \
    "another set-up of this checkout has held $MRL_VENV.lock for $MRL_LOCK_TIMEOUT_S s." \
    "Let it finish, or end it (fuser '$MRL_VENV.lock' names its processes), and run this again."
import fcntl, sys, time

deadline = time.monotonic() + float(sys.argv[1])
told = False
while True:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        if not told:
            print(f"[setup] another set-up of this checkout is running; waiting for it (at most {sys.argv[1]} s)", file=sys.stderr, flush=True)
            told = True
        if time.monotonic() > deadline:
            sys.exit(1)
        time.sleep(0.2)
PYTHON
}

mrl_unlock() { exec 9>&-; }

mrl_check_disk() { # MB needed in the checkout
  local free_mb
  free_mb="$(df -Pk "$(dirname "$MRL_VENV")" | awk 'NR == 2 { print int($4 / 1024) }')"
  if ((free_mb < $1)); then
    mrl_fail 12 "the disk that holds $(dirname "$MRL_VENV") has $free_mb MB free; the set-up needs about $1 MB." \
      "Free some space, or clone the repository onto a larger disk, and run this again."
  fi
}

# --------------------------------------------------------------------------------------------------------- the environment

mrl_new_venv() { # build .venv from nothing; the state file comes first, so that a cut-off attempt is recognised as ours
  mrl_say "making a virtual environment in $MRL_VENV with $("$MRL_PYTHON" --version 2>&1) ($(command -v "$MRL_PYTHON"))"
  mkdir -p "$MRL_VENV"
  mrl_write_state installing
  "$MRL_PYTHON" -m venv "$MRL_VENV" >>"$MRL_LOG" 2>&1 ||
    mrl_fail 11 "$MRL_PYTHON -m venv failed; the end of $MRL_LOG says why:" "$(tail -n 5 "$MRL_LOG")"
}

mrl_prepare_venv() { # keep a usable .venv, replace one that was cut off, refuse one that is not ours
  if [[ -e "$MRL_VENV" && ! -f "$MRL_STATE" ]]; then
    mrl_fail 17 "$MRL_VENV exists and was not made by this script." "Move it away or delete it, and run this again."
  fi
  if [[ "$(mrl_state_line 1)" == installing ]]; then
    mrl_say "an earlier set-up did not finish; starting afresh"
    rm -rf "$MRL_VENV"
  elif [[ -e "$MRL_VENV" && "$(mrl_state_line 3)" != "$(dirname "$MRL_VENV")" ]]; then
    mrl_say "the checkout was moved, and the scripts in .venv hold the old path; starting afresh"
    rm -rf "$MRL_VENV"
  elif [[ -e "$MRL_VENV" ]] && ! "$MRL_VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    mrl_say "the Python that $MRL_VENV was made with is gone; starting afresh"
    rm -rf "$MRL_VENV"
  fi
  if [[ ! -e "$MRL_VENV" ]]; then
    mrl_check_disk "$MRL_NEEDED_MB"
    mrl_new_venv
  else
    mrl_check_disk 500
    mrl_write_state installing
  fi
}

mrl_pip() { # pip install ARGUMENT... into .venv, whatever a user's pip settings say about other targets
  printf '\n$ pip install %s\n' "$*" >>"$MRL_LOG"
  env -u PIP_USER -u PIP_TARGET -u PIP_PREFIX -u PYTHONPATH -u PYTHONHOME PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$MRL_VENV/bin/python" -m pip install --no-input --progress-bar off "$@" >>"$MRL_LOG" 2>&1 &
  MRL_PIP_PID=$! # in the background, since bash runs a trap at once while it waits, but only afterwards in the foreground
  wait "$MRL_PIP_PID"
}

mrl_interrupted() {
  if [[ -n "$MRL_PIP_PID" ]]; then kill "$MRL_PIP_PID" 2>/dev/null || true; fi
  mrl_say "interrupted; the next run starts the set-up afresh"
  exit 130
}

# shellcheck disable=SC2016  # the dollar signs are sed's
mrl_last_pip_log() { sed -n '/^\$ pip install /h; /^\$ pip install /!H; ${x;p;}' "$MRL_LOG"; } # of the last call only

mrl_explain_pip() { # WHAT; turn pip's log into one message
  local recent
  recent="$(mrl_last_pip_log)"
  if grep -qE 'No space left on device|Disk quota exceeded' <<<"$recent"; then
    mrl_fail 12 "the disk filled up while installing $1 (the checkout's, or the one that holds ${TMPDIR:-/tmp})." \
      "Free some space and run this again. Log: $MRL_LOG"
  fi
  if grep -qE 'NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|ConnectionReset|ProxyError|SSLError|Network is unreachable|Connection (refused|broken)' <<<"$recent"; then
    mrl_fail 13 "the package index was not reached while installing $1." \
      "Check the network (or pip's proxy and index settings: pip config list) and run this again. Log: $MRL_LOG"
  fi
  if grep -qE 'No matching distribution|ResolutionImpossible' <<<"$recent"; then
    mrl_fail 13 "the package index was not reached, or does not offer what $(basename "$MRL_PINS") pins, while installing $1." \
      "Check the network and pip's index settings (pip config list) and run this again. Log: $MRL_LOG"
  fi
  mrl_fail 15 "pip could not install $1. The end of $MRL_LOG:" "$(tail -n 8 <<<"$recent")"
}

# On Linux a plain `torch` from PyPI is a CUDA build of several GB. Asking for the local version label +cpu makes it
# impossible to get one by accident: pip's own sources are tried first, then the index of CPU builds.
mrl_install_torch() {
  local version index="${MEGATRON_RL_TORCH_INDEX:-}"
  version="$(sed -n 's/^torch==//p' "$MRL_ROOT/constraints-cpu.txt")"
  if [[ "$(mrl_torch_version)" == "$version" ]]; then return; fi
  if [[ "$index" == default || (-z "$index" && "$(uname -s)" != Linux) ]]; then
    mrl_say "installing torch $version, the build that pip chooses"
    mrl_pip --no-deps "torch==$version" || mrl_explain_pip "torch $version"
  elif [[ -n "$index" ]]; then
    mrl_say "installing torch $version from MEGATRON_RL_TORCH_INDEX=$index"
    mrl_pip --no-deps --index-url "$index" "torch==$version" || mrl_explain_no_torch "$version" "$index"
  else
    mrl_say "installing torch $version, CPU build"
    if ! mrl_pip --no-deps "torch==$version+cpu"; then
      mrl_say "pip's configured sources have no CPU build of torch $version; trying $MRL_CPU_TORCH_INDEX"
      mrl_pip --no-deps --retries 1 --index-url "$MRL_CPU_TORCH_INDEX" "torch==$version+cpu" ||
        mrl_explain_no_torch "$version" "$MRL_CPU_TORCH_INDEX"
    fi
  fi
}

mrl_torch_version() { # in .venv, without the label of the build; empty when absent
  "$MRL_VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch").partition("+")[0])' 2>/dev/null || true
}

mrl_explain_no_torch() { # VERSION INDEX
  if mrl_last_pip_log | grep -qE 'No space left on device|Disk quota exceeded'; then mrl_explain_pip "torch $1"; fi
  mrl_fail 14 "no CPU build of torch $1 for Python $MRL_PYTHON_VERSION came from $2." \
    "A mirror of the CPU builds:          export MEGATRON_RL_TORCH_INDEX=https://your.mirror/whl/cpu" \
    "A folder with the wheel:             export PIP_FIND_LINKS=/path/to/folder" \
    "Whatever pip chooses (CUDA, ~5 GB):  export MEGATRON_RL_TORCH_INDEX=default" \
    "Then run this again. Log: $MRL_LOG"
}

mrl_install() { # EXTRA...; leaves .venv ready for them and for what was installed before
  local extras started=$SECONDS
  extras="$(printf '%s\n' "$@" | sort -u | paste -s -d ' ' -)"
  mrl_install_torch
  mrl_say "installing megatron-rl [$extras] and what it needs, pinned by constraints-cpu.txt (about a minute; log: $MRL_LOG)"
  mrl_pip -c "$MRL_ROOT/constraints-cpu.txt" setuptools || mrl_explain_pip setuptools
  # With setuptools in place no build environment is made: what is pinned is what builds.
  mrl_pip -c "$MRL_ROOT/constraints-cpu.txt" --no-build-isolation -e "${MRL_ROOT}[${extras// /,}]" || mrl_explain_pip megatron-rl
  "$MRL_VENV/bin/python" -m pip check >>"$MRL_LOG" 2>&1 || mrl_fail 15 "the installed packages do not fit together:" "$(tail -n 5 "$MRL_LOG")"
  mrl_write_state "$(mrl_fingerprint)" "$extras" "$(dirname "$MRL_VENV")"
  mrl_say "ready after $((SECONDS - started)) s"
}

# Make .venv ready for the named extras. Idempotent; takes about a second when nothing changed.
mrl_setup() { # EXTRA...
  if mrl_is_ready "$@"; then return; fi
  mrl_find_python
  mrl_lock
  if ! mrl_is_ready "$@"; then # another set-up may have done it while this one waited
    MRL_PIP_PID=""
    trap mrl_interrupted INT TERM HUP
    local earlier=()
    read -r -a earlier <<<"$(mrl_state_line 2)"
    mrl_prepare_venv
    mrl_install "$@" ${earlier[@]+"${earlier[@]}"}
    trap - INT TERM HUP
  fi
  mrl_unlock
}
