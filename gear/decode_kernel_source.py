"""The text of the fused decode kernel, for Metal and CUDA; decode_kernel.py runs it.

A thread group takes a run of tokens of one KV head for G of its query heads, TILE tokens at a time:

    scores = q·Q(K)ᵀ + (q·Rᵀ)·Lᵀ + q·Sᵀ,  running softmax,  out = p·Q(V) + (p·L)·R + p·S

Products with the codes come in two forms: words of codes in registers (decode_kernel_words.py,
Metal and CUDA) and NVIDIA's matrix units (decode_kernel_matrix.py). Nothing is added atomically, so
results do not vary from run to run: every simd group adds outliers into a copy of its own, one
vector of K (its tokens are distinct) or one token of V at a time.
"""

from gear import decode_kernel_matrix, decode_kernel_words
from gear.decode_kernel_parts import FUNCTIONS

PREFIX = {
    "metal": """
#define LOCAL thread
#define GLOBAL device
#define SHARED threadgroup
#define SHARED_ARRAY threadgroup
#define ALIGNED
#define FUNCTION inline
#define EXP(x) exp(x)
#define AS_FLOAT(x) as_type<float>(x)
#define AS_BITS(x) as_type<unsigned>(x)
#define SHUFFLE(x, lane) simd_shuffle(x, ushort(lane))
#define SHUFFLE_XOR(x, mask) simd_shuffle_xor(x, ushort(mask))
#define GROUP_BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define SIMD_BARRIER simdgroup_barrier(mem_flags::mem_threadgroup)
""",
    "cuda": """
#define LOCAL
#define GLOBAL
#define SHARED
#define SHARED_ARRAY __shared__
#define ALIGNED __align__(16)
#define FUNCTION __device__ __forceinline__
#define EXP(x) __expf(x)
#define AS_FLOAT(x) __uint_as_float(x)
#define AS_BITS(x) __float_as_uint(x)
#define SHUFFLE(x, lane) __shfl_sync(0xffffffffu, x, lane)
#define SHUFFLE_XOR(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define GROUP_BARRIER __syncthreads()
#define SIMD_BARRIER __syncwarp()
""",
}
PLACE = {
    "metal": """
    const unsigned me = thread_position_in_threadgroup.x;
    const unsigned split = threadgroup_position_in_grid.x, row = threadgroup_position_in_grid.y;
""",
    "cuda": """
    const unsigned me = threadIdx.x;
    const unsigned split = blockIdx.x, row = blockIdx.y;
""",
}

# Sizes: one array, in this order.
SIZES = (
    "valid", "tokens", "count", "tiles", "k_group", "v_group", "k_rank", "v_rank", "k_kept",
    "v_kept", "kv_heads", "v_scale_heads", "parts", "row_count", "one",
)  # fmt: skip
_SIDE = ("codes", "scale", "zero", "left", "right", "index", "value")
INPUTS = ("queries", "sizes", *(f"k_{n}" for n in _SIDE), *(f"v_{n}" for n in _SIDE))
OUTPUTS = ("out", "peak", "weight")

