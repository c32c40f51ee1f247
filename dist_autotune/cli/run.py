"""The command `run`: a program, unchanged, tuned while it trains."""

from __future__ import annotations

import contextlib
import inspect
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import settings
from ..options import Options
from ..script.boundaries import NamedCalls, OptimizerSteps
from ..script.program import Program
from ..script.tuned_program import TunedProgram
from . import terminal

# Options of `contextual_autotune` that a program can be given; their types and their checks are `Options`'.
OPTIONS = {
    "is_dist": "All ranks of the default process group agree on each config; default: yes.",
    "n_repeat": "Measured steps per config. Giving it, or --n-warmup, selects the exhaustive search.",
    "n_warmup": "Unmeasured steps before them.",
    "search": "exhaustive, racing or auto.",
    "objective": "kernel: judge a config by its launches; thunk: by the time of the whole step.",
    "statistic": "Over the samples of one rank: median, mean or min.",
    "rank_reduce": "Over ranks: max or mean.",
    "agree": "Contexts of ranks belong together by key, or as the n-th of a kernel: ordinal.",
    "share": "--no-share: results belong to this program alone.",
    "name": "Of the program in logs, reports and cache; default: its file or module.",
    "watch": "With several ranks, vote after each settled step whether some rank met a new key.",
    "cache": "Directory of the results; 'off': none.",
    "log_dir": "Directory of the logs; 'off': none.",
    "timeout_s": "Seconds that a rank waits for its peers.",
    "on_stuck": "abort: end the process when a peer is stuck in a step.",
    "max_runs": "Steps of a session at most.",
    "budget_s": "Seconds after which the best so far stays.",
    "progress": "A bar on rank 0; default: when stderr is a terminal.",
}
OFF: dict[str, Any] = {"cache": False, "log_dir": None}


def prepare(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the program finds in sys.argv.")] = None,
    is_module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module.")] = False,
    step: Annotated[
        str | None,
        typer.Option(
            help="A run ends when module:function or module:Class.method returns, not an optimizer step."
        ),
    ] = None,
    **given: Any,
) -> None:
    """Run a program unchanged and tune its kernels while it trains, one trial per optimizer step.

    Works under torchrun: torchrun --nproc-per-node 8 -m dist_autotune run train.py. Options of this command
    stand before SCRIPT. With DIST_AUTOTUNE_MODE=off the program runs as without it.
    """
    settings.check_variables()
    if not is_module and not os.path.exists(target):
        terminal.fail(f"There is no file {target}. To run a module: dist-autotune run -m {target}")
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in OFF.keys() & chosen.keys():
        chosen[name] = OFF[name] if chosen[name] == "off" else Path(chosen[name])
    options = Options(**{"is_dist": True, **chosen, "mode": "online"})
    boundary = OptimizerSteps() if step is None else NamedCalls(step)
    program = Program(target, tuple(arguments or ()), is_module)
    ctx.obj.append(lambda: execute(program, options, boundary))


def execute(program: Program, options: Options, boundary: Any) -> None:
    """Run the program; then show on rank 0, on stderr, what was found. What it raises is the caller's."""
    if settings.run_mode() == "off":
        program.run()
        return
    tuned = TunedProgram(program, options, boundary)
    try:
        tuned.run()
    finally:
        if settings.process_rank() == 0:
            with contextlib.suppress(OSError, ValueError):  # the program may have closed stderr
                terminal.print_ending(program.name, tuned.report, tuned.remark)


def _typed(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, which takes any, a parameter for each of OPTIONS."""
    hints = typing.get_type_hints(Options)
    parameters = [
        each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "given"
    ]
    for name, text in OPTIONS.items():
        kinds = typing.get_args(hints[name]) or (hints[name],)
        kind = str if str in kinds else next(each for each in (bool, int, float) if each in kinds)
        annotation = Annotated[kind | None, typer.Option(help=text)]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


_typed(prepare)
