// SPDX-License-Identifier: GPL-2.0-only
/*
 * The pool: free pages into which the hypervisor copies pages that are about to be written. It takes nothing
 * from programs. It grows while the snapshot lasts, and the system gets it back when memory runs out.
 */
#include <linux/cpumask.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/notifier.h>
#include <linux/oom.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/timer.h>
#include <linux/version.h>
#include <asm/io.h>

#include "snapshot.h"

#define ORDER_MAX	9
/* A pool of so many pages suffices if no more are to be had. */
#define ENOUGH		(SZ_512M / PAGE_SIZE)
/* Allocations wake kswapd, which frees cached pages, and never wait. */
#define GFP_POOL	(GFP_NOWAIT | __GFP_NOWARN | __GFP_NOMEMALLOC)
/* The number of ticks to wait for kswapd while it frees nothing. */
#define PATIENCE	(HZ / 2)
/*
 * While the snapshot lasts the pool grows in pieces of this order. Smaller ones come from lists of single
 * CPUs, over and over the same pages: those were not free at the instant, and the snapshot may not hold them
 * yet.
 */
#define ORDER_MIN	(PAGE_ALLOC_COSTLY_ORDER + 1)
/* The pool grows by 8 MiB in a tick at most. */
#define BATCHES		4

static struct {
	/*
	 * The pages that the pool began with, and those that were added and that the system got back since.
	 */
	u64 pages, added, returned;
	/*
	 * The hypervisor has the pool; the system has taken pages of it before the instant. Under
	 * pool_lock.
	 */
	bool donating, lost;
	/* Arguments of calls: to donate, to grow in a tick, and to reclaim. The last is under pool_lock. */
	struct mercury_page_list *list, *more, *reclaimed;
} pool;

/* The pages of the pool, one by one: some come later, and some go before the end. */
static LIST_HEAD(pages);
static DEFINE_SPINLOCK(pool_lock);

static void add_page(struct page *page)
{
	SetPageReserved(page);
	spin_lock_bh(&pool_lock);
	list_add(&page->lru, &pages);
	spin_unlock_bh(&pool_lock);
}

static void free_page_of_pool(struct page *page)
{
	list_del(&page->lru);
	ClearPageReserved(page);
	__free_page(page);
}

static void free_listed(const struct mercury_page_list *list, unsigned int count)
{
	unsigned int i;

	for (i = 0; i < count; i++)
		free_page_of_pool(pfn_to_page(PHYS_PFN(list->pages_phys[i])));
}

/* Returns how many pages the pool may have while the system goes on without taking memory from programs. */
static u64 spare_pages(void)
{
	u64 available = si_mem_available();
	u64 margin = clamp_t(u64, available / 8, SZ_32M / PAGE_SIZE, SZ_256M / PAGE_SIZE);

	return available > margin ? available - margin : 0;
}

static bool add_piece(unsigned int order)
{
	struct page *page = mercury_piece_for_pool(order, GFP_POOL);
	unsigned int i;

	for (i = 0; page && i < 1U << order; i++)
		add_page(page + i);
	return page;
}

/*
 * Fills the pool with the largest pieces that can be had. Large ones are tried again now and then, since
 * kswapd frees some of them on the way to small ones. A quarter of the wanted pages suffices, or ENOUGH.
 */
u32 mercury_pool_fill(u64 wanted)
{
	unsigned int order = ORDER_MAX, patience = PATIENCE;
	u64 left, most;

	pool.pages = wanted;
	wanted = min_t(u64, wanted, (u64)(MERCURY_HOLES_MAX / 2) << ORDER_MAX);
	most = min(wanted, spare_pages());
	left = most;

	/* The table of pieces must keep room for other pieces. */
	while (left && mercury_pieces_count() < MERCURY_HOLES_MAX / 2 && !READ_ONCE(pool.lost)) {
		while (order && 1U << order > left)
			order--;
		if (add_piece(order)) {
			left -= 1U << order;
			patience = PATIENCE;
			if (!(mercury_pieces_count() % 64))
				order = ORDER_MAX;
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
	return most - left >= min_t(u64, wanted / 4, ENOUGH) ? MERCURY_CODE_OK : MERCURY_CODE_NO_MEMORY;
}

/* Makes the pool the hypervisor's; returns false if the system has taken some of it. */
static bool begin_to_donate(void)
{
	spin_lock_bh(&pool_lock);
	pool.donating = !pool.lost;
	spin_unlock_bh(&pool_lock);
	return pool.donating;
}

static u32 donate_page(phys_addr_t phys)
{
	struct mercury_page_list *list = pool.list;
	u32 code;

	list->pages_phys[list->count++] = phys;
	if (list->count < MERCURY_PAGE_LIST_MAX)
		return MERCURY_CODE_OK;
	code = mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_DONATE, list);
	list->count = 0;
	cond_resched();
	return code;
}

/* Gives the pool to the hypervisor. */
u32 mercury_pool_donate(void)
{
	struct mercury_owned_range piece;
	unsigned int i;
	bool is_pool;
	u32 code;
	u64 page;

	if (!begin_to_donate())
		return MERCURY_CODE_SNAPSHOT_POOL;
	pool.list->count = 0;
	for (i = 0; mercury_piece_range(i, &piece, &is_pool); i++) {
		for (page = 0; is_pool && page < piece.pages; page++) {
			code = donate_page(piece.start_phys + page * PAGE_SIZE);
			if (code != MERCURY_CODE_OK)
				return code;
		}
	}
	return mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_DONATE, pool.list);
}

