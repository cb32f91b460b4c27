/* Passes over a weight and its mask. BAME: evidence is gathered from a dense gradient, the best exchange of every block is
 * found, and the chosen ones are made. SR-STE: pruned entries decay, and the largest entries are kept. Bi-Mask: so are, for
 * the backward mask, the largest entries of blocks along the rows. Compiled once for each instruction set, without
 * contraction: a product and a sum are rounded apart, as by the torch code that these passes replace, so that both give
 * the same bits.
 *
 * U (`value`) and V (`square`) are float32 of the weight's shape; all tensors are row-major. `bits` has a byte for each
 * entry, whose lowest bit is set where the forward mask keeps it. */
#include <math.h>

#include "lanes.h"

enum { CHUNK = 1 << 14 };    /* entries of a unit of work */
enum { BLOCKS = 64 };        /* blocks of a unit of work; a multiple of 8 */
enum { LONGEST_BLOCK = 32 }; /* entries of a block */

/* The bits of a tensor's entries, whatever their type. */
typedef uint32_t __attribute__((may_alias)) word;
typedef uint16_t __attribute__((may_alias)) half_word;

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* float16 to float32, exactly. */
INLINE float widen_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13); /* infinity, NaN */
    float value = (float)magnitude * 0x1p-24f; /* a subnormal number */
    if (magnitude >= 0x400) value = from_bits((magnitude << 13) + ((127 - 15) << 23));
    return from_bits(bits_of(value) | sign);
}

/* float32 to float16, to nearest even; NaN stays NaN. */
INLINE uint16_t narrow_half(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds beyond the largest */
    if (magnitude < 0x38800000) {                                  /* subnormal: the sum rounds to units of 2^-24 */
        float rounded = from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of(rounded) - 0x3f000000));
    }
    uint32_t rounded = magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | rounded >> 13);
}

INLINE float read_entry(const void *from, int32_t dtype, int64_t at) {
    if (dtype == NM_FLOAT32) return ((const float *)from)[at];
    uint16_t half = ((const half_word *)from)[at];
    return dtype == NM_BFLOAT16 ? widen(half) : widen_half(half);
}

INLINE void write_entry(void *to, int32_t dtype, int64_t at, float value) {
    if (dtype == NM_FLOAT32)
        ((float *)to)[at] = value;
    else
        ((half_word *)to)[at] = dtype == NM_BFLOAT16 ? narrow(value) : narrow_half(value);
}

/* Set an entry to +0 unless it is kept; its other bits do not change. */
INLINE void mask_entry(void *to, int32_t dtype, int64_t at, int keep) {
    if (dtype == NM_FLOAT32)
        ((word *)to)[at] &= -(uint32_t)keep;
    else
        ((half_word *)to)[at] &= (uint16_t)-keep;
}

/* Calls a function with the dtype as a constant: the compiler makes one loop for each. */
#define EACH_DTYPE(dtype, call)        \
    do {                               \
        if ((dtype) == NM_FLOAT32) {   \
            enum { DTYPE = NM_FLOAT32 };  \
            call;                      \
        } else if ((dtype) == NM_BFLOAT16) { \
            enum { DTYPE = NM_BFLOAT16 }; \
            call;                      \
        } else {                       \
            enum { DTYPE = NM_FLOAT16 };  \
            call;                      \
        }                              \
    } while (0)

/* ------------------------------------------------------------------------------ sizes of kept and of pruned entries */

typedef struct {
    const nm_evolution *e;
    double *sums; /* of each chunk: of the kept entries, of the pruned ones */
    int64_t *counts;
} size_job;

