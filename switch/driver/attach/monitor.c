// SPDX-License-Identifier: GPL-2.0-only
/*
 * Looks after CPUs that left the hypervisor by themselves. Their shared blocks say so; once a second is
 * enough, for such a CPU runs on natively and so may the others. If the hypervisor crashed on one, it
 * is taken out from under all.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/workqueue.h>

#include "attach.h"

static void check_cpus(struct work_struct *work);
static DECLARE_DEFERRABLE_WORK(monitor, check_cpus);

/* After a crash nothing is attached until the hypervisor has been loaded afresh. */
static void give_up(int cpu, u32 code)
{
	mercury.state = MERCURY_STATE_CRASHED;
	mercury.want_all = false;
	cpumask_clear(&mercury.wanted);
	mercury_on_cpus(cpu_online_mask, mercury_vendor->detach_cpu);
	pr_err("the hypervisor crashed on CPU %d (`mercury explain %s`): all CPUs are native again\n",
	       cpu, mercury_code_name(code));
}

/*
 * Notes a CPU that left the hypervisor without a request. It stays native. A CPU that is asked for its mode
 * gives up what it still holds for the hypervisor.
 */
static void let_go(int cpu, const struct mercury_shared_cpu *shared)
{
	if (!cpumask_test_cpu(cpu, &mercury.wanted) || READ_ONCE(shared->attached))
		return;
	cpumask_clear_cpu(cpu, &mercury.wanted);
	mercury_on_cpus(cpumask_of(cpu), mercury_ask_mode);
	pr_notice("CPU %d left the hypervisor (`mercury explain %s`) and stays native\n",
		  cpu, mercury_code_name(READ_ONCE(shared->left_because)));
}

/* Looks at every CPU; under mercury.lock. */
void mercury_monitor_check(void)
{
	int cpu;

	lockdep_assert_held(&mercury.lock);
	if (mercury.state != MERCURY_STATE_LOADED && mercury.state != MERCURY_STATE_ATTACHED)
		return;
	cpus_read_lock();
	/* A CPU that crashed may have gone offline since. */
	for_each_possible_cpu(cpu) {
		const struct mercury_shared_cpu *shared = mercury_cpu(cpu)->shared;

		/* The hypervisor leaves a record of each crash. */
		if (READ_ONCE(shared->crash.code) != MERCURY_CODE_OK) {
			give_up(cpu, READ_ONCE(shared->crash.code));
			break;
		}
		if (cpu_online(cpu))
			let_go(cpu, shared);
	}
	if (mercury.state == MERCURY_STATE_ATTACHED && cpumask_empty(&mercury.wanted))
		mercury.state = MERCURY_STATE_LOADED;
	cpus_read_unlock();
	mercury_hooks->check();
}

/* Does not wait: the holder of the lock may be freezing this queue. */
static void check_cpus(struct work_struct *work)
{
	if (!mutex_trylock(&mercury.lock)) {
		mercury_monitor_start();
		return;
	}
	mercury_monitor_check();
	if (mercury.state == MERCURY_STATE_ATTACHED)
		mercury_monitor_start();
	mutex_unlock(&mercury.lock);
}

void mercury_monitor_start(void)
{
	queue_delayed_work(system_freezable_wq, &monitor, HZ);
}

void mercury_monitor_stop(void)
{
	cancel_delayed_work_sync(&monitor);
}
