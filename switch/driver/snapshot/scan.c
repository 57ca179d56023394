// SPDX-License-Identifier: GPL-2.0-only
/*
 * The scan at the instant. All CPUs look through the kept memory, and each does its part. It marks two
 * kinds of pages: those that devices may write at any time (persistent DMA memory), which are copied at the
 * instant, and free pages, whose content is not kept.
 */
#include <linux/atomic.h>
#include <linux/bitmap.h>
#include <linux/ioport.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/spinlock.h>

#include "snapshot.h"

static struct {
	/* By the number of a kept page, in pieces: persistent DMA memory. */
	unsigned long **persistent;
	unsigned long bits;
	/* By page frame number, in pieces where there is memory: free pages. NULL: they are kept too. */
	unsigned long **free;
	/* The pieces of any map by page frame number. */
	unsigned long count;
	/*
	 * CPUs that have scanned their own lists of free pages, and CPUs that have done their part of the
	 * rest.
	 */
	atomic_t arrived, done;
} scan;

/*
 * Free pages come back as zeros. Only a kernel that checks what it wrote into free pages would notice. In a
 * machine that is put back they hold what was written meanwhile, so they are kept if they must be zeros.
 */
static bool keeps_free_pages(u64 flags)
{
	return page_poisoning_enabled_static() || (flags & MERCURY_SNAPSHOT_KEEP && want_init_on_free());
}

u32 mercury_scan_allocate(u64 flags, unsigned long ram_pages)
{
	scan.persistent = mercury_number_map(ram_pages);
	scan.bits = ALIGN(ram_pages, MERCURY_MAP_BITS);
	if (!scan.persistent)
		return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	if (keeps_free_pages(flags))
		return MERCURY_CODE_OK;
	scan.free = mercury_pfn_map(&scan.count);
	return scan.free ? MERCURY_CODE_OK : MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
}

void mercury_scan_forget(void)
{
	memset(&scan, 0, sizeof(scan));
}

/* Returns how many kept pages the map of persistent DMA memory has room for. */
unsigned long mercury_scan_room(void)
{
	return scan.bits;
}

/* Returns the map of free pages and its pieces; NULL if free pages are kept. */
unsigned long **mercury_scan_free(unsigned long *count)
{
	*count = scan.count;
	return scan.free;
}

unsigned long **mercury_scan_persistent(void)
{
	return scan.persistent;
}

static void mark_persistent(u64 number)
{
	set_bit(number % MERCURY_MAP_BITS, scan.persistent[number / MERCURY_MAP_BITS]);
}

/* Has a page copied at the instant. */
void mercury_scan_mark(phys_addr_t phys)
{
	s64 number = mercury_kept_number(phys);

	if (number >= 0)
		mark_persistent(number);
}

static void mark_free(unsigned long pfn, unsigned long count)
{
	if (scan.free)
		bitmap_set(scan.free[pfn / MERCURY_MAP_BITS], pfn % MERCURY_MAP_BITS, count);
}

/* Marks a block of a CPU's own list. CPUs do so at once, and their pages may share a word of the map. */
static void mark_free_block(unsigned long pfn, unsigned int order)
{
	unsigned long end = pfn + (1UL << order);

	for (; pfn < end; pfn++)
		set_bit(pfn % MERCURY_MAP_BITS, scan.free[pfn / MERCURY_MAP_BITS]);
}

static bool is_free(unsigned long pfn)
{
	return scan.free && test_bit(pfn % MERCURY_MAP_BITS, scan.free[pfn / MERCURY_MAP_BITS]);
}

/* Returns the order of a list's blocks: a list for each order that is common, then one for huge pages. */
static unsigned int order_of_list(int list)
{
	int order = list / MIGRATE_PCPTYPES;

	return order <= PAGE_ALLOC_COSTLY_ORDER ? order : PMD_SHIFT - PAGE_SHIFT;
}

