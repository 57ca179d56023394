// SPDX-License-Identifier: GPL-2.0-only
/*
 * Virtio devices that a monitor had, and that are no more. A driver of virtio frees at its freeze what its
 * removal frees again, unless it has woken up in between. So it wakes up on a transport of this file: it can
 * be reset and has queues, and nothing answers there. One device after the other wakes up, or is removed.
 */
#include <linux/module.h>
#include <linux/version.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>
#include <linux/virtio_ring.h>

#include "snapshot.h"

#define ENTRIES	256

/* The arguments of find_vqs that do not matter here. */
#if KERNEL_VERSION(6, 11, 0) <= LINUX_VERSION_CODE
#define REST	struct virtqueue_info infos[], struct irq_affinity *affinity
#else
#define REST	vq_callback_t *callbacks[], const char * const names[], const bool *contexts, \
		struct irq_affinity *affinity
#endif

/* The transport: the device's own, but for what waits for the device. */
static struct virtio_config_ops nowhere;
static u8 status;
static bool failed;

static u8 get_status(struct virtio_device *device)
{
	return status;
}

static void set_status(struct virtio_device *device, u8 wanted)
{
	status = wanted;
}

static void reset(struct virtio_device *device)
{
	status = 0;
}

static bool notify(struct virtqueue *queue)
{
	return true;
}

/* A device with a driver holds the module of these functions, which the driver of this file does without. */
static void del_vqs(struct virtio_device *device)
{
	typeof(vring_del_virtqueue) *delete = symbol_get(vring_del_virtqueue);
	struct virtqueue *queue, *next;

	list_for_each_entry_safe(queue, next, &device->vqs, list)
		delete(queue);
	symbol_put(vring_del_virtqueue);
}

/* A network card loses packets in silence. What other devices are asked for fails at once. */
static int find_vqs(struct virtio_device *device, unsigned int count, struct virtqueue *queues[], REST)
{
	typeof(vring_create_virtqueue) *create = symbol_get(vring_create_virtqueue);
	typeof(virtio_break_device) *fail = symbol_get(virtio_break_device);
	unsigned int i;

	for (i = 0; i < count; i++) {
		queues[i] = create(i, ENTRIES, PAGE_SIZE, device, true, true, true, notify, NULL, "absent");
		failed |= !queues[i];
	}
	if (device->id.device != VIRTIO_ID_NET)
		fail(device);
	symbol_put(vring_create_virtqueue);
	symbol_put(virtio_break_device);
	return failed ? -ENOMEM : 0;
}

/* Before devices wake up: this one, of virtio, is no more. */
int mercury_absent(struct device *device, void *unused)
{
	struct virtio_device *virtio = dev_to_virtio(device);

	nowhere = *virtio->config;
	nowhere.get_status = get_status;
	nowhere.set_status = set_status;
	nowhere.reset = reset;
	nowhere.find_vqs = find_vqs;
	nowhere.del_vqs = del_vqs;
	virtio->config = &nowhere;
	return 0;
}

/* Returns true if the drivers have woken up, so that the devices can be removed. */
bool mercury_absent_are_awake(void)
{
	return !failed;
}
