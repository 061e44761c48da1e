"""Products with codes in registers, for the fused decode kernel on Metal and CUDA.

A thread keeps sums for one word of codes: 32 / bits tokens of K, a channel after another, or
32 / bits channels of V, a token after another. A code is not converted: its bits are put below the
exponent of 1.0, which gives 1 + code / 2^n, and the 1 and 2^n are taken out of the sum.
"""

FUNCTIONS = """
// Sums of weight * dequantised code, for the 32 / BITS codes of a word's place.
template <int BITS, int G>
struct Sums {
    Heads<G> code[32 / BITS], one, zero;
};

template <int BITS, int G>
FUNCTION void clear(LOCAL Sums<BITS, G>& s) {
#pragma unroll
    for (int i = 0; i < 32 / BITS; ++i) s.code[i] = filled<G>(0.0f);
    s.one = s.zero = filled<G>(0.0f);
}

template <int BITS, int G>
FUNCTION Heads<G> total(LOCAL const Sums<BITS, G>& s, int i) {
    const int together = BITS == 2 ? 2 : 1;  // codes that one shift brings into place
    const float unit = float(1 << ((together - i % together) * BITS));
    Heads<G> x;
    EACH_HEAD x.of[g] = unit * (s.code[i].of[g] - s.one.of[g]) + s.zero.of[g];
    return x;
}

// `one` holds the bits of 1.0f; as the compiler does not know, mask and exponent are one operation.
template <int BITS, int G>
FUNCTION void add_word(
    LOCAL Sums<BITS, G>& s, unsigned word, Heads<G> weight, float scale, float zero, unsigned one) {
    const int together = BITS == 2 ? 2 : 1;
    add(s.zero, weight, zero);
    EACH_HEAD weight.of[g] *= scale;
    EACH_HEAD s.one.of[g] += weight.of[g];
#pragma unroll
    for (int i = 0; i < 32 / BITS; ++i) {
        const int left = 23 - together * BITS - i / together * together * BITS;
        const unsigned top = left >= 0 ? word << (left & 31) : word >> (-left & 31);
        const unsigned mask = ((1u << BITS) - 1u) << (23 - (together - i % together) * BITS);
        add(s.code[i], weight, AS_FLOAT((top & mask) | one));
    }
}

template <int BITS, int G, typename S, typename Z>
FUNCTION void add_words(
    LOCAL Sums<BITS, G>& s, GLOBAL const unsigned* codes, unsigned words, GLOBAL const S* scale,
    GLOBAL const Z* zero, unsigned groups, SHARED const Heads<G>* weight, unsigned step,
    unsigned n, unsigned one) {
#pragma unroll 4
    for (unsigned i = 0; i < n; ++i) {
        add_word<BITS, G>(s, *codes, *weight, float(*scale), float(*zero), one);
        codes += words;
        scale += groups;
        zero += groups;
        weight += step;
    }
}
"""

# A simd group a share of the channels, each into its copy of the scores; a lane a word of tokens.
SCORES = """
        const unsigned K_PER = 32 / K_BITS, SHARE = D / SIMDS, copies = SIMDS;
        const size_t channel = size_t(kv) * D + simd * SHARE;
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
                scratch[simd * TILE + spread<K_SPREAD>(word * K_PER + i)] =
                    total<K_BITS, G>(scores, i);
            }
        }
        SIMD_BARRIER;
"""

VALUES = ""

# A thread a word of channels, every so many tokens; then as many threads' sums as scratch holds.
OUTPUT = """
        const unsigned V_PER = 32 / V_BITS, V_WORDS = D / V_PER, ABREAST = 32 * SIMDS / V_WORDS;
        const unsigned my_word = me % V_WORDS, my_token = me / V_WORDS, fit = SCRATCH / D;
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
        GROUP_BARRIER;
        for (unsigned d = me; d < (v_kept > 0 ? D : 0); d += 32 * SIMDS) {
            for (unsigned s = 0; s < SLOTS; ++s) {
                add(rest[d], slots[s * D + spread<V_SPREAD>(d)], 1.0f);
            }
        }
        for (unsigned from = 0; from < ABREAST; from += fit) {
            GROUP_BARRIER;
            if (my_token >= from && my_token < from + fit && my_token < ABREAST) {
#pragma unroll
                for (int i = 0; i < V_PER; ++i) {
                    scratch[(my_token - from) * D + spread<V_SPREAD>(my_word * V_PER + i)] =
                        total<V_BITS, G>(sums, i);
                }
            }
            GROUP_BARRIER;
            for (unsigned d = me; d < D; d += 32 * SIMDS) {
                Heads<G> sum = rest[d];
#pragma unroll 2
                for (unsigned t = 0; t < fit && from + t < ABREAST; ++t) {
                    add(sum, scratch[t * D + spread<V_SPREAD>(d)], 1.0f);
                }
                rest[d] = sum;
            }
        }
"""
