// SPDX-License-Identifier: GPL-2.0-only
/* Start and end of the module. It does nothing to the machine before it is asked to load. */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/module.h>

#include "snapshot/snapshot.h"
#include "watch/watch.h"

struct mercury mercury = {
	.lock = __MUTEX_INITIALIZER(mercury.lock),
	.state = MERCURY_STATE_UNLOADED,
};

DEFINE_PER_CPU(struct mercury_cpu, mercury_cpus);

static int __init mercury_init(void)
{
	int err;

	mercury_vendor_init();
	mercury_hooks_register(&mercury_snapshot_hooks);
	err = mercury_events_init();
	if (err)
		return err;
	err = mercury_snapshot_init();
	if (err)
		goto no_snapshot;
	err = mercury_device_init();
	if (err)
		goto no_device;
	mercury_guest_init();
	return 0;

no_device:
	mercury_snapshot_exit();
no_snapshot:
	mercury_events_exit();
	return err;
}

/*
 * While the hypervisor is loaded it holds a reference. The kernel counts none if the module is removed by
 * force (`rmmod -f`): all CPUs are detached here then.
 */
static void __exit mercury_exit(void)
{
	mercury_device_exit();
	mercury_guest_exit();
	mercury_control_exit();
	mercury_device_wait();
	mercury_watch_stop();
	mercury_snapshot_exit();
	mercury_events_exit();
}

module_init(mercury_init);
module_exit(mercury_exit);

MODULE_DESCRIPTION("Slips a hypervisor beneath the running kernel and takes it out again");
MODULE_AUTHOR("The Mercury authors");
MODULE_LICENSE("GPL");
