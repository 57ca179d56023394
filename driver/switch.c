// SPDX-License-Identifier: GPL-2.0-only
/*
 * The switch, on one CPU, by that CPU, with interrupts off.
 *
 * Everything here may run in an NMI and is short: no lock, no allocation, no message, nothing that a
 * probe or the tracer can hook (noinstr). The gate block is touched while the CPU is native only: it
 * is hidden from a CPU that is attached.
 */
#include <linux/kprobes.h>
#include <asm/debugreg.h>
#include <asm/desc.h>
#include <asm/msr.h>

#include "mercury.h"

/* DR7 with every breakpoint disabled; bit 10 reads as 1. */
#define DR7_DISARMED	0x400
#define DR7_ARMED	0xff

static __always_inline bool svm_enabled(void)
{
	return __rdmsr(MSR_EFER) & EFER_SVME;
}

/* The mode of this CPU, asked of it: the hypervisor never hides EFER.SVME. */
noinstr u32 mercury_mode(void)
{
	u64 version;

	if (!svm_enabled())
		return MERCURY_MODE_NATIVE;
	if (mercury_hypercall(MERCURY_HYPERCALL_PING, 0, 0, &version) != MERCURY_CODE_OK ||
	    version != MERCURY_ABI_VERSION)
		return MERCURY_MODE_NATIVE;
	return MERCURY_MODE_ATTACHED;
}

/* The base address in the descriptor of a selector that LAR accepted. */
static __always_inline u32 segment_base(u16 selector)
{
	struct desc_ptr table;
	const u8 *entry;
	u16 ldt;

	native_store_gdt(&table);
	if (selector & SEGMENT_TI_MASK) {
		const struct ldttss_desc *system;

		asm volatile("sldt %0" : "=m" (ldt));
		system = (void *)(table.address + (ldt & ~7));
		table.address = system->base0 | system->base1 << 16 | (u32)system->base2 << 24 |
				(u64)system->base3 << 32;
	}
	entry = (const u8 *)(table.address + (selector & ~7));
	return *(const u16 *)(entry + 2) | entry[4] << 16 | (u32)entry[7] << 24;
}

/* What the descriptor tables say of a selector; false if they say nothing. */
static __always_inline bool read_segment(struct mercury_segment *segment, u16 selector)
{
	u32 access, limit;
	bool readable;

	segment->selector = selector;
	segment->attributes = 0;
	segment->limit = 0;
	segment->base = 0;
	if (!(selector & ~SEGMENT_RPL_MASK))
		return true;
	asm volatile("lar %[selector], %[access]\n\t"
		     "jnz 1f\n\t"
		     "lsl %[selector], %[limit]\n"
		     "1:\n\t"
		     "setz %[readable]"
		     : [access] "=&r" (access), [limit] "=&r" (limit), [readable] "=&r" (readable)
		     : [selector] "r" ((u32)selector)
		     : "cc");
	if (!readable)
		return false;
	segment->attributes = (access >> 8) & 0xf0ff;
	segment->limit = limit;
	segment->base = segment_base(selector);
	return true;
}

#define selector_of(register)						\
({									\
	u16 _selector;							\
									\
	asm volatile("mov %%" #register ", %0" : "=r" (_selector));	\
	_selector;							\
})

/* Fills what the gate's way in does not; returns the selector that could not be read, or -1. */
static __always_inline int capture(struct mercury_inward *inward)
{
	inward->vm_hsave_pa = __rdmsr(MSR_VM_HSAVE_PA);
	if (!read_segment(&inward->cs, selector_of(cs)))
		return inward->cs.selector;
	if (!read_segment(&inward->ss, selector_of(ss)))
		return inward->ss.selector;
	if (!read_segment(&inward->ds, selector_of(ds)))
		return inward->ds.selector;
	if (!read_segment(&inward->es, selector_of(es)))
		return inward->es.selector;
	return -1;
}

static __always_inline unsigned long disarm_breakpoints(void)
{
	unsigned long dr7 = native_get_debugreg(7);

	if (dr7 & DR7_ARMED)
		native_set_debugreg(7, DR7_DISARMED);
	return dr7;
}

static __always_inline void rearm_breakpoints(unsigned long dr7)
{
	if (dr7 & DR7_ARMED)
		native_set_debugreg(7, dr7);
}

/*
 * Performs an operation of the hypervisor on this CPU, which must be native: through the gate and
 * back, natively or, if the operation was to attach and succeeded, as a guest. The gate clears SVME
 * on every native way back.
 */
noinstr u32 mercury_native_call(struct mercury_cpu *m, u32 operation, u64 argument)
{
	u64 efer = __rdmsr(MSR_EFER);
	struct mercury_gate_block *gate = m->gate;
	unsigned long dr7;
	int unreadable;
	u32 code;

	m->detail[0] = 0;
	m->detail[1] = 0;
	if (efer & EFER_SVME)
		return MERCURY_CODE_VIRTUALIZATION_IN_USE;
	if (native_save_fl() & X86_EFLAGS_TF)
		return MERCURY_CODE_SINGLE_STEP;
	unreadable = capture(&gate->inward);
	if (unreadable >= 0) {
		m->detail[0] = unreadable;
		return MERCURY_CODE_SEGMENT_UNREADABLE;
	}
	gate->operation = operation;
	gate->argument = argument;
	if (operation == MERCURY_NATIVE_OP_ATTACH && mercury_fault(MERCURY_FAULT_POINT_BEFORE_SVME))
		return MERCURY_CODE_INJECTED_FAULT;

	dr7 = disarm_breakpoints();
	native_wrmsr(MSR_EFER, (u32)efer | EFER_SVME, efer >> 32);
	if (operation == MERCURY_NATIVE_OP_ATTACH && mercury_fault(MERCURY_FAULT_POINT_AFTER_SVME)) {
		native_wrmsr(MSR_EFER, (u32)efer, efer >> 32);
		code = MERCURY_CODE_INJECTED_FAULT;
	} else {
		code = mercury_gate_enter(gate);
		if (code != MERCURY_CODE_OK) {
			m->detail[0] = gate->detail[0];
			m->detail[1] = gate->detail[1];
		}
	}
	rearm_breakpoints(dr7);
	return code;
}

/* Attaches this CPU; one that is attached already stays so. */
noinstr u32 mercury_attach_cpu(struct mercury_cpu *m)
{
	u64 start = rdtsc_ordered();
	u32 code = mercury_native_call(m, MERCURY_NATIVE_OP_ATTACH, 0);

	if (code == MERCURY_CODE_OK) {
		m->attach_ticks = rdtsc_ordered() - start;
		m->switched = true;
	} else if (code == MERCURY_CODE_VIRTUALIZATION_IN_USE &&
		   mercury_mode() == MERCURY_MODE_ATTACHED) {
		code = MERCURY_CODE_OK;
	}
	return code;
}

/* Detaches this CPU; one that is native already stays so. */
noinstr u32 mercury_detach_cpu(struct mercury_cpu *m)
{
	u64 start = rdtsc_ordered(), unused;
	unsigned long dr7 = disarm_breakpoints();
	u64 code = mercury_hypercall(MERCURY_HYPERCALL_DETACH, 0, 0, &unused);

	rearm_breakpoints(dr7);
	if (code == MERCURY_CODE_OK) {
		m->detach_ticks = rdtsc_ordered() - start;
		m->switched = true;
	}
	return MERCURY_CODE_OK;
}
