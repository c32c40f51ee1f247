"""What it costs to hash a function's outputs, as each run of a session with bits="same" or "check" does.

    python -m benchmarks.tuner.output_hash [--mib 1 16 256] [--rounds 21]

The hash of a bfloat16 tensor, beside a copy of it, on the GPU if there is one, else on the CPU. Medians over
rounds in which both take turns, after three unmeasured ones; on a GPU by CUDA events. Traps: the first call
compiles the kernel; what the L2 cache holds is read from there, as the outputs of a function would be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common.options import new_parser
from dist_autotune.bits.tensor_hash import hash_tensor

WARM_UPS = 3


def time_ms(action: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        action()
        return (time.perf_counter() - began) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=(1, 16, 256), help="sizes of the tensor")
    parser.add_argument("--rounds", type=int, default=21, help="timed, of each size")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}")
    print("| MiB | hash ms | copy ms | hash GB/s |\n|---|---|---|---|")
    for mib in options.mib:
        tensor = torch.randn(mib << 19, device=device).to(torch.bfloat16)
        arms = {"hash": lambda y=tensor: hash_tensor(y), "copy": tensor.clone}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(WARM_UPS + options.rounds):
            for name, action in arms.items():
                times[name].append(time_ms(action))
        hash_ms, copy_ms = (statistics.median(each[WARM_UPS:]) for each in times.values())
        print(f"| {mib} | {hash_ms:.3f} | {copy_ms:.3f} | {(mib << 20) / hash_ms / 1e6:.2f} |")


if __name__ == "__main__":
    main()