INLINE void size_of_chunk(size_job *job, int64_t chunk, const int32_t dtype) {
    const nm_evolution *e = job->e;
    int64_t begin = chunk * CHUNK, end = nm_min(begin + CHUNK, e->entries), i = begin, count = 0;
    double kept[8] = {0}, pruned[8] = {0}, *sums = job->sums + 2 * chunk;
    for (; i + 8 <= end; i += 8)
        for (int64_t k = 0; k < 8; k++) {
            int keep = e->bits[i + k] & 1;
            double value = (double)read_entry(e->weight, dtype, i + k);
            double square = value * value;
            /* Not multiplied by the bit: an infinite entry would make the other sum NaN. */
            kept[k] += keep ? square : 0.0;
            pruned[k] += keep ? 0.0 : square;
            count += keep;
        }
    for (int64_t k = 0; i < end; i++, k++) {
        int keep = e->bits[i] & 1;
        double value = (double)read_entry(e->weight, dtype, i);
        *(keep ? &kept[k] : &pruned[k]) += value * value;
        count += keep;
    }
    sums[0] = sums[1] = 0;
    for (int64_t k = 0; k < 8; k++) {
        sums[0] += kept[k];
        sums[1] += pruned[k];
    }
    job->counts[chunk] = count;
}

static void size_task(int64_t begin, int64_t end, void *context) {
    size_job *job = context;
    for (int64_t chunk = begin; chunk < end; chunk++)
        EACH_DTYPE(job->e->dtype, size_of_chunk(job, chunk, DTYPE));
}

/* The sums of the squares of kept and of pruned entries, and the number of the kept ones. */
static void sizes(nm_evolution *e) {
    int64_t chunks = nm_ceil(e->entries, CHUNK);
    size_job job = {.e = e};
    e->kept_square = e->pruned_square = 0;
    e->kept = 0;
    job.sums = malloc((size_t)(chunks + 1) * 2 * sizeof(double));
    job.counts = malloc((size_t)(chunks + 1) * sizeof(int64_t));
    if (job.sums && job.counts) {
        nm_run(e->parallel, e->threads, chunks, size_task, &job);
        /* Chunk by chunk, so that the number of threads changes no bit. */
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            e->kept_square += job.sums[2 * chunk];
            e->pruned_square += job.sums[2 * chunk + 1];
            e->kept += job.counts[chunk];
        }
    } else {
        e->failed = NM_NO_MEMORY;
    }
    free(job.sums);
    free(job.counts);
}

/* ---------------------------------------------------------------------------------------------------------------- mask */

INLINE void mask_range(const nm_evolution *e, void *to, int64_t begin, int64_t end, const int32_t dtype) {
    for (int64_t i = begin; i < end; i++) mask_entry(to, dtype, i, e->bits[i] & 1);
}

static void mask_task(int64_t begin, int64_t end, void *context) {
    const nm_evolution *e = context;
    EACH_DTYPE(e->dtype, mask_range(e, e->weight, begin * CHUNK, nm_min(end * CHUNK, e->entries), DTYPE));
}

static void mask(nm_evolution *e) { nm_run(e->parallel, e->threads, nm_ceil(e->entries, CHUNK), mask_task, e); }

/* ----------------------------------------------------------------------------------------------------------- evidence */

INLINE void gather_range(const nm_evolution *e, int64_t begin, int64_t end, const int32_t dtype, const int has_grad) {
    const uint8_t *restrict bits = e->bits;
    const float *restrict old_value = e->old_value, *restrict old_square = e->old_square;
    float *restrict value = e->value, *restrict square = e->square;
    const void *restrict grad = e->grad;
    float ratio = e->own_ratio, unit = e->unit, limit = e->limit, size = e->size, epsilon = e->epsilon;
    float decay = (float)e->decay, take = (float)(1 - e->decay), correction = e->correction;
    for (int64_t i = begin; i < end; i++) {
        int keep = bits[i] & 1;
        float v = old_square[i], u = old_value[i] * unit;
        float own = v * ratio;
        v = keep ? own : v;
        u = keep ? 0.0f : u;
        u = fabsf(u) > limit ? 0.0f : u;
        if (has_grad) {
            float g = read_entry(grad, dtype, i);
            float squared = g * g;
            squared = squared * take;
            v = v * decay;
            v = v + squared;
            float root = 1.0f / sqrtf(v / correction);
            root = 1.0f / root; /* as torch has it from rsqrt */
            float step = 1.0f / (root + epsilon);
            step = step * g;
            step = step * size;
            u = u - step;
            u = keep ? 0.0f : u;
        }
        value[i] = u;
        square[i] = v;
    }
}

