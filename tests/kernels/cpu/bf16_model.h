/* A software model of AVX512_BF16 for CPUs with AVX-512 alone: its tests compile the library with `-include` of this file.
 *
 * vdpbf16ps: two fused multiply-adds, the upper half of a pair first; to nearest even; denormal numbers are zeros, as
 * operands and as results. vcvtne2ps2bf16: to nearest even, denormal operands are zeros, NaN stays NaN. */
#if defined(__x86_64__) && __has_include(<avx512bf16intrin.h>) /* the compiler knows them */
#include <cpuid.h>
#include <immintrin.h>

#define MODEL static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq,fma")))

MODEL __m512 model_no_denormals(__m512 v) {
    __m512i bits = _mm512_castps_si512(v), sign = _mm512_and_si512(bits, _mm512_set1_epi32((int)0x80000000));
    __mmask16 normal = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7f800000)); /* the exponent is not 0 */
    return _mm512_mask_mov_ps(_mm512_castsi512_ps(sign), normal, v);
}

MODEL __m512 model_halves(__m512i pairs, int upper) {
    __m512i bits = upper ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(pairs, 16);
    return model_no_denormals(_mm512_castsi512_ps(bits));
}

MODEL __m512 model_dpbf16(__m512 sum, __m512bh first, __m512bh second) {
    __m512i a = (__m512i)first, b = (__m512i)second;
    sum = model_no_denormals(sum);
    for (int upper = 1; upper >= 0; upper--)
        sum = model_no_denormals(_mm512_fmadd_ps(model_halves(a, upper), model_halves(b, upper), sum));
    return sum;
}

MODEL __m256i model_rounded(__m512 v) {
    __m512i bits = _mm512_castps_si512(model_no_denormals(v)), upper = _mm512_srli_epi32(bits, 16);
    __m512i bias = _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40)));
}

MODEL __m512bh model_cvtne2(__m512 high, __m512 low) {
    return (__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512(model_rounded(low)), model_rounded(high), 1);
}

/* The library asks leaf 7, subleaf 1 alone. */
static inline int model_cpuid(unsigned leaf, unsigned subleaf, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
    *a = leaf == 7 && subleaf == 1 ? 1 << 5 : 0;
    *b = *c = *d = 0;
    return 1;
}

#define _mm512_dpbf16_ps model_dpbf16
#define _mm512_cvtne2ps_pbh model_cvtne2
#define __get_cpuid_count model_cpuid
#endif
