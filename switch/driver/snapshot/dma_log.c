// SPDX-License-Identifier: GPL-2.0-only
/*
 * The part of devices in the dirty log. The hypervisor notes the writes of CPUs; DMA bypasses its tables.
 * So a page is noted when it is taken back from a device, and when the CPU is about to read it. While a
 * device has the page, it is in each collection.
 *
 * Where the DMA API has no part in virtio's buffers, no call says when they are taken back. They are
 * carried from one collection to the next until their queue is seen empty. Of a queue that never is, the
 * newest pages are known. Older ones stay in all collections, except for pages that are the kernel's own
 * memory: at the instant all of those count as written (dma.c), and such a page can have become nothing
 * else while a device had it.
 *
 * A buffer that a device got before the log began is noted when it comes back. If it has not come back at
 * the instant, it is the kernel's own memory, or was taken from the device when the device was stopped.
 * Virtio's buffers come back unseen, so the rings are searched for those that are out when the log begins
 * (see below).
 */
#include <linux/bitmap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/page-flags.h>
#include <linux/pci.h>
#include <linux/platform_device.h>
#include <linux/rcupdate.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <asm/io.h>

#include "snapshot.h"

/* More queues than this, and more pages of one, are not told apart. */
#define QUEUES		32
#define QUEUE_PAGES	2048

/* Pages that a queue of virtio's has got since it was empty: the last ones, the oldest of them at `next`. */
struct queue {
	const struct virtqueue *queue;
	unsigned int count, next;
	unsigned long pfns[QUEUE_PAGES];
};

static struct {
	bool on;
	/*
	 * By page frame number, in pieces: pages that were written, and how many times devices have a page.
	 */
	unsigned long **written;
	u8 **held;
	unsigned long count;
	struct queue *queues;
} devices;
/* Raw: drivers call the entry points of DMA wherever they like, and ftrace disables preemption there. */
static DEFINE_RAW_SPINLOCK(queues_lock);

/* The counter is full: such a page is in every collection. */
#define HELD_MAX	U8_MAX

bool mercury_dma_log_is_on(void)
{
	/* Pairs with mercury_dma_log_start(). */
	return smp_load_acquire(&devices.on);
}

static void note(unsigned long pfn)
{
	unsigned long at = pfn / MERCURY_MAP_BITS;

	if (at < devices.count && devices.written[at])
		set_bit(pfn % MERCURY_MAP_BITS, devices.written[at]);
}

/* Puts a page into the next collection. */
void mercury_dma_log_written(unsigned long pfn)
{
	if (mercury_dma_log_is_on())
		note(pfn);
}

static void hold(unsigned long pfn, int by)
{
	unsigned long at = pfn / MERCURY_MAP_BITS;
	u8 *held, old;

	if (at >= devices.count || !devices.held[at])
		return;
	held = devices.held[at] + pfn % MERCURY_MAP_BITS;
	old = READ_ONCE(*held);
	do {
		/* A buffer from before the log is not counted. */
		if (old == HELD_MAX || (by < 0 && !old))
			return;
	} while (!try_cmpxchg(held, &old, (u8)min_t(int, old + by, HELD_MAX)));
}

static unsigned long pages_of(const void *start, size_t length)
{
	return DIV_ROUND_UP(offset_in_page(start) + length, PAGE_SIZE);
}

/* A device may write to these pages from here on. */
void mercury_dma_log_give(const void *start, size_t length)
{
	unsigned long pfn, end;

	if (!virt_addr_valid(start) || !length)
		return;
	pfn = PHYS_PFN(__pa(start));
	for (end = pfn + pages_of(start, length); pfn < end; pfn++)
		hold(pfn, 1);
}

/* Notes pages that a device may have written. Pages that it does not have any more are noted first. */
void mercury_dma_log_note(const void *start, size_t length, bool returned)
{
	unsigned long pfn, end;

	if (!virt_addr_valid(start) || !length)
		return;
	pfn = PHYS_PFN(__pa(start));
	for (end = pfn + pages_of(start, length); pfn < end; pfn++) {
		note(pfn);
		if (returned)
			hold(pfn, -1);
	}
}

static bool is_kernels_own(unsigned long pfn)
{
	struct page *page = pfn_to_page(pfn);

	return !PageLRU(page) && !PageSlab(page) && !page->mapping;
}

static void forget_oldest(struct queue *queue)
{
	unsigned long pfn = queue->pfns[queue->next];

	note(pfn);
	if (!is_kernels_own(pfn))
		hold(pfn, HELD_MAX);
	queue->count--;
}

