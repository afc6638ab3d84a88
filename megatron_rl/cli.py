"""The command `megatron-rl`: each verb is a few lines that call a room. No verb computes anything itself."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_rl import __version__, cli_convert
from megatron_rl.config import Config, ConfigError, dump, load_config, make_plan
from megatron_rl.config.engine import read_key

app = typer.Typer(
    help="Reinforcement learning of language models from verified rewards: "
    "servers that speak SGLang's protocol generate, Megatron-Core trains.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(cli_convert.app, name="convert")
MOST = 10**9
"""Of anything that the command line counts: larger numbers overflow where they get to."""
errors = Console(stderr=True, markup=False, soft_wrap=True, highlight=False)

ConfigFile = Annotated[Path, typer.Argument(help="YAML file; see configs/ for examples.", metavar="CONFIG.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides, for example optimizer.lr=1e-6", metavar="[section.key=value]...")
]

ResumeFrom = Annotated[
    int | None,
    typer.Option(
        min=0, max=MOST, help="Go on from the checkpoint of this step; later ones are removed.", metavar="STEP"
    ),
]
AcceptChanges = Annotated[
    bool, typer.Option("--accept-changes", help="Go on although the configuration is not the one that the run had.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatron-rl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself; the verbs are below."""


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest checkpoint in run_dir; begin when there is none yet."),
    ] = False,
    resume_from: ResumeFrom = None,
    accept_changes: AcceptChanges = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the configuration and its inputs, print the plan, start nothing.")
    ] = False,
) -> None:
    """Train: start engines, controller and trainer ranks on this machine and watch them to the end.

    Example: megatron-rl train my.yaml run_dir=runs/first steps=20

    Ctrl-C (or TERM) saves the run and ends it.

    Exit code: 0 complete, 1 a process failed, 2 the configuration cannot run or run_dir holds another run, 75 ended by
    a signal (see --resume).
    """
    from megatron_rl.cluster.local import run_local
    from megatron_rl.cluster.processes import EXIT_RESUMABLE
    from megatron_rl.cluster.resume import Resume
    from megatron_rl.preflight import check_device, check_inputs, check_plan, checkpoint_to_resume

    cfg = load_config(config, overrides or ())
    if dry_run:
        hf, unchecked = check_plan(cfg)
        _print_plan(cfg, make_plan(cfg, hf), unchecked)
        return
    inputs = check_inputs(cfg)
    check_device(cfg)
    goes_on = Resume(lambda: checkpoint_to_resume(cfg, inputs.prompts, resume_from), accept_changes)
    code = run_local(cfg, goes_on if resume or resume_from is not None else None, _say)
    if code == EXIT_RESUMABLE:
        errors.print(f"ended by a signal; the same command with --resume goes on with {cfg.run_dir}")
    raise typer.Exit(code)


@app.command()
def slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of an earlier job in run_dir.")
    ] = False,
    resume_from: ResumeFrom = None,
    accept_changes: AcceptChanges = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print which nodes do what, and the sbatch line; start nothing.")
    ] = False,
    cpus: Annotated[int, typer.Option(min=1, max=MOST, help="With --dry-run outside a job: CPUs of a node.")] = 64,
    gpus: Annotated[int, typer.Option(min=0, max=MOST, help="With --dry-run outside a job: GPUs of a node.")] = 0,
) -> None:
    """Train inside a Slurm allocation; launch/train.sbatch calls this. It starts, watches and restarts all steps.

    Example: megatron-rl slurm --dry-run --gpus 8 --cpus 96 my.yaml

    Exit code: 0 complete, 1 failed too often, 2 the configuration cannot run here, 75 saved by a signal.
    """
    from megatron_rl.cluster.slurm.placement import plan_rows
    from megatron_rl.cluster.slurm.supervisor import Start, run_in_allocation
    from megatron_rl.monitor.logs import setup_logging
    from megatron_rl.preflight import check_inputs, check_plan, checkpoint_to_resume

    cfg = load_config(config, overrides or ())
    if dry_run:
        hf, unchecked = check_plan(cfg)
        _print_plan(cfg, make_plan(cfg, hf) | {"Slurm": plan_rows(cfg, cpus, gpus)}, unchecked)
        return
    inputs = check_inputs(cfg)
    setup_logging("job", 0, cfg.logging.level)
    start = Start(
        lambda: checkpoint_to_resume(cfg, inputs.prompts, None),
        (lambda: checkpoint_to_resume(cfg, inputs.prompts, resume_from)) if resume or resume_from is not None else None,
        accept_changes,
    )
    raise typer.Exit(run_in_allocation(cfg, start))


