// SPDX-License-Identifier: GPL-2.0-only
/*
 * Load, unload, attach and detach, one at a time under mercury.lock.
 *
 * Each CPU does its part by itself, in an interrupt of its own; the initiator sleeps until the last one
 * is done. No CPU waits for another. If one refuses, those that this request switched go back.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/completion.h>
#include <linux/cpu.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/sizes.h>

#include "attach.h"

/* No build takes this many slices: a bound on what a faulty hypervisor can make of the driver. */
#define BUILD_SLICES_MAX	100000

static u32 (*request_on_cpu)(struct mercury_cpu *m);
static atomic_t unfinished;
static DECLARE_COMPLETION(finished);

static void finish_one(void)
{
	if (atomic_dec_and_test(&unfinished))
		complete(&finished);
}

static void run_request(void *info)
{
	struct mercury_cpu *m = info;

	m->code = request_on_cpu(m);
	finish_one();
}

/*
 * Runs a request on CPUs, each with interrupts off and for itself; the caller holds the hotplug lock.
 * Each CPU's code is MERCURY_CODE_CPU_OFFLINE if it could not be reached.
 */
void mercury_on_cpus(const struct cpumask *cpus, u32 (*request)(struct mercury_cpu *m))
{
	int cpu;

	lockdep_assert_held(&mercury.lock);
	request_on_cpu = request;
	reinit_completion(&finished);
	atomic_set(&unfinished, 1);
	for_each_cpu(cpu, cpus) {
		struct mercury_cpu *m = mercury_cpu(cpu);

		m->code = MERCURY_CODE_CPU_OFFLINE;
		INIT_CSD(&m->csd, run_request, m);
		atomic_inc(&unfinished);
		if (smp_call_function_single_async(cpu, &m->csd))
			finish_one();
	}
	finish_one();
	wait_for_completion(&finished);
}

/* The first CPU of those asked that did not succeed, put into the outcome. */
static u32 first_refusal(const struct cpumask *cpus, struct mercury_outcome *outcome)
{
	int cpu;

	for_each_cpu(cpu, cpus) {
		struct mercury_cpu *m = mercury_cpu(cpu);

		if (m->code == MERCURY_CODE_OK)
			continue;
		outcome->cpu = cpu;
		outcome->detail[0] = m->detail[0];
		outcome->detail[1] = m->detail[1];
		return m->code;
	}
	return MERCURY_CODE_OK;
}

/* An operation of the hypervisor on the CPU that this runs on, whichever it is. */
static u32 call_here(u32 operation, u64 argument, u64 detail[2])
{
	struct mercury_cpu *m;
	unsigned long flags;
	u32 code;

	local_irq_save(flags);
	m = this_cpu_ptr(&mercury_cpus);
	code = mercury_can_enter(m->detail) ?: mercury_vendor->native_call(m, operation, argument);
	detail[0] = m->detail[0];
	detail[1] = m->detail[1];
	local_irq_restore(flags);
	return code;
}

/* Starts the hypervisor and has it build its tables, slice by slice. */
static u32 build(struct mercury_outcome *outcome)
{
	u32 code = call_here(MERCURY_NATIVE_OP_INIT, (u64)mercury_boot_info(), outcome->detail);
	unsigned int slices;

	if (code != MERCURY_CODE_OK)
		return code;
	for (slices = 0; slices < BUILD_SLICES_MAX; slices++) {
		code = call_here(MERCURY_NATIVE_OP_BUILD, 0, outcome->detail);
		if (code == MERCURY_CODE_NEED_PAGES) {
			code = mercury_memory_donate(outcome->detail[0]);
			if (code != MERCURY_CODE_OK)
				return code;
		} else if (code != MERCURY_CODE_MORE) {
			return code;
		}
		cond_resched();
	}
	return MERCURY_CODE_BAD_IMAGE;
}

