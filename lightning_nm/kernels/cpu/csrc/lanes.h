/* Vectors and dtypes for one instruction set: NM_LEVEL 0 is what every CPU of the architecture has, 1 is AVX2 with FMA, 2
 * is AVX-512, 3 is AVX-512 with AVX512_BF16. Vectors are GCC's and clang's. */
#ifndef NM_LANES_H
#define NM_LANES_H
#include <stdlib.h>
#include <string.h>

#include "shared.h"

#if NM_LEVEL > 0
#include <immintrin.h>
#endif

#if NM_LEVEL == 3
#define LANES 16
#define LEVEL(name) name##_avx512_bf16
#elif NM_LEVEL == 2
#define LANES 16
#define LEVEL(name) name##_avx512
#elif NM_LEVEL == 1
#define LANES 8
#define LEVEL(name) name##_avx2
#else
#define LANES 4
#define LEVEL(name) name##_baseline
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec fill(float v) { return v - (vec){0}; }

/* The sum of the lanes. */
INLINE float total(vec v) {
#if NM_LEVEL >= 2
    return _mm512_reduce_add_ps((__m512)v);
#elif NM_LEVEL == 1
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return v[0] + v[1] + (v[2] + v[3]);
#endif
}

INLINE float *scratch(int64_t floats) { return aligned_alloc(64, (size_t)nm_ceil(floats + 16, 16) * 64); }

/* ------------------------------------------------------------------------------------------------------- dtypes */

INLINE float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t narrow(float value) { /* to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

INLINE int64_t width(int32_t dtype) { return dtype == NM_BFLOAT16 ? 2 : 4; }

INLINE void read_floats(float *to, const void *from, int32_t dtype, int64_t first, int64_t count) {
    if (dtype == NM_FLOAT32) {
        const float *floats = (const float *)from + first;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, load(floats + i));
        for (; i < count; i++) to[i] = floats[i];
    } else {
        const uint16_t *halves = (const uint16_t *)from + first;
        for (int64_t i = 0; i < count; i++) to[i] = widen(halves[i]);
    }
}

INLINE void write_floats(void *to, int32_t dtype, int64_t first, const float *from, int64_t count) {
    if (dtype == NM_FLOAT32) {
        float *floats = (float *)to + first;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(floats + i, load(from + i));
        for (; i < count; i++) floats[i] = from[i];
    } else {
        uint16_t *halves = (uint16_t *)to + first;
        for (int64_t i = 0; i < count; i++) halves[i] = narrow(from[i]);
    }
}
#endif
