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
        for (unsigned d = me % width; d < (r < n ? D : 0); d += width) {
            add(sum, query[d], float(right[r * D + d]));
        }
        sum = lanes_total(sum, width);
        if (me % width == 0 && r < n) rows[r] = sum;
    }
}

// rows[b, r] = sum over t of p[t] * left[b, r, t]: p·L, 8 or 32 lanes a row.
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
#pragma unroll 8
            for (unsigned t = from + me % width; t < end; t += width) {
                add(sum, p[t - at.first], float(left[r * at.tokens + t - start]));
            }
        }
        sum = lanes_total(sum, width);
        if (me % width == 0 && r < n) rows[r] = sum;
    }
}

// Of two lists of n ascending entries, the first that is not below x; 8 parts at a time.
template <typename I>
FUNCTION void lower_bounds(
    GLOBAL const I* one, unsigned x, GLOBAL const I* two, unsigned y, unsigned n,
    LOCAL unsigned& from, LOCAL unsigned& end) {
    from = end = 0;
    for (unsigned left = n; left > 0;) {
        const unsigned part = (left + 7) / 8;
        unsigned a = 0, b = 0;
#pragma unroll
        for (unsigned i = 1; i < 8; ++i) {
            const unsigned j = from + i * part - 1, k = end + i * part - 1;
            if (j < n && unsigned(one[j]) < x) ++a;
            if (k < n && unsigned(two[k]) < y) ++b;
        }
        from += a * part;
        end += b * part;
        left = part - 1;
    }
}

// copy[t] += query[d] * value, for the outliers of `channels` channels; WIDTH lanes a channel.
template <int SPREAD, int WIDTH, int D, int G, typename I, typename W>
FUNCTION void add_key_outliers(
    SHARED Heads<G>* copy, GLOBAL const I* index, GLOBAL const W* value, unsigned kept,
    SHARED const Heads<G>* query, unsigned channels, Span at, unsigned lane) {
    const unsigned turns = 32 / WIDTH, deep = 8, last = at.blocks - 1;
    const unsigned begun = at.first - at.block * at.tokens;
    const unsigned ends = at.first + at.count - (at.block + last) * at.tokens;
    for (unsigned base = 0; base < channels; base += 32) {
        unsigned from = 0, end = 0;  // of this lane's channel, in the blocks' lists end to end
        if (base + lane < channels) {
            GLOBAL const I* list = index + (base + lane) * kept;
            end = kept;
            if (begun > 0 || ends < at.tokens) {
                lower_bounds(list, begun, list + last * D * kept, ends, kept, from, end);
            }
            end += last * kept;
        }
        const unsigned most = unsigned(simd_largest(filled<1>(float(end - from))).of[0]);
        for (unsigned c = 0; c < 32 && base + c < channels; c += turns * deep) {
            for (unsigned n = 0; n < most; n += WIDTH) {
                unsigned place[deep];
                float x[deep];
                Heads<G> q;
#pragma unroll
                for (unsigned u = 0; u < deep; ++u) {
                    const unsigned channel = (c + u * turns + lane / WIDTH) % 32;
                    const unsigned i = SHUFFLE(from, channel) + n + lane % WIDTH;
                    const unsigned stop = SHUFFLE(end, channel);
                    place[u] = 0xffffffffu;
                    x[u] = 0.0f;
                    if (i < stop) {
                        const unsigned b = i < kept ? 0 : i / kept;
                        const unsigned j = (b * D + base + channel) * kept + i - b * kept;
                        place[u] = spread<SPREAD>(
                            (at.block + b) * at.tokens + unsigned(index[j]) - at.first);
                        x[u] = float(value[j]);
                    }
                }
#pragma unroll
                for (unsigned u = 0; u < deep * turns; ++u) {
                    const unsigned v = u / turns;
                    if (u % turns == 0) q = query[(base + c + v * turns + lane / WIDTH) % D];
                    if (lane / WIDTH == u % turns && place[v] != 0xffffffffu) {
                        Heads<G> sum = copy[place[v]];
                        add(sum, q, x[v]);
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
