"""The kinds of calls of an `ExpertParallel`."""

DISPATCH, COMBINE = "dispatch", "combine"  # the exchanges that kinds of calls are
DISPATCH_MATMUL, MATMUL_COMBINE, BACKWARD = "dispatch_matmul", "matmul_combine", "combine_backward"
# The arguments of calls that have no backward.
ARGUMENTS = {
    DISPATCH: ("x", "topk_ids", "fp8"),
    COMBINE: ("rows", "d", "topk_weights", "out"),
    DISPATCH_MATMUL: ("x", "weight", "topk_ids"),
    MATMUL_COMBINE: ("rows", "weight", "d", "topk_weights", "out"),
}
