"""What an examination of this machine means: what works, what does not, and the next step.

`judge` is a pure function of the facts, so it can be tested for machines that are not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from .. import settings
from ..formatting import counted
from .facts import CACHE, GPU_BACKENDS, LOGS, Examination
from .helper_process import STARTUP, first_problem

SCHEMA_VERSION = 1  # of the JSON form
SLOW_EXCHANGE_MS = 5.0
OLDEST_TRITON = (3, 6)
OPTIONAL = ("nvshmem4py", "libnvshmem", "cuda-bindings", "cuda-core")
VARIABLE_OF = {CACHE: settings.CACHE_DIR, LOGS: settings.LOG_DIR}

PACKAGES_STEP = "pip install 'dist-autotune[nvidia]'"
TCP_STEP = "Two processes of this host cannot talk over TCP: look for a firewall on localhost"
NEXT_STEPS = {  # by the stage at which the two CPU ranks failed
    STARTUP: "Run `python -c 'import dist_autotune'` and repair what it says",
    "directories": f"Set {settings.CACHE_DIR} and {settings.LOG_DIR} to directories on a local disk",
    "gloo": "Set GLOO_SOCKET_IFNAME=lo, or add this host's name to /etc/hosts",
    "exchange": TCP_STEP,
    "vote": TCP_STEP,
    "shm": "Give /dev/shm space (docker: --shm-size=1g or --ipc=host) and run all ranks in one container",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. Only a problem makes the exit code 1."""

    level: Literal["ok", "remark", "problem"]
    check: str
    seen: str
    next_step: str = ""


def judge(seen: Examination) -> list[Finding]:
    """Return a finding for each thing that was looked at, in the order of the report."""
    return [
        *_judge_gpus(seen),
        *_judge_versions(seen),
        *_judge_settings(seen),
        *_judge_ranks(seen),
        *_judge_memory(seen),
    ]


def is_healthy(findings: list[Finding]) -> bool:
    """Return whether all that is needed works."""
    return all(finding.level != "problem" for finding in findings)


def as_dict(seen: Examination, findings: list[Finding]) -> dict[str, Any]:
    """Return the JSON-representable form of everything."""
    why_not = seen.of_ranks("directories")
    return {
        "schema": SCHEMA_VERSION,
        "ok": is_healthy(findings),
        "world": seen.world,
        "versions": seen.versions,
        "variables": seen.variables,
        "directories": {
            name: {"path": path, "problem": why_not.get(name)} for name, path in seen.directories.items()
        },
        "gpus": seen.gpus,
        "links": seen.links(),
        "exchange_ms": seen.of_ranks("exchange").get("median_ms"),
        "vote_ms": seen.of_ranks("vote").get("median_ms"),
        "symmetric_memory": {
            name: {"works": works, "seen": text} for name, (works, text) in seen.backends().items()
        },
        "findings": [asdict(finding) for finding in findings],
    }


def _judge_gpus(seen: Examination) -> Iterator[Finding]:
    yield _world(seen)
    devices = seen.gpu.facts.get("devices")
    if seen.gpu.problem:
        step = (
            "Run `nvidia-smi` and `python -c 'import torch; torch.cuda.init()'`; see `dmesg` for the driver"
        )
        yield Finding(level="problem", check="GPUs", seen=seen.gpu.ending, next_step=step)
    elif devices is not None and not seen.gpus and devices["device_files"]:
        yield _unused_gpus(seen, devices)
    without = [f"{link['from']} to {link['to']}" for link in seen.links() if not link["peer_access"]]
    if without:
        text = f"not from GPU {', '.join(without)}"
        step = "The workloads need it; `nvidia-smi topo -p2p r` tells why"
        yield Finding(level="remark", check="peer access", seen=text, next_step=step)


def _world(seen: Examination) -> Finding:
    check = "kernels run"
    if seen.world == "gpu":
        names = ", ".join(sorted({gpu["name"] for gpu in seen.gpus}))
        return Finding(level="ok", check=check, seen=f"on {counted(len(seen.gpus), 'GPU')} ({names})")
    text = "on the CPU, in Triton's interpreter: it shows behaviour, not speed"
    if seen.gpus:
        text += f" (there are {counted(len(seen.gpus), 'GPU')})"
        return Finding(level="remark", check=check, seen=text, next_step="Unset TRITON_INTERPRET")
    if seen.is_interpreted:
        return Finding(level="ok", check=check, seen=text)
    step = "Set TRITON_INTERPRET=1 before Python starts; ./launch.sh does so"
    return Finding(level="remark", check=check, seen=f"{text}; it is off now", next_step=step)


