/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Snapshots of memory, and all that stands on them.
 *
 *	snapshot.c	the life of a snapshot
 *	pieces.c	the memory of the snapshot itself
 *	pool.c		free pages for the hypervisor's copies
 *	ranges.c	the memory that the snapshot keeps
 *	frames.c	arithmetic on page frames
 *	scan.c		the scan for persistent DMA memory and free pages at the instant
 *	instant.c	the instant: all CPUs meet, and enter the snapshot
 *	read.c		reading frames for user space
 *	dirty_log.c	the dirty log of memory
 *	machine.c	the description of the machine that an image holds
 *	guest.c		a machine that goes on as a guest: its firmware's memory, its devices
 *	rollback.c	putting the machine back to a snapshot that is kept
 *	dma.c		DMA writes, which bypass the nested tables
 *	dma_log.c	DMA writes while a dirty log is kept
 *	disk.c		the dirty log of a disk
 *	fence.c		a packet filter that closes at the instant
 *	nonces.c	encryption whose counters must not run twice
 *	cpu_state.c	the state of a CPU that is not in memory: saving and loading it
 *	plugged.c	memory that the firmware's map does not have
 *	restore.c	loading a machine from its image
 *	landing.c	arithmetic of the landing
 *	places.c	places of frames until the landing
 *	land.c		the landing: going on in that machine
 *	resume.S	the way from this kernel into that machine
 *
 * Functions run under mercury.lock, unless they say otherwise.
 */
#ifndef MERCURY_SNAPSHOT_H
#define MERCURY_SNAPSHOT_H

#include <linux/gfp.h>
#include <linux/irqflags.h>
#include <linux/sizes.h>
#include <asm/io.h>

#include "../attach/attach.h"
#include "frames.h"

/* The most pieces of memory that are not kept, and the most ranges between them. */
#define MERCURY_HOLES_MAX	(SZ_1M / sizeof(struct mercury_owned_range))

/* Returns true if the monitor whose guest this machine is stands in for a hypervisor. */
static __always_inline bool mercury_is_monitored(void)
{
	return mercury.monitor_port && mercury.state == MERCURY_STATE_UNLOADED;
}

/* Calls the monitor; an argument that is no address does not matter to it. */
static __always_inline u32 mercury_monitor_call(u64 what, void *argument)
{
	unsigned long flags;
	u32 code;

	raw_local_irq_save(flags);
	outl(__pa_nodebug(argument) >> PAGE_SHIFT, mercury.monitor_port + what);
	code = inl(mercury.monitor_port);
	raw_local_irq_restore(flags);
	return code;
}

/* Calls the hypervisor beneath this CPU, or the monitor; in any context. */
static __always_inline u32 mercury_snapshot_call_for(u64 what, void *argument, u64 *value)
{
	*value = 0;
	if (mercury_is_monitored())
		return mercury_monitor_call(what, argument);
	return mercury_hypercall(MERCURY_HYPERCALL_SNAPSHOT, what, (u64)argument, value);
}

static __always_inline u32 mercury_snapshot_call(u64 what, void *argument)
{
	u64 unused;

	return mercury_snapshot_call_for(what, argument, &unused);
}

/* snapshot.c */
u32 mercury_snapshot_prepare(const struct mercury_snapshot_request *request);
u32 mercury_snapshot_begin(struct mercury_snapshot_request *request, struct mercury_outcome *outcome);
u32 mercury_snapshot_finish(struct mercury_snapshot_request *request);
int mercury_snapshot_read(struct mercury_snapshot_read_request *request);
int mercury_snapshot_read_present(struct mercury_snapshot_read_request *request);
u32 mercury_snapshot_log_begin(void);
u32 mercury_snapshot_log_collect(struct mercury_log_request *request);
int mercury_snapshot_postmortem(struct mercury_postmortem_request *request);
int mercury_snapshot_machine(struct mercury_restart_request *request, struct mercury_outcome *outcome);
void mercury_snapshot_release(void);
void mercury_snapshot_status(struct mercury_snapshot_status *status);
bool mercury_snapshot_is_kept(void);
void mercury_snapshot_give_up_kept(u32 because);
extern const struct mercury_hooks mercury_snapshot_hooks;
int mercury_snapshot_init(void);
void mercury_snapshot_exit(void);

