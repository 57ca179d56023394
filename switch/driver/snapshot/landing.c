// SPDX-License-Identifier: GPL-2.0-only
/* Arithmetic of a landing, see landing.h. */
#include <linux/bitmap.h>
#include <linux/bsearch.h>
#include <linux/minmax.h>
#include <linux/pfn.h>
#include <asm/page.h>

#include "../mercury_abi.h"
#include "landing.h"

/*
 * A large page, the memory that one page of page tables maps in large pages, and the memory that one page
 * of the next level maps. FEW_PAGES has room for a fifth level.
 */
#define LARGE_SIZE	BIT_ULL(21)
#define TABLE_SHIFT	30
#define TOP_SHIFT	39
/* The landing, its code, the root of its tables, and the tables of the text that comes next. */
#define FEW_PAGES	16

static u64 end_of(const struct mercury_restart_range *range)
{
	return range->start_phys + range->pages * PAGE_SIZE;
}

/*
 * Counts the pages of the image. Refuses ranges that are not in order, overlap, wrap, or reach beyond
 * `limit`, where no memory can be. Page 0 is no memory to use: as an address it says that there is none.
 */
u32 mercury_plan_count(struct mercury_plan *plan, u64 limit)
{
	u32 i;

	plan->page_count = 0;
	plan->top = 0;
	for (i = 0; i < plan->range_count; i++) {
		const struct mercury_restart_range *range = &plan->ranges[i];

		if (range->start_phys % PAGE_SIZE || range->start_phys < plan->top ||
		    range->start_phys >= limit || !range->pages ||
		    range->pages > (limit - range->start_phys) / PAGE_SIZE ||
		    range->kind > MERCURY_RANGE_FREE ||
		    (range->kind == MERCURY_RANGE_FREE && !range->start_phys))
			return MERCURY_CODE_BAD_ARGUMENT;
		plan->top = end_of(range);
		plan->numbers[i] = plan->page_count;
		if (range->kind == MERCURY_RANGE_KEPT)
			plan->page_count += range->pages;
	}
	return MERCURY_CODE_OK;
}

/* Adds memory that this kernel occupies, in ascending order; returns false if there is no room for it. */
bool mercury_plan_occupy(struct mercury_plan *plan, u64 start, u64 end)
{
	struct mercury_occupied *stretch = &plan->occupied[plan->occupied_count];

	if (plan->occupied_count == MERCURY_OCCUPIED_MAX)
		return false;
	start -= start % PAGE_SIZE;
	end = (end + PAGE_SIZE - 1) / PAGE_SIZE * PAGE_SIZE;
	/* Two stretches may share a page. */
	if (plan->occupied_count)
		start = max_t(u64, start, stretch[-1].end);
	if (end <= start)
		return true;
	stretch->start = start;
	stretch->end = end;
	stretch->before = plan->occupied_pages;
	plan->occupied_pages += (end - start) / PAGE_SIZE;
	plan->occupied_count++;
	return true;
}

/* Returns the number of a page among those that this kernel occupies, or MERCURY_NO_NUMBER. */
u64 mercury_plan_occupied_number(const struct mercury_plan *plan, u64 phys)
{
	u32 i;

	for (i = 0; i < plan->occupied_count; i++) {
		const struct mercury_occupied *stretch = &plan->occupied[i];

		if (phys >= stretch->start && phys < stretch->end)
			return stretch->before + (phys - stretch->start) / PAGE_SIZE;
	}
	return MERCURY_NO_NUMBER;
}

static int compare(const void *phys, const void *element)
{
	const struct mercury_restart_range *range = element;
	u64 at = *(const u64 *)phys;

	return at < range->start_phys ? -1 : at >= end_of(range);
}

/* Returns the number of a page among those that the image holds, or MERCURY_NO_NUMBER. */
u64 mercury_plan_number(const struct mercury_plan *plan, u64 phys)
{
	const struct mercury_restart_range *range;

	range = __inline_bsearch(&phys, plan->ranges, plan->range_count, sizeof(*range), compare);
	if (!range || range->kind != MERCURY_RANGE_KEPT)
		return MERCURY_NO_NUMBER;
	return plan->numbers[range - plan->ranges] + (phys - range->start_phys) / PAGE_SIZE;
}

/*
 * Returns the next page that the image leaves out and this kernel does not occupy, each once; 0 if there is
 * none left.
 */
