#!/usr/bin/env bash
# Measure what needs more than two GPUs, one part after the other; ends by itself in nine minutes.
#
#   benchmarks/many_gpus.sh [--out DIR] [--nproc N] [--limit-s 540] [PART...]
#
# Parts, in this order when none is named:
#   check        the doctor's trials, and random calls of allgather-GEMM against float32
#   ag_gemm gemm_rs ag_moe moe_rs      public shapes, against cuBLAS, NCCL + cuBLAS and torch's fused operation
#   rows         allgather-GEMM and GEMM-reduce-scatter with 16 to 2048 rows
#   step         a training step of many kernels beside all-reduces
#   tp           pairs of tensor-parallel layers, and a training step, forward and backward
#   agreement    on how many keys the picks of stock Triton differ; the cost of one exchange
#   regret       picks of fresh sessions of allgather-GEMM, against the best fixed alternative
#   soak         random calls for five minutes, half of them with each backend, closing included
#
# Every benchmark checks its results before it times them. A part has a time limit, at which it ends with all its
# processes; one that no longer fits into --limit-s does not begin. The last line names both, for the next
# start: `many_gpus.sh regret`. Nothing is timed after a failed check. DIR (default many_gpus) gets the output of
# each part, its record and the page made of it. Exit code: 0; 1 if a part failed; 3 if parts remain.
# Without GPUs, --nproc N runs tiny shapes on N CPU ranks.

set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly all_parts=(check ag_gemm gemm_rs ag_moe moe_rs rows step tp agreement regret soak)
declare -rA part_limit_s=(
  [check]=80 [ag_gemm]=240 [gemm_rs]=180 [ag_moe]=110 [moe_rs]=110 [rows]=300 [step]=60 [tp]=480
  [agreement]=90 [regret]=420 [soak]=400
)

die() { echo "many_gpus.sh: $*" >&2; exit 2; }
gpus() { nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU'; }

parse() {
  out=$root/many_gpus parts=() nproc=$(gpus) limit_s=540
  while (($#)); do
    case $1 in
      --out) out=${2:?many_gpus.sh: --out needs a directory} && shift ;;
      --nproc) nproc=${2:?many_gpus.sh: --nproc needs a number of ranks} && shift ;;
      --limit-s) limit_s=${2:?many_gpus.sh: --limit-s needs seconds} && shift ;;
      -h | --help) sed -n '2,/^$/{s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit ;;
      *)
        [[ -n ${part_limit_s[$1]:-} ]] || die "no part or option $1; there are --out, --nproc, --limit-s, ${all_parts[*]}"
        parts+=("$1")
        ;;
    esac
    shift
  done
  ((${#parts[@]})) || parts=("${all_parts[@]}")
  ((nproc >= 2)) || die "2 or more ranks are needed, here is $nproc GPU; --nproc N runs tiny shapes on CPU ranks"
  public=() rows=() calls=20 seconds=4 backends=(shm)
  if (($(gpus))); then
    public=(--shapes public) rows=(--m 16 32 64 128 256 512 1024 2048)
    calls=500 seconds=150 backends=(torch nvshmem)
  fi
}

launch() { ./launch.sh --nproc "$nproc" "$@"; }

# Run the module $1 of benchmarks/ with the other arguments; its record is $name.json, the page lies beside it.
record() {
  launch -m "benchmarks.$1" "${@:2}" --json "$out/$name.json" &&
    python3 -m benchmarks.common.render "$out/$name.json" --directory "$out/$name"
}

part_check() { launch tests/helpers/soak_ag_gemm.py --calls "$calls" && python3 -m dist_autotune doctor; }
part_ag_gemm() { record ag_gemm "${public[@]}"; }
part_gemm_rs() { record gemm_rs "${public[@]}"; }
part_ag_moe() { record ag_moe "${public[@]}"; }
part_moe_rs() { record moe_rs "${public[@]}"; }
part_step() { record whole_step; }
part_tp() { name=parallel_layers record parallel_layers && name=training_step record training_step; }
part_rows() {
  name=rows_ag_gemm record ag_gemm "${rows[@]}" ${rows:+--n 3584 --k 8192} &&
    name=rows_gemm_rs record gemm_rs "${rows[@]}" ${rows:+--n 8192 --k 28672}
}
part_agreement() {
  if (($(gpus))); then
    launch -m benchmarks.tuner.disagreement --json "$out/disagreement.json" || return
  fi
  python3 -m benchmarks.tuner.exchange_cost --ranks "$nproc" --json "$out/exchange_cost.json"
}
part_regret() {
  python3 -m benchmarks.regret --op ag_gemm --nproc "$nproc" "${public[@]}" --sessions 10 \
    --sessions-budget-s 280 --warm-ups 60 --iterations 30 --directory "$out/sessions" --json "$out/regret.json"
}
part_soak() {
  local backend
  for backend in "${backends[@]}"; do
    launch tests/helpers/soak_ag_gemm.py --seconds "$seconds" --backend "$backend" || return
  done
}

# Run part $1 as a process group; end what is left of it when its time is over.
run_part() {
  "part_$1" >"$out/$1.log" 2>&1 &
  local part=$! watchdog code
  (sleep "${part_limit_s[$1]}"; kill -- "-$part"; sleep 10; kill -9 -- "-$part") &>/dev/null &
  watchdog=$!
  wait "$part"
  code=$?
  {
    kill -- "-$watchdog"
    kill -9 -- "-$part" # what outlived its parent
    wait "$watchdog"
  } 2>/dev/null
  return "$code"
}

main() {
  local part name failed=() remaining=()
  parse "$@"
  mkdir -p "$out" || die "cannot make the directory $out"
  out=$(realpath "$out")
  cd "$root" || exit 2
  set -m # a job is a process group
  for part in "${parts[@]}"; do
    if ((${#remaining[@]} || SECONDS + part_limit_s[$part] > limit_s)); then
      remaining+=("$part")
      continue
    fi
    name=$part
    echo "== $part, at most ${part_limit_s[$part]} s: $out/$part.log"
    if ! run_part "$part"; then
      failed+=("$part")
      tail -n 5 "$out/$part.log"
      [[ $part != check ]] || die "the check failed; nothing was timed"
    fi
  done
  echo "== failed: ${failed[*]:-none}; to be run: ${remaining[*]:-none}"
  ((!${#failed[@]})) || exit 1
  ((!${#remaining[@]})) || exit 3
}

main "$@"
