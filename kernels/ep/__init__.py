"""Expert parallelism on one host: tokens travel to the ranks of their experts, and results back."""

from .functions import combine, dispatch
from .layer import ExpertParallelMoE
from .operation import Dispatched, ExpertParallel

__all__ = ["Dispatched", "ExpertParallel", "ExpertParallelMoE", "combine", "dispatch"]
