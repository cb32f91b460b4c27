/* The instruction sets of this CPU, and the functions that Python calls. */
#include <stddef.h>
#ifdef NM_BF16
#include <cpuid.h>
#endif

#include "shared.h"

enum { NM_AVX512 = 2, NM_AVX512_BF16 };

#ifdef NM_BF16 /* the compiler of this library knew AVX512_BF16 */
/* Of a CPU with AVX-512: the registers that the operating system keeps are the same. */
static int has_bf16(void) {
    unsigned eax = 0, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 5 & 1;
}
#define PAIRS (&nm_avx512_bf16)
#else
static int has_bf16(void) { return 0; }
#define PAIRS NULL
#endif

#ifdef NM_INT8 /* and VBMI and VNNI, which CPUs have with or without AVX512_BF16 */
static int has_int8(void) { return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni"); }
#define WIDE_INT8 &nm_int8_avx512
#else
static int has_int8(void) { return 0; }
#define WIDE_INT8 NULL
#endif

/* 0 baseline, 1 AVX2 with FMA, 2 AVX-512, 3 with AVX512_BF16: the best level that CPU, operating system and this library
 * have. */
int32_t nm_best_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return has_bf16() ? NM_AVX512_BF16 : NM_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

static const nm_kernels *kernels_of(int32_t level) {
#if defined(__x86_64__)
    if (level >= NM_AVX512) return &nm_avx512;
    if (level == 1) return &nm_avx2;
#endif
    return level == 0 ? &nm_baseline : NULL;
}

/* Those that multiply pairs, or NULL. */
static const nm_kernels *pairs_of(int32_t level, const nm_operands *o) {
    return level == NM_AVX512_BF16 && o->dtype == NM_BFLOAT16 ? PAIRS : NULL;
}

int64_t nm_lanes(int32_t level) { return kernels_of(level)->lanes; }

/* The products return 0, or why there is no result. */
int32_t nm_permute_product(int32_t level, int32_t product, nm_operands *o, const nm_permute *a) {
    const nm_kernels *kernels = a->paired ? pairs_of(level, o) : kernels_of(level);
    if (!kernels) return NM_NO_KERNEL;
    void (*kernel)(nm_operands *, const nm_permute *) =
        product == NM_LINEAR ? kernels->permute_linear : product == NM_SAMPLED ? kernels->permute_sampled : NULL;
    if (!kernel) return NM_NO_KERNEL;
    o->failed = 0;
    kernel(o, a);
    return o->failed;
}

int32_t nm_csr_product(int32_t level, int32_t product, nm_operands *o, const nm_csr *a) {
    const nm_kernels *pairs = pairs_of(level, o), *kernels = pairs ? pairs : kernels_of(level);
    o->failed = 0;
    (product == NM_LINEAR ? kernels->csr_linear : product == NM_MATMUL ? kernels->csr_matmul : kernels->csr_sampled)(o, a);
    return o->failed;
}

/* The instruction set of int8 products at a level: 0 baseline, 1 AVX2, 2 AVX-512 with VBMI and VNNI. */
int32_t nm_int8_level(int32_t level) {
#if defined(__x86_64__)
    if (level >= NM_AVX512 && has_int8()) return NM_AVX512;
    if (level >= 1) return 1;
#endif
    (void)has_int8;
    return 0;
}

static const nm_int8_kernels *int8_kernels_of(int32_t level) {
#if defined(__x86_64__)
    int32_t own = nm_int8_level(level);
    return own == NM_AVX512 ? WIDE_INT8 : own == 1 ? &nm_int8_avx2 : &nm_int8_baseline;
#else
    (void)level;
    return &nm_int8_baseline;
#endif
}

int32_t nm_int8_product(int32_t level, int32_t product, nm_operands *o, const nm_int8 *a) {
    if (product != NM_LINEAR) return NM_NO_KERNEL;
    o->failed = 0;
    int8_kernels_of(level)->linear(o, a);
    return o->failed;
}

int32_t nm_rows_product(int32_t level, int32_t product, nm_operands *o, const nm_rows *a) {
    if (product != NM_LINEAR) return NM_NO_KERNEL;
    o->failed = 0;
    int8_kernels_of(level)->rows_linear(o, a);
    return o->failed;
}

int32_t nm_conv_product(int32_t level, int32_t product, nm_conv *c, const nm_csr *a) {
    const nm_conv_kernels *kernels = &nm_conv_baseline;
#if defined(__x86_64__)
    kernels = level >= NM_AVX512 ? &nm_conv_avx512 : level == 1 ? &nm_conv_avx2 : kernels;
#endif
    c->failed = 0;
    (product == NM_FORWARD ? kernels->forward : product == NM_DGRAD ? kernels->dgrad : kernels->sampled)(c, a);
    return c->failed;
}

/* Returns 0, or NM_NO_MEMORY. */
int32_t nm_evolution_pass(int32_t level, int32_t pass, nm_evolution *e) {
    const nm_pass *passes = nm_evolve_baseline;
#if defined(__x86_64__)
    passes = level >= NM_AVX512 ? nm_evolve_avx512 : level == 1 ? nm_evolve_avx2 : passes;
#endif
    e->failed = 0;
    e->blocks = e->m ? e->entries / e->m : 0;
    passes[pass](e);
    return e->failed;
}

void nm_top_mask(int32_t level, nm_top *t) {
#if defined(__x86_64__)
    if (level >= NM_AVX512) nm_top_avx512(t);
    else if (level == 1) nm_top_avx2(t);
    else nm_top_baseline(t);
#else
    (void)level;
    nm_top_baseline(t);
#endif
}