/* pieces.c */
u32 mercury_pieces_begin(void);
void *mercury_piece(unsigned int order, gfp_t flags);
void *mercury_piece_of(size_t size, gfp_t flags);
struct page *mercury_piece_for_pool(unsigned int order, gfp_t flags);
unsigned int mercury_pieces_count(void);
bool mercury_piece_range(unsigned int number, struct mercury_owned_range *range, bool *is_pool);
unsigned long **mercury_pfn_map(unsigned long *count);
unsigned long **mercury_number_map(unsigned long pages);
void mercury_pieces_free(void);

/* pool.c */
u32 mercury_pool_begin(void);
void mercury_pool_end(void);
u32 mercury_pool_allocate(void);
u32 mercury_pool_fill(u64 wanted);
u32 mercury_pool_donate(void);
void mercury_pool_start(void);
void mercury_pool_stop(void);
bool mercury_pool_is_lost(void);
void mercury_pool_status(struct mercury_snapshot_request *request);
void mercury_pool_free(void);

/**
 * struct mercury_kept - the memory that a snapshot keeps
 * @ranges: its ranges, ascending
 * @numbers: the number of the first page of each range among all kept pages
 * @count: the number of ranges
 * @pages: the number of pages
 */
struct mercury_kept {
	struct mercury_owned_range *ranges;
	u64 *numbers;
	unsigned int count;
	u64 pages;
};

/* ranges.c */
u32 mercury_kept_allocate(void);
u32 mercury_kept_find(void);
const struct mercury_kept *mercury_kept(void);
s64 mercury_kept_number(phys_addr_t phys);
void mercury_kept_forget(void);
unsigned long mercury_ram_pages(void);

/* scan.c: mercury_scan_mark() in any context; mercury_scan_cpu() and mercury_scan_wait() at the instant */
u32 mercury_scan_allocate(u64 flags, unsigned long ram_pages);
void mercury_scan_forget(void);
unsigned long mercury_scan_room(void);
unsigned long **mercury_scan_free(unsigned long *count);
unsigned long **mercury_scan_persistent(void);
void mercury_scan_mark(phys_addr_t phys);
bool mercury_scan_is_torn(void);
void mercury_scan_begin(void);
void mercury_scan_cpu(unsigned int cpus);
void mercury_scan_wait(unsigned int cpus);

/* instant.c: mercury_snapshot_is_past() in any context */
u32 mercury_instant_prepare(unsigned long ram_pages);
u32 mercury_instant(u64 swap_pages, struct mercury_outcome *outcome);
const struct cpumask *mercury_instant_cpus(void);
bool mercury_instant_restored(void);
bool mercury_instant_rolled_back(void);
void mercury_instant_ticks(struct mercury_instant_ticks *ticks);
void mercury_instant_forget(void);
bool mercury_snapshot_is_past(void);

/* read.c */
u32 mercury_read_allocate(u64 flags, unsigned long ram_pages);
void mercury_read_forget(void);
u64 *mercury_read_hashes(void);
int mercury_read_past(struct mercury_snapshot_read_request *request);
int mercury_read_present(struct mercury_snapshot_read_request *request);

/* dirty_log.c */
u32 mercury_dirty_log_allocate(u64 flags);
void mercury_dirty_log_forget(void);
bool mercury_dirty_log_is_on(void);
unsigned long **mercury_dirty_log_collected(unsigned long *count);
u32 mercury_dirty_log_begin(void);
u32 mercury_dirty_log_collect(struct mercury_log_request *request, bool after_instant);

/* machine.c */
void mercury_machine_cpu(int cpu, struct mercury_restart_cpu *entry);
u64 mercury_machine_modes(void);
int mercury_machine_describe(struct mercury_restart_request *request, struct mercury_outcome *outcome);

/* guest.c: mercury_guest_find_monitor() in any context; _init() and _exit() without mercury.lock */
void mercury_guest_init(void);
void mercury_guest_exit(void);
void mercury_guest_find_monitor(void);
int mercury_firmware_read(const struct mercury_firmware_request *request);
void mercury_guest_wake(void);
void mercury_guest_arrive(void);

/* absent.c */
int mercury_absent(struct device *device, void *unused);
bool mercury_absent_are_awake(void);

/* rollback.c: the last two in any context */
u32 mercury_rollback_prepare(struct mercury_snapshot_setup *setup, void *page,
			     struct mercury_restart_cpu *cpus);