static u32 load(struct mercury_outcome *outcome)
{
	unsigned long flags;
	u32 code;

	local_irq_save(flags);
	code = mercury_can_enter(outcome->detail);
	local_irq_restore(flags);
	mercury.iomem_end = mercury_iomem_end();
	code = code ?:
	       mercury_image_check() ?:
	       mercury_memory_create() ?:
	       build(outcome) ?:
	       mercury_tables_copy();
	if (code != MERCURY_CODE_OK)
		mercury_memory_destroy();
	return code;
}

u32 mercury_ask_mode(struct mercury_cpu *m)
{
	m->mode = mercury_mode();
	return MERCURY_CODE_OK;
}

static bool all_native(struct mercury_outcome *outcome)
{
	int cpu;

	mercury_on_cpus(cpu_online_mask, mercury_ask_mode);
	for_each_online_cpu(cpu) {
		if (mercury_cpu(cpu)->mode == MERCURY_MODE_ATTACHED) {
			outcome->cpu = cpu;
			return false;
		}
	}
	return true;
}

u32 mercury_load(struct mercury_outcome *outcome)
{
	u32 code;

	if (mercury.going_down)
		return MERCURY_CODE_GOING_DOWN;
	if (mercury.state != MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_ALREADY_LOADED;
	if (!try_module_get(THIS_MODULE))
		return MERCURY_CODE_GOING_DOWN;
	cpus_read_lock();
	/* A CPU that is attached though this driver has loaded nothing: an earlier one went without it. */
	code = all_native(outcome) ? load(outcome) : MERCURY_CODE_ORPHANED_HYPERVISOR;
	if (code == MERCURY_CODE_OK) {
		memcpy(mercury.version, mercury_image_header()->version, sizeof(mercury.version));
		mercury.self_tested = false;
		mercury.state = MERCURY_STATE_LOADED;
	}
	cpus_read_unlock();
	if (code == MERCURY_CODE_OK) {
		mercury_emergency_want(true);
		pr_info("hypervisor loaded, %llu KiB and %llu KiB a CPU\n",
			mercury.memory_fixed / SZ_1K, mercury.memory_per_cpu / SZ_1K);
		mercury_memory_report();
	} else {
		module_put(THIS_MODULE);
	}
	return code;
}

u32 mercury_unload(struct mercury_outcome *outcome)
{
	if (mercury.state == MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_NOT_LOADED;
	cpus_read_lock();
	if (mercury.state == MERCURY_STATE_ATTACHED || !all_native(outcome)) {
		cpus_read_unlock();
		return MERCURY_CODE_STILL_ATTACHED;
	}
	mercury.state = MERCURY_STATE_UNLOADED;
	cpus_read_unlock();
	mercury_emergency_want(false);
	mercury_memory_destroy();
	mercury_fault_reset();
	pr_info("hypervisor unloaded\n");
	module_put(THIS_MODULE);
	return MERCURY_CODE_OK;
}

/*
 * The machine goes on from an image: it is native and has no hypervisor, and the pages that held the
 * hypervisor hold nothing of use. Under mercury.lock.
 */
void mercury_forget(void)
{
	int cpu;

	cpus_read_lock();
	/*
	 * A CPU that is asked for its mode gives up what it holds for the hypervisor: the kernel's CR4
	 * shows it.
	 */
	mercury_on_cpus(cpu_online_mask, mercury_ask_mode);
	for_each_possible_cpu(cpu)
		mercury_cpu(cpu)->vmxe = false;
	cpumask_clear(&mercury.wanted);
	mercury.want_all = false;
	mercury.state = MERCURY_STATE_UNLOADED;
	cpus_read_unlock();
	mercury_emergency_want(false);
	mercury_memory_destroy();
	mercury_fault_reset();
	module_put(THIS_MODULE);
}

static void leave(struct mercury_outcome *outcome)
{
	bool native;

	if (!mercury_fault(MERCURY_FAULT_POINT_EXIT))
		mercury_detach(NULL, false, outcome);
	cpus_read_lock();
	native = all_native(outcome);
	mercury.state = native ? MERCURY_STATE_LOADED : MERCURY_STATE_CRASHED;
	cpus_read_unlock();
	if (native) {
		mercury_unload(outcome);
		return;
	}
	/* The hypervisor's memory is not the module's: the CPUs run on above it. */
	mercury_emergency_want(false);
	module_put(THIS_MODULE);
	pr_emerg("CPU %u stays above the hypervisor, whose driver goes: reboot the machine\n",
		 outcome->cpu);
}

/* The module goes. If that is by force, CPUs may be attached. */
void mercury_control_exit(void)
{
	struct mercury_outcome outcome = {};

	mutex_lock(&mercury.lock);
	mercury.leaving = true;
	mercury.going_down = true;
	if (mercury.state != MERCURY_STATE_UNLOADED) {
		pr_warn("the driver is removed by force: all CPUs are detached\n");
		leave(&outcome);
	}
	mutex_unlock(&mercury.lock);
}

/* From here on, `switched` means: by this request. */
static void forget_switches(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		mercury_cpu(cpu)->switched = false;
}

/* Preflight of this CPU; one that is attached already has passed it. */
u32 mercury_check_cpu(struct mercury_cpu *m)
{
	struct mercury_cpu_facts *facts = mercury_preflight_facts();
	u32 code;

	if (mercury_mode() == MERCURY_MODE_ATTACHED)
		return MERCURY_CODE_OK;
	code = mercury_can_enter(m->detail);
	if (code != MERCURY_CODE_OK)
		return code;
	mercury_read_facts(facts, false);
	mercury_fault(MERCURY_FAULT_POINT_FACTS);
	return mercury_vendor->native_call(m, MERCURY_NATIVE_OP_PREFLIGHT, (u64)facts);
}

/* One CPU after the other: they share the page of facts, and each is compared with the first. */
static u32 preflight(const struct cpumask *cpus, struct mercury_outcome *outcome)
{
	u32 code = MERCURY_CODE_OK;
	int cpu;

	forget_switches();
	mercury.iomem_end = mercury_iomem_end();
	for_each_cpu(cpu, cpus) {
		mercury_on_cpus(cpumask_of(cpu), mercury_check_cpu);
		code = first_refusal(cpumask_of(cpu), outcome);
		if (code != MERCURY_CODE_OK)
			break;
	}
	return code;
}

static struct mercury_cpu_facts facts_before, facts_after;

/* Attaches this CPU and compares all that can be read of it before and after. */
static u32 self_test_cpu(struct mercury_cpu *m)
{
	const u32 *before = (u32 *)&facts_before, *after = (u32 *)&facts_after;
	unsigned int i;
	u32 code;

	mercury_read_facts(&facts_before, false);
	code = mercury_vendor->attach_cpu(m);
	if (code != MERCURY_CODE_OK || !m->switched)
		return code;
	mercury_read_facts(&facts_after, false);
	mercury_vendor->hide(&facts_after);
	for (i = 0; i < sizeof(facts_before) / sizeof(u32); i++) {
		if (before[i] == after[i])
			continue;
		m->detail[0] = i * sizeof(u32);
		m->detail[1] = (u64)before[i] << 32 | after[i];
		return MERCURY_CODE_SELF_TEST_FAILED;
	}
	return MERCURY_CODE_OK;
}

/* The first CPU that this request switches after a load goes alone. */
static u32 self_test(const struct cpumask *cpus, struct mercury_outcome *outcome)
{
	const struct cpumask *first = cpumask_of(cpumask_first(cpus));
	u32 code;

	if (mercury.self_tested)
		return MERCURY_CODE_OK;
	mercury_on_cpus(first, self_test_cpu);
	code = first_refusal(first, outcome);
	mercury.self_tested = code == MERCURY_CODE_OK;
	return code;
}

/* Each CPU that was switched must answer in the mode it should be in. */
static u32 verify(const struct cpumask *cpus, u32 mode, struct mercury_outcome *outcome)
{
	int cpu;

	mercury_on_cpus(cpus, mercury_ask_mode);
	for_each_cpu(cpu, cpus) {
		struct mercury_cpu *m = mercury_cpu(cpu);

		if (mode == MERCURY_MODE_ATTACHED && mercury_fault(MERCURY_FAULT_POINT_AFTER_SWITCH))
			m->mode = MERCURY_MODE_NATIVE;
		if (m->mode == mode)
			continue;
		outcome->cpu = cpu;
		outcome->detail[0] = m->mode;
		return MERCURY_CODE_WRONG_MODE;
	}
	return MERCURY_CODE_OK;
}

/* Detaches the CPUs that this request has switched. */
static void roll_back(const struct cpumask *cpus)
{
	static struct cpumask switched;
	int cpu;

	cpumask_clear(&switched);
	for_each_cpu(cpu, cpus)
		if (mercury_cpu(cpu)->switched)
			cpumask_set_cpu(cpu, &switched);
	mercury_on_cpus(&switched, mercury_vendor->detach_cpu);
	forget_switches();
}

static u32 attach(const struct cpumask *cpus, struct mercury_outcome *outcome)
{
	u32 code = self_test(cpus, outcome);

	if (code == MERCURY_CODE_OK) {
		mercury_on_cpus(cpus, mercury_vendor->attach_cpu);
		code = first_refusal(cpus, outcome) ?: verify(cpus, MERCURY_MODE_ATTACHED, outcome);
	}
	if (code != MERCURY_CODE_OK)
		roll_back(cpus);
	return code;
}

static u32 all_online(const struct cpumask *cpus, struct mercury_outcome *outcome)
{
	int cpu;

	for_each_cpu(cpu, cpus) {
		if (cpu_online(cpu))
			continue;
		outcome->cpu = cpu;
		return MERCURY_CODE_CPU_OFFLINE;
	}
	return MERCURY_CODE_OK;
}

/* Attaches CPUs, or all that are and come online if `cpus` is NULL. */
u32 mercury_attach(const struct cpumask *cpus, bool check_only, struct mercury_outcome *outcome)
{
	bool all = !cpus;
	u32 code;

	if (mercury.going_down)
		return MERCURY_CODE_GOING_DOWN;
	mercury_monitor_check();
	if (mercury.state == MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_NOT_LOADED;
	if (mercury.state == MERCURY_STATE_CRASHED)
		return MERCURY_CODE_CRASHED;
	cpus_read_lock();
	if (all)
		cpus = cpu_online_mask;
	code = all_online(cpus, outcome) ?: preflight(cpus, outcome);
	if (code == MERCURY_CODE_OK && !check_only)
		code = attach(cpus, outcome);
	if (code == MERCURY_CODE_OK && !check_only) {
		cpumask_or(&mercury.wanted, &mercury.wanted, cpus);
		mercury.want_all |= all;
		mercury.state = MERCURY_STATE_ATTACHED;
		mercury_monitor_start();
	}
	cpus_read_unlock();
	return code;
}

/*
 * Detaches CPUs, or all if `cpus` is NULL. Offline CPUs are merely no longer wanted, and neither are those
 * that come online later, unless this is for now.
 */
u32 mercury_detach(const struct cpumask *cpus, bool for_now, struct mercury_outcome *outcome)
{
	static struct cpumask online;
	u32 code;

	if (mercury.state == MERCURY_STATE_UNLOADED)
		return MERCURY_CODE_NOT_LOADED;
	mercury_hooks->before_detach();
	cpus_read_lock();
	if (cpus)
		cpumask_and(&online, cpus, cpu_online_mask);
	else
		cpumask_copy(&online, cpu_online_mask);
	forget_switches();
	mercury_on_cpus(&online, mercury_vendor->detach_cpu);
	code = verify(&online, MERCURY_MODE_NATIVE, outcome);
	if (code == MERCURY_CODE_OK) {
		if (cpus)
			cpumask_andnot(&mercury.wanted, &mercury.wanted, cpus);
		else
			cpumask_clear(&mercury.wanted);
		mercury.want_all &= for_now;
		if (mercury.state == MERCURY_STATE_ATTACHED && cpumask_empty(&mercury.wanted))
			mercury.state = MERCURY_STATE_LOADED;
	}
	cpus_read_unlock();
	mercury_monitor_check();
	return code;
}
