/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Short functions that the switches of both vendors share, inlined into each, without a branch on the
 * vendor.
 */
#ifndef MERCURY_SWITCH_H
#define MERCURY_SWITCH_H

#include <asm/debugreg.h>
#include <asm/desc.h>
#include <asm/msr.h>

#include "attach.h"

/* DR7 with every breakpoint disabled; bit 10 reads as 1. */
#define DR7_DISARMED	0x400
#define DR7_ARMED	0xff

/* gate_svm.S */
asmlinkage u64 mercury_svm_enter(struct mercury_gate_block *area);
void mercury_svm_leave(void);

/* gate_vmx.S */
asmlinkage u64 mercury_vmx_enter(struct mercury_gate_block *area);
void mercury_vmx_leave(void);
void mercury_vmx_nmi(void);

/* The base address in the descriptor of TR or LDTR, which has 16 bytes. */
static __always_inline u64 system_base(u16 selector)
{
	const struct ldttss_desc *system;
	struct desc_ptr table;

	if (!(selector & ~SEGMENT_RPL_MASK))
		return 0;
	native_store_gdt(&table);
	system = (void *)(table.address + (selector & ~7));
	return system->base0 | system->base1 << 16 | (u32)system->base2 << 24 |
	       (u64)system->base3 << 32;
}

/* The base address in the descriptor of a selector that LAR accepted. */
static __always_inline u32 segment_base(u16 selector)
{
	struct desc_ptr table;
	const u8 *entry;
	u16 ldt;

	native_store_gdt(&table);
	if (selector & SEGMENT_TI_MASK) {
		asm volatile("sldt %0" : "=m" (ldt));
		table.address = system_base(ldt);
	}
	entry = (const u8 *)(table.address + (selector & ~7));
	return *(const u16 *)(entry + 2) | entry[4] << 16 | (u32)entry[7] << 24;
}

/*
 * Reads the descriptor of a selector; returns false if there is none. `attributes` makes the vendor's of
 * what LAR returns.
 */
static __always_inline bool
read_segment(struct mercury_segment *segment, u16 selector, u16 (*attributes)(u32 access))
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
	segment->attributes = attributes(access);
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

/* Reads the segments that both vendors need; returns the selector that could not be read, or -1. */
static __always_inline int
read_segments(struct mercury_inward *inward, u16 (*attributes)(u32 access))
{
	if (!read_segment(&inward->cs, selector_of(cs), attributes))
		return inward->cs.selector;
	if (!read_segment(&inward->ss, selector_of(ss), attributes))
		return inward->ss.selector;
	if (!read_segment(&inward->ds, selector_of(ds), attributes))
		return inward->ds.selector;
	if (!read_segment(&inward->es, selector_of(es), attributes))
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

/* Attaches this CPU by `native_call`; one that is attached already, says `mode`, stays so. */
static __always_inline u32
mercury_switch_on(struct mercury_cpu *m,
		  u32 (*native_call)(struct mercury_cpu *m, u32 operation, u64 argument),
		  u32 (*mode)(void))
{
	u64 start = rdtsc_ordered();
	u32 code = native_call(m, MERCURY_NATIVE_OP_ATTACH, 0);

	if (code == MERCURY_CODE_OK) {
		m->attach_ticks = rdtsc_ordered() - start;
		m->switched = true;
	} else if (code == MERCURY_CODE_VIRTUALIZATION_IN_USE &&
		   mode() == MERCURY_MODE_ATTACHED) {
		code = MERCURY_CODE_OK;
	}
	return code;
}

/* Detaches this CPU; one that is native already stays so. */
static __always_inline u32 mercury_switch_off(struct mercury_cpu *m)
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

/* Asks for the hypervisor beneath this CPU. */
static __always_inline u32 mercury_answered(void)
{
	u64 version;

	if (mercury_hypercall(MERCURY_HYPERCALL_PING, 0, 0, &version) != MERCURY_CODE_OK ||
	    version != MERCURY_ABI_VERSION)
		return MERCURY_MODE_NATIVE;
	return MERCURY_MODE_ATTACHED;
}

#endif /* MERCURY_SWITCH_H */