def _unused_gpus(seen: Examination, devices: dict[str, Any]) -> Finding:
    level: Literal["remark", "problem"] = "remark"
    if "CUDA_VISIBLE_DEVICES" in seen.variables:
        step = "CUDA_VISIBLE_DEVICES hides them; unset it"
    elif seen.versions["CUDA"] is None and not torch.version.hip:
        step = "This torch is a CPU build; install one for CUDA"
    else:
        level = "problem"
        step = "Compare the driver's CUDA version (`nvidia-smi`) with torch's; install the older torch"
    text = f"{counted(devices['device_files'], 'device')} in /dev, none for torch: {devices['why_none']}"
    return Finding(level=level, check="GPUs", seen=text, next_step=step)


def _judge_versions(seen: Examination) -> Iterator[Finding]:
    triton_version, numpy_version = (_numbers(str(seen.versions[name])) for name in ("triton", "numpy"))
    if triton_version < OLDEST_TRITON:
        text = f"{seen.versions['triton']}; {'.'.join(map(str, OLDEST_TRITON))} is the oldest that works"
        yield Finding(level="problem", check="triton", seen=text, next_step="pip install --upgrade triton")
    if seen.world == "interpreter" and triton_version == (3, 6) and numpy_version >= (2, 4):
        text = f"Triton 3.6's interpreter fails with numpy {seen.versions['numpy']}"
        yield Finding(level="problem", check="numpy", seen=text, next_step="pip install 'numpy<2.4'")
    missing = [name for name in OPTIONAL if seen.versions[name] is None]
    if missing and seen.gpus and seen.versions["CUDA"]:
        text = f"not installed: {', '.join(missing)}"
        yield Finding(level="remark", check="optional packages", seen=text, next_step=PACKAGES_STEP)


def _judge_settings(seen: Examination) -> Iterator[Finding]:
    if seen.setting_error:
        step = "Correct or unset it; docs/environment.md lists every name"
        yield Finding(level="problem", check="variables", seen=seen.setting_error, next_step=step)
    elif seen.variables.get(settings.MODE, "tune") != "tune":
        text = f"{settings.MODE}={seen.variables[settings.MODE]}: nothing is tuned"
        yield Finding(
            level="remark", check="variables", seen=text, next_step="Unset it where tuning is wanted"
        )
    why_not = seen.of_ranks("directories")
    for name, path in seen.directories.items():
        reason = why_not.get(name)
        if reason == "":
            yield Finding(level="ok", check=name, seen=f"{path} can be written")
        elif reason is not None:  # None: not looked at, and the finding on the ranks says why
            step = f"Set {VARIABLE_OF[name]} to a directory that you can write, or repair this one"
            yield Finding(level="problem", check=name, seen=f"{path}: {reason}", next_step=step)


def _judge_ranks(seen: Examination) -> Iterator[Finding]:
    check = "two CPU ranks"
    exchange, vote = seen.of_ranks("exchange"), seen.of_ranks("vote")
    failed = first_problem(seen.ranks)
    if failed is not None and (failed.stage != "shm" or not vote):
        step = NEXT_STEPS.get(failed.stage, NEXT_STEPS[STARTUP])
        yield Finding(level="problem", check=check, seen=failed.ending, next_step=step)
        return
    text = f"agree in {exchange['median_ms']:.2f} ms; the vote of a settled call: {vote['median_ms']:.2f} ms"
    if exchange["median_ms"] <= SLOW_EXCHANGE_MS:
        yield Finding(level="ok", check=check, seen=text)
    else:
        step = "Every run of a session pays this: see what else is running, and give each rank a core"
        yield Finding(level="remark", check=check, seen=text, next_step=step)


def _judge_memory(seen: Examination) -> Iterator[Finding]:
    check = "symmetric memory"
    absent = seen.of_ranks("shm").get("absent")
    if absent:
        text = f"the workloads cannot be imported here: {absent}"
        step = "pip install -e . in the project's checkout; the tuner alone needs nothing of them"
        yield Finding(level="remark", check=check, seen=text, next_step=step)
        return
    backends = seen.backends()
    failed = first_problem(seen.ranks)
    if failed is not None and failed.stage == "shm":
        yield Finding(level="problem", check="shm", seen=failed.ending, next_step=NEXT_STEPS["shm"])
    elif failed is None:
        yield Finding(level="ok", check="shm", seen=backends["shm"][1])
    if not seen.memory:
        return
    works = [name for name in GPU_BACKENDS if backends[name][0]]
    chosen = seen.memory["auto"][0].facts.get("memory")
    if chosen is not None:
        yield Finding(level="ok", check=check, seen=f"auto takes {chosen['backend']}: {chosen['reason']}")
    for name, (worked, text) in backends.items():
        if worked and name in GPU_BACKENDS:
            yield Finding(level="ok", check=name, seen=text)
        elif not worked and name != "shm":
            step = PACKAGES_STEP if name == "nvshmem" else "pip install 'cuda-bindings>=13.0.3,<14'"
            level: Literal["remark", "problem"] = "remark" if works else "problem"
            yield Finding(level=level, check=name, seen=text, next_step=f"{step}, or see what it says above")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
