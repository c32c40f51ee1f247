"""What an examination of this machine means: what works, what does not, and the next step.

`judge` is a pure function of the facts, so it can be tested for machines that are not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import settings
from ..formatting import Table, columns, counted
from .facts import CACHE, GPU_BACKENDS, LOGS, Examination
from .helpers import STARTUP, first_problem

SCHEMA_VERSION = 2  # of the JSON form
SLOW_EXCHANGE_MS = 5.0
OLDEST_TRITON = (3, 6)
OPTIONAL = ("nvshmem4py", "libnvshmem", "cuda-bindings", "cuda-core")
VARIABLE_OF = {CACHE: settings.CACHE_DIR, LOGS: settings.LOG_DIR}
PACKAGES_STEP = "pip install 'dist-autotune[nvidia]'"
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
        yield Finding("ok", check, f"on {gpus} ({', '.join(sorted({gpu['name'] for gpu in seen.gpus}))})")
    elif seen.gpus:
        yield Finding("remark", check, f"{interpreter} (there are {gpus})", "Unset TRITON_INTERPRET")
    elif seen.is_interpreted:
        yield Finding("ok", check, interpreter)
    else:
        step = "Set TRITON_INTERPRET=1 before Python starts; ./launch.sh does so"
        yield Finding("remark", check, f"{interpreter}; it is off now", step)
    devices = seen.gpu.facts.get("devices")
    if seen.gpu.problem:
        step = (
            "Run `nvidia-smi` and `python -c 'import torch; torch.cuda.init()'`; see `dmesg` for the driver"
        )
        yield Finding("problem", "GPUs", seen.gpu.ending, step)
    elif devices is not None and not seen.gpus and devices["device_files"]:
        level, step = "problem", "Compare the CUDA versions of the driver (`nvidia-smi`) and of torch"
        if "CUDA_VISIBLE_DEVICES" in seen.variables:
            level, step = "remark", "CUDA_VISIBLE_DEVICES hides them; unset it"
        elif seen.versions["CUDA"] is None and not torch.version.hip:
            level, step = "remark", "This torch is a CPU build; install one for CUDA"
        text = f"{counted(devices['device_files'], 'device')} in /dev, none for torch: {devices['why_none']}"
        yield Finding(level, "GPUs", text, step)
    without = [f"{link['from']} to {link['to']}" for link in seen.links() if not link["peer_access"]]
    if without:
        step = "The workloads need it; `nvidia-smi topo -p2p r` says why"
        yield Finding("remark", "peer access", f"not from GPU {', '.join(without)}", step)


def _judge_versions(seen: Examination) -> Iterator[Finding]:
    triton_version, numpy_version = (_numbers(str(seen.versions[name])) for name in ("triton", "numpy"))
    if triton_version < OLDEST_TRITON:
        text = f"{seen.versions['triton']}; {'.'.join(map(str, OLDEST_TRITON))} is the oldest that works"
        yield Finding("problem", "triton", text, "pip install --upgrade triton")
    if seen.world == "interpreter" and triton_version == (3, 6) and numpy_version >= (2, 4):
        text = f"Triton 3.6's interpreter fails with numpy {seen.versions['numpy']}"
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
    why_not = seen.of_ranks("directories")
    for name, path in seen.directories.items():
        reason = why_not.get(name)
        if reason == "":
            yield Finding("ok", name, f"{path} can be written")
        elif reason is not None:  # None: not looked at, and the finding on the ranks says why
            step = f"Set {VARIABLE_OF[name]} to a directory that you can write, or repair this one"
            yield Finding("problem", name, f"{path}: {reason}", step)


def _judge_ranks(seen: Examination) -> Iterator[Finding]:
    check, exchange, failed = "two CPU ranks", seen.of_ranks("exchange"), first_problem(seen.ranks)
    if failed is not None and (failed.stage != "shm" or not exchange):
        step = RANKS_STEPS.get(failed.stage, RANKS_STEPS[STARTUP])
        yield Finding("problem", check, failed.ending, step)
    elif exchange["median_ms"] <= SLOW_EXCHANGE_MS:
        yield Finding("ok", check, f"agree in {exchange['median_ms']:.2f} ms")
    else:
        step = "Every run of a session pays this: see what else is running, and give each rank a core"
        yield Finding("remark", check, f"agree in {exchange['median_ms']:.2f} ms", step)


def _judge_memory(seen: Examination) -> Iterator[Finding]:
    absent = seen.of_ranks("shm").get("absent")
    if absent:
        text = f"the workloads cannot be imported here: {absent}"
        step = "pip install -e . in the project's checkout; the tuner alone needs nothing of them"
        yield Finding("remark", "symmetric memory", text, step)
        return
    backends, failed = seen.backends(), first_problem(seen.ranks)
    if failed is None:
        yield Finding("ok", "shm", backends["shm"][1])
    elif failed.stage == "shm":
        yield Finding("problem", "shm", failed.ending, RANKS_STEPS["shm"])
    if not seen.memory:
        return
    chosen = seen.memory["auto"][0].facts.get("memory")
    if chosen is not None:
        yield Finding("ok", "symmetric memory", f"auto takes {chosen['backend']}: {chosen['reason']}")
    level = "remark" if any(backends[name][0] for name in GPU_BACKENDS) else "problem"
    for name, (works, text) in backends.items():
        step = PACKAGES_STEP if name == "nvshmem" else "pip install 'cuda-bindings>=13.0.3,<14'"
        if works and name in GPU_BACKENDS:
            yield Finding("ok", name, text)
        elif not works and name != "shm":
            yield Finding(level, name, text, f"{step}, or see what it says above")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def as_dict(seen: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the JSON-representable form of everything."""
    why_not = seen.of_ranks("directories")
    directories = seen.directories.items()
    return {
        "schema": SCHEMA_VERSION,
        "ok": is_healthy(findings),
        "world": seen.world,
        "versions": seen.versions,
        "variables": seen.variables,
        "directories": {name: {"path": path, "problem": why_not.get(name)} for name, path in directories},
        "gpus": seen.gpus,
        "links": seen.links(),
        "exchange_ms": seen.of_ranks("exchange").get("median_ms"),
        "symmetric_memory": {
            name: {"works": works, "seen": text} for name, (works, text) in seen.backends().items()
        },
        "findings": [asdict(finding) for finding in findings],
    }


