/* The products of bfloat16 matrices on CPUs with AVX512_BF16, whose vdpbf16ps multiplies two pairs of bfloat16 values and
 * adds both products to a sum in float32. What is a pair:
 *
 *   permute_linear           two nonzeros of a row in one block of 32 inputs, see the paired layout in nm.h
 *   permute_sampled          two tokens: a permutation picks the same input of both
 *   csr_linear, csr_matmul   two entries of a row
 *   csr_sampled              two tokens
 *
 * The instruction takes denormal numbers as zeros. Nothing is multiplied with an input that the mask prunes: where a pair
 * has one half alone, the other one is zero on both sides. */
#include "panels.h"

typedef __m512i words; /* of a register: pairs of bfloat16 */

INLINE words load_words(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store_words(void *p, words v) { _mm512_storeu_si512(p, v); }
INLINE vec multiply_add(vec sum, words a, words b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

/* The first `count` of `size` bits. */
INLINE uint32_t first_bits(int64_t count, int64_t size) {
    return count <= 0 ? 0 : (uint32_t)(((uint64_t)1 << nm_min(count, size)) - 1);
}

/* 16 values of one row beside those of the next, of which the first `rows` exist, each with `columns` values. */
INLINE words beside(const uint16_t *row, int64_t ld, int64_t rows, int64_t columns) {
    __mmask16 wide = (__mmask16)first_bits(columns, 16);
    words a = _mm512_setzero_si512(), b = a;
    if (rows > 0) a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wide, row));
    if (rows > 1) b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wide, row + ld));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

/* ----------------------------------------------------------------------------------------- the permute layout */

#define UNITS 3 /* pairs of slots whose sums permute_sampled holds in registers */

/* Copy `count` rows of x from row `first` into [block][into][BLOCK]; what is beyond them is zero. */
INLINE void gather_blocks(uint16_t *to, const nm_operands *o, int64_t first, int64_t count, int64_t into) {
    int64_t blocks = nm_ceil(o->depth, BLOCK);
    for (int64_t t = 0; t < into; t++) {
        const uint16_t *row = (const uint16_t *)o->x + (first + nm_min(t, count - 1)) * o->depth;
        for (int64_t b = 0; b < blocks; b++) {
            __mmask32 valid = first_bits(t < count ? o->depth - b * BLOCK : 0, BLOCK);
            store_words(to + (b * into + t) * BLOCK, _mm512_maskz_loadu_epi16(valid, row + b * BLOCK));
        }
    }
}

/* Sixteen pairs of indices, and which of them are not empty. */
typedef struct {
    words at;
    __mmask32 kept;
} pick;

INLINE pick load_pick(const uint8_t *index) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)index);
    return (pick){_mm512_cvtepu8_epi16(bytes), ~_mm256_movepi8_mask(bytes)};
}

INLINE words permute(pick p, words inputs) { return _mm512_maskz_permutexvar_epi16(p.kept, p.at, inputs); }

/* Write the sums of one token in a tile, of which `rows` rows exist, to y from entry `at` on. */
INLINE void write_tile(const nm_operands *o, int64_t at, int64_t rows, vec low, vec high) {
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_mask_storeu_epi16((uint16_t *)o->y + at, first_bits(rows, TILE), both);
}

/* A pair of tokens of a block is in two registers. */
typedef __m512i sampled_pick;
typedef struct {
    words low, high;
} block_words;

/* The indices of one half of the tile and of one of the two slots; the permutation reads the lowest 5 bits. */
INLINE sampled_pick load_sampled_pick(const uint8_t *unit, int part) {
    const __m256i *both = (const __m256i *)(unit + part / 2 * TILE);
    return _mm512_srli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(both)), part % 2 * 8);
}
INLINE block_words load_block(const word *p) { return (block_words){load_words(p), load_words(p + LANES)}; }
INLINE words permute_block(sampled_pick p, block_words v) { return _mm512_permutex2var_epi32(v.low, p, v.high); }

/* Copy `columns` columns, from `column` on, of a matrix [tokens, ld] into [block][pair of tokens][BLOCK], of which a block
 * has `step` words; what is beyond the matrix is zero. */
INLINE void gather_sampled(word *to, int64_t step, int64_t wide, const nm_operands *o, const void *matrix, int64_t ld,
                           int64_t first, int64_t column, int64_t columns) {
    (void)wide; /* BLOCK, which is TILE */
    for (int64_t t = 0; t < SAMPLED_WORDS; t++) {
        const uint16_t *row = (const uint16_t *)matrix + (first + 2 * t) * ld + column;
        for (int64_t c = 0; c < nm_ceil(columns, BLOCK) * BLOCK; c += LANES)
            store_words(to + c / BLOCK * step + t * BLOCK + c % BLOCK,
                        beside(row + c, ld, o->tokens - first - 2 * t, columns - c));
    }
}

/* --------------------------------------------------------------------------------------------- the csr layout */

/* Panels have their tokens in groups of 32, each in the order of quarters 0 4 1 5 2 6 3 7 of 4 tokens: so the low and the
 * high words of two columns, interleaved in every 128 bits, are 16 consecutive tokens each. */
INLINE int64_t token_of(int64_t pair) { return 16 * (pair >> 1 & 1) + 4 * (pair >> 2) + 2 * (pair & 1); }

/* panel [columns][lanes] = the transpose of the rows first .. first + count of a matrix [.., ld], its columns from
 * `column` on; zeros where there is no row. */
