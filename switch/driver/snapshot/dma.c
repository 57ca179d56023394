// SPDX-License-Identifier: GPL-2.0-only
/*
 * DMA bypasses the nested tables. While there is a snapshot, the CPU first writes to every page that a
 * device may write, without changing it, so that the page is copied. It does so at the kernel's exported
 * entry points of DMA, by ftrace. (Not by kprobes: those on a function's entry leave interrupts on, and
 * miss calls from within another one.) The same holds for pages that a device is to read only, since not
 * all devices leave them as they are: an emulated network card puts a packet's checksum into the packet.
 *
 * Other pages are copied at the instant: persistent DMA memory, pages that hold the kernel's own memory
 * rather than data, and pages that devices had until they were stopped. Not all devices stop at once: a
 * network card whose bus mastering was switched off receives on, in an emulator at least.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/dma-direction.h>
#include <linux/ftrace.h>
#include <linux/hugetlb.h>
#include <linux/iommu.h>
#include <linux/kprobes.h>
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/page-flags.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/string.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/workqueue.h>
#include <asm/io.h>

#include "snapshot.h"

/* The entry points are watched; their calls matter for a snapshot; and a write may have been missed. */
static bool watching, armed, missed;

/* A device may write unseen from here on. A triple fault goes back without asking the driver. */
static void lose(void)
{
	/* Pairs with keep_snapshot(): the one that comes second sees the other. */
	smp_store_mb(missed, true);
	mercury_snapshot_give_up_kept(MERCURY_CODE_SNAPSHOT_DEVICES);
}

/* Returns true if the page is data of processes or files, which may be much; it may be in huge pages. */
static bool is_data(struct page *page)
{
	return PageLRU(page) || PageAnon(page) || PageHuge(page);
}

/* Takes the lower half of the register, which is the argument. */
static bool is_written(u32 direction)
{
	return direction == DMA_FROM_DEVICE || direction == DMA_BIDIRECTIONAL;
}

/* Writes the first word of a page of the direct map back to it. A page that is read-only stays as it is. */
static void rewrite(unsigned long page)
{
	asm volatile("1:	lock; orl $0, %0\n"
		     "2:\n"
		     _ASM_EXTABLE(1b, 2b)
		     : "+m" (*(u32 *)page) : : "cc");
}

/*
 * Writes the first word of each page of a buffer back to it. Leaves out data that a device only reads,
 * which would be copied for nothing: devices change packets unasked, and the head of a packet is the
 * kernel's own memory.
 */
static void touch(void *start, size_t length, u32 direction)
{
	unsigned long page = (unsigned long)start & PAGE_MASK;

	if (!READ_ONCE(armed) || !virt_addr_valid(start) || !length)
		return;
	for (; page < (unsigned long)start + length; page += PAGE_SIZE) {
		if (is_written(direction) || !is_data(virt_to_page((void *)page)))
			rewrite(page);
	}
}

/* Does something with each buffer of a list. */
static void each(struct scatterlist *list, unsigned int count, u32 direction,
		 void (*act)(void *start, size_t length, u32 direction))
{
	for (; list && count; count--, list = sg_next(list))
		act(sg_virt(list), list->length, direction);
}

/*
 * Returns the memory of an entry that a driver adds to a virtqueue. An entry without a page has only a
 * device's address, since its driver has mapped it (AF_XDP without copies does). Returns NULL if the driver
 * did so by the DMA API: its entry points have seen the buffer. Otherwise the device's address is physical.
 */
void *mercury_dma_queued(const struct virtqueue *queue, struct scatterlist *entry)
{
	if (sg_page(entry))
		return sg_virt(entry);
	if (__virtio_test_bit(queue->vdev, VIRTIO_F_ACCESS_PLATFORM))
		return NULL;
	return phys_to_virt(sg_dma_address(entry));
}

/* Buffers that a driver adds to a virtqueue, for the device to write to. */
static void queue_list(const struct virtqueue *queue, struct scatterlist *list, unsigned int count)
{
	struct scatterlist *entry = list;
	unsigned int left;

	for (left = count; entry && left; left--, entry = sg_next(entry))
		touch(mercury_dma_queued(queue, entry), entry->length, DMA_FROM_DEVICE);
	if (mercury_dma_log_is_on())
		mercury_dma_log_queue(queue, list, count);
}

/* A buffer that a device has until it is taken back. */
static void give(void *start, size_t length, u32 direction)
{
	touch(start, length, direction);
	if (mercury_dma_log_is_on() && is_written(direction))
		mercury_dma_log_give(start, length);
}

