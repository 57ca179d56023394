/* SPDX-License-Identifier: GPL-2.0-only */
/* Macros that the gates of both vendors share, without a function or a branch on the vendor. */
#ifndef MERCURY_GATE_COMMON_S
#define MERCURY_GATE_COMMON_S

#include <linux/linkage.h>
#include <linux/objtool.h>
#include <linux/version.h>
#include <asm/asm.h>
#include <asm/msr-index.h>
#include <asm/nospec-branch.h>
#include <asm/processor-flags.h>
#include <asm/trapnr.h>
#include <asm/unwind_hints.h>

#include "../mercury_abi.h"

#define REGISTER(n)	(MERCURY_GATE_OUTWARD_REGISTERS + 8 * (n))(%rdi)
#define SELECTOR(n)	(MERCURY_GATE_OUTWARD_SELECTORS + 8 * (n))(%rdi)
#define ES	0
#define CS	1
#define SS	2
#define DS	3
#define RSP	4

/* The stack means nothing to the unwinder. */
#if KERNEL_VERSION(6, 4, 0) <= LINUX_VERSION_CODE
#define UNWIND_HINT_NONE	UNWIND_HINT_UNDEFINED
#else
#define UNWIND_HINT_NONE	UNWIND_HINT_EMPTY
#endif

/* Saves the registers of the gate's caller. */
.macro SAVE_CALLER
	pushq	%rbp
	pushq	%rbx
	pushq	%r12
	pushq	%r13
	pushq	%r14
	pushq	%r15
	pushfq
.endm

/* Notes the inward state, with the place to go on at. Afterwards RAX is CR3. */
.macro NOTE_INWARD back
	pushfq
	popq	MERCURY_GATE_INWARD_RFLAGS(%rdi)
	movq	%rsp, MERCURY_GATE_INWARD_RSP(%rdi)
	leaq	\back(%rip), %rax
	movq	%rax, MERCURY_GATE_INWARD_RIP(%rdi)
	movq	%cr4, %rdx
	movq	%rdx, MERCURY_GATE_INWARD_CR4(%rdi)
	movq	%cr3, %rax
	movq	%rax, MERCURY_GATE_INWARD_CR3(%rdi)
.endm

/* Selects PCID 0 in CR3, which is in RAX. */
.macro CLEAR_PCID
	testl	$0xfff, %eax
	jz	.Lno_pcid\@
	andq	$~0xfff, %rax
	movq	%rax, %cr3
.Lno_pcid\@:
.endm

/* Goes on in the hypervisor, in its address space. */
.macro JUMP_TO_HOST
	movq	MERCURY_GATE_HOST_CR4(%rdi), %rax
	movq	%rax, %cr4
	movq	MERCURY_GATE_HOST_CR3(%rdi), %rax
	movq	%rax, %cr3
	ANNOTATE_RETPOLINE_SAFE
	jmp	*MERCURY_GATE_ENTRY_VIRT(%rdi)
.endm

/* Returns to the gate's caller. */
.macro RETURN_TO_CALLER
	popfq
	popq	%r15
	popq	%r14
	popq	%r13
	popq	%r12
	popq	%rbx
	popq	%rbp
	ANNOTATE_UNRET_SAFE
	ret
	int3
.endm

/* Loads the outward stack, and pushes what a far return and POPF take. */
.macro PUSH_FAR_RETURN
	movl	SELECTOR(SS), %eax
	movl	%eax, %ss
	movq	REGISTER(RSP), %rsp
	pushq	SELECTOR(CS)
	pushq	MERCURY_GATE_OUTWARD_RIP(%rdi)
	pushq	MERCURY_GATE_OUTWARD_RFLAGS(%rdi)
.endm

/* Fills the area's frame for IRET, which needs none of the user's stack, and points RSP to it. */
.macro FILL_FRAME
	movq	MERCURY_GATE_OUTWARD_RIP(%rdi), %rax
	movq	%rax, (MERCURY_GATE_FRAME + 0)(%rdi)
	movq	SELECTOR(CS), %rax
	movq	%rax, (MERCURY_GATE_FRAME + 8)(%rdi)
	movq	MERCURY_GATE_OUTWARD_RFLAGS(%rdi), %rax
	movq	%rax, (MERCURY_GATE_FRAME + 16)(%rdi)
	movq	REGISTER(RSP), %rax
	movq	%rax, (MERCURY_GATE_FRAME + 24)(%rdi)
	movq	SELECTOR(SS), %rax
	movq	%rax, (MERCURY_GATE_FRAME + 32)(%rdi)
	leaq	MERCURY_GATE_FRAME(%rdi), %rsp
.endm

/* Loads a data segment that was readable a moment ago; a null selector keeps its RPL. */
.macro LOAD_SEGMENT index register
	movl	SELECTOR(\index), %eax
	testl	$0xfffc, %eax
	jz	.Lload\@
	verr	%ax
	jz	.Lload\@
	xorl	%eax, %eax
.Lload\@:
	movl	%eax, %\register
.endm

/* Does the same for FS and GS. Their bases follow. */
.macro LOAD_THREAD_SEGMENT index register
	movl	(MERCURY_GATE_OUTWARD_THREAD_SELECTORS + 8 * \index)(%rdi), %eax
	testl	$0xfffc, %eax
	jz	.Lload\@
	verr	%ax
	jz	.Lload\@
	xorl	%eax, %eax
.Lload\@:
	movl	%eax, %\register
.endm

/* Writes an MSR from 8 bytes of memory. */
.macro WRITE_MSR number:req from:vararg
	movl	$\number, %ecx
	movl	\from, %eax
	movl	4 + \from, %edx
	wrmsr
.endm

/* Writes the lower half of an MSR from memory, if it is not 0. */
.macro WRITE_MSR_IF_SET number:req from:vararg
	movl	\from, %eax
	testl	%eax, %eax
	jz	.Lwritten\@
	xorl	%edx, %edx
	movl	$\number, %ecx
	wrmsr
.Lwritten\@:
.endm

/* The outward registers but for RSP; RDI comes last. Flags stay. */
.macro LOAD_REGISTERS
	movq	REGISTER(0), %rax
	movq	REGISTER(1), %rcx
	movq	REGISTER(2), %rdx
	movq	REGISTER(3), %rbx
	movq	REGISTER(5), %rbp
	movq	REGISTER(6), %rsi
	movq	REGISTER(8), %r8
	movq	REGISTER(9), %r9
	movq	REGISTER(10), %r10
	movq	REGISTER(11), %r11
	movq	REGISTER(12), %r12
	movq	REGISTER(13), %r13
	movq	REGISTER(14), %r14
	movq	REGISTER(15), %r15
	movq	REGISTER(7), %rdi
.endm

/*
 * Overwrites the buffers that some processors leak from (MDS, TAA, RFDS, TSA) before an IRET to user mode.
 * The selector is the frame's SS: VERW overwrites whatever it finds, and IRET loads the flags.
 */
.macro VERW_BEFORE_USER
	verw	32(%rsp)
.endm

#endif /* MERCURY_GATE_COMMON_S */
