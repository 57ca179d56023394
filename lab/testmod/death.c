// SPDX-License-Identifier: GPL-2.0-only
/*
 * Failures from which a kernel does not recover by itself.
 */
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/panic.h>
#include <linux/smp.h>
#include <asm/apic.h>
#include <asm/desc.h>
#include <asm/nmi.h>
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
	pr_emerg("mercury_test: CPU %llu hangs\n", arguments[0]);
	return test_on_cpu(arguments[0], hang, NULL);
}

/* hang-all MS: after so many milliseconds all CPUs loop for ever, with interrupts off */
int test_hang_all(struct test_answer *answer, const u64 *arguments)
{
	unsigned long flags;

	mdelay(arguments[0]);
	pr_emerg("mercury_test: all CPUs hang\n");
	preempt_disable();
	smp_call_function_many(cpu_online_mask, hang, NULL, false);
	local_irq_save(flags);
	hang(NULL);
	return 0;
}

/* soft-hang: this CPU loops for ever with interrupts on, through code of several pages */
int test_soft_hang(struct test_answer *answer, const u64 *arguments)
{
	pr_emerg("mercury_test: a CPU loops\n");
	preempt_disable();
	for (;;)
		asm volatile(".rept 16384\n\tnop\n\t.endr");
	return 0;
}

static atomic_t hangs_in_nmi = ATOMIC_INIT(-1);

static int hang_here(unsigned int type, struct pt_regs *regs)
{
	if (atomic_read(&hangs_in_nmi) == smp_processor_id())
		hang(NULL);
	return NMI_DONE;
}

/* hang-in-nmi CPU: the CPU loops for ever in a handler of NMIs, which no NMI can interrupt */
int test_hang_in_nmi(struct test_answer *answer, const u64 *arguments)
{
	int err;

	if (arguments[0] >= nr_cpu_ids || !cpu_online(arguments[0]))
		return -ENXIO;
	err = register_nmi_handler(NMI_LOCAL, hang_here, NMI_FLAG_FIRST, "mercury_test_hang");
	if (err)
		return err;
	pr_emerg("mercury_test: CPU %llu hangs in an NMI\n", arguments[0]);
	atomic_set(&hangs_in_nmi, arguments[0]);
	apic->send_IPI_mask(cpumask_of(arguments[0]), NMI_VECTOR);
	return 0;
}

static int crash(void *unused)
{
	pr_emerg("mercury_test: an oops comes\n");
	*(volatile int *)NULL = 0;
	return 0;
}

/* oops THREAD: an oops in this task (0), or in a kernel thread (1) */
int test_oops(struct test_answer *answer, const u64 *arguments)
{
	if (!arguments[0])
		return crash(NULL);
	return PTR_ERR_OR_ZERO(kthread_run(crash, NULL, "mercury-oops"));
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
