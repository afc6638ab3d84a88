#!/usr/bin/env bash
# Every check of the repository with one command; it makes its own environment first. CI runs exactly this.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
# shellcheck source=launch/lib.sh
source "$here/../launch/lib.sh"

usage() {
  cat <<'HELP'
Usage: tests/run.sh [--fast | --all | --changed] [--no-lint] [--install-system] [--install-sglang]
                    [pytest arguments ...]

  (no option)  the first tier: linters, types, import rules, then every test that is neither slow nor needs a GPU
  --fast       the unit tests only, without linters; for use while working
  --all        the first tier and the slow tests; with a CUDA device the gpu tests as well
  --changed    the first tier, then the slow tests of what the last 30 commits touched (all without a history), as many
               as fit; what is left out is printed with the reason. See tests/slow_files.py
  --budget-minutes N
               with --changed: no slow test begins or runs on N minutes after the start of this script (36)
  --no-lint    tests only
  --install-sglang
               install a real SGLang for the CPU in .venv-sglang (2.5 GB), for the tests that otherwise skip without it
  --install-system
               first install what the tests of Slurm and MPI need, by apt-get (Debian, Ubuntu; as root or with sudo -n);
               a test that lacks it afterwards has failed. Without this option such tests are skipped
  -h, --help   this text

Anything else goes to pytest:  tests/run.sh --fast -k config     tests/run.sh tests/unit/test_config.py -x
The environment lives in .venv in the repository; making it takes about a minute, once.
With CI=true a test that skips for a reason not listed in tests/conftest.py counts as failed.

Exit code: 0 when all is well, 1 when something failed, 10 to 18 when the set-up failed (see docs/troubleshooting.md).
HELP
}

tier=first
lint=yes
slow_too=no
budget=36
system=no
sglang=no
arguments=()
while (($#)); do
  case "$1" in
    --fast) tier=fast ;;
    --all) tier=all ;;
    --changed) slow_too=yes ;;
    --budget-minutes)
      budget=${2:?--budget-minutes needs a number}
      shift
      ;;
    --no-lint) lint=no ;;
    --install-system) system=yes ;;
    --install-sglang) sglang=yes ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

install_system() {
  local packages=(slurm-wlm munge libpmix-dev openmpi-bin) root=() log command installed
  # A package that was removed but for its settings is still known to dpkg.
  installed="$(dpkg-query --show --showformat '${db:Status-Status}\n' "${packages[@]}" 2>/dev/null | grep -cx installed || true)"
  if [[ "$installed" == "${#packages[@]}" ]]; then return; fi
  command="apt-get install -y --no-install-recommends ${packages[*]}"
  command -v apt-get >/dev/null ||
    mrl_fail 18 "--install-system knows apt-get only, which is not here." "Install the equivalents of: ${packages[*]}"
  if [[ "$(id -u)" != 0 ]]; then
    sudo -n true 2>/dev/null || mrl_fail 18 "--install-system needs root, or sudo without a password." "As root: $command"
    root=(sudo -n)
  fi
  log="$(mktemp)"
  mrl_say "installing ${packages[*]}"
  # The lists of packages may be absent or too old, which shows only when a package is not found.
  ${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive bash -c "$command || { apt-get update && $command; }" >"$log" 2>&1 ||
    mrl_fail 18 "$command failed; the end of $log:" "$(tail -n 5 "$log")"
  rm "$log"
}

if [[ "$system" == yes ]]; then
  install_system
  export MEGATRON_RL_SYSTEM_INSTALLED=1 # read by tests/conftest.py
fi
MRL_NEEDED_MB=4500 # the compiler of the kernels and the tools of the tests come on top
mrl_setup cpu dev
cd "$MRL_ROOT"
export PATH="$MRL_VENV/bin:$PATH"
# One thread a process: the tests start up to four processes and CI has two cores. No test may reach a model hub.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

failed=()

check() { # NAME COMMAND...; runs on after a failure, so that one run shows everything that is wrong
  local name=$1 started=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  if "$@"; then
    printf -- '-- %s: ok, %d s\n' "$name" $((SECONDS - started))
  else
    failed+=("$name")
    printf -- '-- %s: FAILED, %d s\n' "$name" $((SECONDS - started))
  fi
}

lint_all() {
  check "ruff (bugs, style, docstrings)" ruff check --output-format concise .
  check "ruff (format)" ruff format --check --output-format concise .
  check "shellcheck" shellcheck -x --source-path="$MRL_ROOT" launch/*.sh launch/*.sbatch tests/run.sh .ci/run
  check "import rules" lint-imports --no-cache
  check "mypy (types)" mypy
}

case "$tier" in
  fast)
    lint=no
    selection=(-m "not slow and not gpu" --ignore tests/parallel --ignore tests/contract --ignore tests/e2e
      --ignore tests/slurm)
    ;;
  first) selection=(-m "not slow and not gpu") ;;
  all) selection=() ;;
esac
if [[ -n "${CI:-}" ]]; then selection+=(--strict-skips); fi

if [[ "$lint" == yes ]]; then lint_all; fi
if [[ "$sglang" == yes ]]; then check "SGLang (installation)" "$MRL_ROOT/launch/install_sglang.sh" --cpu; fi
began=$SECONDS
check "pytest ($tier)" python -m pytest ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"}
if [[ "$slow_too" == yes ]]; then
  check "pytest (slow tests of changed areas)" python -m tests.slow_files --budget-s $((budget * 60 - SECONDS)) \
    --first-tier-s $((SECONDS - began)) ${CI:+--strict-skips}
fi

if ((${#failed[@]})); then
  printf '\nFAILED: %s\n' "$(printf '%s; ' "${failed[@]}")"
  exit 1
fi
