/* What kernels.c, in float32, and bf16.c, in pairs of bfloat16, share before products.h puts their parts together. */
#ifndef NM_PANELS_H
#define NM_PANELS_H
#include "lanes.h"

/* Of copied inputs and of panels. A word of 32 bits holds one of them, or a pair. */
#if NM_LEVEL == 3
typedef uint16_t element;
typedef uint32_t word;
#define PER_WORD 2
#else
typedef float element, word;
#define PER_WORD 1
#endif

#define BLOCK (PER_WORD * LANES) /* inputs that a register holds */
#define TILE (2 * LANES)         /* rows whose sums two registers hold */
#define TOKENS (NM_LEVEL >= 2 ? 8 : 4) /* whose sums permute_linear holds in registers */

#define SAMPLED_TOKENS 64                           /* that permute_sampled copies at a time */
#define SAMPLED_WORDS (SAMPLED_TOKENS / PER_WORD)   /* of one input of these tokens */
#define SAMPLED_STEP ((SAMPLED_WORDS + 1) * BLOCK)  /* not a power of two, which one set of a cache would hold */

#define WIDE (PER_WORD * NM_PANEL) /* tokens of a panel of csr_sampled: as many bytes of both types */

/* to [16][into] = the transpose of from [16][ld]. */
#if NM_LEVEL >= 2
INLINE void transpose16(const float *from, int64_t ld, float *to, int64_t into) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(from + i * ld);
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; h++) {
            __m512d a = _mm512_castps_pd(t[i + h]), b = _mm512_castps_pd(t[i + 2 + h]);
            r[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    /* r[4 g + c] has in its quarter q column 4 q + c of the rows 4 g .. 4 g + 3 */
    for (int c = 0; c < 4; c++) {
        __m512 a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        __m512 d = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88), e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_ps(to + c * into, _mm512_shuffle_f32x4(a, d, 0x88));
        _mm512_storeu_ps(to + (8 + c) * into, _mm512_shuffle_f32x4(a, d, 0xdd));
        _mm512_storeu_ps(to + (4 + c) * into, _mm512_shuffle_f32x4(b, e, 0x88));
        _mm512_storeu_ps(to + (12 + c) * into, _mm512_shuffle_f32x4(b, e, 0xdd));
    }
}
#elif NM_LEVEL == 1
INLINE void transpose8(const float *from, int64_t ld, float *to, int64_t into) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(from + i * ld);
    for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int h = 0; h < 2; h++) {
            r[i + 2 * h] = _mm256_shuffle_ps(t[i + h], t[i + 2 + h], 0x44);
            r[i + 2 * h + 1] = _mm256_shuffle_ps(t[i + h], t[i + 2 + h], 0xee);
        }
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(to + c * into, _mm256_permute2f128_ps(r[c], r[4 + c], 0x20));
        _mm256_storeu_ps(to + (4 + c) * into, _mm256_permute2f128_ps(r[c], r[4 + c], 0x31));
    }
}
INLINE void transpose16(const float *from, int64_t ld, float *to, int64_t into) {
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8) transpose8(from + i * ld + j, ld, to + j * into + i, into);
}
#else
INLINE void transpose16(const float *from, int64_t ld, float *to, int64_t into) {
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) to[j * into + i] = from[i * ld + j];
}
#endif
#endif
