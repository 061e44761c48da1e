"""Functions of the fused decode kernel, for Metal and CUDA: sums over words of codes, L·R, S.

Macros (decode_kernel_source.py) stand for what the two languages write differently. ``Heads`` is
one number for each query head of a thread group; all arrays in shared memory are made of it.
"""

FUNCTIONS = """
#define EACH_HEAD for (int g = 0; g < G; ++g)

template <int G>  // one number for each query head
struct alignas(G % 4 == 0 ? 16 : G % 2 == 0 ? 8 : 4) Heads {
    float of[G];
};

template <int G>
FUNCTION Heads<G> filled(float x) {
    Heads<G> all;
    EACH_HEAD all.of[g] = x;
    return all;
}

template <int G>
FUNCTION void add(LOCAL Heads<G>& sum, Heads<G> x, float y) {
    EACH_HEAD sum.of[g] += x.of[g] * y;
}

template <int G>
FUNCTION Heads<G> larger(Heads<G> x, Heads<G> y) {
    EACH_HEAD x.of[g] = x.of[g] > y.of[g] ? x.of[g] : y.of[g];
    return x;
}

template <int G>
FUNCTION Heads<G> simd_total(Heads<G> x) {
    for (int m = 16; m > 0; m /= 2) EACH_HEAD x.of[g] += SHUFFLE_XOR(x.of[g], m);
    return x;
}

template <int G>
FUNCTION Heads<G> simd_largest(Heads<G> x) {
    for (int m = 16; m > 0; m /= 2) {
        Heads<G> y;
        EACH_HEAD y.of[g] = SHUFFLE_XOR(x.of[g], m);
        x = larger(x, y);
    }
    return x;
}

// Where entry i of a word lies among others': neighbouring words then differ in their banks.
template <int BITS>
FUNCTION unsigned spread(unsigned i) {
    const unsigned n = 32 / BITS;
    return i ^ ((i / n) % n);
}

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

// `one` holds the bits of 1.0f, unknown to the compiler: mask and exponent are then one instruction.
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

// The first of n ascending entries that is not below x.
template <typename I>
FUNCTION unsigned lower_bound(GLOBAL const I* list, unsigned n, unsigned x) {
    unsigned from = 0;
    while (from < n) {
        unsigned middle = (from + n) / 2;
        if (list[middle] < x) from = middle + 1;
        else n = middle;
    }
    return from;
}

// Which tokens a thread group is looking at, and the blocks these lie in.
struct Span {
    unsigned first, count, tokens, block, blocks;
};

// rows[r] = sum over d of query[d] * right[r, d]: q·Rᵀ, a simd group a row.
template <int D, int G, typename F>
FUNCTION void project(
    SHARED Heads<G>* rows, GLOBAL const F* right, unsigned n, SHARED const Heads<G>* query,
    unsigned simd, unsigned simds, unsigned lane) {
    for (unsigned r = simd; r < n; r += simds) {
        Heads<G> sum = filled<G>(0.0f);
        for (unsigned d = lane; d < D; d += 32) add(sum, query[d], float(right[r * D + d]));
        sum = simd_total(sum);
        if (lane == 0) rows[r] = sum;
    }
}

// rows[b, r] = sum over t of p[t] * left[b, r, t]: p·L, a simd group a row.
template <int G, typename F>
FUNCTION void weigh(
    SHARED Heads<G>* rows, GLOBAL const F* left, unsigned rank, SHARED const Heads<G>* p, Span at,
    unsigned simd, unsigned simds, unsigned lane) {
    for (unsigned r = simd; r < at.blocks * rank; r += simds) {
        const unsigned start = (at.block + r / rank) * at.tokens, last = at.first + at.count;
        const unsigned from = start > at.first ? start : at.first;
        const unsigned end = start + at.tokens < last ? start + at.tokens : last;
        Heads<G> sum = filled<G>(0.0f);
        for (unsigned t = from + lane; t < end; t += 32) {
            add(sum, p[t - at.first], float(left[r * at.tokens + t - start]));
        }
        sum = simd_total(sum);
        if (lane == 0) rows[r] = sum;
    }
}

// copy[t] += query[d] * value, for the outliers of `channels` channels; WIDTH lanes a channel.
template <int BITS, int WIDTH, int D, int G, typename I, typename W>
FUNCTION void add_key_outliers(
    SHARED Heads<G>* copy, GLOBAL const I* index, GLOBAL const W* value, unsigned kept,
    SHARED const Heads<G>* query, unsigned channels, Span at, unsigned lane) {
    const unsigned turns = 32 / WIDTH, deep = 4;
    const unsigned last = at.blocks - 1, begun = at.first - at.block * at.tokens;
    const unsigned ends = at.first + at.count - (at.block + last) * at.tokens;
    for (unsigned base = 0; base < channels; base += 32) {
        unsigned from = 0, end = 0;  // of this lane's channel, in the blocks' lists one after another
        if (base + lane < channels && at.count > 0) {
            GLOBAL const I* list = index + (base + lane) * kept;
            from = begun ? lower_bound(list, kept, begun) : 0;
            list += last * D * kept;
            end = last * kept + (ends < at.tokens ? lower_bound(list, kept, ends) : kept);
        }
        Heads<1> longest = filled<1>(float(end - from));
        const unsigned most = unsigned(simd_largest(longest).of[0]);
        for (unsigned c = 0; c < 32 && base + c < channels; c += turns * deep) {
            for (unsigned n = 0; n < most; n += WIDTH) {
                unsigned place[deep];
                float x[deep];
#pragma unroll
                for (unsigned u = 0; u < deep; ++u) {
                    const unsigned channel = c + u * turns + lane / WIDTH;
                    const unsigned i = SHUFFLE(from, channel) + n + lane % WIDTH;
                    place[u] = 0xffffffffu;
                    x[u] = 0.0f;
                    if (i < SHUFFLE(end, channel)) {
                        const unsigned b = i < kept ? 0 : i / kept;
                        const unsigned j = (b * D + base + channel) * kept + i - b * kept;
                        place[u] = spread<BITS>(
                            (at.block + b) * at.tokens + unsigned(index[j]) - at.first);
                        x[u] = float(value[j]);
                    }
                }
#pragma unroll
                for (unsigned u = 0; u < deep * turns; ++u) {
                    const unsigned v = u / turns;
                    if (lane / WIDTH == u % turns && place[v] != 0xffffffffu) {
                        Heads<G> sum = copy[place[v]];
                        add(sum, query[base + c + v * turns + lane / WIDTH], x[v]);
                        copy[place[v]] = sum;
                    }
                    SIMD_BARRIER;
                }
            }
        }
    }
}

// slots[mine][d] += p[t] * value, for the outliers of every SLOTS-th token; LANES lanes a token.
template <int LANES, int SLOTS, int D, int G, typename I, typename W>
FUNCTION void add_value_outliers(
    SHARED Heads<G>* slots, GLOBAL const I* index, GLOBAL const W* value, unsigned kept,
    SHARED const Heads<G>* p, unsigned tokens, unsigned me) {
    const unsigned slot = me / LANES, deep = 4;
    for (unsigned n = 0; n < kept * G; n += LANES) {
        const unsigned job = n + me % LANES, g = job % G, i = job / G;
        for (unsigned base = 0; base < tokens; base += SLOTS * deep) {
            unsigned place[deep];
            float x[deep];
#pragma unroll
            for (unsigned u = 0; u < deep; ++u) {
                const unsigned t = base + u * SLOTS + slot;
                const bool has = i < kept && t < tokens;
                place[u] = has ? unsigned(index[t * kept + i]) : 0xffffffffu;
                x[u] = has ? p[t].of[g] * float(value[t * kept + i]) : 0.0f;
            }
#pragma unroll
            for (unsigned u = 0; u < deep; ++u) {
                if (place[u] != 0xffffffffu) slots[slot * D + place[u]].of[g] += x[u];
                SIMD_BARRIER;
            }
        }
    }
}
"""
