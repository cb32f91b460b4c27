/* Products of int8 weights with tokens that are rounded to int8 here, for one instruction set, see lanes.h; of AVX-512 with
 * VBMI and VNNI.
 *
 *   x8 = nearest(x * 127 / max |x|), of each token, to even where two are equally near
 *   y  = sum(values * x8) * (scale of the row * max |x| / 127) + bias
 *
 * Sums are exact, in 32 bits, and this file is compiled without fused operations: all instruction sets give the same bits.
 *
 *   AVX-512   One permutation of bytes (vpermb) picks the inputs of 4 entries of 16 rows from the 64 of a block, and
 *             vpdpbusd multiplies and adds them. It takes one side without a sign: x8 + 128, so sums begin with
 *             -128 * sum(values).
 *   AVX2      vpshufb picks from 16 bytes, so it runs for each 16 inputs that a group of entries touches. vpmaddubsw would
 *             saturate, but not of |x8| and sign(values, x8): 2 * 127 * 127 < 2^15.
 *
 * A token with NaN or infinity has NaN in all outputs.
 *
 * A dense matrix is multiplied with tokens that are rounded to 16 bits, nearest(x * 32767 / max |x|), so that the rounding of
 * its own values alone is felt. A token is then 256 * upper + lower, two bytes, and two sums. */
#include "lanes.h"

#define ROWS NM_INT8_ROWS
#define BLOCK NM_INT8_BLOCK
#define GROUP (ROWS * NM_INT8_ENTRIES) /* values that are multiplied at a time */
#define MOST_GROUPS (BLOCK / NM_INT8_ENTRIES)
#define X_BYTES (1 << 18) /* of tokens that stay in a second-level cache */
#define MOST_TOKENS 64

#if NM_LEVEL == 2
#define TOKENS 8 /* whose sums registers hold */
#define ZERO 128 /* the byte of x8 = 0 */
#else
#define TOKENS 4
#define ZERO 0
#endif

/* What all tiles of a product share. */
typedef struct {
    nm_operands *o;
    const nm_int8 *a;
    int64_t parts, together; /* tokens that are rounded at a time */
    int64_t blocks, groups;  /* of a block */
    uint8_t base[MOST_GROUPS * NM_INT8_ENTRIES]; /* the first input that an entry may have */
} int8_job;

/* --------------------------------------------------------------------------------------------------- the tokens */

typedef uint32_t loose_bits __attribute__((may_alias));

/* `count` values from element `at` on, and zeros. */
INLINE void read_block(float *x, const nm_operands *o, int64_t at, int64_t count) {
    memset(x, 0, BLOCK * sizeof *x);
    read_floats(x, o->x, o->dtype, at, count);
}

typedef struct {
    int finite;
    float scale, inverse; /* max |x| / steps, NaN if it is not finite, and what values are multiplied with */
} rounding;

/* How a token is rounded to -steps .. steps. */
static rounding rounding_of(const nm_operands *o, int64_t token, float steps) {
    float x[BLOCK];
    uint32_t largest = 0; /* of all absolute values, as bits: those of infinity and NaN are the largest */
    for (int64_t d = 0; d < o->depth; d += BLOCK) {
        int64_t count = nm_min(BLOCK, o->depth - d);
        read_block(x, o, token * o->depth + d, count);
        for (int i = 0; i < BLOCK; i++) {
            uint32_t size = ((const loose_bits *)x)[i] & 0x7fffffff;
            largest = size > largest ? size : largest;
        }
    }
    float most, inverse;
    memcpy(&most, &largest, 4);
    int finite = largest < 0x7f800000;
    inverse = steps / most;
    if (!(inverse < 0x1.fffffep127f)) inverse = 0x1.fffffep127f; /* of tokens that are zero, or nearly */
    return (rounding){finite, finite ? most / steps : most - most, inverse};
}

/* The nearest integers of a block of a token, as bits; the lowest 16 are those of the integer. */
INLINE void round_block(uint32_t *bits, const nm_operands *o, int64_t token, int64_t d, rounding by) {
    float x[BLOCK];
    read_block(x, o, token * o->depth + d, nm_min(BLOCK, o->depth - d));
    if (!by.finite) memset(x, 0, sizeof x);
    for (int i = 0; i < BLOCK; i++) {
        float nearest = x[i] * by.inverse + 0x1.8p23f;
        memcpy(bits + i, &nearest, 4);
    }
}

/* Write the int8 values of a token to [blocks][BLOCK], of which one begins `step` bytes after the other; return their
 * scale. */
