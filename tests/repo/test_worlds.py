"""What counts as a failure in the world of GPU tests, where a machine rented for them must have run them."""

from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(("in_gpu_world", "outcome"), [(True, "failed"), (False, "skipped")])
def test_a_skip_is_a_failure_in_the_gpu_world_alone(request, monkeypatch, in_gpu_world, outcome):
    plugins = request.config.pluginmanager.get_plugins()
    path = str(Path(__file__).parents[1] / "conftest.py")
    (conftest,) = (plugin for plugin in plugins if getattr(plugin, "__file__", None) == path)
    monkeypatch.setattr(conftest, "IN_GPU_WORLD", in_gpu_world)
    report = SimpleNamespace(outcome="skipped", skipped=True, longrepr=("file", 1, "Skipped: no NVSHMEM"))
    conftest._refuse_skip(report)
    assert report.outcome == outcome
