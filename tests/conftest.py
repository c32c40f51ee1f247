"""Three worlds of tests, each a pytest session of its own, because Triton reads TRITON_INTERPRET once.

world         command                              what runs
interpreter   pytest                               everything but the two below, on the CPU
aot           pytest tests/aot                     kernels compiled for GPUs that need not be there
gpu           DIST_AUTOTUNE_TEST_GPU=1 pytest      tests marked `gpu`, on real devices, many at once; a skip
                                                   is a failure

`./launch.sh test` runs the first two, `./launch.sh test --gpu` the third (tests/helpers/gpu_session.py).
"""

from __future__ import annotations

import os
import sys

IN_GPU_WORLD = os.environ.get("DIST_AUTOTUNE_TEST_GPU") == "1"

for name in [name for name in os.environ if name.startswith("DIST_AUTOTUNE_")]:
    if name != "DIST_AUTOTUNE_TEST_GPU":
        del os.environ[name]  # the developer's own settings are not what is tested
if IN_GPU_WORLD:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # `is_available` does not start CUDA: it is forked
else:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; tests/aot takes it out again
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU in sight the package would rightly use it
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # no thread pools: their threads do not survive the fork of a rank

import contextlib
import functools
import gc
import importlib.metadata
import itertools
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kernels_for_tests import Bench

AOT = Path(__file__).parent / "aot"

with contextlib.suppress(ImportError):
    import hypothesis

    # No deadline: a busy two-core machine is no property of the code. Derandomised: the same run everywhere.
    profile = {"deadline": None, "derandomize": True, "database": None, "max_examples": 40}
    hypothesis.settings.register_profile("suite", **profile)
    hypothesis.settings.load_profile("suite")


def world(config: pytest.Config) -> str:
    """Return which of the three worlds this session is."""
    if IN_GPU_WORLD:
        return "gpu"
    paths = [Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args]
    inside = [path == AOT or AOT in path.parents for path in paths]
    if any(inside) and not all(inside):
        raise pytest.UsageError(
            "tests/aot compiles for real and cannot share a process with the interpreter's tests"
        )
    return "aot" if all(inside) else "interpreter"


def pytest_addoption(parser: pytest.Parser) -> None:
    import gpu_session

    gpu_session.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not IN_GPU_WORLD:
        return
    import gpu_cases
    import gpu_session
    import torch  # not at the top: the other worlds' first import of it belongs to their tests

    devices = torch.cuda.device_count()
    if devices == 0:
        raise pytest.UsageError("DIST_AUTOTUNE_TEST_GPU=1, but torch finds no CUDA device")
    gpu_cases.ALL_CANDIDATES = config.option.all_candidates
    config.option.continue_on_collection_errors = True  # what can be run, is
    config.pluginmanager.register(gpu_session.GpuSession(config, devices), "gpu_session")


def pytest_report_header(config: pytest.Config) -> list[str]:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton", "numpy")
    )
    lines = [f"world: {world(config)}; {versions}"]
    if not IN_GPU_WORLD:
        there = any(Path("/dev").glob("nvidia[0-9]*"))
        why = "`./launch.sh test --gpu` runs them" if there else "no CUDA device"
        lines.append(f"GPU tests: skipped, {why}")
    return lines


# ---- what is collected


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if IN_GPU_WORLD and collection_path.suffix == ".py":
        # A rented machine may lack what the other files import, and it costs by the minute.
        return "gpu" not in collection_path.read_text().lower() or None
    return True if collection_path == AOT and world(config) != "aot" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not IN_GPU_WORLD:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; runs in the GPU world only"))
        return
    from gpu_session import devices_needed

    devices = config.pluginmanager.get_plugin("gpu_session").devices
    kept = [item for item in items if 0 < devices_needed(item) <= devices]
    too_large = sum(devices_needed(item) > devices for item in items)
    if too_large:
        sys.stderr.write(f"GPU tests: {too_large} left out, they need more than {devices} CUDA devices\n")
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if not IN_GPU_WORLD and nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # modules leave objects, and a session looks through all that are not frozen


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # what was imported stays: collections, of which tests make many, take a fifth of the time
    session.config.add_cleanup(gc.unfreeze)
    if world(session.config) == "interpreter" and "triton" in sys.modules:
        import checked_memory
        import quick_interpreter

        quick_interpreter.install()
        checked_memory.install()
    if not IN_GPU_WORLD and "torch" in sys.modules:
        # The first backward counts GPUs and starts a thread for each. A fake tensor makes torch's CUDA build
        # count eight; counted after one, autograd would then refuse every forked rank.
        sys.modules["torch"].ones((), requires_grad=True).backward()

        import huge_pages

        huge_pages.collapse()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    from frame_room import with_room

    function = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(with_room, function)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function


