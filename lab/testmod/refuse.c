// SPDX-License-Identifier: GPL-2.0-only
/*
 * A device whose driver refuses to be quiesced, on request.
 */
#include <linux/platform_device.h>
#include <linux/pm.h>

#include "mercury_test.h"

static bool refuses;
static struct platform_device *device;

static int freeze(struct device *unused)
{
	return refuses ? -EBUSY : 0;
}

static const struct dev_pm_ops operations = { .freeze = freeze };

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
	platform_device_unregister(device);
	platform_driver_unregister(&driver);
}
