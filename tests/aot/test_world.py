"""That the AOT world has a compiler at all."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.aot


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(x_ptr + offs, 2 * tl.load(x_ptr + offs, mask=mask), mask=mask)


@pytest.mark.parametrize("capability", [90, 100], ids=["hopper", "blackwell"])
def test_a_kernel_compiles_to_machine_code_without_a_gpu(capability):
    signature = {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(double, signature, constexprs={"BLOCK": 128})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