_START = """
    const unsigned lane = me % 32, simd = me / 32;
    const int OWN = TILE / 32 / SIMDS;  // tokens of a thread
    const unsigned kv = row / parts, stored = count * tokens, k_words = stored * K_BITS / 32;
    const unsigned k_groups = stored / k_group, v_groups = (D + v_group - 1) / v_group;
    const unsigned v_scale_row = v_scale_heads == 1 ? kv / kv_heads : kv;
    SHARED_ARRAY Heads<G> query[D], rest[D], rows[ROWS], each_simd[SIMDS];
    SHARED_ARRAY unsigned begin[D];
    SHARED_ARRAY ALIGNED Heads<G> scratch[SCRATCH];
    SHARED Heads<G>* slots = scratch + TILE;

    // queries at most 1, by a power of 2 that the scores get back
    float largest = 0.0f;
    for (unsigned d = me; d < D; d += 32 * SIMDS) {
        EACH_HEAD {
            query[d].of[g] = float(queries[(row * G + g) * D + d]);
            largest = fmax(largest, fabs(query[d].of[g]));
        }
        rest[d] = filled<G>(0.0f);
    }
    largest = simd_largest(filled<1>(largest)).of[0];
    if (lane == 0) each_simd[simd].of[0] = largest;
    GROUP_BARRIER;
    for (unsigned s = 0; s < SIMDS; ++s) largest = fmax(largest, each_simd[s].of[0]);
    const float power = largest > 1e-30f ? 2.0f * AS_FLOAT(AS_BITS(largest) & 0x7f800000u) : 1.0f;
    for (unsigned d = me; d < D; d += 32 * SIMDS) EACH_HEAD query[d].of[g] *= 1.0f / power;
    GROUP_BARRIER;

    Heads<G> top = filled<G>(-3e38f), mass = filled<G>(0.0f);
    for (unsigned tile = split * tiles; tile < (split + 1) * tiles && tile * TILE < valid; ++tile) {
        Span at;
        at.first = tile * TILE;
        at.count = valid - at.first < TILE ? valid - at.first : TILE;
        at.tokens = tokens;
        at.block = at.first / tokens;
        at.blocks = (at.first + at.count - 1) / tokens - at.block + 1;
        const size_t block = size_t(kv) * count + at.block;
        project<D, G>(
            rows, k_right + block * k_rank * D, at.blocks * k_rank, query, me, 32 * SIMDS);
"""

_SOFTMAX = """
        if (k_kept > 0) {
            const unsigned share = D / SIMDS;
            const size_t list = (block * D + simd * share) * k_kept;
            add_key_outliers<K_SPREAD, WIDTH, D, G>(
                scratch + simd * TILE, k_index + list, k_value + list, k_kept,
                query + simd * share, begin + simd * share, tile == split * tiles, share, at, lane);
        }
        GROUP_BARRIER;

        // p = EXP(score - peak) in place of the first copy; what was summed is scaled to it
        // a thread takes fours of tokens; a four lies in one block
        const Heads<G> before = top;
        Heads<G> score[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i += 4) {
            const unsigned t = me * 4 + i / 4 * (128 * SIMDS);
#pragma unroll
            for (int j = i; j < i + 4; ++j) {
                score[j] = scratch[spread<K_SPREAD>(t + j - i)];
                for (unsigned s = 1; s < copies; ++s) {
                    add(score[j], scratch[s * TILE + spread<K_SPREAD>(t + j - i)], 1.0f);
                }
            }
            const unsigned b = t < at.count ? (at.first + t) / tokens : at.block;
            const unsigned from = t < at.count ? at.first + t - b * tokens : 0;
            const size_t left = (size_t(kv) * count + b) * k_rank * tokens + from;
#pragma unroll 4
            for (unsigned r = 0; r < k_rank; ++r) {
                const auto four = four_of(k_left + left + r * tokens);
#pragma unroll
                for (int j = i; j < i + 4; ++j) {
                    add(score[j], rows[(b - at.block) * k_rank + r], float(four.of[j - i]));
                }
            }
#pragma unroll
            for (int j = i; j < i + 4; ++j) {
                EACH_HEAD score[j].of[g] *= power;
                if (t + j - i < at.count) top = larger(top, score[j]);
            }
        }
        top = simd_largest(top);
        if (lane == 0) each_simd[simd] = top;
        GROUP_BARRIER;
        for (unsigned s = 0; s < SIMDS; ++s) top = larger(top, each_simd[s]);
        Heads<G> factor;
        EACH_HEAD factor.of[g] = EXP(before.of[g] - top.of[g]);
        EACH_HEAD mass.of[g] *= factor.of[g];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const unsigned t = me * 4 + i / 4 * (128 * SIMDS) + i % 4;
            Heads<G> p = filled<G>(0.0f);
            if (t < at.count) EACH_HEAD p.of[g] = EXP(score[i].of[g] - top.of[g]);
            add(mass, p, 1.0f);
            scratch[t] = p;
        }
        GROUP_BARRIER;
"""

