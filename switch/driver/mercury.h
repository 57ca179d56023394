/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the driver's files share.
 *
 *	main.c		module start and end, the global state
 *	device.c	/dev/mercury: open, ioctl, mmap
 *	control.c	load, unload, attach, detach, status: one at a time
 *	vendor.c	whose hardware virtualization this machine has
 *	switch_svm.c	the switch itself, on one CPU, interrupts off: AMD's
 *	switch_vmx.c	and Intel's
 *	switch.h	what they share
 *	gate_svm.S	the page on which the address space changes: AMD's
 *	gate_vmx.S	and Intel's
 *	gate_common.S	what they share
 *	facts.c		what a preflight check reads of a CPU
 *	memory.c	the hypervisor's memory
 *	tables.c	the hypervisor's own page tables
 *	image.c		the hypervisor's image: check, copy, relocate
 *	snapshot.c	snapshots of memory, and the instant of one
 *	rollback.c	who has the machine put back to a snapshot
 *	dma.c		what devices write round the nested tables
 *	log.c		what devices write while a log of writes is kept
 *	disk.c		what is written to disks
 *	fence.c		no packet passes once the instant has come
 *	cpu_state.c	what of a CPU is not in memory, and bringing it back
 *	restore.c	going on in a machine that an image holds
 *	resume.S	the way from here into it
 *	events.c	what the kernel tells: hotplug, suspend, reboot, panic, KVM
 *	monitor.c	CPUs that left the hypervisor by themselves
 *	fault.c		fault injection, in builds that have it
 *
 * Locks: mercury.lock orders requests; whoever changes state, wanted or memory also holds the CPU
 * hotplug lock for reading, so that hotplug callbacks, which hold it for writing, may read them.
 *
 * The kernel calls the notifier of modules with the lock of its list held, and a request that freezes tasks
 * waits for the task that loads a module. So that notifier never waits for mercury.lock without a way out,
 * and no request registers or unregisters a notifier of modules.
 */
#ifndef MERCURY_H
#define MERCURY_H

#include <linux/cpumask.h>
#include <linux/mm_types.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/smp.h>
#include <asm/alternative.h>
#include <asm/asm.h>
#include <asm/cpufeature.h>
#include <asm/msr-index.h>

#include "mercury_abi.h"

/* Outcome.cpu where the outcome concerns no CPU in particular. */
#define MERCURY_NO_CPU U32_MAX

/* One CPU. Written by that CPU with interrupts off, or by whoever holds mercury.lock. */
struct mercury_cpu {
	/* Its area: hidden memory, to be touched by native CPUs only. NULL while unloaded. */
	struct mercury_gate_block *gate;
	/* What the hypervisor publishes of it. NULL while unloaded. */
	struct mercury_shared_cpu *shared;
	/* The request that runs on it, see mercury_on_cpus(). */
	call_single_data_t csd;
	/* How that request ended here. */
	u32 code;
	u64 detail[2];
	/* The request switched this CPU. */
	bool switched;
	/* MERCURY_MODE_*, as the CPU answered when it was last asked. */
	u32 mode;
	/* Intel: CR4.VMXE is set by us. */
	bool vmxe;
	/* TSC ticks with interrupts off. */
	u64 attach_ticks;
	u64 detach_ticks;
};

DECLARE_PER_CPU(struct mercury_cpu, mercury_cpus);

struct mercury {
	struct mutex lock;	/* orders requests */
	/* MERCURY_STATE_* */
	u32 state;
	/* CPUs that are meant to be attached. */
	struct cpumask wanted;
	/* CPUs that come online are meant to be attached too. */
	bool want_all;
	/* The machine goes down: no CPU is attached any more. */
	bool going_down;
	/* The module goes, be it by force: no request is met any more. */
	bool leaving;
	/* All CPUs meet for a snapshot, and the kernel's core is suspended for it. */
	bool at_instant;
	/* Who holds the lock waits for the system's sleep to be allowed, or does not hold it any more. */
	bool waits_for_sleep;
	/* KVM may use the hardware above the hypervisor. */
	bool kvm_may;
	/* The first attach after a load compares the CPU before and after. */
	bool self_tested;
	/* Highest address in use, inclusive. */
	u64 iomem_end;
	u64 memory_fixed;
	u64 memory_per_cpu;
	u8 version[32];
};

