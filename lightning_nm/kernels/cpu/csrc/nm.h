/* Products with an N:M sparse matrix A [rows, depth] on CPUs: what the files of this library share.
 *
 * kernels.c is compiled once for each instruction set (NM_LEVEL) and gives one `nm_kernels` each. bf16.c has the bfloat16
 * products of CPUs with AVX512_BF16, whose other products are those of AVX-512. int8.c has those of int8 weights. layout.c
 * turns masks into layouts, and weights into the values of a layout. evolve.c and choose.c move the masks of BAME.
 * library.c detects the CPU and exports the functions.
 *
 * The layouts:
 *   permute  For matrices that are N:M along the depth. A register holds `lanes` inputs of one token, its lanes are
 *            outputs: one permutation picks the input of each output. Rows are cut into tiles of 2 * lanes, the depth
 *            into blocks of `lanes`; index[tile][block][slot][2 * lanes] has in its low bits the input within the
 *            block, and NM_EMPTY where an output has no such nonzero. Values have the same order, in float32.
 *   paired   The permute layout of bfloat16 on CPUs that multiply pairs: blocks are of 2 * lanes, the slots are even in
 *            number, and two of a row lie beside each other: index[tile][block][slot / 2][2 * lanes][2]. Values have the
 *            same order, in bfloat16.
 *   csr      For any matrix. Row r has the entries start[r] .. start[r + 1]; an entry multiplies 64 consecutive values
 *            of a panel [depth][64] that begin at offset[entry]. Convolutions take it with a depth of
 *            [in / groups][taps], see conv.c.
 *   int8     For int8 weights that are N:M along the depth, M a divisor of 64; the same on every CPU, see nm_int8.
 *
 * Every output is summed in an order that depends on neither the number of threads nor the other outputs. */
#ifndef NM_H
#define NM_H
#include <stdint.h>

enum { NM_ABI = 8 };
enum { NM_NO_MEMORY = 1, NM_NO_KERNEL, NM_TOO_LARGE }; /* why there is no result */
enum { NM_FLOAT32 = 0, NM_BFLOAT16 = 1 };
enum { NM_EMPTY = 0x80 };
enum { NM_PANEL = 64 }; /* lanes of a panel */

typedef void (*nm_task)(int64_t begin, int64_t end, void *context);
/* torch_parallel_for of torch's stable C interface; NULL runs on the calling thread. */
typedef int32_t (*nm_parallel)(int64_t begin, int64_t end, int64_t grain, nm_task task, void *context);

/* The dense operands of a product; `dtype` is that of x, bias, grad and y. */
typedef struct {
    nm_parallel parallel;
    int64_t threads;
    int64_t rows, depth;
    int64_t tokens; /* rows of x and grad; columns of x and y in csr_matmul */
    int32_t dtype;
    int32_t failed; /* NM_NO_MEMORY, or 0 */
    const void *x;
    const void *bias; /* [rows] or NULL */
    const void *grad; /* [tokens, rows] */
    void *y;
} nm_operands;

typedef struct {
    const uint8_t *index;
    const void *values;
    int64_t slots, paired;
} nm_permute;

typedef struct {
    const int32_t *start, *offset;
    const float *values;
} nm_csr;

enum { NM_INT8_ROWS = 16, NM_INT8_BLOCK = 64, NM_INT8_ENTRIES = 4 };

/* A matrix of int8 values, none of them -128, and a scale for each row. Rows are cut into tiles of 16, the depth into blocks
 * of 64. A row has n * 64 / m entries in a block, in the order of their positions, and then zeros up to a multiple of 4:
 *
 *   values[tile][block][group][16][4]     entry 4 * group + j of a row
 *   positions, in the same order          `bits` each, 2, 4 or 8: where in its m inputs an entry lies; the first one in the
 *                                         lowest bits of a byte
 *
 * Entry e of a block belongs to the inputs e / n * m .. e / n * m + m of the block. */
typedef struct {
    const int8_t *values;
    const uint8_t *positions;
    const float *scale;    /* [rows] */
    const int32_t *offset; /* [tiles][16]: -128 times the sum of a row's values */
    int64_t n, m, bits;
} nm_int8;

/* A convolution of images x [images, in, size], sparse W [out, in / groups, kernel], to y or dY [images, out, positions].
 * Pairs are height and width. */
typedef struct {
    nm_parallel parallel;
    int64_t threads;
    int64_t images, in, out, groups;
    int64_t size[2], kernel[2], stride[2], padding[2], dilation[2], positions[2];
    int32_t dtype, failed;
    const void *x;
    const void *bias; /* [out] or NULL */
    const void *grad;
    void *y;
} nm_conv;

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

/* y [tokens, rows] = x [tokens, depth] A^T + bias, of each row of x its nearest int8 values */
typedef void (*nm_int8_linear)(nm_operands *, const nm_int8 *);

extern const nm_int8_linear nm_int8_baseline, nm_int8_avx2, nm_int8_avx512; /* the last with VBMI and VNNI */
extern const nm_kernels nm_baseline, nm_avx2, nm_avx512, nm_avx512_bf16; /* the last for bfloat16 alone */
extern const nm_conv_kernels nm_conv_baseline, nm_conv_avx2, nm_conv_avx512;

static inline int64_t nm_ceil(int64_t size, int64_t unit) { return (size + unit - 1) / unit; }
static inline int64_t nm_min(int64_t a, int64_t b) { return a < b ? a : b; }

static inline void nm_run(nm_parallel parallel, int64_t threads, int64_t items, nm_task task, void *context) {
    if (parallel && threads > 1 && items > 1)
        parallel(0, items, 1, task, context);
    else if (items > 0)
        task(0, items, context);
}
#endif
