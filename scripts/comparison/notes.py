"""Why the two differ, method by method: what reading veloxquant-mlx 0.94.15's source gave.

`WHY` has every method of both; `NOT_THEIRS` those that have nothing to be held against, and why.
"""

DENSE = (
    "Their mlx-lm caches quantize and at once dequantize: what they hold is dense fp16 (16 bits), "
    "and their compressed_*_bytes are sums of what packed codes would take. Ours holds the packed "
    "codes, so counted and held agree."
)
WHY = {
    "kivi": (
        "Same grid, same groups, no window in either: the errors agree to the last digits, which "
        "differ as our scale and zero are fp16 and theirs stay fp32, as nothing of them is kept."
    ),
    "kvquant": (
        "Both fit 2^b Lloyd-Max levels a channel of K and a token of V; theirs stops after 8 "
        "sweeps from quantiles, which shows at 3 and 4 bits. V: theirs takes at least one outlier "
        "a token, ours rounds 1% of 64 channels to none: fewer bits, more error at 2 and 3 bits. "
        "Their counter charges the mean of K's and V's outliers to both sides, with 5 bytes each, "
        "where ours holds 4 (K) or 3 (V) bytes. Their levels stay held in fp32 beside dense fp16."
    ),
    "skvq": (
        "Theirs orders channels by the first 128 tokens and tries clip factors from 1 to 0.85; "
        "ours orders by the block and goes down to 0.6 in steps of 0.05. That is what 2 bits want; "
        "at 3 and 4 bits their finer steps near 1 are as good or up to 1% better. Our order is "
        "held in bytes; theirs, int32, is not in its counter (0.05 bits)."
    ),
    "cachegen": (
        "Another quantizer under the same name. Theirs is min/max per channel over 32 tokens for K "
        "and V, without anchors; deltas serve its estimate alone. Ours has the paper's: codes per "
        "token of the difference to an anchor every 10 tokens, whose 8 bits are also the 0.4 more. "
        "It wins only where neighbouring tokens are alike: of independent tokens a difference has "
        "√2 times the size, and a token's outlier channels widen its ranges. Coded: theirs is an "
        "entropy of the codes (a bound, without tables, capped at fixed width), ours the bytes of "
        "a coder's stream with its tables."
    ),
    "gear": (
        "Theirs takes S last, from what L·R leaves, and by magnitude over the whole head: 'S last' "
        "is that order here, with the same error and bytes. In the paper's order S leaves before "
        "the ranges are taken, which is the smaller error, and its entries cost 3 or 4 bytes "
        "instead of 6. What is left: exact SVD there, two power iterations here, under 1%."
    ),
    "gear_l": (
        "The same without S. Their L·R is an exact SVD, ours two power iterations (gear.solver=svd "
        "gives their number on Gaussian data): up to 0.6% of the error, where nothing is low-rank."
    ),
    "turboquant": (
        "K: the same levels and bits; another random rotation (theirs QR in fp16, ours Hadamard "
        "twice), so either may be lower on one sample, within 3%. Theirs keeps norms in fp32 (0.25 "
        "bits) and holds, per head, a rotation and arrays of the capacity asked for. V: theirs has "
        "int8 for V at every b; ours turns V as K. Theirs appends one vector at a time in Python."
    ),
    "turboquant_prod": (
        "The same estimate; m = 64 = head_dim in both (their default). The sketches are other "
        "draws: over seeds both lie within 5% of each other. Theirs keeps |x| in fp32; its V is "
        "int8, which is not the method; ours gives V algorithm 1 at b bits."
    ),
    "qjl": (
        "Same estimator and m. Our S has orthogonal rows, as in the authors' code (|k|²·0.57/b of "
        "error), theirs independent ones (|k|²·1.57/b). Theirs holds a sign as an int8, eight "
        "times its bit, and counts it so. V: theirs int8, ours min/max codes at b bits, and "
        "one-bit min/max codes of V are worse than zeros (error above 1): take 2 bits or more."
    ),
    "rabitq": (
        "Theirs is a quantizer of keys without a cache. It decodes by the least-squares length "
        "(|x-c|²·0.36 per vector), ours by the unbiased one of the paper's estimate (·0.57), which "
        "is longer on purpose: of equal codes ours has the larger error and the right inner "
        "product. Theirs keeps 12 bytes a key (a cluster, two lengths) to our 2, and its count "
        "leaves out the centres, which with nlist=64 are held at 3.2 bits an element."
    ),
    "svdq": (
        "Same schedule, an axis system a head in both. Theirs has scale and zero for every 32 "
        "tokens and latent channel (ours one a block), axes in fp32 for all latents, dropped ones "
        "too, and min/max at one bit, where we take mean ± mean distance. V stays fp16 in theirs, "
        "2-bit groups in ours: compare K."
    ),
    "palu": (
        "Half the latents in both. Theirs stacks the heads as more tokens: one 64 x 32 basis of "
        "all; ours sets them side by side as the paper does, 32 latents a head of one 64·heads "
        "wide basis in fp16, held a block (1.6 bits on 4 heads, 1.2 on 3, at 1280 tokens; less on "
        "longer ones). Where heads have something in common, ours at 2 bits has less error than "
        "theirs at 4 bits and the same bytes (K, not V of every layer); independent Gaussian heads "
        "have nothing. Theirs holds fp16 latents and a dense copy of K and V: above fp16."
    ),
    "agetiered": (
        "K: the same tiers and groups, the same error. V: theirs groups 32 tokens of a channel, "
        "ours 32 channels of a token (KIVI's way). Their count leaves out every scale and zero (1 "
        "bit), and it holds a raw copy beside the quantized one, 32 bits."
    ),
    "vecinfer": (
        "Codebooks of the same size, each by its own k-means on other text than it is measured on: "
        "within 2%. Theirs holds dense fp16 and the codebooks (fp32) in each cache, in neither "
        "count; ours shares one calibration file among all caches. 12-bit codebooks are left out: "
        "their trainer takes minutes."
    ),
    "nestedkv": (
        "Error counts evicted tokens as zeros; kept ones are exact. Same scores; theirs gives "
        "every head the same budget, ours lets heads compete as the paper does. Positions are in "
        "our count (0.03 bits) and not in theirs."
    ),
    "qfilters": (
        "Error counts evicted tokens as zeros. Theirs, without a calibrated filter, takes the main "
        "direction of the keys, so it keeps large keys, and 4 sinks; ours that of the last 32 "
        "queries. Theirs holds the kept tokens twice. The share of K's energy that is left is no "
        "measure of either."
    ),
}
NOT_THEIRS = {
    "fp16": "the exact cache",
    "mlx_quant": "mlx-lm's own",
    "outlier_kivi": "GEAR without L·R; theirs has it as gear_rank=0",
    "kcvt": "their gear calls its base KCVT and has groups of gear_group_size tokens",
    "per_token": "not one of its methods",
    "rabitq_extended": "one bit alone there",
    "adakv": "the name alone is the same: theirs gives heads different bits and evicts nothing",
    "commvq": "by its own words product codes without the commuting form, of keys before RoPE",
}
