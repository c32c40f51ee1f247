"""Options and environment: what cannot be used is an error with the value given and what is needed."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import pwd
from pathlib import Path

import pytest
import torch
from kernels_for_tests import launch, numbers
from typer.testing import CliRunner

import dist_autotune
from dist_autotune import (
    CacheWarning,
    ContextualAutotuner,
    TuningError,
    WallClock,
    contextual_autotune,
    settings,
)
from dist_autotune.cli import commands
from dist_autotune.doctor import examination
from dist_autotune.options import Options
from dist_autotune.search.strategies import exhaustive
from dist_autotune.settings import KNOWN_VARIABLES, process_rank, run_mode


def thunk() -> str:
    return "result"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "batch"}, "mode='batch': expected one of 'replay', 'online'"),
        ({"search": "random"}, "search='random': expected one of 'auto', 'exhaustive', 'racing'"),
        ({"search": None}, "search=None"),
        ({"objective": "latency"}, "objective='latency'"),
        ({"statistic": "max"}, "statistic='max'"),
        ({"rank_reduce": "min"}, "rank_reduce='min'"),
        ({"agree": "name"}, "agree='name'"),
        ({"on_stuck": "ignore"}, "on_stuck='ignore'"),
        ({"n_repeat": 0}, "n_repeat=0: expected an int of at least 1"),
        ({"n_repeat": 2.5}, "n_repeat=2.5"),
        ({"n_repeat": True}, "n_repeat=True"),
        ({"n_warmup": -1}, "n_warmup=-1: expected an int of at least 0"),
        ({"max_runs": 0}, "max_runs=0"),
        ({"timeout_s": 0}, "timeout_s=0: expected a positive number of seconds"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
        ({"timeout_s": "60"}, "timeout_s='60'"),
        ({"timeout_s": None}, "timeout_s=None"),
        ({"budget_s": -1.0}, "budget_s=-1.0"),
        ({"budget_s": float("nan")}, "budget_s=nan"),
        ({"clock": object()}, r"has no method start\(\)"),
        ({"clock": WallClock}, r"give a clock, not its class: WallClock\(\)"),
        ({"preserve": "weights"}, "preserve='weights': give a sequence"),
        ({"preserve": torch.zeros(2)}, "give a sequence of tensors"),
        ({"preserve": (torch.zeros(2),), "mode": "online"}, "preserve= belongs to mode='replay'"),
        ({"preserve": (3,)}, "preserve= holds a builtins.int"),
        ({"preserve": (torch.zeros(1).expand(3),)}, r"strides \(0,\): elements overlap"),
        ({"cache": 3}, "cache=3"),
        ({"cache": None}, "cache=None"),
        ({"log_dir": 3}, "log_dir=3"),
        ({"name": 3}, "name=3"),
        ({"compile_jobs": 0}, "compile_jobs=0: expected an int of at least 1"),
        ({"filler_ms": -1}, "filler_ms=-1: expected milliseconds, from 0 to 1000"),
        ({"filler_ms": True}, "filler_ms=True"),
        ({"filler_ms": float("nan")}, "filler_ms=nan"),
        ({"progress": "yes"}, "progress='yes'"),
        ({"share": "no"}, "share='no'"),
        ({"watch": 1}, "watch=1"),
        ({"is_dist": "yes"}, "is_dist='yes'"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0][:40] if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_be_used_is_an_error_where_the_function_is_decorated(options, message):
    with pytest.raises(TuningError, match=message) as caught:
        contextual_autotune(thunk, **options)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_option_is_python_s_own_error():
    with pytest.raises(TypeError, match="repeats"):
        contextual_autotune(thunk, repeats=3)


def test_tuning_parameters_after_n_warmup_are_keyword_only():
    parameters = inspect.signature(contextual_autotune).parameters
    by_position = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position == ["fn", "is_dist", "n_repeat", "n_warmup"]


def test_the_signature_is_the_documented_one():
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(contextual_autotune).parameters.items()
    }
    assert defaults == {
        "fn": None, "is_dist": False, "n_repeat": None, "n_warmup": None, "mode": "replay", "search": "auto",
        "objective": "kernel", "statistic": "median", "rank_reduce": "max", "agree": "key", "group": None,
        "share": True, "name": None, "watch": True, "preserve": (), "cache": True,
        "log_dir": ".autotune_logs", "clock": None, "timeout_s": 300, "on_stuck": "raise", "max_runs": None,
        "budget_s": None, "compile_jobs": None, "filler_ms": None, "progress": None, "bits": "any",
        "outputs": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "search"),
    [
        ({}, "racing"),
        ({"n_repeat": 5}, "exhaustive"),
        ({"n_warmup": 0}, "exhaustive"),
        ({"search": "racing", "n_repeat": 5}, "racing"),
        ({"search": "exhaustive"}, "exhaustive"),
    ],
    ids=["neither count", "n_repeat", "n_warmup", "racing", "exhaustive"],
)
def test_auto_is_exhaustive_when_a_count_is_given(options, search):
    assert Options(**options).search_name == search


def test_the_counts_default_to_five_and_three():
    rules = Options().rules()
    assert (rules["n_repeat"], rules["n_warmup"]) == (5, 3)


def test_a_strategy_goes_by_its_name():
    assert Options(search=exhaustive).search_name == "exhaustive"
    assert Options(search=functools.partial(exhaustive)).search_name == "partial"


def test_every_public_name_is_exported_once():
    documented = {
        "contextual_autotune", "ContextualAutotuner", "is_tuning", "TuningReport", "TunedContext", "Clock",
        "EventClock", "WallClock", "tunable", "TuningError", "NoValidConfig", "RankMismatch",
        "AgreementTimeout", "PeerFailed", "NotTuned", "CacheWarning", "StepTuner", "__version__",
    }  # fmt: skip
    assert set(dist_autotune.__all__) == documented
    assert len(dist_autotune.__all__) == len(documented)
    assert all(hasattr(dist_autotune, name) for name in documented)


@pytest.mark.parametrize("error", ["NoValidConfig", "RankMismatch", "AgreementTimeout", "PeerFailed"])
def test_every_error_is_a_tuning_error(error):
    assert issubclass(getattr(dist_autotune, error), TuningError)


# ---- decorating


@pytest.mark.parametrize(
    "decorate",
    [contextual_autotune, contextual_autotune(), lambda fn: contextual_autotune(fn, False, 2, 1)],
    ids=["bare", "called", "with the function"],
)
def test_the_decorator_works_bare_and_called(decorate):
    decorated = decorate(thunk)
    assert isinstance(decorated, ContextualAutotuner)
    assert decorated() == "result"


def test_what_functools_wraps_promises_holds():
    def documented(x: int, *, y: int = 2) -> int:
        """Say what it does."""
        return x + y

    decorated = contextual_autotune(documented)
    assert decorated.__wrapped__ is documented
    assert (decorated.__name__, decorated.__doc__) == ("documented", "Say what it does.")
    assert inspect.signature(decorated) == inspect.signature(documented)
    assert decorated(1, y=5) == 6


class Layer:
    scale = 3

    @contextual_autotune
    def method(self, x):
        return self.scale * x

    @classmethod
    @contextual_autotune
    def of_class(cls, x):
        return cls.scale * x

    @staticmethod
    @contextual_autotune
    def static(x):
        return 3 * x


@pytest.mark.parametrize(
    "call",
    [
        Layer().method,
        lambda x: Layer.method(Layer(), x),
        Layer.of_class,
        Layer().of_class,
        Layer.static,
        contextual_autotune(lambda x: 3 * x),
        contextual_autotune(functools.partial(lambda factor, x: factor * x, 3)),
    ],
    ids=[
        "method",
        "by its class",
        "classmethod",
        "classmethod of an instance",
        "staticmethod",
        "lambda",
        "partial",
    ],
)
def test_methods_lambdas_and_partials_can_be_decorated(call):
    assert call(2) == 6


async def coroutine() -> None: ...


async def async_generator():
    yield 1


class Asynchronous:
    async def __call__(self):
        pass


@contextual_autotune
def by_name(x):
    return 3 * x


def test_a_decorated_function_is_copied_and_pickled_as_functions_are():
    for held in (by_name, contextual_autotune(lambda x: x), Layer.method):
        assert copy.copy(held) is held
        assert copy.deepcopy({"step": held})["step"] is held
    assert pickle.loads(pickle.dumps(by_name)) is by_name
    assert pickle.loads(pickle.dumps(Layer.method)) is Layer.method
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(contextual_autotune(lambda x: x))


def test_a_module_that_holds_a_decorated_function_can_be_copied():
    module = torch.nn.Linear(2, 2)
    module.step = contextual_autotune(functools.partial(lambda factor, x: factor * x, 3))
    assert copy.deepcopy(module).step(2) == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (3, "decorates a function, not 3"),
        (coroutine, "is asynchronous"),
        (async_generator, "is asynchronous"),
        (functools.partial(coroutine), "is asynchronous"),
        (Asynchronous(), "is asynchronous"),
        (classmethod(thunk), "put @classmethod above @contextual_autotune"),
        (staticmethod(thunk), "put @staticmethod above"),
    ],
    ids=[
        "a number",
        "async def",
        "async generator",
        "partial of async",
        "async object",
        "classmethod below",
        "staticmethod below",
    ],
)
def test_what_cannot_be_tuned_is_refused_with_what_to_do(wrong, message):
    with pytest.raises(TuningError, match=message):
        contextual_autotune(wrong)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.options = "its own attribute"
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        """Scale x."""
        return self.scale * x


def test_a_module_can_be_decorated():
    module = Module()
    decorated = contextual_autotune(module)
    assert decorated(2) == 6
    assert decorated(2) == 6
    assert module.options == "its own attribute"


@pytest.mark.parametrize("value", [None, (), (1, "two"), 3.5], ids=["None", "()", "tuple", "float"])
def test_any_result_is_passed_through(value):
    assert contextual_autotune(lambda: value)() is value


def test_any_argument_is_passed_on_whatever_its_name():
    def keywords(**given):
        return given

    assert contextual_autotune(keywords)(self=1, fn=2, mode=3) == {"self": 1, "fn": 2, "mode": 3}


def test_a_generator_is_passed_through_untouched():
    def generator():
        yield 1
        yield 2

    assert list(contextual_autotune(generator)()) == [1, 2]


# ---- the environment


@pytest.mark.parametrize("name", ["DIST_AUTOTUNE_CACHE", "DIST_AUTOTUNE_mode", "DIST_AUTOTUNE_"])
def test_an_unknown_variable_is_an_error_that_lists_the_known_ones(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.raises(TuningError, match=f"unknown environment variable {name}") as caught:
        contextual_autotune(thunk)
    assert all(known in str(caught.value) for known in KNOWN_VARIABLES)


@pytest.mark.parametrize("mode", ["tune", "cached", "strict", "off"])
def test_the_mode_is_read_at_every_call(monkeypatch, mode):
    decorated = contextual_autotune(thunk)
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", mode)
    assert run_mode() == mode
    assert decorated() == "result"


def test_an_unknown_mode_is_an_error(monkeypatch):
    decorated = contextual_autotune(thunk)
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "fast")
    with pytest.raises(
        TuningError, match="DIST_AUTOTUNE_MODE='fast': expected one of tune, cached, strict, off"
    ):
        decorated()


@pytest.mark.parametrize("value", ["", None], ids=["empty", "unset"])
def test_without_a_mode_it_tunes(monkeypatch, value):
    monkeypatch.delenv("DIST_AUTOTUNE_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("DIST_AUTOTUNE_MODE", value)
    assert run_mode() == "tune"


def test_arguments_come_before_variables_and_variables_before_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("DIST_AUTOTUNE_CACHE_DIR", str(tmp_path / "from-variable"))
    monkeypatch.setenv("DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "logs-from-variable"))
    monkeypatch.setenv("DIST_AUTOTUNE_TIMEOUT_S", "7")
    by_default = Options()
    assert by_default.resolved_cache_dir() == tmp_path / "from-variable"
    assert by_default.resolved_log_dir() == tmp_path / "logs-from-variable"
    assert by_default.resolved_timeout_s() == 7
    given = Options(cache=tmp_path / "given", log_dir=tmp_path / "logs", timeout_s=3)
    assert given.resolved_cache_dir() == tmp_path / "given"
    assert given.resolved_log_dir() == tmp_path / "logs"
    assert given.resolved_timeout_s() == 3


def test_a_cache_and_logs_can_be_left_out():
    nothing = Options(cache=False, log_dir=None)
    assert (nothing.resolved_cache_dir(), nothing.resolved_log_dir()) == (None, None)


def test_arguments_at_their_defaults_win_over_variables_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "logs-from-variable"))
    monkeypatch.setenv("DIST_AUTOTUNE_TIMEOUT_S", "7")
    for seconds in (300, 300.0):
        given = contextual_autotune(thunk, log_dir=".autotune_logs", timeout_s=seconds).options
        assert given.resolved_log_dir() == tmp_path / ".autotune_logs"
        assert given.resolved_timeout_s() == 300


def test_an_empty_variable_counts_as_unset(monkeypatch):
    ours = (*KNOWN_VARIABLES, "DIST_AUTOTUNE_TYPO", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def settings_now():
        settings.check_variables()
        waits = settings.timeout_s(), settings.compile_timeout_s()
        places = settings.process_rank(), settings.place_on_host(1, 2)
        directories = Options().resolved_cache_dir(), Options().resolved_log_dir()
        return waits, places, directories, run_mode(), settings.variables()

    for name in ours:
        monkeypatch.delenv(name, raising=False)
    unset = settings_now()
    for name in ours:
        monkeypatch.setenv(name, "")
    assert settings_now() == unset


@pytest.fixture
def no_home(monkeypatch):
    """Run as a user without HOME and without an entry in the password database, as containers may."""

    def nobody(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME", "DIST_AUTOTUNE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


def test_without_a_home_directory_there_is_a_warning_and_no_cache(no_home, tmp_path, bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), log_dir=None)
    with pytest.warns(
        CacheWarning, match="no home directory. Set HOME, or DIST_AUTOTUNE_CACHE_DIR"
    ) as caught:
        tuned()
    tuned()
    assert len(caught) == 1
    assert [context.status for context in tuned.report.contexts] == ["tuned"]
    assert list(tmp_path.iterdir()) == []


def test_without_a_home_directory_the_commands_say_what_to_set(no_home):
    listed = CliRunner().invoke(commands.app, ["cache", "list"])
    assert listed.exit_code == 2
    assert "Set HOME, or DIST_AUTOTUNE_CACHE_DIR" in listed.output
    assert examination.directories_in_force()[1] == settings.NO_HOME


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan"])
def test_a_timeout_that_is_no_time_is_an_error(monkeypatch, value):
    monkeypatch.setenv("DIST_AUTOTUNE_TIMEOUT_S", value)
    with pytest.raises(TuningError, match="DIST_AUTOTUNE_TIMEOUT_S"):
        Options().resolved_timeout_s()


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan"])
def test_a_compile_timeout_that_is_no_time_is_an_error(monkeypatch, value):
    monkeypatch.setenv("DIST_AUTOTUNE_COMPILE_TIMEOUT_S", value)
    with pytest.raises(TuningError, match="DIST_AUTOTUNE_COMPILE_TIMEOUT_S"):
        settings.compile_timeout_s()


@pytest.mark.parametrize(("value", "seconds"), [("7.5", 7.5), ("0", 0.0), (None, 120.0)])
def test_a_compile_timeout_comes_from_its_variable(monkeypatch, value, seconds):
    if value is not None:
        monkeypatch.setenv("DIST_AUTOTUNE_COMPILE_TIMEOUT_S", value)
    assert settings.compile_timeout_s() == seconds


@pytest.mark.parametrize("value", ["many", "0", "-1", "1.5"])
def test_jobs_that_are_no_number_of_processes_are_an_error(monkeypatch, value):
    monkeypatch.setenv("DIST_AUTOTUNE_COMPILE_JOBS", value)
    with pytest.raises(TuningError, match=f"DIST_AUTOTUNE_COMPILE_JOBS='{value}': expected an int"):
        settings.check_variables()


@pytest.mark.parametrize(
    ("argument", "value", "jobs"), [(None, None, None), (None, "", None), (None, "3", 3), (5, "3", 5)]
)
def test_jobs_are_the_argument_or_the_variable_or_as_the_cores_allow(monkeypatch, argument, value, jobs):
    if value is not None:
        monkeypatch.setenv("DIST_AUTOTUNE_COMPILE_JOBS", value)
    assert Options(compile_jobs=argument).resolved_compile_jobs() == jobs


@pytest.mark.parametrize(
    ("local_rank", "local_ranks", "place"),
    [("3", "4", (3, 4)), ("4", "4", (11, 16)), ("one", "4", (11, 16)), (None, None, (11, 16))],
)
def test_the_place_on_the_host_is_torchruns_or_that_in_the_group(monkeypatch, local_rank, local_ranks, place):
    for name, value in (("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_ranks)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert settings.place_on_host(11, 16) == place


def test_the_log_directory_is_resolved_when_the_function_is_decorated(tmp_path, monkeypatch):
    decorated = contextual_autotune(thunk)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    decorated()
    assert (tmp_path / ".autotune_logs" / "rank-0.log").exists()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(("value", "rank"), [("3", 3), ("", 0), ("three", 0), (None, 0)])
def test_the_rank_of_a_process_is_what_torchrun_says(monkeypatch, value, rank):
    monkeypatch.delenv("RANK", raising=False)
    if value is not None:
        monkeypatch.setenv("RANK", value)
    assert process_rank() == rank


def test_the_environment_is_read_in_one_module_only():
    package = Path(dist_autotune.__file__).parent
    readers = [
        path.relative_to(package).as_posix()
        for path in sorted(package.rglob("*.py"))
        if any(reading in path.read_text() for reading in ("os.environ", "getenv"))
    ]
    assert readers == ["settings.py"]
    assert os.environ.get("DIST_AUTOTUNE_MODE") is None
