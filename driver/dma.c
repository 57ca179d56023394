// SPDX-License-Identifier: GPL-2.0-only
/*
 * What devices write, they write round the nested tables. While there is a snapshot, every page that a
 * device may write is written to by the CPU first, without changing it, so that it is copied: at the
 * kernel's exported entry points of DMA, by kprobes. What devices may write all the time is found at the
 * instant: pages that are not anybody's data, but the kernel's own.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/dma-direction.h>
#include <linux/hugetlb.h>
#include <linux/iommu.h>
#include <linux/kprobes.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/page-flags.h>
#include <linux/scatterlist.h>
#include <asm/io.h>

#include "mercury.h"

/* Writes what is there to each page of a buffer in the direct map. */
static void touch(void *start, size_t length)
{
	unsigned long page = (unsigned long)start & PAGE_MASK;

	if (!virt_addr_valid(start) || !length)
		return;
	for (; page < (unsigned long)start + length; page += PAGE_SIZE)
		asm volatile("lock; orl $0, %0" : "+m" (*(u32 *)page) : : "cc");
}

static void touch_list(struct scatterlist *list, unsigned int count)
{
	for (; list && count; count--, list = sg_next(list))
		touch(sg_virt(list), list->length);
}

static bool is_written(unsigned long direction)
{
	return direction != DMA_TO_DEVICE;
}

/* virtqueue_add_inbuf(queue, list, count, ...), and with a context */
static int before_inbuf(struct kprobe *probe, struct pt_regs *regs)
{
	touch_list((struct scatterlist *)regs->si, regs->dx);
	return 0;
}

/* virtqueue_add_sgs(queue, lists, outgoing, incoming, ...) */
static int before_sgs(struct kprobe *probe, struct pt_regs *regs)
{
	struct scatterlist **lists = (void *)regs->si;
	unsigned int first = regs->dx, i;

	for (i = first; i < first + (unsigned int)regs->cx; i++)
		touch_list(lists[i], UINT_MAX);
	return 0;
}

/* dma_map_page_attrs(device, page, offset, size, direction, ...) */
static int before_map_page(struct kprobe *probe, struct pt_regs *regs)
{
	if (is_written(regs->r8))
		touch(page_address((struct page *)regs->si) + regs->dx, regs->cx);
	return 0;
}

/* dma_map_sg_attrs(device, list, count, direction, ...) */
static int before_map_sg(struct kprobe *probe, struct pt_regs *regs)
{
	if (is_written(regs->cx))
		touch_list((struct scatterlist *)regs->si, regs->dx);
	return 0;
}

/* dma_map_sgtable(device, table, direction, ...) */
static int before_map_sgtable(struct kprobe *probe, struct pt_regs *regs)
{
	struct sg_table *table = (void *)regs->si;

	if (is_written(regs->dx))
		touch_list(table->sgl, table->orig_nents);
	return 0;
}

/* The memory at a device's address. */
static void *memory_of(struct device *device, dma_addr_t address)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(device);
	phys_addr_t phys = address;

	if (domain && domain->type != IOMMU_DOMAIN_IDENTITY)
		phys = iommu_iova_to_phys(domain, address);
	return phys_to_virt(phys);
}

/* dma_sync_single_for_device(device, address, size, direction) */
static int before_sync_single(struct kprobe *probe, struct pt_regs *regs)
{
	if (is_written(regs->cx))
		touch(memory_of((struct device *)regs->di, regs->si), regs->dx);
	return 0;
}

/* dma_sync_sg_for_device(device, list, count, direction) */
static int before_sync_sg(struct kprobe *probe, struct pt_regs *regs)
{
	return before_map_sg(probe, regs);
}

static struct kprobe probes[] = {
	{ .symbol_name = "virtqueue_add_inbuf", .pre_handler = before_inbuf },
	{ .symbol_name = "virtqueue_add_inbuf_ctx", .pre_handler = before_inbuf },
	{ .symbol_name = "virtqueue_add_sgs", .pre_handler = before_sgs },
	{ .symbol_name = "dma_map_page_attrs", .pre_handler = before_map_page },
	{ .symbol_name = "dma_map_sg_attrs", .pre_handler = before_map_sg },
	{ .symbol_name = "dma_map_sgtable", .pre_handler = before_map_sgtable },
	{ .symbol_name = "dma_sync_single_for_device", .pre_handler = before_sync_single },
	{ .symbol_name = "dma_sync_sg_for_device", .pre_handler = before_sync_sg },
	/* Their names on later kernels. */
	{ .symbol_name = "__dma_sync_single_for_device", .pre_handler = before_sync_single },
	{ .symbol_name = "__dma_sync_sg_for_device", .pre_handler = before_sync_sg },
};

static u16 registered;
static_assert(ARRAY_SIZE(probes) <= 8 * sizeof(registered));

/* From here on whatever is given to a device is written to first. */
u32 mercury_dma_watch(void)
{
	unsigned int i;
	int err;

	for (i = 0; i < ARRAY_SIZE(probes); i++) {
		probes[i].addr = NULL;
		probes[i].flags = 0;
		err = register_kprobe(&probes[i]);
		/* Nobody can call what is not there. */
		if (err == -ENOENT)
			continue;
		if (err) {
			pr_err("no probe on %s: %d\n", probes[i].symbol_name, err);
			mercury_dma_unwatch();
			return MERCURY_CODE_SNAPSHOT_DEVICES;
		}
		registered |= BIT(i);
	}
	return MERCURY_CODE_OK;
}

/* Whether a probe was passed without a look: one within another. */
bool mercury_dma_missed(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		if (registered & BIT(i) && probes[i].nmissed)
			return true;
	return false;
}

void mercury_dma_unwatch(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		if (registered & BIT(i))
			unregister_kprobe(&probes[i]);
	registered = 0;
}

/*
 * Whether a device may have this page for good: no data of processes or files, be it in huge pages, no slab,
 * no page table.
 */
bool mercury_dma_is_lasting(unsigned long pfn)
{
	struct page *page = pfn_to_online_page(pfn);

	return page && !PageBuddy(page) && !PageReserved(page) && !PageSlab(page) && !PageLRU(page) &&
	       !PageAnon(page) && !PageTable(page) && !PageHuge(page) && page_count(compound_head(page));
}
