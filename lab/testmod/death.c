// SPDX-License-Identifier: GPL-2.0-only
/*
 * Failures from which a kernel does not recover by itself.
 */
#include <linux/delay.h>
#include <linux/panic.h>
#include <linux/smp.h>
#include <asm/desc.h>
#include <asm/processor.h>

#include "mercury_test.h"

static void hang(void *argument)
{
	for (;;)
		cpu_relax();
}

/* hang CPU: the CPU loops for ever, with interrupts off */
int test_hang(struct test_answer *answer, const u64 *arguments)
{
	return test_on_cpu(arguments[0], hang, NULL);
}

/* hang-and-panic CPU: the named CPU hangs, and this CPU panics */
int test_hang_and_panic(struct test_answer *answer, const u64 *arguments)
{
	int err = smp_call_function_single(arguments[0], hang, NULL, 0);

	if (err)
		return err;
	mdelay(100);
	panic("CPU %llu hangs", arguments[0]);
}

/* Without an interrupt table neither the exception can be delivered nor the two that follow from it. */
static void triple_fault(void *argument)
{
	const struct desc_ptr nothing = {};

	native_load_idt(&nothing);
	asm volatile("int3");
}

/* triple-fault CPU: the CPU causes a triple fault */
int test_triple_fault(struct test_answer *answer, const u64 *arguments)
{
	return test_on_cpu(arguments[0], triple_fault, NULL);
}
