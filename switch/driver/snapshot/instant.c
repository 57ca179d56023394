// SPDX-License-Identifier: GPL-2.0-only
/*
 * The instant of a snapshot. The kernel quiesces as for a hibernation: tasks are frozen and devices are
 * still. Then all CPUs meet with interrupts off, suspend the kernel's core, scan memory, and enter the
 * snapshot.
 *
 * A machine that goes on from an image returns from the instant a second time, without a hypervisor. So
 * does a machine that is put back to its snapshot, with the hypervisor beneath it.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/fs.h>
#include <linux/random.h>
#include <linux/stop_machine.h>
#include <linux/suspend.h>
#include <linux/swap.h>
#include <linux/syscore_ops.h>
#include <asm/tsc.h>
#include <asm/x86_init.h>

#include "../watch/watch.h"
#include "snapshot.h"

/* The steps of an instant, in their order. */
enum step {
	BEGUN,
	QUIESCED,
	GATHERED,
	SUSPENDED,
	SEARCHED,
	SAVED,
	ENTERED,
	RESUMED,
	RELEASED,
	THAWED,
	STEPS,
};

static struct {
	/* CPUs for which the snapshot was prepared; the first of them leads the others. */
	struct cpumask cpus;
	int first_cpu;
	/* Pages of memory when the snapshot was prepared. */
	unsigned long ram_pages;
	/* Free pages of swap areas while nothing is swapped out. */
	u64 swap_pages;
	/*
	 * Reasons to do nothing: more memory, other CPUs, or fewer free pages of swap areas at the instant.
	 */
	bool more_memory, other_cpus, swapped;
	/* A task was preempted while it changed the lists of free pages. */
	bool torn;
	/* The result of suspending the kernel's core. */
	int refused;
	/* The core is suspended: no CPU allocates memory any more. */
	bool still;
	/* The instant has come: the snapshot sees writes from here on. */
	bool past;
	/* The scan is done: CPUs may enter the snapshot. */
	bool ready;
	/* This machine was brought back from an image; or it was put back to its snapshot. */
	bool restored, rolled_back;
	/* CPUs that were put back and have dropped the interrupts of their other life. */
	atomic_t drained;
	/* The random generator, or an error. */
	struct file *random;
	/* The end of each step, by the clock of the first CPU. */
	u64 done_tsc[STEPS];
} instant;

/* Before the instant: notes the CPUs and the memory that the snapshot is for. */
u32 mercury_instant_prepare(unsigned long ram_pages)
{
	u32 code;

	instant.ram_pages = ram_pages;
	/* The root may lie behind a network that a second life has to wait for. */
	instant.random = filp_open("/dev/urandom", O_WRONLY, 0);
	cpus_read_lock();
	cpumask_copy(&instant.cpus, cpu_online_mask);
	code = mercury_states_allocate(&instant.cpus);
	cpus_read_unlock();
	return code;
}

void mercury_instant_forget(void)
{
	if (!IS_ERR_OR_NULL(instant.random))
		filp_close(instant.random, NULL);
	memset(&instant, 0, sizeof(instant));
}

const struct cpumask *mercury_instant_cpus(void)
{
	return &instant.cpus;
}

bool mercury_snapshot_is_past(void)
{
	return READ_ONCE(instant.past);
}

/* Returns true in a machine that goes on from an image. */
bool mercury_instant_restored(void)
{
	return instant.restored;
}

/* Returns true in a machine that was put back to its snapshot. */
bool mercury_instant_rolled_back(void)
{
	return instant.rolled_back;
}

static bool is_second_return(void)
{
	return instant.restored || instant.rolled_back;
}

static void is_done(enum step step)
{
	instant.done_tsc[step] = rdtsc_ordered();
}

/* The structure has a number for each step, in the order of the steps. */
void mercury_instant_ticks(struct mercury_instant_ticks *ticks)
{
	u64 *spent = (u64 *)ticks;
	enum step step;

	BUILD_BUG_ON(sizeof(*ticks) != (STEPS - 1) * sizeof(*spent));
	for (step = QUIESCED; step < STEPS; step++)
		*spent++ = instant.done_tsc[step] - instant.done_tsc[step - 1];
}

