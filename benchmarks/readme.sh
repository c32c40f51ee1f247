#!/usr/bin/env bash
# Measure every figure of README.md on the GPUs of this machine, one part after the other, in nine minutes.
#
#   benchmarks/readme.sh [--out DIR] [--nproc N] [--limit-s 540] [--list] [PART...]
#
# Parts, in this order when none is named; those behind "2 ranks" are left out on one GPU:
#   check        the doctor's trials
#   gemm         persistent GEMM against cuBLAS, at M = N = 8192
#   ragged       the same of ragged and skinny shapes
#   gemm_fp8     the same in fp8, against torch._scaled_mm
#   add          elementwise add against torch.add
# 2 ranks:
#   ag_gemm gemm_rs ag_moe moe_rs      public shapes, against cuBLAS, NCCL + cuBLAS and torch's fused operation
#   ep           experts on different ranks, against all-to-all and all-gather
#   rows         allgather-GEMM and GEMM-reduce-scatter with 16 to 2048 rows
#   overlap      a step with a GEMM beside an all-reduce
#   tp           pairs of tensor-parallel layers, and a training step, forward and backward
#   agreement    on how many keys the picks of stock Triton differ; the cost of one exchange
#   regret       picks of fresh sessions of allgather-GEMM, against the best fixed alternative
#
# Every benchmark checks its results before it times them. A part has a time limit, at which it ends with all its
# processes; one that no longer fits into --limit-s does not begin. The last line names both, for the next
# start: `readme.sh regret`. Nothing is timed after a failed check. DIR (default readme_records) gets the output
# of each part, its record and the page made of it. Exit code: 0; 1 if a part failed; 3 if parts remain.
# --list prints the parts that run here. Without GPUs, --nproc N runs tiny shapes on N CPU ranks.

set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly one_rank=(check gemm ragged gemm_fp8 add)
readonly two_ranks=(ag_gemm gemm_rs ag_moe moe_rs ep rows overlap tp agreement regret)
declare -rA part_limit_s=(
  [check]=80 [gemm]=200 [ragged]=400 [gemm_fp8]=200 [add]=60
  [ag_gemm]=240 [gemm_rs]=180 [ag_moe]=110 [moe_rs]=110 [ep]=150 [rows]=300 [overlap]=240 [tp]=480 [agreement]=90 [regret]=420
)

die() { echo "readme.sh: $*" >&2; exit 2; }
gpus() { nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU'; }

parse() {
  local each
  out=$root/readme_records parts=() nproc=$(gpus) limit_s=540 lists=""
  while (($#)); do
    case $1 in
      --out) out=${2:?readme.sh: --out needs a directory} && shift ;;
      --nproc) nproc=${2:?readme.sh: --nproc needs a number of ranks} && shift ;;
      --limit-s) limit_s=${2:?readme.sh: --limit-s needs seconds} && shift ;;
      --list) lists=yes ;;
      -h | --help) sed -n '2,/^$/{s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit ;;
      *)
        [[ -n ${part_limit_s[$1]:-} ]] ||
          die "no part or option $1; there are --out, --nproc, --limit-s, --list, ${one_rank[*]} ${two_ranks[*]}"
        parts+=("$1")
        ;;
    esac
    shift
  done
  ((nproc >= 1)) || die "here is no GPU; --nproc N runs tiny shapes on CPU ranks"
  for each in "${parts[@]}"; do
    [[ $nproc -ge 2 || " ${one_rank[*]} " == *" $each "* ]] || die "$each needs 2 ranks, here is $nproc GPU"
  done
  if ((!${#parts[@]})); then
    parts=("${one_rank[@]}")
    ((nproc < 2)) || parts+=("${two_ranks[@]}")
  fi
  public=() table=() ragged=() published=() rows=()
  if (($(gpus))); then
    public=(--shapes public) table=(--shapes table) ragged=(--shapes ragged) published=(--shapes published)
    rows=(--m 16 32 64 128 256 512 1024 2048)
  fi
}

launch() { ./launch.sh --nproc "$nproc" "$@"; }

# Run the module $1 of benchmarks/ with the other arguments; its record is $name.json, the page lies beside it.
record() {
  launch -m "benchmarks.$1" "${@:2}" --json "$out/$name.json" &&
    python3 -m benchmarks.common.render "$out/$name.json" --directory "$out/$name"
}

# The same on one rank.
record_alone() { nproc=1 record "$@"; }

part_check() { python3 -m dist_autotune doctor; }
part_gemm() { record_alone persistent_gemm "${table[@]}"; }
part_ragged() { record_alone persistent_gemm "${ragged[@]}"; }
part_gemm_fp8() { record_alone persistent_gemm "${table[@]}" --dtype fp8; }
part_add() { record_alone operations.elementwise_add; }
part_overlap() { record overlap "${published[@]}"; }
part_ag_gemm() { record ag_gemm "${public[@]}"; }
part_gemm_rs() { record gemm_rs "${public[@]}"; }
part_ag_moe() { record ag_moe "${public[@]}"; }
part_moe_rs() { record moe_rs "${public[@]}"; }
part_ep() { record ep "${public[@]}"; }
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
  if [[ -n $lists ]]; then
    printf '%s\n' "${parts[@]}"
    return
  fi
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
