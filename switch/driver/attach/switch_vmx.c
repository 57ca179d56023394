// SPDX-License-Identifier: GPL-2.0-only
/*
 * The switch on Intel, on one CPU, by that CPU, with interrupts off.
 *
 * Everything here may run in an NMI and is short: no lock, no allocation, no message. The gate block is
 * touched while the CPU is native only: it is hidden from a CPU that is attached.
 *
 * CR4.VMXE is set while a CPU is attached, in the kernel's own view of CR4 too: KVM sees that the
 * hardware is taken, and a crash takes it out with VMXOFF, which is a detach. VMXON and VMXOFF are the
 * hypervisor's.
 */
#include <linux/kprobes.h>
#include <linux/smp.h>
#include <asm/msr.h>
#include <asm/perf_event.h>
#include <asm/tlbflush.h>
#include <asm/trapnr.h>

#include "switch.h"

#define CPUID_1_ECX_VMX		BIT(5)
#define FEATURE_CONTROL_LOCK	BIT(0)
#define FEATURE_CONTROL_VMX	BIT(2)
#define VMX_BASIC_REVISION	0x7fffffff
/* Branch tracking. The gate clears CR4.CET before its first indirect branch, and lands on ENDBR. */
#define S_CET_ENDBR_EN		BIT_ULL(2)
/* The kernel's and the hypervisor's selectors are the same. */
#define CODE_DESCRIPTOR		0x00af9b000000ffff
#define DATA_DESCRIPTOR		0x00cf93000000ffff

/* The processor has IA32_PEBS_ENABLE. */
static bool has_pebs;

/* Sets VMXE. Processor trace of old processors must not be switched on meanwhile. */
static __always_inline void hold(struct mercury_cpu *m)
{
	intel_pt_handle_vmx(1);
	m->vmxe = true;
	cr4_update_irqsoff(X86_CR4_VMXE, 0);
}

/* Clears it, on a native CPU: one that is attached would never leave by itself again. */
static __always_inline void release(struct mercury_cpu *m)
{
	if (!m->vmxe)
		return;
	cr4_update_irqsoff(0, X86_CR4_VMXE);
	m->vmxe = false;
	intel_pt_handle_vmx(0);
}

/*
 * The mode of this CPU, asked of it, if it can be attached at all. One that has left by itself still
 * has VMXE.
 */
static noinstr u32 mercury_vmx_mode(void)
{
	struct mercury_cpu *m = per_cpu_ptr(&mercury_cpus, raw_smp_processor_id());

	if (!m->vmxe)
		return MERCURY_MODE_NATIVE;
	if (mercury_answered() == MERCURY_MODE_ATTACHED)
		return MERCURY_MODE_ATTACHED;
	release(m);
	return MERCURY_MODE_NATIVE;
}

/* Intel's control structure has what LAR returns. */
static __always_inline u16 attributes(u32 access)
{
	return access >> 8 & 0xf0ff;
}

/* Reads the state that the gate's way in does not; returns the selector that could not be read, or -1. */
static __always_inline int capture(struct mercury_inward *inward)
{
	int unreadable = read_segments(inward, attributes);
	u16 ldtr, tr;

	asm volatile("sldt %0" : "=m" (ldtr));
	asm volatile("str %0" : "=m" (tr));
	if (unreadable >= 0)
		return unreadable;
	if (!read_segment(&inward->fs, selector_of(fs), attributes))
		return inward->fs.selector;
	if (!read_segment(&inward->gs, selector_of(gs), attributes))
		return inward->gs.selector;
	if (!read_segment(&inward->ldtr, ldtr, attributes))
		return ldtr;
	if (!read_segment(&inward->tr, tr, attributes))
		return tr;
	inward->ldtr_base_virt = system_base(ldtr);
	inward->tr_base_virt = system_base(tr);
	return -1;
}

/*
 * Returns true if the CPU stores samples or branches in memory now (PEBS, BTS). It would do so through the
 * hypervisor's page tables too, which do not map the buffer. Every operation asks: perf may have come since
 * the last one.
 */
static noinstr bool stores_records(u64 detail[2])
{
	detail[0] = has_pebs ? __rdmsr(MSR_IA32_PEBS_ENABLE) : 0;
	detail[1] = __rdmsr(MSR_IA32_DEBUGCTLMSR);
	return detail[0] || detail[1] & (DEBUGCTLMSR_TR | DEBUGCTLMSR_BTS);
}

/*
 * Performs an operation of the hypervisor on this CPU, which must be native: through the gate and
 * back, natively or, if the operation was to attach and succeeded, as a guest.
 */
