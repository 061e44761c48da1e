"""Runs a kernel's CUDA text on the host: its threads are fibers, a barrier changes fiber.

`kernel` stands for what `mx.fast.cuda_kernel` returns. An input ends at a page that cannot be read,
so reading past it ends the program.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from gear import decode_kernel_source

COMPILER = shutil.which("g++") or shutil.which("clang++")
_TYPES = {
    mx.float32: "float", mx.float16: "_Float16", mx.uint32: "uint32_t", mx.uint16: "uint16_t",
    mx.uint8: "uint8_t",
}  # fmt: skip

_HOST = """
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
float __expf(float x) { return std::exp(x); }
struct Index { unsigned x, y; } threadIdx, blockIdx;
const unsigned THREADS = @THREADS@;
ucontext_t host, fibers[THREADS];
bool done[THREADS];
char stacks[THREADS][65536];
struct Barrier {
    unsigned arrived = 0, turn = 0;
    void wait(unsigned all) {
        const unsigned mine = threadIdx.x, before = turn;
        if (++arrived == all) { arrived = 0; ++turn; }
        while (turn == before) swapcontext(&fibers[mine], &host);
    }
} all, simds[THREADS / 32 + 1];
void __syncthreads() { all.wait(THREADS); }
void __syncwarp() { simds[threadIdx.x / 32].wait(32); }
unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
template <typename T> T __shfl_sync(unsigned, T x, unsigned lane) {
    static T held[THREADS];
    const unsigned base = threadIdx.x / 32 * 32;
    held[threadIdx.x] = x;
    __syncwarp();
    x = held[base + lane];
    __syncwarp();
    return x;
}
template <typename T> T __shfl_xor_sync(unsigned mask, T x, unsigned flip) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ flip);
}
unsigned half_bits(float x) { _Float16 y = x; uint16_t z; memcpy(&z, &y, 2); return z; }
float half_value(unsigned x) { uint16_t y = x; _Float16 z; memcpy(&z, &y, 2); return z; }
unsigned half_pair(float x, float y) { return half_bits(x) | half_bits(y) << 16; }
void matrix_multiply(  // as the PTX manual lays the parts of mma.m16n8k16 out over the lanes
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    static unsigned a[THREADS][4], b[THREADS][2];
    const unsigned me = threadIdx.x, base = me / 32 * 32, lane = me % 32;
    a[me][0] = a0, a[me][1] = a1, a[me][2] = a2, a[me][3] = a3, b[me][0] = b0, b[me][1] = b1;
    __syncwarp();
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned m = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned part = k % 8 / 2, upper = k / 8, shift = k % 2 * 16;
            const unsigned x = a[base + m % 8 * 4 + part][m / 8 + upper * 2];
            const unsigned y = b[base + n * 4 + part][upper];
            c[i] += half_value(x >> shift & 0xffff) * half_value(y >> shift & 0xffff);
        }
    }
    __syncwarp();
}
@HEADER@
void kernel(@SIGNATURE@) {
@BODY@
}
char* input(uint64_t bytes) {
    const uint64_t page = 4096, size = (bytes + page - 1) / page * page;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char* at = (char*)mmap(0, size + page, PROT_READ | PROT_WRITE, flags, -1, 0);
    mprotect(at + size, page, PROT_NONE);
    if (fread(at + size - bytes, 1, bytes, stdin) != bytes) _exit(3);
    return at + size - bytes;
}
char* arrays[64];
void fiber() { kernel(@ARGUMENTS@); done[threadIdx.x] = true; }
int main() {
    uint64_t inputs, outputs, x, y, bytes[64];
    if (fread(&inputs, 8, 1, stdin) + fread(&outputs, 8, 1, stdin) + fread(&x, 8, 1, stdin)
        + fread(&y, 8, 1, stdin) + fread(bytes, 8, inputs + outputs, stdin) < 5) return 2;
    for (uint64_t i = 0; i < inputs; ++i) arrays[i] = input(bytes[i]);
    for (uint64_t i = inputs; i < inputs + outputs; ++i) arrays[i] = new char[bytes[i]]();
    for (uint64_t group = 0; group < x * y; ++group) {
        blockIdx = {unsigned(group % x), unsigned(group / x)};
        for (unsigned t = 0; t < THREADS; ++t) {
            done[t] = false;
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = stacks[t];
            fibers[t].uc_stack.ss_size = sizeof stacks[t];
            fibers[t].uc_link = &host;
            makecontext(&fibers[t], fiber, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (unsigned t = 0; t < THREADS; ++t) if (!done[t]) {
                left = true;
                threadIdx.x = t;
                swapcontext(&host, &fibers[t]);
            }
        }
    }
    for (uint64_t i = inputs; i < inputs + outputs; ++i) fwrite(arrays[i], 1, bytes[i], stdout);
}
"""


def _program(
    name: str, types: list[str], names: list[str], n_inputs: int,
    constants: tuple[tuple[str, int], ...], threads: int,
) -> str:  # fmt: skip
    header, body = decode_kernel_source.sources(name, "cuda", constants)
    pointers = [f"{'const ' if i < n_inputs else ''}{t}*" for i, t in enumerate(types)]
    parts = {
        "THREADS": str(threads), "HEADER": header, "BODY": body,
        "SIGNATURE": ", ".join(f"{t} {n}" for t, n in zip(pointers, names, strict=True)),
        "ARGUMENTS": ", ".join(f"({t})arrays[{i}]" for i, t in enumerate(pointers)),
    }  # fmt: skip
    text = _HOST
    for key, value in parts.items():
        text = text.replace(f"@{key}@", value)
    return text


def kernel(
    folder: Path, name: str, constants: tuple[tuple[str, int], ...]
) -> Callable[..., list[mx.array]]:
    """Return a function that runs kernel ``name`` on the host, as `mx.fast.cuda_kernel` would."""
    names = decode_kernel_source.INPUTS
    if name == "merge":
        names = decode_kernel_source.MERGE_INPUTS

    def run(
        *, inputs: list[mx.array], grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int], output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]:  # fmt: skip
        types = [_TYPES[d] for d in [*(a.dtype for a in inputs), *output_dtypes]]
        program = _program(
            name, types, [*names, *decode_kernel_source.OUTPUTS], len(inputs), constants,
            threadgroup[0],
        )  # fmt: skip
        binary = folder / f"{name}_{hash(program) & 0xFFFFFFFF:x}"
        if not binary.exists():
            binary.with_suffix(".cpp").write_text(program)
            command = [str(COMPILER), "-std=c++17", "-O1", "-o", str(binary), f"{binary}.cpp"]
            subprocess.run(command, check=True)  # noqa: S603
        held = [np.array(a) for a in inputs]
        sizes = [a.nbytes for a in held] + [4 * int(np.prod(s)) for s in output_shapes]
        head = [len(inputs), len(output_shapes), grid[0] // threadgroup[0], grid[1], *sizes]
        data = np.array(head, np.uint64).tobytes() + b"".join(a.tobytes() for a in held)
        done = subprocess.run([str(binary)], input=data, capture_output=True, check=True)  # noqa: S603
        found, at = [], 0
        for shape in output_shapes:
            n = int(np.prod(shape))
            values: Any = np.frombuffer(done.stdout, np.float32, n, at * 4)
            found.append(mx.array(values.reshape(shape)))
            at += n
        return found

    return run