extern struct mercury mercury;

static inline struct mercury_cpu *mercury_cpu(int cpu)
{
	return per_cpu_ptr(&mercury_cpus, cpu);
}

/* switch_svm.c, switch_vmx.c: what is the vendor's. Functions of a CPU run on it, interrupts off. */
struct mercury_vendor {
	/* MERCURY_VENDOR_* */
	u32 number;
	/* KVM can run above the hypervisor. */
	bool shares;
	/* The module that uses the same hardware, and the hardware's name. */
	const char *kvm;
	const char *what;
	/* What the hypervisor's CR4 needs besides. */
	u64 host_cr4;
	/* What S_CET may have. */
	u64 s_cet;
	/* The gate: its way in, which lies in its page, and its way out. */
	u64 (*gate)(struct mercury_gate_block *area);
	void (*leave)(void);
	/* Whether this CPU can pass the gate at all. */
	u32 (*can_enter)(u64 detail[2]);
	/* MERCURY_MODE_*, asked of this CPU. */
	u32 (*mode)(void);
	/* Performs an operation of the hypervisor on this CPU, which must be native. */
	u32 (*native_call)(struct mercury_cpu *m, u32 operation, u64 argument);
	/* Attaches this CPU; one that is attached already stays so. */
	u32 (*attach_cpu)(struct mercury_cpu *m);
	/* Detaches this CPU; one that is native already stays so. May run in an NMI. */
	u32 (*detach_cpu)(struct mercury_cpu *m);
	/* Takes out of facts what shows that the CPU is attached. */
	void (*hide)(struct mercury_cpu_facts *facts);
	/* Fills what of a new area is the vendor's. */
	void (*place)(struct mercury_gate_block *gate);
};

extern const struct mercury_vendor mercury_svm, mercury_vmx;

/* vendor.c: this machine's, from the start of the module on; NULL on other processors. */
extern const struct mercury_vendor *mercury_vendor;
void mercury_vendor_init(void);

/* The mode of this CPU, asked of it. */
static __always_inline u32 mercury_mode(void)
{
	return mercury_vendor ? mercury_vendor->mode() : MERCURY_MODE_NATIVE;
}

/*
 * Asks the hypervisor beneath this CPU. On a native CPU the instruction is #UD, or another
 * hypervisor's call that fails: either way the answer is UNKNOWN_OPERATION.
 */
static __always_inline u64 mercury_hypercall(u64 number, u64 a, u64 b, u64 *value)
{
	u64 answer = number, native = 1;

	*value = 0;
	asm volatile("1:	" ALTERNATIVE("vmcall", "vmmcall", X86_FEATURE_VMMCALL) "\n"
		     "	xorl	%k[native], %k[native]\n"
		     "2:\n"
		     _ASM_EXTABLE(1b, 2b)
		     : "+a" (answer), "+d" (*value), [native] "+r" (native)
		     : "c" (MERCURY_HYPERCALL_MAGIC), "D" (a), "S" (b)
		     : "cc", "memory");
	return native ? MERCURY_CODE_UNKNOWN_OPERATION : answer;
}

/*
 * EFER as this CPU shows it. AMD's hypervisor beneath sees who asks, says that it is there, and is quicker
 * than for others.
 */
static __always_inline u64 mercury_ask_efer(void)
{
	u32 low, high;

	asm volatile("rdmsr" : "=a" (low), "=d" (high)
		     : "c" (MSR_EFER), "S" (MERCURY_HYPERCALL_MAGIC) : "memory");
	return low | (u64)high << 32;
}

/* facts.c */
u64 mercury_iomem_end(void);
void mercury_read_facts(struct mercury_cpu_facts *facts);
u32 mercury_can_enter(u64 detail[2]);

