// SPDX-License-Identifier: GPL-2.0-only
/*
 * A CPU that takes no interrupts for a while, and NMIs. NMIs are sent one at a time, so that each one must
 * be handled.
 */
#include <linux/cpumask.h>
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/sched/signal.h>
#include <asm/apic.h>
#include <asm/nmi.h>

#include "mercury_test.h"

#define HOLD_MAX_MS	10000
#define NMI_PATIENCE_NS	(5 * NSEC_PER_SEC)

static atomic_t holding;

/* NMIs that a CPU has not handled yet, and those handled so far. One at a time is sent: two could merge. */
static DEFINE_PER_CPU(struct mutex, turn);
static DEFINE_PER_CPU(atomic_t, expected);
static DEFINE_PER_CPU(unsigned long, handled);

static void hold(void *argument)
{
	u64 end = ktime_get_ns() + *(u64 *)argument * NSEC_PER_MSEC;

	/* Not mdelay(): the kernel calibrates its loops at boot, and the speed of an emulator's host varies. */
	atomic_inc(&holding);
	while (ktime_get_ns() < end)
		cpu_relax();
	atomic_dec(&holding);
}

/* hold CPU MS: keeps interrupts off on the CPU for so many milliseconds */
int test_hold(struct test_answer *answer, const u64 *arguments)
{
	u64 ms = arguments[1];
	u64 start = ktime_get_ns();
	int err;

	if (ms > HOLD_MAX_MS)
		return -EINVAL;
	err = test_on_cpu(arguments[0], hold, &ms);
	test_say(answer, "held_us %llu\n", (ktime_get_ns() - start) / NSEC_PER_USEC);
	return err;
}

/* holding: the number of CPUs that are held now */
int test_holding(struct test_answer *answer, const u64 *arguments)
{
	test_say(answer, "holding %d\n", atomic_read(&holding));
	return 0;
}

static int nmi(unsigned int type, struct pt_regs *regs)
{
	if (!atomic_read(this_cpu_ptr(&expected)))
		return NMI_DONE;
	this_cpu_inc(handled);
	atomic_dec(this_cpu_ptr(&expected));
	return NMI_HANDLED;
}

static bool send_one(unsigned int cpu)
{
	atomic_t *pending = per_cpu_ptr(&expected, cpu);
	u64 start = ktime_get_ns();

	atomic_inc(pending);
	preempt_disable();
	apic->send_IPI_mask(cpumask_of(cpu), NMI_VECTOR);
	preempt_enable();
	while (atomic_read(pending)) {
		if (ktime_get_ns() - start > NMI_PATIENCE_NS) {
			atomic_set(pending, 0);
			return false;
		}
		cpu_relax();
	}
	return true;
}

/* nmi CPU COUNT: sends NMIs from the CPU that runs the command */
int test_nmi(struct test_answer *answer, const u64 *arguments)
{
	u64 cpu = arguments[0], sent = 0, lost = 0;

	if (cpu >= nr_cpu_ids || !cpu_online(cpu))
		return -ENXIO;
	while (sent < arguments[1] && !signal_pending(current)) {
		mutex_lock(per_cpu_ptr(&turn, cpu));
		sent++;
		if (!send_one(cpu))
			lost++;
		mutex_unlock(per_cpu_ptr(&turn, cpu));
		cond_resched();
	}
	test_say(answer, "sent %llu\nlost %llu\nhandled_by_cpu %lu\n", sent, lost,
		 *per_cpu_ptr(&handled, cpu));
	return 0;
}

int test_interrupts_init(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		mutex_init(per_cpu_ptr(&turn, cpu));
	return register_nmi_handler(NMI_LOCAL, nmi, 0, "mercury_test");
}

void test_interrupts_exit(void)
{
	unregister_nmi_handler(NMI_LOCAL, "mercury_test");
}
