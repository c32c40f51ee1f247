"""Judges an examination of a machine: findings, and the next step for each fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group
from torch.torch_version import TorchVersion

from ..formatting import counted
from ..tables import table
from .examination import STARTUP, Examination

MEMORY_STEP = "pip install 'dist-autotune[nvidia]' 'cuda-bindings>=13.0.3,<14', or see the lines above"
WRITABLE_STEPS = {
    "cache": "Set DIST_AUTOTUNE_CACHE_DIR, or each start tunes again",
    "logs": "Set DIST_AUTOTUNE_LOG_DIR, or nothing is logged",
}
SETTINGS_STEP = "Correct or unset it; docs/environment.md lists every name"
STEPS = {  # by the stage at which a probe failed
    STARTUP: "Run `python -c 'import dist_autotune'` and repair what it says",
    "devices": "See CUDA_VISIBLE_DEVICES, if torch is a CPU build, and if `nvidia-smi` shows as new a CUDA",
    "gloo": "Set GLOO_SOCKET_IFNAME=lo, or add this host's name to /etc/hosts",
    "shm": "Give /dev/shm space (docker: --shm-size=1g or --ipc=host) and run all ranks in one container",
    "gloo and NCCL": MEMORY_STEP,
    "memory": MEMORY_STEP,
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. Only a problem makes the exit code 1."""

    level: str  # "ok" | "remark" | "problem"
    check: str
    seen: str
    next_step: str = ""


def judge(seen: Examination) -> list[Finding]:
    """Return a finding for each thing that was looked at, in the order of the report."""
    return [*_judge_gpus(seen), *_judge_versions(seen), *_judge_settings(seen), *_judge_results(seen)]


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return whether all that is needed works."""
    return all(finding.level != "problem" for finding in findings)


def _judge_gpus(seen: Examination) -> Iterator[Finding]:
    gpus, check = counted(len(seen.gpus), "GPU"), "kernels run"
    if seen.world == "gpu":
        yield Finding("ok", check, f"on {gpus} ({', '.join(sorted(set(seen.gpus)))})")
    else:
        text = f"on the CPU, in Triton's interpreter: it shows behaviour, not speed ({gpus})"
        step = "Unset TRITON_INTERPRET" if seen.gpus else ""
        if not seen.is_interpreted:
            text = "nowhere as things are: no GPU, and TRITON_INTERPRET is not set"
            step = "Set TRITON_INTERPRET=1 before Python starts; ./launch.sh does so"
        yield Finding("remark" if step else "ok", check, text, step)
    if not seen.gpus and (listed := seen.host.facts.get("listed")):
        is_wanted = seen.versions["CUDA"] and "CUDA_VISIBLE_DEVICES" not in seen.variables
        text = f"the driver lists {counted(len(listed), 'GPU')}, torch sees none"
        yield Finding("problem" if is_wanted else "remark", "GPUs", text, STEPS["devices"])


def _judge_versions(seen: Examination) -> Iterator[Finding]:
    triton, numpy = (TorchVersion(seen.versions.get(name) or "0") for name in ("triton", "numpy"))
    if seen.world == "interpreter" and triton < "3.7" and numpy >= "2.4":
        text = f"Triton 3.6's interpreter fails with numpy {numpy}"
        yield Finding("problem", "numpy", text, "pip install 'numpy<2.4'")


def _judge_settings(seen: Examination) -> Iterator[Finding]:
    if seen.setting_error:
        yield Finding("problem", "variables", seen.setting_error, SETTINGS_STEP)
    if seen.unknown_variables:
        yield Finding("remark", "variables", f"nothing reads {seen.unknown_variables}", SETTINGS_STEP)
    for name, why in seen.unwritable.items():
        yield Finding("remark", name, why, WRITABLE_STEPS[name])


def _judge_results(seen: Examination) -> Iterator[Finding]:
    results = {"this host": seen.host, "two CPU ranks": seen.ranks, "symmetric memory": seen.memory}
    for check, result in results.items():
        if result is not None and result.problem:
            yield Finding("problem", check, result.problem, STEPS[result.stage])
        elif result is not None and "memory" in result.facts:
            yield Finding("ok", check, result.facts["memory"])


def tables(seen: Examination, findings: Sequence[Finding]) -> Iterator[Group]:
    """Yield the tables of versions, variables and findings."""
    versions = tuple((name, text or "none") for name, text in seen.versions.items())
    yield table("Versions", ("what", "version"), versions)
    yield table("Variables", ("variable", "value"), tuple(sorted(seen.variables.items())))
    checks = tuple((finding.level, finding.check, finding.seen) for finding in findings)
    yield table("Findings", ("", "what", "seen"), checks)


def next_steps(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each problem, then for each remark, and one that sums up."""
    for finding in sorted(findings, key=lambda finding: finding.level):
        if finding.next_step:
            yield f"{finding.level}: {finding.check}: {finding.next_step}."
    is_all = not any(finding.next_step for finding in findings)
    works = "Everything needed works." if is_all else "All else works."
    yield works if is_healthy(findings) else "Something needed is broken."