static void gather_task(int64_t begin, int64_t end, void *context) {
    const nm_evolution *e = context;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t first = chunk * CHUNK, last = nm_min(first + CHUNK, e->entries);
        if (e->grad) {
            EACH_DTYPE(e->dtype, gather_range(e, first, last, DTYPE, 1));
            EACH_DTYPE(e->dtype, mask_range(e, e->grad, first, last, DTYPE));
        } else {
            gather_range(e, first, last, NM_FLOAT32, 0);
        }
    }
}

static void gather(nm_evolution *e) { nm_run(e->parallel, e->threads, nm_ceil(e->entries, CHUNK), gather_task, e); }

/* What is kept of the evidence until the next step: a tensor of its own is written whole, of the optimizer's state only
 * the pruned entries. */
static void keep_task(int64_t begin, int64_t end, void *context) {
    const nm_evolution *e = context;
    const uint8_t *restrict bits = e->bits;
    const float *restrict value = e->value, *restrict square = e->square;
    float *restrict to_value = e->old_value, *restrict to_square = e->old_square;
    float share = 1.0f / e->unit; /* exact: a power of two */
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t first = chunk * CHUNK, last = nm_min(first + CHUNK, e->entries);
        if (e->whole_value)
            for (int64_t i = first; i < last; i++) to_value[i] = value[i] * share;
        else
            for (int64_t i = first; i < last; i++) to_value[i] = bits[i] & 1 ? to_value[i] : value[i] * share;
        if (e->whole_square)
            for (int64_t i = first; i < last; i++) to_square[i] = square[i];
        else
            for (int64_t i = first; i < last; i++) to_square[i] = bits[i] & 1 ? to_square[i] : square[i];
    }
}

static void keep(nm_evolution *e) { nm_run(e->parallel, e->threads, nm_ceil(e->entries, CHUNK), keep_task, e); }

/* ---------------------------------------------------------------------------------------------------------- exchanges */

/* Where the first entry of a block lies. */
INLINE int64_t block_at(const nm_evolution *e, int64_t block) {
    if (e->in_line) return block * e->m; /* without the divisions */
    int64_t row = block / e->blocks_per_row, column = block % e->blocks_per_row;
    return row / e->taps * e->out_stride + row % e->taps * e->tap_stride + column * e->m * e->in_stride;
}

/* The kept entry of the least |W|, the pruned one of the largest |U|, and by how much it is larger, of blocks begin .. end.
 * Pruned entries of the weight become +0. Without the sign, floats are ordered as integers are, NaN beyond infinity. */