static noinstr u32 mercury_vmx_native_call(struct mercury_cpu *m, u32 operation, u64 argument)
{
	bool attach = operation == MERCURY_NATIVE_OP_ATTACH;
	struct mercury_gate_block *gate = m->gate;
	unsigned long dr7;
	int unreadable;
	u32 code;

	m->detail[0] = 0;
	m->detail[1] = 0;
	if (m->vmxe && mercury_answered() == MERCURY_MODE_NATIVE)
		release(m);
	if (native_read_cr4() & X86_CR4_VMXE)
		return MERCURY_CODE_VIRTUALIZATION_IN_USE;
	if (native_save_fl() & X86_EFLAGS_TF)
		return MERCURY_CODE_SINGLE_STEP;
	if (stores_records(m->detail))
		return MERCURY_CODE_DEBUG_STORE;
	m->detail[1] = 0;
	unreadable = capture(&gate->inward);
	if (unreadable >= 0) {
		m->detail[0] = unreadable;
		return MERCURY_CODE_SEGMENT_UNREADABLE;
	}
	gate->operation = operation;
	gate->argument = argument;
	if (attach && mercury_fault(MERCURY_FAULT_POINT_BEFORE_SVME))
		return MERCURY_CODE_INJECTED_FAULT;

	dr7 = disarm_breakpoints();
	if (attach)
		hold(m);
	if (attach && mercury_fault(MERCURY_FAULT_POINT_AFTER_SVME)) {
		code = MERCURY_CODE_INJECTED_FAULT;
	} else {
		code = mercury_vmx_enter(gate);
		if (code != MERCURY_CODE_OK) {
			m->detail[0] = gate->detail[0];
			m->detail[1] = gate->detail[1];
		}
	}
	if (attach && code != MERCURY_CODE_OK)
		release(m);
	rearm_breakpoints(dr7);
	return code;
}

static noinstr u32 mercury_vmx_attach_cpu(struct mercury_cpu *m)
{
	return mercury_switch_on(m, mercury_vmx_native_call, mercury_vmx_mode);
}

static noinstr u32 mercury_vmx_detach_cpu(struct mercury_cpu *m)
{
	if (!m->vmxe)
		return MERCURY_CODE_OK;
	mercury_switch_off(m);
	release(m);
	return MERCURY_CODE_OK;
}

/* Checks that this CPU can pass the gate at all. All other checks are the hypervisor's preflight. */
static u32 can_enter(u64 detail[2])
{
	u64 wanted = FEATURE_CONTROL_LOCK | FEATURE_CONTROL_VMX, value;

	if (!(cpuid_ecx(1) & CPUID_1_ECX_VMX))
		return MERCURY_CODE_NO_VMX;
	if (rdmsrl_safe(MSR_IA32_FEAT_CTL, &value))
		return MERCURY_CODE_FACT_UNREADABLE;
	detail[0] = value & FEATURE_CONTROL_LOCK;
	detail[1] = value;
	if ((value & wanted) != wanted)
		return MERCURY_CODE_VMX_DISABLED;
	has_pebs = !rdmsrl_safe(MSR_IA32_PEBS_ENABLE, &value);
	detail[0] = __rdmsr(MSR_EFER);
	detail[1] = native_read_cr4();
	if (detail[1] & X86_CR4_VMXE)
		return MERCURY_CODE_VIRTUALIZATION_IN_USE;
	detail[0] = 0;
	detail[1] = 0;
	return MERCURY_CODE_OK;
}

/* VMXE is set while attached, and shows. */
static void hide(struct mercury_cpu_facts *facts)
{
	facts->cr4 &= ~(u64)X86_CR4_VMXE;
}

/*
 * Writes the revision into the VMXON region, a page that the hypervisor does not map. Writes the tables
 * that the gate and NMIs on the way need into a page that both address spaces map.
 */
static void place(struct mercury_gate_block *gate)
{
	u32 *region = (void *)gate + MERCURY_AREA_PAGE_PROCESSOR * PAGE_SIZE;
	u64 handler = (u64)mercury_vmx_nmi;
	struct mercury_nmi_block *nmi = &gate->nmi;

	*region = __rdmsr(MSR_IA32_VMX_BASIC) & VMX_BASIC_REVISION;
	nmi->handler_virt = handler;
	nmi->gdt[__KERNEL_CS / 8] = CODE_DESCRIPTOR;
	nmi->gdt[__KERNEL_DS / 8] = DATA_DESCRIPTOR;
	nmi->gdtr.limit = sizeof(nmi->gdt) - 1;
	nmi->gdtr.base_virt = (u64)nmi->gdt;
	/* An interrupt gate without an interrupt stack. */
	nmi->idt[2 * X86_TRAP_NMI] = (handler & 0xffff) | (u64)__KERNEL_CS << 16 | 0x8e00ULL << 32 |
				   (handler >> 16 & 0xffff) << 48;
	nmi->idt[2 * X86_TRAP_NMI + 1] = handler >> 32;
	nmi->idtr.limit = sizeof(nmi->idt) - 1;
	nmi->idtr.base_virt = (u64)nmi->idt;
}

const struct mercury_vendor mercury_vmx = {
	.number = MERCURY_VENDOR_INTEL,
	.kvm = "kvm_intel",
	.what = "VMX",
	.host_cr4 = X86_CR4_VMXE,
	.s_cet = S_CET_ENDBR_EN,
	.gate = mercury_vmx_enter,
	.leave = mercury_vmx_leave,
	.can_enter = can_enter,
	.mode = mercury_vmx_mode,
	.native_call = mercury_vmx_native_call,
	.attach_cpu = mercury_vmx_attach_cpu,
	.detach_cpu = mercury_vmx_detach_cpu,
	.hide = hide,
	.place = place,
};
