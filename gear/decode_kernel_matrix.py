"""Products with codes on NVIDIA's matrix units, for the fused decode kernel on CUDA.

`mma.m16n8k16` multiplies 16 places of a packed line by 16 lines and adds up 8 columns in fp32. A
line is a channel of K (its places are tokens) or a token of V (its places are channels). The
columns are 4 query heads times 2: a weight is split into two fp16 numbers, so that 22 bits of it
count. A code needs no conversion: its bits, where they lie, are a subnormal fp16,
code * 2^(n - 24). Codes and scales go through shared memory, so that they are read once and whole.
A weight is at most 1 (SCORES: the queries are scaled so) times a scale, hence finite in fp16.
"""

FUNCTIONS = """
#ifdef __CUDACC__
FUNCTION void matrix_multiply(
    float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FUNCTION unsigned half_pair(float x, float y) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}
#endif

template <int BYTES>
struct Chunk;
template <>
struct Chunk<1> { typedef unsigned char type; };
template <>
struct Chunk<2> { typedef unsigned short type; };
template <>
struct Chunk<4> { typedef unsigned type; };
template <>
struct Chunk<8> { typedef unsigned long long type; };

// UNIT places of a line: lane / 4 holds UNIT / 8 of them, for head lane % 4.
template <int UNIT>
struct Products {
    float c[UNIT / 16][4], zero;
};

template <int UNIT>
FUNCTION void clear(Products<UNIT>& s) {
#pragma unroll
    for (int j = 0; j < UNIT / 16; ++j) s.c[j][0] = s.c[j][1] = s.c[j][2] = s.c[j][3] = 0.0f;
    s.zero = 0.0f;
}

template <int BYTES>
struct alignas(BYTES) Piece {
    unsigned word[BYTES / 4];
};

template <typename X, typename Y>
FUNCTION X* cast_like(const X*, Y* to) {
    return (X*)to;
}

// Copy `count` rows of up to W entries, `n` of which exist, to rows that lie `pitch` apart.
template <int W, typename X>
FUNCTION void stage(
    X* to, unsigned pitch, const X* from, size_t stride, unsigned count, unsigned n, unsigned me,
    unsigned threads) {
#pragma unroll 8
    for (unsigned i = me; i < count * W; i += threads) {
        if (i % W < n) to[i / W * pitch + i % W] = from[i / W * stride + i % W];
    }
}

// The same for scales; up to whole sixteens of rows they are 0 where there is none.
template <int W, typename X>
FUNCTION void stage_scales(
    X* to, const X* from, size_t stride, unsigned count, unsigned n, unsigned me,
    unsigned threads) {
#pragma unroll 8
    for (unsigned i = me; i < (count + 15) / 16 * 16 * W; i += threads) {
        X x = X(0.0f);
        if (i % W < n && i / W < count) x = from[i / W * stride + i % W];
        to[i] = x;
    }
}

// Add 16 lines times their weights to N units side by side. `codes`, `scale` and `zero` are
// those of line lane % 4 * 2, in shared memory.
template <int BITS, int UNIT, int ALONG, int N, int G, typename S, typename Z>
FUNCTION void add_lines(
    Products<UNIT>* s, const unsigned char* codes, unsigned pitch, const S* scale, const Z* zero,
    unsigned groups, const Heads<G>* weight, unsigned lane) {
    const int rows = UNIT / 16, bytes = UNIT / 8 * BITS / 8;
    const unsigned head = lane / 8 < G ? lane / 8 : 0;
    typedef typename Chunk<bytes>::type Word;
    Word word[N][4];
    float w[N][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned line = i % 2 + i / 2 * 8;
        const float x = lane / 8 < G ? weight[lane % 4 * 2 + line].of[head] : 0.0f;
#pragma unroll
        for (int u = 0; u < N; ++u) {
            word[u][i] = *(const Word*)(codes + line * pitch + u * rows * 2 * BITS);
            const unsigned group = line * groups + u * UNIT / ALONG;
            s[u].zero += x * float(zero[group]);
            w[u][i] = x * float(scale[group]) * float(1 << (BITS - 2));  // off fp16's low end
            const float high = AS_FLOAT(AS_BITS(w[u][i]) & 0xffffe000u);  // 11 bits
            w[u][i] = lane / 4 % 2 ? w[u][i] - high : high;
        }
    }
#pragma unroll
    for (int u = 0; u < N; ++u) {
        const unsigned b0 = half_pair(w[u][0], w[u][1]), b1 = half_pair(w[u][2], w[u][3]);
#pragma unroll
        for (int j = 0; j < rows; ++j) {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // rows lane / 4 and lane / 4 + 8, two lines each
                const int at = (j + i % 2 * rows) * BITS;
                const unsigned first = unsigned(word[u][i / 2 * 2] >> (at / 16 * 16)) & 0xffffu;
                const unsigned second = unsigned(word[u][i / 2 * 2 + 1] >> (at / 16 * 16)) << 16;
                a[i] = (first | second) >> (at & 8) & ((1u << BITS) - 1u) * 0x10001u << (at & 7);
            }
            matrix_multiply(s[u].c[j], a[0], a[1], a[2], a[3], b0, b1);
        }
    }
}

// After the last line: what lane / 4 holds for place i of its UNIT / 8, for head lane % 4.
template <int BITS, int UNIT>
FUNCTION float total(const Products<UNIT>& s, int i) {
    const int rows = UNIT / 16, at = i * BITS;
    const float* c = s.c[i % rows] + i / rows * 2;
    return (c[0] + c[1]) * float(1 << (26 - BITS - (at & 7))) + s.zero;
}

template <int UNIT>
FUNCTION void share_zero(Products<UNIT>& s, unsigned lane) {
    s.zero += SHUFFLE_XOR(s.zero, 1);
    s.zero += SHUFFLE_XOR(s.zero, 2);
    s.zero = SHUFFLE(s.zero, lane % 4 * 8);
}
"""

