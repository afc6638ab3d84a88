"""Which SGLang lies in an environment, and whether it is one that we were tested with. Nothing is started here."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

TESTED_VERSIONS = ("0.5.23",)
"""What tests/contract ran against; launch/install_sglang.sh installs the last."""
CHECKOUT = Path(__file__).resolve().parents[2]
INSTALL = "launch/install_sglang.sh"
TIMEOUT_S = 60.0

# Read from the package's metadata: importing SGLang takes ten seconds.
_QUESTION = """
import importlib.metadata as m, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps([version("sglang"), version("torch")]))
"""


class SglangError(ValueError):
    """SGLang cannot be started as asked; the message says what to do."""


@dataclass(frozen=True)
class Installed:
    """What an environment holds. `torch` carries the label of its build, as 2.13.0+cpu."""

    sglang: str
    torch: str

    @property
    def for_cpu(self) -> bool:
        """Whether it is the installation for machines without a GPU."""
        return self.torch.endswith("+cpu")


def find_python(configured: str | None) -> str:
    """The interpreter that `engine.python` names; by default that of .venv-sglang in the checkout."""
    return str(CHECKOUT / ".venv-sglang" / "bin" / "python" if configured is None else Path(configured).absolute())


def inspect(python: str) -> Installed:
    """Ask the interpreter. Raises SglangError when there is none, or no SGLang in its environment."""
    if not Path(python).is_file():
        what = "a directory, not an interpreter" if Path(python).is_dir() else "no such file"
        raise SglangError(
            f"engine.python={python}: {what}; {INSTALL} installs SGLang, or name the interpreter of an "
            "environment that has it"
        )
    try:
        answer = subprocess.run(
            [python, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        sglang, torch = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SglangError(f"engine.python={python}: is not a working Python interpreter ({error})") from error
    if sglang is None or torch is None:
        missing = "SGLang" if sglang is None else "torch"
        raise SglangError(f"engine.python={python}: there is no {missing} in its environment; {INSTALL} installs both")
    return Installed(sglang, torch)


def require_tested(python: str, untested: bool) -> Installed:
    """What `python` has; `untested`: whether it may be another version than those tested. Raises SglangError."""
    installed = inspect(python)
    if installed.sglang not in TESTED_VERSIONS and not untested:
        raise SglangError(
            f"{python} has SGLang {installed.sglang}; tested is {', '.join(TESTED_VERSIONS)}. Run {INSTALL}, "
            "or set engine.untested_version: true to try it"
        )
    return installed
