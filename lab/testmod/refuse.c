// SPDX-License-Identifier: GPL-2.0-only
/*
 * A device whose driver refuses to be quiesced, on request, or starts a kernel thread that never rests when
 * the device comes back in a machine from an image. And a task that hears no signals.
 */
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/platform_device.h>
#include <linux/pm.h>

#include "mercury_test.h"

static bool refuses, is_restless;
static struct platform_device *device;
static struct task_struct *restless;

static int freeze(struct device *unused)
{
	return refuses ? -EBUSY : 0;
}

/* Gives way to other tasks, and never sleeps. */
static int never_rest(void *unused)
{
	while (!kthread_should_stop())
		cond_resched();
	return 0;
}

static int restore(struct device *unused)
{
	if (is_restless && !restless)
		restless = kthread_run(never_rest, NULL, "mercury_restless");
	return 0;
}

static const struct dev_pm_ops operations = { .freeze = freeze, .restore = restore };

static int probe(struct platform_device *unused)
{
	return 0;
}

static struct platform_driver driver = {
	.probe = probe,
	.driver = { .name = "mercury_refuser", .pm = &operations },
};

/* refuse 1 or 0: turns the refusal on or off */
int test_refuse(struct test_answer *answer, const u64 *arguments)
{
	refuses = arguments[0];
	return 0;
}

static void rest(void)
{
	if (!IS_ERR_OR_NULL(restless))
		kthread_stop(restless);
	restless = NULL;
}

/* restless 1 or 0: has the thread start in a machine from an image, or ends the thread, which has to run */
int test_restless(struct test_answer *answer, const u64 *arguments)
{
	bool runs = !IS_ERR_OR_NULL(restless);

	is_restless = arguments[0];
	if (is_restless)
		return 0;
	rest();
	return runs ? 0 : -ESRCH;
}

/* wait MILLISECONDS: the task that asks for it cannot be frozen meanwhile */
int test_wait(struct test_answer *answer, const u64 *arguments)
{
	msleep(arguments[0]);
	return 0;
}

int test_refuse_init(void)
{
	int err = platform_driver_register(&driver);

	if (err)
		return err;
	device = platform_device_register_simple("mercury_refuser", PLATFORM_DEVID_NONE, NULL, 0);
	if (!IS_ERR(device))
		return 0;
	platform_driver_unregister(&driver);
	return PTR_ERR(device);
}

void test_refuse_exit(void)
{
	rest();
	platform_device_unregister(device);
	platform_driver_unregister(&driver);
}
