// SPDX-License-Identifier: GPL-2.0-only
/*
 * MSRs and the whole readable state of a CPU, read without the driver. Tests compare the state with the
 * driver's report, and with the CPU's state at another time. A kernel thread reads it, so that no part
 * belongs to a task of user space.
 */
#include <linux/crc32.h>
#include <linux/processor.h>
#include <asm/asm.h>
#include <asm/cpufeature.h>
#include <asm/debugreg.h>
#include <asm/desc.h>
#include <asm/fpu/xcr.h>
#include <asm/msr.h>
#include <asm/special_insns.h>
#include <asm/tlbflush.h>

#include "mercury_test.h"

#define MSR_SMCA_BANK_0		0xc0002000
#define MSR_SMCA_BANK_0_CONFIG	0xc0002004
#define MSR_TSC_RATIO_AMD	0xc0000104

struct msr_access {
	u32 index;
	bool write;
	u64 value;
	int fault;
};

static void access_msr(void *argument)
{
	struct msr_access *access = argument;

	if (access->write)
		access->fault = wrmsrl_safe(access->index, access->value) ? 1 : 0;
	else
		access->fault = rdmsrl_safe(access->index, &access->value) ? 1 : 0;
}

static int report_msr(struct test_answer *answer, u64 cpu, struct msr_access *access)
{
	int err = test_on_cpu(cpu, access_msr, access);

	test_say(answer, "value %#llx\nfault %d\n", access->fault ? 0 : access->value, access->fault);
	return err;
}

/* rdmsr CPU INDEX: reads an MSR */
int test_rdmsr(struct test_answer *answer, const u64 *arguments)
{
	struct msr_access access = { .index = arguments[1] };

	return report_msr(answer, arguments[0], &access);
}

/* wrmsr CPU INDEX VALUE: writes an MSR */
int test_wrmsr(struct test_answer *answer, const u64 *arguments)
{
	struct msr_access access = { .index = arguments[1], .write = true, .value = arguments[2] };

	return report_msr(answer, arguments[0], &access);
}

static void clear_cr4(void *bits)
{
	cr4_clear_bits_irqsoff(*(u64 *)bits);
}

/* clear-cr4 CPU BITS: clears bits of CR4, in the kernel's own copy too */
int test_clear_cr4(struct test_answer *answer, const u64 *arguments)
{
	u64 bits = arguments[1];
	int err = test_on_cpu(arguments[0], clear_cr4, &bits);

	test_say(answer, "cleared %#llx\n", bits);
	return err;
}

static void vmxoff(void *fault)
{
	/* KVM does the same; natively the instruction is undefined. */
	asm volatile goto("1: vmxoff\n" _ASM_EXTABLE(1b, %l[undefined]) : : : "cc", "memory" : undefined);
	cr4_clear_bits_irqsoff(X86_CR4_VMXE);
	return;
undefined:
	*(int *)fault = 1;
}

/* vmxoff CPU: executes VMXOFF */
int test_vmxoff(struct test_answer *answer, const u64 *arguments)
{
	int fault = 0, err = test_on_cpu(arguments[0], vmxoff, &fault);

	test_say(answer, "fault %d\n", fault);
	return err;
}

static const u32 msrs[] = {
	MSR_EFER, MSR_STAR, MSR_LSTAR, MSR_CSTAR, MSR_SYSCALL_MASK, MSR_IA32_SYSENTER_CS,
	MSR_IA32_SYSENTER_ESP, MSR_IA32_SYSENTER_EIP, MSR_FS_BASE, MSR_GS_BASE, MSR_KERNEL_GS_BASE,
	MSR_TSC_AUX, MSR_IA32_CR_PAT, MSR_IA32_APICBASE, MSR_IA32_MISC_ENABLE,
	MSR_IA32_DEBUGCTLMSR, MSR_IA32_MCG_CAP, MSR_IA32_MCG_STATUS, MSR_IA32_XSS, MSR_AMD64_SYSCFG,
	MSR_K7_HWCR, MSR_K8_TOP_MEM1, MSR_K8_TOP_MEM2, MSR_VM_CR, MSR_VM_HSAVE_PA,
	MSR_TSC_RATIO_AMD, MSR_AMD64_PATCH_LEVEL, MSR_MTRRcap, MSR_MTRRdefType,
	MSR_MTRRfix64K_00000, MSR_MTRRfix16K_80000, MSR_MTRRfix16K_A0000, MSR_MTRRfix4K_C0000,
	MSR_MTRRfix4K_F8000, 0x200, 0x201, 0x202, 0x203, 0x204, 0x205, MSR_SMCA_BANK_0,
	MSR_SMCA_BANK_0_CONFIG,
};