INLINE void best_of(const nm_evolution *e, int64_t begin, int64_t end, const int32_t dtype, const int64_t m,
                    const int64_t stride) {
    for (int64_t block = begin; block < end; block++) {
        int64_t at = block_at(e, block);
        const uint8_t *restrict bits = e->bits + at;
        const float *restrict value = e->value + at;
        void *restrict weight = (uint8_t *)e->weight + at * (dtype == NM_FLOAT32 ? 4 : 2);
        uint32_t kept[LONGEST_BLOCK], pruned[LONGEST_BLOCK], lowest = UINT32_MAX, highest = 0, largest = 0;
        for (int64_t k = 0; k < m; k++) {
            uint32_t keep = bits[k * stride] & 1;
            uint32_t w = bits_of(read_entry(weight, dtype, k * stride)) & 0x7fffffff;
            uint32_t u = bits_of(value[k * stride]) & 0x7fffffff;
            uint32_t score = keep ? w : u;
            kept[k] = keep ? w : UINT32_MAX;
            pruned[k] = keep ? 0 : u + 1; /* 0 is no pruned entry */
            largest = score > largest ? score : largest;
            lowest = kept[k] < lowest ? kept[k] : lowest;
            highest = pruned[k] > highest ? pruned[k] : highest;
        }
        for (int64_t k = 0; k < m; k++) mask_entry(weight, dtype, k * stride, bits[k * stride] & 1);
        uint32_t least_ones = 0, largest_ones = 0; /* a bit for each entry */
        for (int64_t k = 0; k < m; k++) {
            least_ones |= kept[k] == lowest ? 1u << k : 0;
            largest_ones |= pruned[k] == highest ? 1u << k : 0;
        }
        int valid = largest <= 0x7f800000; /* no NaN */
        int better = valid && lowest != UINT32_MAX && highest && highest - 1 > lowest;
        e->gain[block] = better ? from_bits(highest - 1) - from_bits(lowest) : 0.0f;
        /* Of equal ones the first. */
        e->pruned[block] = (uint8_t)__builtin_ctz(least_ones);
        e->regrown[block] = (uint8_t)__builtin_ctz(largest_ones);
    }
}

#if NM_LEVEL >= 2
/* The least or the largest of each m lanes, in all of them: m is 2, 4, 8 or 16. */
#define OF_SEGMENTS(of, v, m)                                                 \
    do {                                                                      \
        v = of(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));                    \
        if ((m) > 2) v = of(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));       \
        if ((m) > 4) v = of(v, _mm512_shuffle_i32x4(v, v, 0xb1));             \
        if ((m) > 8) v = of(v, _mm512_shuffle_i32x4(v, v, 0x4e));             \
    } while (0)

/* best_of() for float32 blocks that follow each other, as many as fit a register at a time. */
INLINE void best_of_registers(const nm_evolution *e, int64_t begin, int64_t end, const int64_t m) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
    const __m512i most = _mm512_set1_epi32(-1), one = _mm512_set1_epi32(1);
    int64_t together = 16 / m, block = begin;
    for (; block + together <= end; block += together) {
        float *weight = (float *)e->weight + block * m;
        __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(e->bits + block * m)));
        __mmask16 keep = _mm512_test_epi32_mask(bits, one), prune = (__mmask16)~keep;
        __m512i own = _mm512_loadu_si512(weight);
        __m512i w = _mm512_and_si512(own, magnitude);
        __m512i u = _mm512_and_si512(_mm512_loadu_si512(e->value + block * m), magnitude);
        unsigned invalid = _mm512_cmpgt_epu32_mask(_mm512_mask_mov_epi32(u, keep, w), infinity);
        __m512i kept = _mm512_mask_mov_epi32(most, keep, w);
        __m512i pruned = _mm512_maskz_add_epi32(prune, u, one);
        __m512i lowest = kept, highest = pruned;
        OF_SEGMENTS(_mm512_min_epu32, lowest, m);
        OF_SEGMENTS(_mm512_max_epu32, highest, m);
        unsigned least = _mm512_cmpeq_epu32_mask(kept, lowest), largest = _mm512_cmpeq_epu32_mask(pruned, highest);
        __m512i best = _mm512_mask_sub_epi32(_mm512_setzero_si512(), _mm512_test_epi32_mask(highest, most), highest, one);
        /* Where no entry is kept, nothing is larger than the lowest. */
        unsigned better = _mm512_cmpgt_epu32_mask(best, lowest);
        __m512 gain = _mm512_maskz_sub_ps((__mmask16)better, _mm512_castsi512_ps(best), _mm512_castsi512_ps(lowest));
        _mm512_storeu_si512(weight, _mm512_maskz_mov_epi32(keep, own));
        float gains[16];
        _mm512_storeu_ps(gains, gain);
        for (int64_t k = 0; k < together; k++) {
            unsigned segment = ((1u << m) - 1) << k * m;
            e->gain[block + k] = invalid & segment ? 0.0f : gains[k * m];
            e->pruned[block + k] = (uint8_t)(__builtin_ctz(least & segment) - k * m);
            e->regrown[block + k] = (uint8_t)(__builtin_ctz(largest & segment) - k * m);
        }
    }
    best_of(e, block, end, NM_FLOAT32, m, 1);
}
#endif