static void add(struct queue *queue, unsigned long pfn)
{
	if (queue->count == QUEUE_PAGES)
		forget_oldest(queue);
	queue->pfns[queue->next] = pfn;
	queue->next = (queue->next + 1) % QUEUE_PAGES;
	queue->count++;
}

/* Returns the page that was added so many pages before the newest. */
static unsigned long before_newest(const struct queue *queue, unsigned int number)
{
	return queue->pfns[(queue->next + QUEUE_PAGES - 1 - number) % QUEUE_PAGES];
}

static struct queue *find_queue(const struct virtqueue *virtqueue)
{
	unsigned int i;

	for (i = 0; i < QUEUES; i++) {
		struct queue *queue = &devices.queues[i];

		if (!queue->queue)
			queue->queue = virtqueue;
		if (queue->queue == virtqueue)
			return queue;
	}
	return NULL;
}

/*
 * Forgets the pages of a queue that is empty: the device has none of them. The caller adds buffers to the
 * queue, and has locked it against takers.
 */
static void forget_if_empty(struct queue *queue)
{
	unsigned int i;

	if (queue->queue->num_free != queue->queue->num_max)
		return;
	for (i = 0; i < queue->count; i++)
		note(before_newest(queue, i));
	queue->count = 0;
}

/* Buffers are about to be added to a queue for a device to write to. */
void mercury_dma_log_queue(const struct virtqueue *virtqueue, struct scatterlist *list, unsigned int count)
{
	struct queue *queue;
	unsigned long flags;

	raw_spin_lock_irqsave(&queues_lock, flags);
	queue = find_queue(virtqueue);
	if (queue)
		forget_if_empty(queue);
	for (; list && count; count--, list = sg_next(list)) {
		const void *start = mercury_dma_queued(virtqueue, list);
		unsigned long pfn, end;

		if (!start || !virt_addr_valid(start) || !list->length)
			continue;
		pfn = PHYS_PFN(__pa(start));
		for (end = pfn + pages_of(start, list->length); pfn < end; pfn++) {
			if (queue)
				add(queue, pfn);
			else
				hold(pfn, HELD_MAX);
		}
	}
	raw_spin_unlock_irqrestore(&queues_lock, flags);
}

/*
 * Buffers that virtio's devices had before the watch: all those that a queue's table of descriptors names
 * for writing. A buffer that is out is in the table, since its entry stays until the buffer has come back.
 * So may be buffers that came back long ago: those are read for nothing, until the queue is seen empty.
 * Buffers that are added meanwhile are seen anyway.
 */
struct rings {
	typeof(virtqueue_get_desc_addr) *table;
	typeof(virtqueue_get_vring_size) *size;
	/* Some cannot be read so. */
	bool unknown;
};

static void carry_over_pages(const struct virtqueue *virtqueue, u64 start, u64 length)
{
	unsigned long pfn = PHYS_PFN(start), end = PHYS_PFN(start + length - 1), flags, i;
	struct queue *queue;

	/* A table that has come back may be anything by now. */
	if (!length || start + length < start || end / MERCURY_MAP_BITS >= devices.count)
		return;
	for (i = pfn / MERCURY_MAP_BITS; i <= end / MERCURY_MAP_BITS; i++)
		if (!devices.written[i])
			return;
	raw_spin_lock_irqsave(&queues_lock, flags);
	queue = find_queue(virtqueue);
	for (; pfn <= end; pfn++) {
		if (!pfn_valid(pfn))
			continue;
		if (queue)
			add(queue, pfn);
		else
			hold(pfn, HELD_MAX);
	}
	raw_spin_unlock_irqrestore(&queues_lock, flags);
}

static void carry_over_table(const struct virtqueue *queue, u64 table, unsigned int count, bool is_indirect)
{
	struct vring_desc entry;
	unsigned int i;

	for (i = 0; i < count; i++) {
		const void *at = phys_to_virt(table + i * sizeof(entry));
		u64 start;
		u32 length;
		u16 flags;

		if (copy_from_kernel_nofault(&entry, at, sizeof(entry)))
			return;
		start = le64_to_cpu((__force __le64)entry.addr);
		length = le32_to_cpu((__force __le32)entry.len);
		flags = le16_to_cpu((__force __le16)entry.flags);
		if (!(flags & VRING_DESC_F_INDIRECT)) {
			if (flags & VRING_DESC_F_WRITE)
				carry_over_pages(queue, start, length);
		} else if (!is_indirect) {
			carry_over_table(queue, start, length / sizeof(entry), true);
		}
	}
}

