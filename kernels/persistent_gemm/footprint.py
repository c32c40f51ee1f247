"""What a config of the Gluon body takes of an SM: shared memory and registers."""

from __future__ import annotations

from typing import Any

import triton

from .blocks import rows_of_a_cta

SHARED_BYTES = 227 * 1024  # that a program can have on Hopper
BARRIER_BYTES = 1024  # more than all mbarriers and a ring of tile numbers take
# Of a thread's 255, or of the 128 where 512 threads are compiled; pointers and the epilogue need the rest.
MOST_ACCUMULATOR_REGISTERS, MOST_OF_THREE_TEAMS = 192, 96


def operand_bytes(kwargs: dict[str, Any]) -> int:
    """Return what the ring of operands takes in shared memory; A and B have two bytes an element."""
    a_bytes = kwargs["NUM_BUFFERS"] * rows_of_a_cta(kwargs) * kwargs["BLOCK_K"] * 2
    width = kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
    b_bytes = kwargs["NUM_BUFFERS"] * width * kwargs["BLOCK_K"] * 2
    stolen = kwargs["BLOCK_N"] * kwargs["BLOCK_K"] * 2 if kwargs["STORE_BUFFERS"] == 0 else 0
    return int(a_bytes + b_bytes + stolen)


def shared_bytes(kwargs: dict[str, Any], out_bytes: int, *, tensor_memory: bool) -> int:
    """Return what a config of the Gluon body takes in shared memory, with elements of C of that size."""
    storers = 2 if kwargs["VARIANT"] == "pingpong" and not tensor_memory else 1  # of all rows
    piece = rows_of_a_cta(kwargs) * kwargs["STORE_N"] * out_bytes
    return int(operand_bytes(kwargs) + storers * kwargs["STORE_BUFFERS"] * piece + BARRIER_BYTES)


def deepest_ring(block_m: int, width: int, *, store_bytes: int) -> int:
    """Return of how many k blocks of 64 the ring can be: more loads under way, longer waits for L2 hidden."""
    return (SHARED_BYTES - BARRIER_BYTES - store_bytes) // ((block_m + width) * 64 * 2)


def most_accumulator_registers(kwargs: dict[str, Any]) -> int:
    """Return how many registers of each thread an accumulator may take."""
    return MOST_ACCUMULATOR_REGISTERS if kwargs.get("TEAMS", 1) == 1 else MOST_OF_THREE_TEAMS


def accumulator_registers(config: triton.Config) -> int:
    """Return how many registers of each thread the accumulator takes on Hopper."""
    width = config.kwargs["BLOCK_N"] + config.kwargs["EXTRA_N"]
    rows_of_a_team = rows_of_a_cta(config.kwargs) // config.kwargs.get("TEAMS", 1)
    return int(rows_of_a_team * width // (32 * config.num_warps))
