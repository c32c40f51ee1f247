"""Which share of kernels/ tests on GPUs reach: of host code, and of what Triton compiled."""

from __future__ import annotations

import ast

from reached_lines import Reached, device_counts, host_counts, named_lines

SOURCE = '''
def host(x):
    return x

@triton.jit
def kernel(out, N: tl.constexpr):
    """Fill."""
    BLOCK: tl.constexpr = 2 * N
    if N > 1:
        for i in range(N):
            tl.store(out + i, BLOCK)
    else:
        tl.store(out, 0)
        tl.store(out + 1, 0)
    tl.store(out, 1)
'''
NAMED = """#loc3 = loc("/somewhere/kernels/one/kernel.py":10:8)
#loc4 = loc("/somewhere/kernels/one/kernel.py":11:12)
#loc5 = loc("/somewhere/other/kernel.py":13:12)
"""


def test_a_statement_of_the_device_is_reached_if_its_block_goes_on_in_compiled_code(tmp_path):
    (tmp_path / "hash").mkdir()
    (tmp_path / "hash" / "kernel.ttir").write_text(NAMED)
    (tmp_path / "hash" / "kernel.json").write_text('loc("/kernels/one/kernel.py":15:1)')
    named = named_lines(tmp_path)
    assert named == {"one/kernel.py": {10, 11}}
    counted, of_device = device_counts(ast.parse(SOURCE), named["one/kernel.py"])
    assert counted == Reached(device=4, of_device=7, blocks=2, of_blocks=3)  # no `else`, and not the last
    assert of_device == set(range(7, 16))


def test_lines_of_the_device_are_none_of_the_hosts():
    found = {
        "executed_lines": [1, 2, 3],
        "missing_lines": [4, 8],
        "executed_branches": [[2, 3]],
        "missing_branches": [[2, 4], [9, 10]],
    }
    assert host_counts(found, set(range(7, 16))) == Reached(host=3, of_host=4, branches=1, of_branches=2)
