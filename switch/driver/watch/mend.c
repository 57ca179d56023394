// SPDX-License-Identifier: GPL-2.0-only
/*
 * Mends the kernel's code and constants. User space compares them with its copy, and names the bytes that
 * are there and the bytes to write (operator/cli/src/guard/integrity).
 *
 * The kernel maps code and constants read-only, so a second mapping of the page is written to. All CPUs
 * stand still meanwhile. A byte that the kernel itself has changed since is left alone.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpumask.h>
#include <linux/mm.h>
#include <linux/pgtable.h>
#include <linux/stop_machine.h>
#include <linux/vmalloc.h>
#include <asm/pgtable_types.h>
#include <asm/sync_core.h>

#include "../mercury.h"
#include "watch.h"

/**
 * struct mend - a request under way
 * @request: what to write
 * @page: the page
 * @bytes: the second mapping of the bytes
 * @claimed: a CPU has begun
 * @done: that CPU has ended
 * @code: MERCURY_CODE_*
 */
struct mend {
	const struct mercury_mend_request *request;
	struct page *page;
	u8 *bytes;
	atomic_t claimed;
	bool done;
	u32 code;
};

/* Returns the page at an address of the kernel's or of a module's, if it is mapped read-only; else NULL. */
static struct page *read_only_page(unsigned long address)
{
	unsigned int level;
	unsigned long pfn;
	pte_t *entry;

	if (address < __START_KERNEL_map || address >= MODULES_END)
		return NULL;
	entry = lookup_address(address, &level);
	if (!entry || !(pte_flags(*entry) & _PAGE_PRESENT) || pte_flags(*entry) & _PAGE_RW)
		return NULL;
	if (level == PG_LEVEL_4K)
		pfn = pte_pfn(*entry);
	else if (level == PG_LEVEL_2M)
		pfn = pmd_pfn(*(pmd_t *)entry) + ((address & ~PMD_MASK) >> PAGE_SHIFT);
	else
		return NULL;
	return pfn_valid(pfn) ? pfn_to_page(pfn) : NULL;
}

static void write_bytes(struct mend *mend)
{
	const struct mercury_mend_request *request = mend->request;
	u32 i;

	/* A module that went meanwhile took its pages along. */
	mend->code = MERCURY_CODE_MEND_CHANGED;
	if (read_only_page(request->address) != mend->page ||
	    memcmp(mend->bytes, request->expected, request->size))
		return;
	/* An NMI may run this code, so no other byte is written. */
	for (i = 0; i < request->size; i++)
		if (request->wanted[i] != request->expected[i])
			WRITE_ONCE(mend->bytes[i], request->wanted[i]);
	mend->code = MERCURY_CODE_OK;
}

/* Runs on all CPUs with interrupts off. */
static int stand_still(void *data)
{
	struct mend *mend = data;

	if (!atomic_xchg(&mend->claimed, 1)) {
		write_bytes(mend);
		/* Whoever goes on sees the new bytes. */
		smp_store_release(&mend->done, true);
	}
	/* Pairs with the store above. */
	while (!smp_load_acquire(&mend->done))
		cpu_relax();
	sync_core();
	return 0;
}

static bool is_bad(const struct mercury_mend_request *request)
{
	return request->reserved || !request->size || request->size > MERCURY_MEND_MAX ||
	       offset_in_page(request->address) + request->size > PAGE_SIZE;
}

int mercury_mend(const struct mercury_mend_request *request)
{
	struct mend mend = { .request = request };
	void *alias;

	if (is_bad(request))
		return MERCURY_CODE_BAD_ARGUMENT;
	mend.page = read_only_page(request->address);
	/*
	 * The removal of a module may have freed the page by now. A page that is somebody else's is not
	 * touched: write_bytes() looks again if it is mapped here.
	 */
	if (!mend.page || !get_page_unless_zero(mend.page))
		return MERCURY_CODE_MEND_NOT_READ_ONLY;
	alias = vmap(&mend.page, 1, VM_MAP, PAGE_KERNEL);
	if (alias) {
		mend.bytes = alias + offset_in_page(request->address);
		stop_machine(stand_still, &mend, cpu_online_mask);
		vunmap(alias);
	}
	put_page(mend.page);
	if (!alias)
		return MERCURY_CODE_NO_MEMORY;
	if (!mend.code)
		pr_warn("%u bytes at %pS are mended\n", request->size, (void *)request->address);
	return mend.code;
}
