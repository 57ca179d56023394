// SPDX-License-Identifier: GPL-2.0-only
/*
 * The state of a CPU that is not in memory: saving and loading it. All functions run on the CPU itself,
 * with interrupts off, while no other task can run.
 *
 * A machine goes on with the same kernel on the same processors. State that the kernel sets once at boot is
 * there already. Saved is state that differs between two boots or between two moments.
 */
#define pr_fmt(fmt) "mercury: " fmt

#include <linux/bitmap.h>
#include <linux/gfp.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <asm/apic.h>
#include <asm/debugreg.h>
#include <asm/desc.h>
#include <asm/fpu/xcr.h>
#include <asm/msr.h>

#include "snapshot.h"

/* The factor of the TSC of virtual machines; other kernels give it other names. */
#define TSC_RATIO		0xc0000104
/* The end of the MSRs that only KVM uses. Some that only Intel's processors have follow. */
#define KVMS_END		3
#define UNUSED_END		(boot_cpu_data.x86_vendor == X86_VENDOR_INTEL ? KVMS_END : 18)

/* MSRs, in the order in which they are written; one that a processor lacks is skipped. */
static const u32 kept_msrs[] = {
	MSR_EFER,
	/*
	 * MSRs that only KVM uses, on AMD; Intel's HWP_REQUEST_PKG, prefetchers, frequency of the uncore, and
	 * performance counters
	 */
	MSR_VM_HSAVE_PA, TSC_RATIO, 0x00000772, 0x000001a4, 0x00000620,
	0x000000c1, 0x000000c2, 0x000000c3, 0x000000c4, 0x000000c5, 0x000000c6, 0x000000c7, 0x000000c8,
	0x00000309, 0x0000030a, 0x0000030b, 0x0000030c,
	MSR_STAR, MSR_LSTAR, MSR_CSTAR, MSR_SYSCALL_MASK,
	MSR_IA32_SYSENTER_CS, MSR_IA32_SYSENTER_ESP, MSR_IA32_SYSENTER_EIP,
	MSR_IA32_CR_PAT, MSR_TSC_AUX, MSR_IA32_MISC_ENABLE, MSR_IA32_SPEC_CTRL,
	/* MSR_IA32_XSS, MSR_IA32_XFD, MSR_IA32_XFD_ERR */
	0x00000da0, 0x000001c4, 0x000001c5,
	/* CET: U_CET, PL3_SSP, then S_CET, PL0_SSP, the table of shadow stacks; PKRS */
	0x000006a0, 0x000006a7, 0x000006a2, 0x000006a4, 0x000006a8, 0x000006e1,
	/* AMD's virtual SPEC_CTRL, load-store and decode configuration; Intel's TSX_CTRL, MCU_OPT_CTRL */
	0xc001011f, 0xc0011020, 0xc0011029, 0x00000122, 0x00000123,
	/* UMWAIT_CONTROL, EPB, HWP_REQUEST, MISC_FEATURES_ENABLES, PASID, PQR_ASSOC */
	0x000000e1, 0x000001b0, 0x00000774, 0x00000140, 0x00000d93, 0x00000c8f,
	/*
	 * KVM's clock, steal time, page faults and ends of interrupts: beneath KVM they are addresses. DS_AREA;
	 * AMD's boost (HWCR)
	 */
	0x4b564d00, 0x4b564d01, 0x4b564d02, 0x4b564d03, 0x4b564d04, 0x00000600, MSR_K7_HWCR,
	/* Performance counters of AMD's. The MSRs that start counters come last. */
	0xc0010201, 0xc0010203, 0xc0010205, 0xc0010207, 0xc0010209, 0xc001020b,
	0x00000186, 0x00000187, 0x00000188, 0x00000189, 0x0000018a, 0x0000018b, 0x0000018c, 0x0000018d,
	0xc0010200, 0xc0010202, 0xc0010204, 0xc0010206, 0xc0010208, 0xc001020a,
	0x0000038d, 0x0000038f, 0xc0000301,
	/*
	 * AMD's sampling of instructions, fetched and executed (IBS). The local APIC's entries for it are set
	 * once at boot.
	 */
	0xc0011030, 0xc0011033,
	MSR_IA32_DEBUGCTLMSR,
};