static float round_token(uint8_t *to, int64_t step, const nm_operands *o, int64_t token) {
    rounding by = rounding_of(o, token, 127);
    uint32_t bits[BLOCK];
    for (int64_t d = 0; d < o->depth; d += BLOCK, to += step) {
        round_block(bits, o, token, d, by);
        for (int i = 0; i < BLOCK; i++) to[i] = (uint8_t)(bits[i] ^ ZERO);
    }
    return by.scale;
}

/* ----------------------------------------------------------------------------------------------------- the sums */

#if NM_LEVEL == 2
typedef __m512i bytes;

/* The positions of a group's entries within a block. */
INLINE bytes load_index(const uint8_t *p, const int bits, const uint8_t *base) {
    int32_t of_entries;
    memcpy(&of_entries, base, 4);
    bytes first = _mm512_set1_epi32(of_entries), places;
    if (bits == 8) return _mm512_or_si512(first, _mm512_loadu_si512(p));
    if (bits == 4) {
        places = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
        places = _mm512_or_si512(places, _mm512_slli_epi16(places, 4));
    } else {
        const bytes shifts = _mm512_set1_epi64(0x2624222006040200);
        places = _mm512_multishift_epi64_epi8(shifts, _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
    }
    /* first | (places & mask) */
    return _mm512_ternarylogic_epi32(first, places, _mm512_set1_epi8((1 << bits) - 1), 0xf8);
}

/* The sums of `tiles` tiles of rows for `count` tokens, sums [tiles][count][ROWS]; x is [block][count][BLOCK]. */
INLINE void sum_tiles(const int tiles, const int count, const int bits, const int8_job *job, int64_t tile,
                      const uint8_t *x, int32_t *sums) {
    int64_t groups = job->groups, size = job->blocks * groups;
    const int8_t *values = job->a->values + tile * size * GROUP;
    const uint8_t *positions = job->a->positions + tile * size * GROUP * bits / 8;
    bytes sum[2][TOKENS];
    for (int k = 0; k < tiles; k++)
        for (int t = 0; t < count; t++) sum[k][t] = _mm512_loadu_si512(job->a->offset + (tile + k) * ROWS);
    for (int64_t b = 0; b < job->blocks; b++, x += count * BLOCK) {
        bytes inputs[TOKENS];
        for (int t = 0; t < count; t++) inputs[t] = _mm512_loadu_si512(x + t * BLOCK);
        for (int64_t g = 0; g < groups; g++, values += GROUP, positions += GROUP * bits / 8)
            for (int k = 0; k < tiles; k++) {
                bytes w = _mm512_loadu_si512(values + k * size * GROUP);
                bytes i = load_index(positions + k * size * GROUP * bits / 8, bits, job->base + g * NM_INT8_ENTRIES);
                for (int t = 0; t < count; t++)
                    sum[k][t] = _mm512_dpbusd_epi32(sum[k][t], _mm512_permutexvar_epi8(i, inputs[t]), w);
            }
    }
    for (int k = 0; k < tiles; k++)
        for (int t = 0; t < count; t++) _mm512_storeu_si512(sums + (k * count + t) * ROWS, sum[k][t]);
}
#elif NM_LEVEL == 1
typedef __m256i bytes; /* of 8 rows, half a tile */

INLINE bytes load_index(const uint8_t *p, const int bits, const uint8_t *base) {
    int32_t of_entries;
    memcpy(&of_entries, base, 4);
    bytes first = _mm256_set1_epi32(of_entries), places;
    if (bits == 8) return _mm256_or_si256(first, _mm256_loadu_si256((const bytes *)p));
    if (bits == 4) {
        places = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
        places = _mm256_or_si256(places, _mm256_slli_epi16(places, 4));
    } else {
        places = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
        places = _mm256_or_si256(places, _mm256_slli_epi32(places, 12));
        places = _mm256_or_si256(places, _mm256_slli_epi32(places, 6));
    }
    return _mm256_or_si256(first, _mm256_and_si256(places, _mm256_set1_epi8((1 << bits) - 1)));
}

INLINE void sum_tiles(const int tiles, const int count, const int bits, const int8_job *job, int64_t tile,
                      const uint8_t *x, int32_t *sums) {
    int64_t half = GROUP / 2;
    const int8_t *values = job->a->values + tile * job->blocks * job->groups * GROUP;
    const uint8_t *positions = job->a->positions + tile * job->blocks * job->groups * GROUP * bits / 8;
    bytes sum[2][TOKENS];
    (void)tiles;
    for (int h = 0; h < 2; h++)
        for (int t = 0; t < count; t++) sum[h][t] = _mm256_setzero_si256();
    for (int64_t b = 0; b < job->blocks; b++, x += count * BLOCK)
        for (int64_t g = 0; g < job->groups; g++) {
            const uint8_t *base = job->base + g * NM_INT8_ENTRIES;
            int64_t last = (base[NM_INT8_ENTRIES - 1] + job->a->m - 1) / 16;
            for (int h = 0; h < 2; h++, values += half, positions += half * bits / 8) {
                bytes i = load_index(positions, bits, base), w = _mm256_loadu_si256((const bytes *)values);
                bytes picked[TOKENS];
                for (int t = 0; t < count; t++) picked[t] = _mm256_setzero_si256();
                for (int64_t k = base[0] / 16; k <= last; k++) {
                    /* the lowest 4 bits of positions among these 16 inputs, and the highest bit of the others, which
                     * gives zero */
                    bytes at = _mm256_sub_epi8(i, _mm256_set1_epi8((char)(16 * k)));
                    at = _mm256_adds_epu8(at, _mm256_set1_epi8(0x70));
                    for (int t = 0; t < count; t++) {
                        const __m128i *inputs = (const __m128i *)(x + t * BLOCK + 16 * k);
                        bytes twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(inputs));
                        picked[t] = _mm256_or_si256(picked[t], _mm256_shuffle_epi8(twice, at));
                    }
                }
                for (int t = 0; t < count; t++) {
                    bytes size = _mm256_abs_epi8(picked[t]), signed_w = _mm256_sign_epi8(w, picked[t]);
                    bytes two = _mm256_maddubs_epi16(size, signed_w);
                    sum[h][t] = _mm256_add_epi32(sum[h][t], _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
                }
            }
        }
    for (int h = 0; h < 2; h++)
        for (int t = 0; t < count; t++) _mm256_storeu_si256((bytes *)(sums + t * ROWS + h * 8), sum[h][t]);
}
#else
INLINE void sum_tiles(const int tiles, const int count, const int bits, const int8_job *job, int64_t tile,
                      const uint8_t *x, int32_t *sums) {
    const int8_t *values = job->a->values + tile * job->blocks * job->groups * GROUP;
    const uint8_t *positions = job->a->positions + tile * job->blocks * job->groups * GROUP * bits / 8;
    (void)tiles;
    memset(sums, 0, (size_t)(count * ROWS) * 4);
    for (int64_t b = 0; b < job->blocks; b++, x += count * BLOCK)
        for (int64_t g = 0; g < job->groups; g++, values += GROUP, positions += GROUP * bits / 8)
            for (int e = 0; e < GROUP; e++) {
                int place = positions[e * bits / 8] >> e * bits % 8 & ((1 << bits) - 1);
                const int8_t *input = (const int8_t *)x + job->base[g * NM_INT8_ENTRIES + e % NM_INT8_ENTRIES] + place;
                for (int t = 0; t < count; t++) sums[t * ROWS + e / NM_INT8_ENTRIES] += values[e] * input[t * BLOCK];
            }
}
#endif

static void sum_of(int tiles, int count, const int8_job *job, int64_t tile, const uint8_t *x, int32_t *sums) {
/* One function for each number of tiles and tokens, and each size of positions. */
#define SUM(K, T)                                                                       \
    if (tiles == K && count == T) {                                                     \
        if (job->a->bits == 2) sum_tiles(K, T, 2, job, tile, x, sums);                  \
        else if (job->a->bits == 4) sum_tiles(K, T, 4, job, tile, x, sums);             \
        else sum_tiles(K, T, 8, job, tile, x, sums);                                    \
    }
    SUM(1, 1)
    SUM(1, 2)
    SUM(1, 3)
    SUM(1, 4)
#if NM_LEVEL == 2
    SUM(2, 1) /* one sum alone would wait for itself */
    SUM(2, 2)
    SUM(2, 3)
    SUM(2, 4)
    SUM(1, 8)
#endif
#undef SUM
}

/* -------------------------------------------------------------------------------------------------- the product */

/* Tokens that registers take of those that are left; no token is filled up. */
INLINE int take(int64_t left) { return left >= 8 && TOKENS == 8 ? 8 : left >= 4 ? 4 : (int)left; }

#if NM_LEVEL == 2
/* Write `rows` of 16 outputs from element `at` on; rounded as `narrow` rounds. */
INLINE void write_row(void *to, int32_t dtype, int64_t at, __m512 y, int64_t rows) {
    __mmask16 valid = (__mmask16)((1 << rows) - 1);
    if (dtype == NM_FLOAT32) {
        _mm512_mask_storeu_ps((float *)to + at, valid, y);
        return;
    }
    __m512i bits = _mm512_castps_si512(y), upper = _mm512_srli_epi32(bits, 16);
    __m512i half = _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    __m512i nearest = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
    nearest = _mm512_mask_or_epi32(nearest, nan, upper, _mm512_set1_epi32(0x40));
    _mm512_mask_cvtepi32_storeu_epi16((uint16_t *)to + at, valid, nearest);
}
#endif

/* Write the outputs of a tile, sums [count][ROWS]; `scales` are those of the tokens from `first` on. */
static void write_tile(const int8_job *job, int64_t tile, int64_t first, int count, const float *scales,
                       const int32_t *sums) {
    const nm_operands *o = job->o;
    int64_t row = tile * ROWS, rows = nm_min(ROWS, o->rows - row);
    float scale[ROWS] = {0}, bias[ROWS] = {0};
    memcpy(scale, job->a->scale + row, (size_t)rows * 4);
    if (o->bias) read_floats(bias, o->bias, o->dtype, row, rows);
    for (int t = 0; t < count; t++) {
        int64_t at = (first + t) * o->rows + row;
#if NM_LEVEL == 2
        __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + t * ROWS));
        __m512 of_both = _mm512_mul_ps(_mm512_loadu_ps(scale), _mm512_set1_ps(scales[t]));
        write_row(o->y, o->dtype, at, _mm512_add_ps(_mm512_mul_ps(sum, of_both), _mm512_loadu_ps(bias)), rows);
#else
        float y[ROWS];
        for (int r = 0; r < ROWS; r++) y[r] = (float)sums[t * ROWS + r] * (scale[r] * scales[t]) + bias[r];
        write_floats(o->y, o->dtype, at, y, rows);
#endif
    }
}

