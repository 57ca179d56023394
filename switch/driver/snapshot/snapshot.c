// SPDX-License-Identifier: GPL-2.0-only
/*
 * Snapshots of memory: what the hypervisor needs for one, and the instant. switch/abi/src/snapshot.rs has the
 * order of its calls.
 *
 * While there is one the hypervisor can map all of the system's memory. What it keeps is System RAM, without
 * what is written round the nested tables: the hypervisor's own memory, the shared blocks, and all that is
 * here for the snapshot's sake. These pages are marked reserved, as the hypervisor's own are. The tables that
 * map memory are written before the instant and after the end only.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/fs.h>
#include <linux/gfp.h>
#include <linux/ioport.h>
#include <linux/memory.h>
#include <linux/mm.h>
#include <linux/notifier.h>
#include <linux/oom.h>
#include <linux/random.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/sort.h>
#include <linux/stop_machine.h>
#include <linux/suspend.h>
#include <linux/swap.h>
#include <linux/syscore_ops.h>
#include <linux/timer.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <linux/vmalloc.h>
#include <asm/io.h>
#include <asm/smp.h>
#include <asm/special_insns.h>
#include <asm/x86_init.h>

#include "snapshot.h"

#define POOL_ORDER_MAX	9
/* Pages that do where there is no more to be had. */
#define POOL_ENOUGH	(SZ_512M / PAGE_SIZE)
/* Of each piece of a map of pages: it is for 4 GiB of memory. */
#define MAP_ORDER	get_order(MERCURY_MAP_BITS / BITS_PER_BYTE)
/* The pool takes nothing from programs: kswapd is woken, and frees what is cached. */
#define GFP_POOL	(GFP_NOWAIT | __GFP_NOWARN | __GFP_NOMEMALLOC)
/* How often kswapd is waited for, each time for a tick, while it frees nothing. */
#define POOL_PATIENCE	(HZ / 2)
/* Pieces of memory that are not kept, and ranges between them. */
#define HOLES_MAX	(SZ_1M / sizeof(struct mercury_owned_range))

/* What has been done of an instant. */
enum step {
	BEGUN,
	QUIESCED,
	GATHERED,
	SUSPENDED,
	SEARCHED,
	SAVED,
	ENTERED,
	RESUMED,
	RELEASED,
	THAWED,
	STEPS,
};

static struct {
	bool live;
	/* At the instant the kernel refused to stop what is its own; the CPU that asks it. */
	int refused;
	int first_cpu;
	/* The first CPU is ready for the others. */
	bool ready;
	/* The instant has come, and from then on writes are seen. */
	bool past;
	/* CPUs for which it was prepared; at the instant there were others; and another one came later. */
	struct cpumask cpus;
	bool others;
	bool another_cpu;
	/* Free pages of swap areas while nothing is swapped out; at the instant there were fewer. */
	u64 swap_pages;
	bool swapped;
	/* Memory broke after it was looked through. */
	bool broken;
	/* Pages of memory when it was prepared; more came before the instant. */
	unsigned long ram_pages;
	bool more_memory;
	/* This machine was brought back from an image; it was put back to this snapshot. */
	bool restored;
	bool rolled_back;
	/* CPUs that were, so far. */
	atomic_t returned;
	/* When each step was done, by the clock of the CPU that leads. */
	u64 done_tsc[STEPS];
	/* It is kept: no process owns it. */
	bool kept;
	/* All that was allocated for it, in pieces. */
	struct page **pieces;
	u8 *orders;
	unsigned int piece_count;
	/* From this one on, up to `pool_end`: the pool's at the instant. Its pages are in `pool`. */
	unsigned int pool_first, pool_end;
	u64 added_pages, returned_pages;
	/* Under pool_lock: the hypervisor gets the pool; the system has taken of it before the instant. */
	bool donating, pool_lost;
	/* Arguments of calls: of whoever makes the pool larger, and smaller; that under pool_lock. */
	struct mercury_page_list *more, *reclaimed;
	/* What is kept, for the hypervisor. */
	struct mercury_owned_range *memory;
	unsigned int memory_count;
	u64 memory_pages;
	/* The number of the first page of each range of it. */
	u64 *numbers;
	u64 *hashes;
	/* Of what is kept: what devices write all the time. */
	unsigned long **lasting;
	unsigned long bits;
	/* Of all addresses: what was free. Its pieces are there where there is memory. */
	unsigned long **free;
	unsigned long free_count;
	/* Likewise: what was written since it was collected last, and what was collected. There is a log. */
	unsigned long **written, **collected;
	bool logging;
	/* The kernel's core is still, and nothing is allocated any more. */
	bool still;
	/* CPUs that have looked at their own lists at the instant, and at their part of the rest. */
	atomic_t looking, looked;
	/* What it was prepared with. */
	u64 flags, pool_pages;
	/* Arguments of calls. */
	struct mercury_page_list *list;
	struct mercury_take_list *take;
	void *buffer;
	/* Of one that is kept: what it comes back to. */
	struct mercury_restart_cpu *restart_cpus;
} snapshot;

/*
 * The pages of the pool, each by itself: some come later, and some go before the end. The system may ask for
 * them at any time.
 */
static LIST_HEAD(pool);
static DEFINE_SPINLOCK(pool_lock);

/* Why the last one that was kept is none any more. */
static u32 lost_because;
/* How this machine was put back last. */
static struct mercury_rollback_report last_rollback;

static u32 call_for(u64 what, void *argument, u64 *value)
{
	return mercury_hypercall(MERCURY_HYPERCALL_SNAPSHOT, what, (u64)argument, value);
}

static u32 call(u64 what, void *argument)
{
	u64 unused;

	return call_for(what, argument, &unused);
}

/* Pages that the snapshot does not keep; NULL if there are none, which the caller says in its own words. */
static void *piece(unsigned int order, gfp_t flags)
{
	struct page *page;
	unsigned int i;

	if (snapshot.piece_count == HOLES_MAX)
		return NULL;
	page = alloc_pages(flags | __GFP_NOWARN, order);
	if (!page)
		return NULL;
	for (i = 0; i < 1U << order; i++)
		SetPageReserved(page + i);
	snapshot.orders[snapshot.piece_count] = order;
	snapshot.pieces[snapshot.piece_count++] = page;
	return page_address(page);
}

static void pool_add(struct page *page)
{
	SetPageReserved(page);
	spin_lock_bh(&pool_lock);
	list_add(&page->lru, &pool);
	spin_unlock_bh(&pool_lock);
}

/* Nobody but this one knows the page any more. */
static void free_pool_page(struct page *page)
{
	list_del(&page->lru);
	ClearPageReserved(page);
	__free_page(page);
}

static void free_pieces(void)
{
	struct page *one, *next;
	unsigned int i, page;

	list_for_each_entry_safe(one, next, &pool, lru)
		free_pool_page(one);
	for (i = 0; i < snapshot.piece_count; i++) {
		if (i >= snapshot.pool_first && i < snapshot.pool_end)
			continue;
		for (page = 0; page < 1U << snapshot.orders[i]; page++)
			ClearPageReserved(snapshot.pieces[i] + page);
		__free_pages(snapshot.pieces[i], snapshot.orders[i]);
	}
	kvfree(snapshot.pieces);
	kvfree(snapshot.orders);
	memset(&snapshot, 0, sizeof(snapshot));
}

/* How many pages the pool may have, so that the system can go on without taking memory from programs. */
static u64 spare_pages(void)
{
	u64 available = si_mem_available();
	u64 margin = clamp_t(u64, available / 8, SZ_32M / PAGE_SIZE, SZ_256M / PAGE_SIZE);

	return available > margin ? available - margin : 0;
}

/* One more piece for the pool, of 1 << order pages; false if there is none. */
static bool add_to_pool(unsigned int order)
{
	struct page *page;
	unsigned int i;

	if (!piece(order, GFP_POOL))
		return false;
	page = snapshot.pieces[snapshot.pool_end++];
	split_page(page, order);
	for (i = 0; i < 1U << order; i++)
		pool_add(page + i);
	return true;
}

/*
 * Pages for the pool, in the largest pieces that can be had: large ones are tried again now and then, for
 * what is freed for small ones makes some. A quarter of what is wanted will do, or POOL_ENOUGH.
 */
