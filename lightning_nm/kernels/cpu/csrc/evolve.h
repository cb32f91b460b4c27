/* Passes over a weight and its mask, see evolve.c. */
#ifndef NM_EVOLVE_H
#define NM_EVOLVE_H
#include "shared.h"

enum { NM_LONGEST = 32 };    /* entries of a block */
enum { NM_BLOCKS = 64 };     /* blocks of a unit of work; a multiple of 8 */

typedef struct {
    void (*kept_size)(nm_evolution *);
    void (*gather)(nm_evolution *);
    void (*best)(nm_evolution *);
    void (*exchange)(nm_evolution *);
    void (*keep)(nm_evolution *);
    void (*mask)(nm_evolution *);
    void (*decay)(nm_evolution *);
    void (*largest)(nm_evolution *);
    void (*largest_of_columns)(nm_evolution *);
} nm_evolution_passes;

extern const nm_evolution_passes nm_evolve_baseline, nm_evolve_avx2, nm_evolve_avx512;
#endif
