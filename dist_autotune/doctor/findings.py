"""What an examination of this machine means: what works, what does not, and the next step.

`judge` is a pure function of the facts, so it can be tested for machines that are not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import settings
from ..formatting import Table, counted
from .examination import CACHE, LOGS, Examination
from .helpers import STARTUP, first_problem

SCHEMA_VERSION = 3  # of the JSON form
OLDEST_TRITON = (3, 6)
OPTIONAL = ("nvshmem4py", "libnvshmem", "cuda-bindings", "cuda-core")
VARIABLE_OF = {CACHE: settings.CACHE_DIR, LOGS: settings.LOG_DIR}
PACKAGES_STEP = "pip install 'dist-autotune[nvidia]'"
MEMORY_STEP = f"{PACKAGES_STEP} and 'cuda-bindings>=13.0.3,<14', or see the lines above"
DRIVER_STEP = "Run `nvidia-smi` and `python -c 'import torch; torch.cuda.init()'`; see `dmesg` for the driver"
RANKS_STEPS = {  # by the stage at which the two CPU ranks failed
    STARTUP: "Run `python -c 'import dist_autotune'` and repair what it says",
    "directories": f"Set {settings.CACHE_DIR} and {settings.LOG_DIR} to directories on a local disk",
    "gloo": "Set GLOO_SOCKET_IFNAME=lo, or add this host's name to /etc/hosts",
    "exchange": "Two processes of this host cannot talk over TCP: look for a firewall on localhost",
    "shm": "Give /dev/shm space (docker: --shm-size=1g or --ipc=host) and run all ranks in one container",
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
    parts = (_judge_gpus, _judge_versions, _judge_settings, _judge_ranks, _judge_memory)
    return [finding for part in parts for finding in part(seen)]


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return whether all that is needed works."""
    return all(finding.level != "problem" for finding in findings)


def _judge_gpus(seen: Examination) -> Iterator[Finding]:
    gpus, check = counted(len(seen.gpus), "GPU"), "kernels run"
    interpreter = "on the CPU, in Triton's interpreter: it shows behaviour, not speed"
    if seen.world == "gpu":
        yield Finding("ok", check, f"on {gpus} ({', '.join(sorted(set(seen.gpus)))})")
    elif seen.gpus:
        yield Finding("remark", check, f"{interpreter} (there are {gpus})", "Unset TRITON_INTERPRET")
    elif seen.is_interpreted:
        yield Finding("ok", check, interpreter)
    else:
        step = "Set TRITON_INTERPRET=1 before Python starts; ./launch.sh does so"
        yield Finding("remark", check, f"{interpreter}; it is off now", step)
    devices = seen.gpu.of("devices")
    if seen.gpu.problem:
        yield Finding("problem", "GPUs", seen.gpu.ending, DRIVER_STEP)
    elif not seen.gpus and devices.get("device_files"):
        level, step = "problem", "Compare the CUDA versions of the driver (`nvidia-smi`) and of torch"
        if "CUDA_VISIBLE_DEVICES" in seen.variables:
            level, step = "remark", "CUDA_VISIBLE_DEVICES hides them; unset it"
        elif not (seen.versions["CUDA"] or seen.versions.get("ROCm")):
            level, step = "remark", "This torch is a CPU build; install one for CUDA"
        text = f"{counted(devices['device_files'], 'device')} in /dev, none for torch: {devices['why_none']}"
        yield Finding(level, "GPUs", text, step)
    if without := [f"{link['from']} to {link['to']}" for link in seen.links if not link["peer_access"]]:
        step = "The workloads need it; `nvidia-smi topo -p2p r` says why"
        yield Finding("remark", "peer access", f"not from GPU {', '.join(without)}", step)


def _judge_versions(seen: Examination) -> Iterator[Finding]:
    triton, numpy = seen.versions["triton"], seen.versions["numpy"]
    if _numbers(triton) < OLDEST_TRITON:
        text = f"{triton}; {'.'.join(map(str, OLDEST_TRITON))} is the oldest that works"
        yield Finding("problem", "triton", text, "pip install --upgrade triton")
    if seen.world == "interpreter" and _numbers(triton) == (3, 6) and _numbers(numpy) >= (2, 4):
        text = f"Triton 3.6's interpreter fails with numpy {numpy}"
        yield Finding("problem", "numpy", text, "pip install 'numpy<2.4'")
    missing = [name for name in OPTIONAL if seen.versions[name] is None]
    if missing and seen.gpus and seen.versions["CUDA"]:
        yield Finding("remark", "optional packages", f"not installed: {', '.join(missing)}", PACKAGES_STEP)


