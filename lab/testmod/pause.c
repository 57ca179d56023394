// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pauses that are no hang, and a timer that falls silent.
 */
#include <linux/io.h>
#include <linux/ktime.h>
#include <linux/stop_machine.h>
#include <asm/hpet.h>

#include "mercury_test.h"

#define STOP_MAX_MS	10000
/* The usual address, and QEMU's. */
#define HPET_ADDRESS	0xfed00000

static int stand_still(void *argument)
{
	u64 end = ktime_get_ns() + *(u64 *)argument * NSEC_PER_MSEC;

	while (ktime_get_ns() < end)
		cpu_relax();
	return 0;
}

/* stop MS: the kernel stops all CPUs for so many milliseconds, as it does to patch code */
int test_stop(struct test_answer *answer, const u64 *arguments)
{
	u64 ms = arguments[0];

	return ms > STOP_MAX_MS ? -EINVAL : stop_machine(stand_still, &ms, NULL);
}

/* hpet ON: lets the HPET's counter run, or stops it (0) */
int test_hpet(struct test_answer *answer, const u64 *arguments)
{
	void __iomem *hpet = ioremap(HPET_ADDRESS, HPET_MMAP_SIZE);
	u32 config;

	if (!hpet)
		return -ENOMEM;
	config = readl(hpet + HPET_CFG) & ~HPET_CFG_ENABLE;
	writel(config | (arguments[0] ? HPET_CFG_ENABLE : 0), hpet + HPET_CFG);
	iounmap(hpet);
	return 0;
}
