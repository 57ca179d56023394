// SPDX-License-Identifier: GPL-2.0-only
/*
 * Entries without pages in a virtqueue, as a driver adds them that has mapped its buffers itself (AF_XDP
 * without copies does so). The queue belongs to no device, so no entry is ever consumed.
 */
#include <linux/gfp.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <asm/io.h>

#include "mercury_test.h"

#define ENTRIES 4096

/* This is a module on some kernels, and not every machine has loaded it. */
struct rings {
	typeof(vring_new_virtqueue) *new;
	typeof(vring_del_virtqueue) *del;
	typeof(virtqueue_add_inbuf) *add;
};

static bool notify(struct virtqueue *queue)
{
	return true;
}

static int add_all(const struct rings *rings, struct virtqueue *queue, void *buffer, u64 count)
{
	struct scatterlist entry;
	int err = 0;

	for (; !err && count; count--) {
		sg_init_table(&entry, 1);
		entry.dma_address = virt_to_phys(buffer);
		entry.length = PAGE_SIZE;
		err = rings->add(queue, &entry, 1, buffer, GFP_KERNEL);
	}
	return err;
}

static int use_queue(const struct rings *rings, struct virtio_device *device, void *ring, u64 count)
{
	void *buffer = (void *)__get_free_page(GFP_KERNEL);
	struct virtqueue *queue;
	int err = -ENOMEM;

	queue = rings->new(0, ENTRIES, PAGE_SIZE, device, true, false, ring, notify, NULL, "mercury_test");
	if (queue && buffer)
		err = add_all(rings, queue, buffer, count);
	if (queue)
		rings->del(queue);
	free_page((unsigned long)buffer);
	return err;
}

/* queue-without-pages COUNT: adds so many entries */
int test_queue_without_pages(struct test_answer *answer, const u64 *arguments)
{
	struct rings rings = {
		.new = symbol_get(vring_new_virtqueue),
		.del = symbol_get(vring_del_virtqueue),
		.add = symbol_get(virtqueue_add_inbuf),
	};
	struct virtio_device *device = kzalloc(sizeof(*device), GFP_KERNEL);
	size_t size = vring_size(ENTRIES, PAGE_SIZE);
	void *ring = alloc_pages_exact(size, GFP_KERNEL | __GFP_ZERO);
	int err = -ENOMEM;

	if (device && ring && rings.new && rings.del && rings.add) {
		spin_lock_init(&device->vqs_list_lock);
		INIT_LIST_HEAD(&device->vqs);
		err = use_queue(&rings, device, ring, min_t(u64, arguments[0], ENTRIES));
		test_say(answer, "added %d\n", !err);
	}
	if (ring)
		free_pages_exact(ring, size);
	kfree(device);
	if (rings.new)
		symbol_put(vring_new_virtqueue);
	if (rings.del)
		symbol_put(vring_del_virtqueue);
	if (rings.add)
		symbol_put(virtqueue_add_inbuf);
	return err;
}