static int carry_over_device(struct device *device, void *argument)
{
	struct rings *rings = argument;
	struct virtio_device *virtio;
	struct virtqueue *queue;

	if (!device->bus || strcmp(device->bus->name, "virtio"))
		return 0;
	virtio = dev_to_virtio(device);
	/* The DMA API says when these come back. */
	if (__virtio_test_bit(virtio, VIRTIO_F_ACCESS_PLATFORM))
		return 0;
	/* Devices write to these tables as well. */
	if (!rings->table || !rings->size || __virtio_test_bit(virtio, VIRTIO_F_RING_PACKED)) {
		rings->unknown = true;
		return 0;
	}
	/* No queue goes meanwhile. */
	spin_lock(&virtio->vqs_list_lock);
	list_for_each_entry(queue, &virtio->vqs, list)
		carry_over_table(queue, rings->table(queue), rings->size(queue), false);
	spin_unlock(&virtio->vqs_list_lock);
	return 0;
}

static int carry_over_children(struct device *device, void *rings)
{
	return device_for_each_child(device, rings, carry_over_device);
}

/* Before the first frame is read. Devices on other buses than these use the DMA API. */
u32 mercury_dma_log_carry_over(void)
{
	struct rings rings = {
		.table = symbol_get(virtqueue_get_desc_addr),
		.size = symbol_get(virtqueue_get_vring_size),
	};

	/* A task that was about to add a buffer when the watch began has added it. */
	synchronize_rcu_tasks();
	bus_for_each_dev(&pci_bus_type, NULL, &rings, carry_over_children);
	bus_for_each_dev(&platform_bus_type, NULL, &rings, carry_over_children);
	if (rings.table)
		symbol_put(virtqueue_get_desc_addr);
	if (rings.size)
		symbol_put(virtqueue_get_vring_size);
	return rings.unknown ? MERCURY_CODE_LOG_UNSUPPORTED : MERCURY_CODE_OK;
}

static unsigned long put(unsigned long **to, unsigned long pfn)
{
	unsigned long at = pfn / MERCURY_MAP_BITS;

	return at < devices.count && to[at] && !test_and_set_bit(pfn % MERCURY_MAP_BITS, to[at]);
}

static unsigned long put_queues(unsigned long **to)
{
	unsigned long added = 0, flags;
	unsigned int i, page;

	raw_spin_lock_irqsave(&queues_lock, flags);
	for (i = 0; i < QUEUES; i++)
		for (page = 0; page < devices.queues[i].count; page++)
			added += put(to, before_newest(&devices.queues[i], page));
	raw_spin_unlock_irqrestore(&queues_lock, flags);
	return added;
}

/* Puts the pages that devices have into a collection; returns how many of them are new in it. */
unsigned long mercury_dma_log_collect(unsigned long **to)
{
	unsigned long added = put_queues(to), at, i;

	for (at = 0; at < devices.count; at++) {
		const u64 *words = (void *)devices.held[at];

		/* Eight counters at once: most are 0. */
		for (i = 0; words && i < MERCURY_MAP_BITS; i += sizeof(u64)) {
			unsigned long pfn = at * MERCURY_MAP_BITS + i, end;

			if (!READ_ONCE(words[i / sizeof(u64)]))
				continue;
			for (end = pfn + sizeof(u64); pfn < end; pfn++)
				if (devices.held[at][pfn % MERCURY_MAP_BITS])
					added += put(to, pfn);
		}
		cond_resched();
	}
	return added;
}

/* Notes from here on, in a map that has a piece wherever there is memory. */
u32 mercury_dma_log_start(unsigned long **written, unsigned long count)
{
	unsigned long at;

	devices.written = written;
	devices.held = kvcalloc(count, sizeof(*devices.held), GFP_KERNEL);
	devices.queues = kvcalloc(QUEUES, sizeof(*devices.queues), GFP_KERNEL);
	if (!devices.held || !devices.queues)
		return MERCURY_CODE_NO_MEMORY;
	devices.count = count;
	for (at = 0; at < count; at++) {
		if (written[at])
			devices.held[at] = kvzalloc(MERCURY_MAP_BITS, GFP_KERNEL);
		if (written[at] && !devices.held[at])
			return MERCURY_CODE_NO_MEMORY;
	}
	/* Pairs with mercury_dma_log_is_on(): a CPU that sees the log on sees its maps. */
	smp_store_release(&devices.on, true);
	return MERCURY_CODE_OK;
}

/* Before the watch on DMA ends. */
void mercury_dma_log_stop(void)
{
	WRITE_ONCE(devices.on, false);
}

/* After the watch has ended: no CPU notes anything any more. */
void mercury_dma_log_free(void)
{
	unsigned long at;

	for (at = 0; at < devices.count; at++)
		kvfree(devices.held[at]);
	kvfree(devices.held);
	kvfree(devices.queues);
	memset(&devices, 0, sizeof(devices));
}