static u32 allocate_pool(u64 pages)
{
	unsigned int order = POOL_ORDER_MAX, patience = POOL_PATIENCE;
	u64 left, most;

	pages = min_t(u64, pages, (u64)(HOLES_MAX / 2) << POOL_ORDER_MAX);
	most = min(pages, spare_pages());
	left = most;

	/* Holes are found among others': these must not fill the table. */
	while (left && snapshot.piece_count < HOLES_MAX / 2 && !READ_ONCE(snapshot.pool_lost)) {
		while (order && 1U << order > left)
			order--;
		if (add_to_pool(order)) {
			left -= 1U << order;
			patience = POOL_PATIENCE;
			if (!(snapshot.piece_count % 64))
				order = POOL_ORDER_MAX;
			cond_resched();
		} else if (order) {
			order--;
		} else if (patience && !signal_pending(current)) {
			patience--;
			schedule_timeout_uninterruptible(1);
		} else {
			break;
		}
	}
	return most - left >= min_t(u64, pages / 4, POOL_ENOUGH) ? MERCURY_CODE_OK :
								   MERCURY_CODE_NO_MEMORY;
}

/* From now on the pool's pages are the hypervisor's; false if the system has taken some. */
static bool begin_to_donate(void)
{
	spin_lock_bh(&pool_lock);
	snapshot.donating = !snapshot.pool_lost;
	spin_unlock_bh(&pool_lock);
	return snapshot.donating;
}

/* Gives the pool to the hypervisor. */
static u32 donate(void)
{
	struct mercury_page_list *list = snapshot.list;
	unsigned int i, page;
	u32 code;

	if (!begin_to_donate())
		return MERCURY_CODE_SNAPSHOT_POOL;
	list->count = 0;
	for (i = snapshot.pool_first; i < snapshot.pool_end; i++) {
		for (page = 0; page < 1U << snapshot.orders[i]; page++) {
			list->pages_phys[list->count++] = page_to_phys(snapshot.pieces[i] + page);
			if (list->count < MERCURY_PAGE_LIST_MAX)
				continue;
			code = call(MERCURY_SNAPSHOT_CALL_DONATE, list);
			if (code != MERCURY_CODE_OK)
				return code;
			list->count = 0;
			cond_resched();
		}
	}
	return call(MERCURY_SNAPSHOT_CALL_DONATE, list);
}

/* The number of a page among those that are kept; -1: it is not. */
static s64 number_of(phys_addr_t phys)
{
	unsigned int first = 0, last = snapshot.memory_count;

	while (first < last) {
		unsigned int middle = (first + last) / 2;
		const struct mercury_owned_range *range = &snapshot.memory[middle];

		if (phys < range->start_phys)
			last = middle;
		else if (phys >= range->start_phys + range->pages * PAGE_SIZE)
			first = middle + 1;
		else
			return snapshot.numbers[middle] + (phys - range->start_phys) / PAGE_SIZE;
	}
	return -1;
}

/*
 * Smaller pieces come from lists of single CPUs, over and over the same: what is in these was not free at the
 * instant, and may not have been taken.
 */
#define POOL_ORDER_MIN	(PAGE_ALLOC_COSTLY_ORDER + 1)

/* What the system has to spare and was free, or has been taken, can be used for the pool. */
static unsigned int grow_pool(void)
{
	struct mercury_page_list *list = snapshot.more;
	unsigned int i, given = 0, kept = 0;
	struct page *page;

	while (given + (1U << POOL_ORDER_MIN) <= MERCURY_PAGE_LIST_MAX) {
		page = alloc_pages(GFP_NOWAIT | __GFP_NOWARN | __GFP_NOMEMALLOC, POOL_ORDER_MIN);
		if (!page)
			break;
		split_page(page, POOL_ORDER_MIN);
		for (i = 0; i < 1U << POOL_ORDER_MIN; i++) {
			/* One that the hypervisor does not map is no use. */
			if (number_of(page_to_phys(page + i)) < 0) {
				__free_page(page + i);
				continue;
			}
			pool_add(page + i);
			list->pages_phys[given++] = page_to_phys(page + i);
		}
	}
	list->count = given;
	if (given && call(MERCURY_SNAPSHOT_CALL_DONATE, list) == MERCURY_CODE_OK)
		kept = given - list->count;
	spin_lock_bh(&pool_lock);
	for (i = 0; i < given - kept; i++)
		free_pool_page(pfn_to_page(PHYS_PFN(list->pages_phys[i])));
	spin_unlock_bh(&pool_lock);
	snapshot.added_pages += kept;
	return kept;
}

/* At each look at most: 8 MiB. */
#define POOL_BATCHES	4

static bool pool_is_low(void)
{
	struct mercury_snapshot_status *status = (void *)snapshot.more;
	u64 all = snapshot.pool_pages + snapshot.added_pages - READ_ONCE(snapshot.returned_pages);

	return call(MERCURY_SNAPSHOT_CALL_STATUS, status) == MERCURY_CODE_OK && status->exact &&
	       status->free_pages < all / 4;
}

static void look_after_pool(struct timer_list *unused);
static DEFINE_TIMER(pool_timer, look_after_pool);

/*
 * In each tick. Not by a task: a CPU whose writer waits in the kernel for the pool runs no other one, but
 * it takes interrupts.
 */
static void look_after_pool(struct timer_list *unused)
{
	unsigned int i = 0;

	while (i < POOL_BATCHES && pool_is_low() && grow_pool())
		i++;
	mod_timer(&pool_timer, jiffies + 1);
}

static void leave_pool_alone(void)
{
#if KERNEL_VERSION(6, 2, 0) <= LINUX_VERSION_CODE
	timer_delete_sync(&pool_timer);
#else
	del_timer_sync(&pool_timer);
#endif
}

static void reclaim(struct mercury_page_list *list)
{
	list->count = MERCURY_PAGE_LIST_MAX;
	if (call(MERCURY_SNAPSHOT_CALL_RECLAIM, list) != MERCURY_CODE_OK)
		list->count = 0;
}

/* Pages of the pool that the hypervisor does not know yet. */
static void take_from_pool(struct mercury_page_list *list)
{
	struct page *page;

	list->count = 0;
	list_for_each_entry(page, &pool, lru) {
		if (list->count == MERCURY_PAGE_LIST_MAX)
			break;
		list->pages_phys[list->count++] = page_to_phys(page);
	}
}

/*
 * The system has no memory left: before it kills anybody it gets what is free of the pool, and then all of
 * it, without a snapshot. Before the instant there will be none in any case: what the system does with these
 * pages would not be kept, for they were left out as the pool's.
 */
static int give_back(struct notifier_block *unused, unsigned long event, void *freed)
{
	bool past = mercury_snapshot_is_past();
	struct mercury_page_list *list;
	unsigned int i;

	spin_lock_bh(&pool_lock);
	list = snapshot.reclaimed;
	if (!list)
		goto unlock;
	if (past || snapshot.donating)
		reclaim(list);
	else
		take_from_pool(list);
	if (past && !list->count && !snapshot.kept) {
		call(MERCURY_SNAPSHOT_CALL_GIVE_UP,
		     (void *)(unsigned long)MERCURY_CODE_SNAPSHOT_POOL);
		reclaim(list);
	}
	if (!past && list->count)
		WRITE_ONCE(snapshot.pool_lost, true);
	for (i = 0; i < list->count; i++)
		free_pool_page(pfn_to_page(PHYS_PFN(list->pages_phys[i])));
	snapshot.returned_pages += list->count;
	*(unsigned long *)freed += list->count;
unlock:
	spin_unlock_bh(&pool_lock);
	return NOTIFY_OK;
}

static struct notifier_block no_memory = { .notifier_call = give_back };

static int by_start(const void *left, const void *right)
{
	const struct mercury_owned_range *a = left, *b = right;

	return a->start_phys < b->start_phys ? -1 : a->start_phys > b->start_phys;
}

struct holes {
	struct mercury_owned_range *ranges;
	unsigned int count;
	u32 code;
};

static void add_hole(struct holes *holes, phys_addr_t start, u64 pages)
{
	if (holes->count == HOLES_MAX) {
		holes->code = MERCURY_CODE_NO_MEMORY;
		return;
	}
	holes->ranges[holes->count].start_phys = start;
	holes->ranges[holes->count++].pages = pages;
}

