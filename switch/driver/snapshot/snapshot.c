// SPDX-License-Identifier: GPL-2.0-only
/*
 * The life of a snapshot: prepared, begun at the instant, kept or read, and ended.
 * switch/abi/src/snapshot.rs has the order of the hypervisor's calls.
 *
 * While there is a snapshot the hypervisor can map all of the system's memory. The tables that map it are
 * written before the instant and after the end only.
 *
 * All functions run under mercury.lock, unless they say otherwise.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/cpu.h>
#include <linux/gfp.h>
#include <linux/memory.h>
#include <linux/mm.h>
#include <linux/notifier.h>
#include <linux/sched.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <asm/current.h>

#include "../watch/watch.h"
#include "restore.h"

static struct {
	/* There is something to end. */
	bool prepared;
	/* The instant has come, or was tried. */
	bool live;
	/*
	 * No process owns the snapshot: it stays until it is dropped or lost, and the machine can go back
	 * to it.
	 */
	bool kept;
	/* A CPU came online after the snapshot was prepared. */
	bool another_cpu;
	/* The arguments of the request that prepared it. */
	u64 flags, pool_pages;
	/* Arguments of calls. */
	struct mercury_snapshot_setup *setup;
	struct mercury_snapshot_status *status;
	/* If the snapshot is kept: the CPUs that come back to it, and a page for the end of each life. */
	struct mercury_restart_cpu *restart_cpus;
	struct mercury_ended_cpu *ended_cpus;
	void *note;
} snapshot;

/* The reason why the last snapshot that was kept is gone. */
static u32 lost_because;
/* The report of the last rollback of this machine, and the last words of the life before it. */
static struct mercury_rollback_report last_rollback;
static u64 last_words[16];

/* Each CPU's pointer to its task. */
#if KERNEL_VERSION(6, 2, 0) <= LINUX_VERSION_CODE && LINUX_VERSION_CODE < KERNEL_VERSION(6, 15, 0)
#define CURRENT pcpu_hot.current_task
#else
#define CURRENT current_task
#endif

/* Returns true if the machine can go back to a snapshot; in any context. */
bool mercury_snapshot_is_kept(void)
{
	return READ_ONCE(snapshot.kept);
}

static u32 allocate_own(u64 flags)
{
	snapshot.setup = mercury_piece_of(sizeof(*snapshot.setup), GFP_KERNEL);
	snapshot.status = mercury_piece_of(sizeof(*snapshot.status), GFP_KERNEL);
	if (flags & MERCURY_SNAPSHOT_KEEP) {
		snapshot.restart_cpus =
			mercury_piece_of(nr_cpu_ids * sizeof(*snapshot.restart_cpus), GFP_KERNEL);
		snapshot.ended_cpus =
			mercury_piece_of(nr_cpu_ids * sizeof(*snapshot.ended_cpus),
					 GFP_KERNEL | __GFP_ZERO);
		snapshot.note = mercury_piece(0, GFP_KERNEL);
		if (!snapshot.restart_cpus || !snapshot.ended_cpus || !snapshot.note)
			return MERCURY_CODE_NO_MEMORY;
	}
	return snapshot.setup && snapshot.status ? MERCURY_CODE_OK : MERCURY_CODE_NO_MEMORY;
}

/* Allocates all memory of the snapshot itself. The pool comes last: it has what can be spared. */
static u32 allocate(const struct mercury_snapshot_request *request, unsigned long ram_pages)
{
	return mercury_pieces_begin() ?:
	       mercury_kept_allocate() ?:
	       allocate_own(request->flags) ?:
	       mercury_pool_allocate() ?:
	       mercury_read_allocate(request->flags, ram_pages) ?:
	       mercury_scan_allocate(request->flags, ram_pages) ?:
	       mercury_dirty_log_allocate(request->flags) ?:
	       mercury_pool_fill(request->pool_pages);
}

