"""The command `run`: a program, unchanged, tuned while it trains."""

from __future__ import annotations

import contextlib
import inspect
import os
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .. import settings
from ..options import OF_FUNCTIONS, Options, help_texts
from ..script.boundaries import NamedCalls, OptimizerSteps
from ..script.program import Program
from ..script.tuned_program import TunedProgram
from . import terminal

# Options of `contextual_autotune` that a program can be given; their types and their checks are `Options`'.
OPTIONS = {name: text for name, text in help_texts().items() if name not in OF_FUNCTIONS}
OFF: dict[str, Any] = {"cache": False, "log_dir": None}


def prepare(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the program finds in sys.argv.")] = None,
    is_module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module.")] = False,
    step: Annotated[
        str | None,
        typer.Option(
            help="What ends a run: module:function or module:Class.method. Default: an optimizer's step."
        ),
    ] = None,
    **given: Any,
) -> None:
    """Run a program unchanged and tune its kernels while it trains, one trial per optimizer step.

    Works under torchrun: torchrun --nproc-per-node 8 -m dist_autotune run train.py. Options of this command
    stand before SCRIPT. With DIST_AUTOTUNE_MODE=off the program runs as without it.
    """
    settings.check_variables()
    if not is_module and not os.path.isfile(target):
        advice = "" if target.endswith(".py") else f" To run a module: dist-autotune run -m {target}"
        terminal.fail(f"There is no file {target}.{advice}")
    chosen = {name: value for name, value in given.items() if value is not None}
    chosen |= {name: off for name, off in OFF.items() if chosen.get(name) == "off"}
    options = Options(**{"is_dist": True, **chosen, "mode": "online"})
    if settings.run_mode() == "tune":
        options.check_bits(has_function=False)
    boundary = OptimizerSteps() if step is None else NamedCalls(step)
    program = Program(target, tuple(arguments or ()), is_module)
    ctx.obj.append(lambda: execute(program, options, boundary))


def execute(program: Program, options: Options, boundary: Any) -> None:
    """Run the program; then report on rank 0's stderr. Exceptions of the program pass to the caller."""
    if settings.run_mode() == "off":
        program.run()
        return
    tuned, pid = TunedProgram(program, options, boundary), os.getpid()
    try:
        tuned.run()
    finally:
        if tuned.rank == 0 and os.getpid() == pid:  # a forked child may come here too
            with contextlib.suppress(OSError, ValueError):  # the program may have closed stderr
                terminal.print_ending(tuned.findings, tuned.remark)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` a parameter for each of OPTIONS in place of `given`."""
    parameters = [
        each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "given"
    ]
    hints = typing.get_type_hints(Options)
    for name, text in OPTIONS.items():
        option = typer.Option(help=text[0].upper() + text[1:])
        annotation: Any = Annotated[_kind(hints[name]) | None, option]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _kind(hint: Any) -> type:
    """Return the type of an option: the first of these that its field allows."""
    kinds = typing.get_args(hint) or (hint,)
    return next(kind for kind in (str, bool, int, float) if kind in kinds)


_with_options(prepare)
