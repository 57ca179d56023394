/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The gate between the two address spaces, for Intel's VMX.
 *
 * One page of module text, mapped at the same address in the kernel's and in the hypervisor's page
 * tables, so that CR3 can change underneath it. Nothing in it is patched by the kernel: no
 * alternatives, no thunks, plain returns. switch/abi/src/gate.rs describes both ways; offsets come from
 * there.
 *
 * Interrupts are off, but NMIs cannot be held back. So the stack, the GDT and the IDT that are in use
 * while CR3 changes lie in the area, which both address spaces map at its address, and the handler of
 * NMIs lies in this page. Everything but IST would come from tables that only one of the two spaces has:
 * the handler runs on the stack in use. Section names are those of the Software Developer's Manual,
 * volume 3.
 */
#include "gate_common.S"

#define GATE_NMI(field)	(MERCURY_GATE_NMI_##field)

	.section .text.mercury_vmx, "ax", @progbits
	.balign	4096
SYM_DATA_START_LOCAL(mercury_vmx_page)
	/* Call-depth tracking looks for padding before a function. */
	.fill	64, 1, 0x90
SYM_DATA_END(mercury_vmx_page)

/*
 * u64 mercury_vmx_enter(struct mercury_gate_block *area)
 *
 * To be called with interrupts off and TF clear, and with CR4.VMXE set to attach. Returns the hypervisor's
 * RAX. If the operation was to attach, the caller goes on as the hypervisor's guest.
 */
SYM_CODE_START(mercury_vmx_enter)
	UNWIND_HINT_FUNC
	endbr64
	SAVE_CALLER

	NOTE_INWARD .Lreturned
	sgdt	MERCURY_GATE_INWARD_GDTR_LIMIT(%rdi)
	sidt	MERCURY_GATE_INWARD_IDTR_LIMIT(%rdi)

	/*
	 * The area's stack first, then its IDT: the kernel's handler of NMIs has a stack of its own and
	 * does not mind. The GDT after the IDT: the kernel's handler would miss its segments.
	 */
	UNWIND_HINT_NONE
	leaq	MERCURY_AREA_SIZE(%rdi), %rsp
	lidt	GATE_NMI(IDTR_LIMIT)(%rdi)
	lgdt	GATE_NMI(GDTR_LIMIT)(%rdi)

	/* CR4.PCIDE may only be set again while CR3 holds PCID 0 ("Control registers"). */
	CLEAR_PCID
	JUMP_TO_HOST

.Lreturned:
	UNWIND_HINT_NONE
	ANNOTATE_NOENDBR
	RETURN_TO_CALLER
SYM_CODE_END(mercury_vmx_enter)
/* A breakpoint in here would be one in an address space without the kernel's handlers. */
_ASM_NOKPROBE(mercury_vmx_enter)

/*
 * An NMI between the two worlds or in the hypervisor, on a stack of the area: noted, and back without
 * IRET. NMIs stay blocked by that, as they would be in the kernel's handler: a second one waits in the
 * processor ("Handling multiple NMIs"). The hypervisor's code has no red zone, so there is room below the
 * interrupted RSP.
 *
 * One that strikes between the hypervisor's last look at the note and its entry into the guest goes
 * back to that look.
 */
SYM_CODE_START(mercury_vmx_nmi)
	UNWIND_HINT_NONE
	endbr64
	pushq	%rax
	pushq	%rcx
	pushq	%rdx
	/* RDX, RCX, RAX; RIP at 24, CS at 32, RFLAGS at 40, RSP at 48, SS at 56. */
	movq	%rsp, %rdx
	andq	$-MERCURY_AREA_SIZE, %rdx
	incq	GATE_NMI(PENDING)(%rdx)
	movq	24(%rsp), %rcx
	cmpq	GATE_NMI(WINDOW_START_VIRT)(%rdx), %rcx
	jb	.Lresume
	cmpq	GATE_NMI(WINDOW_END_VIRT)(%rdx), %rcx
	jae	.Lresume
	movq	GATE_NMI(RESTART_VIRT)(%rdx), %rcx
.Lresume:
	movq	48(%rsp), %rax
	movq	%rcx, -8(%rax)
	movq	40(%rsp), %rcx
	movq	%rcx, -16(%rax)
	/* May have overwritten SS and RSP; where RSP goes takes the place of CS. */
	subq	$16, %rax
	movq	%rax, 32(%rsp)
	popq	%rdx
	popq	%rcx
	popq	%rax
	movq	8(%rsp), %rsp
	popfq
	ANNOTATE_UNRET_SAFE
	ret
	int3
SYM_CODE_END(mercury_vmx_nmi)
_ASM_NOKPROBE(mercury_vmx_nmi)