/* Everything that is not to be kept, in order. */
static void find_holes(struct holes *holes)
{
	struct mercury_owned_range owned;
	unsigned int i;
	int cpu;

	for (i = 0; mercury_owned(i, &owned); i++)
		add_hole(holes, owned.start_phys, owned.pages);
	for_each_possible_cpu(cpu)
		add_hole(holes, virt_to_phys(mercury_cpu(cpu)->shared),
			 MERCURY_SHARED_CPU_SIZE / PAGE_SIZE);
	for (i = 0; i < snapshot.piece_count; i++) {
		phys_addr_t start = page_to_phys(snapshot.pieces[i]);

		add_hole(holes, start, 1UL << snapshot.orders[i]);
		if (holes->code == MERCURY_CODE_OK)
			holes->code = mercury_map_memory(start,
							 start + (PAGE_SIZE << snapshot.orders[i]));
	}
	sort(holes->ranges, holes->count, sizeof(*holes->ranges), by_start, NULL);
}

/* What is kept is mapped; of the hypervisor's own memory that would be too much: it has guards. */
static int keep_sound(phys_addr_t start, phys_addr_t end, struct holes *holes)
{
	if (start >= end)
		return 0;
	if (snapshot.memory_count == HOLES_MAX) {
		holes->code = MERCURY_CODE_NO_MEMORY;
		return 1;
	}
	snapshot.numbers[snapshot.memory_count] = snapshot.memory_pages;
	snapshot.memory[snapshot.memory_count].start_phys = start;
	snapshot.memory[snapshot.memory_count++].pages = (end - start) / PAGE_SIZE;
	snapshot.memory_pages += (end - start) / PAGE_SIZE;
	holes->code = mercury_map_memory(start, end);
	return holes->code != MERCURY_CODE_OK;
}

/* Memory that is broken is not read, for that would be a machine check. */
static int keep(phys_addr_t start, phys_addr_t end, struct holes *holes)
{
	phys_addr_t phys;

	for (phys = start; phys < end; phys += PAGE_SIZE) {
		struct page *page = pfn_to_online_page(PHYS_PFN(phys));

		if (!page || !PageHWPoison(page))
			continue;
		if (keep_sound(start, phys, holes))
			return 1;
		start = phys + PAGE_SIZE;
	}
	return keep_sound(start, end, holes);
}

/* One range of System RAM without the holes in it. */
static int keep_ram(struct resource *ram, void *argument)
{
	phys_addr_t start = PAGE_ALIGN(ram->start), end = (ram->end + 1) & PAGE_MASK;
	struct holes *holes = argument;
	unsigned int i;

	if (start >= end)
		return 0;
	for (i = 0; i < holes->count && start < end; i++) {
		phys_addr_t hole = holes->ranges[i].start_phys;
		phys_addr_t hole_end = hole + holes->ranges[i].pages * PAGE_SIZE;

		if (hole_end <= start || hole >= end)
			continue;
		if (keep(start, hole, holes))
			return 1;
		start = hole_end;
	}
	return keep(start, end, holes);
}

static u32 find_memory(void)
{
	struct holes holes = {};

	holes.ranges = kvmalloc_array(HOLES_MAX, sizeof(*holes.ranges), GFP_KERNEL);
	if (!holes.ranges)
		return MERCURY_CODE_NO_MEMORY;
	find_holes(&holes);
	if (holes.code == MERCURY_CODE_OK)
		walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1,
				    &holes, keep_ram);
	kvfree(holes.ranges);
	return holes.code;
}

/* A bit for each page, in pieces. */
static bool allocate_lasting(unsigned long pages)
{
	unsigned long count = DIV_ROUND_UP(pages, MERCURY_MAP_BITS), i;

	snapshot.lasting = piece(get_order(count * sizeof(*snapshot.lasting)), GFP_KERNEL);
	if (!snapshot.lasting)
		return false;
	for (i = 0; i < count; i++) {
		snapshot.lasting[i] = piece(MAP_ORDER, GFP_KERNEL | __GFP_ZERO);
		if (!snapshot.lasting[i])
			return false;
	}
	snapshot.bits = count * MERCURY_MAP_BITS;
	return true;
}

static int count_ram(struct resource *ram, void *pages)
{
	*(unsigned long *)pages += PHYS_PFN(ram->end) - PHYS_PFN(ram->start) + 1;
	return 0;
}

/* Pages of all memory: what the kernel keeps for itself or for a crash kernel, and balloons hold, too. */
static unsigned long ram_pages(void)
{
	unsigned long pages = 0;

	walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1, &pages,
			    count_ram);
	return pages;
}

static int find_end(struct resource *ram, void *end)
{
	*(u64 *)end = max_t(u64, *(u64 *)end, ram->end + 1);
	return 0;
}

static int allocate_free_piece(struct resource *ram, void *unused)
{
	unsigned long at, last = PHYS_PFN(ram->end) / MERCURY_MAP_BITS;

	for (at = PHYS_PFN(ram->start) / MERCURY_MAP_BITS; at <= last; at++) {
		if (!snapshot.free[at])
			snapshot.free[at] = piece(MAP_ORDER, GFP_KERNEL | __GFP_ZERO);
		if (!snapshot.free[at])
			return 1;
	}
	return 0;
}

/*
 * Free pages come back as zeros, which is nothing to anybody but a kernel that looks for what it wrote into
 * them. One that is put back finds there what was written meanwhile: not where they have to be zeros.
 */
static bool allocate_free(u64 flags)
{
	unsigned long type = IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY;
	u64 end = 0;

	if (page_poisoning_enabled_static() || (flags & MERCURY_SNAPSHOT_KEEP && want_init_on_free()))
		return true;
	walk_iomem_res_desc(IORES_DESC_NONE, type, 0, -1, &end, find_end);
	snapshot.free_count = DIV_ROUND_UP(PHYS_PFN(end), MERCURY_MAP_BITS);
	snapshot.free = piece(get_order(snapshot.free_count * sizeof(*snapshot.free)),
			      GFP_KERNEL | __GFP_ZERO);
	return snapshot.free &&
	       walk_iomem_res_desc(IORES_DESC_NONE, type, 0, -1, NULL, allocate_free_piece) <= 0;
}

static int allocate_log_piece(struct resource *ram, void *unused)
{
	unsigned long at, last = PHYS_PFN(ram->end) / MERCURY_MAP_BITS;

	for (at = PHYS_PFN(ram->start) / MERCURY_MAP_BITS; at <= last; at++) {
		if (snapshot.written[at])
			continue;
		snapshot.written[at] = piece(MAP_ORDER, GFP_KERNEL | __GFP_ZERO);
		snapshot.collected[at] = piece(MAP_ORDER, GFP_KERNEL | __GFP_ZERO);
		if (!snapshot.written[at] || !snapshot.collected[at])
			return 1;
	}
	return 0;
}

/*
 * Where free pages have to hold something, it would not be enough to know what was written: they were sent as
 * zeros.
 */
static u32 allocate_log(void)
{
	unsigned int order = get_order(snapshot.free_count * sizeof(*snapshot.written));

	if (!snapshot.free)
		return MERCURY_CODE_LOG_UNSUPPORTED;
	snapshot.written = piece(order, GFP_KERNEL | __GFP_ZERO);
	snapshot.collected = piece(order, GFP_KERNEL | __GFP_ZERO);
	if (!snapshot.written || !snapshot.collected ||
	    walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_SYSTEM_RAM | IORESOURCE_BUSY, 0, -1, NULL,
				allocate_log_piece) > 0)
		return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	return mercury_dma_log_start(snapshot.written, snapshot.free_count);
}

static u32 allocate(const struct mercury_snapshot_request *request)
{
	unsigned long pages = ram_pages();

	snapshot.ram_pages = pages;
	snapshot.pieces = kvmalloc_array(HOLES_MAX, sizeof(*snapshot.pieces), GFP_KERNEL);
	snapshot.orders = kvmalloc_array(HOLES_MAX, sizeof(*snapshot.orders), GFP_KERNEL);
	if (!snapshot.pieces || !snapshot.orders)
		return MERCURY_CODE_NO_MEMORY;
	snapshot.memory = piece(get_order(HOLES_MAX * sizeof(*snapshot.memory)), GFP_KERNEL);
	snapshot.list = piece(0, GFP_KERNEL);
	snapshot.take = piece(0, GFP_KERNEL);
	snapshot.more = piece(0, GFP_KERNEL);
	snapshot.reclaimed = piece(0, GFP_KERNEL);
	snapshot.buffer = piece(ilog2(MERCURY_TAKE_LIST_MAX), GFP_KERNEL);
	snapshot.numbers = piece(get_order(HOLES_MAX * sizeof(*snapshot.numbers)), GFP_KERNEL);
	if (!snapshot.memory || !snapshot.numbers || !snapshot.list || !snapshot.take || !snapshot.buffer ||
	    !snapshot.more || !snapshot.reclaimed)
		return MERCURY_CODE_NO_MEMORY;
	if (!allocate_lasting(pages) || !allocate_free(request->flags))
		return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	if (request->flags & MERCURY_SNAPSHOT_HASH) {
		snapshot.hashes = piece(get_order(pages * sizeof(u64)), GFP_KERNEL);
		if (!snapshot.hashes)
			return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
	}
	if (request->flags & MERCURY_SNAPSHOT_KEEP) {
		snapshot.restart_cpus =
			piece(get_order(nr_cpu_ids * sizeof(*snapshot.restart_cpus)), GFP_KERNEL);
		if (!snapshot.restart_cpus)
			return MERCURY_CODE_NO_MEMORY;
	}
	if (request->flags & MERCURY_SNAPSHOT_TRACK) {
		u32 code = allocate_log();

		if (code != MERCURY_CODE_OK)
			return code;
	}
	snapshot.pool_first = snapshot.piece_count;
	snapshot.pool_end = snapshot.piece_count;
	return allocate_pool(request->pool_pages);
}

