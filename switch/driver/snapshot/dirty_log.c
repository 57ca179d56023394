// SPDX-License-Identifier: GPL-2.0-only
/*
 * The dirty log of memory. The hypervisor notes what CPUs write, dma_log.c notes what devices write. Each
 * collection puts the pages that were written since the one before into a map.
 */
#include <linux/bitmap.h>
#include <linux/cpu.h>
#include <linux/gfp.h>
#include <linux/mm.h>

#include "snapshot.h"

static struct {
	/* By page frame number, in pieces: pages written since the last collection, and pages collected. */
	unsigned long **written, **collected;
	unsigned long count;
	/* The argument of calls. */
	void *argument;
	bool on;
} dirty_log;

/*
 * Frames that were free are read as zeros. If free pages must be kept, a dirty log would not suffice:
 * the frames hold something that was not written.
 */
u32 mercury_dirty_log_allocate(u64 flags)
{
	if (!(flags & MERCURY_SNAPSHOT_TRACK))
		return MERCURY_CODE_OK;
	if (!mercury_scan_free(&dirty_log.count))
		return MERCURY_CODE_LOG_UNSUPPORTED;
	dirty_log.argument = mercury_piece(0, GFP_KERNEL);
	dirty_log.written = mercury_pfn_map(&dirty_log.count);
	dirty_log.collected = mercury_pfn_map(&dirty_log.count);
	if (!dirty_log.argument || !dirty_log.written || !dirty_log.collected)
		return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	return mercury_dma_log_start(dirty_log.written, dirty_log.count);
}

void mercury_dirty_log_forget(void)
{
	memset(&dirty_log, 0, sizeof(dirty_log));
}

bool mercury_dirty_log_is_on(void)
{
	return dirty_log.on;
}

/* Returns the pages of the last collection, and the pieces of that map; NULL if there is no log. */
unsigned long **mercury_dirty_log_collected(unsigned long *count)
{
	*count = dirty_log.count;
	return dirty_log.on ? dirty_log.collected : NULL;
}

static u32 enter(struct mercury_cpu *m)
{
	return mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_LOG_ENTER, NULL);
}

/* Has all CPUs use the log's tables, and forget what they remember of those tables. */
static u32 enter_everywhere(void)
{
	u32 code = MERCURY_CODE_OK;
	int cpu;

	cpus_read_lock();
	mercury_on_cpus(cpu_online_mask, enter);
	for_each_online_cpu(cpu)
		if (code == MERCURY_CODE_OK)
			code = mercury_cpu(cpu)->code;
	if (code == MERCURY_CODE_OK && !cpumask_equal(mercury_instant_cpus(), cpu_online_mask))
		code = MERCURY_CODE_SNAPSHOT_HOTPLUG;
	cpus_read_unlock();
	return code;
}

/* Begins the log. After a failure the log is incomplete, and its tables stay until the snapshot ends. */
u32 mercury_dirty_log_begin(void)
{
	const struct mercury_kept *kept = mercury_kept();
	struct mercury_log_setup *setup = dirty_log.argument;
	u32 code;

	if (!dirty_log.written || dirty_log.on)
		return MERCURY_CODE_NO_SNAPSHOT;
	code = mercury_dma_log_carry_over();
	if (code != MERCURY_CODE_OK)
		return code;
	setup->memory_virt = (u64)kept->ranges;
	setup->memory_count = kept->count;
	setup->written_virt = (u64)dirty_log.written;
	setup->collected_virt = (u64)dirty_log.collected;
	setup->map_count = dirty_log.count;
	code = mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_LOG_BEGIN, setup);
	if (code != MERCURY_CODE_OK)
		return code;
	dirty_log.on = true;
	return enter_everywhere();
}

/*
 * Adds the persistent DMA memory of one kept range to the collection; returns how many pages are new in it.
 */
static unsigned long collect_persistent(unsigned long first, u64 number, u64 pages)
{
	unsigned long **persistent = mercury_scan_persistent();
	unsigned long added = 0;
	u64 page;

	for (page = 0; page < pages; page++, number++) {
		unsigned long pfn = first + page, bit = number % MERCURY_MAP_BITS;
		const unsigned long *bits = persistent[number / MERCURY_MAP_BITS];

		/* Most words are empty. */
		if (!bits[bit / BITS_PER_LONG]) {
			page += BITS_PER_LONG - 1 - number % BITS_PER_LONG;
			number += BITS_PER_LONG - 1 - number % BITS_PER_LONG;
			continue;
		}
		if (test_bit(bit, bits))
			added += !test_and_set_bit(pfn % MERCURY_MAP_BITS,
						   dirty_log.collected[pfn / MERCURY_MAP_BITS]);
	}
	return added;
}

static unsigned long collect_all_persistent(void)
{
	const struct mercury_kept *kept = mercury_kept();
	unsigned long added = 0;
	unsigned int i;

	for (i = 0; i < kept->count; i++) {
		added += collect_persistent(PHYS_PFN(kept->ranges[i].start_phys), kept->numbers[i],
					    kept->ranges[i].pages);
		cond_resched();
	}
	return added;
}

static u32 collect_from_hypervisor(u64 *pages)
{
	struct mercury_log_collect *collect = dirty_log.argument;
	u32 code;

	collect->next_phys = 0;
	collect->pages = 0;
	do {
		code = mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_LOG_COLLECT, collect);
		cond_resched();
	} while (code == MERCURY_CODE_OK && collect->next_phys != U64_MAX);
	*pages = collect->pages;
	return code;
}

/*
 * Collects the pages that may have been written since the last collection. The caller reads them afterwards.
 * A page that is written meanwhile is read as written, or it is noted again.
 *
 * After the instant CPUs use the snapshot's tables, and do not return to the log's.
 */
u32 mercury_dirty_log_collect(struct mercury_log_request *request, bool after_instant)
{
	unsigned long at;
	u32 code;

	if (!dirty_log.on)
		return MERCURY_CODE_NO_SNAPSHOT;
	for (at = 0; at < dirty_log.count; at++)
		if (dirty_log.collected[at])
			memset(dirty_log.collected[at], 0, MERCURY_MAP_BITS / BITS_PER_BYTE);
	code = collect_from_hypervisor(&request->pages);
	if (code == MERCURY_CODE_OK && !after_instant)
		code = enter_everywhere();
	request->device_pages = mercury_dma_log_collect(dirty_log.collected);
	if (after_instant)
		request->device_pages += collect_all_persistent();
	request->pages += request->device_pages;
	return code;
}