/* After the second return. A machine from an image has no hypervisor for CPUs that come online later. */
static void note_return(int how)
{
	instant.restored = how != MERCURY_ROLLED_BACK;
	instant.rolled_back = how == MERCURY_ROLLED_BACK;
	if (instant.rolled_back)
		mercury_rollback_arm();
	if (instant.restored) {
		mercury.state = MERCURY_STATE_UNLOADED;
		mercury.want_all = false;
		cpumask_clear(&mercury.wanted);
		mercury_guest_find_monitor();
	}
	/* The blocks that tell the hypervisor about KVM are not kept, so they did not come back. */
	mercury_kvm_allow_now(mercury.kvm_may);
	if (x86_platform.restore_sched_clock_state)
		x86_platform.restore_sched_clock_state();
}

/* Drops the interrupts of the other life. No CPU sends new ones before all CPUs have done so. */
static void drain(void)
{
	mercury_requests_drain();
	atomic_inc(&instant.drained);
	while (atomic_read(&instant.drained) < cpumask_weight(&instant.cpus))
		cpu_relax();
}

static u32 enter_snapshot(bool first)
{
	u32 code;

	if (first)
		is_done(SAVED);
	code = mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_ENTER, NULL);
	if (first)
		is_done(ENTERED);
	return code;
}

/*
 * Returns true if swap slots are in use: no image would hold the memory in them. User space has said how
 * many are free otherwise. It notices by itself when an area is switched on meanwhile.
 */
static bool is_swapped_out(void)
{
	return instant.swap_pages != MERCURY_SWAP_IN_MEMORY &&
	       get_nr_swap_pages() != (long)instant.swap_pages;
}

/*
 * Returns false if the snapshot cannot be taken. All CPUs find the same: none comes or goes, and no task
 * runs.
 */
static bool is_possible(void)
{
	if (!cpumask_equal(&instant.cpus, cpu_online_mask) || mercury_pool_is_lost()) {
		WRITE_ONCE(instant.other_cpus, true);
		return false;
	}
	if (is_swapped_out()) {
		WRITE_ONCE(instant.swapped, true);
		return false;
	}
	return true;
}

/* Suspends the kernel's core, on the first CPU. */
static void suspend_core(void)
{
	mercury.at_instant = true;
	instant.torn = mercury_scan_is_torn();
	/* As in a hibernation: suspending takes semaphores here with interrupts off. */
	system_state = SYSTEM_SUSPEND;
	instant.refused = instant.torn ? -EBUSY : syscore_suspend();
	if (!instant.refused && x86_platform.save_sched_clock_state)
		x86_platform.save_sched_clock_state();
	is_done(SUSPENDED);
	WRITE_ONCE(instant.still, true);
}

static void resume_core(void)
{
	if (!instant.refused)
		syscore_resume();
	system_state = SYSTEM_RUNNING;
	mercury.at_instant = false;
	is_done(RESUMED);
}

/* Scans memory, and waits until all CPUs have: the hypervisor's own patience with a late CPU is limited. */
static void search(bool first)
{
	unsigned int cpus = cpumask_weight(&instant.cpus);

	mercury_scan_cpu(cpus);
	if (first) {
		mercury_scan_wait(cpus);
		WRITE_ONCE(instant.past, true);
		/*
		 * Before the CPUs are saved: a machine that arrives elsewhere does not have the log's maps.
		 */
		mercury_dma_log_stop();
		is_done(SEARCHED);
		WRITE_ONCE(instant.ready, true);
	}
	while (!READ_ONCE(instant.ready))
		cpu_relax();
}

/* On each CPU, with interrupts off. The last one to arrive lets all of them go on. */
static int enter(void *unused)
{
	bool first = smp_processor_id() == instant.first_cpu;
	int returned;

	if (!is_possible())
		return 0;
	if (first)
		is_done(GATHERED);
	mercury_requests_save();
	if (first)
		suspend_core();
	while (!READ_ONCE(instant.still))
		cpu_relax();
	search(first);

	returned = mercury_save(mercury_state_save());
	if (returned == MERCURY_ROLLED_BACK)
		drain();
	if (returned)
		mercury_state_load();
	else
		this_cpu_ptr(&mercury_cpus)->code = enter_snapshot(first);
	if (first && !returned)
		mercury_fence_close();
	if (first && returned) {
		mercury_fence_return();
		note_return(returned);
	}
	if (first)
		resume_core();
	if (returned)
		mercury_requests_load();
	return 0;
}