static u32 leave_cpu(struct mercury_cpu *m)
{
	call(MERCURY_SNAPSHOT_CALL_LEAVE, NULL);
	return MERCURY_CODE_OK;
}

/* The machine is as it was before; under mercury.lock. */
void mercury_snapshot_end(void)
{
	unregister_oom_notifier(&no_memory);
	if (!snapshot.pieces && !snapshot.orders)
		return;
	mercury_rollback_disarm();
	leave_pool_alone();
	mercury_dma_log_stop();
	if ((snapshot.live || snapshot.logging) && !snapshot.restored) {
		cpus_read_lock();
		mercury_on_cpus(cpu_online_mask, leave_cpu);
		cpus_read_unlock();
	}
	if (!snapshot.restored)
		call(MERCURY_SNAPSHOT_CALL_END, NULL);
	mercury_rollback_end();
	mercury_dma_unwatch();
	mercury_dma_log_free();
	mercury_unmap_memory();
	mercury_states_free();
	free_pieces();
}

/* All that can be done before the instant. */
static u32 prepare(const struct mercury_snapshot_request *request)
{
	u32 code = MERCURY_CODE_NO_MEMORY;

	/* First: from here on the system can have back what is allocated. */
	if (!register_oom_notifier(&no_memory))
		code = allocate(request);
	cpus_read_lock();
	cpumask_copy(&snapshot.cpus, cpu_online_mask);
	if (code == MERCURY_CODE_OK)
		code = mercury_states_allocate(&snapshot.cpus);
	cpus_read_unlock();
	if (code == MERCURY_CODE_OK)
		code = find_memory();
	if (code == MERCURY_CODE_OK)
		code = call(MERCURY_SNAPSHOT_CALL_TABLES, (void *)mercury_tables_wide_cr3());
	if (code == MERCURY_CODE_OK)
		code = donate();
	if (code == MERCURY_CODE_OK && snapshot.memory_pages > snapshot.bits)
		code = MERCURY_CODE_NO_MEMORY;
	if (code == MERCURY_CODE_OK)
		code = mercury_dma_watch();
	snapshot.flags = request->flags;
	snapshot.pool_pages = request->pool_pages;
	snapshot.another_cpu = false;
	return code;
}

/* Each CPU, how it is fetched and where it goes on. */
static void list_cpus(void)
{
	struct mercury_restart_cpu *entry = snapshot.restart_cpus;
	int cpu;

	for_each_cpu(cpu, &snapshot.cpus) {
		entry->cpu = cpu;
		entry->apic_id = per_cpu(x86_cpu_to_apicid, cpu);
		entry->saved_phys = virt_to_phys(mercury_state_of(cpu));
		entry++;
	}
}

static u32 begin(void)
{
	struct mercury_snapshot_setup *setup = (void *)snapshot.take;
	u32 code;

	if (READ_ONCE(snapshot.pool_lost))
		return MERCURY_CODE_SNAPSHOT_POOL;
	setup->keep_virt = 0;
	if (snapshot.flags & MERCURY_SNAPSHOT_KEEP) {
		list_cpus();
		code = mercury_rollback_prepare(setup, snapshot.buffer, snapshot.restart_cpus);
		if (code != MERCURY_CODE_OK)
			return code;
	}
	setup->memory_virt = (u64)snapshot.memory;
	setup->memory_count = snapshot.memory_count;
	setup->hashes_virt = (u64)snapshot.hashes;
	setup->persistent_virt = (u64)snapshot.lasting;
	setup->free_virt = (u64)snapshot.free;
	setup->free_count = snapshot.free ? snapshot.free_count : 0;
	setup->cpus = cpumask_weight(&snapshot.cpus);
	setup->log = !!(snapshot.flags & MERCURY_SNAPSHOT_LOG);
	code = call(MERCURY_SNAPSHOT_CALL_BEGIN, setup);
	if (code == MERCURY_CODE_OK)
		mercury_dma_arm();
	return code;
}

bool mercury_snapshot_is_past(void)
{
	return READ_ONCE(snapshot.past);
}

static void mark(u64 number)
{
	set_bit(number % MERCURY_MAP_BITS, snapshot.lasting[number / MERCURY_MAP_BITS]);
}

/* A page that is to be copied at the instant. */
void mercury_snapshot_mark(phys_addr_t phys)
{
	s64 number = number_of(phys);

	if (number >= 0)
		mark(number);
}

static void mark_free(unsigned long pfn, unsigned long count)
{
	if (snapshot.free)
		bitmap_set(snapshot.free[pfn / MERCURY_MAP_BITS], pfn % MERCURY_MAP_BITS, count);
}

/* CPUs do this side by side, and their pages may share a word of the map. */
static void mark_free_block(unsigned long pfn, unsigned int order)
{
	unsigned long end = pfn + (1UL << order);

	for (; pfn < end; pfn++)
		set_bit(pfn % MERCURY_MAP_BITS, snapshot.free[pfn / MERCURY_MAP_BITS]);
}

/* There are some for each order that is asked for often, and behind them those of huge pages. */
static unsigned int order_of_list(int list)
{
	int order = list / MIGRATE_PCPTYPES;

	return order <= PAGE_ALLOC_COSTLY_ORDER ? order : PMD_SHIFT - PAGE_SHIFT;
}

static bool is_free(unsigned long pfn)
{
	return snapshot.free &&
	       test_bit(pfn % MERCURY_MAP_BITS, snapshot.free[pfn / MERCURY_MAP_BITS]);
}

/* Those that this CPU has for whoever allocates next: nothing else tells them from the kernel's own. */
static void look_at_lists(void)
{
	struct per_cpu_pages *lists;
	struct page *page;
	int node, zone, list;

	if (!snapshot.free)
		return;
	for_each_online_node(node) {
		for (zone = 0; zone < MAX_NR_ZONES; zone++) {
			if (!populated_zone(&NODE_DATA(node)->node_zones[zone]))
				continue;
			lists = this_cpu_ptr(NODE_DATA(node)->node_zones[zone].per_cpu_pageset);
			/*
			 * On PREEMPT_RT a task that changes them may have been preempted for this: its
			 * pages count as the kernel's own.
			 */
			if (spin_is_locked(&lists->lock))
				continue;
			for (list = 0; list < NR_PCP_LISTS; list++)
				list_for_each_entry(page, &lists->lists[list], pcp_list)
					mark_free_block(page_to_pfn(page), order_of_list(list));
		}
	}
}

/* Pages of one block: they are online together, and what the kernel says of them lies side by side. */
static void look_at(unsigned int range, unsigned long pfn, unsigned long end)
{
	unsigned long first = PHYS_PFN(snapshot.memory[range].start_phys), count;
	struct page *page = pfn_to_online_page(pfn);

	for (; page && pfn < end; pfn += count, page += count) {
		enum mercury_page_use use;

		count = min(mercury_dma_stretch(page, end - pfn, &use), end - pfn);
		if (use == MERCURY_PAGE_LASTING && !is_free(pfn))
			mark(snapshot.numbers[range] + pfn - first);
		else if (use == MERCURY_PAGE_FREE)
			mark_free(pfn, count);
	}
}

/*
 * Marks the pages that devices may have for good, and those that are free. All CPUs are here, and each does
 * its part, in blocks that no stretch of free pages crosses, nor a word of the map of those.
 */
