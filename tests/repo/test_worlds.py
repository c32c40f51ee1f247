"""What counts as a failure in the world of GPU tests, where a machine rented for them must have run them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import triton_versions
from triton_versions import needs_triton


@pytest.fixture
def judged(request, monkeypatch):
    """Return a function that tells what the GPU world makes of a skip."""
    plugins = request.config.pluginmanager.get_plugins()
    path = str(Path(__file__).parents[1] / "conftest.py")
    (conftest,) = (plugin for plugin in plugins if getattr(plugin, "__file__", None) == path)
    monkeypatch.setattr(conftest, "IN_GPU_WORLD", True)

    def outcome(reason):
        report = SimpleNamespace(outcome="skipped", skipped=True, longrepr=("file", 1, f"Skipped: {reason}"))
        conftest._refuse_skip(report)
        return report.outcome

    return outcome


@pytest.mark.parametrize(
    ("version", "outcome"), [("3.6.0", "skipped"), ("3.9.0", "failed"), ("3.10.1", "failed")]
)
def test_a_skip_for_an_older_triton_is_no_failure_where_triton_is_older(
    judged, monkeypatch, version, outcome
):
    monkeypatch.setattr(triton_versions, "installed", lambda: version)
    mark = needs_triton("3.9", "no multicast before").mark
    assert mark.args == (outcome == "skipped",)
    assert judged(mark.kwargs["reason"]) == outcome


@pytest.mark.parametrize("reason", ["no NVSHMEM here", "Triton before 3.9 has no multicast", "needs Triton"])
def test_every_other_skip_is_a_failure(judged, monkeypatch, reason):
    monkeypatch.setattr(triton_versions, "installed", lambda: "3.6.0")
    assert judged(reason) == "failed"
