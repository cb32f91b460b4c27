/* What the files of this library share, besides what Python calls. */
#ifndef NM_SHARED_H
#define NM_SHARED_H
#include "nm.h"

typedef struct {
    int64_t lanes; /* of the permute layout; 0 where the instruction set has no permutation */
    /* y [tokens, rows] = x [tokens, depth] A^T + bias */
    void (*permute_linear)(nm_operands *, const nm_permute *);
    void (*csr_linear)(nm_operands *, const nm_csr *);
    /* y [rows, tokens] = A x, x [depth, tokens] */
    void (*csr_matmul)(nm_operands *, const nm_csr *);
    /* y [rows, depth] = grad^T x at the entries of the layout, zero elsewhere; x [tokens, depth] */
    void (*permute_sampled)(nm_operands *, const nm_permute *);
    void (*csr_sampled)(nm_operands *, const nm_csr *);
} nm_kernels;

/* The layout is that of W [out, in / groups * taps] in all three. */
typedef struct {
    void (*forward)(nm_conv *, const nm_csr *); /* y = conv(x, W) + bias */
    void (*dgrad)(nm_conv *, const nm_csr *);   /* y = the gradient of x */
    void (*sampled)(nm_conv *, const nm_csr *); /* y = the gradient of W at the entries, zero elsewhere */
} nm_conv_kernels;

/* y [tokens, rows] = x [tokens, depth] A^T + bias, of each row of x its nearest int8 values; with a dense matrix its
 * nearest 16-bit values */
typedef struct {
    void (*linear)(nm_operands *, const nm_int8 *);
    void (*rows_linear)(nm_operands *, const nm_rows *);
} nm_int8_kernels;

extern const nm_int8_kernels nm_int8_baseline, nm_int8_avx2, nm_int8_avx512; /* the last with VBMI and VNNI */
extern const nm_kernels nm_baseline, nm_avx2, nm_avx512, nm_avx512_bf16; /* the last for bfloat16 alone */
extern const nm_conv_kernels nm_conv_baseline, nm_conv_avx2, nm_conv_avx512;

typedef void (*nm_pass)(nm_evolution *); /* of evolve.c, by its number */

extern const nm_pass nm_evolve_baseline[], nm_evolve_avx2[], nm_evolve_avx512[];

void nm_top_baseline(nm_top *), nm_top_avx2(nm_top *), nm_top_avx512(nm_top *);

static inline int64_t nm_ceil(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }
static inline int64_t nm_min(int64_t a, int64_t b) { return a < b ? a : b; }

static inline void nm_run(nm_parallel parallel, int64_t threads, int64_t items, nm_task task, void *context) {
    if (parallel && threads > 1 && items > 1)
        parallel(0, items, 1, task, context);
    else if (items > 0)
        task(0, items, context);
}
#endif