/* Names of MSRs that not every kernel has: resource control, power limits, AMD's performance requests. */
#define L3_QOS_CFG		0x00000c81
#define L2_QOS_CFG		0x00000c82
#define L3_MASKS		0x00000c90
#define L2_MASKS		0x00000d10
#define MBA_THROTTLES		0x00000d50
#define AMD_MBA_LIMITS		0xc0000200
#define AMD_SMBA_LIMITS		0xc0000280
#define AMD_EVENT_CFG		0xc0000400
#define PLATFORM_POWER_LIMIT	0x0000065c
#define CPUID_RESOURCES		0x00000010
#define CPUID_AMD_RESOURCES	0x80000020
#define AMD_HAS_EVENT_CFG	BIT(3)

/* MSRs that only some processors have, in rows of a length that CPUID tells. */
#define BANKED_MAX		640

static u32 banked_msrs[BANKED_MAX];
static unsigned int banked_count;

/* Registers of the local APIC that are kept, by their offset in xAPIC mode. */
static const u16 kept_apic[] = {
	APIC_SPIV, APIC_TASKPRI, APIC_LVTTHMR, APIC_LVTPC, APIC_LVT0, APIC_LVT1, APIC_LVTERR, APIC_LVTT,
	APIC_TDCR, APIC_TMICT,
};

#define APIC_VECTOR_WORDS	8
/* A timer that was running fires so many ticks after the machine has been brought back. */
#define TIMER_SOON		2000
#define TIMER_SOON_TSC		100000

struct mercury_cpu_state {
	/* First: mercury_resume reads it. */
	struct mercury_saved_cpu saved;
	u64 msr[ARRAY_SIZE(kept_msrs)];
	DECLARE_BITMAP(has_msr, ARRAY_SIZE(kept_msrs));
	u64 banked[BANKED_MAX];
	DECLARE_BITMAP(has_banked, BANKED_MAX);
	unsigned long dr[4], dr6, dr7;
	u16 ldt;
	u64 xcr0;
	u32 apic[ARRAY_SIZE(kept_apic)];
	u32 apic_ldr, apic_dfr;
	bool has_deadline;
	/* Interrupts that were pending. */
	u32 requests[APIC_VECTOR_WORDS];
	u32 xsave_size;
};

static DEFINE_PER_CPU(struct mercury_cpu_state *, states);

/* The kernel's exceptions, and interrupts without a handler: for mercury_requests_drain(). */
static gate_desc drain_table[IDT_ENTRIES] __aligned(PAGE_SIZE);

/* Interrupts that one CPU has in hand at most: two of each vector. */
#define DRAIN_MAX		512

bool mercury_x2apic(void)
{
	return __rdmsr(MSR_IA32_APICBASE) & X2APIC_ENABLE;
}

static u32 apic_get(u32 offset)
{
	if (mercury_x2apic())
		return __rdmsr(APIC_BASE_MSR + (offset >> 4));
	return readl((void __iomem *)(APIC_BASE + offset));
}

static void apic_put(u32 offset, u32 value)
{
	if (mercury_x2apic())
		native_wrmsr(APIC_BASE_MSR + (offset >> 4), value, 0);
	else
		writel(value, (void __iomem *)(APIC_BASE + offset));
}

static size_t xsave_offset(void)
{
	return ALIGN(sizeof(struct mercury_cpu_state), 64);
}

void mercury_states_free(void)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		struct mercury_cpu_state *state = per_cpu(states, cpu);

		if (state)
			free_pages_exact(state, xsave_offset() + state->xsave_size);
		per_cpu(states, cpu) = NULL;
	}
}

