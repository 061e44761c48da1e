"""Functions of the fused decode kernel that both of its forms use: reductions, L·R and S.

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
FUNCTION Heads<G> lanes_total(Heads<G> x, unsigned width) {  // over neighbours, width a power of 2
    for (unsigned m = width / 2; m > 0; m /= 2) EACH_HEAD x.of[g] += SHUFFLE_XOR(x.of[g], m);
    return x;
}

template <int G>
FUNCTION Heads<G> simd_largest(Heads<G> x) {
    for (unsigned m = 16; m > 0; m /= 2) {
        Heads<G> y;
        EACH_HEAD y.of[g] = SHUFFLE_XOR(x.of[g], m);
        x = larger(x, y);
    }
    return x;
}

// Where entry i of the N that one thread writes lies: neighbours then differ in their banks.
template <int N>
FUNCTION unsigned spread(unsigned i) {
    return i ^ ((i / N) % N);
}

// Which tokens a thread group is looking at, and the blocks these lie in.
struct Span {
    unsigned first, count, tokens, block, blocks;
};

template <typename X>
struct alignas(4 * sizeof(X)) Four {
    X of[4];
};

template <typename X>
FUNCTION Four<X> four_of(GLOBAL const X* from) {
    return *(GLOBAL const Four<X>*)from;
}

// sum += x[i] * y[i] for i = 0, 1, 2, 3
template <int G, typename X>
FUNCTION void add_four(LOCAL Heads<G>& sum, SHARED const Heads<G>* x, GLOBAL const X* y) {
    const Four<X> four = four_of(y);
    for (int i = 0; i < 4; ++i) add(sum, x[i], float(four.of[i]));
}

// rows[r] = sum over d of query[d] * right[r, d]: q·Rᵀ, 8 or 32 lanes a row.
template <int D, int G, typename F>
FUNCTION void project(
    SHARED Heads<G>* rows, GLOBAL const F* right, unsigned n, SHARED const Heads<G>* query,
    unsigned me, unsigned threads) {
    const unsigned width = n > threads / 32 ? 8 : 32;
    for (unsigned base = 0; base < n; base += threads / width) {
        const unsigned r = base + me / width;
        Heads<G> sum = filled<G>(0.0f);
#pragma unroll 4
        for (unsigned d = me % width * 4; d < (r < n ? D : 0); d += width * 4) {
            add_four(sum, query + d, right + r * D + d);
        }
        sum = lanes_total(sum, width);
        if (me % width == 0 && r < n) rows[r] = sum;
    }
}

// rows[b, r] = sum over t of p[t] * left[b, r, t]: p·L, 8 or 32 lanes a row. Blocks are whole
// fours, and p is 0 after the last token.
template <int G, typename F>
FUNCTION void weigh(
    SHARED Heads<G>* rows, GLOBAL const F* left, unsigned rank, SHARED const Heads<G>* p, Span at,
    unsigned me, unsigned threads) {
    const unsigned n = at.blocks * rank, width = n > threads / 32 ? 8 : 32;
    for (unsigned base = 0; base < n; base += threads / width) {
        const unsigned r = base + me / width;
        Heads<G> sum = filled<G>(0.0f);
        if (r < n) {
            const unsigned start = (at.block + r / rank) * at.tokens, last = at.first + at.count;
            const unsigned from = start > at.first ? start : at.first;
            const unsigned end = start + at.tokens < last ? start + at.tokens : last;
#pragma unroll 4
            for (unsigned t = from + me % width * 4; t < end; t += width * 4) {
                add_four(sum, p + (t - at.first), left + r * at.tokens + t - start);
            }
        }
        sum = lanes_total(sum, width);
        if (me % width == 0 && r < n) rows[r] = sum;
    }
}

// The first of n ascending entries that is not below x.
template <typename I>
FUNCTION unsigned lower_bound(GLOBAL const I* list, unsigned n, unsigned x) {
    unsigned from = 0;
    while (from < n) {
        const unsigned middle = (from + n) / 2;
        if (list[middle] < x) from = middle + 1;
        else n = middle;
    }
    return from;
}

// copy[t] += query[d] * value, for the outliers of `channels` channels; WIDTH lanes a channel.
// `begin` keeps, by channel, where the next tile starts in the list of the last block.
template <int SPREAD, int WIDTH, int D, int G, typename I, typename W>
FUNCTION void add_key_outliers(
    SHARED Heads<G>* copy, GLOBAL const I* index, GLOBAL const W* value, unsigned kept,
    SHARED const Heads<G>* query, SHARED unsigned* begin, bool search, unsigned channels, Span at,
    unsigned lane) {
    const unsigned turns = 32 / WIDTH, deep = 8, slots = at.blocks * kept, none = 0xffffffffu;
    const unsigned begun = at.first - at.block * at.tokens;
    for (unsigned base = 0; base < channels; base += 32) {
        unsigned from = 0;  // of this lane's channel, in the blocks' lists end to end
        if (base + lane < channels) {
            if (begun > 0) {
                from = search ? lower_bound(index + (base + lane) * kept, kept, begun)
                              : begin[base + lane];
            }
            begin[base + lane] = at.blocks > 1 ? 0 : from;
        }
        SIMD_BARRIER;
        for (unsigned c = 0; c < 32 && base + c < channels; c += turns * deep) {
            float more = 1.0f;
            for (unsigned n = 0; n < slots && more > 0.0f; n += WIDTH) {
                unsigned place[deep];
                float x[deep];
                more = 0.0f;
#pragma unroll
                for (unsigned u = 0; u < deep; ++u) {
                    const unsigned channel = (c + u * turns + lane / WIDTH) % 32;
                    const unsigned i = SHUFFLE(from, channel) + n + lane % WIDTH;
                    place[u] = none;
                    x[u] = 0.0f;
                    if (i < slots && base + channel < channels) {
                        const unsigned b = i < kept ? 0 : i / kept;
                        const unsigned j = (b * D + base + channel) * kept + i - b * kept;
                        const unsigned t = (at.block + b) * at.tokens + unsigned(index[j]);
                        x[u] = float(value[j]);
                        if (t < at.first + at.count) place[u] = spread<SPREAD>(t - at.first);
                    }
                    const unsigned next = SHUFFLE(place[u], (lane + 1) % 32);
                    const bool full = lane % WIDTH == WIDTH - 1;
                    if (place[u] != none && (full || next == none)) {  // the last one so far
                        const unsigned before = slots - kept;
                        begin[base + channel] = i + 1 > before ? i + 1 - before : 0;
                        if (full) more = 1.0f;
                    }
                }
                more = simd_largest(filled<1>(more)).of[0];
#pragma unroll
                for (unsigned u = 0; u < deep * turns; ++u) {
                    const unsigned v = u / turns;
                    if (lane / WIDTH == u % turns && place[v] != none) {
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
template <int SPREAD, int LANES, int SLOTS, int D, int G, typename I, typename W>
FUNCTION void add_value_outliers(
    SHARED Heads<G>* slots, GLOBAL const I* index, GLOBAL const W* value, unsigned kept,
    SHARED const Heads<G>* p, unsigned tokens, unsigned me) {
    const unsigned slot = me / LANES, deep = 8;
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
                if (place[u] != 0xffffffffu) {
                    slots[slot * D + spread<SPREAD>(place[u])].of[g] += x[u];
                }
                SIMD_BARRIER;
            }
        }
    }
}
"""
