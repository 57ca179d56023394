// SPDX-License-Identifier: GPL-2.0-only
/*
 * Putting the machine back to a snapshot that is kept. The hypervisor does so, in its snapshot/rollback.rs.
 * This file asks for it, and tells the hypervisor what it has to know.
 *
 * The driver's own memory is put back too. What must be known afterwards is in the note, in memory that the
 * snapshot does not keep.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/jhash.h>
#include <linux/kexec.h>
#include <linux/pci.h>
#include <linux/stacktrace.h>
#include <asm/apicdef.h>
#include <asm/msr.h>
#include <asm/nmi.h>
#include <asm/tsc.h>

#include "../watch/watch.h"
#include "snapshot.h"

/* The time for devices to come to rest. */
#define SETTLE_MS	3
/* The time in which the machine goes back from the same death twice only. */
#define REPEAT_MS	(600 * MSEC_PER_SEC)
/* Callers that tell one death from another: a panic's own, those of a fault, and some more. */
#define CALLERS		14

struct note {
	char message[128];
	bool watched;	/* by the guard's watch */
};

static struct note *note;
/* There is a snapshot to go back to. */
static bool armed;
static bool has_handler;

/*
 * The hypervisor fetches CPUs by NMI. It reaches a CPU that was put back as soon as it runs again, which is
 * at the instant.
 */
static int nmi_comes(unsigned int type, struct pt_regs *regs)
{
	return READ_ONCE(mercury.at_instant) ? NMI_HANDLED : NMI_DONE;
}

/* Marks the buses that have devices, or may have. */
static u32 find_buses(u64 buses[4])
{
	struct pci_dev *device = NULL;
	unsigned int bus, last;

	for_each_pci_dev(device) {
		if (pci_domain_nr(device->bus)) {
			pr_err("%s cannot be reached by the hypervisor\n", pci_name(device));
			pci_dev_put(device);
			return MERCURY_CODE_ROLLBACK_DEVICES;
		}
		last = device->subordinate ? device->subordinate->busn_res.end : device->bus->number;
		last = clamp_t(unsigned int, last, device->bus->number, 255);
		for (bus = device->bus->number; bus <= last; bus++)
			buses[bus / 64] |= BIT_ULL(bus % 64);
	}
	return MERCURY_CODE_OK;
}

/* All that it takes, before the snapshot begins. `page` is not kept, and neither are `cpus`. */
u32 mercury_rollback_prepare(struct mercury_snapshot_setup *setup, void *page,
			     struct mercury_restart_cpu *cpus)
{
	u32 code;

	/*
	 * A CPU that the kernel stops must stay attached. Without KVM the emergency callback keeps it.
	 * Beside KVM the CPU gives up KVM's part, which is no wish to leave.
	 */
	if (!mercury_emergency_is_ours() && !READ_ONCE(mercury.kvm_may))
		return MERCURY_CODE_VIRTUALIZATION_IN_USE;
	memset(setup->buses, 0, sizeof(setup->buses));
	code = find_buses(setup->buses);
	if (code == MERCURY_CODE_OK && !mercury_x2apic())
		code = mercury_map_registers(__rdmsr(MSR_IA32_APICBASE) & MSR_IA32_APICBASE_BASE);
	if (code != MERCURY_CODE_OK)
		return code;
	if (register_nmi_handler(NMI_LOCAL, nmi_comes, 0, "mercury"))
		return MERCURY_CODE_NO_MEMORY;
	has_handler = true;
	setup->keep_virt = (u64)cpus;
	setup->settle_ticks = (u64)tsc_khz * SETTLE_MS;
	setup->repeat_ticks = (u64)tsc_khz * REPEAT_MS;
	note = page;
	memset(note, 0, sizeof(*note));
	return MERCURY_CODE_OK;
}

/* From here on whatever asks for it gets it. */
void mercury_rollback_arm(void)
{
	WRITE_ONCE(armed, true);
}

void mercury_rollback_disarm(void)
{
	WRITE_ONCE(armed, false);
}

/* There is no snapshot any more. */
void mercury_rollback_end(void)
{
	mercury_rollback_disarm();
	if (has_handler)
		unregister_nmi_handler(NMI_LOCAL, "mercury");
	has_handler = false;
	note = NULL;
}

/*
 * In a machine that was put back: reads the note of its other life, and begins one for this life. Returns
 * true if the other life was watched.
 */
bool mercury_rollback_read(u64 message[16])
{
	bool watched = note->watched;

	memcpy(message, note->message, sizeof(note->message));
	memset(note, 0, sizeof(*note));
	return watched;
}

/*
 * Returns the signature of this death: those with the same callers have the same. A CPU that loops is
 * caught at any instruction of its loop, so a hang and a soft lockup are told by the name of the task.
 */
static u64 signature_of_death(u32 reason)
{
	u32 hash = jhash(current->comm, strnlen(current->comm, sizeof(current->comm)), reason);
	unsigned long callers[CALLERS];

	if (reason != MERCURY_ROLLBACK_REASON_HANG && !strstarts(note->message, "softlockup"))
		hash = jhash(callers, sizeof(*callers) * stack_trace_save(callers, CALLERS, 0), reason);
	/* Not 0, which stands for none. */
	return (u64)hash << 32 | BIT_ULL(32);
}

/* Asks the hypervisor; returns only if it refuses. */
static u32 go_back(u32 reason, const char *message)
{
	u64 argument = reason;
	unsigned long flags;
	u32 code;

	if (mercury_dma_missed())
		return MERCURY_CODE_SNAPSHOT_DEVICES;
	note->watched = mercury_watch_is_on();
	if (message)
		strscpy(note->message, message, sizeof(note->message));
	if (reason != MERCURY_ROLLBACK_REASON_COMMAND)
		argument |= signature_of_death(reason);
	local_irq_save(flags);
	code = mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_ROLLBACK, (void *)argument);
	local_irq_restore(flags);
	return code;
}

/*
 * Puts the machine back to its snapshot; returns only if there is none, or it cannot be done. In any
 * context. No timer of the watch stays set in a life that may know nothing of it.
 */
u32 mercury_rollback(u32 reason, const char *message)
{
	bool silenced;
	u32 code;

	if (!READ_ONCE(armed))
		return MERCURY_CODE_NO_SNAPSHOT;
	silenced = mercury_hpet_silence();
	code = go_back(reason, message);
	if (silenced)
		mercury_hpet_resume();
	if (code != MERCURY_CODE_NO_SNAPSHOT)
		pr_emerg("the machine was not put back to its snapshot: `mercury explain %s`\n",
			 mercury_code_name(code));
	return code;
}

/*
 * The kernel stops this CPU in an emergency. After a panic the CPU that panicked asks for a rollback soon,
 * unless a crash kernel comes before that. Returns true if this CPU must stay where the hypervisor can
 * fetch it.
 */
noinstr bool mercury_rollback_waits(void)
{
	bool crash_kernel, exact;

	if (!READ_ONCE(armed) || !READ_ONCE(oops_in_progress))
		return false;
	instrumentation_begin();
	crash_kernel = kexec_crash_loaded();
	exact = !mercury_dma_missed();
	instrumentation_end();
	if (!exact)
		return false;
	if (crash_kernel)
		mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_ROLLBACK,
				      (void *)(MERCURY_ROLLBACK_REASON_STOP | BIT_ULL(32)));
	return !crash_kernel && mercury_snapshot_call(MERCURY_SNAPSHOT_CALL_HOLD, NULL) == MERCURY_CODE_OK;
}