INLINE void best_of_blocks(const nm_evolution *e, int64_t begin, int64_t end, const int32_t dtype) {
#if NM_LEVEL >= 2
    if (dtype == NM_FLOAT32 && e->in_line) {
        if (e->m == 2) return best_of_registers(e, begin, end, 2);
        if (e->m == 4) return best_of_registers(e, begin, end, 4);
        if (e->m == 8) return best_of_registers(e, begin, end, 8);
        if (e->m == 16) return best_of_registers(e, begin, end, 16);
    }
#endif
    best_of(e, begin, end, dtype, e->m, e->in_stride);
}

static void best_task(int64_t begin, int64_t end, void *context) {
    const nm_evolution *e = context;
    int64_t unit = BLOCKS, last = nm_min(end * unit, e->blocks);
    EACH_DTYPE(e->dtype, best_of_blocks(e, begin * unit, last, DTYPE));
}

/* The gain of a block as an integer of the same order; 0 for no candidate. */
INLINE uint32_t rank_of(const nm_evolution *e, int64_t block) {
    float gain = e->gain[block];
    if (!(gain > 0) || gain > 0x1.fffffep127f) return 0;
    float damped = gain / (1.0f + (float)e->oscillation[block]);
    return bits_of(damped) + 1;
}

/* Choose the blocks of the largest gain, damped by their oscillation, as many as the budget allows. Of equal ones at the
 * border the first are chosen. Write `chosen`, `better` and `changed`.
 *
 * The rank of the last that the budget allows is found digit by digit, from counts of the digits of all candidates. */
static void choose(nm_evolution *e) {
    enum { DIGIT = 11, DIGITS = 1 << DIGIT };
    static const int shifts[] = {22, 11, 0};
    int64_t candidates = 0;
    e->better = 0;
    for (int64_t block = 0; block < e->blocks; block++) {
        uint32_t rank = rank_of(e, block);
        e->better += e->gain[block] > 0;
        candidates += rank > 0;
        e->chosen[block] = rank > 0;
    }
    e->changed = nm_min(candidates, e->budget);
    if (candidates <= e->budget) return;
    uint32_t border = 0, known = 0; /* the border's digits so far, and their place */
    int64_t left = e->budget;       /* how many of the blocks with these digits may be chosen */
    if (left == 0) {
        memset(e->chosen, 0, (size_t)e->blocks);
        return;
    }
    for (int digit = 0; digit < 3; digit++) {
        int64_t counts[DIGITS] = {0};
        for (int64_t block = 0; block < e->blocks; block++) {
            uint32_t rank = rank_of(e, block);
            if (rank && (rank & known) == border) counts[rank >> shifts[digit] & (DIGITS - 1)]++;
        }
        int64_t value = DIGITS - 1;
        while (counts[value] < left) left -= counts[value--];
        border |= (uint32_t)value << shifts[digit];
        known |= (uint32_t)(DIGITS - 1) << shifts[digit];
    }
    for (int64_t block = 0; block < e->blocks; block++) {
        uint32_t rank = rank_of(e, block);
        e->chosen[block] = rank > border || (rank == border && left-- > 0);
    }
}