/* Does all that can be done before the instant. */
static u32 prepare(const struct mercury_snapshot_request *request)
{
	unsigned long ram_pages = mercury_ram_pages();
	u32 code;

	snapshot.prepared = true;
	code = mercury_pool_begin() ?:
	       allocate(request, ram_pages) ?:
	       mercury_instant_prepare(ram_pages) ?:
	       mercury_kept_find() ?:
	       /* Memory that was plugged in since has no place in the maps. */
	       (mercury_ram_pages() == ram_pages ? 0 : MERCURY_CODE_SNAPSHOT_HOTPLUG) ?:
	       (mercury_kept()->pages <= mercury_scan_room() ? 0 : MERCURY_CODE_NO_MEMORY) ?:
	       mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_TABLES,
				     (void *)mercury_tables_wide_cr3()) ?:
	       mercury_pool_donate() ?:
	       mercury_dma_watch();
	snapshot.flags = request->flags;
	snapshot.pool_pages = request->pool_pages;
	snapshot.another_cpu = false;
	return code;
}

static u32 leave_cpu(struct mercury_cpu *m)
{
	mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_LEAVE, NULL);
	return MERCURY_CODE_OK;
}

/* Ends the snapshot, if there is one: the machine is as it was before. */
static void end(void)
{
	bool restored = mercury_instant_restored();

	if (!snapshot.prepared)
		return;
	mercury_pool_end();
	mercury_rollback_disarm();
	mercury_pool_stop();
	mercury_dma_log_stop();
	/* A machine from an image has no hypervisor. */
	if ((snapshot.live || mercury_dirty_log_is_on()) && !restored) {
		cpus_read_lock();
		mercury_on_cpus(cpu_online_mask, leave_cpu);
		cpus_read_unlock();
	}
	if (!restored)
		mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_END, NULL);
	mercury_rollback_end();
	mercury_dma_unwatch();
	mercury_dma_log_free();
	mercury_unmap_memory();
	mercury_states_free();
	mercury_pool_free();
	mercury_pieces_free();
	mercury_kept_forget();
	mercury_scan_forget();
	mercury_read_forget();
	mercury_dirty_log_forget();
	mercury_instant_forget();
	memset(&snapshot, 0, sizeof(snapshot));
}

static u32 prepare_rollback(void)
{
	struct mercury_restart_cpu *entry = snapshot.restart_cpus;
	struct mercury_ended_cpu *ended = snapshot.ended_cpus;
	int cpu;

	for_each_cpu(cpu, mercury_instant_cpus()) {
		mercury_machine_cpu(cpu, entry++);
		ended->cpu = cpu;
		ended++->task_virt = (u64)per_cpu_ptr(&CURRENT, cpu);
	}
	snapshot.setup->ended_virt = (u64)snapshot.ended_cpus;
	return mercury_rollback_prepare(snapshot.setup, snapshot.note, snapshot.restart_cpus);
}

/* Tells the hypervisor about the snapshot. From here on the DMA watch copies what devices are given. */
static u32 begin(void)
{
	struct mercury_snapshot_setup *setup = snapshot.setup;
	const struct mercury_kept *kept = mercury_kept();
	unsigned long free_count;
	u32 code;

	if (mercury_pool_is_lost())
		return MERCURY_CODE_SNAPSHOT_POOL;
	setup->keep_virt = 0;
	setup->once = !!(snapshot.flags & MERCURY_SNAPSHOT_ONCE);
	if (snapshot.flags & MERCURY_SNAPSHOT_KEEP) {
		code = prepare_rollback();
		if (code != MERCURY_CODE_OK)
			return code;
	}
	setup->memory_virt = (u64)kept->ranges;
	setup->memory_count = kept->count;
	setup->hashes_virt = (u64)mercury_read_hashes();
	setup->persistent_virt = (u64)mercury_scan_persistent();
	setup->free_virt = (u64)mercury_scan_free(&free_count);
	setup->free_count = free_count;
	setup->cpus = cpumask_weight(mercury_instant_cpus());
	setup->log = !!(snapshot.flags & MERCURY_SNAPSHOT_LOG);
	code = mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_BEGIN, setup);
	if (code == MERCURY_CODE_OK)
		mercury_dma_arm();
	return code;
}