void mercury_rollback_arm(void);
void mercury_rollback_disarm(void);
void mercury_rollback_end(void);
bool mercury_rollback_read(u64 message[16]);
u32 mercury_rollback(u32 reason, const char *message);
bool mercury_rollback_waits(void);

/* cpu_state.c: on the CPU itself with interrupts off, but for the first three */
u32 mercury_states_allocate(const struct cpumask *cpus);
void mercury_states_free(void);
struct mercury_saved_cpu *mercury_state_of(int cpu);
struct mercury_saved_cpu *mercury_state_save(void);
void mercury_state_load(void);
void mercury_requests_save(void);
void mercury_requests_load(void);
void mercury_requests_drain(void);
bool mercury_x2apic(void);

/*
 * resume.S: mercury_save() returns twice: 0 now, and later 1 in a machine that goes on from an image, or
 * MERCURY_ROLLED_BACK in one that was put back.
 */
asmlinkage int mercury_save(struct mercury_saved_cpu *saved) __attribute__((returns_twice));
void mercury_resume(void);
void mercury_no_handler(void);
void mercury_land(u64 root, u64 code, u64 landing, u64 index);
extern const u8 mercury_landing[], mercury_landing_end[];

/* plugged.c */
u32 mercury_plugged_check(const void *ranges, size_t bytes, u32 count, struct mercury_outcome *outcome);

/* restore.c, land.c */
int mercury_restore_begin(const struct mercury_restart_request *request,
			  struct mercury_outcome *outcome);
int mercury_restore_load(const struct mercury_load_frames_request *request,
			 struct mercury_outcome *outcome);
int mercury_restore_read(const struct mercury_load_frames_request *request,
			 struct mercury_outcome *outcome);
int mercury_restore_go(void);
void mercury_restore_end(void);
bool mercury_is_device(phys_addr_t start, phys_addr_t end);

/**
 * enum mercury_page_use - the use of a page, as far as a snapshot cares
 * @MERCURY_PAGE_USED: ordinary use, or none of the other two for certain
 * @MERCURY_PAGE_PERSISTENT: a device may have it for good (persistent DMA memory)
 * @MERCURY_PAGE_FREE: it is free
 */
enum mercury_page_use { MERCURY_PAGE_USED, MERCURY_PAGE_PERSISTENT, MERCURY_PAGE_FREE };

/*
 * dma.c: mercury_dma_missed(), _stretch() and _queued() in any context; _module_comes() without
 * mercury.lock
 */
extern struct work_struct mercury_dma_end;
u32 mercury_dma_watch(void);
void mercury_dma_module_comes(const char *name);
void mercury_dma_arm(void);
bool mercury_dma_missed(void);
void mercury_dma_unwatch(void);
int mercury_dma_stop(void);
void mercury_dma_start(bool restored);
unsigned long mercury_dma_stretch(struct page *page, unsigned long most, enum mercury_page_use *use);
struct scatterlist;
struct virtqueue;
void *mercury_dma_queued(const struct virtqueue *queue, struct scatterlist *entry);

/* dma_log.c: from _is_on() to _queue() in any context */
u32 mercury_dma_log_start(unsigned long **written, unsigned long count);
u32 mercury_dma_log_carry_over(void);
unsigned long mercury_dma_log_collect(unsigned long **to);
void mercury_dma_log_stop(void);
void mercury_dma_log_free(void);
bool mercury_dma_log_is_on(void);
void mercury_dma_log_give(const void *start, size_t length);
void mercury_dma_log_written(unsigned long pfn);
void mercury_dma_log_note(const void *start, size_t length, bool returned);
void mercury_dma_log_queue(const struct virtqueue *queue, struct scatterlist *list, unsigned int count);

/* disk.c */
int mercury_disk_log(struct mercury_disk_log_request *request);
void mercury_disk_log_release(void);

/* fence.c: the last two at the instant */
int mercury_fence(struct mercury_fence_request *request);
void mercury_fence_arrive(void);
void mercury_fence_release(void);
void mercury_fence_close(void);
void mercury_fence_return(void);

/* nonces.c */
u32 mercury_nonces_check(void);
int mercury_nonces_forget_tunnels(void);
void mercury_nonces_forget(void);

#endif /* MERCURY_SNAPSHOT_H */