def _judge_settings(seen: Examination) -> Iterator[Finding]:
    mode = seen.variables.get(settings.MODE, "tune")
    if seen.setting_error:
        step = "Correct or unset it; docs/environment.md lists every name"
        yield Finding("problem", "variables", seen.setting_error, step)
    elif mode != "tune":
        text = f"{settings.MODE}={mode}: nothing is tuned"
        yield Finding("remark", "variables", text, "Unset it where tuning is wanted")
    for name, reason in seen.ranks[0].of("directories").items():
        path = seen.directories[name]
        if reason:
            step = f"Set {VARIABLE_OF[name]} to a directory that you can write, or repair this one"
            yield Finding("problem", name, f"{path}: {reason}", step)
        else:
            yield Finding("ok", name, f"{path} can be written")


def _judge_ranks(seen: Examination) -> Iterator[Finding]:
    check, median_ms = "two CPU ranks", seen.ranks[0].of("exchange").get("median_ms")
    failed = first_problem(seen.ranks)
    if failed is not None and (failed.stage != "shm" or median_ms is None):
        step = RANKS_STEPS.get(failed.stage, RANKS_STEPS[STARTUP])
        yield Finding("problem", check, failed.ending, step)
    else:
        yield Finding("ok", check, f"agree in {median_ms:.2f} ms")


def _judge_memory(seen: Examination) -> Iterator[Finding]:
    if absent := seen.ranks[0].of("shm").get("absent"):
        text = f"the workloads cannot be imported here: {absent}"
        step = "pip install -e . in the project's checkout; the tuner works without them"
        yield Finding("remark", "symmetric memory", text, step)
        return
    backends, failed = seen.backends(), first_problem(seen.ranks)
    if failed is None:
        yield Finding("ok", "shm", backends["shm"][1])
    elif failed.stage == "shm":
        yield Finding("problem", "shm", failed.ending, RANKS_STEPS["shm"])
    for name, (works, text) in backends.items():
        if not works and name != "shm":
            yield Finding("problem", name, text, MEMORY_STEP)
        elif name != "shm":
            reason = seen.memory[0].of("memory")["reason"]
            yield Finding("ok", "symmetric memory", f"auto takes {name}: {reason}; {text}")


def _numbers(version: str | None) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in (version or "").split(".")[:2] if part.isdecimal())


def as_dict(seen: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the JSON-representable form of everything."""
    why_not = seen.ranks[0].of("directories")
    directories, backends = seen.directories.items(), seen.backends().items()
    return {
        "schema": SCHEMA_VERSION,
        "ok": is_healthy(findings),
        "world": seen.world,
        "versions": seen.versions,
        "variables": seen.variables,
        "directories": {name: {"path": path, "problem": why_not.get(name)} for name, path in directories},
        "gpus": seen.gpus,
        "links": seen.links,
        "exchange_ms": seen.ranks[0].of("exchange").get("median_ms"),
        "symmetric_memory": {name: {"works": works, "seen": text} for name, (works, text) in backends},
        "findings": [asdict(finding) for finding in findings],
    }


def tables(seen: Examination, findings: Sequence[Finding]) -> Iterator[Table]:
    """Yield what there is, then what it means."""
    versions = tuple((name, text or "none") for name, text in seen.versions.items())
    yield Table("Versions", ("what", "version"), versions)
    if seen.variables:
        yield Table("Variables", ("variable", "value"), tuple(sorted(seen.variables.items())))
    checks = tuple((finding.level, finding.check, finding.seen) for finding in findings)
    yield Table("Findings", ("", "what", "seen"), checks)


def next_steps(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each problem, then for each remark, and one that sums up."""
    counts = []
    for level in ("problem", "remark"):
        of_level = [finding for finding in findings if finding.level == level]
        yield from (f"{level}: {finding.check}: {finding.next_step}." for finding in of_level)
        counts += [counted(len(of_level), level)] if of_level else []
    summary = "Everything needed works" if is_healthy(findings) else "Something needed is broken"
    yield f"{summary} ({', '.join(counts)})." if counts else f"{summary}."
