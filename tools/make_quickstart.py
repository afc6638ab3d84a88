#!/usr/bin/env python3
"""Command line of `megatron_rl.data.quickstart`: writes a tiny model and its prompts; takes about a second."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Also without installation: the quickstart calls this before anything else works.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rl.data.quickstart import Quickstart, write_quickstart
from megatron_rl.data.records import DataError


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="fixes the weights and the prompts")
    parser.add_argument("--task", choices=["sort", "countdown"], default="sort")
    parser.add_argument("--digits", type=int, default=4, help="digits of a prompt of the task sort")
    parser.add_argument("--prompts", type=int, default=4096, help="training prompts")
    parser.add_argument("--eval-prompts", type=int, default=512, help="held-out prompts")
    parser.add_argument("--sft-prompts", type=int, default=4096, help="warm-up examples")
    parser.add_argument("--style", choices=["compact", "english"], default="compact", help="wording of countdown")
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer, 0 = a model without")
    parser.add_argument("--no-model", action="store_true", help="write the prompt files only")
    return parser.parse_args()


def main() -> int:
    """Write the directory; 0, or 1 with one line of explanation."""
    arguments = vars(_arguments())
    out, no_model = arguments.pop("out"), arguments.pop("no_model")
    try:
        write_quickstart(out, Quickstart(**arguments, model=not no_model))
    except (DataError, OSError) as error:
        print(f"make_quickstart: {error}", file=sys.stderr)
        return 1
    print(f"{out}: wrote {'' if no_model else 'model, '}train.jsonl, eval.jsonl, sft.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