# ---- in the GPU world a skip is a failure: a machine rented for the tests must have run them


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    if IN_GPU_WORLD and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in the GPU world: {report.longrepr}"
    return report


pytest_make_collect_report = pytest_runtest_makereport


# ---- nothing is left in the tree, no test meets another's files


def pytest_sessionstart(session: pytest.Session) -> None:
    # Before collection: a thunk at the top of a test module resolves its log directory when it is decorated.
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        return  # pytest-xdist starts its workers from here: they read the same relative paths
    directory = tempfile.TemporaryDirectory(prefix="dist-autotune-tests-")
    session.config.add_cleanup(directory.cleanup)
    session.config.add_cleanup(functools.partial(os.chdir, Path.cwd()))
    os.chdir(directory.name)


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Iterator[None]:
    """Fail the test that leaves Triton's Autotuner, or the candidates of a kernel, changed for later ones."""
    run, candidates = _autotuner_run(), _candidates()
    yield
    after = _autotuner_run()
    is_as_it_was = run is None or after is run or getattr(after, "is_dispatcher", False)
    assert is_as_it_was, f"Autotuner.run is {after!r} after the test, {run!r} before it"
    interception = sys.modules.get("dist_autotune.triton_api.interception")
    assert interception is None or not interception.INTERCEPTION.calls, (
        "a call of a tuned function has no end"
    )
    changed = []
    for name, kernel, configs in candidates:
        if kernel.configs is not configs:
            kernel.configs = configs  # or all later tests fail too
            changed.append(name)
    assert not changed, f"the test leaves other candidates to {', '.join(changed)}"


def _autotuner_run() -> object:
    module = sys.modules.get("triton.runtime.autotuner")
    return module and module.Autotuner.run


def _candidates() -> list[tuple[str, Any, list[Any]]]:
    """Return name, autotuner and candidates of each kernel of the package that is imported."""
    return [(name, kernel, kernel.configs) for name, kernel in _kernels(len(sys.modules))]


@functools.lru_cache(maxsize=1)
def _kernels(modules: int) -> list[tuple[str, Any]]:
    """Return name and autotuner of each; looked up again where more `modules` are imported."""
    if (module := sys.modules.get("triton.runtime.autotuner")) is None:
        return []
    found = {}
    for name in [name for name in sys.modules if name.startswith("dist_autotune.kernels.")]:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, module.Autotuner):
                found[id(value)] = f"{name}.{attribute}", value
    return list(found.values())


@pytest.fixture(autouse=True)
def tmp_cache(nothing_stays_patched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return this test's own cache directory; relative paths, logs among them, end in its tmp_path too."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("DIST_AUTOTUNE_CACHE_DIR", str(cache))
    monkeypatch.chdir(tmp_path)
    return cache


# ---- what the tests of several files are given


@pytest.fixture
def bench() -> Bench:
    """Return kernels whose launches are noted, and the clock that reads their scripted times."""
    from kernels_for_tests import Bench  # not at the top: it imports Triton, and the world decides how

    return Bench()


@pytest.fixture
def kernel(bench: Bench) -> Any:
    """Return an autotuned kernel of two configs, the second of which is faster."""
    return bench.kernel({16: 3.0, 32: 1.0})


@pytest.fixture
def import_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Return what imports a text as the module `kernels_of_a_user`, each time anew."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    versions = itertools.count()

    def load(text: str) -> ModuleType:
        directory = tmp_path / f"version{next(versions)}"
        directory.mkdir()
        (directory / "kernels_of_a_user.py").write_text(text)
        monkeypatch.syspath_prepend(str(directory))
        sys.modules.pop("kernels_of_a_user", None)
        return importlib.import_module("kernels_of_a_user")

    yield load
    sys.modules.pop("kernels_of_a_user", None)


@pytest.fixture
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread that acts for a busy rank act often; peers wait for it three times as long."""
    from rank_programs import SHORT_S

    from dist_autotune.ranks import exchange

    monkeypatch.setattr(exchange, "HEARTBEAT_S", SHORT_S / 3)


@pytest.fixture
def one_core() -> Iterator[None]:
    """Keep this thread and those that it starts on one core: threads that take turns wake each other sooner.

    The core is where this thread wakes up from a short sleep, an idle one if there is any: another session
    of tests may keep another one busy.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    time.sleep(1e-3)
    behind_name = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()
    os.sched_setaffinity(0, {int(behind_name[36])})  # `processor` of proc(5)
    yield
    os.sched_setaffinity(0, allowed)
