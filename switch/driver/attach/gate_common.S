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
