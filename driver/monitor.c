// SPDX-License-Identifier: GPL-2.0-only
/*
 * Looks after CPUs that left the hypervisor by themselves. Their shared blocks say so; once a second is
 * enough, for such a CPU runs on natively and so may the others. If the hypervisor crashed on one, it
 * is taken out from under all.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/workqueue.h>

#include "mercury.h"

static void look(struct work_struct *work);
static DECLARE_DEFERRABLE_WORK(monitor, look);

static bool is_crash(u64 code)
{
	return code == MERCURY_CODE_HOST_EXCEPTION || code == MERCURY_CODE_HOST_PANIC ||
	       code == MERCURY_CODE_UNKNOWN_EXIT;
}

/* After a crash nothing is attached until the hypervisor has been loaded afresh. */
static void give_up(int cpu, u64 code)
{
	mercury.state = MERCURY_STATE_CRASHED;
	mercury.want_all = false;
	cpumask_clear(&mercury.wanted);
	mercury_on_cpus(cpu_online_mask, mercury_detach_cpu);
	pr_err("the hypervisor crashed on CPU %d (code %llu): all CPUs are native again\n",
	       cpu, code);
}

/* Looks at every CPU that should be attached; under mercury.lock. */
void mercury_monitor_look(void)
{
	int cpu;

	lockdep_assert_held(&mercury.lock);
	if (mercury.state != MERCURY_STATE_ATTACHED)
		return;
	cpus_read_lock();
	for_each_cpu_and(cpu, &mercury.wanted, cpu_online_mask) {
		const struct mercury_shared_cpu *shared = mercury_cpu(cpu)->shared;
		u64 code = READ_ONCE(shared->left_because);

		if (READ_ONCE(shared->attached))
			continue;
		if (is_crash(code)) {
			give_up(cpu, code);
			break;
		}
		cpumask_clear_cpu(cpu, &mercury.wanted);
		pr_notice("CPU %d left the hypervisor (code %llu) and stays native\n", cpu, code);
	}
	if (mercury.state == MERCURY_STATE_ATTACHED && cpumask_empty(&mercury.wanted))
		mercury.state = MERCURY_STATE_LOADED;
	cpus_read_unlock();
}

static void look(struct work_struct *work)
{
	mutex_lock(&mercury.lock);
	mercury_monitor_look();
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
