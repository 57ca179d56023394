/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Loading the hypervisor, attaching CPUs to it and detaching them.
 *
 *	control.c	load, unload, attach, detach: one request at a time
 *	vendor.c	the vendor of this machine's hardware virtualization
 *	switch_svm.c	the switch of one CPU, by itself, with interrupts off: AMD
 *	switch_vmx.c	the same: Intel
 *	switch.h	what the two switches share
 *	gate_svm.S	the page on which the address space changes: AMD
 *	gate_vmx.S	the same: Intel
 *	gate_common.S	what the two gates share
 *	facts.c		the facts of a CPU that a preflight check reads
 *	memory.c	the hypervisor's memory
 *	tables.c	the hypervisor's own page tables
 *	image.c		the hypervisor's image: check, copy, relocate
 *	events.c	events that the kernel tells of: hotplug, suspend, reboot, panic, KVM
 *	monitor.c	CPUs that left the hypervisor by themselves
 *	fault.c		fault injection, in builds that have it
 */
#ifndef MERCURY_ATTACH_H
#define MERCURY_ATTACH_H

#include <linux/mm_types.h>
#include <asm/msr-index.h>

#include "../mercury.h"

/**
 * struct mercury_hooks - calls of this half to code that stands on an attached machine
 * @before_detach: CPUs are about to be detached; under mercury.lock
 * @check: CPUs that left by themselves have been dealt with; under mercury.lock, now and then
 * @cpu_starts: a CPU is about to start; on another CPU
 * @cpu_online: a CPU is online; on that CPU
 * @module_comes: a module is about to be initialized; without mercury.lock
 * @go_back: the machine dies for a reason, with a message; returns a code if it does so nevertheless
 * @crash: another kernel takes over; returns true if NMIs came until now; in any context
 * @stays_attached: the kernel stops this CPU in an emergency; returns true if the CPU must stay attached.
 *	May run in an NMI.
 */
struct mercury_hooks {
	void (*before_detach)(void);
	void (*check)(void);
	void (*cpu_starts)(void);
	void (*cpu_online)(void);
	void (*module_comes)(const char *name);
	u32 (*go_back)(u32 reason, const char *message);
	bool (*crash)(void);
	bool (*stays_attached)(void);
};

/* events.c: registered once, before the first event. */
extern const struct mercury_hooks *mercury_hooks;
void mercury_hooks_register(const struct mercury_hooks *hooks);

/**
 * struct mercury_vendor - hardware virtualization of one vendor
 * @number: MERCURY_VENDOR_*
 * @shares: KVM can run above the hypervisor
 * @kvm: the module that uses the same hardware
 * @what: the hardware's name
 * @host_cr4: further bits that the hypervisor's CR4 needs
 * @s_cet: bits that S_CET may have
 * @gate: the gate's way in, which lies in its page
 * @leave: the gate's way out
 * @can_enter: checks that this CPU can pass the gate at all
 * @mode: asks this CPU for its mode, MERCURY_MODE_*
 * @native_call: runs an operation of the hypervisor on this CPU, which must be native
 * @attach_cpu: attaches this CPU; one that is attached already stays so
 * @detach_cpu: detaches this CPU; one that is native already stays so. May run in an NMI
 * @hide: takes the traces of an attach out of a CPU's facts
 * @place: fills the vendor's part of a new area; NULL: there is none
 *
 * Functions of a CPU run on that CPU, with interrupts off.
 */
struct mercury_vendor {
	u32 number;
	bool shares;
	const char *kvm;
	const char *what;
	u64 host_cr4;
	u64 s_cet;
	u64 (*gate)(struct mercury_gate_block *area);
	void (*leave)(void);
	u32 (*can_enter)(u64 detail[2]);
	u32 (*mode)(void);
	u32 (*native_call)(struct mercury_cpu *m, u32 operation, u64 argument);
	u32 (*attach_cpu)(struct mercury_cpu *m);
	u32 (*detach_cpu)(struct mercury_cpu *m);
	void (*hide)(struct mercury_cpu_facts *facts);
	void (*place)(struct mercury_gate_block *gate);
};

extern const struct mercury_vendor mercury_svm, mercury_vmx;

/* vendor.c: set when the module starts; NULL on processors of other vendors. */
extern const struct mercury_vendor *mercury_vendor;
void mercury_vendor_init(void);

/* Asks this CPU for its mode. */
static __always_inline u32 mercury_mode(void)
{
	return mercury_vendor ? mercury_vendor->mode() : MERCURY_MODE_NATIVE;
}

/*
 * Returns EFER as this CPU shows it. AMD's hypervisor recognizes the driver's read by RSI. It adds a bit
 * that says that it is there, and answers faster than it answers others.
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
void mercury_read_facts(struct mercury_cpu_facts *facts, bool registers_alone);
u32 mercury_can_enter(u64 detail[2]);

/* control.c: under mercury.lock */
void mercury_on_cpus(const struct cpumask *cpus, u32 (*request)(struct mercury_cpu *m));
u32 mercury_load(struct mercury_outcome *outcome);
u32 mercury_unload(struct mercury_outcome *outcome);
void mercury_forget(void);
u32 mercury_attach(const struct cpumask *cpus, bool check_only, struct mercury_outcome *outcome);
u32 mercury_detach(const struct cpumask *cpus, bool for_now, struct mercury_outcome *outcome);
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
void mercury_emergency_want(bool wanted);
bool mercury_emergency_is_ours(void);

/* monitor.c */
void mercury_monitor_start(void);
void mercury_monitor_stop(void);
void mercury_monitor_check(void);

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

#endif /* MERCURY_ATTACH_H */
