// SPDX-License-Identifier: GPL-2.0-only
/*
 * The switch on AMD, on one CPU, by that CPU, with interrupts off.
 *
 * Everything here may run in an NMI and is short: no lock, no allocation, no message, nothing that a
 * probe or the tracer can hook (noinstr). The gate block is touched while the CPU is native only: it
 * is hidden from a CPU that is attached.
 */
#include <linux/kprobes.h>
#include <asm/msr.h>

#include "switch.h"

#define CPUID_80000001_ECX_SVM	BIT(2)
#define CPUID_8000000A_EDX_NP	BIT(0)
#define VM_CR_SVMDIS		BIT(4)

/* Returns true if SVM is on, and its user does not share it. */
static __always_inline bool in_use(u64 efer)
{
	return efer & MERCURY_EFER_ATTACHED ||
	       (efer & EFER_SVME && !READ_ONCE(mercury.kvm_may));
}

/* The mode of this CPU, asked of it. */
static noinstr u32 mercury_svm_mode(void)
{
	return mercury_ask_efer() & MERCURY_EFER_ATTACHED ? MERCURY_MODE_ATTACHED : MERCURY_MODE_NATIVE;
}

/* AMD's control block has AVL, L, D/B and G beside the other bits. */
static __always_inline u16 attributes(u32 access)
{
	return (access >> 8 & 0xff) | (access >> 12 & 0xf00);
}

/*
 * Performs an operation of the hypervisor on this CPU, which must be native: through the gate and
 * back, natively or, if the operation was to attach and succeeded, as a guest. The gate clears SVME
 * on every native way back, unless it was set before.
 */
static noinstr u32 mercury_svm_native_call(struct mercury_cpu *m, u32 operation, u64 argument)
{
	u64 efer = mercury_ask_efer();
	struct mercury_gate_block *gate = m->gate;
	unsigned long dr7;
	int unreadable;
	u32 code;

	m->detail[0] = 0;
	m->detail[1] = 0;
	if (in_use(efer))
		return MERCURY_CODE_VIRTUALIZATION_IN_USE;
	if (native_save_fl() & X86_EFLAGS_TF)
		return MERCURY_CODE_SINGLE_STEP;
	gate->inward.vm_hsave_pa = __rdmsr(MSR_VM_HSAVE_PA);
	unreadable = read_segments(&gate->inward, attributes);
	if (unreadable >= 0) {
		m->detail[0] = unreadable;
		return MERCURY_CODE_SEGMENT_UNREADABLE;
	}
	gate->inward.efer = efer;
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
		code = mercury_svm_enter(gate);
		if (code != MERCURY_CODE_OK) {
			m->detail[0] = gate->detail[0];
			m->detail[1] = gate->detail[1];
		}
	}
	rearm_breakpoints(dr7);
	return code;
}

static noinstr u32 mercury_svm_attach_cpu(struct mercury_cpu *m)
{
	return mercury_switch_on(m, mercury_svm_native_call, mercury_svm_mode);
}

static noinstr u32 mercury_svm_detach_cpu(struct mercury_cpu *m)
{
	return mercury_switch_off(m);
}

/* Checks that this CPU can pass the gate at all. All other checks are the hypervisor's preflight. */
static u32 can_enter(u64 detail[2])
{
	u64 value;

	if (cpuid_eax(0x80000000) < 0x8000000a ||
	    !(cpuid_ecx(0x80000001) & CPUID_80000001_ECX_SVM))
		return MERCURY_CODE_NO_SVM;
	if (rdmsrl_safe(MSR_VM_CR, &value))
		return MERCURY_CODE_FACT_UNREADABLE;
	detail[0] = value;
	if (value & VM_CR_SVMDIS)
		return MERCURY_CODE_SVM_DISABLED;
	value = mercury_ask_efer();
	detail[0] = value;
	if (in_use(value))
		return MERCURY_CODE_VIRTUALIZATION_IN_USE;
	detail[0] = cpuid_edx(0x8000000a);
	if (!(detail[0] & CPUID_8000000A_EDX_NP))
		return MERCURY_CODE_NO_NESTED_PAGING;
	detail[0] = 0;
	return MERCURY_CODE_OK;
}

/* SVME is set while attached, and shows, unless KVM may have a say in it. */
static void hide(struct mercury_cpu_facts *facts)
{
	if (!READ_ONCE(mercury.kvm_may))
		facts->efer &= ~(u64)EFER_SVME;
}

const struct mercury_vendor mercury_svm = {
	.number = MERCURY_VENDOR_AMD,
	.shares = true,
	.kvm = "kvm_amd",
	.what = "SVM",
	.gate = mercury_svm_enter,
	.leave = mercury_svm_leave,
	.can_enter = can_enter,
	.mode = mercury_svm_mode,
	.native_call = mercury_svm_native_call,
	.attach_cpu = mercury_svm_attach_cpu,
	.detach_cpu = mercury_svm_detach_cpu,
	.hide = hide,
};