u64 mercury_plan_unused_page(struct mercury_plan *plan)
{
	for (; plan->next_range < plan->range_count; plan->next_range++, plan->next_page = 0) {
		const struct mercury_restart_range *range = &plan->ranges[plan->next_range];

		while (range->kind == MERCURY_RANGE_FREE && plan->next_page < range->pages) {
			u64 phys = range->start_phys + plan->next_page++ * PAGE_SIZE;

			if (mercury_plan_occupied_number(plan, phys) == MERCURY_NO_NUMBER)
				return phys;
		}
	}
	return 0;
}

/* Returns how many pages of a range this kernel occupies. */
static u64 occupied_of(const struct mercury_plan *plan, const struct mercury_restart_range *range)
{
	u64 start = range->start_phys, end = end_of(range), pages = 0;
	u32 i;

	for (i = 0; i < plan->occupied_count; i++) {
		const struct mercury_occupied *stretch = &plan->occupied[i];

		if (stretch->start < end && stretch->end > start)
			pages += (min_t(u64, end, stretch->end) - max_t(u64, start, stretch->start)) /
				 PAGE_SIZE;
	}
	return pages;
}

/*
 * Returns true if there is room for every frame whose destination this kernel occupies, and for so many
 * pages more.
 */
bool mercury_plan_has_room(const struct mercury_plan *plan, u64 aside)
{
	u64 unused = 0, wanted = aside;
	u32 i;

	for (i = 0; i < plan->range_count; i++) {
		const struct mercury_restart_range *range = &plan->ranges[i];

		if (range->kind == MERCURY_RANGE_FREE)
			unused += range->pages - occupied_of(plan, range);
		else
			wanted += occupied_of(plan, range);
	}
	return wanted <= unused;
}

/*
 * Returns the end of the memory that begins with the range `*next`: ranges that touch make one stretch. The
 * first range after it becomes `*next`.
 */
u64 mercury_plan_stretch_end(const struct mercury_plan *plan, u32 *next)
{
	u64 end;

	do {
		end = end_of(&plan->ranges[(*next)++]);
	} while (*next < plan->range_count && plan->ranges[*next].start_phys == end);
	return end;
}

/* Returns how many pages to set aside for lists of copies, page tables and the landing itself. */
u64 mercury_plan_aside(const struct mercury_plan *plan)
{
	u64 pages = 2 * (plan->occupied_pages / MERCURY_LANDING_LIST_MAX + 1);
	u32 i = 0;

	pages += (plan->top >> TABLE_SHIFT) + (plan->top >> TOP_SHIFT) + FEW_PAGES;
	/* Both edges of each stretch of memory may need a table of small pages. */
	while (i < plan->range_count) {
		mercury_plan_stretch_end(plan, &i);
		pages += 2;
	}
	return pages;
}

/*
 * Adds a window. A mapping that does not begin at a large page consists of small pages throughout, so such a
 * window is cut at the first large page.
 */
static u32 add_window(u64 start, u64 end, u32 (*add)(u64 start, u64 end))
{
	u64 large = (start + LARGE_SIZE - 1) / LARGE_SIZE * LARGE_SIZE;

	if (start >= end)
		return MERCURY_CODE_OK;
	if (start < large && large < end)
		return add(start, large) ?: add(large, end);
	return add(start, end);
}

/* Adds windows to a stretch of memory, as far as this kernel does not occupy it. */
static u32 add_windows(const struct mercury_plan *plan, u64 start, u64 end, u32 (*add)(u64 start, u64 end))
{
	u32 i, code;

	for (i = 0; i < plan->occupied_count; i++) {
		const struct mercury_occupied *occupied = &plan->occupied[i];

		if (occupied->end <= start || occupied->start >= end)
			continue;
		code = add_window(start, occupied->start, add);
		if (code != MERCURY_CODE_OK)
			return code;
		start = occupied->end;
	}
	return add_window(start, end, add);
}

/*
 * Calls add() for each window to the image's memory, ascending. Windows cover all of it that this kernel
 * does not occupy, and nothing else. Returns the first code that is not MERCURY_CODE_OK.
 */
u32 mercury_plan_windows(const struct mercury_plan *plan, u32 (*add)(u64 start, u64 end))
{
	u32 i = 0, code;

	while (i < plan->range_count) {
		u64 start = plan->ranges[i].start_phys;

		code = add_windows(plan, start, mercury_plan_stretch_end(plan, &i), add);
		if (code != MERCURY_CODE_OK)
			return code;
	}
	return MERCURY_CODE_OK;
}