static u32 fill_status(struct mercury_snapshot_request *request)
{
	u32 code = mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_STATUS, snapshot.status);

	if (code == MERCURY_CODE_OK)
		request->status = *snapshot.status;
	request->memory_pages = mercury_kept()->pages;
	mercury_pool_status(request);
	return code;
}

/* Returns the reason for which writes may have been missed, or MERCURY_CODE_OK. */
static u32 missed_writes(void)
{
	if (mercury_dma_missed())
		return MERCURY_CODE_SNAPSHOT_DEVICES;
	return READ_ONCE(snapshot.another_cpu) ? MERCURY_CODE_SNAPSHOT_HOTPLUG : MERCURY_CODE_OK;
}

static u32 check_request(const struct mercury_snapshot_request *request)
{
	u64 known = MERCURY_SNAPSHOT_LOG | MERCURY_SNAPSHOT_KEEP | MERCURY_SNAPSHOT_TRACK |
		    MERCURY_SNAPSHOT_ONCE;

	if (IS_ENABLED(CONFIG_MERCURY_FAULT_INJECTION))
		known |= MERCURY_SNAPSHOT_HASH;
	/* A snapshot that is kept is not followed by a dirty log. */
	if ((request->flags & MERCURY_SNAPSHOT_TRACK && request->flags & MERCURY_SNAPSHOT_KEEP) ||
	    request->flags & ~known || request->pool_pages > totalram_pages())
		return MERCURY_CODE_BAD_ARGUMENT;
	if (!mercury_is_monitored() && (mercury.state != MERCURY_STATE_ATTACHED ||
					!cpumask_subset(cpu_online_mask, &mercury.wanted)))
		return MERCURY_CODE_WRONG_MODE;
	return mercury_nonces_check();
}

u32 mercury_snapshot_prepare(const struct mercury_snapshot_request *request)
{
	u32 code = check_request(request);

	if (code != MERCURY_CODE_OK)
		return code;
	if (snapshot.prepared)
		return MERCURY_CODE_SNAPSHOT_LIVE;
	code = prepare(request);
	if (code != MERCURY_CODE_OK)
		end();
	return code;
}

/* In a machine that goes on from an image: forgets the snapshot and the hypervisor. */
static u32 arrive(struct mercury_snapshot_request *request)
{
	mercury_fence_arrive();
	end();
	if (mercury_boot_info())
		mercury_forget();
	mercury_guest_arrive();
	request->restored = 1;
	return MERCURY_CODE_OK;
}

/*
 * Keeps the snapshot, unless something has been missed since the instant: the machine can be put back now.
 */
static u32 keep_snapshot(const struct mercury_snapshot_request *request)
{
	u32 code = MERCURY_CODE_SNAPSHOT_HOTPLUG;

	if (!request->status.exact)
		return request->status.invalid_because;
	/* No CPU is half-way up under this lock. */
	cpus_read_lock();
	/* Pairs with lose(), which has the snapshot lost if it is kept. */
	smp_store_mb(snapshot.kept, true);
	if (cpumask_equal(mercury_instant_cpus(), cpu_online_mask))
		code = missed_writes();
	cpus_read_unlock();
	if (code == MERCURY_CODE_OK) {
		lost_because = MERCURY_CODE_OK;
		mercury_rollback_arm();
	}
	return code;
}

/*
 * In a machine that was put back to its snapshot: reports so. The snapshot stays for the next time, unless
 * it was for once or something has been missed.
 */
static u32 come_back(struct mercury_snapshot_request *request)
{
	u32 code = fill_status(request);

	if (mercury_rollback_read(request->message) && !mercury_watch_is_on())
		pr_warn("the life that ended was watched, and this one is not: its snapshot is older\n");
	request->rolled_back = 1;
	last_rollback = request->status.rollback;
	memcpy(last_words, request->message, sizeof(last_words));
	pr_warn("the machine was put back to its snapshot (reason %u, CPU %u): %llu pages; %.128s\n",
		last_rollback.reason, last_rollback.cpu, last_rollback.pages,
		(const char *)request->message);
	if (code != MERCURY_CODE_OK)
		return code;
	request->status.kept = !(request->flags & MERCURY_SNAPSHOT_ONCE);
	if (request->status.kept) {
		lost_because = keep_snapshot(request);
		request->status.kept = lost_because == MERCURY_CODE_OK;
	}
	if (!request->status.kept)
		end();
	return MERCURY_CODE_OK;
}