static void int8_task(int64_t begin, int64_t end, void *context) {
    const int8_job *job = context;
    nm_operands *o = job->o;
    int64_t tiles = nm_ceil(o->rows, ROWS), line = job->blocks * BLOCK, filled = -1;
    float scales[MOST_TOKENS];
    int32_t sums[2 * TOKENS * ROWS];
    uint8_t *x = (uint8_t *)scratch(nm_ceil(job->together * line, 4));
    if (!x) {
        o->failed = NM_NO_MEMORY;
        return;
    }
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item / job->parts * job->together, part = item % job->parts;
        int64_t valid = nm_min(job->together, o->tokens - first);
        if (filled != first)
            for (int64_t t = 0, count; t < valid; t += count) {
                count = take(valid - t);
                for (int64_t i = 0; i < count; i++)
                    scales[t + i] = round_token(x + t * line + i * BLOCK, count * BLOCK, o, first + t + i);
            }
        filled = first;
        int64_t last = tiles * (part + 1) / job->parts;
        for (int64_t tile = tiles * part / job->parts, wide; tile < last; tile += wide) {
            wide = TOKENS == 8 && valid <= 4 && tile + 2 <= last ? 2 : 1;
            for (int64_t t = 0, count; t < valid; t += count) {
                count = take(valid - t);
                sum_of((int)wide, (int)count, job, tile, x + t * line, sums);
                for (int64_t k = 0; k < wide; k++)
                    write_tile(job, tile + k, first + t, (int)count, scales + t, sums + k * count * ROWS);
            }
        }
    }
    free(x);
}