def tables(seen: Examination, findings: Sequence[Finding]) -> Iterator[Table]:
    """Yield what there is, then what it means."""
    versions = tuple((name, text or "none") for name, text in seen.versions.items())
    yield Table("Versions", columns("what", "version"), versions)
    if seen.variables:
        yield Table("Variables", columns("variable", "value"), tuple(sorted(seen.variables.items())))
    if seen.gpus:
        names = columns(">GPU", "name", "capability", ">SMs", ">memory GiB")
        rows = tuple(
            (str(g["index"]), g["name"], g["capability"], str(g["sms"]), f"{g['memory_bytes'] / 2**30:.1f}")
            for g in seen.gpus
        )
        yield Table("GPUs", names, rows)
    backends = tuple((name, "yes" if each[0] else "no", each[1]) for name, each in seen.backends().items())
    yield Table("Symmetric memory", columns("backend", "works", "seen"), backends)
    checks = tuple((finding.level, finding.check, finding.seen) for finding in findings)
    yield Table("Findings", columns("", "what", "seen"), checks)


def next_steps(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each problem, then for each remark, and one that sums up."""
    counts = []
    for level in ("problem", "remark"):
        of_level = [finding for finding in findings if finding.level == level]
        yield from (f"{level}: {finding.check}: {finding.next_step}." for finding in of_level)
        counts += [counted(len(of_level), level)] if of_level else []
    summary = "Everything needed works" if is_healthy(findings) else "Something needed is broken"
    yield f"{summary} ({', '.join(counts)})." if counts else f"{summary}."
