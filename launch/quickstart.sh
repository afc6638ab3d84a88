#!/usr/bin/env bash
# From a fresh clone to a small model that learns by reinforcement, on a machine without a GPU.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
# shellcheck source=launch/lib.sh
source "$here/lib.sh"

usage() {
  cat <<'HELP'
Usage: launch/quickstart.sh [--seed N] [--steps N] [--out DIR] [--resume] [--dry-run] [section.key=value ...]

Watch a small model learn to sort digits by reinforcement, on two CPU cores and without a GPU:

  1. set-up   once: a Python 3.11 environment in .venv (about a minute, 2 GB); afterwards about a second
  2. make     a tiny Qwen3 with random weights, its tokenizer and the prompts, all derived from the seed
  3. train    a short supervised warm-up that teaches the format of an answer, then DAPO: generation over HTTP,
              verified rewards, Megatron-Core at tensor parallel 2, new weights back to the generation server

Options
  --seed N    model, prompts and training are derived from it (default 1)
  --steps N   reinforcement steps (default: `steps` in configs/quickstart.yaml)
  --out DIR   where everything goes (default: a new folder runs/quickstart-seed-N-TIME in the repository)
  --resume    go on with the run in --out DIR from its newest checkpoint, with the seed and the settings it had
              (--resume-from STEP and --accept-changes are those of `megatron-rl train`)
  --dry-run   print the resolved configuration and the layout of the run; train nothing, leave nothing behind
  -h, --help  this text

Anything of the form section.key=value goes to the configuration, for example
  launch/quickstart.sh --steps 20 rollout.group_size=8 optimizer.lr=1e-4
  .venv/bin/megatron-rl config --schema      lists every key with its meaning

What you get in DIR
  report.html      open it in a browser: reward, accuracy, lengths, timings, sample answers
  metrics.jsonl    one JSON object a step; also as TensorBoard: .venv/bin/tensorboard --logdir DIR/tensorboard
  The last line printed is `RESULT {...}`: accuracy on unseen prompts before and after, with 95 % intervals.

Environment
  MEGATRON_RL_PYTHON        the Python 3.11 to use, when it is not found by itself
  MEGATRON_RL_TORCH_INDEX   where the CPU build of torch comes from, e.g. a mirror of https://download.pytorch.org/whl/cpu

Ctrl-C saves the run and leaves with exit code 75; go on with --resume.

Exit code: 0 when the run finished, 64 for a wrong argument, 10 to 17 when the set-up failed (the message says what to
do; docs/troubleshooting.md lists them), else that of `megatron-rl train`.
HELP
}

fail_usage() {
  printf '%s\n' "quickstart: $1" "Try: launch/quickstart.sh --help" >&2
  exit 64
}

need_number() { # OPTION VALUE
  [[ "$2" =~ ^[0-9]+$ ]] || fail_usage "$1 takes a whole number, not '$2'"
}

seed=""
out=""
options=()
overrides=()
while (($#)); do
  case "$1" in
    --seed | --steps | --out | --resume-from)
      (($# >= 2)) || fail_usage "$1 needs a value"
      set -- "$1=$2" "${@:3}"
      ;;
    --seed=* | seed=*)
      seed="${1#*=}"
      need_number "${1%%=*}" "$seed"
      shift
      ;;
    --steps=* | steps=*)
      need_number "${1%%=*}" "${1#*=}"
      overrides+=("steps=${1#*=}")
      shift
      ;;
    --out=* | run_dir=*)
      out="${1#*=}"
      [[ -n "$out" ]] || fail_usage "${1%%=*} needs the name of a folder"
      shift
      ;;
    --resume-from=*)
      need_number "${1%%=*}" "${1#*=}"
      options+=(--resume "$1")
      shift
      ;;
    --resume | --accept-changes | --dry-run)
      options+=("$1")
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    -*) fail_usage "unknown option $1" ;;
    *=*)
      overrides+=("$1")
      shift
      ;;
    *) fail_usage "unexpected argument '$1' (an override has the form section.key=value)" ;;
  esac
done

wants() { [[ " ${options[*]-} " == *" $1 "* ]]; }

if wants --resume && [[ -z "$out" ]]; then fail_usage "--resume needs --out DIR, the folder of the run to go on with"; fi
if wants --resume && [[ ! -f "$out/config.yaml" ]]; then
  fail_usage "--resume: $out holds no run (no config.yaml); leave --resume out to start one there"
fi
if ! wants --resume && ! wants --dry-run && [[ -n "$out" && -e "$out/metrics.jsonl" ]]; then
  fail_usage "--out $out holds an earlier run; add --resume to go on with it, or name another folder"
fi

mrl_setup cpu

out="${out:-$MRL_ROOT/runs/quickstart-seed-${seed:-1}-$(date +%Y%m%d-%H%M%S)}"
[[ "$out" == /* ]] || out="$PWD/$out"
if wants --resume; then
  # The run's own configuration, so that its seed, its steps and what was changed by hand hold on.
  config="$out/config.yaml"
else
  config="$MRL_ROOT/configs/quickstart.yaml"
  inputs="$out/inputs"
  if wants --dry-run; then # a plan needs a model to measure, but DIR stays as it is
    inputs="$(mktemp -d)"
    trap 'rm -rf "$inputs"' EXIT
  fi
  seed="${seed:-1}"
  printf '%s\n' "[quickstart] making the model, its tokenizer and the prompts for seed $seed in $inputs" >&2
  "$MRL_VENV/bin/python" "$MRL_ROOT/tools/make_quickstart.py" --out "$inputs" --seed "$seed" >&2
  overrides=("vars.inputs=$inputs" ${overrides[@]+"${overrides[@]}"})
fi
if ! wants --dry-run; then
  printf '%s\n' "[quickstart] training; everything goes to $out" >&2
fi
"$MRL_VENV/bin/megatron-rl" train "$config" "run_dir=$out" ${seed:+"seed=$seed"} \
  ${overrides[@]+"${overrides[@]}"} ${options[@]+"${options[@]}"}