static void say_msrs(struct test_answer *answer)
{
	unsigned int i;
	u64 value;

	for (i = 0; i < ARRAY_SIZE(msrs); i++) {
		if (rdmsrl_safe(msrs[i], &value))
			test_say(answer, "msr_%x faults\n", msrs[i]);
		else
			test_say(answer, "msr_%x %#llx\n", msrs[i], value);
	}
}

static void say_control(struct test_answer *answer)
{
	unsigned long dr[4];

	get_debugreg(dr[0], 0);
	get_debugreg(dr[1], 1);
	get_debugreg(dr[2], 2);
	get_debugreg(dr[3], 3);
	test_say(answer, "cr0 %#lx\ncr4 %#lx\n", native_read_cr0(), native_read_cr4());
	test_say(answer, "dr0 %#lx\ndr1 %#lx\ndr2 %#lx\ndr3 %#lx\ndr6 %#lx\ndr7 %#lx\n", dr[0], dr[1],
		 dr[2], dr[3], native_get_debugreg(6), native_get_debugreg(7));
	if (native_read_cr4() & X86_CR4_OSXSAVE)
		test_say(answer, "xcr0 %#llx\n", xgetbv(XCR_XFEATURE_ENABLED_MASK));
	test_say(answer, "rflags %#lx\n", native_save_fl() & (X86_EFLAGS_IF | X86_EFLAGS_AC |
		 X86_EFLAGS_NT | X86_EFLAGS_IOPL | X86_EFLAGS_DF | X86_EFLAGS_TF));
}

#define SAY_SEGMENT(answer, name)						\
do {										\
	u32 _selector, _access = 0, _limit = 0;					\
										\
	asm volatile("mov %%" #name ", %0" : "=r" (_selector));			\
	asm volatile("lar %1, %0" : "+r" (_access) : "r" (_selector) : "cc");	\
	asm volatile("lsl %1, %0" : "+r" (_limit) : "r" (_selector) : "cc");	\
	test_say(answer, #name " %x,%x,%x\n", _selector & 0xffff, _access, _limit);	\
} while (0)

/* Registers, and the contents of the tables that they point to. */
static void say_tables(struct test_answer *answer)
{
	struct desc_ptr gdt, idt;
	unsigned long tr, ldtr;
	u32 limit = 0;

	native_store_gdt(&gdt);
	store_idt(&idt);
	asm volatile("str %0" : "=r" (tr));
	asm volatile("sldt %0" : "=r" (ldtr));
	asm volatile("lsl %1, %0" : "+r" (limit) : "r" ((u32)tr) : "cc");
	test_say(answer, "gdtr %lx,%x\nidtr %lx,%x\ntr %lx,%x\nldtr %lx\n", gdt.address, gdt.size,
		 idt.address, idt.size, tr & 0xffff, limit, ldtr & 0xffff);
	test_say(answer, "gdt %u\nidt %u\n", crc32_le(~0, (void *)gdt.address, gdt.size + 1),
		 crc32_le(~0, (void *)idt.address, idt.size + 1));
}

static void say_state(void *argument)
{
	struct test_answer *answer = argument;

	/* An interrupt in user mode leaves 0 in SS, a system call does not. SS stays so until the next entry. */
	loadsegment(ss, __KERNEL_DS);
	say_control(answer);
	say_tables(answer);
	SAY_SEGMENT(answer, cs);
	SAY_SEGMENT(answer, ss);
	SAY_SEGMENT(answer, ds);
	SAY_SEGMENT(answer, es);
	SAY_SEGMENT(answer, fs);
	SAY_SEGMENT(answer, gs);
	say_msrs(answer);
}

/* state CPU: prints the CPU's state */
int test_state(struct test_answer *answer, const u64 *arguments)
{
	return test_on_cpu(arguments[0], say_state, answer);
}