SCORES = """
        const unsigned K_GROUPS = TILE / K_ALONG, first_unit = simd * K_UNITS;
        const unsigned here = stored - at.first < TILE ? stored - at.first : TILE;
        unsigned char* staged = (unsigned char*)(scratch + TILE);
        Products<K_UNIT> scores[K_UNITS];
#pragma unroll
        for (int n = 0; n < K_UNITS; ++n) clear(scores[n]);
        for (unsigned d = 0; d < D; d += K_ROWS) {
            const size_t line = size_t(kv) * D + d, group = line * k_groups + at.first / K_ALONG;
            const unsigned n = D - d < K_ROWS ? D - d : K_ROWS;
            auto* scale = cast_like(k_scale, staged + K_ROWS * K_PITCH);
            auto* zero = cast_like(k_zero, scale + K_ROWS * K_GROUPS);
            if (d > 0) GROUP_BARRIER;
            stage<TILE * K_BITS / 8 / K_PIECE>(
                (Piece<K_PIECE>*)staged, K_PITCH / K_PIECE,
                (const Piece<K_PIECE>*)(k_codes + line * k_words + at.first / 8 * K_BITS / 4),
                k_words * 4 / K_PIECE, n, here / 8 * K_BITS / K_PIECE, me, 32 * SIMDS);
            stage_scales<K_GROUPS>(
                scale, k_scale + group, k_groups, n, here / K_ALONG, me, 32 * SIMDS);
            stage_scales<K_GROUPS>(
                zero, k_zero + group, k_groups, n, here / K_ALONG, me, 32 * SIMDS);
            GROUP_BARRIER;
            for (unsigned i = 0; i < n && first_unit * K_UNIT < at.count; i += 16) {
                const unsigned row = i + lane % 4 * 2;
                const unsigned start = row * K_GROUPS + first_unit * K_UNIT / K_ALONG;
                add_lines<K_BITS, K_UNIT, K_ALONG, K_UNITS, G>(
                    scores, staged + row * K_PITCH + first_unit * K_UNIT / 8 * K_BITS
                    + lane / 4 * K_CHUNK, K_PITCH, scale + start, zero + start, K_GROUPS,
                    query + d + i, lane);
            }
        }
#pragma unroll
        for (int n = 0; n < K_UNITS; ++n) {
            share_zero(scores[n], lane);
#pragma unroll
            for (int i = 0; i < K_UNIT / 8; ++i) {
                const unsigned place = (first_unit + n) * K_UNIT + lane / 4 * (K_UNIT / 8) + i;
                if (lane % 4 < G) {
                    scratch[spread<K_SPREAD>(place)].of[lane % 4] = total<K_BITS>(scores[n], i);
                }
            }
        }
        const unsigned copies = k_kept > 0 ? SIMDS : 1;
        if (k_kept > 0) {
            GROUP_BARRIER;
            for (unsigned i = me; i < (SIMDS - 1) * TILE; i += 32 * SIMDS) {
                scratch[TILE + i] = filled<G>(0.0f);
            }
            GROUP_BARRIER;
        }
"""