/*
 * The hypervisor jumps here in its own address space, out of VMX operation, RDI = area, RSP in the area's
 * stack. TR, LDTR, SYSENTER, DEBUGCTL, PAT and EFER hold the outward values already; GDTR and IDTR the
 * hypervisor's.
 */
SYM_CODE_START(mercury_vmx_leave)
	UNWIND_HINT_NONE
	endbr64
	leaq	MERCURY_AREA_SIZE(%rdi), %rsp
	/* CR0 before CR4: CR4.CET needs CR0.WP. */
	movq	MERCURY_GATE_OUTWARD_CR0(%rdi), %rax
	movq	%rax, %cr0
	/*
	 * CR4 twice, the first time with PGE inverted and PCID 0 in CR3: PGE changes whatever it was,
	 * and a change of PGE invalidates every translation of VPID 0, global ones and all PCIDs
	 * included ("Operations that invalidate TLBs and paging-structure caches").
	 */
	movq	MERCURY_GATE_OUTWARD_CR4(%rdi), %rbx
	movq	%rbx, %rax
	xorq	$X86_CR4_PGE, %rax
	andq	$~X86_CR4_PCIDE, %rax
	movq	%rax, %cr4
	movq	MERCURY_GATE_OUTWARD_CR3(%rdi), %rax
	movq	%rax, %rcx
	andq	$~0xfff, %rcx
	movq	%rcx, %cr3
	movq	%rbx, %cr4
	movq	%rax, %cr3
	/* The hypervisor's tables cannot do without NXE: a system that does gets its EFER only now. */
	WRITE_MSR_IF_SET MSR_EFER, MERCURY_GATE_OUTWARD_EFER(%rdi)
	/* Branches that are stored go through these tables. */
	WRITE_MSR_IF_SET MSR_IA32_DEBUGCTLMSR, MERCURY_GATE_OUTWARD_DEBUGCTL(%rdi)

	/* With the area's IDT still: the kernel's handler of NMIs wants all segments and bases. */
	lgdt	MERCURY_GATE_OUTWARD_GDTR_LIMIT(%rdi)
	LOAD_SEGMENT DS, ds
	LOAD_SEGMENT ES, es
	LOAD_THREAD_SEGMENT 0, fs
	LOAD_THREAD_SEGMENT 1, gs
	WRITE_MSR MSR_FS_BASE, MERCURY_GATE_OUTWARD_THREAD_BASES(%rdi)
	WRITE_MSR MSR_GS_BASE, 8 + MERCURY_GATE_OUTWARD_THREAD_BASES(%rdi)
	movq	MERCURY_GATE_OUTWARD_CR2(%rdi), %rax
	movq	%rax, %cr2
	/* NMIs are the kernel's from here on, and breakpoints too. */
	lidt	MERCURY_GATE_OUTWARD_IDTR_LIMIT(%rdi)
	movq	MERCURY_GATE_OUTWARD_DR6(%rdi), %rax
	movq	%rax, %dr6
	movq	MERCURY_GATE_OUTWARD_DR7(%rdi), %rax
	movq	%rax, %dr7

	/*
	 * An NMI that was noted on the way is raised now. NMIs have been blocked since. The IRET of the
	 * kernel's handler ends that, and NMIs that wait in the processor follow.
	 */
.Lreplay:
	cmpq	$0, GATE_NMI(PENDING)(%rdi)
	je	.Lreplayed
	decq	GATE_NMI(PENDING)(%rdi)
	int	$X86_TRAP_NMI
	jmp	.Lreplay
.Lreplayed:
	/*
	 * A machine check that the hypervisor took is the kernel's to judge: the vector has a stack of its
	 * own, its entry trusts neither GS nor CR3, and the banks say the rest.
	 */
	cmpq	$0, MERCURY_GATE_MACHINE_CHECK(%rdi)
	je	.Lraised
	movq	$0, MERCURY_GATE_MACHINE_CHECK(%rdi)
	int	$X86_TRAP_MC
.Lraised:
	testl	$3, SELECTOR(CS)
	jnz	.Lby_frame
	/* Between SYSCALL and the kernel's own stack RSP is the user's still. */
	cmpq	$0, REGISTER(RSP)
	jns	.Lby_frame

	/* A far return, not IRET, which would unblock NMIs ("Nonmaskable interrupt"). */
	PUSH_FAR_RETURN
	LOAD_REGISTERS
	popfq
	lretq

	/*
	 * An exit of user mode, or on a user's stack, that ends in a detach. Neither runs with NMIs
	 * blocked, so IRET is right; it must not touch the user's stack.
	 */
.Lby_frame:
	FILL_FRAME
	LOAD_REGISTERS
	VERW_BEFORE_USER
	iretq
	int3
SYM_CODE_END(mercury_vmx_leave)
_ASM_NOKPROBE(mercury_vmx_leave)

	/* The hypervisor maps one page: more than that does not assemble. */
	.org	mercury_vmx_page + 4096, 0xcc