static void fill_drain_table(void)
{
	unsigned long virt = (unsigned long)mercury_no_handler;
	struct desc_ptr table;
	unsigned int vector;

	store_idt(&table);
	memcpy(drain_table, (void *)table.address, min_t(size_t, table.size + 1, sizeof(drain_table)));
	for (vector = FIRST_EXTERNAL_VECTOR; vector < IDT_ENTRIES; vector++)
		drain_table[vector] = (gate_desc) {
			.offset_low = virt,
			.segment = __KERNEL_CS,
			.bits.type = GATE_INTERRUPT,
			.bits.p = 1,
			.offset_middle = virt >> 16,
			.offset_high = virt >> 32,
		};
}

static void add_bank(u32 first, u32 count)
{
	if (banked_count + count > BANKED_MAX)
		return;
	while (count--)
		banked_msrs[banked_count++] = first++;
}

/* Returns how many classes of service a resource has according to CPUID, `most` at most. */
static u32 classes(u32 leaf, u32 resource, u32 most)
{
	u32 eax, ebx, ecx, edx;

	cpuid_count(leaf, resource, &eax, &ebx, &ecx, &edx);
	return min((edx & 0xffff) + 1, most);
}

/*
 * The kernel's resource control (resctrl). How caches are divided comes before the masks: with code and data
 * apart they mean something else.
 */
static void find_resource_control(void)
{
	u32 resources;

	if (!boot_cpu_has(X86_FEATURE_RDT_A))
		return;
	resources = cpuid_eax(0) >= CPUID_RESOURCES ? cpuid_ebx(CPUID_RESOURCES) : 0;
	if (resources & BIT(1)) {
		add_bank(L3_QOS_CFG, 1);
		add_bank(L3_MASKS, classes(CPUID_RESOURCES, 1, 128));
	}
	if (resources & BIT(2)) {
		add_bank(L2_QOS_CFG, 1);
		add_bank(L2_MASKS, classes(CPUID_RESOURCES, 2, 64));
	}
	if (resources & BIT(3))
		add_bank(MBA_THROTTLES, classes(CPUID_RESOURCES, 3, 64));
	resources = cpuid_eax(0x80000000) >= CPUID_AMD_RESOURCES ? cpuid_ebx(CPUID_AMD_RESOURCES) : 0;
	if (resources & BIT(1))
		add_bank(AMD_MBA_LIMITS, classes(CPUID_AMD_RESOURCES, 1, 128));
	if (resources & BIT(2))
		add_bank(AMD_SMBA_LIMITS, classes(CPUID_AMD_RESOURCES, 2, 128));
	if (resources & AMD_HAS_EVENT_CFG)
		add_bank(AMD_EVENT_CFG, 2);
}

/*
 * Lists the user's settings of power and performance. A limit that the firmware has locked is the same
 * already.
 */
static void find_power_control(void)
{
	if (boot_cpu_data.x86_vendor == X86_VENDOR_INTEL) {
		add_bank(MSR_PKG_POWER_LIMIT, 1);
		add_bank(MSR_DRAM_POWER_LIMIT, 1);
		add_bank(MSR_PP0_POWER_LIMIT, 1);
		add_bank(MSR_PP1_POWER_LIMIT, 1);
		add_bank(PLATFORM_POWER_LIMIT, 1);
	} else if (boot_cpu_has(X86_FEATURE_CPPC)) {
		/* Requests count where they are enabled. */
		add_bank(MSR_AMD_CPPC_ENABLE, 1);
		add_bank(MSR_AMD_CPPC_REQ, 1);
	}
}

static void find_banks(void)
{
	banked_count = 0;
	find_resource_control();
	find_power_control();
}