INLINE void exchange_range(const nm_evolution *e, int64_t begin, int64_t end, const int32_t dtype) {
    for (int64_t block = begin; block < end; block++) {
        if (!e->chosen[block]) continue;
        int64_t at = block_at(e, block);
        int64_t out = at + e->pruned[block] * e->in_stride, in = at + e->regrown[block] * e->in_stride;
        float mean_square = e->square[in] / e->correction;
        for (int64_t s = 0; s < e->states; s++) {
            write_entry(e->state[s], e->state_dtype[s], out, 0.0f);
            write_entry(e->state[s], e->state_dtype[s], in, e->state_is_square[s] ? mean_square * e->moment : 0.0f);
        }
        write_entry(e->weight, dtype, out, 0.0f);
        write_entry(e->weight, dtype, in, e->value[in]);
        e->value[in] = 0.0f;
        if (e->grad) write_entry(e->grad, dtype, out, 0.0f);
        e->bits[out] &= (uint8_t)~1;
        e->bits[in] |= 1;
        uint8_t *bits_out = e->exchanged + out / 8, *bits_in = e->exchanged + in / 8;
        int again = (*bits_out >> (out % 8) | *bits_in >> (in % 8)) & 1;
        if (again && e->oscillation[block] < 255) e->oscillation[block]++;
        *bits_out |= (uint8_t)(1 << (out % 8));
        *bits_in |= (uint8_t)(1 << (in % 8));
    }
}

static void exchange_task(int64_t begin, int64_t end, void *context) {
    const nm_evolution *e = context;
    int64_t unit = BLOCKS, last = nm_min(end * unit, e->blocks);
    EACH_DTYPE(e->dtype, exchange_range(e, begin * unit, last, DTYPE));
}

static void exchange(nm_evolution *e) {
    int64_t units = nm_ceil(e->blocks, BLOCKS);
    e->gain = malloc((size_t)e->blocks * (sizeof *e->gain + 3) + 1);
    if (!e->gain) {
        e->failed = NM_NO_MEMORY;
        return;
    }
    e->pruned = (uint8_t *)(e->gain + e->blocks);
    e->regrown = e->pruned + e->blocks;
    e->chosen = e->regrown + e->blocks;
    nm_run(e->parallel, e->threads, units, best_task, e);
    choose(e);
    /* Where blocks lie one after another, those of one unit of work share no byte of `exchanged` with another's. */
    nm_run(e->parallel, e->in_line ? e->threads : 1, units, exchange_task, e);
    free(e->gain);
}

/* ---------------------------------------------------------------------------------------------- the decay of pruned entries */

INLINE void decay_range(const nm_evolution *e, int64_t begin, int64_t end, const int32_t dtype) {
    const uint8_t *restrict bits = e->bits;
    const void *restrict weight = e->weight;
    void *restrict grad = e->grad;
    float size = e->size;
    for (int64_t i = begin; i < end; i++) {
        float pruned = bits[i] & 1 ? 0.0f : read_entry(weight, dtype, i);
        float decay = pruned * size;
        write_entry(grad, dtype, i, read_entry(grad, dtype, i) + decay);
    }
}

static void decay_task(int64_t begin, int64_t end, void *context) {
    const nm_evolution *e = context;
    EACH_DTYPE(e->dtype, decay_range(e, begin * CHUNK, nm_min(end * CHUNK, e->entries), DTYPE));
}

static void decay(nm_evolution *e) { nm_run(e->parallel, e->threads, nm_ceil(e->entries, CHUNK), decay_task, e); }

/* ---------------------------------------------------------------------------------------------------------- the largest */

/* An entry as an integer that orders magnitudes, and NaN below all numbers; 0 is left for entries that were taken. */
INLINE uint32_t magnitude_rank(float value) {
    uint32_t magnitude = bits_of(value) & 0x7fffffff;
    return magnitude > 0x7f800000 ? 1 : magnitude + 2;
}

/* Set the bits of the n largest entries of blocks begin .. end, of equal ones those of the first; clear the others.
 * Returns how many bits that changed. */