_REST = """
        // S into slots, L·R into rest
        weigh<G>(rows, v_left + block * v_rank * tokens, v_rank, scratch, at, me, 32 * SIMDS);
        for (unsigned i = me; i < (v_kept > 0 ? SLOTS * D : 0); i += 32 * SIMDS) {
            slots[i] = filled<G>(0.0f);
        }
        if (v_kept + v_rank > 0) GROUP_BARRIER;
        for (unsigned d = me; d < D; d += 32 * SIMDS) {
            Heads<G> sum = rest[d];
            EACH_HEAD sum.of[g] *= factor.of[g];
#pragma unroll 8
            for (unsigned r = 0; r < at.blocks * v_rank; ++r) {
                add(sum, rows[r], float(v_right[(block * v_rank + r) * D + d]));
            }
            rest[d] = sum;
        }
        if (v_kept > 0) {
            const size_t list = (size_t(kv) * stored + at.first) * v_kept;
            add_value_outliers<V_SPREAD, 32 * SIMDS / SLOTS, SLOTS, D, G>(
                slots, v_index + list, v_value + list, v_kept, scratch, at.count, me);
        }
"""

_END = """
        GROUP_BARRIER;
    }
    mass = lanes_total(mass, 32);
    if (lane == 0) each_simd[simd] = mass;
    GROUP_BARRIER;
    const size_t place = (size_t(split) * row_count + row) * G;
    for (unsigned d = me; d < D; d += 32 * SIMDS) {
        EACH_HEAD out[(place + g) * D + d] = rest[d].of[g];
    }
    if (me == 0) {
        for (unsigned s = 1; s < SIMDS; ++s) add(mass, each_simd[s], 1.0f);
        EACH_HEAD peak[place + g] = top.of[g];
        EACH_HEAD weight[place + g] = mass.of[g];
    }
"""

_MERGE_BODY = """
    SHARED_ARRAY float sums[SHARES * D], masses[SHARES];
    const unsigned d = me % D, share = me / D, splits = sizes[0], row_count = sizes[1];
    float top = -3e38f, sum = 0.0f, mass = 0.0f;
#pragma unroll 8
    for (unsigned s = 0; s < splits; ++s) {
        const float x = peaks[s * row_count + row];
        top = x > top ? x : top;
    }
#pragma unroll 4
    for (unsigned s = share; s < splits; s += SHARES) {
        const size_t place = size_t(s) * row_count + row;
        const float factor = EXP(peaks[place] - top);
        sum += factor * outs[place * D + d];
        mass += factor * weights[place];
    }
    sums[me] = sum;
    if (d == 0) masses[share] = mass;
    GROUP_BARRIER;
    if (share == 0) {
        for (unsigned s = 1; s < SHARES; ++s) {
            sum += sums[s * D + d];
            mass += masses[s];
        }
        out[size_t(row) * D + d] = sum;
        if (d == 0) {
            peak[row] = top;
            weight[row] = mass;
        }
    }
"""
MERGE_INPUTS = ("outs", "peaks", "weights", "sizes")


def _short(text: str) -> str:
    """Return the text without comments and indentation: MLX hashes it at every call."""
    lines = (line.split("//")[0].strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def sources(name: str, kind: str, constants: tuple[tuple[str, int], ...]) -> tuple[str, str]:
    """Return the header and the body of a kernel for "metal" or "cuda", with its constants.

    "words" and "matrix" (CUDA only) are the decode kernel in its two forms, "merge" comes after.
    """
    fixed = "".join(f"constexpr int {n} = {value};\n" for n, value in constants)
    if name == "merge":
        return _short(PREFIX[kind]), _short(fixed + PLACE[kind] + _MERGE_BODY)
    sizes = "".join(f"const unsigned {n} = sizes[{i}];\n" for i, n in enumerate(SIZES))
    form = decode_kernel_matrix if name == "matrix" else decode_kernel_words
    body = _START + form.SCORES + _SOFTMAX + form.VALUES + _REST + form.OUTPUT + _END
    return _short(PREFIX[kind] + FUNCTIONS + form.FUNCTIONS), _short(
        fixed + PLACE[kind] + sizes + body
    )
