// SPDX-License-Identifier: GPL-2.0-only
/* Arithmetic on page frames, see frames.h. */
#include <linux/bitmap.h>
#include <linux/bsearch.h>
#include <linux/minmax.h>
#include <linux/pfn.h>
#include <asm/page.h>

#include "../mercury_abi.h"
#include "frames.h"

/* Orders ranges by their start, for sort(). */
int mercury_frames_by_start(const void *left, const void *right)
{
	const struct mercury_owned_range *a = left, *b = right;

	return a->start_phys < b->start_phys ? -1 : a->start_phys > b->start_phys;
}

static int compare(const void *phys, const void *element)
{
	const struct mercury_owned_range *range = element;
	u64 at = *(const u64 *)phys;

	return at < range->start_phys ? -1 : at >= range->start_phys + range->pages * PAGE_SIZE;
}

/*
 * Returns the number of a page among those of all ranges, which ascend and do not overlap, or -1.
 * `numbers` has the number of the first page of each range.
 */
s64 mercury_frames_number(const struct mercury_owned_range *ranges, const u64 *numbers, unsigned int count,
			  u64 phys)
{
	const struct mercury_owned_range *range;

	range = __inline_bsearch(&phys, ranges, count, sizeof(*ranges), compare);
	return range ? numbers[range - ranges] + (phys - range->start_phys) / PAGE_SIZE : -1;
}

/*
 * Calls keep() for each part of a range that lies in no hole, some of which may be empty. Holes are ordered
 * by their start, and may overlap. Returns the first code that is not MERCURY_CODE_OK.
 */
u32 mercury_frames_without(u64 start, u64 end, const struct mercury_owned_range *holes, unsigned int count,
			   u32 (*keep)(u64 start, u64 end))
{
	unsigned int i;
	u32 code;

	if (start >= end)
		return MERCURY_CODE_OK;
	for (i = 0; i < count && start < end; i++) {
		u64 hole = holes[i].start_phys, hole_end = hole + holes[i].pages * PAGE_SIZE;

		if (hole_end <= start || hole >= end)
			continue;
		code = keep(start, hole);
		if (code != MERCURY_CODE_OK)
			return code;
		start = hole_end;
	}
	return keep(start, end);
}

/*
 * Returns the next number from `pfn` on that was written, or that of the next piece if there is none in
 * this.
 */
static unsigned long next_written(const struct mercury_wanted *wanted, unsigned long pfn)
{
	unsigned long at = pfn / MERCURY_MAP_BITS, bit = MERCURY_MAP_BITS;

	if (at < wanted->count && wanted->collected[at])
		bit = find_next_bit(wanted->collected[at], MERCURY_MAP_BITS, pfn % MERCURY_MAP_BITS);
	return at * MERCURY_MAP_BITS + bit;
}

static bool is_free(const struct mercury_wanted *wanted, unsigned long pfn)
{
	unsigned long at = pfn / MERCURY_MAP_BITS;

	return wanted->free && at < wanted->count && wanted->free[at] &&
	       test_bit(pfn % MERCURY_MAP_BITS, wanted->free[at]);
}

/* Returns the first wanted frame at or after this one, or `end` if none lies before it. */
u64 mercury_frames_next(const struct mercury_wanted *wanted, u64 frame, u64 end)
{
	unsigned long pfn = PHYS_PFN(frame), last = PHYS_PFN(end);

	while (pfn < last) {
		if (wanted->collected) {
			unsigned long next = next_written(wanted, pfn);
			bool is_other_piece = next / MERCURY_MAP_BITS != pfn / MERCURY_MAP_BITS;

			pfn = next;
			if (is_other_piece)
				continue;
		}
		if (!is_free(wanted, pfn))
			break;
		pfn++;
	}
	return min_t(u64, PFN_PHYS(pfn), end);
}