static void look_at_all(unsigned int part, unsigned int parts)
{
	unsigned int i;

	for (i = 0; i < snapshot.memory_count; i++) {
		unsigned long pfn = PHYS_PFN(snapshot.memory[i].start_phys), next;
		unsigned long end = pfn + snapshot.memory[i].pages;

		for (; pfn < end; pfn = next) {
			next = min(end, ALIGN(pfn + 1, MAX_ORDER_NR_PAGES));
			if (pfn / MAX_ORDER_NR_PAGES % parts == part)
				look_at(i, pfn, next);
		}
	}
}

/* This machine was brought back, and there is no hypervisor for a CPU that comes; or it was put back. */
static void note_return(int how)
{
	snapshot.restored = how != MERCURY_ROLLED_BACK;
	snapshot.rolled_back = how == MERCURY_ROLLED_BACK;
	if (snapshot.restored) {
		mercury.state = MERCURY_STATE_UNLOADED;
		mercury.want_all = false;
		cpumask_clear(&mercury.wanted);
	}
	/* What the hypervisor is told is in memory that did not come back. */
	mercury_kvm_allow_now(mercury.kvm_may);
	if (x86_platform.restore_sched_clock_state)
		x86_platform.restore_sched_clock_state();
}

static void is_done(enum step step)
{
	snapshot.done_tsc[step] = rdtsc_ordered();
}

static u64 ticks_of(enum step step)
{
	return snapshot.done_tsc[step] - snapshot.done_tsc[step - 1];
}

static void fill_instant(struct mercury_instant_ticks *ticks)
{
	ticks->quiesce = ticks_of(QUIESCED);
	ticks->gather = ticks_of(GATHERED);
	ticks->suspend = ticks_of(SUSPENDED);
	ticks->search = ticks_of(SEARCHED);
	ticks->save = ticks_of(SAVED);
	ticks->enter = ticks_of(ENTERED);
	ticks->resume = ticks_of(RESUMED);
	ticks->release = ticks_of(RELEASED);
	ticks->thaw = ticks_of(THAWED);
}

/* Nobody sends anybody an interrupt before all have done away with those of the other life. */
static void drain(void)
{
	mercury_requests_drain();
	atomic_inc(&snapshot.returned);
	while (atomic_read(&snapshot.returned) < cpumask_weight(&snapshot.cpus))
		cpu_relax();
}

static u32 enter_hypervisor(bool first)
{
	u32 code;

	if (first)
		is_done(SAVED);
	code = call(MERCURY_SNAPSHOT_CALL_ENTER, NULL);
	if (first)
		is_done(ENTERED);
	return code;
}

/*
 * Swap slots that are used hold memory which no image would have. User space has said how many there are; it
 * notices itself if an area is switched on meanwhile.
 */
static bool is_swapped_out(void)
{
	return snapshot.swap_pages != MERCURY_SWAP_IN_MEMORY &&
	       get_nr_swap_pages() != (long)snapshot.swap_pages;
}

/*
 * All CPUs at once, interrupts off: who comes last lets them all go on. A machine that is brought back goes
 * on behind mercury_save(), without a hypervisor; so does one that is put back, with it.
 */
static int enter(void *unused)
{
	bool first = smp_processor_id() == snapshot.first_cpu;
	int returned, part;

	/* No CPU comes or goes here, and no task runs that needs memory, so all CPUs find the same. */
	if (!cpumask_equal(&snapshot.cpus, cpu_online_mask) || snapshot.pool_lost) {
		WRITE_ONCE(snapshot.others, true);
		return 0;
	}
	/* No CPU runs anything else, so the number of free slots does not change any more either. */
	if (is_swapped_out()) {
		WRITE_ONCE(snapshot.swapped, true);
		return 0;
	}
	if (first)
		is_done(GATHERED);
	mercury_requests_save();
	if (first) {
		mercury.at_instant = true;
		/* As in a hibernation: what is suspended takes semaphores here, with interrupts off. */
		system_state = SYSTEM_SUSPEND;
		snapshot.refused = syscore_suspend();
		if (!snapshot.refused && x86_platform.save_sched_clock_state)
			x86_platform.save_sched_clock_state();
		is_done(SUSPENDED);
		WRITE_ONCE(snapshot.still, true);
	}
	/* What is free is told when nobody allocates any more. */
	while (!READ_ONCE(snapshot.still))
		cpu_relax();
	look_at_lists();
	part = atomic_inc_return(&snapshot.looking) - 1;
	while (atomic_read(&snapshot.looking) < cpumask_weight(&snapshot.cpus))
		cpu_relax();
	look_at_all(part, cpumask_weight(&snapshot.cpus));
	atomic_inc(&snapshot.looked);
	/* Nobody is kept waiting in the hypervisor, where patience is limited. */
	if (first) {
		while (atomic_read(&snapshot.looked) < cpumask_weight(&snapshot.cpus))
			cpu_relax();
		WRITE_ONCE(snapshot.past, true);
		/* Before the CPUs are saved: a machine that arrives elsewhere has not its maps. */
		mercury_dma_log_stop();
		is_done(SEARCHED);
		WRITE_ONCE(snapshot.ready, true);
	}
	while (!READ_ONCE(snapshot.ready))
		cpu_relax();
	returned = mercury_save(mercury_state_save());
	if (returned == MERCURY_ROLLED_BACK)
		drain();
	if (returned)
		mercury_state_load();
	else
		this_cpu_ptr(&mercury_cpus)->code = enter_hypervisor(first);
	if (first && !returned)
		mercury_fence_close();
	if (first && returned) {
		mercury_fence_return();
		note_return(returned);
	}
	if (first) {
		if (!snapshot.refused)
			syscore_resume();
		system_state = SYSTEM_RUNNING;
		mercury.at_instant = false;
		is_done(RESUMED);
	}
	if (returned)
		mercury_requests_load();
	return 0;
}

/*
 * The kernel's random generator starts afresh, before any task runs, with what the other kernel gave. It can
 * be told so by the ioctl that user space has for it.
 */
static void reseed(void)
{
	struct mercury_saved_cpu *saved = mercury_state_of(snapshot.first_cpu);
	struct file *file;
	long err = -EOPNOTSUPP;

	add_device_randomness(saved->seed, sizeof(saved->seed));
	memzero_explicit(saved->seed, sizeof(saved->seed));
	file = filp_open("/dev/urandom", O_WRONLY, 0);
	if (IS_ERR(file)) {
		err = PTR_ERR(file);
	} else {
		if (file->f_op->unlocked_ioctl)
			err = file->f_op->unlocked_ioctl(file, RNDRESEEDCRNG, 0);
		filp_close(file, NULL);
	}
	if (err)
		pr_err("the random generator could not be seeded afresh: %ld\n", err);
}

/*
 * In the midst of what the kernel does for hibernation: tasks are frozen and devices still. A machine that is
 * brought back finds its devices as another kernel left them.
 */
static int instant(void *unused)
{
	int err;

	WRITE_ONCE(mercury.waits_for_sleep, false);
	/* It is said before anything is looked at: maps are as large as memory was. */
	snapshot.more_memory = ram_pages() != snapshot.ram_pages;
	if (snapshot.more_memory)
		return -EBUSY;
	snapshot.others = false;
	snapshot.swapped = false;
	snapshot.still = false;
	snapshot.ready = false;
	atomic_set(&snapshot.looking, 0);
	atomic_set(&snapshot.looked, 0);
	atomic_set(&snapshot.returned, 0);
	snapshot.first_cpu = cpumask_first(&snapshot.cpus);
	is_done(QUIESCED);
	err = mercury_dma_stop();
	if (err)
		return err;
	stop_machine(enter, NULL, cpu_online_mask);
	mercury_dma_start(snapshot.restored || snapshot.rolled_back);
	is_done(RELEASED);
	if (snapshot.restored || snapshot.rolled_back) {
		dpm_resume_start(PMSG_RESTORE);
		dpm_resume_end(PMSG_RESTORE);
		reseed();
	}
	return 0;
}

static u32 meet(struct mercury_outcome *outcome)
{
	u32 code = MERCURY_CODE_OK;
	int cpu, err;

	for_each_possible_cpu(cpu)
		mercury_cpu(cpu)->code = MERCURY_CODE_OK;
	snapshot.live = true;
	is_done(BEGUN);
	snapshot.more_memory = false;
	WRITE_ONCE(mercury.waits_for_sleep, true);
	err = hibernate_quiet_exec(instant, NULL);
	WRITE_ONCE(mercury.waits_for_sleep, false);
	if (snapshot.more_memory)
		return MERCURY_CODE_SNAPSHOT_HOTPLUG;
	if (err || snapshot.refused)
		return MERCURY_CODE_SNAPSHOT_QUIESCE;
	is_done(THAWED);
	if (snapshot.others)
		return snapshot.pool_lost ? MERCURY_CODE_SNAPSHOT_POOL : MERCURY_CODE_SNAPSHOT_HOTPLUG;
	if (snapshot.swapped)
		return MERCURY_CODE_SNAPSHOT_SWAP;
	if (snapshot.restored || snapshot.rolled_back)
		return MERCURY_CODE_OK;
	for_each_possible_cpu(cpu) {
		if (code != MERCURY_CODE_OK || mercury_cpu(cpu)->code == MERCURY_CODE_OK)
			continue;
		outcome->cpu = cpu;
		code = mercury_cpu(cpu)->code;
	}
	return code;
}