u32 mercury_snapshot_begin(struct mercury_snapshot_request *request, struct mercury_outcome *outcome)
{
	u32 code = check_request(request);

	if (code != MERCURY_CODE_OK)
		return code;
	if (snapshot.live)
		return MERCURY_CODE_SNAPSHOT_LIVE;
	if (!snapshot.prepared)
		code = prepare(request);
	else if (request->flags != snapshot.flags || request->pool_pages != snapshot.pool_pages)
		return MERCURY_CODE_BAD_ARGUMENT;
	if (code == MERCURY_CODE_OK)
		code = begin();
	if (code == MERCURY_CODE_OK) {
		snapshot.live = true;
		code = mercury_instant(request->swap_pages, outcome);
	}
	if (mercury_instant_restored())
		return arrive(request);
	if (mercury_instant_rolled_back())
		return come_back(request);
	if (code == MERCURY_CODE_OK)
		code = fill_status(request);
	mercury_instant_ticks(&request->instant);
	if (code == MERCURY_CODE_OK && request->flags & MERCURY_SNAPSHOT_KEEP)
		code = keep_snapshot(request);
	else if (code == MERCURY_CODE_OK)
		mercury_pool_start();
	if (code != MERCURY_CODE_OK)
		end();
	return code;
}

/* Reports the cost of the snapshot, and ends it. */
u32 mercury_snapshot_finish(struct mercury_snapshot_request *request)
{
	u32 code;

	if (request->flags || request->pool_pages)
		return MERCURY_CODE_BAD_ARGUMENT;
	if (!snapshot.live)
		return MERCURY_CODE_NO_SNAPSHOT;
	code = fill_status(request) ?: missed_writes();
	end();
	return code;
}

/* The process that began the snapshot is gone. */
void mercury_snapshot_release(void)
{
	if (!snapshot.kept)
		end();
}

static int no_frames(struct mercury_snapshot_read_request *request)
{
	request->count = 0;
	request->low = 0;
	return MERCURY_CODE_NO_SNAPSHOT;
}

/* Reads frames as they were at the instant; of a kept snapshot, as the last life has left them. */
int mercury_snapshot_read(struct mercury_snapshot_read_request *request)
{
	return snapshot.live ? mercury_read_past(request) : no_frames(request);
}

/* Reads frames as they are now, before the instant. */
int mercury_snapshot_read_present(struct mercury_snapshot_read_request *request)
{
	return snapshot.prepared && !snapshot.live ? mercury_read_present(request) : no_frames(request);
}

static int put_ended(struct mercury_postmortem_request *request)
{
	u32 room = request->cpus_count;

	request->cpus_count = cpumask_weight(mercury_instant_cpus());
	if (copy_to_user(u64_to_user_ptr(request->cpus_addr), snapshot.ended_cpus,
			 min(room, request->cpus_count) * sizeof(*snapshot.ended_cpus)))
		return -EFAULT;
	return MERCURY_CODE_OK;
}

/* Describes the life that ended last, or gives its memory back. */
int mercury_snapshot_postmortem(struct mercury_postmortem_request *request)
{
	if (request->flags & ~(u64)MERCURY_POSTMORTEM_DROP)
		return MERCURY_CODE_BAD_ARGUMENT;
	mercury_snapshot_status(&request->status);
	if (!snapshot.kept || !request->status.dead)
		return MERCURY_CODE_NO_POST_MORTEM;
	if (request->flags & MERCURY_POSTMORTEM_DROP)
		return mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_DROP_DEAD, NULL);
	request->comm_offset = offsetof(struct task_struct, comm);
	request->pid_offset = offsetof(struct task_struct, pid);
	request->started_offset = offsetof(struct task_struct, start_boottime);
	memcpy(request->message, last_words, sizeof(last_words));
	return put_ended(request);
}

u32 mercury_snapshot_log_begin(void)
{
	return snapshot.live ? MERCURY_CODE_NO_SNAPSHOT : mercury_dirty_log_begin();
}