/* Of pages that it was to read only, the device may have changed those that are not data. */
static void take_back(void *start, size_t length, u32 direction)
{
	unsigned long page = (unsigned long)start & PAGE_MASK;

	if (!mercury_dma_log_is_on() || !virt_addr_valid(start) || !length)
		return;
	if (is_written(direction)) {
		mercury_dma_log_note(start, length, true);
		return;
	}
	for (; page < (unsigned long)start + length; page += PAGE_SIZE)
		if (!is_data(virt_to_page((void *)page)))
			mercury_dma_log_note((void *)page, PAGE_SIZE, false);
}

/*
 * Before the instant: has a buffer that a device gives back copied at the instant, since the device may not
 * know yet that the buffer is gone. Leaves out data: devices that read data stop.
 */
static void mark(void *start, size_t length)
{
	unsigned long at = (unsigned long)start & PAGE_MASK;

	if (!READ_ONCE(armed) || mercury_snapshot_is_past() || !virt_addr_valid(start) || !length)
		return;
	for (; at < (unsigned long)start + length; at += PAGE_SIZE) {
		if (!is_data(virt_to_page((void *)at)))
			mercury_scan_mark(__pa(at));
	}
}

/* virtqueue_add_inbuf(queue, list, count, ...), with a context, and with entries that are mapped */
static void before_inbuf(const struct pt_regs *regs)
{
	queue_list((struct virtqueue *)regs->di, (struct scatterlist *)regs->si, regs->dx);
}

/* virtqueue_add_sgs(queue, lists, outgoing, incoming, ...) */
static void before_sgs(const struct pt_regs *regs)
{
	struct scatterlist **lists = (void *)regs->si;
	unsigned int first = regs->dx, i;

	for (i = first; i < first + (unsigned int)regs->cx; i++)
		queue_list((struct virtqueue *)regs->di, lists[i], UINT_MAX);
}

/* dma_map_page_attrs(device, page, offset, size, direction, ...) */
static void before_map_page(const struct pt_regs *regs)
{
	give(page_address((struct page *)regs->si) + regs->dx, regs->cx, regs->r8);
}

/* dma_map_sg_attrs(device, list, count, direction, ...) */
static void before_map_sg(const struct pt_regs *regs)
{
	each((struct scatterlist *)regs->si, regs->dx, regs->cx, give);
}