INLINE int64_t largest_of(const nm_evolution *e, int64_t begin, int64_t end, const int32_t dtype) {
    int64_t m = e->m, stride = e->in_stride, changed = 0;
    for (int64_t block = begin; block < end; block++) {
        int64_t at = block_at(e, block);
        uint32_t ranks[LONGEST_BLOCK];
        uint8_t kept[LONGEST_BLOCK] = {0};
        for (int64_t k = 0; k < m; k++) ranks[k] = magnitude_rank(read_entry(e->weight, dtype, at + k * stride));
        for (int64_t taken = 0; taken < e->n; taken++) {
            int64_t largest = 0;
            for (int64_t k = 1; k < m; k++) largest = ranks[k] > ranks[largest] ? k : largest;
            ranks[largest] = 0;
            kept[largest] = 1;
        }
        for (int64_t k = 0; k < m; k++) {
            uint8_t *bits = e->bits + at + k * stride;
            changed += (*bits & 1) != kept[k];
            *bits = (uint8_t)((*bits & ~1) | kept[k]);
        }
    }
    return changed;
}

#if NM_LEVEL >= 2
/* The same for float32 blocks that follow each other, as many as fit a register at a time. */
INLINE int64_t largest_of_registers(const nm_evolution *e, int64_t begin, int64_t end, const int64_t m) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
    const __m512i one = _mm512_set1_epi32(1);
    int64_t together = 16 / m, block = begin, changed = 0;
    for (; block + together <= end; block += together) {
        __m512i ranks = _mm512_and_si512(_mm512_loadu_si512((const float *)e->weight + block * m), magnitude);
        __mmask16 numbers = _mm512_cmple_epu32_mask(ranks, infinity);
        ranks = _mm512_mask_add_epi32(one, numbers, ranks, _mm512_set1_epi32(2));
        unsigned kept = 0;
        for (int64_t taken = 0; taken < e->n; taken++) {
            __m512i most = ranks;
            OF_SEGMENTS(_mm512_max_epu32, most, m);
            unsigned equal = _mm512_cmpeq_epu32_mask(ranks, most), first = 0;
            for (int64_t k = 0; k < together; k++) {
                unsigned segment = equal & ((1u << m) - 1) << k * m;
                first |= segment & -segment;
            }
            kept |= first;
            ranks = _mm512_mask_mov_epi32(ranks, (__mmask16)first, _mm512_setzero_si512());
        }
        uint8_t *bits = e->bits + block * m;
        __m128i old = _mm_loadu_si128((const __m128i *)bits), lowest = _mm_set1_epi8(1);
        __m128i found = _mm_maskz_mov_epi8((__mmask16)kept, lowest);
        changed += __builtin_popcount(kept ^ _mm_test_epi8_mask(old, lowest));
        _mm_storeu_si128((__m128i *)bits, _mm_or_si128(_mm_andnot_si128(lowest, old), found));
    }
    return changed + largest_of(e, block, end, NM_FLOAT32);
}
#endif

INLINE int64_t largest_of_blocks(const nm_evolution *e, int64_t begin, int64_t end, const int32_t dtype) {
#if NM_LEVEL >= 2
    if (dtype == NM_FLOAT32 && e->in_line) {
        if (e->m == 2) return largest_of_registers(e, begin, end, 2);
        if (e->m == 4) return largest_of_registers(e, begin, end, 4);
        if (e->m == 8) return largest_of_registers(e, begin, end, 8);
        if (e->m == 16) return largest_of_registers(e, begin, end, 16);
    }
#endif
    return largest_of(e, begin, end, dtype);
}

static void largest_task(int64_t begin, int64_t end, void *context) {
    nm_evolution *e = context;
    int64_t unit = BLOCKS, last = nm_min(end * unit, e->blocks), changed = 0;
    EACH_DTYPE(e->dtype, changed = largest_of_blocks(e, begin * unit, last, DTYPE));
    __atomic_fetch_add(&e->changed, changed, __ATOMIC_RELAXED);
}

static void largest(nm_evolution *e) {
    e->changed = 0;
    nm_run(e->parallel, e->threads, nm_ceil(e->blocks, BLOCKS), largest_task, e);
}

/* ------------------------------------------------------------------------------------------- the largest of columns */