static void int8_linear(nm_operands *o, const nm_int8 *a) {
    if (!o->tokens) return;
    int64_t entries = a->n * (BLOCK / a->m), tiles = nm_ceil(o->rows, ROWS);
    int8_job job = {.o = o, .a = a, .blocks = nm_ceil(o->depth, BLOCK), .groups = nm_ceil(entries, NM_INT8_ENTRIES)};
    for (int64_t e = 0; e < job.groups * NM_INT8_ENTRIES; e++)
        job.base[e] = (uint8_t)(nm_min(e, entries - 1) / a->n * a->m); /* what fills up a group lies where its last entry is */
    int64_t fits = X_BYTES / (job.blocks * BLOCK) / TOKENS * TOKENS;
    job.together = nm_min(MOST_TOKENS, fits < TOKENS ? TOKENS : fits);
    /* A few tokens are no work for all threads: these share the rows. */
    int64_t items = nm_ceil(o->tokens, job.together);
    int64_t parts = items >= 8 * o->threads ? 1 : nm_min(tiles, nm_ceil(4 * o->threads, items));
    job.parts = o->threads > 1 ? parts : 1;
    nm_run(o->parallel, o->threads, items * job.parts, int8_task, &job);
}

/* ------------------------------------------------------------------------------------------- of a dense matrix */