/* control.c: under mercury.lock */
void mercury_on_cpus(const struct cpumask *cpus, u32 (*request)(struct mercury_cpu *m));
u32 mercury_load(struct mercury_outcome *outcome);
u32 mercury_unload(struct mercury_outcome *outcome);
void mercury_forget(void);
u32 mercury_attach(const struct cpumask *cpus, bool check_only, struct mercury_outcome *outcome);
u32 mercury_detach(const struct cpumask *cpus, struct mercury_outcome *outcome);
void mercury_control_exit(void);
u32 mercury_check_cpu(struct mercury_cpu *m);
u32 mercury_ask_mode(struct mercury_cpu *m);

/* memory.c */
#define MERCURY_BOOT_INFO_FACTS 1024
struct mercury_boot_info *mercury_boot_info(void);
struct mercury_cpu_facts *mercury_preflight_facts(void);
u32 mercury_memory_create(void);
u32 mercury_memory_donate(u64 pages);
void mercury_memory_destroy(void);
void mercury_memory_report(void);
bool mercury_owned(unsigned int number, struct mercury_owned_range *range);
void *mercury_carve(unsigned int pages, unsigned int align);
int mercury_shared_map(struct vm_area_struct *vma);
void mercury_kvm_allow(bool may);
void mercury_kvm_allow_now(bool may);

/* tables.c */
#define MERCURY_MAP_TEXT	0
#define MERCURY_MAP_RODATA	1
#define MERCURY_MAP_DATA	2
u32 mercury_tables_create(void);
u64 mercury_tables_cr3(void);
u64 mercury_tables_cr4(void);
u32 mercury_map(void *virt, phys_addr_t phys, unsigned long pages, int kind);
u32 mercury_map_owned(void *virt, unsigned long pages, int kind);
u32 mercury_map_window(struct mercury_gate_block *gate);
u32 mercury_map_memory(phys_addr_t start, phys_addr_t end);
u32 mercury_map_registers(phys_addr_t phys);
void mercury_unmap_memory(void);
u32 mercury_tables_copy(void);
u64 mercury_tables_wide_cr3(void);
void mercury_tables_destroy(void);

/* image.c, image_blob.S */
extern const u8 mercury_image[], mercury_image_end[];
u32 mercury_image_check(void);
const struct mercury_image_header *mercury_image_header(void);
unsigned int mercury_image_pages(void);
u32 mercury_image_place(void *image);

/* events.c */
int mercury_events_init(void);
void mercury_events_exit(void);
void mercury_emergency_hold(void);
void mercury_emergency_release(void);
bool mercury_emergency_is_ours(void);

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
void mercury_snapshot_look(void);
void mercury_snapshot_status(struct mercury_snapshot_status *status);
int mercury_snapshot_init(void);
void mercury_snapshot_exit(void);
void mercury_snapshot_cpu_comes(void);
void mercury_snapshot_give_up_kept(u32 because);
void mercury_snapshot_cpu_came(void);

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

/* log.c */
u32 mercury_log_start(unsigned long **written, unsigned long count);
void mercury_log_stop(void);
void mercury_log_free(void);
bool mercury_log_is_on(void);
void mercury_log_give(const void *start, size_t length);
void mercury_log_written(unsigned long pfn);
void mercury_log_note(const void *start, size_t length, bool returned);
void mercury_log_queue(const struct virtqueue *virtqueue, struct scatterlist *list, unsigned int count);
u32 mercury_log_carry_over(void);
unsigned long mercury_log_collect(unsigned long **to);

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

/* monitor.c */
void mercury_monitor_start(void);
void mercury_monitor_stop(void);
void mercury_monitor_look(void);

/* device.c */
int mercury_device_init(void);
void mercury_device_exit(void);
void mercury_device_wait(void);

/* fault.c */
#ifdef CONFIG_MERCURY_FAULT_INJECTION
bool mercury_fault(u32 point);
void mercury_fault_facts(struct mercury_cpu_facts *facts);
u32 mercury_fault_arm(const struct mercury_fault_request *request);
u32 mercury_fault_fired(void);
void mercury_fault_reset(void);
#else
static inline bool mercury_fault(u32 point) { return false; }
static inline void mercury_fault_facts(struct mercury_cpu_facts *facts) { }
static inline void mercury_fault_reset(void) { }
#endif

#endif /* MERCURY_H */
