"""What is measured, and how. Run from the root: `./launch.sh -m benchmarks.ROOM.NAME`, or `python -m ...`.

operations/    each operation of kernels/, against the libraries that do the same
models/        layers and training steps: kernels beside each other and beside collectives
regret/        how much slower the picks of fresh sessions are than the best there is
tuner/         what the tuner costs, what its clock is worth, what it does to programs of others
simulation/    searches and sessions on made-up times, without kernels and ranks
common/        what they share: ranks, arms and their times, records

`render` makes a page of a record, `plot` its picture, `many_gpus.sh` runs what needs more than two GPUs.
"""