@app.command()
def rollout(
    config: Annotated[Path, typer.Option(help="Resolved configuration of the run.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 = all, known by this node's name.")] = (
        "127.0.0.1"
    ),
    outlive_term: Annotated[
        bool, typer.Option("--outlive-term", help="End on INT alone: the trainer needs the controller to save.")
    ] = False,
) -> None:
    """Run the rollout controller of one run (started by `train`; on clusters, its own step)."""
    from megatron_rl.rollout.controller import run_controller

    run_controller(load_config(config), host, outlive_term)


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option(help="Serve the engine that this run's configuration describes.")
    ] = None,
    replica: Annotated[int, typer.Option(help="Which of the run's replicas this is.")] = 0,
    model: Annotated[Path | None, typer.Option(help="Hugging Face directory, when no --config is given.")] = None,
    engine: Annotated[
        Literal["embedded", "sglang"], typer.Option(help="With --model: what serves; embedded fills in for SGLang.")
    ] = "embedded",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="With --model: number format of the weights.")
    ] = "auto",
    api_key_file: Annotated[
        Path | None, typer.Option(help="With --model: file with the bearer token that requests must bring.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="With --engine sglang: interpreter of its environment; default .venv-sglang.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 = any free one.")] = 30000,
    supervised: Annotated[
        bool, typer.Option("--supervised/--unsupervised", help="With --config: start the engine again when it dies.")
    ] = True,
    per_node: Annotated[
        int | None, typer.Option(help="As a task of a Slurm step: serve this node's share, so many replicas a node.")
    ] = None,
    logs: Annotated[Path, typer.Option(help="With --per-node: folder of the replicas' logs.")] = Path(),
    place: Annotated[int, typer.Option(help="How many of the run's replicas stand before this one on its node.")] = 0,
    node_rank: Annotated[int, typer.Option(help="Which of the replica's nodes this is.")] = 0,
    staged: Annotated[Path | None, typer.Option(help="Folder with copies of the run's weights, in memory.")] = None,
) -> None:
    """Serve a model over SGLang's HTTP protocol."""
    from megatron_rl.cluster.bootstrap import child_environment
    from megatron_rl.cluster.engine_supervisor import supervise_engine, supervise_node
    from megatron_rl.engines.serve import serve_model, serve_replica
    from megatron_rl.monitor.logs import setup_logging

    if config is not None and supervised:
        cfg = load_config(config)
        setup_logging("supervisor", replica, cfg.logging.level)  # stderr is the engine's log file
        if per_node is not None:
            raise typer.Exit(supervise_node(cfg, config, per_node, host, logs))
        raise typer.Exit(supervise_engine(cfg, config, replica))
    if config is None and model is None:
        raise ConfigError("serve: give --model DIR, or --config of a run")
    environ = child_environment(os.environ)  # a server that finds Slurm's variables takes itself for a rank
    try:
        if config is not None:
            serve_replica(load_config(config), replica, host, port, environ, place, node_rank, staged)
        elif model is not None:
            key = None if api_key_file is None else read_key(api_key_file, "--api-key-file")
            serve_model(engine, model, host, port, dtype, key, python, environ)
    except (ValueError, OSError) as error:
        raise ConfigError(f"serve: {error}") from error


@app.command()
def preflight(
    config: ConfigFile,
    overrides: Overrides = None,
    parity: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Compare engine and trainer on so many prompts.", metavar="PROMPTS"),
    ] = None,
    reload_engine: Annotated[
        bool, typer.Option("--reload-engine", help="A server of engine.urls may be paused and given model.path again.")
    ] = False,
) -> None:
    """Check a configuration and its inputs; with --parity, also that engine and trainer agree on log-probs.

    Example: megatron-rl preflight my.yaml --parity 16

    --parity starts one engine and all trainer ranks on this machine, below run_dir/preflight; nothing is trained. A
    server of engine.urls, which others may be using, only generates and scores, unless --reload-engine is given.

    Exit code: 0 all is well, 1 engine and trainer disagree or a process failed, 2 the configuration cannot run.
    """
    from megatron_rl.parity import check_parity
    from megatron_rl.parity_report import causes, table
    from megatron_rl.preflight import check_device, check_inputs

    cfg = load_config(config, overrides or ())
    inputs = check_inputs(cfg)
    typer.echo(f"inputs: OK, {len(inputs.prompts.train)} prompts ({inputs.prompts.rejected} rejected as too long)")
    if parity is None:
        return
    check_device(cfg)
    typer.echo(f"parity: starting engine and trainer; logs in {cfg.run_dir}/preflight/logs")
    evidence = check_parity(cfg, parity, reload_engine)
    shown = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in table(evidence):
        shown.add_row(*row)
    Console(markup=False, highlight=False).print(shown)
    found = list(causes(evidence))
    for number, cause in enumerate(found):
        typer.echo(f"{'most likely' if number == 0 else 'also'}: {cause.name}: {cause.says}")
    typer.echo("engine and trainer do not agree" if found else "engine and trainer agree")
    raise typer.Exit(1 if found else 0)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")]) -> None:
    """Rebuild RUN/report.html from what the run has written."""
    from megatron_rl.monitor.report import build_report

    typer.echo(build_report(run_dir))


