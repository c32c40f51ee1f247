"""What is measured, and how: a file for each workload, which `./launch.sh -m benchmarks.NAME` runs.

operations/        parts of the operations' benchmarks: harness, peers, host time
fresh_sessions/    parts of `regret`: how much slower the picks of fresh sessions are than the best there is
tuner/             what the tuner costs, what its clock is worth, tables of kernels
simulation/        searches and sessions on made-up times, without kernels and ranks
common/            what they share: ranks, arms and their times, records, pages and pictures

`readme.sh` measures every figure of the README.
"""
