// SPDX-License-Identifier: GPL-2.0-only
/*
 * The facts of a CPU and its state, read on that CPU: for `mercury doctor`, for the preflight before an
 * attach, and for the comparison before and after.
 */
#include <linux/cc_platform.h>
#include <linux/cpu.h>
#include <linux/ioport.h>
#include <linux/version.h>
#include <asm/cpufeature.h>
#include <asm/fpu/xcr.h>
#include <xen/xen.h>

#include "switch.h"

/* Results of arithmetic: they say nothing of the CPU. */
#define STATUS_FLAGS		(X86_EFLAGS_CF | X86_EFLAGS_PF | X86_EFLAGS_AF | X86_EFLAGS_ZF | \
				 X86_EFLAGS_SF | X86_EFLAGS_OF)
#define CPUID_1_ECX_HYPERVISOR	BIT(31)
#define CPUID_1_ECX_VMX		BIT(5)
#define BASIC_TRUE_CONTROLS	BIT_ULL(55)
/* In capability MSRs, bits of the upper half that say which controls may be 1. */
#define PRIMARY_MAY_SECONDARY	BIT_ULL(32 + 31)
#define PRIMARY_MAY_TERTIARY	BIT_ULL(32 + 17)
#define SECONDARY_MAY_EPT_VPID	(BIT_ULL(32 + 1) | BIT_ULL(32 + 5))
#define MSR_VMX_PROCBASED_CTLS3	0x492
/* Linux 6.1 has no name for this bit. */
#define CR4_FRED		BIT_ULL(32)
#define MSR_MTRR_PHYS_BASE_0	0x200
#define MSR_SMCA_BANK_0_CTL	0xc0002000
#define MSR_ISST_ADDR		0x6a8
#define MSR_XSS			0xda0
#define MSR_S_CET		0x6a2
#define MSR_TSC_RATIO_AMD	0xc0000104