static void transposed_panel(uint16_t *panel, const int64_t lanes, const void *matrix, int32_t dtype, int64_t ld,
                             int64_t first, int64_t count, int64_t column, int64_t columns) {
    (void)dtype; /* NM_BFLOAT16 */
    float block[16 * 16], turned[16 * 16]; /* of pairs of tokens */
    for (int64_t t = 0; t < lanes; t += 32) {
        for (int64_t k = 0; k < columns; k += 16) {
            float *to = (float *)(panel + k * lanes + t);
            int whole = columns - k >= 16;
            for (int64_t i = 0; i < 16; i++) {
                int64_t token = t + token_of(i);
                const uint16_t *row = (const uint16_t *)matrix + (first + nm_min(token, count)) * ld + column + k;
                store_words(block + i * 16, beside(row, ld, count - token, columns - k));
            }
            transpose16(block, 16, whole ? to : turned, whole ? lanes / 2 : 16);
            for (int64_t c = 0; c < columns - k && !whole; c++) memcpy(to + c * lanes / 2, turned + c * 16, 64);
        }
    }
}

/* panel [depth][NM_PANEL] = the columns first .. first + count of x [.., tokens], `depth` rows from row `from` on. */
static void straight_panel(uint16_t *panel, const nm_operands *o, int64_t first, int64_t count, int64_t from,
                           int64_t depth) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t k = 0; k < depth; k++) {
        const uint16_t *row = (const uint16_t *)o->x + (from + k) * o->tokens + first;
        for (int64_t t = 0; t < NM_PANEL; t += 32) {
            words tokens = _mm512_setzero_si512();
            if (t < count) tokens = _mm512_maskz_loadu_epi16(first_bits(count - t, 32), row + t);
            store_words(panel + k * NM_PANEL + t, _mm512_permutexvar_epi64(order, tokens));
        }
    }
}

/* Add to the sums of NM_PANEL tokens `count` entries of a row, one or two. `panel` is that of offset 0. */
INLINE void add_entries(const int count, vec *sums, const nm_csr *a, int32_t entry, const uint16_t *panel) {
    const uint16_t *x = panel + a->offset[entry], *z = panel + a->offset[entry + count - 1];
    words weights; /* the upper halves of one or two floats */
    if (count == 2) {
        int64_t two;
        memcpy(&two, a->values + entry, 8);
        weights = _mm512_shuffle_epi8(_mm512_set1_epi64(two), _mm512_set1_epi32(0x07060302));
    } else {
        weights = _mm512_srli_epi32(_mm512_castps_si512(_mm512_set1_ps(a->values[entry])), 16);
    }
    for (int h = 0; h < 2; h++) {
        words v = load_words(x + h * 32), w = count == 2 ? load_words(z + h * 32) : _mm512_setzero_si512();
        sums[2 * h] = multiply_add(sums[2 * h], weights, _mm512_unpacklo_epi16(v, w));
        sums[2 * h + 1] = multiply_add(sums[2 * h + 1], weights, _mm512_unpackhi_epi16(v, w));
    }
}

/* Whether a row has `count` more entries in the panel. */
INLINE int has(const nm_csr *a, int32_t next, int32_t count, int32_t last, int32_t limit) {
    return next + count <= last && a->offset[next + count - 1] < limit;
}

/* Add to the sums of a row its entries from `next` on whose offset is below `limit`; return the entry after them. */
INLINE int32_t csr_row(vec *sums, const nm_csr *a, int32_t next, int32_t last, int32_t limit, const uint16_t *panel) {
    for (; has(a, next, 2, last, limit); next += 2) add_entries(2, sums, a, next, panel);
    if (has(a, next, 1, last, limit)) add_entries(1, sums, a, next++, panel);
    return next;
}

INLINE void load_sums(vec *sums, const float *y) {
    for (int v = 0; v < 4; v++) sums[v] = load(y + v * LANES);
}

INLINE void store_sums(float *y, const vec *sums) {
    for (int v = 0; v < 4; v++) store(y + v * LANES, sums[v]);
}

/* Add to the sums y [rows][NM_PANEL] the entries of the rows from `first` on that lie in one panel. Two rows at a time
 * because four sums alone would wait for each other. */
static void csr_rows(const nm_csr *a, int64_t first, int64_t rows, int32_t *next, int32_t limit, const uint16_t *panel,
                     float *y) {
    const int32_t *last = a->start + first + 1;
    vec one[4], two[4];
    for (; rows >= 2; rows -= 2, next += 2, last += 2, y += 2 * NM_PANEL) {
        int32_t e = next[0], f = next[1];
        load_sums(one, y), load_sums(two, y + NM_PANEL);
        for (; has(a, e, 2, last[0], limit) && has(a, f, 2, last[1], limit); e += 2, f += 2) {
            add_entries(2, one, a, e, panel);
            add_entries(2, two, a, f, panel);
        }
        next[0] = csr_row(one, a, e, last[0], limit, panel);
        next[1] = csr_row(two, a, f, last[1], limit, panel);
        store_sums(y, one), store_sums(y + NM_PANEL, two);
    }
    if (rows) {
        load_sums(one, y);
        next[0] = csr_row(one, a, next[0], last[0], limit, panel);
        store_sums(y, one);
    }
}

/* The product of one column of both panels. */
INLINE float inner(const uint16_t *x, const uint16_t *grad) {
    vec even = fill(0), odd = even;
    for (int v = 0; v < WIDE; v += 64) {
        even = multiply_add(even, load_words(x + v), load_words(grad + v));
        odd = multiply_add(odd, load_words(x + v + 32), load_words(grad + v + 32));
    }
    return total(even + odd);
}

#include "products.h"