/* Room for the state of each CPU, in memory that a snapshot keeps. */
u32 mercury_states_allocate(const struct cpumask *cpus)
{
	u32 size = 512;
	int cpu;

	if (native_read_cr4() & X86_CR4_OSXSAVE)
		size = cpuid_ebx(0xd);
	fill_drain_table();
	find_banks();
	for_each_cpu(cpu, cpus) {
		struct mercury_cpu_state *state;

		state = alloc_pages_exact(xsave_offset() + size, GFP_KERNEL | __GFP_ZERO);
		if (!state)
			return MERCURY_CODE_NO_CONTIGUOUS_MEMORY;
		state->xsave_size = size;
		per_cpu(states, cpu) = state;
	}
	return MERCURY_CODE_OK;
}

struct mercury_saved_cpu *mercury_state_of(int cpu)
{
	return &per_cpu(states, cpu)->saved;
}

static void *xsave_area(const struct mercury_cpu_state *state)
{
	return (void *)state + xsave_offset();
}

static void save_extended(struct mercury_cpu_state *state)
{
	if (!(state->saved.cr4 & X86_CR4_OSXSAVE)) {
		asm volatile("fxsaveq %0" : "=m" (*(u8 (*)[512])xsave_area(state)));
		return;
	}
	state->xcr0 = xgetbv(XCR_XFEATURE_ENABLED_MASK);
	asm volatile("xsaveq (%[area])"
		     : : [area] "r" (xsave_area(state)), "a" (-1), "d" (-1) : "memory");
}

static void load_extended(const struct mercury_cpu_state *state)
{
	if (!(state->saved.cr4 & X86_CR4_OSXSAVE)) {
		asm volatile("fxrstorq %0" : : "m" (*(u8 (*)[512])xsave_area(state)));
		return;
	}
	xsetbv(XCR_XFEATURE_ENABLED_MASK, state->xcr0);
	asm volatile("xrstorq (%[area])"
		     : : [area] "r" (xsave_area(state)), "a" (-1), "d" (-1) : "memory");
}

/* Reads MSRs from the one with the number `first` on, and notes those that the processor has. */
static __always_inline void read_msrs(const u32 *msrs, u32 first, u32 end, u64 *values, ulong *has)
{
	u32 i;

	for (i = first; i < end; i++)
		if (!rdmsrl_safe(msrs[i], &values[i]))
			__set_bit(i, has);
}

static void save_msrs(struct mercury_cpu_state *state)
{
	bitmap_zero(state->has_msr, ARRAY_SIZE(kept_msrs));
	bitmap_zero(state->has_banked, BANKED_MAX);
	/* On an attached CPU of AMD's this read exits, and is answered fast. */
	state->msr[0] = mercury_ask_efer() & ~MERCURY_EFER_ATTACHED;
	__set_bit(0, state->has_msr);
	/* Each read costs time in each snapshot: the first ones are read where they may be of use. */
	read_msrs(kept_msrs, mercury.kvm_may ? 1 : UNUSED_END, ARRAY_SIZE(kept_msrs), state->msr,
		  state->has_msr);
	read_msrs(banked_msrs, 0, banked_count, state->banked, state->has_banked);
	/* Hardware virtualization comes back for KVM only. */
	if (!mercury.kvm_may)
		state->msr[0] &= ~(u64)EFER_SVME;
}

/* Writes MSRs that were read, in their order, where the processor has another value. */
static void write_msrs(const u32 *msrs, unsigned int end, const u64 *values, const unsigned long *has)
{
	u64 value, wanted;
	unsigned int i;

	for_each_set_bit(i, has, end) {
		if (rdmsrl_safe(msrs[i], &value))
			continue;
		wanted = values[i];
		/* With a hypervisor beneath, to clear the bit is to leave it, unless it is KVM's. */
		if (msrs[i] == MSR_EFER && !mercury.kvm_may)
			wanted |= value & EFER_SVME;
		if (value != wanted)
			wrmsrl_safe(msrs[i], wanted);
	}
}