typedef struct {
    nm_operands *o;
    const nm_rows *a;
    const uint8_t *x; /* [tokens][blocks][2][BLOCK]: the upper bytes + 128, and the lower ones */
    const float *scales;
} rows_job;

/* The sums of a row for `count` tokens: of its values times the 16-bit ones. */
INLINE void sum_row(const int count, const rows_job *job, int64_t row, int64_t first, int64_t *sums) {
    int64_t depth = job->o->depth, line = nm_ceil(depth, BLOCK) * 2 * BLOCK;
    const int8_t *w = job->a->values + row * depth;
    const uint8_t *x = job->x + first * line;
#if NM_LEVEL == 2
    __m512i upper[4], lower[4], own = _mm512_setzero_si512();
    for (int t = 0; t < count; t++) upper[t] = lower[t] = own;
    for (int64_t d = 0; d < depth; d += BLOCK, x += 2 * BLOCK) {
        __mmask64 valid = ~0ULL >> (BLOCK - nm_min(BLOCK, depth - d));
        __m512i values = _mm512_maskz_loadu_epi8(valid, w + d);
        own = _mm512_dpbusd_epi32(own, _mm512_set1_epi8(1), values);
        for (int t = 0; t < count; t++) {
            upper[t] = _mm512_dpbusd_epi32(upper[t], _mm512_loadu_si512(x + t * line), values);
            lower[t] = _mm512_dpbusd_epi32(lower[t], _mm512_loadu_si512(x + t * line + BLOCK), values);
        }
    }
    for (int t = 0; t < count; t++) {
        __m512i without = _mm512_sub_epi32(upper[t], _mm512_slli_epi32(own, 7)); /* of the 128 */
        sums[t] = 256 * (int64_t)_mm512_reduce_add_epi32(without) + _mm512_reduce_add_epi32(lower[t]);
    }
#else
    for (int t = 0; t < count; t++) {
        int32_t upper = 0, lower = 0;
        for (int64_t d = 0; d < depth; d += BLOCK) {
            const uint8_t *block = x + t * line + 2 * d;
            for (int64_t i = 0; i < nm_min(BLOCK, depth - d); i++) {
                upper += w[d + i] * (block[i] - 128);
                lower += w[d + i] * block[BLOCK + i];
            }
        }
        sums[t] = 256 * (int64_t)upper + lower;
    }
#endif
}

static void rows_task(int64_t begin, int64_t end, void *context) {
    const rows_job *job = context;
    nm_operands *o = job->o;
    int64_t sums[4];
    for (int64_t item = begin; item < end; item++)
        for (int64_t t = 0, count; t < o->tokens; t += count) {
            count = o->tokens - t >= 4 ? 4 : 1;
            for (int64_t row = item * ROWS; row < nm_min(item * ROWS + ROWS, o->rows); row++) {
                if (count == 4) sum_row(4, job, row, t, sums);
                else sum_row(1, job, row, t, sums);
                float bias = 0;
                if (o->bias) read_floats(&bias, o->bias, o->dtype, row, 1);
                for (int64_t i = 0; i < count; i++) {
                    float y = (float)sums[i] * (job->a->scale[row] * job->scales[t + i]) + bias;
                    write_floats(o->y, o->dtype, (t + i) * o->rows + row, &y, 1);
                }
            }
        }
}

static void rows_linear(nm_operands *o, const nm_rows *a) {
    int64_t line = nm_ceil(o->depth, BLOCK) * 2 * BLOCK;
    float *scales = scratch(o->tokens + o->tokens * line / 4);
    if (!scales) {
        o->failed = NM_NO_MEMORY;
        return;
    }
    uint8_t *x = (uint8_t *)(scales + o->tokens);
    for (int64_t token = 0; token < o->tokens; token++) {
        rounding by = rounding_of(o, token, 32767);
        uint8_t *to = x + token * line;
        uint32_t bits[BLOCK];
        for (int64_t d = 0; d < o->depth; d += BLOCK, to += 2 * BLOCK) {
            round_block(bits, o, token, d, by);
            for (int i = 0; i < BLOCK; i++) {
                to[i] = (uint8_t)(bits[i] >> 8 ^ 128);
                to[BLOCK + i] = (uint8_t)bits[i];
            }
        }
        scales[token] = by.scale;
    }
    rows_job job = {o, a, x, scales};
    nm_run(o->parallel, o->threads, nm_ceil(o->rows, ROWS), rows_task, &job);
    free(scales);
}

const nm_int8_kernels LEVEL(nm_int8) = {int8_linear, rows_linear};