@app.command()
def worst(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")],
    step: Annotated[int | None, typer.Option(min=1, max=MOST, help="Default: the newest one.")] = None,
    count: Annotated[int, typer.Option(min=1, max=MOST, help="How many samples.")] = 10,
) -> None:
    """List the samples of a step on which trainer and engine differ most, by |Δ log p| of a token."""
    from megatron_rl.monitor.worst import COLUMNS, worst_samples

    number, rows = worst_samples(run_dir, step, count)
    shown = Table(*COLUMNS, title=f"step {number}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        shown.add_row(*(f"{v:.3e}" if isinstance(v, float) else str(v) for v in (row[name] for name in COLUMNS)))
    # A line is cut by the terminal, not by us.
    Console(markup=False, highlight=False, soft_wrap=True, width=200).print(shown)


@app.command()
def ledger(run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")]) -> None:
    """Check that every prompt of the run was trained, filtered, rejected or is still pending: none lost, none doubled.

    Ends with 1 when something is wrong.
    """
    from megatron_rl.audit import audit_run

    found = audit_run(run_dir)
    for epoch, counts in enumerate(found.epochs):
        typer.echo(f"epoch {epoch}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    for problem in found.problems:
        typer.echo(problem, err=True)
    typer.echo("something is wrong" if found.problems else "every prompt is accounted for")
    raise typer.Exit(1 if found.problems else 0)


@app.command()
def config(
    file: Annotated[
        Path | None, typer.Argument(help="Print this file resolved and checked.", metavar="CONFIG.yaml")
    ] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of all keys.")] = False,
) -> None:
    """Show the configuration: all keys with their meaning (--schema), or one file as it will be used."""
    if schema:
        typer.echo(json.dumps(Config.model_json_schema(), indent=2))
    elif file is not None:
        typer.echo(dump(load_config(file, overrides or ())), nl=False)
    else:
        raise ConfigError("config: give a CONFIG.yaml, or --schema for all keys")


def _say(line: str) -> None:
    errors.print(Text(line))


def _print_plan(cfg: Config, plan: dict[str, list[tuple[str, str, str]]], unchecked: str) -> None:
    console = Console(markup=False, highlight=False)
    console.print(dump(cfg), soft_wrap=True)
    for heading, rows in plan.items():
        table = Table(title=heading, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))  # as it stands: [tis] is no markup
        console.print(table)
    if unchecked:
        console.print(Text(unchecked, "bold yellow"), soft_wrap=True)
    console.print("dry run: nothing was started")


def main() -> None:
    """Entry point: an expected failure is one message and exit code 1 (2 when nothing was started for it)."""
    from megatron_rl.cluster.local import RunFailed
    from megatron_rl.cluster.run_dir import RunDirError, RunMoved
    from megatron_rl.cluster.slurm.allocation import SlurmError
    from megatron_rl.cluster.started import BootstrapError
    from megatron_rl.engines.server_process import ServerFailed
    from megatron_rl.monitor.report_data import ReportError
    from megatron_rl.policy.checkpoint import CheckpointError
    from megatron_rl.preflight import INPUT_ERRORS
    from megatron_rl.rollout.ledger import LedgerError
    from megatron_rl.weights import WeightsError

    try:
        app()
    except RunMoved as error:
        _fail(error, 1)
    except (ConfigError, RunDirError, *INPUT_ERRORS) as error:
        _fail(error, 2)
    except (
        BootstrapError,
        CheckpointError,
        LedgerError,
        ReportError,
        RunFailed,
        ServerFailed,
        SlurmError,
        WeightsError,
    ) as error:
        _fail(error, 1)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _fail(error, 2)


def _fail(error: Exception, code: int) -> NoReturn:
    errors.print(Text.assemble(("error: ", "bold red"), str(error)))
    sys.exit(code)


if __name__ == "__main__":
    main()
