// SPDX-License-Identifier: GPL-2.0-only
/*
 * A driver with a bug, for `make demo-guard`. It moves data through a ring of buffers. When the parameter
 * `stumble` is set it forgets the ring's end. It writes over the kernel's other objects behind the ring, and
 * over its own pointer to the function that it calls next.
 */
#include <linux/delay.h>
#include <linux/err.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/slab.h>

#define ENTRIES 64
/* Entries that the bug writes beyond the ring. */
#define BEYOND 512

static bool stumble;
module_param(stumble, bool, 0600);
MODULE_PARM_DESC(stumble, "forget the end of the ring");

static u64 *ring;
static void (*complete_entry)(u64 entry);
static struct task_struct *thread;
static u64 completed;

static void faulty_complete(u64 entry)
{
	completed += entry;
}

static noinline void faulty_fill(unsigned int entries)
{
	unsigned int i;

	for (i = 0; i < entries; i++)
		WRITE_ONCE(ring[i], 0x4641554c54590000 + i);
	if (entries > ENTRIES)
		WRITE_ONCE(complete_entry, (void *)ring[ENTRIES]);
}

static noinline void faulty_poll(void)
{
	faulty_fill(READ_ONCE(stumble) ? ENTRIES + BEYOND : ENTRIES);
	complete_entry(ring[0]);
}

static int faulty_run(void *unused)
{
	while (!kthread_should_stop()) {
		faulty_poll();
		msleep(20);
	}
	return 0;
}

static int __init faulty_init(void)
{
	ring = kcalloc(ENTRIES, sizeof(*ring), GFP_KERNEL);
	if (!ring)
		return -ENOMEM;
	complete_entry = faulty_complete;
	thread = kthread_run(faulty_run, NULL, "faulty");
	if (!IS_ERR(thread))
		return 0;
	kfree(ring);
	return PTR_ERR(thread);
}

static void __exit faulty_exit(void)
{
	kthread_stop(thread);
	kfree(ring);
}

module_init(faulty_init);
module_exit(faulty_exit);

MODULE_DESCRIPTION("A driver that corrupts memory, for a demonstration");
MODULE_AUTHOR("The Mercury authors");
MODULE_LICENSE("GPL");