/* MSRs that may be missing: where they go and which bit says that they could be read. */
static const struct {
	u32 msr;
	u32 offset;
	u64 readable;
} optional[] = {
#define OPTIONAL(number, field, bit) \
	{ number, offsetof(struct mercury_cpu_facts, field), MERCURY_READABLE_##bit }
	OPTIONAL(MSR_VM_CR, vm_cr, VM_CR),
	OPTIONAL(MSR_VM_HSAVE_PA, vm_hsave_pa, VM_HSAVE_PA),
	OPTIONAL(MSR_AMD64_SYSCFG, syscfg, SYSCFG),
	OPTIONAL(MSR_IA32_SPEC_CTRL, spec_ctrl, SPEC_CTRL),
	OPTIONAL(MSR_TSC_RATIO_AMD, tsc_ratio, TSC_RATIO),
	OPTIONAL(MSR_IA32_DEBUGCTLMSR, debugctl, DEBUGCTL),
	OPTIONAL(MSR_S_CET, s_cet, S_CET),
	OPTIONAL(MSR_ISST_ADDR, isst_addr, ISST_ADDR),
	OPTIONAL(MSR_XSS, xss, XSS),
	OPTIONAL(MSR_IA32_MCG_STATUS, mcg_status, MCG_STATUS),
	OPTIONAL(MSR_IA32_CR_PAT, pat, PAT),
	OPTIONAL(MSR_MTRRdefType, mtrr_def_type, MTRR),
	OPTIONAL(MSR_TSC_AUX, tsc_aux, TSC_AUX),
	OPTIONAL(MSR_SMCA_BANK_0_CTL, smca_ctl0, SMCA),
	OPTIONAL(MSR_K7_HWCR, hwcr, HWCR),
	OPTIONAL(MSR_AMD64_PATCH_LEVEL, microcode, MICROCODE),
	OPTIONAL(MSR_IA32_FEAT_CTL, feature_control, FEATURE_CONTROL),
	OPTIONAL(MSR_IA32_RTIT_CTL, rtit_ctl, RTIT_CTL),
	OPTIONAL(MSR_IA32_PEBS_ENABLE, pebs_enable, PEBS_ENABLE),
#undef OPTIONAL
};

/*
 * Ranges that firmware merely reserves do not count: AMD's hole below 1 TiB (HARDWARE A-14) would have the
 * nested map reach there at once, for nothing. If something is there nevertheless, a fault maps it.
 */
static int widen(struct resource *resource, void *end)
{
	if (resource->desc != IORES_DESC_RESERVED)
		*(u64 *)end = max_t(u64, *(u64 *)end, resource->end);
	return 0;
}

/* The highest address in use by RAM or devices. May sleep. */
u64 mercury_iomem_end(void)
{
	u64 end = 0;

	walk_iomem_res_desc(IORES_DESC_NONE, IORESOURCE_MEM, 0, -1, &end, widen);
	return end;
}

/* The leaf, or zeros where the CPU does not have it. */
static void read_leaf(struct mercury_cpuid_leaf *leaf, u32 number, u32 subleaf)
{
	memset(leaf, 0, sizeof(*leaf));
	if (cpuid_eax(number & 0xffff0000) < number)
		return;
	cpuid_count(number, subleaf, &leaf->eax, &leaf->ebx, &leaf->ecx, &leaf->edx);
}

static void read_leaves(struct mercury_cpu_facts *facts)
{
	read_leaf(&facts->cpuid_0, 0, 0);
	read_leaf(&facts->cpuid_1, 1, 0);
	read_leaf(&facts->cpuid_7_0, 7, 0);
	if (facts->cpuid_7_0.eax >= 1)
		read_leaf(&facts->cpuid_7_1, 7, 1);
	read_leaf(&facts->cpuid_d_1, 0xd, 1);
	/* The enabled features' size: changes with XCR0 and XSS, which are read themselves. */
	facts->cpuid_d_1.ebx = 0;
	if (facts->cpuid_1.ecx & CPUID_1_ECX_HYPERVISOR)
		read_leaf(&facts->cpuid_4000_0000, 0x40000000, 0);
	read_leaf(&facts->cpuid_8000_0000, 0x80000000, 0);
	read_leaf(&facts->cpuid_8000_0001, 0x80000001, 0);
	read_leaf(&facts->cpuid_8000_0008, 0x80000008, 0);
	read_leaf(&facts->cpuid_8000_000a, 0x8000000a, 0);
	read_leaf(&facts->cpuid_8000_001f, 0x8000001f, 0);
	read_leaf(&facts->cpuid_8000_0021, 0x80000021, 0);
	facts->apic_id = facts->cpuid_1.ebx >> 24;
}

static void read_registers(struct mercury_cpu_facts *facts)
{
	struct desc_ptr table;
	u16 selector;
	u32 limit;

	facts->cr0 = native_read_cr0();
	facts->cr3 = __native_read_cr3();
	facts->cr4 = native_read_cr4();
	if (facts->cr4 & X86_CR4_OSXSAVE)
		facts->xcr0 = xgetbv(XCR_XFEATURE_ENABLED_MASK);
	facts->dr6 = native_get_debugreg(6);
	facts->dr7 = native_get_debugreg(7);
	facts->rflags = native_save_fl() & ~STATUS_FLAGS;
	native_store_gdt(&table);
	facts->gdtr.base_virt = table.address;
	facts->gdtr.limit = table.size;
	store_idt(&table);
	facts->idtr.base_virt = table.address;
	facts->idtr.limit = table.size;
	store_ldt(selector);
	facts->ldtr = selector;
	facts->cs = selector_of(cs);
	facts->ss = selector_of(ss);
	store_tr(selector);
	facts->tr = selector;
	limit = 0;
	asm volatile("lsl %1, %0" : "+r" (limit) : "r" ((u32)selector) : "cc");
	facts->tr_limit = limit;
}

static u64 digest(u64 hash, u64 value)
{
	int i;

	for (i = 0; i < 64; i += 8)
		hash = (hash ^ ((value >> i) & 0xff)) * 0x100000001b3;
	return hash;
}

/* FNV-1a over all MTRRs. */
static u64 mtrr_digest(void)
{
	static const u32 fixed[] = {
		MSR_MTRRfix64K_00000, MSR_MTRRfix16K_80000, MSR_MTRRfix16K_A0000,
		MSR_MTRRfix4K_C0000, MSR_MTRRfix4K_C8000, MSR_MTRRfix4K_D0000,
		MSR_MTRRfix4K_D8000, MSR_MTRRfix4K_E0000, MSR_MTRRfix4K_E8000,
		MSR_MTRRfix4K_F0000, MSR_MTRRfix4K_F8000, MSR_MTRRdefType,
	};
	u64 hash = 0xcbf29ce484222325, capabilities, value;
	unsigned int i;

	if (rdmsrl_safe(MSR_MTRRcap, &capabilities))
		return 0;
	for (i = 0; i < ARRAY_SIZE(fixed); i++)
		if (!rdmsrl_safe(fixed[i], &value))
			hash = digest(hash, value);
	for (i = 0; i < 2 * (capabilities & 0xff); i++)
		if (!rdmsrl_safe(MSR_MTRR_PHYS_BASE_0 + i, &value))
			hash = digest(hash, value);
	return hash;
}

/* An MSR of VMX's capabilities; `err` collects failures. */
static int read_capability(int err, u32 msr, u64 *value)
{
	return rdmsrl_safe(msr, value) ? -EIO : err;
}

/* VMX's capabilities, as far as CPUID and the MSRs themselves promise that they are there. */
static int read_vmx(struct mercury_cpu_facts *facts)
{
	int err = read_capability(0, MSR_IA32_VMX_BASIC, &facts->vmx_basic);
	/* MSRs of the exact controls are in the same order. */
	u32 controls = facts->vmx_basic & BASIC_TRUE_CONTROLS ? MSR_IA32_VMX_TRUE_PINBASED_CTLS :
								MSR_IA32_VMX_PINBASED_CTLS;

	err = read_capability(err, controls, &facts->vmx_pin_controls);
	err = read_capability(err, controls + 1, &facts->vmx_primary_controls);
	err = read_capability(err, controls + 2, &facts->vmx_exit_controls);
	err = read_capability(err, controls + 3, &facts->vmx_entry_controls);
	err = read_capability(err, MSR_IA32_VMX_MISC, &facts->vmx_misc);
	err = read_capability(err, MSR_IA32_VMX_CR0_FIXED0, &facts->vmx_cr0_fixed0);
	err = read_capability(err, MSR_IA32_VMX_CR0_FIXED1, &facts->vmx_cr0_fixed1);
	err = read_capability(err, MSR_IA32_VMX_CR4_FIXED0, &facts->vmx_cr4_fixed0);
	err = read_capability(err, MSR_IA32_VMX_CR4_FIXED1, &facts->vmx_cr4_fixed1);
	if (facts->vmx_primary_controls & PRIMARY_MAY_SECONDARY)
		err = read_capability(err, MSR_IA32_VMX_PROCBASED_CTLS2,
				      &facts->vmx_secondary_controls);
	if (facts->vmx_primary_controls & PRIMARY_MAY_TERTIARY)
		err = read_capability(err, MSR_VMX_PROCBASED_CTLS3, &facts->vmx_tertiary_controls);
	if (facts->vmx_secondary_controls & SECONDARY_MAY_EPT_VPID)
		err = read_capability(err, MSR_IA32_VMX_EPT_VPID_CAP, &facts->vmx_ept_vpid);
	return err;
}

/* MSRs by which programs enter the kernel. */
static void read_entries(struct mercury_cpu_facts *facts)
{
	rdmsrl_safe(MSR_STAR, &facts->star);
	rdmsrl_safe(MSR_LSTAR, &facts->lstar);
	rdmsrl_safe(MSR_CSTAR, &facts->cstar);
	rdmsrl_safe(MSR_SYSCALL_MASK, &facts->sfmask);
	rdmsrl_safe(MSR_IA32_SYSENTER_CS, &facts->sysenter_cs);
	rdmsrl_safe(MSR_IA32_SYSENTER_ESP, &facts->sysenter_esp);
	rdmsrl_safe(MSR_IA32_SYSENTER_EIP, &facts->sysenter_eip);
}

static void read_msrs(struct mercury_cpu_facts *facts)
{
	unsigned int i;

	rdmsrl_safe(MSR_EFER, &facts->efer);
	rdmsrl_safe(MSR_GS_BASE, &facts->gs_base);
	rdmsrl_safe(MSR_IA32_APICBASE, &facts->apic_base);
	for (i = 0; i < ARRAY_SIZE(optional); i++) {
		u64 *field = (void *)facts + optional[i].offset;

		if (!rdmsrl_safe(optional[i].msr, field))
			facts->readable |= optional[i].readable;
		else
			*field = 0;
	}
	facts->mtrr_digest = mtrr_digest();
	if (facts->cpuid_1.ecx & CPUID_1_ECX_VMX && !read_vmx(facts))
		facts->readable |= MERCURY_READABLE_VMX;
}

static u64 system_bits(void)
{
	u64 bits = 0;

	if (boot_cpu_has(X86_FEATURE_PTI))
		bits |= MERCURY_SYSTEM_PTI;
	if (cc_platform_has(CC_ATTR_HOST_MEM_ENCRYPT))
		bits |= MERCURY_SYSTEM_SME;
	if (xen_domain())
		bits |= MERCURY_SYSTEM_PRIVILEGED_LAYER;
#ifdef X86_FEATURE_INVLPGB
	if (boot_cpu_has(X86_FEATURE_INVLPGB))
		bits |= MERCURY_SYSTEM_INVLPGB;
#endif
#ifdef X86_FEATURE_ERAPS
	if (boot_cpu_has(X86_FEATURE_ERAPS))
		bits |= MERCURY_SYSTEM_ERAPS;
#endif
	if (READ_ONCE(mercury.kvm_may))
		bits |= MERCURY_SYSTEM_KVM_MAY;
	if (cpu_mitigations_off())
		bits |= MERCURY_SYSTEM_MITIGATIONS_OFF;
	return bits;
}

/* Fills everything, or the registers alone, on this CPU, which must not change meanwhile. */
void mercury_read_facts(struct mercury_cpu_facts *facts, bool registers_alone)
{
	memset(facts, 0, sizeof(*facts));
	facts->header.size = sizeof(*facts);
	facts->header.version = MERCURY_ABI_VERSION;
	facts->cpu = smp_processor_id();
	read_registers(facts);
	read_entries(facts);
	if (registers_alone)
		return;
	facts->system = system_bits();
	facts->iomem_end_phys = mercury.iomem_end;
	facts->kernel_version = LINUX_VERSION_MAJOR << 16 | LINUX_VERSION_PATCHLEVEL << 8;
	read_leaves(facts);
	read_msrs(facts);
	mercury_fault_facts(facts);
}

/*
 * The gate returns far and by frames of its own, and the hypervisor's IDT has gates. Neither goes together
 * with FRED or a supervisor shadow stack. The vendor decides about the other bits of S_CET.
 */
static u32 can_return(u64 detail[2])
{
	u64 cr4 = native_read_cr4(), s_cet = 0;

	if (cr4 & CR4_FRED) {
		detail[0] = CR4_FRED;
		detail[1] = cr4;
		return MERCURY_CODE_FRED;
	}
	if (cr4 & X86_CR4_CET)
		rdmsrl_safe(MSR_S_CET, &s_cet);
	if (s_cet & ~mercury_vendor->s_cet) {
		detail[0] = s_cet;
		detail[1] = cr4;
		return MERCURY_CODE_SUPERVISOR_CET;
	}
	return MERCURY_CODE_OK;
}

/* Checks that this CPU can pass the gate at all. All other checks are the hypervisor's preflight. */
u32 mercury_can_enter(u64 detail[2])
{
	u32 code;

	detail[0] = 0;
	detail[1] = 0;
	if (!mercury_vendor)
		return MERCURY_CODE_VENDOR_UNSUPPORTED;
	if (system_bits() & MERCURY_SYSTEM_PRIVILEGED_LAYER)
		return MERCURY_CODE_PRIVILEGED_LAYER;
	if (system_bits() & MERCURY_SYSTEM_SME)
		return MERCURY_CODE_MEMORY_ENCRYPTION;
	code = mercury_vendor->can_enter(detail);
	return code == MERCURY_CODE_OK ? can_return(detail) : code;
}
