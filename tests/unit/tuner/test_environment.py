"""The environment: what its variables decide, behind arguments; what cannot be used is an error."""

import pwd

import pytest

from dist_autotune import CacheWarning, TuningError, contextual_autotune, settings
from dist_autotune.options import Options
from dist_autotune.settings import KNOWN_VARIABLES, run_mode


def thunk() -> str:
    return "result"


@pytest.mark.parametrize("name", ["DIST_AUTOTUNE_CACHE", "DIST_AUTOTUNE_mode", "DIST_AUTOTUNE_"])
def test_an_unknown_variable_is_a_warning_with_the_nearest_name(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match=f"Nothing reads {name}.*: docs/environment.md lists all") as caught:
        contextual_autotune(thunk)
    assert ("(did you mean DIST_AUTOTUNE_CACHE_DIR?)" in str(caught[0].message)) is name.endswith("CACHE")
    assert caught[0].filename == __file__  # the caller's, not a line of the package


def test_an_unknown_mode_is_an_error(monkeypatch):
    decorated = contextual_autotune(thunk)
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "fast")
    with pytest.raises(
        TuningError, match="DIST_AUTOTUNE_MODE='fast': expected one of tune, cached, strict, off"
    ):
        decorated()


def test_arguments_at_their_defaults_win_over_variables_too(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "logs-from-variable"))
    monkeypatch.setenv("DIST_AUTOTUNE_TIMEOUT_S", "7")
    for seconds in (300, 300.0):
        given = contextual_autotune(thunk, log_dir=".autotune_logs", timeout_s=seconds).options
        assert given.log_dir == tmp_path / ".autotune_logs"
        assert given.timeout_s == 300


def test_an_empty_variable_counts_as_unset(monkeypatch):
    ours = (*KNOWN_VARIABLES, "DIST_AUTOTUNE_TYPO", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def settings_now():
        settings.check_variables()
        waits = settings.timeout_s(), settings.compile_timeout_s()
        places = settings.process_rank(), settings.place_on_host(1, 2)
        directories = Options().cache, Options().log_dir
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
    with pytest.warns(
        CacheWarning, match="no home directory. Set HOME, or DIST_AUTOTUNE_CACHE_DIR"
    ) as caught:
        tuned = bench.tuned({16: 3.0, 32: 1.0}, log_dir=None)
    tuned()
    assert len(caught) == 1
    assert [context.status for context in tuned.report.contexts] == ["tuned"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("DIST_AUTOTUNE_TIMEOUT_S", ["soon", "-1", "0", "nan"]),
        ("DIST_AUTOTUNE_COMPILE_TIMEOUT_S", ["soon", "-1", "inf", "nan"]),
        ("DIST_AUTOTUNE_COMPILE_JOBS", ["many", "0", "-1", "1.5"]),
        ("DIST_AUTOTUNE_OVERHEAD", ["much", "0", "-0.1", "nan", "15"]),
        ("DIST_AUTOTUNE_BITS", ["equal"]),
    ],
)
def test_a_value_of_a_variable_that_cannot_be_used_is_an_error_of_the_decorator(monkeypatch, name, values):
    for value in values:
        monkeypatch.setenv(name, value)
        with pytest.raises(TuningError, match=f"{name}="):
            contextual_autotune(thunk)


@pytest.mark.parametrize("given", [True, False], ids=["by an option", "by a variable"])
def test_directories_are_resolved_when_the_function_is_decorated(tmp_path, monkeypatch, bench, given):
    if not given:
        monkeypatch.setenv("DIST_AUTOTUNE_CACHE_DIR", "winners")
    decorated = bench.tuned({16: 3.0, 32: 1.0}, cache="winners" if given else True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    decorated()
    assert (tmp_path / ".autotune_logs" / "rank-0.log").exists()
    assert list((tmp_path / "winners").glob("add-*.json"))
    assert list(elsewhere.iterdir()) == []


def test_variables_that_a_program_sets_behind_its_imports_count_and_the_logs_stay(
    tmp_path, monkeypatch, bench
):
    decorated, given = (bench.tuned({16: 3.0, 32: 1.0}, **more) for more in ({}, {"cache": "given"}))
    monkeypatch.setenv("DIST_AUTOTUNE_CACHE_DIR", str(tmp_path / "later"))
    monkeypatch.setenv("DIST_AUTOTUNE_TIMEOUT_S", "7")
    monkeypatch.setenv("DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "later-logs"))
    decorated(), given()
    assert list((tmp_path / "later").glob("add-*.json"))
    assert list((tmp_path / "given").glob("add-*.json"))
    assert (decorated.options.timeout_s, decorated.options.log_dir) == (7, tmp_path / ".autotune_logs")
    assert not (tmp_path / "later-logs").exists()