static u32 fill_status(struct mercury_snapshot_request *request)
{
	u32 code = call(MERCURY_SNAPSHOT_CALL_STATUS, snapshot.list);

	if (code == MERCURY_CODE_OK)
		memcpy(&request->status, snapshot.list, sizeof(request->status));
	request->memory_pages = snapshot.memory_pages;
	request->added_pages = snapshot.added_pages;
	request->returned_pages = READ_ONCE(snapshot.returned_pages);
	return code;
}

static u32 check(const struct mercury_snapshot_request *request)
{
	u64 known = MERCURY_SNAPSHOT_LOG | MERCURY_SNAPSHOT_KEEP | MERCURY_SNAPSHOT_TRACK;

	if (IS_ENABLED(CONFIG_MERCURY_FAULT_INJECTION))
		known |= MERCURY_SNAPSHOT_HASH;
	/* One that is kept is not waited for. */
	if ((request->flags & MERCURY_SNAPSHOT_TRACK && request->flags & MERCURY_SNAPSHOT_KEEP) ||
	    request->flags & ~known || request->pool_pages > totalram_pages())
		return MERCURY_CODE_BAD_ARGUMENT;
	if (mercury.state != MERCURY_STATE_ATTACHED ||
	    !cpumask_subset(cpu_online_mask, &mercury.wanted))
		return MERCURY_CODE_WRONG_MODE;
	return mercury_nonces_check();
}

/* Under mercury.lock, as all here. */
u32 mercury_snapshot_prepare(const struct mercury_snapshot_request *request)
{
	u32 code = check(request);

	if (code != MERCURY_CODE_OK)
		return code;
	if (snapshot.pieces)
		return MERCURY_CODE_SNAPSHOT_LIVE;
	code = prepare(request);
	if (code != MERCURY_CODE_OK)
		mercury_snapshot_end();
	return code;
}

/* In a machine that was put back to its snapshot: says so. There is none any more. */
static u32 come_back(struct mercury_snapshot_request *request)
{
	u32 code = fill_status(request);

	mercury_rollback_read(request->message);
	request->rolled_back = 1;
	last_rollback = request->status.rollback;
	mercury_snapshot_end();
	pr_warn("the machine was put back to its snapshot (reason %u, CPU %u): %llu pages; %.128s\n",
		last_rollback.reason, last_rollback.cpu, last_rollback.pages,
		(const char *)request->message);
	return code;
}

/* From here on the machine can be put back, if nothing has happened since the instant. */
static u32 keep_it(const struct mercury_snapshot_request *request)
{
	bool same;

	if (!request->status.exact)
		return request->status.invalid_because;
	/* No CPU is half-way up meanwhile. */
	cpus_read_lock();
	snapshot.kept = true;
	same = !READ_ONCE(snapshot.another_cpu) && cpumask_equal(&snapshot.cpus, cpu_online_mask);
	cpus_read_unlock();
	if (!same)
		return MERCURY_CODE_SNAPSHOT_HOTPLUG;
	lost_because = MERCURY_CODE_OK;
	mercury_rollback_arm();
	return MERCURY_CODE_OK;
}

u32 mercury_snapshot_begin(struct mercury_snapshot_request *request, struct mercury_outcome *outcome)
{
	u32 code = check(request);

	if (code != MERCURY_CODE_OK)
		return code;
	if (snapshot.live)
		return MERCURY_CODE_SNAPSHOT_LIVE;
	if (!snapshot.pieces)
		code = prepare(request);
	else if (request->flags != snapshot.flags || request->pool_pages != snapshot.pool_pages)
		return MERCURY_CODE_BAD_ARGUMENT;
	snapshot.swap_pages = request->swap_pages;
	if (code == MERCURY_CODE_OK)
		code = begin();
	if (code == MERCURY_CODE_OK)
		code = meet(outcome);
	if (snapshot.restored) {
		mercury_fence_arrive();
		mercury_snapshot_end();
		mercury_forget();
		request->restored = 1;
		return MERCURY_CODE_OK;
	}
	if (snapshot.rolled_back)
		return come_back(request);
	if (code == MERCURY_CODE_OK)
		code = fill_status(request);
	fill_instant(&request->instant);
	if (code != MERCURY_CODE_OK) {
		mercury_snapshot_end();
		return code;
	}
	if (!(request->flags & MERCURY_SNAPSHOT_KEEP)) {
		mod_timer(&pool_timer, jiffies + 1);
	} else {
		code = keep_it(request);
		if (code != MERCURY_CODE_OK)
			mercury_snapshot_end();
	}
	return code;
}

/* Whoever began it is gone. */
void mercury_snapshot_release(void)
{
	if (!snapshot.kept)
		mercury_snapshot_end();
}

/* Why the snapshot that is kept cannot be gone back to; what it has cost in *status. */
static u32 look(struct mercury_snapshot_status *status)
{
	u32 code = call(MERCURY_SNAPSHOT_CALL_STATUS, snapshot.list);

	if (code != MERCURY_CODE_OK)
		return code;
	memcpy(status, snapshot.list, sizeof(*status));
	if (!status->exact)
		return status->invalid_because;
	return mercury_dma_missed() ? MERCURY_CODE_SNAPSHOT_DEVICES : MERCURY_CODE_OK;
}

/* One that was lost is worth no memory. */
static void check_kept(void)
{
	struct mercury_snapshot_status status;

	if (!snapshot.kept)
		return;
	lost_because = look(&status);
	if (lost_because == MERCURY_CODE_OK)
		return;
	mercury_snapshot_end();
	pr_notice("the snapshot of memory was lost (code %u)\n", lost_because);
}

void mercury_snapshot_status(struct mercury_snapshot_status *status)
{
	memset(status, 0, sizeof(*status));
	if (snapshot.kept)
		look(status);
	else
		status->live = snapshot.live;
	if (!status->live)
		status->invalid_because = lost_because;
	status->rollback = last_rollback;
}

/* Nobody goes back to a snapshot that is kept any more. Not under mercury.lock. */
void mercury_snapshot_give_up_kept(u32 because)
{
	if (READ_ONCE(snapshot.kept))
		call(MERCURY_SNAPSHOT_CALL_GIVE_UP, (void *)(unsigned long)because);
}

/* A CPU is about to come online: nobody would see what it writes. Not under mercury.lock. */
static void cpu_starts(void)
{
	/* It writes before it is online, and whoever ends a snapshot meanwhile must know. */
	WRITE_ONCE(snapshot.another_cpu, true);
	mercury_snapshot_give_up_kept(MERCURY_CODE_SNAPSHOT_HOTPLUG);
}

/* Memory does not go beneath a snapshot: it is not written to on its way, and would be missed later. */
static int memory_changes(struct notifier_block *block, unsigned long action, void *data)
{
	if (action == MEM_GOING_OFFLINE && READ_ONCE(snapshot.pieces))
		return notifier_from_errno(-EBUSY);
	return NOTIFY_OK;
}

static struct notifier_block memory_notifier = { .notifier_call = memory_changes };

int mercury_snapshot_init(void)
{
	return register_memory_notifier(&memory_notifier);
}

void mercury_snapshot_exit(void)
{
	unregister_memory_notifier(&memory_notifier);
}

/* A CPU came online beneath a snapshot: it knows nothing of that, and nobody sees what it writes. */
static void cpu_is_online(void)
{
	WRITE_ONCE(snapshot.another_cpu, true);
}

static u32 panic_comes(const char *message)
{
	return mercury_rollback(MERCURY_ROLLBACK_REASON_PANIC, message);
}

const struct mercury_hooks mercury_snapshot_hooks = {
	.before_detach = mercury_snapshot_end,
	.check = check_kept,
	.cpu_starts = cpu_starts,
	.cpu_online = cpu_is_online,
	.module_comes = mercury_dma_module_comes,
	.panic = panic_comes,
	.stays_attached = mercury_rollback_waits,
};