static void save_apic(struct mercury_cpu_state *state)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(kept_apic); i++)
		state->apic[i] = apic_get(kept_apic[i]);
	if (!mercury_x2apic()) {
		state->apic_ldr = apic_get(APIC_LDR);
		state->apic_dfr = apic_get(APIC_DFR);
	}
	state->has_deadline = (apic_get(APIC_LVTT) & APIC_LVT_TIMER_TSCDEADLINE) != 0;
}

/* The timer fires soon if it was to fire at all: the kernel then looks at its clock. */
static void load_apic(const struct mercury_cpu_state *state)
{
	unsigned int i;

	if (!mercury_x2apic()) {
		apic_put(APIC_DFR, state->apic_dfr);
		apic_put(APIC_LDR, state->apic_ldr);
	}
	for (i = 0; i < ARRAY_SIZE(kept_apic); i++) {
		u32 value = state->apic[i];
		bool periodic = (apic_get(APIC_LVTT) & APIC_LVT_TIMER_PERIODIC) != 0;

		if (kept_apic[i] == APIC_TMICT && value && !periodic)
			value = TIMER_SOON;
		apic_put(kept_apic[i], value);
	}
	/* The timer's mode, in memory for an xAPIC, comes before its deadline (SDM vol. 3, 11.5.4.1). */
	mb();
	if (state->has_deadline)
		wrmsrl_safe(MSR_IA32_TSC_DEADLINE, rdtsc() + TIMER_SOON_TSC);
}

/* Notes the interrupts that are pending at this CPU, before anything touches its local APIC. */
void mercury_requests_save(void)
{
	struct mercury_cpu_state *state = this_cpu_read(states);
	unsigned int i;

	for (i = 0; i < APIC_VECTOR_WORDS; i++)
		state->requests[i] = apic_get(APIC_IRR + 16 * i);
}

static bool in_hand(u32 first)
{
	u32 any = 0;
	unsigned int i;

	for (i = 0; i < APIC_VECTOR_WORDS; i++)
		any |= apic_get(first + 16 * i);
	return any;
}

/*
 * Takes all interrupts and NMIs that wait for this CPU, and handles none: they belong to the other life.
 * The caller loads the local APIC afterwards.
 */
void mercury_requests_drain(void)
{
	const struct desc_ptr drain = { sizeof(drain_table) - 1, (unsigned long)drain_table };
	struct desc_ptr table;
	unsigned int i, end;

	/* A local APIC that is switched off holds interrupts back. */
	apic_put(APIC_SPIV, apic_get(APIC_SPIV) | APIC_SPIV_APIC_ENABLED);
	apic_put(APIC_LVTT, apic_get(APIC_LVTT) | APIC_LVT_MASKED);
	apic_put(APIC_TMICT, 0);
	store_idt(&table);
	native_load_idt(&drain);
	/* The handler returns by IRET: from here on NMIs are not blocked any more. */
	asm volatile("int %0" : : "i" (FIRST_EXTERNAL_VECTOR) : "memory");
	for (i = 0; i < DRAIN_MAX && in_hand(APIC_ISR); i++)
		apic_put(APIC_EOI, 0);
	apic_put(APIC_TASKPRI, 0);
	for (i = 0; i < DRAIN_MAX && in_hand(APIC_IRR); i++) {
		asm volatile("sti; nop; nop; cli" : : : "memory");
		/* An interrupt may have come in the midst of another. */
		for (end = 0; end < DRAIN_MAX && in_hand(APIC_ISR); end++)
			apic_put(APIC_EOI, 0);
	}
	native_load_idt(&table);
}