/* dma_map_sgtable(device, table, direction, ...) */
static void before_map_sgtable(const struct pt_regs *regs)
{
	struct sg_table *table = (void *)regs->si;

	each(table->sgl, table->orig_nents, regs->dx, give);
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
static void before_sync_single(const struct pt_regs *regs)
{
	touch(memory_of((struct device *)regs->di, regs->si), regs->dx, regs->cx);
}

/* A buffer that the CPU is about to read, and that the device keeps. */
static void show(void *start, size_t length, u32 direction)
{
	if (mercury_dma_log_is_on() && is_written(direction))
		mercury_dma_log_note(start, length, false);
}

/* dma_sync_single_for_cpu(device, address, size, direction) */
static void before_sync_single_for_cpu(const struct pt_regs *regs)
{
	if (mercury_dma_log_is_on())
		show(memory_of((struct device *)regs->di, regs->si), regs->dx, regs->cx);
}

/* dma_sync_sg_for_cpu(device, list, count, direction) */
static void before_sync_sg_for_cpu(const struct pt_regs *regs)
{
	each((struct scatterlist *)regs->si, regs->dx, regs->cx, show);
}

/* balloon_page_enqueue(balloon, page): the host takes it, whatever was there. */
static void before_balloon(const struct pt_regs *regs)
{
	give(page_address((struct page *)regs->si), PAGE_SIZE, DMA_FROM_DEVICE);
}

static void unmap(void *start, size_t length, u32 direction)
{
	take_back(start, length, direction);
	if (is_written(direction))
		mark(start, length);
}

/* dma_unmap_page_attrs(device, address, size, direction, ...) */
static void before_unmap_page(const struct pt_regs *regs)
{
	unmap(memory_of((struct device *)regs->di, regs->si), regs->dx, regs->cx);
}

/* dma_unmap_sg_attrs(device, list, count, direction, ...) */
static void before_unmap_sg(const struct pt_regs *regs)
{
	each((struct scatterlist *)regs->si, regs->dx, regs->cx, unmap);
}

/* dma_sync_sg_for_device(device, list, count, direction) */
static void before_sync_sg(const struct pt_regs *regs)
{
	each((struct scatterlist *)regs->si, regs->dx, regs->cx, touch);
}

/* iommu_map(domain, ...): in a domain of no driver's, a process's own driver gives memory to its device. */
static void before_iommu_map(const struct pt_regs *regs)
{
	if (((struct iommu_domain *)regs->di)->type == IOMMU_DOMAIN_UNMANAGED)
		lose();
}

static struct entry {
	const char *name;
	/* NULL: from here on the device writes unseen. */
	void (*before)(const struct pt_regs *regs);
	/* Address of the function; 0: there is none. */
	unsigned long address;
} entries[] = {
	{ "virtqueue_add_inbuf", before_inbuf },
	{ "virtqueue_add_inbuf_ctx", before_inbuf },
	/* Later kernels have this one. */
	{ "virtqueue_add_inbuf_premapped", before_inbuf },
	{ "virtqueue_add_sgs", before_sgs },
	{ "balloon_page_enqueue", before_balloon },
	{ "dma_map_page_attrs", before_map_page },
	{ "dma_map_sg_attrs", before_map_sg },
	{ "dma_map_sgtable", before_map_sgtable },
	{ "dma_unmap_page_attrs", before_unmap_page },
	{ "dma_unmap_sg_attrs", before_unmap_sg },
	{ "__dma_sync_single_for_device", before_sync_single },
	{ "__dma_sync_sg_for_device", before_sync_sg },
	{ "__dma_sync_single_for_cpu", before_sync_single_for_cpu },
	{ "__dma_sync_sg_for_cpu", before_sync_sg_for_cpu },
	/* A process drives a device by itself (VFIO, uio), or the device uses a process's page tables. */
	{ "iommu_map", before_iommu_map },
	{ "iommu_sva_bind_device" },
	{ "vfio_pci_core_enable" },
	{ "uio_open" },
};

/* Modules that bring functions of the table. */
static const char * const modules[] = { "virtio_ring", "vfio_pci_core", "uio" };

static void notrace entered(unsigned long ip, unsigned long parent, struct ftrace_ops *ops,
			    struct ftrace_regs *fregs)
{
	const struct pt_regs *regs = ftrace_get_regs(fregs);
	unsigned int i;

	if (!READ_ONCE(watching))
		return;
	for (i = 0; regs && i < ARRAY_SIZE(entries); i++) {
		if (entries[i].address == ip && entries[i].before) {
			entries[i].before(regs);
			return;
		}
	}
	lose();
}

static struct ftrace_ops ops;

/*
 * Finds the address at which a function calls ftrace, which is where a probe on it would be: after an
 * ENDBR. The address is 0 if there is no such function, so that no caller can exist. Earlier kernels have
 * some names without the underscores.
 */
static int find_address(struct entry *entry)
{
	struct kprobe probe = { .symbol_name = entry->name, .flags = KPROBE_FLAG_DISABLED };
	int err = register_kprobe(&probe);

	if (err == -ENOENT && entry->name[0] == '_') {
		entry->name += 2;
		return find_address(entry);
	}
	entry->address = err ? 0 : (unsigned long)probe.addr;
	if (!err)
		unregister_kprobe(&probe);
	return err == -ENOENT ? 0 : err;
}

/* A module may bring functions that are not watched. Not under mercury.lock. */
void mercury_dma_module_comes(const char *name)
{
	if (READ_ONCE(watching) && match_string(modules, ARRAY_SIZE(modules), name) >= 0)
		lose();
}

/*
 * Takes the watch from the kernel's text, when each of the kernel's tasks has rested once. ftrace waits for
 * that, too, but holds a lock meanwhile that whoever loads or removes a module needs.
 */
static void take_away(struct work_struct *unused)
{
	synchronize_rcu_tasks();
	unregister_ftrace_function(&ops);
	ftrace_free_filter(&ops);
}

DECLARE_WORK(mercury_dma_end, take_away);

static int watch(void)
{
	bool found = false;
	unsigned int i;
	int err;

	flush_work(&mercury_dma_end);
	/* Nothing of the last time: a filter that was freed is still pointed to. */
	memset(&ops, 0, sizeof(ops));
	ops.func = entered;
	/* PERMANENT: no sysctl switches it off. */
	ops.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_PERMANENT;
	for (i = 0; i < ARRAY_SIZE(entries); i++) {
		err = find_address(&entries[i]);
		if (entries[i].address)
			err = ftrace_set_filter_ip(&ops, entries[i].address, 0, 0);
		found |= entries[i].address;
		if (err) {
			pr_err("%s cannot be watched: %d\n", entries[i].name, err);
			return err;
		}
	}
	/* Without a filter it would be all functions. */
	return found ? register_ftrace_function(&ops) : -ENOENT;
}

/* Makes the watch ready, which takes a while: every kernel text that is patched waits for all CPUs. */
u32 mercury_dma_watch(void)
{
	int err;

	missed = false;
	/* A module that comes from here on is told; the functions of one that came before are found. */
	smp_store_mb(watching, true);
	err = watch();
	if (!err)
		return MERCURY_CODE_OK;
	pr_err("the entry points of DMA cannot be watched: %d\n", err);
	ftrace_free_filter(&ops);
	watching = false;
	return MERCURY_CODE_SNAPSHOT_DEVICES;
}

/* From here on whatever is given to a device is written to first. */
void mercury_dma_arm(void)
{
	WRITE_ONCE(armed, true);
}

/* Returns true if a buffer may have been given to a device unseen. */
bool mercury_dma_missed(void)
{
	return READ_ONCE(missed);
}

/*
 * Ends the watch. Calls that have begun end before this returns. The kernel's text is left to a worker: one
 * of the kernel's tasks may never rest, and applications of a machine that arrives stand still meanwhile.
 */
void mercury_dma_unwatch(void)
{
	if (!watching)
		return;
	WRITE_ONCE(armed, false);
	watching = false;
	synchronize_rcu();
	schedule_work(&mercury_dma_end);
}

/*
 * Returns true if a device may have this page, which is not reserved, for good: no data, no slab, no page
 * table. The reference count says nothing: the second page of several that were allocated at once has none.
 */
static bool is_persistent(struct page *page)
{
	if (PageSlab(page) || PageTable(page) || PageOffline(page))
		return false;
	/* Devices write to pages that processes have pinned for as long as they like. */
	return !is_data(page) || folio_maybe_dma_pinned(page_folio(page));
}

/*
 * Returns how many pages from this one on have the same use; of reserved pages, at most `most`. Reserved
 * pages are many: those that describe memory grow with memory.
 */
unsigned long mercury_dma_stretch(struct page *page, unsigned long most, enum mercury_page_use *use)
{
	unsigned long count = 0, order;

	*use = MERCURY_PAGE_USED;
	while (count < most && PageReserved(page + count))
		count++;
	if (count)
		return count;
	/* Only the first page of a free block says so. The kernel may have allocated the block by now. */
	if (PageBuddy(page)) {
		order = READ_ONCE(page->private);
		/* The order is the block's if the block was free before and after the read. */
		smp_rmb();
		if (!PageBuddy(page) || READ_ONCE(page->private) != order ||
		    order >= BITS_PER_LONG || !IS_ALIGNED(page_to_pfn(page), 1UL << order))
			return 1;
		*use = MERCURY_PAGE_FREE;
		return 1UL << order;
	}
	if (is_persistent(page))
		*use = MERCURY_PAGE_PERSISTENT;
	return 1;
}

/* Network cards that were bus masters at the instant. */
static struct pci_dev **masters;
static unsigned int master_count;

/*
 * Stops all network cards from reading and writing memory until mercury_dma_start(): the network acts on
 * them unasked.
 */
int mercury_dma_stop(void)
{
	struct pci_dev *device = NULL;
	unsigned int count = 0;
	u16 command;

	for_each_pci_dev(device)
		count++;
	/* Disks stand still: there is no writing to them for the sake of memory. */
	masters = kvmalloc_array(count, sizeof(*masters), GFP_NOIO);
	if (!masters)
		return -ENOMEM;
	master_count = 0;
	for_each_pci_dev(device) {
		if (device->class >> 16 != PCI_BASE_CLASS_NETWORK || master_count == count ||
		    pci_read_config_word(device, PCI_COMMAND, &command) ||
		    command == (u16)~0 || !(command & PCI_COMMAND_MASTER))
			continue;
		pci_write_config_word(device, PCI_COMMAND, command & ~PCI_COMMAND_MASTER);
		/* The writes that the card made before have arrived when the card answers. */
		pci_read_config_word(device, PCI_COMMAND, &command);
		masters[master_count++] = pci_dev_get(device);
	}
	return 0;
}

/*
 * Lets network cards read and write again. In a machine that returns for the second time the kernel does
 * so.
 */
void mercury_dma_start(bool restored)
{
	unsigned int i;
	u16 command;

	for (i = 0; i < master_count; i++) {
		if (!restored && !pci_read_config_word(masters[i], PCI_COMMAND, &command))
			pci_write_config_word(masters[i], PCI_COMMAND, command | PCI_COMMAND_MASTER);
		pci_dev_put(masters[i]);
	}
	kvfree(masters);
}
