// SPDX-License-Identifier: GPL-2.0-only
/*
 * The memory that a snapshot keeps: System RAM without its holes. Holes are what is written past the nested
 * tables: the hypervisor's own memory, the shared blocks and the memory of the snapshot itself.
 *
 * The hypervisor's tables map the kept memory before the instant, and lose it again after the end.
 */
#include <linux/ioport.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/sort.h>
#include <asm/io.h>

#include "snapshot.h"

static struct mercury_kept kept;

const struct mercury_kept *mercury_kept(void)
{
	return &kept;
}

/* Returns the number of a page among those that are kept, or -1. */
s64 mercury_kept_number(phys_addr_t phys)
{
	return mercury_frames_number(kept.ranges, kept.numbers, kept.count, phys);
}

struct holes {
	struct mercury_owned_range *ranges;
	unsigned int count;
	u32 code;
};

static void add_hole(struct holes *holes, phys_addr_t start, u64 pages)
{
	if (holes->count == MERCURY_HOLES_MAX) {
		holes->code = MERCURY_CODE_NO_MEMORY;
		return;
	}
	holes->ranges[holes->count].start_phys = start;
	holes->ranges[holes->count++].pages = pages;
}

/* Lists all holes in order, and maps the memory of the snapshot itself for the hypervisor. */
static void find_holes(struct holes *holes)
{
	struct mercury_owned_range range;
	unsigned int i;
	bool is_pool;
	int cpu;

	for (i = 0; mercury_owned(i, &range); i++)
		add_hole(holes, range.start_phys, range.pages);
	for_each_possible_cpu(cpu)
		if (mercury_cpu(cpu)->shared)
			add_hole(holes, virt_to_phys(mercury_cpu(cpu)->shared),
				 MERCURY_SHARED_CPU_SIZE / PAGE_SIZE);
	for (i = 0; mercury_piece_range(i, &range, &is_pool); i++) {
		add_hole(holes, range.start_phys, range.pages);
		if (holes->code == MERCURY_CODE_OK)
			holes->code = mercury_map_memory(range.start_phys,
							 range.start_phys + range.pages * PAGE_SIZE);
	}
	sort(holes->ranges, holes->count, sizeof(*holes->ranges), mercury_frames_by_start, NULL);
}

/*
 * Keeps a part of memory and maps it. The hypervisor's own memory has guard pages, and is mapped elsewhere.
 */
static u32 keep_sound(phys_addr_t start, phys_addr_t end)
{
	if (start >= end)
		return MERCURY_CODE_OK;
	if (kept.count == MERCURY_HOLES_MAX)
		return MERCURY_CODE_NO_MEMORY;
	kept.numbers[kept.count] = kept.pages;
	kept.ranges[kept.count].start_phys = start;
	kept.ranges[kept.count++].pages = (end - start) / PAGE_SIZE;
	kept.pages += (end - start) / PAGE_SIZE;
	return mercury_map_memory(start, end);
}

/* Keeps a part of memory without its broken pages: to read one of those is a machine check. */
static u32 keep(phys_addr_t start, phys_addr_t end)
{
	phys_addr_t phys;
	u32 code;

	for (phys = start; phys < end; phys += PAGE_SIZE) {
		struct page *page = pfn_to_online_page(PHYS_PFN(phys));

		if (IS_ALIGNED(phys, SZ_128M))
			cond_resched();
		if (!page || !PageHWPoison(page))
			continue;
		code = keep_sound(start, phys);
		if (code != MERCURY_CODE_OK)
			return code;
		start = phys + PAGE_SIZE;
	}
	return keep_sound(start, end);
}

static int keep_ram(struct resource *ram, void *argument)
{
	phys_addr_t start = PAGE_ALIGN(ram->start), end = (ram->end + 1) & PAGE_MASK;
	struct holes *holes = argument;

	holes->code = mercury_frames_without(start, end, holes->ranges, holes->count, keep);
	return holes->code != MERCURY_CODE_OK;
}

/* Finds the memory to keep. All pieces of the snapshot must be allocated. */
u32 mercury_kept_find(void)
{
	struct holes holes = {};

	holes.ranges = kvmalloc_array(MERCURY_HOLES_MAX, sizeof(*holes.ranges), GFP_KERNEL);
	if (!holes.ranges)
		return MERCURY_CODE_NO_MEMORY;
	find_holes(&holes);
	if (holes.code == MERCURY_CODE_OK)
		walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1,
				    &holes, keep_ram);
	kvfree(holes.ranges);
	return holes.code;
}

static int count_ram(struct resource *ram, void *pages)
{
	*(unsigned long *)pages += PHYS_PFN(ram->end) - PHYS_PFN(ram->start) + 1;
	return 0;
}

/*
 * Returns the pages of all memory, including the memory that the kernel keeps for itself or for a crash
 * kernel, and the memory that balloons hold.
 */
unsigned long mercury_ram_pages(void)
{
	unsigned long pages = 0;

	walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1, &pages,
			    count_ram);
	return pages;
}

u32 mercury_kept_allocate(void)
{
	kept.ranges = mercury_piece_of(MERCURY_HOLES_MAX * sizeof(*kept.ranges), GFP_KERNEL);
	kept.numbers = mercury_piece_of(MERCURY_HOLES_MAX * sizeof(*kept.numbers), GFP_KERNEL);
	return kept.ranges && kept.numbers ? MERCURY_CODE_OK : MERCURY_CODE_NO_MEMORY;
}

void mercury_kept_forget(void)
{
	memset(&kept, 0, sizeof(kept));
}