/* What it has cost, and its end. */
u32 mercury_snapshot_finish(struct mercury_snapshot_request *request)
{
	u32 code;

	if (request->flags || request->pool_pages)
		return MERCURY_CODE_BAD_ARGUMENT;
	if (!snapshot.live)
		return MERCURY_CODE_NO_SNAPSHOT;
	code = fill_status(request);
	if (code == MERCURY_CODE_OK && mercury_dma_missed())
		code = MERCURY_CODE_SNAPSHOT_DEVICES;
	if (code == MERCURY_CODE_OK && READ_ONCE(snapshot.another_cpu))
		code = MERCURY_CODE_SNAPSHOT_HOTPLUG;
	mercury_snapshot_end();
	return code;
}

/* The first frame at or after this one that is wanted; the end, if none is before it. */
static u64 next_wanted(u64 flags, u64 frame, u64 end)
{
	unsigned long pfn = PHYS_PFN(frame), last = PHYS_PFN(end);

	while (pfn < last) {
		unsigned long at = pfn / MERCURY_MAP_BITS, next = (at + 1) * MERCURY_MAP_BITS;

		if (flags & MERCURY_TAKE_LOGGED) {
			unsigned long bit = MERCURY_MAP_BITS;

			if (at < snapshot.free_count && snapshot.collected[at])
				bit = find_next_bit(snapshot.collected[at], MERCURY_MAP_BITS,
						    pfn % MERCURY_MAP_BITS);
			pfn = at * MERCURY_MAP_BITS + bit;
			if (bit == MERCURY_MAP_BITS) {
				pfn = next;
				continue;
			}
		}
		if (!(flags & MERCURY_TAKE_USED) || !is_free(pfn))
			break;
		pfn++;
	}
	return min_t(u64, PFN_PHYS(pfn), end);
}

static bool knows(u64 flags)
{
	return !(flags & ~(MERCURY_TAKE_LOGGED | MERCURY_TAKE_USED)) &&
	       (!(flags & MERCURY_TAKE_LOGGED) || snapshot.logging);
}

/* Whether the memory has broken since it was looked through: reading it would be a machine check. */
static bool is_broken(u64 frame)
{
	struct page *page = pfn_to_online_page(PHYS_PFN(frame));

	return page && PageHWPoison(page);
}

/* The next frames from `*cursor` on, as many as there is room for. */
static u32 next_frames(u64 flags, u64 *cursor, u64 limit, u64 room)
{
	struct mercury_take_list *take = snapshot.take;
	unsigned int i;

	take->count = 0;
	take->reserved = 0;
	for (i = 0; i < snapshot.memory_count; i++) {
		const struct mercury_owned_range *range = &snapshot.memory[i];
		u64 end = min(range->start_phys + range->pages * PAGE_SIZE, limit);
		u64 frame = max(*cursor, range->start_phys);

		for (; frame < end; frame += PAGE_SIZE) {
			frame = next_wanted(flags, frame, end);
			if (frame == end)
				break;
			if (take->count == min_t(u64, room, MERCURY_TAKE_LIST_MAX)) {
				*cursor = frame;
				return take->count;
			}
			if (is_broken(frame)) {
				snapshot.broken = true;
				take->count = 0;
				return 0;
			}
			take->entries[take->count].frame_phys = frame;
			take->entries[take->count].to_phys =
				virt_to_phys(snapshot.buffer) + take->count * PAGE_SIZE;
			take->count++;
		}
	}
	*cursor = U64_MAX;
	return take->count;
}

/* Gives one frame that was taken to user space. */
static int put_frame(const struct mercury_snapshot_take_request *request, u64 slot, u32 entry, u64 hash)
{
	u64 __user *frames = u64_to_user_ptr(request->frames_addr);
	u64 __user *hashes = u64_to_user_ptr(request->hashes_addr);
	void __user *data = u64_to_user_ptr(request->data_addr);

	if (put_user(snapshot.take->entries[entry].frame_phys, frames + slot) ||
	    copy_to_user(data + slot * PAGE_SIZE, snapshot.buffer + entry * PAGE_SIZE, PAGE_SIZE))
		return -EFAULT;
	if (request->hashes_addr && put_user(hash, hashes + slot))
		return -EFAULT;
	return 0;
}

/* Gives what was taken to user space. */
static int put_frames(struct mercury_snapshot_take_request *request)
{
	struct mercury_take_list *take = snapshot.take;
	u32 i;

	for (i = 0; i < take->count; i++) {
		u64 hash = 0;

		if (take->taken_before & BIT_ULL(i))
			continue;
		if (snapshot.hashes)
			hash = snapshot.hashes[number_of(take->entries[i].frame_phys)];
		if (put_frame(request, request->count, i, hash))
			return -EFAULT;
		request->count++;
	}
	return MERCURY_CODE_OK;
}

int mercury_snapshot_take(struct mercury_snapshot_take_request *request)
{
	u64 room = request->count;
	u32 code;
	int err;

	request->count = 0;
	request->low = 0;
	if (!snapshot.live || snapshot.kept)
		return MERCURY_CODE_NO_SNAPSHOT;
	if (!knows(request->flags) ||
	    (!PAGE_ALIGNED(request->cursor_phys) && request->cursor_phys != U64_MAX) ||
	    (!PAGE_ALIGNED(request->end_phys) && request->end_phys != U64_MAX))
		return MERCURY_CODE_BAD_ARGUMENT;
	while (request->count < room && request->cursor_phys != U64_MAX) {
		if (!next_frames(request->flags, &request->cursor_phys, request->end_phys,
				 room - request->count))
			return snapshot.broken ? MERCURY_CODE_SNAPSHOT_HOTPLUG : MERCURY_CODE_OK;
		code = call_for(MERCURY_SNAPSHOT_CALL_TAKE, snapshot.take, &request->low);
		if (code != MERCURY_CODE_OK)
			return code;
		err = put_frames(request);
		if (err)
			return err;
		if (signal_pending(current))
			break;
		cond_resched();
	}
	return MERCURY_CODE_OK;
}

/*
 * How many frames from this one on were free just now; they may be somebody's already. What the kernel says
 * of the block may be of another one: no block is larger than one of these.
 */
static u64 free_frames(phys_addr_t frame)
{
	struct page *page = pfn_to_online_page(PHYS_PFN(frame));
	enum mercury_page_use use;
	unsigned long count;

	if (!page)
		return 0;
	count = mercury_dma_stretch(page, 1, &use);
	return use == MERCURY_PAGE_FREE ? min_t(unsigned long, count, MAX_ORDER_NR_PAGES) : 0;
}

/*
 * A frame as it is now; zeros if it is free. One that only the hypervisor can read (memfd_secret) counts as
 * written, so that it is read at the instant.
 */
static void look_at_frame(phys_addr_t frame, void *to, phys_addr_t *free_end)
{
	if (frame >= *free_end)
		*free_end = frame + free_frames(frame) * PAGE_SIZE;
	if (frame >= *free_end) {
		if (!copy_from_kernel_nofault(to, __va(frame), PAGE_SIZE))
			return;
		mercury_dma_log_written(PHYS_PFN(frame));
	}
	memset(to, 0, PAGE_SIZE);
}

int mercury_snapshot_look_at(struct mercury_snapshot_take_request *request)
{
	struct mercury_take_list *take = snapshot.take;
	phys_addr_t free_end = 0;
	u64 room = request->count;
	u32 i;

	request->count = 0;
	request->low = 0;
	if (!snapshot.pieces || snapshot.live)
		return MERCURY_CODE_NO_SNAPSHOT;
	if (!knows(request->flags) ||
	    (!PAGE_ALIGNED(request->cursor_phys) && request->cursor_phys != U64_MAX) ||
	    (!PAGE_ALIGNED(request->end_phys) && request->end_phys != U64_MAX))
		return MERCURY_CODE_BAD_ARGUMENT;
	while (request->count < room && request->cursor_phys != U64_MAX) {
		if (!next_frames(request->flags, &request->cursor_phys, request->end_phys,
				 room - request->count))
			return snapshot.broken ? MERCURY_CODE_SNAPSHOT_HOTPLUG : MERCURY_CODE_OK;
		for (i = 0; i < take->count; i++) {
			look_at_frame(take->entries[i].frame_phys, snapshot.buffer + i * PAGE_SIZE,
				      &free_end);
			if (put_frame(request, request->count, i, 0))
				return -EFAULT;
			request->count++;
		}
		if (signal_pending(current))
			break;
		cond_resched();
	}
	return MERCURY_CODE_OK;
}

