/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The driver has two halves.
 *
 *	attach/		loads the hypervisor, attaches CPUs to it and detaches them
 *	snapshot/	snapshots of memory, and all that stands on them
 *
 * watch/ stands on both: it notices CPUs that hang.
 *
 * snapshot/ calls attach/. attach/ calls snapshot/ through struct mercury_hooks only (attach/attach.h).
 * main.c starts and ends the module; device.c is /dev/mercury: open, ioctl, mmap. Both are above the
 * halves. This file holds what all of them share. attach/attach.h and snapshot/snapshot.h list the files of
 * each half.
 *
 * Locks: mercury.lock orders requests. A request that changes state, wanted or memory also holds the CPU
 * hotplug lock for reading. Hotplug callbacks hold that lock for writing, so they may read these fields.
 *
 * The kernel calls the notifier of modules with the lock of its list held, and a request that freezes tasks
 * waits for the task that loads a module. So that notifier never waits for mercury.lock without a way out,
 * and no request registers or unregisters a notifier of modules.
 */
#ifndef MERCURY_H
#define MERCURY_H

#include <linux/build_bug.h>
#include <linux/cpumask.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/smp.h>
#include <asm/alternative.h>
#include <asm/asm.h>
#include <asm/cpufeature.h>

#include "mercury_abi.h"

/* Steps are chained by `?:`: the first code that is not MERCURY_CODE_OK ends the chain. */
static_assert(MERCURY_CODE_OK == 0);

/* Outcome.cpu of an outcome that concerns no single CPU. */
#define MERCURY_NO_CPU U32_MAX

/**
 * struct mercury_cpu - one CPU
 * @gate: its area: hidden memory, which native CPUs alone may touch; NULL while unloaded
 * @shared: the block in which the hypervisor publishes its state; NULL while unloaded
 * @csd: the request that runs on it, see mercury_on_cpus()
 * @code: the result of that request on this CPU
 * @detail: details of that result
 * @switched: the request switched this CPU
 * @mode: MERCURY_MODE_*, as the CPU answered the last time
 * @vmxe: Intel: the driver has set CR4.VMXE
 * @attach_ticks: TSC ticks of the last attach with interrupts off
 * @detach_ticks: TSC ticks of the last detach with interrupts off
 *
 * Written by that CPU with interrupts off, or by the holder of mercury.lock.
 */
struct mercury_cpu {
	struct mercury_gate_block *gate;
	struct mercury_shared_cpu *shared;
	call_single_data_t csd;
	u32 code;
	u64 detail[2];
	bool switched;
	u32 mode;
	bool vmxe;
	u64 attach_ticks;
	u64 detach_ticks;
};

DECLARE_PER_CPU(struct mercury_cpu, mercury_cpus);

/**
 * struct mercury - the state of the driver
 * @lock: orders requests
 * @state: MERCURY_STATE_*
 * @wanted: CPUs that are meant to be attached
 * @want_all: CPUs that come online are meant to be attached too
 * @going_down: the machine goes down, and no CPU is attached any more
 * @leaving: the module goes, perhaps by force, and every request is refused
 * @at_instant: all CPUs are in the rendezvous of a snapshot, with the kernel's core suspended
 * @waits_for_sleep: the holder of the lock waits until the system may sleep
 * @kvm_may: KVM may use the hardware above the hypervisor
 * @monitor_port: the first port for calls of the monitor whose guest this machine is; 0: there is none
 * @self_tested: the first attach after a load has compared the CPU before and after
 * @iomem_end: the highest physical address in use, inclusive
 * @memory_fixed: bytes of the hypervisor's memory that do not depend on the number of CPUs
 * @memory_per_cpu: bytes of the hypervisor's memory for each possible CPU
 * @version: the version of the hypervisor that is loaded
 */
struct mercury {
	struct mutex lock;	/* orders requests */
	u32 state;
	struct cpumask wanted;
	bool want_all;
	bool going_down;
	bool leaving;
	bool at_instant;
	bool waits_for_sleep;
	bool kvm_may;
	bool self_tested;
	u16 monitor_port;
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

/*
 * Asks the hypervisor beneath this CPU. On a native CPU the instruction is #UD, or the call of another
 * hypervisor, which fails. The answer is UNKNOWN_OPERATION in both cases.
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

/* device.c */
int mercury_device_init(void);
void mercury_device_exit(void);
void mercury_device_wait(void);

#endif /* MERCURY_H */