enum { BACKWARD = 2 };   /* the bit of the backward mask */
enum { TOGETHER = 16 };  /* columns of which the ranks are in registers */
enum { STRIPE = 1024 };  /* columns of a unit of work: m rows of weights and bits stay in the cache */

/* Among the m rows of a block and for each of `width` columns: set the backward bits of the n largest entries that the
 * forward mask keeps, of equal ones those of the first rows, and clear the others. A pruned entry counts as a zero, as
 * in W_F, so that it may take the place of a kept zero; it is not kept then. */
INLINE void largest_of_few_columns(const nm_evolution *e, const int64_t *order, int64_t first, int64_t width, const int32_t dtype) {
    int64_t m = e->m;
    uint32_t ranks[LONGEST_BLOCK][TOGETHER] = {{0}}, kept[LONGEST_BLOCK][TOGETHER] = {{0}};
    for (int64_t row = 0; row < m; row++) {
        int64_t at = order[row] * e->columns + first;
        for (int64_t column = 0; column < width; column++) {
            uint32_t rank = magnitude_rank(read_entry(e->weight, dtype, at + column));
            ranks[row][column] = e->bits[at + column] & 1 ? rank : magnitude_rank(0.0f);
        }
    }
    for (int64_t taken = 0; taken < e->n; taken++) {
        uint32_t most[TOGETHER] = {0}, place[TOGETHER] = {0};
        for (int64_t row = 0; row < m; row++)
            for (int64_t column = 0; column < TOGETHER; column++) {
                uint32_t rank = ranks[row][column];
                place[column] = rank > most[column] ? (uint32_t)row : place[column];
                most[column] = rank > most[column] ? rank : most[column];
            }
        for (int64_t row = 0; row < m; row++)
            for (int64_t column = 0; column < TOGETHER; column++) {
                uint32_t is_largest = place[column] == (uint32_t)row;
                kept[row][column] |= is_largest;
                ranks[row][column] = is_largest ? 0 : ranks[row][column];
            }
    }
    for (int64_t row = 0; row < m; row++) {
        uint8_t *bits = e->bits + order[row] * e->columns + first;
        for (int64_t column = 0; column < width; column++) {
            uint8_t is_kept = (uint8_t)(kept[row][column] & bits[column]); /* bit 0 is that of the forward mask */
            bits[column] = (uint8_t)((bits[column] & ~BACKWARD) | is_kept * BACKWARD);
        }
    }
}

INLINE void largest_of_stripe(const nm_evolution *e, const int64_t *order, int64_t begin, int64_t end, const int32_t dtype) {
    int64_t first = begin;
    for (; first + TOGETHER <= end; first += TOGETHER) largest_of_few_columns(e, order, first, TOGETHER, dtype);
    if (first < end) largest_of_few_columns(e, order, first, end - first, dtype);
}

static void largest_of_columns_task(int64_t begin, int64_t end, void *context) {
    const nm_evolution *e = context;
    int64_t stripes = nm_ceil(e->columns, STRIPE);
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t *order = e->order + unit / stripes * e->m;
        int64_t first = unit % stripes * STRIPE, last = nm_min(first + STRIPE, e->columns);
        EACH_DTYPE(e->dtype, largest_of_stripe(e, order, first, last, DTYPE));
    }
}

static void largest_of_columns(nm_evolution *e) {
    int64_t blocks = e->entries / e->columns / e->m;
    nm_run(e->parallel, e->threads, blocks * nm_ceil(e->columns, STRIPE), largest_of_columns_task, e);
}

const nm_pass LEVEL(nm_evolve)[] = {
    [NM_SIZES] = sizes,
    [NM_GATHER] = gather,
    [NM_EXCHANGE] = exchange,
    [NM_KEEP] = keep,
    [NM_MASK] = mask,
    [NM_DECAY] = decay,
    [NM_LARGEST] = largest,
    [NM_LARGEST_OF_COLUMNS] = largest_of_columns,
};
