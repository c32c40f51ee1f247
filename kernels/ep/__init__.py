"""Expert parallelism on one host: tokens travel to the ranks of their experts, and results back."""

from .functions import combine, dispatch, dispatch_matmul, matmul, matmul_combine
from .launches import Dispatched
from .layer import ExpertParallelMoE
from .operation import ExpertParallel

__all__ = [
    "Dispatched",
    "ExpertParallel",
    "ExpertParallelMoE",
    "combine",
    "dispatch",
    "dispatch_matmul",
    "matmul",
    "matmul_combine",
]
