"""The text of the fused decode kernel, for Metal and CUDA; decode_kernel.py runs it.

A thread group takes a run of tokens of one KV head for GROUP of its query heads. It goes through
TILE tokens at a time: K·q a channel after another (a thread keeps one word of codes, 32 / bits
tokens), the running softmax, then p·V a token after another (a word holds 32 / bits channels).

    scores = q·Q(K)ᵀ + (q·Rᵀ)·Lᵀ + q·Sᵀ        out = p·Q(V) + (p·L)·R + p·S

A code is not converted: its bits are put below the exponent of 1.0, which gives 1 + code / 2^n, and
the 1 and 2^n are taken out of the sum. Nothing is added atomically, so results do not vary from
run to run: every simd group adds outliers into a copy of its own, one vector of K (its tokens are
distinct) or one token of V at a time.
"""

from gear.decode_kernel_parts import FUNCTIONS

PREFIX = {
    "metal": """
#define LOCAL thread
#define GLOBAL device
#define SHARED threadgroup
#define SHARED_ARRAY threadgroup
#define FUNCTION inline
#define AS_FLOAT(x) as_type<float>(x)
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
#define FUNCTION __device__ __forceinline__
#define AS_FLOAT(x) __uint_as_float(x)
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
INPUTS = ("queries", "sizes") + tuple(
    f"{side}_{name}"
    for side in "kv"
    for name in ("codes", "scale", "zero", "left", "right", "index", "value")
)
OUTPUTS = ("out", "peak", "weight")

_BODY = """
    const unsigned lane = me % 32, simd = me / 32;
    const unsigned K_PER = 32 / K_BITS, V_PER = 32 / V_BITS, SHARE = D / SIMDS;
    const unsigned V_WORDS = D / V_PER, ABREAST = 32 * SIMDS / V_WORDS;  // tokens of V at a time
    SHARED_ARRAY Heads<G> query[D], rest[D], rows[ROWS], each_simd[SIMDS], scratch[SCRATCH];

    const unsigned kv = row / parts, stored = count * tokens, k_words = stored / K_PER;
    const unsigned k_groups = stored / k_group, v_groups = (D + v_group - 1) / v_group;
    const unsigned v_scale_row = v_scale_heads == 1 ? kv / kv_heads : kv;
    const unsigned my_word = me % V_WORDS, my_token = me / V_WORDS;
    for (unsigned d = me; d < D; d += 32 * SIMDS) {
        EACH_HEAD query[d].of[g] = float(queries[(row * G + g) * D + d]);
        rest[d] = filled<G>(0.0f);
    }
    Heads<G> top = filled<G>(-3e38f), mass = filled<G>(0.0f);
    GROUP_BARRIER;
    for (unsigned tile = split * tiles; tile < (split + 1) * tiles && tile * TILE < valid; ++tile) {
        Span at;
        at.first = tile * TILE;
        at.count = valid - at.first < TILE ? valid - at.first : TILE;
        at.tokens = tokens;
        at.block = at.first / tokens;
        at.blocks = (at.first + at.count - 1) / tokens - at.block + 1;
        const size_t block = size_t(kv) * count + at.block;

        // scores: the base, a simd group a share of the channels, a lane a word of tokens
        project<D, G>(rows, k_right + block * k_rank * D, at.blocks * k_rank, query, simd, SIMDS, lane);
        const size_t channel = size_t(kv) * D + simd * SHARE;
        SHARED Heads<G>* copy = scratch + simd * TILE;
        for (unsigned word = lane; word * K_PER < at.count; word += 32) {
            const unsigned t = at.first + word * K_PER;
            const size_t scale = channel * k_groups + t / k_group;
            Sums<K_BITS, G> scores;
            clear<K_BITS, G>(scores);
            add_words<K_BITS, G>(
                scores, k_codes + channel * k_words + t / K_PER, k_words, k_scale + scale,
                k_zero + scale, k_groups, query + simd * SHARE, 1, SHARE, one);
#pragma unroll
            for (int i = 0; i < K_PER; ++i) {
                copy[spread<K_BITS>(word * K_PER + i)] = total<K_BITS, G>(scores, i);
            }
        }
        SIMD_BARRIER;
        if (k_kept > 0) {
            const size_t list = (block * D + simd * SHARE) * k_kept;
            add_key_outliers<K_BITS, WIDTH, D, G>(
                copy, k_index + list, k_value + list, k_kept, query + simd * SHARE, SHARE, at, lane);
        }
        GROUP_BARRIER;

        // p = exp(score - peak) in place of the first copy; what was summed is scaled to it
        const Heads<G> before = top;
        Heads<G> score[TILE / 32 / SIMDS];
#pragma unroll
        for (int i = 0; i < TILE / 32 / SIMDS; ++i) {
            const unsigned t = me + i * 32 * SIMDS;
            if (t < at.count) {
                score[i] = scratch[spread<K_BITS>(t)];
                for (unsigned s = 1; s < SIMDS; ++s) {
                    add(score[i], scratch[s * TILE + spread<K_BITS>(t)], 1.0f);
                }
                const unsigned b = (at.first + t) / tokens - at.block;
                const size_t left = (block + b) * k_rank * tokens + (at.first + t) % tokens;
                for (unsigned r = 0; r < k_rank; ++r) {
                    add(score[i], rows[b * k_rank + r], float(k_left[left + r * tokens]));
                }
                top = larger(top, score[i]);
            }
        }
        top = simd_largest(top);
        if (lane == 0) each_simd[simd] = top;
        GROUP_BARRIER;
        for (unsigned s = 0; s < SIMDS; ++s) top = larger(top, each_simd[s]);
        Heads<G> factor;
        EACH_HEAD factor.of[g] = exp(before.of[g] - top.of[g]);
        EACH_HEAD mass.of[g] *= factor.of[g];
        for (unsigned d = me; d < D; d += 32 * SIMDS) EACH_HEAD rest[d].of[g] *= factor.of[g];
#pragma unroll
        for (int i = 0; i < TILE / 32 / SIMDS; ++i) {
            const unsigned t = me + i * 32 * SIMDS;
            Heads<G> p = filled<G>(0.0f);
            if (t < at.count) EACH_HEAD p.of[g] = exp(score[i].of[g] - top.of[g]);
            add(mass, p, 1.0f);
            scratch[t] = p;
        }
        GROUP_BARRIER;

        // output: the base, a thread a word of channels; S into slots; L·R and the slots into rest
        SHARED Heads<G>* slots = scratch + TILE;
        weigh<G>(rows, v_left + block * v_rank * tokens, v_rank, scratch, at, simd, SIMDS, lane);
        Sums<V_BITS, G> sums;
        clear<V_BITS, G>(sums);
        if (my_token < ABREAST && my_token < at.count) {
            const size_t token = size_t(kv) * stored + at.first + my_token;
            const size_t scale = (size_t(v_scale_row) * stored + at.first + my_token) * v_groups
                + my_word * V_PER / v_group;
            add_words<V_BITS, G>(
                sums, v_codes + token * V_WORDS + my_word, ABREAST * V_WORDS, v_scale + scale,
                v_zero + scale, ABREAST * v_groups, scratch + my_token, ABREAST,
                (at.count - my_token + ABREAST - 1) / ABREAST, one);
        }
        if (v_kept > 0) {
            for (unsigned i = me; i < SLOTS * D; i += 32 * SIMDS) slots[i] = filled<G>(0.0f);
            GROUP_BARRIER;
            const size_t list = (size_t(kv) * stored + at.first) * v_kept;
            add_value_outliers<32 * SIMDS / SLOTS, SLOTS, D, G>(
                slots, v_index + list, v_value + list, v_kept, scratch, at.count, me);
        }
        GROUP_BARRIER;
        for (unsigned d = me; d < D; d += 32 * SIMDS) {
            Heads<G> sum = rest[d];
#pragma unroll 2
            for (unsigned r = 0; r < at.blocks * v_rank; ++r) {
                add(sum, rows[r], float(v_right[(block * v_rank + r) * D + d]));
            }
#pragma unroll 2
            for (unsigned s = 0; s < (v_kept > 0 ? SLOTS : 0); ++s) add(sum, slots[s * D + d], 1.0f);
            rest[d] = sum;
        }
        // the threads' sums, as many tokens abreast as scratch holds
        const unsigned fit = SCRATCH / D;
        for (unsigned from = 0; from < ABREAST; from += fit) {
            GROUP_BARRIER;
            if (my_token >= from && my_token < from + fit && my_token < ABREAST) {
#pragma unroll
                for (int i = 0; i < V_PER; ++i) {
                    scratch[(my_token - from) * D + spread<V_BITS>(my_word * V_PER + i)] =
                        total<V_BITS, G>(sums, i);
                }
            }
            GROUP_BARRIER;
            for (unsigned d = me; d < D; d += 32 * SIMDS) {
                Heads<G> sum = rest[d];
#pragma unroll 2
                for (unsigned t = 0; t < fit && from + t < ABREAST; ++t) {
                    add(sum, scratch[t * D + spread<V_BITS>(d)], 1.0f);
                }
                rest[d] = sum;
            }
        }
        GROUP_BARRIER;
    }
    mass = simd_total(mass);
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
        const float factor = exp(peaks[place] - top);
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


def sources(name: str, kind: str) -> tuple[str, str]:
    """Return the header and the body of kernel "decode" or "merge" for "metal" or "cuda"."""
    header = PREFIX[kind] + FUNCTIONS
    if name == "merge":
        return header, PLACE[kind] + _MERGE_BODY
    sizes = "".join(f"    const unsigned {n} = sizes[{i}];\n" for i, n in enumerate(SIZES))
    return header, PLACE[kind] + sizes + _BODY