/*
 * Gives the hypervisor pages that the system can spare. Each was free at the instant, or the snapshot holds
 * its content already. Returns how many the hypervisor has accepted.
 */
static unsigned int grow(void)
{
	struct mercury_page_list *list = pool.more;
	unsigned int i, given = 0, kept = 0;
	struct page *page;

	while (given + (1U << ORDER_MIN) <= MERCURY_PAGE_LIST_MAX) {
		page = alloc_pages(GFP_POOL, ORDER_MIN);
		if (!page)
			break;
		split_page(page, ORDER_MIN);
		for (i = 0; i < 1U << ORDER_MIN; i++) {
			/* The hypervisor maps the kept memory only. */
			if (mercury_kept_number(page_to_phys(page + i)) < 0) {
				__free_page(page + i);
				continue;
			}
			add_page(page + i);
			list->pages_phys[given++] = page_to_phys(page + i);
		}
	}
	list->count = given;
	if (given && mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_DONATE, list) == MERCURY_CODE_OK)
		kept = given - list->count;
	spin_lock_bh(&pool_lock);
	free_listed(list, given - kept);
	spin_unlock_bh(&pool_lock);
	pool.added += kept;
	return kept;
}

static bool is_low(void)
{
	struct mercury_snapshot_status *status = (void *)pool.more;
	u64 all = pool.pages + pool.added - READ_ONCE(pool.returned);

	return mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_STATUS, status) == MERCURY_CODE_OK &&
	       status->exact && status->free_pages < all / 4;
}

static void tend(struct timer_list *unused);
static DEFINE_TIMER(timer, tend);

/*
 * Lets the pool grow, in each tick. No task could do so: a CPU whose writer waits in the kernel for a free
 * page of the pool runs no other task, but it takes interrupts.
 */
static void tend(struct timer_list *unused)
{
	unsigned int i = 0;

	while (i < BATCHES && is_low() && grow())
		i++;
	mod_timer(&timer, jiffies + 1);
}

void mercury_pool_start(void)
{
	mod_timer(&timer, jiffies + 1);
}

void mercury_pool_stop(void)
{
#if KERNEL_VERSION(6, 2, 0) <= LINUX_VERSION_CODE
	timer_delete_sync(&timer);
#else
	del_timer_sync(&timer);
#endif
}

static void reclaim(struct mercury_page_list *list)
{
	list->count = MERCURY_PAGE_LIST_MAX;
	if (mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_RECLAIM, list) != MERCURY_CODE_OK)
		list->count = 0;
}

/* Lists pages of a pool that the hypervisor does not know yet. */
static void list_pages(struct mercury_page_list *list)
{
	struct page *page;

	list->count = 0;
	list_for_each_entry(page, &pages, lru) {
		if (list->count == MERCURY_PAGE_LIST_MAX)
			break;
		list->pages_phys[list->count++] = page_to_phys(page);
	}
}

/*
 * The system has no memory left. Before it kills a process it gets the free pages of the pool, and then the
 * whole pool, which ends the snapshot. Pages that it gets before the instant end the snapshot in any case:
 * they were left out as the pool's, so the snapshot would miss what the system writes to them.
 */
static int memory_runs_out(struct notifier_block *unused, unsigned long event, void *freed)
{
	bool past = mercury_snapshot_is_past();
	struct mercury_page_list *list;

	spin_lock_bh(&pool_lock);
	list = pool.reclaimed;
	if (!list)
		goto unlock;
	if (past || pool.donating)
		reclaim(list);
	else
		list_pages(list);
	if (past && !list->count && !mercury_snapshot_is_kept()) {
		mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_GIVE_UP,
				      (void *)(unsigned long)MERCURY_CODE_SNAPSHOT_POOL);
		reclaim(list);
	}
	if (!past && list->count)
		WRITE_ONCE(pool.lost, true);
	free_listed(list, list->count);
	pool.returned += list->count;
	*(unsigned long *)freed += list->count;
unlock:
	spin_unlock_bh(&pool_lock);
	return NOTIFY_OK;
}

static struct notifier_block oom_notifier = { .notifier_call = memory_runs_out };

/* Offers the pool to a system without memory, from its first page on. */
u32 mercury_pool_begin(void)
{
	return register_oom_notifier(&oom_notifier) ? MERCURY_CODE_NO_MEMORY : MERCURY_CODE_OK;
}

/* Ends the offer, before the pool goes. */
void mercury_pool_end(void)
{
	unregister_oom_notifier(&oom_notifier);
}

/* Allocates the arguments of calls. */
u32 mercury_pool_allocate(void)
{
	pool.list = mercury_piece(0, GFP_KERNEL);
	pool.more = mercury_piece(0, GFP_KERNEL);
	pool.reclaimed = mercury_piece(0, GFP_KERNEL);
	return pool.list && pool.more && pool.reclaimed ? MERCURY_CODE_OK : MERCURY_CODE_NO_MEMORY;
}

/* Returns true if the system has taken pages of the pool before the instant. */
bool mercury_pool_is_lost(void)
{
	return READ_ONCE(pool.lost);
}

void mercury_pool_status(struct mercury_snapshot_request *request)
{
	request->added_pages = pool.added;
	request->returned_pages = READ_ONCE(pool.returned);
}

void mercury_pool_free(void)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, &pages, lru) {
		free_page_of_pool(page);
		cond_resched();
	}
	memset(&pool, 0, sizeof(pool));
}