VALUES = """
        const unsigned V_UNITS = D / V_UNIT, V_GROUPS = (D + V_ALONG - 1) / V_ALONG;
        const unsigned V_BYTES = D / 8 * V_BITS;
        Products<V_UNIT> sums[V_UNITS];
#pragma unroll
        for (int u = 0; u < V_UNITS; ++u) clear(sums[u]);
        for (unsigned t = 0; t < at.count; t += V_ROWS) {
            const size_t line = size_t(kv) * stored + at.first + t;
            const size_t group = (size_t(v_scale_row) * stored + at.first + t) * V_GROUPS;
            const unsigned n = at.count - t < V_ROWS ? at.count - t : V_ROWS;
            auto* scale = cast_like(v_scale, staged + V_ROWS * V_PITCH);
            auto* zero = cast_like(v_zero, scale + V_ROWS * V_GROUPS);
            if (t > 0) GROUP_BARRIER;
            stage<V_BYTES / V_PIECE>(
                (Piece<V_PIECE>*)staged, V_PITCH / V_PIECE,
                (const Piece<V_PIECE>*)(v_codes + line * (V_BYTES / 4)), V_BYTES / V_PIECE, n,
                V_BYTES / V_PIECE, me, 32 * SIMDS);
            stage_scales<V_GROUPS>(
                scale, v_scale + group, V_GROUPS, n, V_GROUPS, me, 32 * SIMDS);
            stage_scales<V_GROUPS>(zero, v_zero + group, V_GROUPS, n, V_GROUPS, me, 32 * SIMDS);
            GROUP_BARRIER;
            for (unsigned i = simd * 16; i < n; i += SIMDS * 16) {
                const unsigned row = i + lane % 4 * 2;
                add_lines<V_BITS, V_UNIT, V_ALONG, V_UNITS, G>(
                    sums, staged + row * V_PITCH + lane / 4 * V_CHUNK, V_PITCH,
                    scale + row * V_GROUPS, zero + row * V_GROUPS, V_GROUPS, scratch + t + i,
                    lane);
            }
        }
        GROUP_BARRIER;
"""

OUTPUT = """
        SIMD_BARRIER;
        Heads<G>* mine = slots + simd * (SLOTS / SIMDS) * D;
#pragma unroll
        for (int u = 0; u < V_UNITS; ++u) {
            share_zero(sums[u], lane);
#pragma unroll
            for (int i = 0; i < V_UNIT / 8; ++i) {
                if (lane % 4 < G) {
                    const unsigned d = u * V_UNIT + lane / 4 * (V_UNIT / 8) + i;
                    const float x = total<V_BITS>(sums[u], i);
                    float& sum = mine[spread<V_SPREAD>(d)].of[lane % 4];
                    sum = v_kept > 0 ? sum + x : x;
                }
            }
        }
        GROUP_BARRIER;
        const unsigned apart = v_kept > 0 ? 1 : SLOTS / SIMDS;
        for (unsigned d = me; d < D; d += 32 * SIMDS) {
            Heads<G> sum = rest[d];
#pragma unroll 4
            for (unsigned s = 0; s < SLOTS; s += apart) {
                add(sum, slots[s * D + spread<V_SPREAD>(d)], 1.0f);
            }
            rest[d] = sum;
        }
"""