/*
 * Marks the pages of a zone that this CPU holds for its next allocations. Nothing else tells them from the
 * kernel's own. On PREEMPT_RT a task that changes the lists may have been preempted for the instant: their
 * pages count as the kernel's own.
 */
static void scan_own_lists(struct zone *zone)
{
	struct per_cpu_pages *lists = this_cpu_ptr(zone->per_cpu_pageset);
	struct page *page;
	int list;

	if (spin_is_locked(&lists->lock))
		return;
	for (list = 0; list < NR_PCP_LISTS; list++)
		list_for_each_entry(page, &lists->lists[list], pcp_list)
			mark_free_block(page_to_pfn(page), order_of_list(list));
}

/*
 * Returns true if a task was preempted for the instant while it changed a zone's lists, which happens on
 * PREEMPT_RT. The first page of a block may be marked free then before its order is written: the compiler
 * has chosen both sequences.
 */
bool mercury_scan_is_torn(void)
{
	int node, zone;

	for_each_online_node(node)
		for (zone = 0; zone < MAX_NR_ZONES; zone++)
			if (populated_zone(&NODE_DATA(node)->node_zones[zone]) &&
			    spin_is_locked(&NODE_DATA(node)->node_zones[zone].lock))
				return true;
	return false;
}

static void scan_own(void)
{
	int node, zone;

	if (!scan.free)
		return;
	for_each_online_node(node)
		for (zone = 0; zone < MAX_NR_ZONES; zone++)
			if (populated_zone(&NODE_DATA(node)->node_zones[zone]))
				scan_own_lists(&NODE_DATA(node)->node_zones[zone]);
}

/* Scans pages of one block: they are online together, and their descriptors lie side by side. */
static void scan_block(unsigned int range, unsigned long pfn, unsigned long end)
{
	const struct mercury_kept *kept = mercury_kept();
	unsigned long first = PHYS_PFN(kept->ranges[range].start_phys), count;
	struct page *page = pfn_to_online_page(pfn);

	for (; page && pfn < end; pfn += count, page += count) {
		enum mercury_page_use use;

		count = min(mercury_dma_stretch(page, end - pfn, &use), end - pfn);
		if (use == MERCURY_PAGE_PERSISTENT && !is_free(pfn))
			mark_persistent(kept->numbers[range] + pfn - first);
		else if (use == MERCURY_PAGE_FREE)
			mark_free(pfn, count);
	}
}

/*
 * Scans one of so many parts of the kept memory, in blocks that no stretch of free pages crosses, nor a word
 * of their map.
 */
static void scan_part(unsigned int part, unsigned int parts)
{
	const struct mercury_kept *kept = mercury_kept();
	unsigned int i;

	for (i = 0; i < kept->count; i++) {
		unsigned long pfn = PHYS_PFN(kept->ranges[i].start_phys), next;
		unsigned long end = pfn + kept->ranges[i].pages;

		for (; pfn < end; pfn = next) {
			next = min(end, ALIGN(pfn + 1, MAX_ORDER_NR_PAGES));
			if (pfn / MAX_ORDER_NR_PAGES % parts == part)
				scan_block(i, pfn, next);
		}
	}
}

/* Lets the next scan begin, before the instant. */
void mercury_scan_begin(void)
{
	atomic_set(&scan.arrived, 0);
	atomic_set(&scan.done, 0);
}

/*
 * On each of so many CPUs at the instant. Free pages are marked first: they look like persistent DMA
 * memory.
 */
void mercury_scan_cpu(unsigned int cpus)
{
	unsigned int part;

	scan_own();
	part = atomic_inc_return(&scan.arrived) - 1;
	while (atomic_read(&scan.arrived) < cpus)
		cpu_relax();
	scan_part(part, cpus);
	atomic_inc(&scan.done);
}

/* Waits until all CPUs have done their part. */
void mercury_scan_wait(unsigned int cpus)
{
	while (atomic_read(&scan.done) < cpus)
		cpu_relax();
}