static u32 enter_log(struct mercury_cpu *m)
{
	return call(MERCURY_SNAPSHOT_CALL_LOG_ENTER, NULL);
}

/* All CPUs are on the log's tables, and have forgotten what they knew of them. */
static u32 enter_log_everywhere(void)
{
	u32 code = MERCURY_CODE_OK;
	int cpu;

	cpus_read_lock();
	mercury_on_cpus(cpu_online_mask, enter_log);
	for_each_online_cpu(cpu)
		if (code == MERCURY_CODE_OK)
			code = mercury_cpu(cpu)->code;
	if (code == MERCURY_CODE_OK && !cpumask_equal(&snapshot.cpus, cpu_online_mask))
		code = MERCURY_CODE_SNAPSHOT_HOTPLUG;
	cpus_read_unlock();
	return code;
}

/* A log that is not whole is asked for no more; its tables go with the snapshot. */
u32 mercury_snapshot_log_begin(void)
{
	struct mercury_log_setup *setup = (void *)snapshot.take;
	u32 code;

	if (!snapshot.written || snapshot.live || snapshot.logging)
		return MERCURY_CODE_NO_SNAPSHOT;
	code = mercury_dma_log_carry_over();
	if (code != MERCURY_CODE_OK)
		return code;
	setup->memory_virt = (u64)snapshot.memory;
	setup->memory_count = snapshot.memory_count;
	setup->written_virt = (u64)snapshot.written;
	setup->collected_virt = (u64)snapshot.collected;
	setup->map_count = snapshot.free_count;
	code = call(MERCURY_SNAPSHOT_CALL_LOG_BEGIN, setup);
	if (code != MERCURY_CODE_OK)
		return code;
	snapshot.logging = true;
	return enter_log_everywhere();
}

/* Into the collection: what devices have for good, which was looked for at the instant. */
static unsigned long collect_lasting(void)
{
	unsigned long added = 0;
	unsigned int i;
	u64 page;

	for (i = 0; i < snapshot.memory_count; i++) {
		unsigned long first = PHYS_PFN(snapshot.memory[i].start_phys);

		for (page = 0; page < snapshot.memory[i].pages; page++) {
			u64 number = snapshot.numbers[i] + page;
			unsigned long pfn = first + page;

			if (!snapshot.lasting[number / MERCURY_MAP_BITS][number % MERCURY_MAP_BITS /
									  BITS_PER_LONG]) {
				page += BITS_PER_LONG - 1 - number % BITS_PER_LONG;
				continue;
			}
			if (test_bit(number % MERCURY_MAP_BITS,
				     snapshot.lasting[number / MERCURY_MAP_BITS]))
				added += !test_and_set_bit(pfn % MERCURY_MAP_BITS,
							   snapshot.collected[pfn / MERCURY_MAP_BITS]);
		}
		cond_resched();
	}
	return added;
}

/*
 * What may have been written since the last time. The frames are read after this: what is written meanwhile
 * was either noted again or will be read.
 */
u32 mercury_snapshot_log_collect(struct mercury_log_request *request)
{
	struct mercury_dma_log_collect *collect = (void *)snapshot.take;
	unsigned long at;
	u32 code;

	if (!snapshot.logging)
		return MERCURY_CODE_NO_SNAPSHOT;
	for (at = 0; at < snapshot.free_count; at++)
		if (snapshot.collected[at])
			memset(snapshot.collected[at], 0, MERCURY_MAP_BITS / BITS_PER_BYTE);
	collect->next_phys = 0;
	collect->pages = 0;
	do {
		code = call(MERCURY_SNAPSHOT_CALL_LOG_COLLECT, collect);
		cond_resched();
	} while (code == MERCURY_CODE_OK && collect->next_phys != U64_MAX);
	/* After the instant they run on the snapshot's tables. */
	if (code == MERCURY_CODE_OK && !snapshot.live)
		code = enter_log_everywhere();
	request->device_pages = mercury_dma_log_collect(snapshot.collected);
	if (snapshot.live)
		request->device_pages += collect_lasting();
	request->pages = collect->pages + request->device_pages;
	if (code == MERCURY_CODE_OK && READ_ONCE(snapshot.pool_lost))
		code = MERCURY_CODE_SNAPSHOT_POOL;
	if (code == MERCURY_CODE_OK && mercury_dma_missed())
		code = MERCURY_CODE_SNAPSHOT_DEVICES;
	if (code == MERCURY_CODE_OK && READ_ONCE(snapshot.another_cpu))
		code = MERCURY_CODE_SNAPSHOT_HOTPLUG;
	return code;
}

/* The CPUs of the snapshot, as far as there is room. */
static int put_cpus(struct mercury_restart_request *request, u32 room)
{
	struct mercury_restart_cpu __user *cpus = u64_to_user_ptr(request->cpus_addr);
	int cpu;

	for_each_cpu(cpu, &snapshot.cpus) {
		struct mercury_restart_cpu entry = {
			.cpu = cpu,
			.apic_id = per_cpu(x86_cpu_to_apicid, cpu),
			.saved_phys = virt_to_phys(mercury_state_of(cpu)),
		};

		if (request->cpus_count < room &&
		    copy_to_user(cpus + request->cpus_count, &entry, sizeof(entry)))
			return -EFAULT;
		request->cpus_count++;
	}
	return 0;
}

static int put_range(struct mercury_restart_request *request, u32 room, u64 start, u64 pages, u64 kind)
{
	struct mercury_restart_range __user *ranges = u64_to_user_ptr(request->ranges_addr);
	struct mercury_restart_range entry = { .start_phys = start, .pages = pages, .kind = kind };

	if (request->ranges_count < room &&
	    copy_to_user(ranges + request->ranges_count, &entry, sizeof(entry)))
		return -EFAULT;
	request->ranges_count++;
	return 0;
}

/* What the image holds, and what of this machine's memory it can do without. */
static int put_ranges(struct mercury_restart_request *request, u32 room)
{
	struct mercury_owned_range owned;
	unsigned int i;
	int err = 0;

	for (i = 0; !err && i < snapshot.memory_count; i++)
		err = put_range(request, room, snapshot.memory[i].start_phys, snapshot.memory[i].pages,
				MERCURY_RANGE_KEPT);
	for (i = 0; !err && i < snapshot.piece_count; i++)
		err = put_range(request, room, page_to_phys(snapshot.pieces[i]),
				1ULL << snapshot.orders[i], MERCURY_RANGE_FREE);
	for (i = 0; !err && mercury_owned(i, &owned); i++)
		err = put_range(request, room, owned.start_phys, owned.pages, MERCURY_RANGE_FREE);
	return err;
}

/* Refuses a machine with memory that the restore environment does not find. */
static u32 check_memory(struct mercury_outcome *outcome)
{
	struct mercury_plugged *plugged = mercury_plugged_find();
	u32 code = MERCURY_CODE_OK;
	unsigned int i;

	if (!plugged)
		return MERCURY_CODE_NO_MEMORY;
	for (i = 0; code == MERCURY_CODE_OK && i < snapshot.memory_count; i++)
		code = mercury_plugged_check(plugged, snapshot.memory[i].start_phys, snapshot.memory[i].pages,
					     outcome);
	mercury_plugged_free(plugged);
	return code;
}

/* What an image must say besides the content of memory. */
int mercury_snapshot_machine(struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	u32 cpus = request->cpus_count, ranges = request->ranges_count;
	unsigned long text = (unsigned long)mercury_resume & PAGE_MASK;
	struct page *next;
	u32 code;
	int err;

	if (request->flags)
		return MERCURY_CODE_BAD_ARGUMENT;
	/* All of it is known when it is prepared. */
	if (!snapshot.pieces)
		return MERCURY_CODE_NO_SNAPSHOT;
	code = check_memory(outcome);
	if (code != MERCURY_CODE_OK)
		return code;
	if (native_read_cr4() & X86_CR4_LA57)
		request->flags |= MERCURY_RESTART_FIVE_LEVEL;
	if (mercury_x2apic())
		request->flags |= MERCURY_RESTART_X2APIC;
	request->resume_virt = (u64)mercury_resume;
	request->resume_phys[0] = PFN_PHYS(vmalloc_to_pfn((void *)text));
	next = vmalloc_to_page((void *)text + PAGE_SIZE);
	request->resume_phys[1] = next ? page_to_phys(next) : 0;
	request->cpus_count = 0;
	request->ranges_count = 0;
	err = put_cpus(request, cpus);
	return err ? err : put_ranges(request, ranges);
}