u32 mercury_snapshot_log_collect(struct mercury_log_request *request)
{
	return mercury_dirty_log_collect(request, snapshot.live) ?:
	       (mercury_pool_is_lost() ? MERCURY_CODE_SNAPSHOT_POOL : 0) ?:
	       missed_writes();
}

/* Describes the machine for an image. All of the description is known as soon as a snapshot is prepared. */
int mercury_snapshot_machine(struct mercury_restart_request *request, struct mercury_outcome *outcome)
{
	if (request->flags)
		return MERCURY_CODE_BAD_ARGUMENT;
	return snapshot.prepared ? mercury_machine_describe(request, outcome) : MERCURY_CODE_NO_SNAPSHOT;
}

/*
 * Reads the status; returns the reason for which the machine cannot go back to the kept snapshot any more.
 */
static u32 probe_kept(struct mercury_snapshot_status *status)
{
	u32 code = mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_STATUS, snapshot.status);

	if (code != MERCURY_CODE_OK)
		return code;
	*status = *snapshot.status;
	if (!status->exact)
		return status->invalid_because;
	return mercury_dma_missed() ? MERCURY_CODE_SNAPSHOT_DEVICES : MERCURY_CODE_OK;
}

/* Ends a kept snapshot that was lost: it is worth no memory. */
static void check_kept(void)
{
	struct mercury_snapshot_status status;

	if (!snapshot.kept)
		return;
	lost_because = probe_kept(&status);
	if (lost_because == MERCURY_CODE_OK)
		return;
	end();
	pr_notice("the snapshot of memory was lost (`mercury explain %s`)\n",
		  mercury_code_name(lost_because));
}

void mercury_snapshot_status(struct mercury_snapshot_status *status)
{
	memset(status, 0, sizeof(*status));
	if (snapshot.kept)
		probe_kept(status);
	else
		status->live = snapshot.live;
	if (!status->live)
		status->invalid_because = lost_because;
	status->rollback = last_rollback;
}

/* Has a kept snapshot lost: the machine never goes back to it. Not under mercury.lock. */
void mercury_snapshot_give_up_kept(u32 because)
{
	if (mercury_snapshot_is_kept())
		mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_GIVE_UP, (void *)(unsigned long)because);
}

/* A CPU is about to start. It writes unseen before it is online. Not under mercury.lock. */
static void cpu_starts(void)
{
	WRITE_ONCE(snapshot.another_cpu, true);
	mercury_snapshot_give_up_kept(MERCURY_CODE_SNAPSHOT_HOTPLUG);
	mercury_hpet_wait();
}

/* A CPU came online. It does not use the snapshot's tables, so its writes are not seen. */
static void cpu_is_online(void)
{
	WRITE_ONCE(snapshot.another_cpu, true);
}

const struct mercury_hooks mercury_snapshot_hooks = {
	.before_detach = end,
	.check = check_kept,
	.cpu_starts = cpu_starts,
	.cpu_online = cpu_is_online,
	.module_comes = mercury_dma_module_comes,
	.go_back = mercury_rollback,
	.crash = mercury_hpet_silence,
	.stays_attached = mercury_rollback_waits,
};

/*
 * Memory stays online beneath a snapshot: it would be missed later, and nothing is written to it on its
 * way. None comes online while a machine is restored, whose frames may lie there already.
 */
static int memory_changes(struct notifier_block *block, unsigned long action, void *data)
{
	if ((action == MEM_GOING_OFFLINE && READ_ONCE(snapshot.prepared)) ||
	    (action == MEM_GOING_ONLINE && READ_ONCE(mercury_restore.ranges)))
		return notifier_from_errno(-EBUSY);
	return NOTIFY_OK;
}

static struct notifier_block memory_notifier = { .notifier_call = memory_changes };

int mercury_snapshot_init(void)
{
	return register_memory_notifier(&memory_notifier);
}

void mercury_snapshot_exit(void)
{
	unregister_memory_notifier(&memory_notifier);
	/* The kernel's text may still call the watch on DMA. */
	flush_work(&mercury_dma_end);
}