/*
 * Seeds the kernel's random generator afresh, before any task runs, with what the other kernel gave. The
 * ioctl for user space is the only way to tell it to reseed.
 */
static void reseed(void)
{
	struct mercury_saved_cpu *saved = mercury_state_of(instant.first_cpu);
	struct file *file = instant.random;
	long err = PTR_ERR_OR_ZERO(file);

	add_device_randomness(saved->seed, sizeof(saved->seed));
	memzero_explicit(saved->seed, sizeof(saved->seed));
	if (!err)
		err = file->f_op->unlocked_ioctl ? file->f_op->unlocked_ioctl(file, RNDRESEEDCRNG, 0) :
						   -EOPNOTSUPP;
	if (err)
		pr_err("the random generator could not be seeded afresh: %ld\n", err);
}

/*
 * With tasks frozen and devices still. A machine that returns for the second time finds its devices in the
 * state in which another kernel left them.
 */
static int gather(void *unused)
{
	int err;

	WRITE_ONCE(mercury.waits_for_sleep, false);
	/* First of all: maps are as large as memory was when they were allocated. */
	instant.more_memory = mercury_ram_pages() != instant.ram_pages;
	if (instant.more_memory)
		return -EBUSY;
	instant.other_cpus = false;
	instant.swapped = false;
	instant.torn = false;
	instant.still = false;
	instant.ready = false;
	mercury_scan_begin();
	atomic_set(&instant.drained, 0);
	instant.first_cpu = cpumask_first(&instant.cpus);
	is_done(QUIESCED);
	err = mercury_nonces_forget_tunnels() ?: mercury_dma_stop();
	if (err)
		return err;
	stop_machine(enter, NULL, cpu_online_mask);
	mercury_dma_start(is_second_return());
	is_done(RELEASED);
	if (instant.restored)
		mercury_guest_wake();
	if (instant.rolled_back)
		mercury_watch_return();
	if (is_second_return()) {
		dpm_resume_start(PMSG_RESTORE);
		dpm_resume_end(PMSG_RESTORE);
		reseed();
	}
	return 0;
}

/* Returns the first CPU's code that is not MERCURY_CODE_OK. */
static u32 first_refusal(struct mercury_outcome *outcome)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		if (mercury_cpu(cpu)->code == MERCURY_CODE_OK)
			continue;
		outcome->cpu = cpu;
		return mercury_cpu(cpu)->code;
	}
	return MERCURY_CODE_OK;
}

/* Takes the snapshot that has been prepared and begun. */
u32 mercury_instant(u64 swap_pages, struct mercury_outcome *outcome)
{
	int cpu, err;

	for_each_possible_cpu(cpu)
		mercury_cpu(cpu)->code = MERCURY_CODE_OK;
	instant.swap_pages = swap_pages;
	is_done(BEGUN);
	instant.more_memory = false;
	WRITE_ONCE(mercury.waits_for_sleep, true);
	err = hibernate_quiet_exec(gather, NULL);
	WRITE_ONCE(mercury.waits_for_sleep, false);
	if (instant.more_memory)
		return MERCURY_CODE_SNAPSHOT_HOTPLUG;
	if (!err && instant.torn)
		pr_info("a task was preempted while it changed the lists of free pages: try again\n");
	if (err || instant.refused)
		return MERCURY_CODE_SNAPSHOT_QUIESCE;
	is_done(THAWED);
	if (instant.other_cpus)
		return mercury_pool_is_lost() ? MERCURY_CODE_SNAPSHOT_POOL : MERCURY_CODE_SNAPSHOT_HOTPLUG;
	if (instant.swapped)
		return MERCURY_CODE_SNAPSHOT_SWAP;
	return is_second_return() ? MERCURY_CODE_OK : first_refusal(outcome);
}
