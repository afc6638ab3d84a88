#!/usr/bin/env bash
# A real SGLang, in a virtual environment of its own: it pins other versions than the trainer's environment holds.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
# shellcheck source=launch/lib.sh
source "$here/lib.sh"

# The version that tests/contract runs against; megatron_rl/engines/sglang.py refuses others.
SGLANG_VERSION=0.5.23

usage() {
  cat <<HELP
Usage: launch/install_sglang.sh [--cpu | --cuda] [--venv DIR]

Install SGLang $SGLANG_VERSION, which generates when engine.kind is sglang.

  --cpu       for a machine without a GPU: exactly the packages of launch/sglang-cpu.txt, 2.5 GB (the default
              where there is no nvidia-smi)
  --cuda      what PyPI's sglang asks for, CUDA libraries included, more than 10 GB (the default where there is)
  --venv DIR  where to (default: .venv-sglang in the checkout, which is also where engine.python looks)
  -h, --help  this text

Run again, it does nothing; interrupted, it starts afresh. Exit codes as of launch/quickstart.sh.
HELP
}

kind=$(if type -P nvidia-smi >/dev/null; then echo cuda; else echo cpu; fi)
venv="$MRL_ROOT/.venv-sglang"
while (($#)); do
  case "$1" in
    --cpu) kind=cpu ;;
    --cuda) kind=cuda ;;
    --venv)
      if (($# < 2)); then mrl_fail 64 "--venv needs a directory"; fi
      venv=$2
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) mrl_fail 64 "unknown option $1; see launch/install_sglang.sh --help" ;;
  esac
  shift
done

shims="$MRL_ROOT/megatron_rl/engines/sglang_cpu/shims"

fingerprint() { # of what this environment was made from
  {
    printf '%s\n' "$kind" "$("$MRL_VENV/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null || echo none)"
    cat "$MRL_PINS" "$here/install_sglang.sh"
  } | cksum
}

is_ready() { [[ -x "$MRL_VENV/bin/python" && "$(mrl_state_line 1)" == "$(fingerprint)" ]]; }

install_cpu() {
  mrl_install_torch
  mrl_say "installing SGLang $SGLANG_VERSION and what it needs, pinned by launch/sglang-cpu.txt (log: $MRL_LOG)"
  # Its own demands include CUDA; without them it needs exactly this list. Compiled below: only what is ever imported.
  mrl_pip --no-deps --no-compile -r "$MRL_PINS" || mrl_explain_pip "SGLang $SGLANG_VERSION"
}

install_cuda() {
  mrl_say "installing SGLang $SGLANG_VERSION with CUDA, more than 10 GB (log: $MRL_LOG)"
  mrl_pip "sglang==$SGLANG_VERSION" || mrl_explain_pip "SGLang $SGLANG_VERSION"
}

import_once() { # compiles what a server imports, and shows that it can be imported
  mrl_say "importing it once"
  local settings=(-u PYTHONDONTWRITEBYTECODE -u PYTHONHOME -u PYTHONPATH)
  if [[ "$kind" == cpu ]]; then settings+=("PYTHONPATH=$shims" SGLANG_USE_CPU_ENGINE=1); fi
  env "${settings[@]}" \
    "$MRL_VENV/bin/python" -c 'import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry, sglang.srt.managers.detokenizer_manager' \
    >>"$MRL_LOG" 2>&1 || mrl_fail 15 "SGLang was installed but cannot be imported; the end of $MRL_LOG says why:" "$(tail -n 8 "$MRL_LOG")"
}

mkdir -p "$(dirname "$venv")"
mrl_use_venv "$(cd "$(dirname "$venv")" && pwd -P)/$(basename "$venv")"
MRL_PINS="$here/sglang-cpu.txt"
MRL_NEEDED_MB=$([[ "$kind" == cpu ]] && echo 3500 || echo 25000)
if is_ready; then
  mrl_say "SGLang $SGLANG_VERSION ($kind) is there: $MRL_VENV/bin/python"
  exit 0
fi
started=$SECONDS
mrl_find_python
mrl_lock
if ! is_ready; then # another set-up may have done it while this one waited
  MRL_PIP_PID=""
  trap mrl_interrupted INT TERM HUP
  mrl_prepare_venv
  "install_$kind"
  import_once
  mrl_write_state "$(fingerprint)" "$kind" "$(dirname "$MRL_VENV")"
  trap - INT TERM HUP
fi
mrl_unlock
mrl_say "SGLang $SGLANG_VERSION ($kind) ready after $((SECONDS - started)) s: $MRL_VENV/bin/python"
