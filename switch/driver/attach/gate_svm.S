/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The gate between the two address spaces, for AMD's SVM.
 *
 * One page of module text, mapped at the same address in the kernel's and in the hypervisor's page
 * tables, so that CR3 can change underneath it. Nothing in it is patched by the kernel: no
 * alternatives, no thunks, plain returns. switch/abi/src/gate.rs describes both ways; offsets come from
 * there.
 *
 * GIF is 0 from the first instruction that matters to the last but few: no interrupt, NMI or debug
 * exception strikes while the two worlds are mixed. Section numbers are those of the AMD64 Manual,
 * volume 2.
 */
#include "gate_common.S"

#define EFER_SVME_BIT	12

	.section .text.mercury_svm, "ax", @progbits
	.balign	4096
SYM_DATA_START_LOCAL(mercury_svm_page)
	/* Call-depth tracking looks for padding before a function. */
	.fill	64, 1, 0x90
SYM_DATA_END(mercury_svm_page)

/*
 * u64 mercury_svm_enter(struct mercury_gate_block *area)
 *
 * To be called with interrupts off, EFER.SVME set and TF clear. Returns the hypervisor's RAX. If the
 * operation was to attach, the caller goes on as the hypervisor's guest.
 */
SYM_CODE_START(mercury_svm_enter)
	UNWIND_HINT_FUNC
	endbr64
	SAVE_CALLER

	clgi
	NOTE_INWARD .Lreturned

	/* CR4.PCIDE may only be cleared, and is set again, while CR3 holds PCID 0 (5.5.1). */
	CLEAR_PCID
	/* From here to the hypervisor's own stack, RSP points to memory that it does not map. */
	JUMP_TO_HOST

.Lreturned:
	UNWIND_HINT_NONE
	ANNOTATE_NOENDBR
	RETURN_TO_CALLER
SYM_CODE_END(mercury_svm_enter)
/* A breakpoint in here would be one in an address space without the kernel's handlers. */
_ASM_NOKPROBE(mercury_svm_enter)

/*
 * Sets GIF and switches SVM off, and raises a machine check that the hypervisor took. Everything is in its
 * place, but for the registers. KVM may have left SVM on, and GIF clear besides.
 */
.macro GO_NATIVE
	cmpl	$0, MERCURY_GATE_OUTWARD_SVM(%rdi)
	jne	.Lshared\@
	/* STGI needs SVME (15.17); NMIs come from here on. */
	stgi
	movl	$MSR_EFER, %ecx
	rdmsr
	btrl	$EFER_SVME_BIT, %eax
	wrmsr
.Lnative\@:
	cmpq	$0, MERCURY_GATE_MACHINE_CHECK(%rdi)
	je	.Lraised\@
	/*
	 * It is the kernel's to judge: the vector has a stack of its own, its entry trusts neither GS nor
	 * CR3, and the banks say the rest.
	 */
	movq	$0, MERCURY_GATE_MACHINE_CHECK(%rdi)
	int	$X86_TRAP_MC
	jmp	.Lraised\@
.Lshared\@:
	testl	$MERCURY_KEEP_GIF_CLEAR, MERCURY_GATE_OUTWARD_SVM(%rdi)
	jnz	.Lnative\@
	stgi
	jmp	.Lnative\@
.Lraised\@:
.endm

/*
 * The hypervisor jumps here in its own address space, GIF = 0, RDI = area. FS, GS, TR, LDTR, the
 * syscall MSRs and PAT hold the outward values already.
 */
SYM_CODE_START(mercury_svm_leave)
	UNWIND_HINT_NONE
	endbr64
	/* CR0 before CR4: CR4.CET needs CR0.WP. */
	movq	MERCURY_GATE_OUTWARD_CR0(%rdi), %rax
	movq	%rax, %cr0
	/*
	 * CR4 twice, the first time with PGE inverted and PCID 0 in CR3: PGE changes whatever it
	 * was, and a change of PGE flushes every translation of address-space identifier 0, global
	 * ones and all PCIDs included (5.5.2).
	 */
	movq	MERCURY_GATE_OUTWARD_CR4(%rdi), %rbx
	movq	%rbx, %rax
	xorq	$X86_CR4_PGE, %rax
	movq	%rax, %cr4
	movq	MERCURY_GATE_OUTWARD_CR3(%rdi), %rax
	movq	%rax, %cr3
	movq	%rbx, %cr4

	lgdt	MERCURY_GATE_OUTWARD_GDTR_LIMIT(%rdi)
	lidt	MERCURY_GATE_OUTWARD_IDTR_LIMIT(%rdi)
	LOAD_SEGMENT DS, ds
	LOAD_SEGMENT ES, es
	movq	MERCURY_GATE_OUTWARD_CR2(%rdi), %rax
	movq	%rax, %cr2
	movq	MERCURY_GATE_OUTWARD_DR6(%rdi), %rax
	movq	%rax, %dr6
	movq	MERCURY_GATE_OUTWARD_DR7(%rdi), %rax
	movq	%rax, %dr7

	testl	$3, SELECTOR(CS)
	jnz	.Lby_frame
	/* Between SYSCALL and the kernel's own stack RSP is the user's still. */
	cmpq	$0, REGISTER(RSP)
	jns	.Lby_frame

	/* A far return, not IRET, which would unblock NMIs (8.2.3). */
	PUSH_FAR_RETURN
	GO_NATIVE
	LOAD_REGISTERS
	popfq
	lretq

	/*
	 * An exit of user mode, or on a user's stack, that ends in a detach. Neither runs with NMIs blocked,
	 * so IRET is right; it must not touch the user's stack. SS stays null until IRET loads it: an NMI's
	 * own IRET would fault on a selector that only the hypervisor's GDT has.
	 */
.Lby_frame:
	xorl	%eax, %eax
	movl	%eax, %ss
	FILL_FRAME
	GO_NATIVE
	LOAD_REGISTERS
	VERW_BEFORE_USER
	iretq
	int3
SYM_CODE_END(mercury_svm_leave)
_ASM_NOKPROBE(mercury_svm_leave)

	/* The hypervisor maps one page: more than that does not assemble. */
	.org	mercury_svm_page + 4096, 0xcc
