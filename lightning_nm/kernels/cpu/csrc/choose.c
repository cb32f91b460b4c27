/* Which blocks exchange: those of the largest gain, damped by their oscillation, as many as the budget allows. */
#include <string.h>

#include "evolve.h"

/* The gain of a block as an integer of the same order; 0 for no candidate. */
static inline uint32_t rank_of(const nm_evolution *e, int64_t block) {
    float gain = e->gain[block];
    if (!(gain > 0) || gain > 0x1.fffffep127f) return 0;
    float damped = gain / (1.0f + (float)e->oscillation[block]);
    uint32_t bits;
    memcpy(&bits, &damped, 4);
    return bits + 1;
}

/* Write `chosen` and `better`; return the number of chosen blocks. Of equal ones at the border the first are chosen.
 *
 * The rank of the last that the budget allows is found digit by digit, from counts of the digits of all candidates. */
int64_t nm_choose_blocks(nm_evolution *e) {
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
    if (candidates <= e->budget) return candidates;
    uint32_t border = 0, known = 0; /* the border's digits so far, and their place */
    int64_t left = e->budget;       /* how many of the blocks with these digits may be chosen */
    if (left == 0) {
        memset(e->chosen, 0, (size_t)e->blocks);
        return 0;
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
    return e->budget;
}