/* Makes them pending again, when the local APIC works. */
void mercury_requests_load(void)
{
	const struct mercury_cpu_state *state = this_cpu_read(states);
	unsigned int vector;

	for (vector = 32; vector < 32 * APIC_VECTOR_WORDS; vector++) {
		if (!(state->requests[vector / 32] >> (vector % 32) & 1))
			continue;
		if (mercury_x2apic()) {
			native_wrmsr(APIC_BASE_MSR + (APIC_SELF_IPI >> 4), vector, 0);
			continue;
		}
		while (apic_get(APIC_ICR) & APIC_ICR_BUSY)
			cpu_relax();
		apic_put(APIC_ICR, APIC_DEST_SELF | APIC_DM_FIXED | vector);
	}
}

static void save_registers(struct mercury_cpu_state *state)
{
	struct mercury_saved_cpu *saved = &state->saved;
	struct desc_ptr table;

	saved->virt = (u64)saved;
	saved->cr0 = read_cr0();
	saved->cr3 = __native_read_cr3();
	saved->cr4 = native_read_cr4();
	if (mercury_cpu(smp_processor_id())->vmxe)
		saved->cr4 &= ~X86_CR4_VMXE;
	saved->fs_base = __rdmsr(MSR_FS_BASE);
	saved->gs_base = __rdmsr(MSR_GS_BASE);
	saved->kernel_gs_base = __rdmsr(MSR_KERNEL_GS_BASE);
	native_store_gdt(&table);
	saved->gdtr.limit = table.size;
	saved->gdtr.base_virt = table.address;
	store_idt(&table);
	saved->idtr.limit = table.size;
	saved->idtr.base_virt = table.address;
	store_ldt(state->ldt);
	state->dr[0] = native_get_debugreg(0);
	state->dr[1] = native_get_debugreg(1);
	state->dr[2] = native_get_debugreg(2);
	state->dr[3] = native_get_debugreg(3);
	state->dr6 = native_get_debugreg(6);
	state->dr7 = native_get_debugreg(7);
}

/* LTR wants a descriptor that is not busy. The table that the CPU uses cannot be written to. */
static void load_task_register(void)
{
	tss_desc *descriptor;
	struct desc_ptr table;

	load_direct_gdt(smp_processor_id());
	native_store_gdt(&table);
	descriptor = (void *)(table.address + GDT_ENTRY_TSS * 8);
	descriptor->type = DESC_TSS;
	asm volatile("ltr %w0" : : "q" (GDT_ENTRY_TSS * 8));
	load_fixmap_gdt(smp_processor_id());
}

static void load_registers(const struct mercury_cpu_state *state)
{
	load_task_register();
	asm volatile("lldt %w0" : : "q" (state->ldt));
	native_set_debugreg(7, 0);
	native_set_debugreg(0, state->dr[0]);
	native_set_debugreg(1, state->dr[1]);
	native_set_debugreg(2, state->dr[2]);
	native_set_debugreg(3, state->dr[3]);
	native_set_debugreg(6, state->dr6);
}

/*
 * Saves all but the registers that mercury_save() saves. That function needs its caller's stack: call it
 * with the result.
 */
struct mercury_saved_cpu *mercury_state_save(void)
{
	struct mercury_cpu_state *state = this_cpu_read(states);
	unsigned int i;

	state->saved.thread = current->pid;
	save_registers(state);
	save_msrs(state);
	save_extended(state);
	save_apic(state);
	/* Adds interrupts that came while the kernel's core was being suspended. */
	for (i = 0; i < APIC_VECTOR_WORDS; i++)
		state->requests[i] |= apic_get(APIC_IRR + 16 * i);
	return &state->saved;
}

/* Loads the rest of the state after mercury_save() has returned for the second time. */
void mercury_state_load(void)
{
	const struct mercury_cpu_state *state = this_cpu_read(states);

	load_registers(state);
	write_msrs(kept_msrs, ARRAY_SIZE(kept_msrs), state->msr, state->has_msr);
	write_msrs(banked_msrs, banked_count, state->banked, state->has_banked);
	load_extended(state);
	load_apic(state);
	native_set_debugreg(7, state->dr7);
}
