/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Snapshots of memory, and what stands on them.
 *
 *	snapshot.c	snapshots of memory, and the instant of one
 *	rollback.c	putting the machine back to a snapshot that is kept
 *	dma.c		DMA writes, which bypass the nested tables
 *	dma_log.c	DMA writes while a dirty log is kept
 *	disk.c		the dirty log of a disk
 *	fence.c		a packet filter that closes at the instant
 *	nonces.c	encryption whose counters must not run twice
 *	cpu_state.c	the state of a CPU that is not in memory: saving and loading it
 *	plugged.c	memory that the firmware's map does not have
 *	restore.c	loading a machine from its image, and going on in it
 *	resume.S	the way from this kernel into that machine
 */
#ifndef MERCURY_SNAPSHOT_H
#define MERCURY_SNAPSHOT_H

#include "../attach/attach.h"

/* snapshot.c: under mercury.lock */
u32 mercury_snapshot_prepare(const struct mercury_snapshot_request *request);
u32 mercury_snapshot_begin(struct mercury_snapshot_request *request, struct mercury_outcome *outcome);
u32 mercury_snapshot_finish(struct mercury_snapshot_request *request);
int mercury_snapshot_take(struct mercury_snapshot_take_request *request);
int mercury_snapshot_look_at(struct mercury_snapshot_take_request *request);
u32 mercury_snapshot_log_begin(void);
u32 mercury_snapshot_log_collect(struct mercury_log_request *request);
void mercury_snapshot_end(void);
void mercury_snapshot_release(void);
void mercury_snapshot_status(struct mercury_snapshot_status *status);
extern const struct mercury_hooks mercury_snapshot_hooks;
int mercury_snapshot_init(void);
void mercury_snapshot_exit(void);
void mercury_snapshot_give_up_kept(u32 because);

int mercury_snapshot_machine(struct mercury_restart_request *request, struct mercury_outcome *outcome);

/* rollback.c: under mercury.lock, but for the last three */
u32 mercury_rollback_prepare(struct mercury_snapshot_setup *setup, void *page,
			     struct mercury_restart_cpu *cpus);
void mercury_rollback_arm(void);
void mercury_rollback_end(void);
void mercury_rollback_read(u64 message[16]);
void mercury_rollback_disarm(void);
u32 mercury_rollback(u32 reason, const char *message);
bool mercury_rollback_waits(void);

/* cpu_state.c: on the CPU itself, interrupts off, but for the room. */
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
 * resume.S; the first returns twice: 0 now, and 1 in a machine that was brought back, or
 * MERCURY_ROLLED_BACK in one that was put back.
 */
asmlinkage int mercury_save(struct mercury_saved_cpu *saved) __attribute__((returns_twice));
void mercury_resume(void);
void mercury_no_handler(void);
void mercury_land(u64 root, u64 code, u64 landing, u64 index);
extern const u8 mercury_landing[], mercury_landing_end[];

/* plugged.c */
struct mercury_plugged;
struct mercury_plugged *mercury_plugged_find(void);
u32 mercury_plugged_check(const struct mercury_plugged *plugged, u64 start, u64 pages,
			  struct mercury_outcome *outcome);
void mercury_plugged_free(struct mercury_plugged *plugged);

/* restore.c: under mercury.lock */
int mercury_restore_begin(const struct mercury_restart_request *request,
			  struct mercury_outcome *outcome);
int mercury_restore_load(const struct mercury_load_frames_request *request,
			 struct mercury_outcome *outcome);
int mercury_restore_read(const struct mercury_load_frames_request *request,
			 struct mercury_outcome *outcome);
int mercury_restore_go(void);
void mercury_restore_end(void);

/* dma.c */
u32 mercury_dma_watch(void);
void mercury_dma_module_comes(const char *name);
void mercury_dma_arm(void);
bool mercury_dma_missed(void);
void mercury_dma_unwatch(void);
int mercury_dma_stop(void);
void mercury_dma_start(bool restored);
bool mercury_snapshot_is_past(void);
void mercury_snapshot_mark(phys_addr_t phys);
/* Devices may have it for good; it is nobody's. */
enum mercury_page_use { MERCURY_PAGE_USED, MERCURY_PAGE_LASTING, MERCURY_PAGE_FREE };
unsigned long mercury_dma_stretch(struct page *page, unsigned long most, enum mercury_page_use *use);
struct scatterlist;
struct virtqueue;
void *mercury_dma_queued(const struct virtqueue *queue, struct scatterlist *entry);

/* dma_log.c */
u32 mercury_dma_log_start(unsigned long **written, unsigned long count);
void mercury_dma_log_stop(void);
void mercury_dma_log_free(void);
bool mercury_dma_log_is_on(void);
void mercury_dma_log_give(const void *start, size_t length);
void mercury_dma_log_written(unsigned long pfn);
void mercury_dma_log_note(const void *start, size_t length, bool returned);
void mercury_dma_log_queue(const struct virtqueue *virtqueue, struct scatterlist *list, unsigned int count);
u32 mercury_dma_log_carry_over(void);
unsigned long mercury_dma_log_collect(unsigned long **to);

/* disk.c: under mercury.lock */
int mercury_disk_log(struct mercury_disk_log_request *request);
void mercury_disk_log_release(void);

/* fence.c: under mercury.lock; the last two at the instant */
int mercury_fence(struct mercury_fence_request *request);
void mercury_fence_down(void);
void mercury_fence_arrive(void);
void mercury_fence_release(void);
void mercury_fence_close(void);
void mercury_fence_return(void);

/* nonces.c */
u32 mercury_nonces_check(void);
void mercury_nonces_forget(void);

#endif /* MERCURY_SNAPSHOT_H */
